"""Incremental runs: what no finished run of the name has had, by contents and never by dates, or by ids that are ok already."""

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.plan.id_sets import IdIndex, column_of, hashes_in, hashes_of
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.run.since import difference
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import open_store
from tests.jobs.run.recurring_jobs import DATED, driver, interrupted, nightly, run, units_decoded
from tests.runs.jobs_of_tests import rows_of, write_rows
from tests.runs.test_rerun import sicken

SINCE = {"columns": {"id": "id", "tokens": "tokens"}, "since": "last_success"}


def land(folder, name: str, *, rows: int = 4, seed: int = 0):
    """A file of rows whose ids begin with its name."""
    folder.mkdir(exist_ok=True)
    file = write_rows(folder / name, rows, seed=seed)
    file.write_text(file.read_text().replace('"row-', f'"{name}-'))
    return file


def incremental(folder, **changes):
    """A nightly job over `folder`/landing."""
    return nightly(folder, rows=folder, **{"input": {"path": f"{folder}/landing/*.jsonl"} | SINCE} | changes)


def on(spec, day: int, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a run that ends well on a day of November says."""
    assert run(spec, "--logical-date", f"2026-11-{day:02d}", *options) == 0
    return capsys.readouterr().out


def inputs_of(folder, day: int) -> list[str]:
    plan = load_plan(open_store(str(folder / "nightly" / f"2026-11-{day:02d}")))
    assert plan is not None
    return [file.name for file in plan.files]


def test_each_run_takes_what_is_new_or_changed_and_counts_what_vanished(tmp_path, capsys):
    spec, landing = incremental(tmp_path), tmp_path / "landing"
    land(landing, "a.jsonl")
    land(landing, "b.jsonl", seed=1)
    assert "input.since: 2 new, 0 changed, 0 done before, 0 vanished (0 finished runs)" in on(spec, 1, capsys)
    land(landing, "c.jsonl", seed=2)
    late = land(landing, "0-late.jsonl", seed=3)
    os.utime(late, (1e9, 1e9))  # a slow upload that keeps its old date
    assert "2 new, 0 changed, 2 done before, 0 vanished (1 finished run)" in on(spec, 2, capsys)
    assert inputs_of(tmp_path, 2) == ["0-late.jsonl", "c.jsonl"]
    land(landing, "a.jsonl", rows=6, seed=4)
    (landing / "b.jsonl").unlink()
    assert "0 new, 1 changed, 2 done before, 1 vanished (2 finished runs)" in on(spec, 3, capsys)
    assert inputs_of(tmp_path, 3) == ["a.jsonl"]
    found = [rows_of(tmp_path / "nightly" / f"2026-11-0{day}")["id"].to_pylist() for day in (1, 2, 3)]
    assert [len(ids) for ids in found] == [8, 8, 6]
    said = on(spec, 4, capsys)
    assert "0 new, 0 changed, 3 done before, 1 vanished" in said and "no run is started" in said
    assert not (tmp_path / "nightly" / "2026-11-04").exists()
    for file in landing.iterdir():
        file.unlink()
    assert "0 new, 0 changed, 0 done before, 4 vanished" in on(spec, 4, capsys), "an emptied folder is nothing new"


def test_a_file_that_was_only_touched_is_done_and_one_of_the_same_size_and_other_content_is_not(tmp_path, capsys):
    spec, landing = incremental(tmp_path), tmp_path / "landing"
    first, second = land(landing, "a.jsonl"), land(landing, "b.jsonl", seed=1)
    on(spec, 1, capsys)
    os.utime(first, (2e9, 2e9))
    text = second.read_text()
    second.write_text(text.replace("b.jsonl-0", "b.jsonl-9"))
    assert len(text) == len(second.read_text())
    assert "0 new, 1 changed, 1 done before" in on(spec, 2, capsys)
    assert inputs_of(tmp_path, 2) == ["b.jsonl"]
    second.write_text(text)
    assert "0 new, 0 changed, 2 done before" in on(spec, 3, capsys), "the first version again"


def test_every_finished_run_below_the_base_counts_whatever_its_name(tmp_path, capsys):
    spec, base = incremental(tmp_path), tmp_path / "nightly"
    land(tmp_path / "landing", "a.jsonl")
    on(spec, 1, capsys, "--set", f"output.path={base}/{DATED}/")
    land(tmp_path / "landing", "b.jsonl", seed=1)
    on(spec, 2, capsys, "--set", f"output.path={base}/{{date:%Y-%m-%d}}/deep")
    land(tmp_path / "landing", "c.jsonl", seed=2)
    typed = ("--set", f"output.path={base}/typed", "--set", "input.since=null")
    assert run(spec, *typed) == 0
    capsys.readouterr()
    land(tmp_path / "landing", "d.jsonl", seed=3)
    assert "1 new, 0 changed, 3 done before, 0 vanished (3 finished runs)" in on(spec, 3, capsys)


def test_files_that_moved_with_their_names_are_done(tmp_path, capsys):
    spec, landing = incremental(tmp_path), tmp_path / "landing"
    land(landing, "a.jsonl")
    land(landing, "b.jsonl", seed=1)
    on(spec, 1, capsys)
    shutil.copytree(landing, tmp_path / "elsewhere")
    shutil.rmtree(landing)
    land(tmp_path / "elsewhere", "b.jsonl", rows=5, seed=2)
    moved = ("--set", f"input.path={tmp_path}/elsewhere/*.jsonl")
    assert "0 new, 1 changed, 1 done before, 0 vanished" in on(spec, 2, capsys, *moved)
    assert inputs_of(tmp_path, 2) == ["b.jsonl"]


def test_a_run_that_did_not_finish_does_not_count_and_a_resumed_one_keeps_its_own_inputs(tmp_path, capsys):
    spec, landing = incremental(tmp_path), tmp_path / "landing"
    land(landing, "b.jsonl")
    interrupted(spec, "2026-11-01")
    assert capsys.readouterr()
    land(landing, "a.jsonl", seed=1)
    assert "2 new, 0 changed, 0 done before" in on(spec, 2, capsys), "the inputs of the unfinished run come again"
    land(landing, "c.jsonl", seed=2)
    said = on(spec, 1, capsys)
    assert "input.since" not in said and inputs_of(tmp_path, 1) == ["b.jsonl"], "resumed with its own inputs"
    assert "1 new, 0 changed, 2 done before" in on(spec, 3, capsys)
    done = str(tmp_path / "nightly" / "2026-11-01")
    assert main(["verify", done]) == 0
    assert main(["rerun", done, "--failed", "--local", "--quiet"]) == 0
    assert "no failed samples" in capsys.readouterr().out
    (landing / "b.jsonl").unlink()
    shutil.rmtree(f"{done}/data")
    for name in ("_SUCCESS", "_manifest.json"):
        (tmp_path / "nightly" / "2026-11-01" / name).unlink()
    assert run(spec, "--logical-date", "2026-11-01") == 2
    assert "b.jsonl (missing)" in capsys.readouterr().err


def test_what_was_deleted_does_not_count_and_a_damaged_plan_is_named(tmp_path, capsys):
    spec, landing, done = incremental(tmp_path), tmp_path / "landing", tmp_path / "nightly" / "2026-11-01"
    land(landing, "a.jsonl")
    on(spec, 1, capsys)
    assert "1 done before" in on(spec, 2, capsys)
    plan = (done / "_plan.json").read_bytes()
    (done / "_plan.json").write_bytes(plan[:50])
    assert run(spec, "--logical-date", "2026-11-02") == 2
    assert "2026-11-01/_plan.json is damaged" in capsys.readouterr().err
    shutil.rmtree(done)
    assert "1 new, 0 changed, 0 done before" in on(spec, 2, capsys)


@pytest.mark.slow
def test_a_driver_of_an_incremental_job_that_is_killed_leaves_nothing_that_matters(tmp_path, capsys):
    spec, landing = incremental(tmp_path), tmp_path / "landing"
    land(landing, "a.jsonl")
    on(spec, 1, capsys)
    land(landing, "b.jsonl", seed=1)
    for point in ("plan.before_plan=kill", "commit.before_success=kill"):
        killed = driver(spec, tmp_path / "log", "--logical-date", "2026-11-02", failpoints=point)
        killed.join(120)
        assert killed.exitcode == -9, (tmp_path / "log").read_text()
    on(spec, 2, capsys)
    assert inputs_of(tmp_path, 2) == ["b.jsonl"] and set(units_decoded(tmp_path / "nightly" / "2026-11-02")) == {0}
    assert "no run is started" in on(spec, 3, capsys)


@pytest.mark.slow
def test_nothing_new_takes_no_ray_and_writes_no_run_directory(tmp_path, capsys):
    spec = incremental(tmp_path)
    land(tmp_path / "landing", "a.jsonl")
    on(spec, 1, capsys)
    code = "import sys; from draftmill.jobs.cli import main; code = main(sys.argv[1:]); sys.exit('ray' in sys.modules or code)"
    command = [sys.executable, "-c", code, "run", str(spec), "--logical-date", "2026-11-02"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing is new in" in done.stdout
    assert sorted(path.name for path in (tmp_path / "nightly").iterdir()) == ["2026-11-01", "_lease.json"]


def test_validate_counts_what_is_new_and_writes_nothing(tmp_path, capsys):
    spec = incremental(tmp_path)
    land(tmp_path / "landing", "a.jsonl")
    on(spec, 1, capsys)
    before = sorted(tmp_path.rglob("*"))
    assert main(["validate", str(spec), "--logical-date", "2026-11-02"]) == 0
    assert "nothing is new in" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": {"path": "runs/one"}}, "input.since: 'last_success' needs a run directory for each date"),
        ({"input": {"path": "in/*.jsonl", "limit": 5, **SINCE}}, "input.limit: 5, but input.since takes all"),
        ({"input": {"path": "in/*.jsonl", "since": "yesterday"}}, "input.since: "),
        ({"input": {"path": "in/*.jsonl", "dedupe": "texts"}}, "input.dedupe: "),
        ({"input": {"path": "nowhere/*.jsonl", **SINCE}}, "input.path: nothing is at"),
    ],
)
def test_what_can_not_be_is_refused_with_the_key(tmp_path, capsys, changes, said):
    assert run(incremental(tmp_path, **changes)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "nightly").exists()


@pytest.mark.slow
@pytest.mark.s3
def test_incremental_runs_over_a_bucket(tmp_path, capsys, s3_url, s3_options):
    landing = S3Store(f"{s3_url}/landing", s3_options)
    spec = nightly(
        tmp_path,
        input={"path": f"{s3_url}/landing/*.jsonl"} | SINCE,
        output={"path": f"{s3_url}/nightly/{DATED}", "unit_rows": 4},
        s3={"endpoint": s3_options.endpoint, "region": s3_options.region},
    )
    one, two = (land(tmp_path / "files", name, seed=seed).read_bytes() for seed, name in enumerate("ab"))
    landing.put("a.jsonl", one)
    assert "1 new, 0 changed, 0 done before" in on(spec, 1, capsys)
    landing.put("b.jsonl", two)
    landing.put("a.jsonl", one)  # uploaded again: another date, the same etag
    assert "1 new, 0 changed, 1 done before" in on(spec, 2, capsys)
    landing.put("a.jsonl", one.replace(b"a-0", b"a-7"))
    landing.delete("b.jsonl")
    assert "0 new, 1 changed, 0 done before, 1 vanished (2 finished runs)" in on(spec, 3, capsys)
    assert "no run is started" in on(spec, 4, capsys)
    names = {stat.name.partition("/")[0] for stat in S3Store(f"{s3_url}/nightly", s3_options).list()}
    assert names == {"2026-11-01", "2026-11-02", "2026-11-03", "_lease.json"}


def test_the_difference_is_that_of_plain_sets():
    def file(number: int, version: int, *, etag: bool) -> InputFile:
        name = f"{number}.jsonl"
        uri, size = f"s3://b/{name}" if etag else f"/nowhere/{name}", 100 + version
        return InputFile(uri, name, size, f"e{version}" if etag else None, None if etag else 5.5 + version, "jsonl")

    done = [file(number, version, etag=number % 2 == 0) for number in range(60) for version in range(number % 3)]
    listed = [file(number, number % 5, etag=number % 2 == 0) for number in range(20, 90)]
    found = difference(listed, [one.facts() for one in done], runs=3)
    known = {one.uri for one in done}
    versions = {(one.uri, one.size, one.etag, one.mtime_s) for one in done}
    fresh = [one for one in listed if (one.uri, one.size, one.etag, one.mtime_s) not in versions]
    assert found.files == fresh
    assert found.new == sum(one.uri not in known for one in fresh)
    assert found.changed == len(fresh) - found.new > 0
    assert found.same == len(listed) - len(fresh) > 0
    assert found.vanished == len(known - {one.uri for one in listed}) == 13
    assert difference([], [], runs=0).files == []
    assert json.dumps(found.text)


DEDUPE = {"columns": {"id": "id", "tokens": "tokens"}, "dedupe": "ids"}


def rows(*names: str, bad: str = "") -> str:
    """Lines with these ids; the one named `bad` has an id of a token that does not exist, and fails."""
    tokens = {name: [7, None, 10**7 if name == bad else 9] for name in names}
    return "".join(json.dumps({"id": name, "tokens": ids}) + "\n" for name, ids in tokens.items())


def growing(folder, **changes):
    defaults: dict = {"input": {"path": f"{folder}/log.jsonl"} | DEDUPE, "errors": {"max_rate": 1.0}}
    return nightly(folder, rows=folder, **defaults | changes)


def ids_on(folder, day: int) -> list[str]:
    return sorted(rows_of(folder / "nightly" / f"2026-11-{day:02d}")["id"].to_pylist())


def ran_on(spec, day: int) -> int:
    return run(spec, "--logical-date", f"2026-11-{day:02d}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("since", [None, "last_success"])
def test_rows_of_a_growing_file_are_decoded_once_and_failed_ones_again(tmp_path, capsys, since):
    log = tmp_path / "log.jsonl"
    spec = growing(tmp_path, input={"path": str(log), "since": since} | DEDUPE)
    log.write_text(rows("a", "b", "c", bad="b"))
    assert ran_on(spec, 1) == 0
    log.write_text(rows("a", "b", "c", "d"))
    assert ran_on(spec, 2) == 0
    assert (ids_on(tmp_path, 1), ids_on(tmp_path, 2)) == (["a", "b", "c"], ["b", "d"])
    done = [str(tmp_path / "nightly" / f"2026-11-0{day}") for day in (1, 2)]
    assert [main(["verify", one]) for one in done] == [0, 0]
    capsys.readouterr()
    log.write_text(rows("d", "c", "b", "a"))
    assert ran_on(spec, 3) == 0
    said = capsys.readouterr().out
    assert "finished runs have all its ids as ok; no run is started" in said
    assert not (tmp_path / "nightly" / "2026-11-03").exists()
    log.write_text(rows("d", "c", "b", "a", "e"))
    assert ran_on(spec, 3) == 0 and ids_on(tmp_path, 3) == ["e"]
    assert ran_on(spec, 3) == 0, "a finished run stays finished"


def test_ids_that_a_rerun_made_ok_are_known_although_the_cache_was_older(tmp_path):
    first, base = tmp_path / "log-1.jsonl", tmp_path / "nightly"
    spec = growing(
        tmp_path, input={"path": f"{tmp_path}/log-*.jsonl", "since": "last_success"} | DEDUPE, sampling={"n": 2}
    )
    first.write_text(rows("a", "b"))
    with pytest.MonkeyPatch.context() as patch:
        sicken(patch, {"b"})
        assert ran_on(spec, 1) == 0
    (tmp_path / "log-2.jsonl").write_text(rows("b", "c"))
    with pytest.MonkeyPatch.context() as patch:
        sicken(patch, {"b"})
        assert ran_on(spec, 2) == 0
    assert ids_on(tmp_path, 2) == ["b", "b", "c", "c"]
    assert (base / "_ledger" / "2026-11-01.ids.parquet").exists()
    assert main(["rerun", str(base / "2026-11-01"), "--failed", "--local", "--quiet"]) == 0
    first.write_text(rows("a", "b", "d"))
    assert ran_on(spec, 3) == 0 and ids_on(tmp_path, 3) == ["d", "d"]


def test_a_damaged_cache_is_built_again(tmp_path):
    log, cache = tmp_path / "log.jsonl", tmp_path / "nightly" / "_ledger" / "2026-11-01.ids.parquet"
    spec = growing(tmp_path)
    log.write_text(rows("a", "b"))
    assert ran_on(spec, 1) == 0
    log.write_text(rows("a", "b", "c"))
    assert ran_on(spec, 2) == 0 and ids_on(tmp_path, 2) == ["c"]
    before = cache.read_bytes()
    for number, damaged in enumerate((None, before[:50], b"")):
        cache.unlink()
        if damaged is not None:
            cache.write_bytes(damaged)
        log.write_text(rows("a", "b", "c", f"d{number}"))
        assert ran_on(spec, 3 + number) == 0 and ids_on(tmp_path, 3 + number) == [f"d{number}"]
        assert cache.read_bytes() == before


def test_an_interrupted_run_keeps_its_rows(tmp_path):
    log = tmp_path / "log.jsonl"
    spec = growing(tmp_path)
    log.write_text(rows("a", "b", "c", "d", "e"))
    assert ran_on(spec, 1) == 0
    base = tmp_path / "nightly"
    log.write_text(rows("a", "b", "c", "d", "e", "f", "g"))
    assert ran_on(spec, 2) == 0
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000000.parquet"):
        (base / "2026-11-02" / name).unlink()
    assert ran_on(spec, 2) == 0 and ids_on(tmp_path, 2) == ["f", "g"]


@pytest.mark.slow
@pytest.mark.s3
def test_ids_in_a_bucket(tmp_path, s3_url, s3_options):
    landing = S3Store(f"{s3_url}/landing", s3_options)
    spec = growing(
        tmp_path,
        input={"path": f"{s3_url}/landing/log.jsonl", "since": "last_success"} | DEDUPE,
        output={"path": f"{s3_url}/nightly/{DATED}", "unit_rows": 4},
        s3={"endpoint": s3_options.endpoint, "region": s3_options.region},
    )
    landing.put("log.jsonl", rows("a", "b").encode())
    assert ran_on(spec, 1) == 0
    landing.put("log.jsonl", rows("a", "b", "c").encode())
    assert ran_on(spec, 2) == 0
    found = rows_of(S3Store(f"{s3_url}/nightly/2026-11-02", s3_options))
    assert found["id"].to_pylist() == ["c"]


def test_ids_are_found_as_in_a_plain_set(monkeypatch):
    rng = random.Random(5)
    known = {f"id-{rng.randrange(10**9)}" for _ in range(30_000)}
    asked = [*rng.sample(sorted(known), 4000), *(f"other-{number}" for number in range(4000))]
    rng.shuffle(asked)
    with IdIndex() as index:
        names = sorted(known)
        for start in range(0, len(names), 7001):  # in parts, some of them twice
            index.add(hashes_of(names[start : start + 7001]))
            index.add(hashes_of(names[start : start + 10]))
        assert index.has(asked).tolist() == [name in known for name in asked]
        assert index.has([]).tolist() == []
    with IdIndex() as empty:
        assert empty.has(["a"]).tolist() == [False]


def test_hashes_survive_a_file_sorted_and_without_those_that_are_excluded():
    one = lambda name: hashes_of([name]).tobytes()  # noqa: E731
    column = column_of(hashes_of(["a", "b", "a", "c"]), without=hashes_of(["b", "x"]))
    assert column.to_pylist() == sorted([one("a"), one("c")])
    read = hashes_in(pa.chunked_array([column.slice(0, 1), column.slice(1)]))
    assert np.array_equal(np.sort(read), np.sort(hashes_of(["a", "c"])))
