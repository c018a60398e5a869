"""docs/guarantees.md and docs/differences.md have tests for each of their claims; each of them exists."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = yaml.safe_load((ROOT / "tests" / "project" / "guarantee_tests.yaml").read_text())


def missing(named):
    """Those of the tests, `path` or `path::name`, that do not exist."""
    pairs = [test.partition("::") for test in sorted(named)]
    return [
        f"{path}::{name}"
        for path, _, name in pairs
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]


def test_every_test_of_a_guarantee_or_fault_exists():
    named = {test for tests in TESTS.values() for test in tests}
    assert len(named) > 100 and sum("::" in test for test in named) > 60
    assert not missing(named)
    assert missing(["tests/project/test_guarantees.py::test_none", "tests/test_none.py"]) != []


def test_every_test_that_a_document_names_exists():
    text = (ROOT / "docs" / "differences.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", text))
    assert len(named) > 20
    assert not missing(named)


def test_every_file_of_tests_that_a_document_names_exists():
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "add-a-decoder.md"]
    named = {(page.name, path) for page in pages for path in re.findall(r"[\w/]+/test_\w+\.py", page.read_text())}
    assert named
    assert not [(page, path) for page, path in named if not (ROOT / "tests" / path.removeprefix("tests/")).is_file()]


def test_every_guarantee_and_fault_has_a_test_and_every_entry_is_one():
    tables = "".join(re.findall(r"^\|.*\| what you lose \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    faults = re.findall(r"^\| (.*?) \| ", tables, re.MULTILINE)
    guarantees = re.findall(r"^- \*\*(.*?)\.\*\* ", PAGE, re.MULTILINE)
    assert len(faults) > 35 and len(guarantees) > 25
    assert sorted(faults + guarantees) == sorted(TESTS)
    assert all(TESTS.values())
