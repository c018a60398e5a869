"""The image and the manifest name what the project has: real files, a real command, the pinned versions."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "infra" / "kuberay-rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest


def containers(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = rayjob["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def dockerfile() -> str:
    return (ROOT / "infra" / "Dockerfile").read_text()


def test_entrypoint_is_a_command_that_the_program_has(rayjob: dict[str, Any]) -> None:
    program, command, spec, *options = shlex.split(rayjob["spec"]["entrypoint"])
    module, function = PYPROJECT["project"]["scripts"][program].split(":")
    workdir = re.findall(r"^WORKDIR (\S+)$", dockerfile(), re.MULTILINE)[-1]
    assert (ROOT / Path(spec).relative_to(workdir)).is_file()
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    result = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for option in options[::2]:
        assert option in result.stdout


def test_output_is_on_a_store_that_all_pods_share(rayjob: dict[str, Any]) -> None:
    assert "--set output.path=s3://" in rayjob["spec"]["entrypoint"]


def test_one_image_and_the_pinned_ray(rayjob: dict[str, Any]) -> None:
    assert {container["image"] for container in containers(rayjob)} == {f"draftmill:{PYPROJECT['project']['version']}"}
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == PINS["ray"]


def test_dockerfile_copies_what_exists_and_is_let_through() -> None:
    """Every source of a COPY exists and is named in .dockerignore, which excludes all else."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [name for line in re.findall(r"^COPY (.*)$", dockerfile(), re.MULTILINE) for name in line.split()[:-1]]
    assert set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore


def test_dockerfile_runs_the_program_without_root() -> None:
    assert re.findall(r'^ENTRYPOINT \["(\S+)"\]$', dockerfile(), re.MULTILINE) == ["draftmill"]
    assert "draftmill" in PYPROJECT["project"]["scripts"]
    assert re.findall(r"^USER (\S+)$", dockerfile(), re.MULTILINE) == ["draftmill"]


def test_every_dependency_is_pinned() -> None:
    project = PYPROJECT["project"]
    names = [
        re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")  # type: ignore[union-attr]
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    ]
    assert set(names) <= {name.lower().replace("_", "-") for name in PINS}
    assert not [version for version in PINS.values() if "+" in version]
