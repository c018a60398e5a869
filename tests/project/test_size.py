"""A checkout is small enough for machines that take 64 MiB: model weights and golden data are most of it."""

import subprocess

from tests.conftest import ROOT

LARGEST = 58 * 2**20


def test_tracked_files_have_at_most_58_mib():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = {name: (ROOT / name).lstat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
    assert sizes.keys() >= {"README.md", "pyproject.toml"}
    assert sum(sizes.values()) <= LARGEST, "compress golden data (tests/golden_data.py); the largest: " + ", ".join(
        largest
    )
