"""The wheel works outside of a checkout: in an environment of its own, beside a user's folders with the names of ours."""

import os
import subprocess
import sys
import sysconfig

import pytest
import yaml

from tests.conftest import ROOT
from tests.runs.jobs_of_tests import write_namesakes

HERE = "import pathlib, sys, draftmill.jobs.cli as cli; print(pathlib.Path(cli.__file__).parents[2])"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory):
    """A virtual environment with the wheel of this checkout, and what it depends on from this test's own environment."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    # A path alone: the .pth files of that folder, which may name a checkout, are not read.
    (packages_of(folder / "venv") / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv"


def packages_of(venv):
    return next((venv / "lib").glob("python*")) / "site-packages"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A user's folder: a spec, and files and a package with the names of our folders, which can't be imported."""
    place = tmp_path_factory.mktemp("user")
    write_namesakes(place)
    (place / "prompts.csv").write_text("id,question\na,def is_prime(n):\n")
    spec = {
        "task": {"kind": "complete", "max_new_tokens": 4},
        "input": {"path": "prompts.csv", "columns": {"id": "id", "prompt": "question"}},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "speculative"},
        "output": {"path": "runs/first"},
    }
    (place / "job.yaml").write_text(yaml.safe_dump(spec))
    return place


def call(environment, folder, program: str, *arguments: str) -> str:
    """What a program of the environment prints, run in the user's folder, as a user's shell would run it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(environment / "bin" / program), *arguments]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_package_is_the_installed_one(environment, folder):
    assert call(environment, folder, "python", "-c", HERE).strip() == str(packages_of(environment))
    assert "usage: draftmill" in call(environment, folder, "draftmill", "--help")
    packages = packages_of(environment)
    assert {path.name for path in packages.iterdir() if "." not in path.name} <= {"draftmill", "__pycache__"}
    folders = {
        "jobs",
        "actors",
        "decoders",
        "storage",
        "infra",
        "__init__.py",
        "constraints.txt",
        "py.typed",
        "version.py",
    }
    assert {path.name for path in (packages / "draftmill").iterdir()} - {"__pycache__"} == folders


@pytest.mark.slow
def test_a_job_runs_beside_a_users_folders_of_the_same_names(environment, folder):
    call(environment, folder, "draftmill", "run", "job.yaml", "--local", "--quiet")
    assert "4 tokens in " in call(environment, folder, "draftmill", "show", "runs/first")
    call(environment, folder, "draftmill", "show", "runs/first", "--html", "rows.html")
    code = "import draftmill; print(*[row['id'] for row in draftmill.open_run('runs/first').rows()])"
    assert call(environment, folder, "python", "-c", code) == "a\n"


@pytest.mark.slow
def test_a_users_own_folder_is_imported_under_its_own_name(environment, folder):
    code = "import draftmill.storage.errors\ntry:\n    import storage\nexcept RuntimeError as error:\n    print(error)"
    assert call(environment, folder, "python", "-c", code) == "storage.py is the user's\n"
