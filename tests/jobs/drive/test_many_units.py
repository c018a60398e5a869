"""A job of very many units takes the driver little memory, from its plan to its manifest."""

import json
import subprocess
import sys

import pytest

MB_PER_MILLION = 750.0
"""Measured with 300,000 units: 640. The manifest, 230 bytes a unit, is written and read as a whole."""

MB_ALWAYS = 60.0
"""What does not depend on the number of units: a window of rows, and blocks of columns."""


def taken(units: int) -> dict[str, float]:
    """Peak memory of each step in a process of its own, in MB above that of a small job."""
    code = [sys.executable, "-m", "tests.jobs.drive.many_units", str(units)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_job_of_many_units_is_planned_resumed_decoded_and_closed_in_little_memory():
    units = 60_000
    found = taken(units)
    assert list(found) == ["begin", "planned", "loaded", "closed", "read"]
    assert found["read"] < MB_ALWAYS + MB_PER_MILLION * units / 1e6, found


@pytest.mark.soak
@pytest.mark.timeout(1300)  # alone two minutes
def test_a_million_units_take_the_driver_less_than_750_megabytes():
    assert taken(1_000_000)["read"] < MB_PER_MILLION
