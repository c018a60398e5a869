"""`input.dedupe: ids`: rows that finished runs have as ok are left out, failed ones are not; any number of ids is looked up."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.plan.id_sets import IdIndex, column_of, hashes_in, hashes_of
from draftmill.storage.stores.s3 import S3Store
from tests.jobs.run.recurring_jobs import DATED, nightly, run
from tests.runs.jobs_of_tests import rows_of
from tests.runs.test_rerun import sicken

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


def on(spec, day: int) -> int:
    return run(spec, "--logical-date", f"2026-11-{day:02d}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("since", [None, "last_success"])
def test_rows_of_a_growing_file_are_decoded_once_and_failed_ones_again(tmp_path, capsys, since):
    log = tmp_path / "log.jsonl"
    spec = growing(tmp_path, input={"path": str(log), "since": since} | DEDUPE)
    log.write_text(rows("a", "b", "c", bad="b"))
    assert on(spec, 1) == 0
    log.write_text(rows("a", "b", "c", "d"))
    assert on(spec, 2) == 0
    assert (ids_on(tmp_path, 1), ids_on(tmp_path, 2)) == (["a", "b", "c"], ["b", "d"])
    done = [str(tmp_path / "nightly" / f"2026-11-0{day}") for day in (1, 2)]
    assert [main(["verify", one]) for one in done] == [0, 0]
    capsys.readouterr()
    log.write_text(rows("d", "c", "b", "a"))
    assert on(spec, 3) == 0
    said = capsys.readouterr().out
    assert "finished runs have all its ids as ok; no run is started" in said
    assert not (tmp_path / "nightly" / "2026-11-03").exists()
    log.write_text(rows("d", "c", "b", "a", "e"))
    assert on(spec, 3) == 0 and ids_on(tmp_path, 3) == ["e"]
    assert on(spec, 3) == 0, "a finished run stays finished"


def test_ids_that_a_rerun_made_ok_are_known_although_the_cache_was_older(tmp_path):
    first, base = tmp_path / "log-1.jsonl", tmp_path / "nightly"
    spec = growing(
        tmp_path, input={"path": f"{tmp_path}/log-*.jsonl", "since": "last_success"} | DEDUPE, sampling={"n": 2}
    )
    first.write_text(rows("a", "b"))
    with pytest.MonkeyPatch.context() as patch:
        sicken(patch, {"b"})
        assert on(spec, 1) == 0
    (tmp_path / "log-2.jsonl").write_text(rows("b", "c"))
    with pytest.MonkeyPatch.context() as patch:
        sicken(patch, {"b"})
        assert on(spec, 2) == 0
    assert ids_on(tmp_path, 2) == ["b", "b", "c", "c"]
    assert (base / "_ledger" / "2026-11-01.ids.parquet").exists()
    assert main(["rerun", str(base / "2026-11-01"), "--failed", "--local", "--quiet"]) == 0
    first.write_text(rows("a", "b", "d"))
    assert on(spec, 3) == 0 and ids_on(tmp_path, 3) == ["d", "d"]


def test_a_damaged_cache_is_built_again(tmp_path):
    log, cache = tmp_path / "log.jsonl", tmp_path / "nightly" / "_ledger" / "2026-11-01.ids.parquet"
    spec = growing(tmp_path)
    log.write_text(rows("a", "b"))
    assert on(spec, 1) == 0
    log.write_text(rows("a", "b", "c"))
    assert on(spec, 2) == 0 and ids_on(tmp_path, 2) == ["c"]
    before = cache.read_bytes()
    for number, damaged in enumerate((None, before[:50], b"")):
        cache.unlink()
        if damaged is not None:
            cache.write_bytes(damaged)
        log.write_text(rows("a", "b", "c", f"d{number}"))
        assert on(spec, 3 + number) == 0 and ids_on(tmp_path, 3 + number) == [f"d{number}"]
        assert cache.read_bytes() == before


def test_an_interrupted_run_keeps_its_rows(tmp_path):
    log = tmp_path / "log.jsonl"
    spec = growing(tmp_path)
    log.write_text(rows("a", "b", "c", "d", "e"))
    assert on(spec, 1) == 0
    base = tmp_path / "nightly"
    log.write_text(rows("a", "b", "c", "d", "e", "f", "g"))
    assert on(spec, 2) == 0
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000000.parquet"):
        (base / "2026-11-02" / name).unlink()
    assert on(spec, 2) == 0 and ids_on(tmp_path, 2) == ["f", "g"]


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
    assert on(spec, 1) == 0
    landing.put("log.jsonl", rows("a", "b", "c").encode())
    assert on(spec, 2) == 0
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
