"""One unit, one file, once; the manifest, in a stream or in one piece, and `_SUCCESS` only when nothing is missing."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.failpoints import VARIABLE
from draftmill.storage.parquet import parquet_metadata, read_parquet
from draftmill.storage.runs.commit import (
    MANIFEST,
    SUCCESS,
    commit_unit,
    done_units,
    read_manifest,
    read_unit,
    trace_name,
    write_manifest,
)
from draftmill.storage.runs.done_units import BLOCK
from draftmill.storage.runs.lease import LeaseLost, acquire
from draftmill.storage.runs.records import TRACE_SCHEMA, read_results, table_from_rows
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.stores.store import MOST_ETAG, Store, open_store
from tests.storage.inputs.tables import unit_table


@dataclasses.dataclass
class StandsStill:
    """A lease whose holder stands still as soon as it has looked at it; `check` is what happens meanwhile."""

    check: Callable


def commit(store: Store, unit: int = 17, **changes) -> CommittedUnit:
    arguments: dict = {
        "unit": unit,
        "table": unit_table(unit=unit),
        "fingerprint": "f00",
        "code_version": "1",
    }
    return commit_unit(store, **(arguments | changes))


def test_a_commit_is_one_checked_file_with_its_facts(store):
    committed = commit(store)
    assert committed.object == unit_name(17) == "data/unit-00000017.parquet"
    assert (committed.rows, committed.ok, committed.failed, committed.skipped) == (4, 3, 1, 0)
    data = store.get(committed.object)
    assert len(data) == committed.bytes
    stored = parquet_metadata(read_parquet(data).schema)
    assert stored["fingerprint"] == "f00" and stored["unit"] == "17" and stored["pass"] == "1"
    assert stored["schema_version"] == "1" and stored["code_version"] == "1"
    assert set(done_units(store)) == {17}


def test_a_second_attempt_finds_the_first_and_reports_its_facts(store):
    first = commit(store)
    second = commit(store, table=unit_table(unit=17, attempt=2), attempt=2)
    assert second == first
    assert next(iter(read_results(store))).column("attempt").to_pylist() == [1, 1, 1, 1]


def test_facts_are_read_again_from_the_store_alone(store):
    assert read_unit(store, commit(store).object) == commit(store)


@pytest.mark.parametrize("changes", [{"fingerprint": "bad"}, {"pass_": 2}])
def test_another_jobs_file_is_a_hard_error_and_stays(store, changes):
    first = commit(store)
    with pytest.raises(StoreError, match="another job"):
        commit(store, **changes)
    assert read_unit(store, first.object) == first


def test_a_file_that_is_not_ours_is_never_taken_for_done(tmp_path):
    store = open_store(str(tmp_path))
    store.create(unit_name(17), b"PAR1 not really")
    with pytest.raises(StoreError, match="damaged"):
        commit(store)


def test_of_many_twins_one_commits_and_all_agree(store):
    tables = [unit_table(unit=17, attempt=attempt) for attempt in range(6)]
    with ThreadPoolExecutor(6) as pool:
        receipts = list(pool.map(lambda table: commit(store, table=table), tables))
    assert len(set(receipts)) == 1
    assert len(list(store.list("data/"))) == 1


def test_the_trace_is_there_before_the_data(store, monkeypatch, failpoints):
    row = {"id": "a", "unit": 17, "pass": 1, "iteration": 0, "nfe": 1, "committed": [1]}
    trace = table_from_rows([row], schema=TRACE_SCHEMA)
    monkeypatch.setenv(VARIABLE, "commit.before_data=raise")
    with pytest.raises(RuntimeError):
        commit(store, trace=trace)
    assert store.exists(trace_name(17)) and not done_units(store)
    commit(store, trace=trace)
    assert read_parquet(store.get(trace_name(17))).column("id").to_pylist() == ["a"]


def test_a_units_trace_is_that_of_the_attempt_that_committed(store, monkeypatch, failpoints):
    def trace(token: int):
        row = {"id": "a", "unit": 17, "pass": 1, "iteration": 0, "nfe": 1, "committed": [token]}
        return table_from_rows([row], schema=TRACE_SCHEMA)

    monkeypatch.setenv(VARIABLE, "commit.before_data=raise")
    with pytest.raises(RuntimeError):
        commit(store, trace=trace(1))
    second = commit(store, trace=trace(2), attempt=2)
    commit(store, trace=trace(3), attempt=3)
    data = store.get(trace_name(17))
    assert read_parquet(data).column("committed").to_pylist() == [[2]]
    told = parquet_metadata(read_parquet(store.get(second.object)).schema)
    assert told["trace_sha256"] == hashlib.sha256(data).hexdigest()


def test_a_manifest_has_the_sums_of_its_units(store):
    committed = [commit(store, unit=unit) for unit in range(3)]
    again = [read_unit(store, unit.object) for unit in committed]
    assert [unit.sums for unit in again] == [unit.sums for unit in committed]
    write_manifest(store, again, fingerprint="f00", units=3, rows=12)
    manifest = read_manifest(store)
    assert manifest is not None and manifest.sums is not None
    assert (manifest.sums.rows, manifest.sums.ok, manifest.sums.failed) == (12, 9, 3)
    unknown = dataclasses.replace(again[0], sums="")
    assert write_manifest(store, [unknown, *again[1:]], fingerprint="f00", units=3, rows=12).sums is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("point", ["commit.before_data", "local.before_link", "local.after_link", "commit.after_data"])
def test_a_writer_killed_anywhere_leaves_a_unit_done_or_absent(point, tmp_path):
    code = "import sys\nfrom draftmill.storage.stores.store import open_store\n"
    code += "from tests.storage.runs.test_commit import commit\n"
    code += "commit(open_store(sys.argv[1]))"
    environment = os.environ | {VARIABLE: f"{point}=kill"}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    store = open_store(str(tmp_path))
    assert bool(done_units(store)) == ("after" in point)
    assert commit(store).rows == 4
    assert len(list(store.list("data/"))) == 1


@pytest.mark.s3
def test_a_lost_answer_is_a_commit(s3_store, s3_server):
    s3_server.fail("lost", part="/data/")
    committed = commit(s3_store)
    assert read_unit(s3_store, committed.object) == committed


@pytest.mark.s3
def test_on_s3_the_facts_come_without_reading_the_file(s3_store, s3_server):
    committed = commit(s3_store)
    s3_server.calm()
    assert read_unit(s3_store, committed.object) == committed
    assert [method for method, _ in s3_server.app.requests] == ["HEAD"]


def test_the_manifest_and_success_come_when_nothing_is_missing(store):
    committed = [commit(store, unit) for unit in (1, 0, 2)]
    manifest = write_manifest(store, committed, fingerprint="f00", units=3, rows=12)
    assert [unit.unit for unit in manifest.units] == [0, 1, 2]
    assert (manifest.total("ok"), manifest.total("failed")) == (9, 3)
    assert read_manifest(store) == manifest
    assert json.loads(store.get(MANIFEST))["totals"]["rows"] == 12
    assert json.loads(store.get(SUCCESS)) == {"fingerprint": "f00", "rows": 12, "units": 3}
    assert write_manifest(store, committed, fingerprint="f00", units=3, rows=12) == manifest


@pytest.mark.parametrize(("sound", "damaged"), [(b"]}\n", b"]}junk\n"), (b"},\n", b"},,\n"), (b"]}\n", b"]}\nmore\n")])
def test_a_manifest_with_more_than_its_lines_is_damaged(store, sound, damaged):
    write_manifest(store, [commit(store, unit) for unit in (1, 0)], fingerprint="f00", units=2, rows=8)
    store.put(MANIFEST, store.get(MANIFEST).replace(sound, damaged))
    with pytest.raises(DamagedRun):
        read_manifest(store)


def test_without_a_unit_or_a_row_nothing_is_written(store):
    committed = [commit(store, unit) for unit in (0, 1)]
    for units, rows in ((3, 8), (2, 9)):
        with pytest.raises(StoreError, match="not complete"):
            write_manifest(store, committed, fingerprint="f00", units=units, rows=rows)
    assert read_manifest(store) is None and not store.exists(SUCCESS)


def test_success_never_comes_before_the_manifest(store, monkeypatch, failpoints):
    committed = [commit(store, 0)]
    monkeypatch.setenv(VARIABLE, "commit.before_success=raise")
    with pytest.raises(RuntimeError):
        write_manifest(store, committed, fingerprint="f00", units=1, rows=4)
    assert store.exists(MANIFEST) and not store.exists(SUCCESS)
    write_manifest(store, committed, fingerprint="f00", units=1, rows=4)
    assert store.exists(SUCCESS)


def test_a_driver_that_lost_its_lease_writes_no_manifest(store):
    now = [1000.0]
    committed = [commit(store, 0)]
    lease = acquire(store, "first", 10, lambda: now[0])
    now[0] += 11
    acquire(store, "second", 10, lambda: now[0])
    with pytest.raises(LeaseLost):
        write_manifest(store, committed, fingerprint="f00", units=1, rows=4, lease=lease)
    assert not store.exists(MANIFEST)


@pytest.mark.parametrize("present", [False, True])
def test_a_driver_that_stands_still_behind_its_last_look_writes_over_no_later_manifest(store, present):
    facts: dict = {"fingerprint": "f00", "units": 1, "rows": 4}
    if present:  # of an earlier try
        store.put(MANIFEST, b"{}")
    late, found = commit(store, 0), commit(store, 0)
    written = list[int]()

    def another() -> None:
        if written:
            raise LeaseLost("another driver has it")
        written.append(1)
        write_manifest(store, [dataclasses.replace(found, etag="new")], **facts)

    meanwhile = StandsStill(another)
    with pytest.raises(LeaseLost, match="another driver"):
        write_manifest(store, [late], lease=meanwhile, **facts)  # type: ignore[arg-type]
    manifest = read_manifest(store)
    assert manifest is not None and manifest.units[0].etag == "new"


def test_a_damaged_manifest_is_named(store):
    store.put(MANIFEST, b'{"fingerprint": "f00"}')
    with pytest.raises(StoreError, match=r"_manifest\.json"):
        read_manifest(store)


def test_facts_are_plain(store):
    committed = commit(store)
    assert CommittedUnit(**json.loads(json.dumps(dataclasses.asdict(committed)))) == committed


def test_a_unit_and_the_manifest_say_whether_results_are_exact(store):
    units = [commit(store, unit=unit, exact=exact) for unit, exact in enumerate((True, True, False))]
    assert [unit.exact for unit in units] == [True, True, False]
    assert [read_unit(store, unit.object).exact for unit in units] == [True, True, False]
    write_manifest(store, units, fingerprint="f00", units=3, rows=sum(unit.rows for unit in units))
    manifest = read_manifest(store)
    assert manifest is not None and manifest.exact is False
    assert json.loads(store.get(MANIFEST))["exact"] is False


def test_a_manifest_of_an_earlier_version_does_not_know_whether_it_is_exact(store):
    units = [commit(store, unit=unit) for unit in range(2)]
    write_manifest(store, units, fingerprint="f00", units=2, rows=sum(unit.rows for unit in units))
    old = store.get(MANIFEST).replace(b', "exact": null', b"")
    assert old != store.get(MANIFEST)
    store.put(MANIFEST, old)
    manifest = read_manifest(store)
    assert manifest is not None and manifest.exact is None


def drawn(count: int, seed: int = 0) -> list[CommittedUnit]:
    """Units in any order."""
    rng = random.Random(seed)
    units = []
    for unit in rng.sample(range(count), count):
        name, etag = unit_name(unit), f"{rng.getrandbits(128):032x}"
        if rng.random() < 0.2:
            etag = rng.choice(["", "a" * 40, "b" * MOST_ETAG, "no-hex-77"])
        sha256 = f"{rng.getrandbits(256):064x}"
        counts = (5, rng.randint(0, 5), 0, 0, rng.getrandbits(40))
        ok = dataclasses.replace(
            CommittedUnit(unit, name, etag, *counts, sha256, rng.choice([True, False, None])), failed=5 - counts[1]
        )
        units.append(ok)
    return units


def test_facts_come_back_as_they_were_added():
    units = drawn(BLOCK + 300)
    facts = UnitFacts(units)
    assert len(facts) == len(units) and list(facts) == units and facts[3] == units[3]
    assert facts == UnitFacts(units) != UnitFacts(units[:-1]) and facts != UnitFacts([*units[:-1], units[0]])
    assert facts.numbers().tolist() == [unit.unit for unit in units]
    assert list(facts.listed) == sorted(unit.unit for unit in units)
    for fact in ("rows", "ok", "failed", "skipped", "bytes"):
        assert facts.total(fact) == sum(getattr(unit, fact) for unit in units)
    assert facts.exacts() == {True, False, None} and UnitFacts([units[0]]).exacts() == {units[0].exact}
    with pytest.raises(IndexError):
        facts[len(units)]
    facts.sort()
    assert list(facts) == sorted(units, key=lambda unit: unit.unit)


@pytest.mark.parametrize(
    "odd",
    [{"object": "data/unit-00000001.0a.parquet"}, *({"etag": etag} for etag in ("é", "b" * 49, "nul\0"))]
    + [{"sha256": sha256} for sha256 in ("", "zz", "00")],
    ids=str,
)
def test_facts_of_another_form_are_refused(odd):
    with pytest.raises(ValueError):
        UnitFacts([dataclasses.replace(drawn(2)[0], **odd)])


def test_a_manifest_has_a_line_for_each_unit_and_is_written_once(store):
    units = drawn(300)
    facts = {"fingerprint": "f00", "units": 300, "rows": 1500}
    made = write_manifest(store, units, **facts)  # type: ignore[arg-type]
    whole = store.get(MANIFEST)
    rows = [dataclasses.asdict(unit) for unit in sorted(units, key=lambda unit: unit.unit)]
    lines = ",\n".join(json.dumps({name: row[name] for name in row if name != "sums"}) for row in rows)
    assert whole.decode().partition("[\n")[2] == f"{lines}\n]}}\n"
    assert write_manifest(store, units, **facts) == made, "it is there already"  # type: ignore[arg-type]
    store.put(MANIFEST, whole.replace(b"f00", b"f01"))
    write_manifest(store, units, **facts)  # type: ignore[arg-type]
    assert store.get(MANIFEST) == whole, "replaced"
    store.delete(MANIFEST)
    store.delete(SUCCESS)
    write_manifest(store, units, **facts)  # type: ignore[arg-type]
    assert store.get(MANIFEST) == whole, "created"
    assert read_manifest(store) == made


def test_a_manifest_with_other_line_ends_is_read(store):
    units = drawn(20)
    made = write_manifest(store, units, fingerprint="f00", units=20, rows=100)
    for text in (json.dumps(json.loads(store.get(MANIFEST))), json.dumps(json.loads(store.get(MANIFEST)), indent=2)):
        store.put(MANIFEST, text.encode())
        found = read_manifest(store)
        assert found is not None and found == made and found.totals == json.loads(text)["totals"]


def test_damage_in_any_line_is_named(store):
    write_manifest(store, drawn(9), fingerprint="f00", units=9, rows=45)
    lines = store.get(MANIFEST).split(b"\n")
    rng = random.Random(1)
    damaged = [b"\n".join(lines[:end]) for end in range(len(lines) - 2)] + [b"\n".join([*lines, b"{}"])]
    for place in range(len(lines) - 1):
        middle = rng.randrange(1, max(2, len(lines[place]) - 1))
        damaged.append(b"\n".join([*lines[:place], lines[place][:middle], *lines[place + 1 :]]))
    damaged.append(b"\n".join(lines).replace(b'"rows"', b'"rowz"', 2))
    for data in damaged:
        store.put(MANIFEST, data)
        with pytest.raises(DamagedRun, match=r"_manifest\.json"):
            read_manifest(store)
