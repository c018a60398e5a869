"""docs/reliability.md and docs/differences.md have tests for each of their claims; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TESTS = yaml.safe_load((ROOT / "tests" / "project" / "fault_tests.yaml").read_text())


def missing(named):
    """Those of the tests `path::name` that do not exist."""
    pairs = sorted(test.split("::") for test in named)
    return [f"{path}::{name}" for path, name in pairs if f"def {name}(" not in (ROOT / path).read_text()]


def test_every_test_of_a_fault_exists():
    named = {test for tests in TESTS.values() for test in tests}
    assert len(named) > 30
    assert not missing(named)


def test_every_test_that_a_document_names_exists():
    text = (ROOT / "docs" / "differences.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", text))
    assert len(named) > 20
    assert not missing(named)


def test_every_file_of_tests_that_a_document_names_exists():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "add-a-decoder.md"]
    named = {(page.name, path) for page in pages for path in re.findall(r"[\w/]+/test_\w+\.py", page.read_text())}
    assert len({page for page, _ in named}) > 3
    assert not [(page, path) for page, path in named if not (ROOT / "tests" / path.removeprefix("tests/")).is_file()]


def test_every_row_of_the_tables_of_faults_has_a_test_and_every_entry_is_a_row():
    faults, _, _ = (ROOT / "docs" / "reliability.md").read_text().partition("## How much is tried")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in faults.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != "fault"]
    assert len(rows) > 20
    assert rows == list(TESTS)
    assert all(TESTS.values())
