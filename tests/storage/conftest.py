"""Stores of every kind for one test body, and an S3 server in this process."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.failpoints import VARIABLE, reset_failpoints
from storage.s3 import S3Store
from storage.store import open_store
from storage.verbs import S3Options, Store
from tests.storage.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test-secret", AWS_DEFAULT_REGION="us-east-1")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_server(s3_session: S3Server) -> Iterator[S3Server]:
    s3_session.calm()
    yield s3_session
    s3_session.calm()


@pytest.fixture
def s3_options(s3_server: S3Server) -> S3Options:
    return S3Options(endpoint=s3_server.endpoint, region="us-east-1")


@pytest.fixture
def s3_url(s3_server: S3Server, s3_options: S3Options) -> str:
    """A prefix in a bucket of this test's own."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    S3Store("s3://any", s3_options)._client.create_bucket(Bucket=bucket)
    s3_server.calm()
    return f"s3://{bucket}/runs/one"


@pytest.fixture
def s3_store(s3_url: str, s3_options: S3Options) -> S3Store:
    """A store that does not wait between attempts."""
    return S3Store(s3_url, s3_options, sleep=lambda _: None)


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return request.getfixturevalue("s3_store")
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def failpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reset_failpoints()
    yield
    monkeypatch.delenv(VARIABLE, raising=False)
    reset_failpoints()
