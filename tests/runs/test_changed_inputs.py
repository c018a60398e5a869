"""An input that is replaced while a job is planned, read or resumed: never the text of another row under an id."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.actors.loop.worker import build_runner
from draftmill.actors.messages import CHANGED_INPUT, Failure, WorkUnit
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.planning import make_plan, survey
from draftmill.jobs.plan.resolve import make_job, resolve, resolved_of
from draftmill.storage.errors import ChangedInput
from draftmill.storage.inputs import reader, sources, tables
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.inputs.tables import BatchCache
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores import block_cache
from draftmill.storage.stores.block_cache import BlockCache
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import Place, open_store
from tests.runs.causal_jobs import job_spec, results_of, save_model
from tests.storage.stores.fsspec_driver import register

PLANNED = [{"id": f"old-{number}", "prompt": f"x = {number}"} for number in range(8)]
OTHERS = [{"id": f"new-{number}", "prompt": f"y = {number}"} for number in range(8)]
"""As long as the planned rows: the files have the same size."""


def write(path: Path, rows: list[dict[str, str]], *, as_of: os.stat_result | None = None) -> None:
    """Replace a file, by a rename; `as_of` gives the new one the date of an older one."""
    other = path.with_name(f"other-{path.name}")
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), other)
    else:
        other.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if as_of is not None:
        os.utime(other, ns=(as_of.st_mtime_ns, as_of.st_mtime_ns))
    other.replace(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", ends=[2])
    return tmp_path


def planned(folder: Path, name: str = "rows.jsonl") -> tuple[JobSpec, Plan, Path]:
    """A job with a plan, in which nothing is decoded yet, and its input."""
    path = folder / name
    spec = job_spec(folder, PLANNED, input={"path": str(path)})
    write(path, PLANNED)
    store = open_store(spec.output.path)
    return spec, make_plan(resolve(spec, store), store, Display()), path


def decode(spec: JobSpec, plan: Plan) -> list[Failure]:
    """Decode every unit once, as a new process would, which has nothing of the inputs in memory; what failed."""
    reader._seekable.cache_clear()
    tables._open_parquet.cache_clear()
    tables._BATCHES = BatchCache()
    runner = build_runner(make_job(resolved_of(plan), plan), name="w", node="n", threads=1)
    failures = []
    for size in plan.sizes():
        runner.add(WorkUnit(size.unit, size.unit, size.rows, size.tokens, 1, 1, 0, size.rows))
        while runner.held:
            failures += [news for news in runner.step() if isinstance(news, Failure)]
    runner.close()
    return failures


def test_a_worker_opens_units_without_reading_the_plan(folder):
    spec, plan, _ = planned(folder)
    job = make_job(resolved_of(plan), plan)
    (Path(spec.output.path) / PLAN).unlink()  # with many inputs it is hundreds of megabytes
    runner = build_runner(job, name="w", node="n", threads=1)
    runner.add(WorkUnit(0, 0, 8, 0, 1, 1, 0, 8))
    while runner.held:
        assert not [news for news in runner.step() if isinstance(news, Failure)]
    runner.close()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("same_date", [False, True])
def test_an_input_that_is_replaced_after_the_plan_commits_no_row(folder, name, same_date):
    spec, plan, path = planned(folder, name)
    write(path, OTHERS, as_of=path.stat() if same_date else None)
    (failure,) = decode(spec, plan)
    assert (failure.kind, failure.error_kind) == ("INFRA", CHANGED_INPUT)
    assert path.name in failure.error and "has changed since" in failure.error
    if same_date:  # size and date are those of the plan: only the ids tell
        assert re.search(r"row (\d) has the id 'new-\1', which was 'old-\1'", failure.error)
    assert not results_of(spec)
    write(path, PLANNED)
    assert decode(spec, plan) == [] and set(results_of(spec)) == {row["id"] for row in PLANNED}


def test_a_file_that_lost_its_ids_is_another_one(folder):
    spec, plan, path = planned(folder)
    size, date = path.stat().st_size, path.stat()
    write(path, [{"nn": row["id"], "prompt": row["prompt"]} for row in PLANNED], as_of=date)
    assert path.stat().st_size == size
    (failure,) = decode(spec, plan)
    assert re.search(r"row (\d) has the id 'rows.jsonl:\1', which was 'old-\1'", failure.error)


def test_a_copy_with_another_date_is_the_planned_file_and_is_read(folder):
    spec, plan, path = planned(folder)
    os.utime(path, (1, 1))
    assert decode(spec, plan) == [] and len(results_of(spec)) == len(PLANNED)


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_input_that_is_replaced_while_it_is_planned_leaves_no_plan(folder, monkeypatch, when):
    path = folder / "rows.jsonl"
    spec = job_spec(folder, PLANNED)
    write(path, PLANNED)
    store = open_store(spec.output.path)
    resolved = resolve(spec, store)
    if when == "before":
        write(path, OTHERS)

    def late(*given):
        write(path, OTHERS)  # the file has been hashed, and its rows are read next
        return survey(*given)

    with pytest.raises(ChangedInput, match=r"^input\.path: .*rows\.jsonl has changed since it was listed"):
        make_plan(resolved, store, Display(), survey=survey if when == "before" else late)
    assert not store.exists("_plan.json")


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BUFFER_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    write(path, PLANNED)
    os.utime(path, (1, 1))
    (file,) = list_inputs(str(path))
    rows = iterate(file)
    next(rows)
    with path.open("r+") as same:
        same.seek(0)
        same.write("".join(f"{json.dumps(row)}\n" for row in OTHERS))
    with pytest.raises(ChangedInput, match="it was written to while it was read"):
        list(rows)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_an_object_that_fsspec_reads_and_that_is_replaced_after_the_plan_commits_no_row(folder, scheme, monkeypatch):
    driver = register(monkeypatch, scheme)
    spec = job_spec(folder, PLANNED, input={"path": f"{scheme}://bucket/rows.jsonl"})

    def put(letter: str) -> None:
        rows = [{"id": row["id"], "prompt": row["prompt"].replace("x", letter)} for row in PLANNED]
        driver.pipe_file("bucket/rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        monkeypatch.setattr(block_cache, "BLOCKS", BlockCache())

    put("x")
    store = open_store(spec.output.path)
    plan = make_plan(resolve(spec, store), store, Display())
    put("y")  # the ids stay, so that only the version tells
    (failure,) = decode(spec, plan)
    assert (failure.kind, failure.error_kind) == ("INFRA", CHANGED_INPUT)
    assert f"{scheme}://bucket/rows.jsonl has changed since it was listed" in failure.error and not results_of(spec)


@pytest.mark.s3
def test_an_object_that_is_replaced_is_never_read_as_the_listed_one(s3_options, s3_url, monkeypatch):
    s3_store = S3Store(s3_url, s3_options)

    def put(rows: list[dict[str, str]]) -> None:
        s3_store.put("in/rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())

    put(PLANNED)
    (file,) = list_inputs(Place(f"{s3_url}/in/rows.jsonl", s3_options))
    assert [row.values for row in read_rows(file, [(0, 0)])] == [PLANNED[0]]
    put(OTHERS)
    reader._seekable.cache_clear()
    monkeypatch.setattr(block_cache, "BLOCKS", BlockCache())
    for rows in (iterate(file), read_rows(file, [(0, 0)])):
        with pytest.raises(ChangedInput, match=r"^input\.path: s3://.*rows\.jsonl has changed since it was listed"):
            list(rows)
