"""Stores of every kind for one test body."""

import secrets

import pytest

from draftmill.storage.failpoints import VARIABLE, reset_failpoints
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import S3Options, Store, open_store


@pytest.fixture
def s3_store(s3_url: str, s3_options: S3Options) -> S3Store:
    """A store that does not wait between attempts."""
    return S3Store(s3_url, s3_options, sleep=lambda _: None)


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path) -> Store:
    if request.param == "s3":
        return request.getfixturevalue("s3_store")
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def failpoints(monkeypatch: pytest.MonkeyPatch):
    reset_failpoints()
    yield
    monkeypatch.delenv(VARIABLE, raising=False)
    reset_failpoints()
