"""The layout holds: imports go one way, files say what they hold, links lead somewhere, and a checkout is small."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs.make_map import first_line, rooms

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*/README.md"),
    *(ROOT / "benchmarks").glob("*.md"),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["name"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}

# A line that breaks a contract when it is appended to the file: (file, line, the contract's name).
ROOMS = "the rooms of decoders: imports go down, families know nothing of each other"
LAYERS = "jobs > actors | infra > decoders | storage"
BREACHES = [
    ("decoders/settings.py", "import draftmill.storage", LAYERS),
    ("decoders/settings.py", "import draftmill.actors", LAYERS),
    ("storage/__init__.py", "import draftmill.decoders", LAYERS),
    ("storage/__init__.py", "import draftmill.jobs", LAYERS),
    ("actors/__init__.py", "import draftmill.jobs", LAYERS),
    ("actors/__init__.py", "import draftmill.infra", LAYERS),
    ("infra/__init__.py", "import draftmill.jobs", LAYERS),
    ("decoders/backbones/heads/markov.py", "import ray", "decoders know nothing of Ray, stores or jobs"),
    ("decoders/backbones/heads/markov.py", "import boto3", "decoders know nothing of Ray, stores or jobs"),
    ("storage/__init__.py", "import torch", "storage knows nothing of models"),
    (
        "decoders/settings.py",
        "import draftmill.decoders.backbones.heads.markov",
        "the decoders' nouns and settings load without torch",
    ),
    ("decoders/causal/jacobi.py", "import torch", "decoders are plain Python"),
    ("jobs/plan/plan.py", "import torch", "the driver imports no torch and no transformers"),
    ("actors/rows/row.py", "import draftmill.decoders.draws.noise", "the driver imports no torch and no transformers"),
    ("decoders/causal/jacobi.py", "import draftmill.decoders.masked.stepwise", ROOMS),
    ("decoders/blocks/settings.py", "import draftmill.decoders.settings", ROOMS),
    ("decoders/engine/budget.py", "import draftmill.decoders.causal.speculative", ROOMS),
    ("decoders/draws/noise.py", "import draftmill.decoders.backbones.cache", ROOMS),
    ("decoders/kernels/attention.py", "import draftmill.decoders.backbones.cache", ROOMS),
    ("decoders/kernels/sampling.py", "import draftmill.decoders.engine.samples", ROOMS),
    ("decoders/backbones/cache.py", "import draftmill.decoders.draws.noise", "models know nothing of draws"),
    ("jobs/schedule/scheduler.py", "import time", "the scheduler knows no Ray, clock, disk or threads"),
    ("jobs/schedule/units.py", "import threading", "the scheduler knows no Ray, clock, disk or threads"),
    ("jobs/plan/plan.py", "import draftmill.jobs.drive.totals", "the rooms of jobs: imports go down"),
    ("actors/metrics/settings.py", "import torch", "the driver imports no torch and no transformers"),
    ("jobs/run/session.py", "import draftmill.jobs.compare.compare", "the rooms of jobs: imports go down"),
    ("actors/rows/row.py", "import draftmill.actors.loop.runner", "the rooms of actors: imports go down"),
    ("actors/loop/runner.py", "import draftmill.actors.ray.pool", "the rooms of actors: imports go down"),
    ("actors/task.py", "import draftmill.actors.job", "the rooms of actors: imports go down"),
    ("storage/stores/s3.py", "import draftmill.storage.inputs.rows", "the rooms of storage: imports go down"),
    ("jobs/__init__.py", "import recipes", "what the wheel holds imports nothing that stays in the checkout"),
]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of `folder`/pyproject.toml over the packages in `folder`."""
    command = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def breaches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each broken contract, of a copy of the packages with all forbidden lines: one run finds all of them."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PYPROJECT["tool"]["importlinter"]["root_packages"]:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    for file, line, _ in BREACHES:
        with (folder / "draftmill" / file).open("a") as source:
            source.write(f"\n{line}\n")
    result = lint_imports(folder)
    assert result.returncode == 1, result.stdout + result.stderr
    _, told = result.stdout.split("Broken contracts\n", 1)
    parts = re.split(r"^(.+)\n-{3,}\n", told, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_import_layers_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@pytest.mark.parametrize(("file", "line", "contract"), BREACHES, ids=[f"{file}: {line}" for file, line, _ in BREACHES])
def test_a_forbidden_import_is_found(breaches, file, line, contract):
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = f"draftmill.{module} -> {line.removeprefix('import ')}"
    assert re.search(rf"{re.escape(found)}\b[^.]", breaches[contract]), breaches[contract]


def test_every_contract_can_break(breaches):
    assert set(breaches) == CONTRACTS


@pytest.mark.slow
def test_every_file_says_what_it_holds():
    files = [*(path for room in rooms() for path in room.glob("*.py")), *(ROOT / "tests").rglob("*.py")]
    undescribed = [path.relative_to(ROOT).as_posix() for path in files if path.stat().st_size and not first_line(path)]
    assert not undescribed, f"the docstring's first line says what a file holds; it is missing in {undescribed}"


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


LARGEST = 58 * 2**20


def test_tracked_files_have_at_most_58_mib():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = {name: (ROOT / name).lstat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
    assert sizes.keys() >= {"README.md", "pyproject.toml"}
    assert sum(sizes.values()) <= LARGEST, "compress golden data (tests/golden_data.py); the largest: " + ", ".join(
        largest
    )
