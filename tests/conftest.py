"""What every test shares: an environment set before ray or torch is imported, one local Ray, an S3 server, golden data."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from draftmill.storage.stores.store import S3Options

if TYPE_CHECKING:
    from tests.storage.stores.s3_server import S3Server

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    # Ray turns token authentication on by default and writes a token file into the home folder; a cluster that listens
    # on the loopback address alone (the third variable) needs neither.
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    # By default workers give way to everything else, and starve beside tests that run in another process.
    RAY_worker_niceness="0",
    # Child processes see neither pytest's `pythonpath` nor changes to sys.path.
    PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    AWS_EC2_METADATA_DISABLED="true",
    # For the S3 server of the tests. Ray's workers inherit them only if they are there when Ray starts.
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test-secret",
    AWS_DEFAULT_REGION="us-east-1",
)
# One torch thread: small matrices gain nothing from more, and Ray's actors run beside us on the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--soak` is what `make soak` adds."""
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, too")


def pytest_configure(config: pytest.Config) -> None:
    """What hypothesis makes up is the same in every `make test`, so that it judges a change; `make soak` looks further."""
    hypothesis.settings.register_profile("test", derandomize=True, database=None, deadline=None)
    if not config.getoption("--soak"):
        hypothesis.settings.load_profile("test")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not want
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow all but one in n cases of a test with the mark `one_in(n)`, and with `one_in(n, soak=m)` as soak all but one
    in m; leave out `soak` without its option."""
    cases = Counter[str]()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker("slow")
                if cases[test] % mark.kwargs.get("soak", 1):
                    item.add_marker("soak")
            cases[test] += 1
    if config.getoption("--soak"):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    items[:] = [item for item in items if item not in soak]
    config.hook.pytest_deselected(items=soak)


@pytest.fixture(scope="session")
def ray_session():
    """A local Ray with two CPUs, started once; yields the `ray` module."""
    import ray

    start_ray()
    yield ray
    ray.shutdown()


def start_ray() -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def pytest_runtest_call(item: pytest.Item) -> None:
    """Start Ray again for a test that uses it, where a test before needed another Ray in this process, or ended it."""
    if "ray_session" in getattr(item, "fixturenames", ()):
        import ray

        if not ray.is_initialized():
            start_ray()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data: what the original public code computed, one folder per model family."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def s3_session():
    """An S3 server in this process, for the session; moto takes a second to import."""
    from tests.storage.stores.s3_server import S3Server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_server(s3_session: S3Server):
    """The server without faults of other tests."""
    s3_session.calm()
    yield s3_session
    s3_session.calm()


@pytest.fixture(scope="session")
def s3_options(s3_session: S3Server) -> S3Options:
    return S3Options(endpoint=s3_session.endpoint, region="us-east-1")


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A prefix in a bucket of this test's own."""
    bucket = s3_server.new_bucket()
    s3_server.calm()
    return f"s3://{bucket}/runs/one"
