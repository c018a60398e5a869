"""What the commands import: the driver needs a tokenizer and JSON, so no torch and no transformers, which take seconds."""

import json
import subprocess
import sys

import pytest
import yaml

from draftmill.jobs.cli import main
from tests.conftest import ROOT
from tests.runs.jobs_here import run, without_ray

HEAVY = ("torch", "transformers", "sklearn", "scipy", "datasets")
WATCH = f"""
import atexit, sys
from draftmill.jobs.cli import main
code = main(sys.argv[1:])
found = sorted(set({HEAVY!r}) & set(sys.modules)) + (["ray"] if "ray" in sys.modules and sys.argv[1] != "run" else [])
sys.exit(f"imported {{found}}" if found else 0 if code == 0 else f"exit code {{code}}")
"""
PLAN = f"""
import sys
from pathlib import Path
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import resolve
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.config.spec import load_spec
from draftmill.storage.stores.store import open_store
spec = load_spec(sys.argv[1], [])
store = open_store(spec.output.path)
plan = make_plan(resolve(spec, store), store, Display())
found = sorted(set({HEAVY!r}) & set(sys.modules))
sys.exit(f"imported {{found}}" if found else 0 if plan.rows == 3 else "no plan")
"""
BUILTIN = {
    "ar-tiny": ({"kind": "complete", "max_new_tokens": 4}, {"kind": "autoregressive"}),
    "asarm-tiny": ({"kind": "infill", "mask": {"kind": "random", "rate": 0.5}}, {"kind": "assd"}),
    "mdm-tiny": ({"kind": "infill", "mask": {"kind": "spans"}}, {"kind": "stepwise"}),
    "fim-tiny": ({"kind": "infill", "mask": {"kind": "lines"}}, {"kind": "jacobi"}),
    "block-tiny": ({"kind": "complete", "max_new_tokens": 4}, {"kind": "block_diffusion"}),
}


def write_job(folder, model: str = "ar-tiny", **changes):
    """Three rows and a spec."""
    task, decoder = BUILTIN[model]
    rows = [{"id": str(number), "text": f"def f{number}(x):\n    return x\n"} for number in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "task": task,
        "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "text": "text"}},
        "model": {"path": f"builtin:{model}", "device": "cpu"},
        "decoder": decoder,
        "output": {"path": str(folder / "run")},
    } | changes
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def check(code: str, *arguments: str) -> None:
    """Run Python on the code, which exits with what it found."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        assert run(yaml.safe_load(write_job(folder).read_text()), folder / "job.yaml") == 0
    return folder


def test_help_imports_neither_torch_nor_ray():
    for arguments in ([], ["run"], ["status"]):
        code = f"{WATCH}".replace(
            "code = main(sys.argv[1:])", "code = 0\ntry: main(sys.argv[1:])\nexcept SystemExit: pass"
        )
        check(code, *arguments, "--help")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["status", "verify", "models"])
def test_commands_that_only_read_import_neither_torch_nor_ray(finished, command):
    check(WATCH, command, *([] if command == "models" else [str(finished / "run")]))


@pytest.mark.slow
def test_metrics_of_texts_are_measured_here_without_torch_and_ray(finished):
    check(WATCH, "measure", str(finished / "run"), "--local", "--quiet", "--metric", "length", "distinct")


@pytest.mark.parametrize("form", ["openai", "jsonl", "csv", "parquet"])
@pytest.mark.slow
def test_export_imports_neither_torch_nor_ray(finished, form, tmp_path):
    check(WATCH, "export", str(finished / "run"), "--format", form, "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.slow
def test_a_plan_is_made_without_torch(tmp_path, model):
    check(PLAN, str(write_job(tmp_path, model)))


@pytest.mark.slow
def test_a_run_that_has_nothing_to_do_starts_nothing(finished):
    check(WATCH, "run", str(finished / "job.yaml"))


@pytest.mark.slow
def test_a_finished_sweep_starts_nothing(tmp_path):
    job = yaml.safe_load(write_job(tmp_path).read_text())
    del job["output"]
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": job, "cases": {"a": {}}, "output": {"path": str(tmp_path / "out")}}))
    assert main(["sweep", str(path), "--local", "--quiet"]) == 0
    check(WATCH.replace('!= "run"', '!= ""'), "sweep", str(path))


@pytest.mark.slow
def test_a_bad_spec_is_refused_without_torch(tmp_path):
    path = write_job(tmp_path, decoder={"kind": "assd"})
    check(WATCH.replace("if code == 0", "if code == 2"), "run", str(path))
