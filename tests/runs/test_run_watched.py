"""Watching whole jobs: the metrics that Ray serves of a run on it, logs in every form, and notices."""

import json
import sys
import time
import urllib.request
from unittest.mock import patch

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftmill.jobs.cli import main
from draftmill.jobs.drive.driver import Driver
from draftmill.jobs.drive.log import JsonLines, event_record
from draftmill.jobs.drive.metrics import METRICS
from draftmill.jobs.results.runs import Read, events_of, line_of
from draftmill.jobs.schedule.events import Finish
from draftmill.storage.runs.lease import LeaseLost
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec

EXPORT_S = 60.0
"""Ray's exporter is told every 10 s; on a busy machine it takes longer."""


@pytest.mark.ray
@pytest.mark.slow
def test_the_metrics_of_a_real_run_are_served_and_agree_with_its_results(ray_session, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    with rows.open("a") as file:
        file.write('{"id": "bad", "tokens": "no list"}\n')
    # One worker: a second one would decode copies of the last units, whose tokens count as decoded, too.
    spec = write_spec(tmp_path, rows=rows, name="watched", workers={"count": 1}, errors={"max_rate": 0.5})
    assert main(["run", str(spec), "--quiet"]) == 0
    values = served(ray_session, "watched")
    table = rows_of(tmp_path / "run")
    tokens = sum(table["new_tokens"].to_pylist())
    assert values["ray_draftmill_samples_total", "ok"] == 12 and values["ray_draftmill_samples_total", "failed"] == 1
    assert values["ray_draftmill_tokens_total", ""] == values["ray_draftmill_decoded_tokens_total", ""] == tokens
    assert values["ray_draftmill_nfe_total", ""] == sum(filter(None, table["nfe"].to_pylist()))
    assert values["ray_draftmill_drafts_proposed_total", ""] == sum(filter(None, table["proposed"].to_pylist()))
    assert values["ray_draftmill_drafts_accepted_total", ""] == sum(filter(None, table["accepted"].to_pylist()))
    assert values["ray_draftmill_errors_total", "bad_tokens"] == 1
    assert values["ray_draftmill_commit_seconds_count", ""] == values["ray_draftmill_units", "done"] == 4
    assert values["ray_draftmill_running", ""] == 0
    silent = {
        "draftmill_worker_deaths",
        "draftmill_unit_failures",
        "draftmill_nfe_draft",
    }  # nothing failed; it drafts itself
    names = {name for name, _ in values}
    assert {metric.name for metric in METRICS} == {
        metric.name for metric in METRICS if metric.exported in names or f"{metric.exported}_sum" in names
    } | silent


def served(ray, run: str) -> dict[tuple[str, str], float]:
    """The values of one run at the metrics port of Ray's node, by name and own label, once its end is there."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    until_s = time.monotonic() + EXPORT_S
    values: dict[tuple[str, str], float] = {}
    while values.get(("ray_draftmill_running", "")) != 0 and time.monotonic() < until_s:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        values = {
            (sample.name, sample.labels.get("status", sample.labels.get("error_class", ""))): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("run") == run and "le" not in sample.labels
        }
        labels = [sample.labels for family in families for sample in family.samples]
        assert all(one["decoder"] == "assd" for one in labels if one.get("run") == run)
    return values


# ---- logs and notices of whole jobs, without Ray


def spec_in(folder, **sections):
    return write_spec(folder, rows=write_rows(folder / "rows.jsonl", 12), **sections)


def keeper(folder) -> tuple:
    """A command that keeps each notice in a file, one a line."""
    out = folder / "notices.jsonl"
    code = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')"
    return [sys.executable, "-c", code], out


def notices_in(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_with_log_json_every_line_of_a_run_is_an_event_and_the_last_one_sums_it_up(tmp_path, capsys):
    spec = spec_in(tmp_path, name="job")
    assert main(["run", str(spec), "--local", "--log", "json"]) == 0
    printed = capsys.readouterr()
    events = [json.loads(line) for line in printed.err.splitlines()]
    assert all({"time", "level", "event", "run"} <= set(event) for event in events[1:]) and len(events) > 5
    assert sorted(event["unit"] for event in events if event["event"] == "done") == [0, 1, 2]
    assert {event["worker"] for event in events if event["event"] in {"done", "worker_up"}} == {"w0"}
    (started,) = [event for event in events if event["event"] == "started"]
    assert (started["units"], started["samples"], started["path"]) == (3, 12, str(tmp_path / "run"))
    summary = events[-1]["summary"]
    assert (events[-1]["event"], events[-1]["exit_code"], summary["samples"]["ok"]) == ("ended", 0, 12)
    hours = summary["device_hours"]
    assert sum(hours.values()) - hours["total"] == pytest.approx(hours["total"], abs=1e-5)
    table = [json.loads(line)["message"] for line in printed.out.splitlines()]
    assert any(line.strip().startswith("samples") for line in table)
    assert main(["run", str(spec), "--local", "--log", "json", "--set", "seed=3"]) == 2
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert any("seed" in event["message"] for event in events if event["event"] == "output")
    assert [event["exit_code"] for event in events if event["event"] == "ended"] == [2]


def test_logs_prints_what_drivers_and_workers_noted_in_order(tmp_path, capsys):
    spec = spec_in(tmp_path, name="job")
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    for unit in ("00000001", "00000002"):
        (tmp_path / "run" / "data" / f"unit-{unit}.parquet").unlink()
    for name in ("_SUCCESS", "_manifest.json"):
        (tmp_path / "run" / name).unlink()
    assert main(["run", str(spec), "--local", "--quiet"]) == 0  # a second session
    capsys.readouterr()
    assert main(["logs", str(tmp_path / "run"), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    names = [event["event"] for event in events if event["event"] not in {"note", "progress"}]
    assert names == ["started", "worker_up", *["done"] * 3, "ended", "started", "worker_up", *["done"] * 2, "ended"]
    assert any("resuming: 1 of 3 units done" in event.get("message", "") for event in events)
    assert main(["logs", str(tmp_path / "run"), "--follow"]) == 0  # no driver works on it: it ends
    text = capsys.readouterr().out
    assert len(text.splitlines()) == len(events) and "unit=2 worker=w0" in text
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert main(["logs", str(tmp_path / "nothing")]) == 2


def test_a_finished_run_sends_one_notice_with_its_summary_and_its_repetition_none(tmp_path):
    command, out = keeper(tmp_path)
    spec = spec_in(tmp_path, name="job", notify={"command": command})
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    (notice,) = notices_in(out)
    assert (notice["event"], notice["run"], notice["exit_code"]) == ("finish", "job", 0)
    assert notice["samples"] == {"planned": 12, "ok": 12, "failed": 0} and notice["units"] == {"planned": 3, "done": 3}
    assert notice["tokens"] == sum(rows_of(tmp_path / "run")["new_tokens"].to_pylist())
    assert notice["text"] == "draftmill run job: finished; 12 of 12 samples ok"


def test_a_run_that_fails_sends_a_notice_and_keeps_its_exit_code(tmp_path):
    command, out = keeper(tmp_path)
    failing = [sys.executable, "-c", "import sys; sys.exit(9)"]
    spec = spec_in(tmp_path, notify=[{"command": command}, {"command": failing}])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"id": "bad", "tokens": "no list"}\n')
    for _ in range(2):  # the second time it has ended before
        assert main(["run", str(spec), "--local", "--quiet"]) == 3
    assert main(["run", str(spec), "--local", "--quiet", "--set", "input.path=nowhere.jsonl"]) == 2
    first, second = notices_in(out)
    assert (first["event"], first["exit_code"], first["samples"]["failed"]) == ("failure", 3, 1)
    assert first["message"].startswith("1 of 13 samples failed; errors.max_rate: 0.01 allows 0; 12 of 13 samples ok")
    assert (second["event"], second["exit_code"]) == ("failure", 2) and "nowhere.jsonl" in second["message"]


def test_what_goes_wrong_with_telling_of_an_end_does_not_change_it(tmp_path, capsys):
    spec = spec_in(tmp_path, notify={"command": keeper(tmp_path)[0]})
    with patch("draftmill.jobs.run.outcome.payload", side_effect=RuntimeError("no facts")):
        assert main(["run", str(spec), "--local"]) == 0
        assert "the end of the run was not reported to all: RuntimeError: no facts" in capsys.readouterr().err
        assert main(["run", str(spec), "--local", "--set", "input.path=nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_a_driver_that_loses_its_lease_says_so_in_the_log_and_to_no_receiver(tmp_path, capsys):
    command, out = keeper(tmp_path)
    spec = spec_in(tmp_path, notify={"command": command, "on": ["failure", "interrupt"]})
    with patch.object(Driver, "run", side_effect=LeaseLost("another driver took over")):
        assert main(["run", str(spec), "--local", "--quiet"]) == 4
    capsys.readouterr()
    assert main(["logs", str(tmp_path / "run"), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["message"]) == ("ended", "another driver took over") and not notices_in(out)


def test_logs_follow_reads_a_file_again_only_if_it_has_changed(tmp_path):
    spec = spec_in(tmp_path)
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    store, read = open_store(str(tmp_path / "run")), Read()
    first = list(events_of(store, read))
    with patch.object(type(store), "get", side_effect=AssertionError("read again")):
        assert list(events_of(store, read)) == []
    name = "attempts/epoch-0001-part-0000.jsonl"
    line = JsonLines("note", {}).format(event_record("note", "one more\u2028line"))
    store.put(name, store.get(name) + f'{line}\n{{"torn": '.encode())
    (new,) = events_of(store, read)
    assert new == json.loads(line)
    assert line_of({"time": "T", "level": "info", "event": "progress", "nfe_per_token": 0.5, "memory": {"a": 1}}) == (
        'T  info     progress        nfe_per_token=0.5 memory={"a": 1}'
    )
    assert len(list(events_of(store))) == len(first) + 1


def test_an_interrupted_run_tells_those_who_ask_for_it_and_nobody_else(tmp_path):
    command, out = keeper(tmp_path)
    spec = spec_in(tmp_path, notify=[{"command": command}, {"command": command, "on": ["interrupt"]}])
    with patch.object(Driver, "run", lambda self: Finish("drained", "SIGTERM")):
        assert main(["run", str(spec), "--local", "--quiet"]) == 4
    (notice,) = notices_in(out)
    assert (notice["event"], notice["exit_code"], notice["finished"]) == ("interrupt", 4, False)
