"""draftmill as a library: `run` and `open_run` give what the commands write, and their errors have the same text."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pandas as pd
import pytest
import yaml

import draftmill
from draftmill.jobs.api import _as_a_guest
from draftmill.jobs.cli import main
from draftmill.jobs.drive import driver, ray_session
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.exit_codes import Ended
from draftmill.jobs.results.runs import events_of
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.stores.store import open_store
from tests.conftest import ROOT
from tests.runs.test_rerun import sicken

PROMPTS = ["def is_prime(n):", "import os", "class Point:", "for x in range("]
MODEL = {"path": "builtin:ar-tiny", "device": "cpu"}
TASK = {"kind": "complete", "max_new_tokens": 6}


def job_of(folder, rows: list[dict] | None = None, **changes) -> dict:
    """A spec over rows in `folder`, by default a prompt each; every third unit has two rows."""
    given = rows or [{"id": str(number), "prompt": prompt, "level": number} for number, prompt in enumerate(PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return {
        "name": "prompts",
        "task": TASK,
        "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt"}, "keep": ["level"]},
        "model": MODEL,
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run"), "unit_rows": 2},
    } | changes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A finished run of four prompts, of which the last is too long, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"id": str(number), "prompt": prompt, "level": number} for number, prompt in enumerate(PROMPTS)]
    rows[3]["prompt"] = "x = 1\n" * 2000
    spec = job_of(folder, rows, errors={"max_rate": 0.5})
    return draftmill.run(spec, local=True), folder


def exported(run, *options: str) -> list[dict]:
    out = run.parent / "out.jsonl"
    assert main(["export", str(run), "--format", "jsonl", "--out", str(out), "--overwrite", *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_package_alone_imports_neither_torch_nor_ray_nor_arrow():
    code = "import sys, draftmill; sys.exit(', '.join({'torch', 'ray', 'pyarrow', 'pydantic', 'numpy'} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_reading_a_run_imports_neither_torch_nor_ray(finished):
    code = (
        "import sys, draftmill; list(draftmill.open_run(sys.argv[1]).rows()); "
        "sys.exit(', '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, finished[0].path], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_what_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        _ = draftmill.runn
    assert {"run", "open_run", "generate", "Error", "__version__"} <= set(dir(draftmill))


def test_rows_are_those_of_an_export_in_both_orders(finished):
    run, folder = finished
    results = [name for name in run.columns if name != "level"]
    assert list(run.rows(results)) == exported(folder / "run")
    assert list(run.rows(results, order="input")) == exported(folder / "run", "--order", "input")
    assert list(run.rows(["id", "level"])) == exported(folder / "run", "--columns", "id,level")
    assert [row["id"] for row in run.rows(order="input")] == ["0", "1", "2", "3"]


def test_tables_have_every_row_and_column(finished):
    run, _ = finished
    rows = list(run.rows(run.columns, order="input"))
    table = run.to_arrow(run.columns, order="input")
    assert table.column_names == list(rows[0])
    for name in ("id", "status", "text", "tokens", "key", "keep", "decoder", "error_kind"):
        assert table[name].to_pylist() == [row[name] for row in rows], name
    frame = run.to_pandas(["id", "level", "nfe"], order="input")
    assert isinstance(frame, pd.DataFrame) and frame["level"].tolist() == [0, 1, 2, 3]


def test_rows_have_one_shape_and_few_columns(finished):
    run, _ = finished
    usual = ["id", "level", "status", "error_kind", "error", "text", "finish", "new_tokens", "nfe", "logprob"]
    rows = list(run.rows())
    assert list(rows[0]) == run.to_arrow().column_names == list(run.to_pandas().columns) == usual
    assert rows == list(run.rows(usual)) and rows[0].items() <= next(run.rows(run.columns)).items()


def test_texts_of_a_schema_are_parsed_in_rows(tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    task = TASK | {"max_new_tokens": 24, "constraint": {"json_schema": schema}}
    run = draftmill.run(job_of(tmp_path, task=task), local=True)
    rows = list(run.rows())
    assert [row["json"] for row in rows] == [json.loads(row["text"]) for row in rows]
    assert all(isinstance(row["json"]["n"], int) for row in rows)
    assert list(run.rows(["json", "id"]))[2] == {"json": rows[2]["json"], "id": rows[2]["id"]}
    assert next(run.rows(["json"])) == {"json": rows[0]["json"]}
    with pytest.raises(UserError, match="'json' is not a column"):
        run.to_arrow(["json"])


def test_a_dataset_has_the_rows_with_plain_strings(finished):
    run, _ = finished
    dataset = run.to_dataset(order="input")
    assert dataset.num_rows == 4 and run.to_dataset(["decoder"])[0]["decoder"] == "autoregressive"
    assert dataset["text"][:3] == [row["text"] for row in run.rows(order="input")][:3]


def test_failures_are_the_rows_that_are_not_ok(finished):
    run, _ = finished
    [row] = run.failures()
    assert (row["id"], row["status"], row["error_kind"]) == ("3", "failed", "too_long")


def test_the_summary_counts_what_the_table_counts(finished, capsys):
    run, folder = finished
    summary = run.summary
    assert summary["samples"] == {"planned": 4, "ok": 3, "failed": 1} and summary["errors"] == {"too_long": 1}
    assert (summary["name"], summary["path"], summary["exact"]) == ("prompts", str(folder / "run"), True)
    assert (summary["tokens"], summary["nfe"], summary["metrics"], run.metrics().num_rows) == (18, 18, {}, 0)
    assert repr(run) == f"<draftmill run prompts: 3 of 4 samples ok, {folder / 'run'}>"
    assert capsys.readouterr() == ("", "")


def test_metrics_have_a_column_each_and_their_means_are_in_the_summary(tmp_path):
    run = draftmill.run(job_of(tmp_path, metrics=["length"]), local=True)
    table = run.metrics()
    assert table.column_names[:2] == ["id", "sample"] and table["id"].to_pylist() == [row["id"] for row in run.rows()]
    name, mean = next(iter(run.summary["metrics"].items()))
    assert mean == pytest.approx(sum(table[name].to_pylist()) / 4)


@pytest.mark.slow
def test_a_row_that_a_rerun_mended_is_read_and_shown_mended(tmp_path, capsys):
    spec = job_of(tmp_path, errors={"max_rate": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        sicken(patch, {"2"})
        first = draftmill.run(spec, local=True)
    assert [row["id"] for row in first.failures()] == ["2"]
    assert main(["rerun", first.path, "--failed", "--local", "--quiet"]) == 0
    capsys.readouterr()
    mended = draftmill.open_run(first.path)
    summary = mended.summary
    assert (summary["samples"]["ok"], summary["passes"], summary["errors"]) == (4, 2, {}) and mended.failures() == []
    assert {row["id"]: row["pass"] for row in mended.rows(["id", "pass"])} == {"0": 1, "1": 1, "2": 2, "3": 1}
    assert main(["show", first.path]) == 0
    [text] = [row["text"] for row in mended.rows() if row["id"] == "2"]
    assert f"\nclass Point:⌈{text}⌋\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dict_and_a_file_are_the_same_job_and_a_finished_one_is_only_opened(tmp_path, capfd):
    spec = job_of(tmp_path)
    before = json.dumps(spec)
    first = draftmill.run(spec, local=True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    again = draftmill.run(tmp_path / "job.yaml", local=True)
    assert list(first.rows()) == list(again.rows()) and json.dumps(spec) == before
    fewer = draftmill.run(spec, local=True, changes={"input.limit": 2, "output.path": f"{tmp_path}/fewer"})
    assert fewer.summary["samples"]["ok"] == 2
    assert capfd.readouterr() == ("", "")


def test_records_go_to_the_users_own_handlers_alone(tmp_path, capfd, caplog):
    logs = []
    for level in (logging.WARNING, logging.INFO, logging.DEBUG):
        with caplog.at_level(level, "draftmill"):
            run = draftmill.run(job_of(tmp_path), local=True, changes={"output.path": str(tmp_path / str(level))})
        records = [vars(record) for record in caplog.records if record.name == "draftmill.run"]
        units = [record["facts"]["unit"] for record in records if record["event"] == "done"]
        assert (bool(records), units) == (level < logging.WARNING, [0, 1] if level == logging.DEBUG else [])
        logs.append([event["event"] for event in events_of(open_store(run.path))])
    assert logs[0] == logs[1] == logs[2] and logs[0][-3:] == ["done", "done", "ended"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "changes",
    [{"decoder.kind": "assd"}, {"model.pth": "x"}, {"task.max_new_tokens": 0}, {"input.path": "nowhere.jsonl"}],
    ids=str,
)
def test_errors_have_the_text_of_the_command_line(tmp_path, capsys, changes):
    spec = job_of(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(draftmill.Error) as caught:
        draftmill.run(spec, local=True, changes=changes)
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert main(["run", str(tmp_path / "job.yaml"), "--local", "--quiet", *settings]) == 2
    assert capsys.readouterr().err == f"draftmill: {caught.value}\n"


def test_too_many_failures_raise_and_the_results_can_be_opened(tmp_path):
    rows = [{"id": str(number), "prompt": "x = 1\n" * 2000, "level": 0} for number in range(3)]
    rows.append({"id": "good", "prompt": "import", "level": 0})
    with pytest.raises(draftmill.Error, match=r"3 of 4 samples failed; errors\.max_rate: 0\.01 allows 0\n") as caught:
        draftmill.run(job_of(tmp_path, rows), local=True)
    failures = draftmill.open_run(tmp_path / "run").failures()
    lines = [f"  {row['error_kind']}: {row['id']}: {row['error']}" for row in failures]
    assert len(lines) == 3 and str(caught.value).splitlines()[1:] == lines


def test_local_and_an_address_exclude_each_other(tmp_path):
    with pytest.raises(draftmill.Error, match="only one of the two options"):
        draftmill.run(job_of(tmp_path), local=True, ray_address="auto")


def test_what_is_no_finished_run_is_refused(tmp_path):
    with pytest.raises(draftmill.Error, match="is not a run directory"):
        draftmill.open_run(tmp_path)
    with pytest.raises(draftmill.Error, match="unknown key; did you mean endpoint"):
        draftmill.open_run(tmp_path, s3={"endpont": "x"})


def test_a_wrong_column_or_order_is_refused(finished):
    with pytest.raises(draftmill.Error, match="'txt' is not a column of the result"):
        list(finished[0].rows(["txt"]))
    with pytest.raises(draftmill.Error, match="order: 'any' is not allowed; allowed: plan, input"):
        list(finished[0].rows(order="any"))


def test_every_error_of_ours_is_a_draftmill_error():
    assert all(issubclass(kind, draftmill.Error) for kind in (UserError, StoreError, Ended))


@pytest.mark.slow
def test_a_signal_raises_keyboard_interrupt_and_the_same_call_resumes(tmp_path, monkeypatch):
    spec = job_of(tmp_path) | {"output": {"path": str(tmp_path / "run"), "unit_rows": 1}}
    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt, match=r"with \d of 4 units done; run it again"),
    ):
        patch.setattr(driver, "failpoint", lambda name: signal.raise_signal(signal.SIGINT))  # at a finished unit
        draftmill.run(spec, local=True)
    assert 1 <= len(list((tmp_path / "run" / "data").iterdir())) < 4
    assert draftmill.run(spec, local=True).summary["samples"]["ok"] == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_generate_and_run_also_in_their_last_unit(tmp_path, monkeypatch, number):
    rows = [{"id": f"{number}", "prompt": "x = 1\n" * number, "level": 0} for number in (1, 2000)]  # one fails
    spec = job_of(tmp_path, rows)
    monkeypatch.setattr(driver, "failpoint", lambda name: signal.raise_signal(number))  # at a finished unit
    with pytest.raises(KeyboardInterrupt, match="interrupted"):
        draftmill.generate("builtin:ar-micro", ["def f("], task={"max_new_tokens": 2})
    for changes, message in (({"errors.max_rate": 1.0}, "the run is finished"), ({}, "1 of 2 samples failed")):
        with pytest.raises(KeyboardInterrupt, match=message):
            draftmill.run(spec, local=True, changes=changes | {"output.path": str(tmp_path / f"run{len(changes)}")})
    monkeypatch.undo()
    assert len(draftmill.generate("builtin:ar-micro", ["def f("], task={"max_new_tokens": 2})) == 1


@pytest.mark.slow
@pytest.mark.s3
def test_a_run_on_s3_is_opened_with_the_section_of_its_spec(s3_url, s3_options, tmp_path):
    s3 = {"endpoint": s3_options.endpoint, "region": s3_options.region}
    run = draftmill.run(job_of(tmp_path) | {"output": {"path": s3_url}, "s3": s3}, local=True)
    again = draftmill.open_run(s3_url, s3=s3)
    assert again.path == s3_url and list(again.rows()) == list(run.rows()) and again.summary["samples"]["ok"] == 4


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray_has_the_rows_of_a_local_one(ray_session, tmp_path):
    columns = ["id", "text", "tokens", "nfe", "key"]
    local = draftmill.run(job_of(tmp_path), local=True)
    on_ray = draftmill.run(job_of(tmp_path), changes={"output.path": str(tmp_path / "ray")})
    assert list(on_ray.rows(columns)) == list(local.rows(columns))
    assert ray_session.is_initialized(), "a Ray that the process has initialised is left running"


def test_a_signal_is_told_from_another_reason_to_stop():
    stop = StopFlag()
    stop.set("SIGINT")
    lost = StopFlag()
    lost.set("another driver took over")
    assert stop.by_signal and not lost.by_signal and not StopFlag().by_signal


def test_a_run_in_another_thread_works(tmp_path):
    found: list[draftmill.RunResults] = []
    thread = threading.Thread(target=lambda: found.append(draftmill.run(job_of(tmp_path), local=True)))
    thread.start()
    thread.join()
    assert found[0].summary["samples"]["ok"] == 4


def test_torchs_threads_and_loggers_are_left_as_they_were(tmp_path):
    import torch

    torch.set_num_threads(1)
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    draftmill.run(job_of(tmp_path), local=True)
    assert torch.get_num_threads() == 1
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_environment_variables_are_left_as_they_were(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setattr(ray_session, "_init", lambda **_: os.environ.update(RAY_CLIENT_MODE="0"))
    before = dict(os.environ)
    with pytest.raises(StoreError), _as_a_guest():
        ray_session._start_local(1, print)
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
        raise StoreError("stops")
    assert dict(os.environ) == before
