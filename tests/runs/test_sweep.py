"""Whole sweeps with one worker in this process: equal to single runs, planned once, resumable, and wrong cases fail alone."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.text import load_tokenizer
from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.jobs.cli import main
from draftmill.jobs.exit_codes import INTERRUPTED, Ended
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.plan.resolve import make_job, resolved_of
from draftmill.storage.runs.metric_files import read_metrics
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import open_store
from tests.jobs.run.recurring_jobs import drive
from tests.runs.jobs_of_tests import GOLDEN, contents, forked, job_over, logged, rows_of, unequal, write_rows

CASES: dict[str, dict] = {
    "sequential": {"decoder": {"kind": "any_subset"}},
    "k2": {"decoder.k": 2},
    "cold": {"sampling": {"temperature": 0.5}},
}


def write_sweep(folder: Path, cases: dict, *, out: Path | str | None = None, **sections) -> Path:
    """A sweep file over 12 rows; `sections` replace whole sections of the base."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, 12)
    data = {"base": job_over(rows, **sections), "cases": cases, "output": {"path": str(out or folder / "out")}}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def sweep(path: Path, *more: str) -> int:
    return main(["sweep", str(path), "--local", "--quiet", *more])


def plan_of(run: Path) -> Plan:
    plan = load_plan(open_store(str(run)))
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    assert sweep(write_sweep(folder, CASES)) == 0
    return folder


@pytest.mark.slow
def test_every_case_equals_a_run_of_its_spec_alone(finished, tmp_path):
    for name, changes in CASES.items():
        spec = job_over(finished / "rows.jsonl")
        for key, value in changes.items():
            section, _, inner = key.partition(".")
            spec[section] = spec[section] | {inner: value} if inner else value
        spec["output"] = spec["output"] | {"path": str(tmp_path / name)}
        (tmp_path / "alone.yaml").write_text(yaml.safe_dump(spec))
        assert main(["run", str(tmp_path / "alone.yaml"), "--local", "--quiet"]) == 0
        case = finished / "out" / "cases" / name
        assert unequal(rows_of(case), rows_of(tmp_path / name)) == []
        ours, alone = plan_of(case), plan_of(tmp_path / name)
        assert (ours.fingerprint, ours.files, ours.parts) == (alone.fingerprint, alone.files, alone.parts)
        assert [table.equals(other) for table, other in zip(ours.tables(), alone.tables(), strict=True)] == [True] * 3


def test_every_case_is_a_complete_run_directory(finished, tmp_path, capsys):
    for name in CASES:
        run = str(finished / "out" / "cases" / name)
        assert main(["verify", run]) == 0
        assert main(["status", run]) == 0
        assert "finished" in capsys.readouterr().out
        assert main(["export", run, "--format", "jsonl", "--out", str(tmp_path / f"{name}.jsonl")]) == 0
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) == 12
    assert main(["status", str(finished / "out")]) == 0
    assert f": {len(CASES)} runs" in capsys.readouterr().out
    assert main(["verify", str(finished / "out")]) == 2
    assert f"is a sweep; its run directories are {finished}/out/cases/NAME" in capsys.readouterr().err
    listed = json.loads((finished / "out" / "sweep.json").read_text())
    assert [(case["name"], case["path"], case["changes"]) for case in listed["cases"]] == [
        (name, f"cases/{name}", changes) for name, changes in CASES.items()
    ]


def test_a_case_goes_on_by_itself_with_draftmill_run(finished, tmp_path):
    """Its spec is in its plan."""
    copy = tmp_path / "case"
    shutil.copytree(finished / "out" / "cases" / "k2", copy)
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000001.parquet"):
        (copy / name).unlink()
    spec = json.loads((copy / "_plan.json").read_text())["spec"] | {"output": {"path": str(copy), "unit_rows": 4}}
    (tmp_path / "k2.yaml").write_text(yaml.safe_dump(spec))
    assert main(["run", str(tmp_path / "k2.yaml"), "--local", "--quiet"]) == 0
    assert unequal(rows_of(copy), rows_of(finished / "out" / "cases" / "k2")) == []


def test_a_finished_sweep_is_left_as_it_is_and_its_table_shown_again(finished, capsys):
    before = contents(finished / "out")
    assert sweep(finished / "sweep.yaml") == 0
    assert contents(finished / "out") == before
    out = capsys.readouterr().out
    assert "is already finished" in out
    lines = [line.split() for line in out.splitlines()]
    heading = lines.index(["case", "samples", "tokens/s", "NFE/token", "acceptance", "failed"])
    shown = {line[0]: line[1:] for line in lines[heading + 1 : heading + 4]}
    assert list(shown) == list(CASES)
    for name, (samples, _, nfe, acceptance, failed) in shown.items():
        rows = rows_of(finished / "out" / "cases" / name).to_pylist()
        tokens, proposed = sum(row["new_tokens"] for row in rows), sum(row["proposed"] for row in rows)
        assert (samples, failed) == ("12", "0")
        assert nfe == f"{sum(row['nfe'] for row in rows) / tokens:.3f}"
        assert acceptance == (f"{sum(row['accepted'] for row in rows) / proposed:.1%}" if proposed else "-")
    (command,) = [line.removeprefix("compare them: draftmill ") for line in out.splitlines() if "compare them" in line]
    assert main([*command.split(), "--json"]) == 0
    assert "k2" in capsys.readouterr().out


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch):
    """How many rows were read and tokenized for planning, in batches."""
    from draftmill.actors.planning import surveying

    counts: list[int] = []
    original = surveying._measure_batch

    def counting(reading, maker, batch):
        counts.append(len(batch.rows))
        return original(reading, maker, batch)

    monkeypatch.setattr(surveying, "_measure_batch", counting)
    yield counts


def texts(folder: Path) -> dict:
    """Sections of a job over six short texts of which half of the tokens are masked."""
    rows = [{"id": f"t{number}", "text": f"def f{number}(x):\n    return x + {number}\n"} for number in range(6)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}},
        "input": {"path": str(folder / "texts.jsonl")},
        "model": {"path": "builtin:asarm-tiny", "device": "cpu"},
    }


def canvases(run: Path) -> dict[str, tuple[int, list[int]]]:
    """Key and canvas of every row, as a worker makes them."""
    plan = plan_of(run)
    spec = plan.spec
    folder = GOLDEN if spec.model.tokenizer == "none" else Path("decoders/builtin/asarm-tiny").absolute()
    from draftmill.decoders.backbones.checkpoint import inspect_model

    job = make_job(resolved_of(plan), plan)
    unit_io = RowUnitIO(
        job, tokenizer=load_tokenizer(folder, spec.model.tokenizer), info=inspect_model(folder), worker="w", node="n"
    )
    found = {}
    for size in plan.sizes():
        unit = WorkUnit(1, size.unit, size.rows, size.tokens, attempt=1, pass_=1, start=0, stop=size.rows)
        for sample in unit_io.open_unit(unit):
            assert sample.canvas is not None
            found[sample.note.planned.id] = (sample.key, np.asarray(sample.canvas).tolist())
    return found


@pytest.mark.slow
def test_rows_are_read_and_tokenized_once_and_every_case_has_the_same_ids_and_canvases(tmp_path, measured):
    cases = {
        "k2": {"decoder.k": 2},
        "plain": {"decoder": {"kind": "any_subset"}},
        "cold": {"sampling.temperature": 0.5},
    }
    sections = texts(tmp_path) | {"sampling": {"temperature": 1.0}}
    assert sweep(write_sweep(tmp_path, cases, **sections)) == 0
    assert measured == [6]
    first, *others = [canvases(tmp_path / "out" / "cases" / name) for name in cases]
    assert len(first) == 6 and all(other == first for other in others)


@pytest.mark.slow
def test_cases_with_other_rows_or_canvases_are_planned_apart(tmp_path, measured):
    cases = {
        "a": {},
        "few": {"input.limit": 4},
        "seed": {"seed": 1},
        "units": {"output.unit_rows": 2},
        "b": {"decoder.k": 1},
    }
    assert sweep(write_sweep(tmp_path, cases)) == 0
    assert sorted(measured) == [4, 12, 12, 12]
    found = {name: plan_of(tmp_path / "out" / "cases" / name) for name in cases}
    assert {name: plan.units for name, plan in found.items()} == {"a": 3, "few": 1, "seed": 3, "units": 6, "b": 3}


@pytest.mark.slow
def test_rows_with_settings_of_their_own_share_a_plan_only_where_the_same_ones_are_allowed(tmp_path, measured):
    """`parallel` does not record log-probabilities, so that a row may not ask for them."""
    rows = [{"id": f"r{number}", "tokens": [7, None, 9, None], "heat": 0.5} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {"assd": {}, "k2": {"decoder.k": 2}, "parallel": {"decoder": {"kind": "parallel"}}}
    columns = {"id": "id", "tokens": "tokens"}
    for out, named, expected in (("same", columns, [4]), ("own", columns | {"temperature": "heat"}, [4, 4])):
        sections = {"input": {"path": str(tmp_path / "rows.jsonl"), "columns": named}}
        assert sweep(write_sweep(tmp_path, cases, out=tmp_path / out, **sections)) == 0
        assert measured == expected
        measured.clear()


KILLS = (
    *("plan.before_part", "plan.before_plan", "plan.before_plan:2", "sweep.before_record", "sweep.before_case"),
    *("worker.step:2", "commit.after_data", "commit.before_success", "sweep.before_case:2", "commit.before_data:2"),
    *("commit.before_manifest", "driver.receipt:2", "commit.before_success"),
)


@pytest.mark.slow
def test_a_killed_sweep_resumes_without_repeating_or_changing_a_unit(finished, tmp_path):
    shutil.copy(finished / "rows.jsonl", tmp_path)
    path = write_sweep(tmp_path, CASES)
    command = ("sweep", str(path), "--local", "--quiet", "--debug")
    kept: dict[str, tuple[bytes, int]] = {}
    killed = 0
    for point in (*KILLS, ""):
        name, _, hit = point.partition(":")
        process = forked(drive, f"{name}=kill:{hit or 1}" if point else "", str(tmp_path / "log"), *command)
        process.join(120)
        killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in ({0, -signal.SIGKILL} if point else {0}), (tmp_path / "log").read_text()
        now = {
            name: state
            for name, state in contents(tmp_path / "out").items()
            if "/data/unit-" in name or name.endswith(("_plan.json", "_manifest.json", "_SUCCESS"))
        }
        assert {name: now.get(name) for name in kept} == kept, point
        kept = now
    assert killed >= len(KILLS) - 2, "most of the points were reached"
    for name in CASES:
        assert unequal(rows_of(tmp_path / "out" / "cases" / name), rows_of(finished / "out" / "cases" / name)) == []
        done = [event["unit"] for event in logged(tmp_path / "out" / "cases" / name, "done")]
        assert len(done) == len(set(done)), "no unit was decoded again after its receipt"


@pytest.mark.slow
def test_a_signal_ends_a_sweep_with_code_4_and_the_next_goes_on(tmp_path, capsys):
    path = write_sweep(tmp_path, CASES, batching={"max_rows": 1})
    process = forked(drive, "worker.step=sleep:30:4", str(tmp_path / "log"), "sweep", str(path), "--local", "--quiet")
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.is_alive() and not list((tmp_path / "out").rglob("unit-*")):
        time.sleep(0.01)  # the condition is polled, not assumed
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 4 and "of 3 cases finished; run it again to resume" in log, log
    assert "compare them" not in log
    assert sweep(path) == 0
    assert [rows_of(tmp_path / "out" / "cases" / name).num_rows for name in CASES] == [12, 12, 12]


def test_a_second_driver_is_refused_while_the_first_runs(tmp_path, capsys):
    from draftmill.storage.runs.lease import acquire

    path = write_sweep(tmp_path, CASES)
    acquire(open_store(str(tmp_path / "out")), "elsewhere:1:1", 60.0)
    assert sweep(path) == 4
    assert "another driver holds this run directory: elsewhere:1:1" in capsys.readouterr().err
    assert not (tmp_path / "out" / "cases").exists()


@pytest.mark.slow
def test_a_case_that_another_driver_holds_is_left_to_it_and_the_others_run(tmp_path, capsys):
    from draftmill.storage.runs.lease import acquire

    path = write_sweep(tmp_path, CASES)
    held = acquire(open_store(str(tmp_path / "out" / "cases" / "k2")), "elsewhere:1:1", 60.0)
    assert sweep(path) == 4
    assert "k2: another driver holds this run directory" in capsys.readouterr().err
    assert [(tmp_path / "out" / "cases" / name / "_SUCCESS").exists() for name in CASES] == [True, False, True]
    held.release()
    assert sweep(path) == 0


@pytest.mark.slow
def test_wrong_cases_are_named_together_before_work_starts_and_the_others_run(tmp_path, capsys):
    cases = {
        "good": {},
        "zero": {"decoder.k": 0},
        "nowhere": {"model.path": "builtin:nothing"},
        "empty": {"input.path": str(tmp_path / "empty.jsonl")},
        "crowd": {"workers.count": 3},
    }
    (tmp_path / "empty.jsonl").write_text("")
    assert sweep(write_sweep(tmp_path, cases)) == 2
    captured = capsys.readouterr()
    assert "3 cases of 5 can't run; the others do" in captured.err
    assert "\n  zero: decoder.k: 0 is not allowed; allowed: >= 1 or auto\n" in captured.err
    assert "\n  nowhere: model.path: 'builtin:nothing' does not exist" in captured.err
    assert "\n  crowd: workers.count: 3, but --local is one process" in captured.err
    assert "\n  empty: input.path:" in captured.err and "no rows" in captured.err
    assert os.listdir(tmp_path / "out" / "cases") == ["good"]
    assert captured.out.count("can't run") == 3
    assert rows_of(tmp_path / "out" / "cases" / "good").num_rows == 12
    assert [case["name"] for case in json.loads((tmp_path / "out" / "sweep.json").read_text())["cases"]] == ["good"]


def test_a_sweep_of_which_no_case_can_run_writes_nothing(tmp_path, capsys):
    for cases in ({"a": {"decoder.k": 0}, "b": {"decoder.k": -1}}, {"a": {"input.limit": 1}, "b": {"input.limit": 2}}):
        sections: dict = {}
        if "input.limit" in cases["a"]:  # found only by planning
            (tmp_path / "empty.jsonl").write_text("")
            sections = {"input": job_over(tmp_path / "empty.jsonl")["input"]}
        assert sweep(write_sweep(tmp_path, cases, **sections)) == 2
        err = capsys.readouterr().err
        assert "draftmill: no case of the sweep can run\n  a" in err
        assert "\n  b: decoder.k" in err or "  a, b: input" in err
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_worst_case_gives_the_exit_code(tmp_path, capsys):
    """Row-1 has an id that the model does not have: one of 12 rows fails, more than one in a hundred."""
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    lines = rows.read_text().splitlines()
    lines[1] = json.dumps({"id": "row-1", "tokens": [10**9, None]})
    rows.write_text("\n".join(lines) + "\n")
    cases: dict = {"lenient": {"errors.max_rate": 0.5}, "strict": {}}
    path = write_sweep(tmp_path, cases)
    assert sweep(path) == 3
    shown = {
        line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if "draftmill" not in line
    }
    assert (shown["lenient"], shown["strict"]) == ("1", "1")
    assert sweep(path) == 3
    assert sweep(write_sweep(tmp_path, cases | {"zero": {"decoder.k": 0}})) == 2
    assert sweep(write_sweep(tmp_path, {"lenient": cases["lenient"]})) == 0


@pytest.mark.slow
def test_a_changed_sweep_file_keeps_finished_cases_and_refuses_the_changed_one(tmp_path, capsys):
    assert sweep(write_sweep(tmp_path, {"a": {}, "b": {"decoder.k": 2}})) == 0
    before = {name: state for name, state in contents(tmp_path / "out").items() if name.startswith("cases")}
    capsys.readouterr()
    assert sweep(write_sweep(tmp_path, {"a": {}, "b": {"decoder.k": 4}, "c": {"decoder.k": 5}})) == 2
    err = capsys.readouterr().err
    assert "b: output.path:" in err and "holds another job: decoder.k was 2, is 4" in err
    now = contents(tmp_path / "out")
    assert {name: now[name] for name in before} == before
    assert rows_of(tmp_path / "out" / "cases" / "c").num_rows == 12
    assert [case["name"] for case in json.loads((tmp_path / "out" / "sweep.json").read_text())["cases"]] == ["a", "c"]


def interrupted(*_: object, **__: object) -> None:
    raise Ended("interrupted", INTERRUPTED)


@pytest.mark.slow
def test_metrics_of_a_sweep_are_measured_for_every_case_once(tmp_path, capsys, monkeypatch):
    cases = {"k2": {"decoder.k": 2}, "plain": {"decoder": {"kind": "any_subset"}}}
    path = write_sweep(tmp_path, cases, **texts(tmp_path))
    assert sweep(path) == 0
    decoded = contents(tmp_path / "out" / "cases" / "k2" / "data")
    path.write_text(path.read_text() + "metrics: [length]\n")
    assert sweep(path, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "left to measure, without decoding, in 2 cases: k2, plain" in out and "nothing is left to decode" in out
    with monkeypatch.context() as patch:
        patch.setattr("draftmill.jobs.sweep.sweep.measure_units", interrupted)
        assert sweep(path) == 4
        assert "interrupted with" in capsys.readouterr().err
    assert sweep(path) == 0
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    columns = shown["case"][6:]
    assert columns
    for name in cases:
        store = open_store(str(tmp_path / "out" / "cases" / name))
        table = read_metrics(store)
        assert table is not None and table.num_rows == 6
        means = [sum(values) / 6 for values in (table[column].to_pylist() for column in columns)]
        assert [float(figure) for figure in shown[name][6:]] == pytest.approx(means, abs=1e-4)
    assert contents(tmp_path / "out" / "cases" / "k2" / "data") == decoded
    before = contents(tmp_path / "out")
    assert sweep(path) == 0
    assert contents(tmp_path / "out") == before


def test_a_metric_that_does_not_exist_is_refused_before_anything_is_written(tmp_path, capsys):
    path = write_sweep(tmp_path, {"a": {}, "b": {"decoder.k": 2}}, **texts(tmp_path))
    path.write_text(path.read_text() + "metrics: [rouged]\n")
    assert sweep(path) == 2
    assert "draftmill: metrics.0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_cases_that_use_it(tmp_path, monkeypatch):
    """The cases alternate between two models; the sweep does not."""
    shutil.copytree(GOLDEN, tmp_path / "other")
    cases = {
        f"c{n}": {"model.path": str(tmp_path / "other") if n % 2 else str(GOLDEN), "decoder.k": 1 + n // 2}
        for n in range(6)
    }
    assert sweep(write_sweep(tmp_path, cases)) == 0
    loaded = {}
    for name in cases:
        (event,) = logged(tmp_path / "out" / "cases" / name, "worker_up")
        loaded[name] = event["loaded"]
    assert loaded == {"c0": ["model"], "c1": ["model"]} | {f"c{n}": [] for n in range(2, 6)}
    rows = [rows_of(tmp_path / "out" / "cases" / name).drop_columns(["model"]) for name in ("c0", "c1")]
    assert unequal(*rows) == []


@pytest.mark.slow
def test_a_dry_run_shows_cases_and_loads_and_writes_nothing(tmp_path, capsys):
    path = write_sweep(tmp_path, CASES | {"zero": {"decoder.k": 0}})
    assert sweep(path, "--dry-run") == 2
    captured = capsys.readouterr()
    assert "zero: decoder.k: 0 is not allowed" in captured.err
    assert not (tmp_path / "out").exists()
    assert "4 cases, 1 model load on each worker" in captured.out
    assert "k2: decoder.k: 2; loads " in captured.out
    lines = captured.out.splitlines()
    assert [line.rpartition("; ")[2] for line in lines if line.strip().partition(":")[0] in CASES] == [
        *("loads model", "loads nothing", "loads nothing")
    ]


@pytest.mark.s3
@pytest.mark.slow
def test_a_sweep_on_s3_is_the_sweep_on_disk(finished, tmp_path, s3_url, s3_options):
    shutil.copy(finished / "rows.jsonl", tmp_path)
    s3 = {"endpoint": s3_options.endpoint, "region": s3_options.region}
    path = write_sweep(tmp_path, CASES, out=s3_url, s3=s3)
    assert sweep(path) == 0
    for name in CASES:
        store = S3Store(f"{s3_url}/cases/{name}", s3_options)
        assert unequal(rows_of(store), rows_of(finished / "out" / "cases" / name)) == []
    root = S3Store(s3_url, s3_options)
    before = {stat.name: (stat.etag, stat.mtime_s) for stat in root.list()}
    assert root.get("sweep.json") == (finished / "out" / "sweep.json").read_bytes()
    assert sweep(path) == 0
    assert {stat.name: (stat.etag, stat.mtime_s) for stat in root.list()} == before
