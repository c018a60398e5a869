"""What every test shares: an environment set before ray or torch is imported, one local Ray, the golden data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    # Ray turns token authentication on by default and writes a token file into the home folder; a cluster that listens
    # on the loopback address alone (the third variable) needs neither.
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    # Child processes see neither pytest's `pythonpath` nor changes to sys.path.
    PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    AWS_EC2_METADATA_DISABLED="true",
)
# One torch thread: small matrices gain nothing from more, and Ray's actors run beside us on the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[ModuleType]:
    """A local Ray with two CPUs, started once; yields the `ray` module."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data: what the original public code computed, one folder per model family."""
    return ROOT / "tests" / "data"
