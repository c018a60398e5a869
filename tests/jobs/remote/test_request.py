"""What a submitted job takes along, and what is refused because the cluster could not find it: always by the key to change."""

import subprocess

import pytest
import yaml

from draftmill.actors.task import Complete
from draftmill.jobs.config.spec import JobSpec, check_spec, load_spec
from draftmill.jobs.remote.submit import EXCLUDES, SubmitOptions, request_of
from draftmill.storage.errors import UserError
from draftmill.version import ROOT
from tests.jobs.specs import completion


def spec(**changes) -> JobSpec:
    data = completion(name="job", input={"path": "rows/*.jsonl"}, output={"path": "s3://bucket/run"})
    return check_spec(data | changes)


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The working folder, with rows, a model and a metric."""
    for name in ("rows/a.jsonl", "model/config.json", "my_metric.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shipped_spec(request) -> dict:
    """The checked mapping of the spec in the job's command, which stands between two lines."""
    data = dict(yaml.safe_load(request.entrypoint.split("\n", 1)[1].rpartition("\n")[0]))
    check_spec(dict(data))
    return data


def test_paths_in_the_shipped_folder_become_relative_to_it(folder, monkeypatch):
    data = spec(
        input={"path": ["rows/*.jsonl", str(folder / "rows" / "a.jsonl")]},
        model={"path": "./model"},
        metrics=["my_metric.py", {"kind": "file", "name": "again", "path": str(folder / "my_metric.py")}],
    )
    found = shipped_spec(request_of(data, SubmitOptions(working_dir=".")))
    assert found["input"]["path"] == ["rows/*.jsonl", "rows/a.jsonl"]
    assert found["model"]["path"] == "model"
    assert [metric["path"] for metric in found["metrics"]] == ["my_metric.py", "my_metric.py"]
    monkeypatch.chdir(folder / "rows")
    inside = request_of(spec(input={"path": "a.jsonl"}), SubmitOptions(working_dir=str(folder)))
    assert shipped_spec(inside)["input"]["path"] == "rows/a.jsonl"


def test_shared_folders_buckets_and_the_hub_need_no_shipping(folder):
    data = spec(
        input={"path": "/mnt/all/rows.jsonl"}, model={"path": "org/model"}, output={"path": "/mnt/all/../all/runs/one"}
    )
    request = request_of(data, SubmitOptions(shared=("/mnt/all",), code="installed"))
    assert shipped_spec(request)["output"]["path"] == "/mnt/all/runs/one"
    assert not request.environment.keys() & {"working_dir", "py_modules"}


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({}, {}, "input.path"),
        ({"input": {"path": ["s3://b/a.jsonl", "rows/a.jsonl"]}}, {}, "input.path.1"),
        ({"input": {"path": "/etc/hosts"}}, {"working_dir": "."}, "input.path"),
        ({"input": {"path": "../a.jsonl"}}, {"working_dir": "."}, "input.path"),
        ({"input": {"path": "data/big.bin"}}, {"working_dir": "."}, "input.path"),
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
    ],
)
def test_what_the_cluster_could_not_use_is_refused_by_its_key(changes, options, field, folder):
    with pytest.raises(UserError, match=f"^({field}): "):
        request_of(spec(**changes), SubmitOptions(**options))


def test_the_command_writes_the_spec_and_becomes_the_driver(folder, tmp_path):
    data = spec(name='it\'s $HOME `x` \\ "q"')
    request = request_of(data, SubmitOptions(working_dir=".", grace_s=20, run=("--if-running", "skip")))
    stand_in = "python -c 'import os, sys; print(os.getppid()); print(open(sys.argv[2]).read(), sys.argv[3:])'"
    command = request.entrypoint.replace("python -P -m draftmill.jobs.cli", stand_in)
    shell = subprocess.Popen(["sh", "-c", f"TMPDIR={tmp_path}; {command}"], stdout=subprocess.PIPE, text=True)
    output = shell.communicate(timeout=60)[0]
    parent, _, rest = output.partition("\n")
    text, _, options = rest.rpartition(" [")
    assert int(parent) != shell.pid, "the shell has become the driver"
    assert yaml.safe_load(text) == shipped_spec(request)
    assert options.strip("]\n") == "'--ray-address', 'auto', '--grace-seconds', '20', '--if-running', 'skip'"


def environment_file(folder, **keys) -> str:
    path = folder / "env.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def test_a_runtime_environment_is_handed_on_with_our_variables(folder):
    file = environment_file(folder, env_vars={"A": "b"}, pip=["x==1"], working_dir="rows", excludes=["*.tmp"])
    found = request_of(spec(input={"path": "rows/a.jsonl"}), SubmitOptions(runtime_env=file))
    assert shipped_spec(found)["input"]["path"] == "a.jsonl"
    environment = found.environment
    assert environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "45", "fifteen seconds more than its grace"
    assert (environment["env_vars"]["A"], environment["pip"]) == ("b", ["x==1"])
    assert environment["working_dir"] == str(folder / "rows")
    assert {*EXCLUDES, "*.tmp"} <= set(environment["excludes"])
    other = request_of(spec(), SubmitOptions(runtime_env=file, working_dir=".")).environment
    assert other["working_dir"] == str(folder), "the option comes first"


def test_a_text_that_could_be_a_number_arrives_as_a_text(folder):
    request = request_of(spec(task={"kind": "complete", "stop": ["1e3", "yes"]}), SubmitOptions(working_dir="."))
    (folder / "sent.yaml").write_text(request.entrypoint.split("\n", 1)[1].rpartition("\n")[0])
    task = load_spec(folder / "sent.yaml").task
    assert isinstance(task, Complete) and task.stop == ("1e3", "yes")


def test_an_image_comes_with_its_own_code(folder):
    options = SubmitOptions(runtime_env=environment_file(folder, image_uri="registry/draftmill:1"))
    request = request_of(spec(input={"path": "s3://b/a.jsonl"}), options)
    assert set(request.environment) == {"image_uri", "env_vars"}
    assert "exec draftmill run" in request.entrypoint


def test_secrets_in_a_runtime_environment_are_refused(folder):
    file = environment_file(folder, env_vars={"AWS_SECRET_ACCESS_KEY": "x"})
    with pytest.raises(UserError, match=r"^--runtime-env: AWS_SECRET_ACCESS_KEY would be readable"):
        request_of(spec(), SubmitOptions(working_dir=".", runtime_env=file))


def test_the_code_travels_with_the_models_that_the_spec_names_and_no_others(folder):
    environment = request_of(spec(), SubmitOptions(working_dir=".")).environment
    assert environment["py_modules"] == [str(ROOT / "draftmill")]
    assert "/decoders/builtin/mdm-tiny/" in environment["excludes"]
    assert "/decoders/builtin/ar-tiny/" not in environment["excludes"]
