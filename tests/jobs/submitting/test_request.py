"""What a submitted job takes along, and what is refused because the cluster could not find it: always by the key to change."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.jobs.driving.ray_session import ROOT
from draftmill.jobs.spec.job_spec import check_spec
from draftmill.jobs.submitting.request import (
    SubmitOptions,
    code_files,
    folder_files,
    package_files,
    request_of,
    requirements,
    write_package,
)
from draftmill.storage.errors import UserError


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "job",
        "task": {"kind": "complete"},
        "input": {"path": "rows/*.jsonl"},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "speculative"},
        "output": {"path": "s3://bucket/run"},
    } | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with rows, a model, a metric and files that nobody wants to ship."""
    for name in (
        "rows/a.jsonl",
        "model/config.json",
        "my_metric.py",
        ".env",
        ".git/config",
        "data/big.bin",
        "notes/a.tmp",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("data/\n")
    (tmp_path / "notes" / ".rayignore").write_text("*.tmp\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shipped_spec(request: Any) -> dict[str, Any]:
    """The checked mapping of the spec in the job's command, which stands between two lines."""
    data = dict(yaml.safe_load(request.entrypoint.split("\n", 1)[1].rpartition("\n")[0]))
    check_spec(dict(data))
    return data


def test_a_folder_travels_without_what_is_ignored_or_secret(folder: Path):
    assert set(folder_files(folder)) == {
        ".gitignore", "rows/a.jsonl", "model/config.json", "my_metric.py", "notes/.rayignore"
    }  # fmt: skip
    assert set(folder_files(folder, ["model/", "/my_*"])) == {".gitignore", "rows/a.jsonl", "notes/.rayignore"}


def test_paths_in_the_shipped_folder_become_relative_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    data = spec(
        input={"path": ["rows/*.jsonl", str(folder / "rows" / "a.jsonl")]},
        model={"path": "./model"},
        metrics=["my_metric.py", {"kind": "file", "name": "again", "path": str(folder / "my_metric.py")}],
    )
    found = shipped_spec(request_of(data, SubmitOptions(working_dir=".")))
    assert found["input"]["path"] == ["rows/*.jsonl", "rows/a.jsonl"]
    assert found["model"]["path"] == "model"
    assert found["metrics"] == ["my_metric.py", {"kind": "file", "name": "again", "path": "my_metric.py"}]
    monkeypatch.chdir(folder / "rows")
    inside = request_of(spec(input={"path": "a.jsonl"}), SubmitOptions(working_dir=str(folder)))
    assert shipped_spec(inside)["input"]["path"] == "rows/a.jsonl"
    assert data["model"]["path"] == "./model", "the caller's mapping stays as it is"


def test_shared_folders_buckets_and_the_hub_need_no_shipping(folder: Path):
    data = spec(
        input={"path": "/mnt/all/rows.jsonl"}, model={"path": "org/model"}, output={"path": "/mnt/all/../all/runs/one"}
    )
    request = request_of(data, SubmitOptions(shared=("/mnt/all",), code="installed"))
    assert shipped_spec(request)["output"]["path"] == "/mnt/all/runs/one"
    assert not request.files


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({}, {}, "input.path"),
        ({"input": {"path": ["s3://b/a.jsonl", "rows/a.jsonl"]}}, {}, "input.path.1"),
        ({"input": {"path": "/etc/hosts"}}, {"working_dir": "."}, "input.path"),
        ({"input": {"path": "../a.jsonl"}}, {"working_dir": "."}, "input.path"),
        ({"input": {"path": "data/big.bin"}}, {"working_dir": "."}, "input.path"),
        ({"input": {"path": "rows/*.jsonl"}}, {"working_dir": ".", "excludes": ("rows/",)}, "input.path"),
        ({"model": {"path": "./other"}}, {"working_dir": "."}, "model.path"),
        ({"model": {"path": "model"}}, {"shared": ("/nowhere",)}, "model.path|input.path"),
        ({"model": {"path": "org/m", "tokenizer": "/tok"}}, {"working_dir": "."}, "model.tokenizer"),
        ({"metrics": ["other.py"]}, {"working_dir": "."}, "metrics.0.path"),
        (
            {"task": {"kind": "complete", "constraint": {"json_schema": "schema.json"}}},
            {"working_dir": "."},
            "task.constraint.json_schema",
        ),
        ({"output": {"path": "runs/one"}}, {"working_dir": "."}, "output.path"),
        ({"output": {"path": "memory://x"}}, {"working_dir": "."}, "output.path"),
        ({}, {"working_dir": "nowhere"}, "--working-dir"),
        ({}, {"working_dir": ".", "shared": ("here",)}, "--shared"),
        ({}, {"working_dir": ".", "env": ("AWS_SECRET_ACCESS_KEY",)}, "--env"),
        ({}, {"working_dir": ".", "env": ("NOT_SET_ANYWHERE",)}, "--env"),
        ({}, {"working_dir": ".", "env": ("a-b=c",)}, "--env"),
        ({}, {"working_dir": ".", "image": "i"}, "--image"),
        ({"input": {"path": "s3://b/a"}}, {"image": "i", "pip": ("x",)}, "--image"),
        ({"input": {"path": "s3://b/a"}}, {"image": "i", "code": "ship"}, "--image"),
        ({}, {"excludes": ("x",)}, "--exclude"),
    ],
)
def test_what_the_cluster_could_not_use_is_refused_by_its_key(changes, options, field, folder: Path):
    with pytest.raises(UserError, match=f"^({field}): "):
        request_of(spec(**changes), SubmitOptions(**options))


def test_the_command_writes_the_spec_and_becomes_the_driver(folder: Path, tmp_path: Path):
    data = spec(name='it\'s $HOME `x` \\ "q"')
    request = request_of(data, SubmitOptions(working_dir=".", grace_s=20, run=("--if-running", "skip")))
    stand_in = "python -c 'import os, sys; print(os.getppid()); print(open(sys.argv[2]).read(), sys.argv[3:])'"
    command = request.entrypoint.replace("python -m draftmill.jobs.cli", stand_in)
    shell = subprocess.Popen(["sh", "-c", f"TMPDIR={tmp_path}; {command}"], stdout=subprocess.PIPE, text=True)
    output = shell.communicate(timeout=60)[0]
    parent, _, rest = output.partition("\n")
    text, _, options = rest.rpartition(" [")
    assert int(parent) != shell.pid, "the shell has become the driver"
    assert yaml.safe_load(text) == shipped_spec(request)
    assert options.strip("]\n") == "'--ray-address', 'auto', '--grace-seconds', '20', '--if-running', 'skip'"


def test_the_driver_has_fifteen_seconds_more_than_its_grace_to_stop(folder: Path):
    found = request_of(spec(), SubmitOptions(working_dir=".", env=("A=b",), pip=("x==1",))).environment
    assert found["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "45"
    assert found["env_vars"]["A"] == "b"
    assert found["pip"] == ["x==1"]


def test_an_image_comes_with_its_own_code_and_nothing_beside_it():
    request = request_of(spec(input={"path": "s3://b/a.jsonl"}), SubmitOptions(image="registry/draftmill:1"))
    assert set(request.environment) == {"image_uri", "env_vars"}
    assert "exec draftmill run" in request.entrypoint
    assert not request.files


def test_the_code_travels_with_the_models_that_the_spec_names_and_no_others():
    names = set(code_files(spec()))
    assert {"draftmill/jobs/cli.py", "draftmill/decoders/builtin/ar-tiny/model.safetensors"} <= names
    assert not any(name.startswith("draftmill/decoders/builtin/mdm-tiny") or "__pycache__" in name for name in names)
    assert sum(path.stat().st_size for path in code_files(spec()).values()) < 12 * 2**20


def test_a_shipped_package_has_the_same_bytes_for_the_same_content(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    out = tmp_path_factory.mktemp("out")
    write_package(folder_files(folder), out / "a.zip")
    os.utime(folder / "rows" / "a.jsonl", (1.0, 1.0))
    write_package(folder_files(folder), out / "b.zip")
    assert (out / "a.zip").read_bytes() == (out / "b.zip").read_bytes()


def test_too_much_is_refused_with_the_largest_files(folder: Path):
    with pytest.raises(UserError, match=r"maximum is 10 bytes; the largest are model/config.json \(17 bytes\), "):
        package_files({}, folder_files(folder), max_bytes=10)


def test_a_folder_with_a_package_of_the_same_name_is_refused_and_our_own_checkout_is_not(folder: Path):
    (folder / "draftmill").mkdir()
    (folder / "draftmill" / "mine.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"'draftmill/mine.py' would mix"):
        package_files(code_files(spec()), folder_files(folder))
    name = "draftmill/jobs/cli.py"
    assert package_files(code_files(spec()), {name: ROOT / "jobs" / "cli.py"})[name] == ROOT / name


def test_a_folder_may_have_files_named_as_our_folders(folder: Path):
    (folder / "jobs").mkdir()
    (folder / "jobs" / "mine.py").write_text("x = 1")
    (folder / "storage.py").write_text("x = 1")
    files = package_files(code_files(spec()), folder_files(folder))
    assert {"jobs/mine.py", "storage.py", "draftmill/jobs/cli.py", "draftmill/storage/errors.py"} <= files.keys()


def test_requirements_that_refer_to_files_of_this_machine_are_refused(tmp_path: Path):
    file = tmp_path / "requirements.txt"
    file.write_text("# pins\nnumpy==2 # why\n\nscipy>=1\n")
    assert requirements([str(file)]) == ("numpy==2", "scipy>=1")
    file.write_text("-r other.txt\n")
    with pytest.raises(UserError, match=r"--requirements: .*'-r other.txt' refers to a file of this machine"):
        requirements([str(file)])
