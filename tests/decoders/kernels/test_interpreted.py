"""Every kernel equals its reference, without a GPU: Triton's interpreter runs them in a process of its own.

The interpreter must be chosen before Triton is imported, and other tests of this process may have imported it already.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra gpu)")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kernels_equal_their_references_under_the_interpreter(pytestconfig):
    more = ["--soak"] if pytestconfig.getoption("--soak") else []
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER), *more],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=1180,
    )
    passed = re.search(r"^(\d+) passed", result.stdout.splitlines()[-1] if result.stdout else "")
    assert result.returncode == 0 and passed and int(passed[1]) > 0, result.stdout[-6000:] + result.stderr[-2000:]
