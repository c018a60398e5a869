"""`status` of a folder, `prune` and `run --catch-up`: which runs there are, what may go without loss, which dates are missing."""

import json
import shutil
import signal
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

import draftmill
from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import load_spec
from draftmill.jobs.drive import driver as driver_room
from draftmill.jobs.results.runs import runs_below
from draftmill.jobs.run import pruning
from draftmill.jobs.run.job import due_dates
from draftmill.jobs.run.pruning import candidates, prune_run
from draftmill.storage.errors import UserError
from draftmill.storage.runs.lease import LEASE, acquire
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import FolderLevel, MemoryStore, open_store
from tests.jobs.run.recurring_jobs import DATED, KILLS, driver, interrupted, nightly, run
from tests.runs.jobs_of_tests import write_rows

INPUT = {"columns": {"id": "id", "tokens": "tokens"}, "since": "last_success", "dedupe": "ids"}
FILES = 4
PRUNED = ["_ids.parquet", "_lease.json", "_manifest.json", "_plan.json", "_pruned.json", "_SUCCESS", "attempts"]


def spec_of(folder, **changes):
    defaults: dict = {"input": {"path": f"{folder}/landing/*.jsonl"} | INPUT}
    return nightly(folder, rows=folder, **defaults | changes)


def land(folder, day: int):
    """The file of a day: four rows with ids of their own."""
    (folder / "landing").mkdir(exist_ok=True)
    file = write_rows(folder / "landing" / f"{day}.jsonl", 4, seed=day)
    file.write_text(file.read_text().replace('"row-', f'"{day}-'))
    return file


def on(spec, day: int, *options: str) -> int:
    return run(spec, "--logical-date", f"2026-11-{day:02d}", *options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A job with finished runs of the first four days."""
    folder = tmp_path_factory.mktemp("old")
    for day in range(1, FILES + 1):
        land(folder, day)
        assert on(spec_of(folder), day) == 0
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it, whose inputs lie where they lay."""
    shutil.copytree(finished / "nightly", tmp_path / "nightly")
    return tmp_path


def spec_at(folder, finished, **changes):
    return spec_of(folder, **{"input": {"path": f"{finished}/landing/*.jsonl"} | INPUT} | changes)


def listed(folder, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def files_of(run_dir) -> list[str]:
    return sorted((path.name for path in run_dir.iterdir()), key=str.lower)


def test_a_list_has_a_line_for_each_run_with_its_state(tmp_path, capsys):
    errors = {"max_rate": 0.0}
    spec = spec_of(tmp_path, errors=errors)
    land(tmp_path, 1)
    assert on(spec, 1) == 0
    bad = land(tmp_path, 2)
    bad.write_text(bad.read_text() + "no json\n")
    assert on(spec, 2) == 3
    land(tmp_path, 3)
    interrupted(spec, "2026-11-03")
    assert run(nightly(tmp_path, name="other", output={"path": str(tmp_path / "other" / "plain")})) == 0
    found = listed(tmp_path, capsys)
    assert {name: one["state"] for name, one in found.items()} == {
        "nightly/2026-11-01": "finished",
        "nightly/2026-11-02": "failed",
        "nightly/2026-11-03": "interrupted",
        "other/plain": "finished",
    }
    assert found["nightly/2026-11-02"]["failed"] == 1 and found["nightly/2026-11-02"]["samples"] == 5
    assert found["nightly/2026-11-03"]["is_success"] is False and found["nightly/2026-11-03"]["units_done"] == 1
    assert found["nightly/2026-11-01"]["logical_date"] == "2026-11-01T00:00:00Z"
    assert found["other/plain"]["logical_date"] is None and found["other/plain"]["planned_at"]
    lease = acquire(open_store(str(tmp_path / "nightly" / "2026-11-03")), "elsewhere:boot:1", 60.0)
    assert main(["status", str(tmp_path / "nightly")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/nightly: 3 runs"
    assert lines[1].split() == ["2026-11-01", "finished", "2026-11-01", "4", "samples", "0", "failed"]
    assert lines[3].split()[:2] == ["2026-11-03", "running"] and "driver elsewhere:boot:1" in lines[3]
    lease.release()
    (tmp_path / "nightly" / "2026-11-01" / "_plan.json").write_text("{")
    assert listed(tmp_path / "nightly", capsys)["2026-11-01"]["state"] == "damaged"
    assert main(["status", str(tmp_path / "nightly" / "2026-11-02")]) == 0
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "nothing is at" in capsys.readouterr().err


def test_prune_says_what_it_would_delete_and_deletes_nothing(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["prune", str(folder / "nightly"), "--keep", "3"]) == 0
    said = capsys.readouterr().out
    assert "2026-11-01  would be pruned: " in said and said.count("stays: one of the newest") == 3
    assert "nothing was deleted; --yes deletes" in said
    assert sorted(folder.rglob("*")) == before


def test_what_was_pruned_is_still_done_for_since_and_dedupe(folder, finished, capsys):
    base, spec = folder / "nightly", spec_at(folder, finished)
    kept = {path: path.read_bytes() for path in (base / "2026-11-04").rglob("*") if path.is_file()}
    assert main(["prune", str(base), "--keep", "1", "--yes"]) == 0
    assert [files_of(base / f"2026-11-0{day}") for day in (1, 2, 3)] == [PRUNED] * 3
    assert {path: path.read_bytes() for path in kept} == kept
    shutil.rmtree(base / "_ledger", ignore_errors=True)
    capsys.readouterr()
    assert on(spec, 5) == 0
    assert "0 new, 0 changed, 4 done before" in capsys.readouterr().out
    more = finished / "landing" / "5.jsonl"  # all ids of the first files, and two new ones
    more.write_text("".join((finished / "landing" / f"{day}.jsonl").read_text() for day in (1, 2)))
    with more.open("a") as file:
        file.write('{"id": "new-1", "tokens": [7, null]}\n{"id": "new-2", "tokens": [8, null]}\n')
    try:
        assert on(spec, 5) == 0
    finally:
        more.unlink()
    found = listed(base, capsys)
    assert found["2026-11-05"]["samples"] == 2
    assert (found["2026-11-01"]["state"], found["2026-11-01"]["is_pruned"]) == ("finished", True)
    done = str(base / "2026-11-01")
    assert on(spec, 1) == 0
    assert "already finished; its results were deleted by `draftmill prune`" in capsys.readouterr().out
    for command in (["verify", done], ["export", done, "--format", "csv", "--out", "-"], ["rerun", done, "--failed"]):
        assert main(command) == 2
        assert "were deleted by `draftmill prune`" in capsys.readouterr().err
    assert main(["status", done]) == 0
    assert "its results were deleted" in capsys.readouterr().out
    assert main(["prune", done, "--keep", "1"]) == 2
    assert "is a run directory" in capsys.readouterr().err
    assert main(["prune", str(base), "--keep", "0", "--yes"]) == 0
    assert capsys.readouterr().out.count("its results were pruned before") == 3


def test_unfinished_and_leased_runs_stay(folder, finished, capsys):
    base = folder / "nightly"
    (base / "2026-11-01" / "_SUCCESS").unlink()
    (base / "2026-11-03" / "notes.txt").write_text("of a user")
    lease = acquire(open_store(str(base / "2026-11-02")), "elsewhere:boot:1", 60.0)
    command = ["prune", str(base), "--keep", "0", "--yes"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "stays: it is not finished" in said and "stays: driver elsewhere:boot:1" in said
    assert (base / "2026-11-01" / "data").exists() and (base / "2026-11-02" / "data").exists()
    assert files_of(base / "2026-11-03") == sorted([*PRUNED, "notes.txt"], key=str.lower), "what is not ours stays"
    lease.release()
    job = acquire(open_store(str(base)), "elsewhere:boot:1", 60.0)
    assert main(command) == 4
    assert "another driver holds the job" in capsys.readouterr().err
    job.release()
    assert main(command) == 0
    assert not (base / "2026-11-02" / "data").exists()
    shutil.rmtree(base / "2026-11-01")
    capsys.readouterr()
    spec = spec_at(folder, finished)
    assert on(spec, 5) == 0
    assert "1 new, 0 changed, 3 done before" in capsys.readouterr().out, "what never finished comes again"


@pytest.mark.parametrize(
    ("keep", "left"),
    [(["2"], [3, 4]), (["36500d"], [1, 2, 3, 4]), (["0d"], []), (["1", "0w"], [4]), (["9"], [1, 2, 3, 4])],
)
def test_runs_stay_by_number_or_by_age(folder, keep, left):
    base = folder / "nightly"
    assert main(["prune", str(base), "--keep", *keep, "--yes"]) == 0
    assert [day for day in range(1, 5) if (base / f"2026-11-0{day}" / "data").exists()] == left


def test_wrong_options_of_prune_are_refused(folder, capsys):
    for keep in ("-1", "3 days", "all", "1.5d"):
        with pytest.raises(SystemExit) as refused:
            main(["prune", str(folder / "nightly"), f"--keep={keep}"])
        assert refused.value.code == 2 and "--keep" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prune", str(folder / "nightly")])
    assert main(["prune", str(folder), "--keep", "1"]) == 2
    assert "is not the base path of a recurring job" in capsys.readouterr().err


def test_a_prune_that_lost_its_lease_deletes_nothing_more(folder, capsys, monkeypatch):
    base = folder / "nightly"
    run_dir = base / "2026-11-03"
    for other in ("2026-11-01", "2026-11-02", "2026-11-04"):
        shutil.rmtree(base / other)
    left: list[int] = []

    def suspended(point: str) -> None:
        left.append(len(list(run_dir.rglob("*.*"))))
        if point == "prune.before_delete" and len(left) == 4:  # and here another driver takes over
            lease = json.loads((run_dir / LEASE).read_text())
            taken = lease | {"owner": "elsewhere:boot:1", "epoch": lease["epoch"] + 1}
            (run_dir / LEASE).write_text(json.dumps(taken))

    monkeypatch.setattr(pruning, "failpoint", suspended)
    assert main(["prune", str(base), "--keep", "0", "--yes"]) == 4
    assert "was taken over" in capsys.readouterr().err
    assert len(left) == 4 and len(list(run_dir.rglob("*.*"))) == left[-1]


def test_what_goes_is_what_is_there_once_the_lease_is_held(folder):
    base = open_store(str(folder / "nightly"))
    run_dir = folder / "nightly" / "2026-11-01"
    first = candidates(base, [0], datetime.now(UTC))[0]
    dated = [one.stays for one in candidates(base, [0], datetime(2020, 1, 1, tzinfo=UTC))]  # before all of them
    assert dated == [one.stays for one in candidates(base, [0], datetime.now(UTC))]
    (run_dir / "metrics").mkdir()
    (run_dir / "metrics" / "unit-00000000.parquet").touch()  # by a `measure` that has ended since
    prune_run(first, lambda reason: None)
    assert files_of(run_dir) == PRUNED


@pytest.mark.slow
def test_a_prune_that_is_killed_goes_on_and_loses_no_proof(folder, finished, capsys):
    base, log = folder / "nightly", folder / "log"
    command = ("prune", str(base), "--keep", "0", "--yes")
    for point in (*KILLS[1:], "prune.before_delete:3", "prune.before_delete:7"):
        killed = driver(
            log, log, failpoints=f"{point.partition(':')[0]}=kill:{point.partition(':')[2] or 1}", command=command
        )
        killed.join(120)
        assert killed.exitcode == -9, log.read_text()
        assert set(listed(base, capsys)) >= {"2026-11-02", "2026-11-03", "2026-11-04"}
    assert main(list(command)) == 0
    assert [files_of(base / f"2026-11-0{day}") for day in (1, 2, 3, 4)] == [PRUNED] * 4
    capsys.readouterr()
    assert on(spec_at(folder, finished), 5) == 0
    assert "0 new, 0 changed, 4 done before" in capsys.readouterr().out


@pytest.mark.s3
@pytest.mark.slow
def test_runs_in_a_bucket_are_listed_and_pruned(tmp_path, capsys, s3_url, s3_options):
    spec = spec_of(
        tmp_path,
        output={"path": f"{s3_url}/nightly/{DATED}", "unit_rows": 1},
        s3={"endpoint": s3_options.endpoint, "region": s3_options.region},
    )
    for day in (1, 2):
        land(tmp_path, day)
        assert on(spec, day) == 0
    base, options = f"{s3_url}/nightly", ["--s3-endpoint", str(s3_options.endpoint)]
    capsys.readouterr()
    assert main(["status", base, *options]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["2026-11-01", "finished"],
        ["2026-11-02", "finished"],
    ]
    assert main(["prune", base, "--keep", "1", "--yes", *options]) == 0
    store = S3Store(base, s3_options)
    left = {stat.name for stat in store.list("2026-11-01/") if not stat.name.endswith("-session.jsonl")}
    assert {name.partition("/")[2] for name in left} == {*PRUNED} - {"attempts"}
    assert len(list(store.list("2026-11-02/data/"))) == 4
    capsys.readouterr()
    assert on(spec, 3) == 0
    assert "0 new, 0 changed, 2 done before" in capsys.readouterr().out


NOON = datetime(2026, 11, 7, 12, tzinfo=UTC)


def due_days(spec, first: int | None = None) -> list[int]:
    start = None if first is None else datetime(2026, 11, first, tzinfo=UTC)
    return [date.day for date in due_dates(load_spec(spec), NOON, start)]


def test_catching_up_runs_missed_and_interrupted_dates(tmp_path, capsys):
    spec, today = nightly(tmp_path), datetime.now(UTC)
    days = [f"{today - timedelta(days=number):%Y-%m-%d}" for number in (4, 3, 2, 1)]
    assert run(spec, "--logical-date", days[1]) == 0
    interrupted(spec, days[3])
    assert [f"{date:%Y-%m-%d}" for date in due_dates(load_spec(spec), today)] == [days[2], days[3]]
    capsys.readouterr()
    assert run(spec, "--catch-up", days[0]) == 0
    assert "3 dates to run" in capsys.readouterr().out
    found = listed(tmp_path / "nightly", capsys)
    assert [one["state"] for one in found.values()] == ["finished"] * 4
    assert run(spec, "--catch-up") == 0
    assert "0 dates to run" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").unlink()
    assert run(spec, "--catch-up", f"{today - timedelta(days=5):%Y-%m-%d}") == 2
    assert "input.path" in capsys.readouterr().err


def test_a_signal_in_the_last_unit_of_a_date_ends_catching_up(tmp_path, capsys, monkeypatch):
    """The unit is the second of two; of the last date it ends nothing."""
    spec, units = nightly(tmp_path), count(1)
    days = [f"{datetime.now(UTC) - timedelta(days=number):%Y-%m-%d}" for number in (2, 1)]

    def ended(name: str) -> None:
        if next(units) % 2 == 0:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(driver_room, "failpoint", ended)
    for code, last in ((4, days[0]), (0, days[1])):
        assert run(spec, "--catch-up", days[0]) == code
        assert [one["state"] for one in listed(tmp_path, capsys).values()] == ["finished"] * (1 + days.index(last))


def test_dates_without_data_are_not_missed(tmp_path):
    for day in (3, 4, 6):
        land(tmp_path, day).rename(tmp_path / "landing" / f"2026-11-0{day}.jsonl")
    spec = nightly(tmp_path, input={"path": f"{tmp_path}/landing/{{date:%Y-%m-%d}}.jsonl", "columns": INPUT["columns"]})
    assert due_days(spec, 1) == [3, 4, 6]
    assert on(spec, 4) == 0
    assert due_days(spec, 1) == [3, 6]
    with pytest.raises(UserError, match="nothing is at"):
        draftmill.run(spec, local=True, changes={"output.logical_date": "2026-11-05"})


def test_with_since_no_date_is_missed_and_a_later_run_supersedes(tmp_path):
    spec = spec_of(tmp_path)
    land(tmp_path, 1)
    interrupted(spec, "2026-11-01")
    assert due_days(spec) == [1]
    land(tmp_path, 3)
    assert on(spec, 3) == 0
    assert due_days(spec) == []


def test_dates_go_in_steps_of_the_paths_period(tmp_path):
    def days(form: str, first: datetime | None = None) -> list[str]:
        spec = load_spec(nightly(tmp_path, output={"path": f"{tmp_path}/x/{{date:{form}}}"}))
        return [f"{date:%Y-%m-%dT%H}" for date in due_dates(spec, now, first)]

    now = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)
    assert days("%Y-%m-%d", datetime(2026, 2, 27, tzinfo=UTC)) == ["2026-02-27T00", "2026-02-28T00"]
    assert days("%Y-%m-%dT%H", datetime(2026, 3, 1, tzinfo=UTC)) == ["2026-03-01T00", "2026-03-01T01"]
    assert days("%Y-%m-%d", datetime(2026, 4, 1, tzinfo=UTC)) == []
    with pytest.raises(UserError, match=r"--catch-up: .* more than 10,000 dates"):
        days("%Y-%m-%dT%H", datetime(2024, 2, 1, tzinfo=UTC))
    with pytest.raises(UserError, match=r"--catch-up: there is no run yet"):
        days("%Y-%m-%d")
    plain = load_spec(nightly(tmp_path, output={"path": "one"}))
    with pytest.raises(UserError, match=r"output.path: 'one' has no date"):
        due_dates(plain, now)


def test_only_run_directories_are_found(tmp_path):
    for name in ("a/_plan.json", "a/data/_plan.json", "b/c/_plan.json", ".hidden/_plan.json", "_x/_plan.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name in ("d/_lease.json", "e/_lease.json", "e/sub/x", "f/file.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [run.name for run in runs_below(open_store(str(tmp_path)))] == ["a", "b/c", "d"]
    assert [run.name for run in runs_below(open_store(str(tmp_path / "a")))] == [""]


def test_a_folder_without_a_name_as_a_bucket_may_have_one_is_passed_over(monkeypatch):
    monkeypatch.setattr(MemoryStore, "level", lambda store, name: FolderLevel(("", "_own"), {}))
    assert runs_below(open_store("memory://nameless")) == []
