"""docs/reliability.md and docs/differences.md name a test for each of their claims; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("document", "least"), [("reliability.md", 30), ("differences.md", 20)])
def test_every_test_that_a_document_names_exists(document, least):
    text = (ROOT / "docs" / document).read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text))
    assert len(named) > least
    missing = [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def test_every_file_of_tests_that_a_document_names_exists():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "add-a-decoder.md"]
    named = {(page.name, path) for page in pages for path in re.findall(r"[\w/]+/test_\w+\.py", page.read_text())}
    assert len({page for page, _ in named}) > 3
    assert not [(page, path) for page, path in named if not (ROOT / "tests" / path.removeprefix("tests/")).is_file()]


def test_every_row_of_the_table_of_faults_names_a_test():
    faults, _, _ = (ROOT / "docs" / "reliability.md").read_text().partition("## How much is tried")
    lines = faults.splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| fault")]
    assert len(rows) > 20
    assert not [row for row in rows if "::test_" not in row]
