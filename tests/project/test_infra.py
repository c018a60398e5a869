"""The images install and name what the project has, as non-root; the manifest is what the command writes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftmill.jobs.cli import main
from tests.jobs.remote.validators import docker_problems

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(text: str) -> dict[str, str]:
    """The versions in lines `name==version`."""
    pairs = [line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


PINS = pinned((ROOT / "constraints.txt").read_text())


DOCKERFILES = [ROOT / "infra" / "Dockerfile", ROOT / "infra" / "Dockerfile.cuda"]
BOTH = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


EXAMPLE = [
    "examples/infill_stdlib.yaml", "--for", "rayjob",
    "--set", "output.path=s3://my-bucket/stdlib-infill", "--set", "workers={count: 2, cpus: 4}",
]  # fmt: skip
"""The arguments of `draftmill manifest` that write infra/kuberay-rayjob.yaml."""


def test_the_manifest_is_what_the_command_writes(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["manifest", *EXAMPLE]) == 0
    assert capsys.readouterr().out == (ROOT / "infra" / "kuberay-rayjob.yaml").read_text()
    assert shlex.join(["draftmill", "manifest", *EXAMPLE]) in (ROOT / "infra" / "README.md").read_text()


def test_the_pins_are_those_that_torchs_cuda_build_requires():
    """The metadata of the wheel that pip takes from PyPI; this environment may have the CPU build, which requires no Triton."""
    wheel = json.loads((ROOT / "tests/data/torch/requires.json").read_text())
    assert wheel["version"] == PINS["torch"], "record the metadata of the new version, as the file says"
    on_linux = {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.11", "extra": ""}
    needed = [
        one
        for line in wheel["requires_dist"]
        if (one := Requirement(line)).marker is None or one.marker.evaluate(on_linux)
    ]
    assert "triton" in {one.name for one in needed}
    wrong = [
        f"{one}, pinned {pin}"
        for one in needed
        if (pin := PINS.get(canonicalize_name(one.name))) and pin not in one.specifier
    ]
    assert wrong == []


@BOTH
def test_hadolint_has_nothing_to_say(dockerfile):
    assert docker_problems(dockerfile) == []


@BOTH
def test_dockerfile_copies_what_exists_and_is_let_through(dockerfile):
    """Every source of a COPY exists and is named in .dockerignore, which excludes all else."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        name for line in re.findall(r"^COPY (.*)$", dockerfile.read_text(), re.MULTILINE) for name in line.split()[:-1]
    ]
    assert {"draftmill", *(link.name for link in (ROOT / "draftmill").iterdir() if link.is_symlink())} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_install_steps_of_the_image_run_in_a_clean_environment(tmp_path):
    """WORKDIR, COPY and RUN pip of the Dockerfile, in an empty folder with a new Python environment; then the program runs there.

    Root's steps (apt, the user) need a container. torch comes from where pip finds it here: the build argument exists for that.
    """
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    app = tmp_path / "app"
    app.mkdir()
    variables = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    variables |= {
        "PATH": f"{environment}/bin:/usr/bin:/bin",
        "TORCH_INDEX": "file:///nowhere",
        "RAY_AUTH_MODE": "disabled",
    }

    def call(command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command], cwd=app, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    for step, rest in re.findall(r"^(COPY|RUN) (.*)$", DOCKERFILES[0].read_text(), re.MULTILINE):
        if step == "COPY":
            copy(rest.split(), app)
        elif rest.startswith("pip "):
            call(rest)
    run = f"draftmill run {app}/examples/complete.yaml --local --quiet --set input.limit=2 --set output.path={tmp_path}/run"
    call(f"cd {tmp_path} && {run}")
    call(f"cd {tmp_path} && draftmill verify {tmp_path}/run")
    assert call(
        f"cd {tmp_path} && python -c 'import draftmill.infra.health as health; print(health.__file__)'"
    ).startswith(str(environment))
    installed = pinned(call("pip freeze"))
    assert {name: version.partition("+")[0] for name, version in installed.items()}.items() <= PINS.items()


def copy(words: list[str], app: Path) -> None:
    """COPY into the working directory, as .dockerignore lets it through."""
    *sources, target = words
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, app / target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, app / target)


def test_every_dependency_is_pinned():
    project = PYPROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {canonicalize_name(Requirement(one).name) for one in needed} <= PINS.keys()
    assert not [version for version in PINS.values() if "+" in version]
