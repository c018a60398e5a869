"""docs/add-a-decoder.md, followed step by step in a copy of the project: the decoder that it adds runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"<!-- (new|append|insert): (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the steps done."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "draftmill", folder / "draftmill", symlinks=True)
    for name in ("jobs", "actors", "decoders", "storage", "infra"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (folder / "tests" / "decoders" / "causal").mkdir(parents=True)
    shutil.copytree(ROOT / "tests" / "decoders" / "references", folder / "tests" / "decoders" / "references")
    for name in ("support.py", "enumeration.py", "regions.py"):
        shutil.copy(ROOT / "tests" / "decoders" / name, folder / "tests" / "decoders")
    steps = STEP.findall((ROOT / "docs" / "add-a-decoder.md").read_text())
    assert [kind for kind, _, _ in steps] == ["append", "insert", "new", "new"]
    for kind, name, text in steps:
        path = folder / name
        if kind == "new":
            assert not path.exists()
            path.write_text(text)
        elif kind == "append":
            path.write_text(f"{path.read_text()}\n\n{text}")
        else:
            path.write_text(inserted(path.read_text(), text.splitlines(keepends=True)))
    return folder


def inserted(before: str, diff: list[str]) -> str:
    """A text with the lines of a diff that begin with + put after those that begin with a space, which stand in it once."""
    place = "".join(line[1:] for line in diff if line.startswith(" "))
    assert before.count(place) == 1, f"the page inserts something after {place!r}"
    return before.replace(place, "".join(line[1:] for line in diff))


def run(project: Path, *arguments: str) -> str:
    """The output of a Python process in the copy; it must end with 0."""
    environment = os.environ | {"PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_test_passes(project):
    said = run(project, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "tests")
    assert "5 passed" in said


def test_the_rest_of_the_project_knows_it(project):
    said = run(project, "-m", "draftmill.jobs.cli", "models")
    family = next(line for line in said.splitlines() if line.split()[:1] == ["llama"])
    assert family.endswith(", repeat") or ", repeat," in family
    assert re.search(r"repeat +Drafts copies of the last token\.\n +settings: length", said)
