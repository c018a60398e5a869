"""What is new to a recurring job: files that no finished run has read (`input.since`), ids that none has (`input.dedupe`).

A set difference between today's listing and the inputs of all finished runs; no clock decides anything. A file is new if its
place and its name are unknown, and changed if its etag (S3), or its size and mtime (disk), are those of no finished run. A local
file of which only the mtime or the place has changed is hashed: with the same name and content it counts as the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.config.dates import has_date, read_date
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import Notes, counted
from draftmill.jobs.plan.id_sets import HASH_BYTES, IdIndex, column_of, hashes_in, hashes_of
from draftmill.jobs.plan.plan import LAST, load_plan, planned_inputs
from draftmill.jobs.plan.planning import Sift
from draftmill.jobs.results.passes import PRUNED, latest_rows, passes_of
from draftmill.jobs.results.runs import FoundRun, base_store, finished_runs, runs_of
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import with_hashes
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.commit import MANIFEST
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import Store


@dataclass(frozen=True, slots=True)
class NewInputs:
    """What is new: `files` are the new and the changed ones, in the order of the listing; `runs` counts the finished runs."""

    files: list[InputFile]
    new: int
    changed: int
    same: int
    vanished: int
    runs: int

    @property
    def text(self) -> str:
        """The counts in words."""
        return (
            f"{self.new:,} new, {self.changed:,} changed, {self.same:,} done before, {self.vanished:,} vanished "
            f"({counted(self.runs, 'finished run')})"
        )


def new_files(spec: JobSpec, store: Store, path: str) -> NewInputs | None:
    """What no finished run of the job already read; None without `input.since`, and for a run with a plan, which has its inputs.

    `path` is the output path as it is written. UserError if the inputs can't be listed, or if there are none and no run has
    finished yet.
    """
    if spec.input.since is None or store.exists(PLAN):
        return None
    base = runs_store(spec, path)
    runs = finished_runs(base)
    try:
        listed = list_inputs(*spec.input_places, delimiter=spec.input.delimiter)
    except NothingThere:  # files may be moved away when they are done
        if not runs:
            raise
        listed = []
    return difference(listed, done_inputs(base, runs), runs=len(runs))


def with_last_run(spec: JobSpec, store: Store, path: str) -> JobSpec:
    """The job with its last finished date before this one in place of `last` among the runs that draft; without it on the first
    date. A plan keeps the run that it has."""
    names = spec.decoder.drafting_runs
    if LAST not in names:
        return spec
    if (plan := load_plan(store)) is not None:
        return spec.with_drafting_runs(plan.spec.decoder.drafting_runs)
    runs_store(spec, path)  # refuses a path without a date
    now = read_date(spec.output.logical_date or "")
    finished = [run for date, run in runs_of(spec.place(path)).items() if date < now and run.success is not None]
    last = [run.store.url for run in finished[-1:]]
    return spec.with_drafting_runs(tuple(chain.from_iterable(last if name == LAST else [name] for name in names)))


def runs_store(spec: JobSpec, path: str) -> Store:
    """The folder with the runs of all dates, of an output path as it is written; UserError if it has no date."""
    if not has_date(path):
        raise UserError(
            f"{path!r} has no date, so the runs before it are not known; allowed: base/{{date:%Y-%m-%d}}",
            field="output.path",
        )
    return base_store(spec.place(path))


def done_inputs(base: Store, runs: Sequence[FoundRun]) -> Iterator[dict[str, Any]]:
    """The facts of the inputs of these runs, which are finished; their plans are read in parallel."""
    for _, facts in parallel_map(runs, lambda run: planned_inputs(run.store)):
        yield from facts.result()


def difference(listed: Sequence[InputFile], done: Iterable[Mapping[str, Any]], *, runs: int) -> NewInputs:
    """The listed files without those that are in `done` (facts of inputs) in the same version."""
    here = {("uri", file.uri) for file in listed} | {("name", file.name) for file in listed}
    known, versions, gone, contents = set(), set(), set(), dict[Any, set[str]]()
    for facts in done:
        places = {("uri", facts["uri"]), ("name", facts["name"])}
        if places.isdisjoint(here):
            gone.add(facts["uri"])
            continue
        known |= places
        versions |= _versions(facts)
        for place in places if facts["sha256"] is not None else ():
            contents.setdefault((place, facts["size"]), set()).add(facts["sha256"])

    def hashes(file: InputFile) -> set[str]:
        size = file.size or 0
        return contents.get((("uri", file.uri), size), set()) | contents.get((("name", file.name), size), set())

    others = [file for file in listed if versions.isdisjoint(_versions(file.facts()))]
    # The content of a local file may be known although its date or place is not; only files of a known size are hashed.
    unsure = [file for file in others if file.etag is None and hashes(file)]
    same = {file.uri for file in with_hashes(unsure) if file.sha256 in hashes(file)}
    files = [file for file in others if file.uri not in same]
    new = sum(known.isdisjoint({("uri", file.uri), ("name", file.name)}) for file in files)
    return NewInputs(files, new, len(files) - new, len(listed) - len(files), len(gone), runs)


def _versions(facts: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """What names a file with its version: its uri or name, size and etag, or else its uri, size and mtime."""
    if facts["etag"] is None:
        return {("uri", facts["uri"], facts["size"], "mtime", facts["mtime_s"])}
    return {(key, facts[key], facts["size"], "etag", facts["etag"]) for key in ("uri", "name")}


# ---- `input.dedupe: ids`: the ids that finished runs of a recurring job have as ok, which a new plan skips
#
# An id is done in a run if each of its samples is ok there, in the last pass that has it. The truth is in the results. A run
# whose results were pruned has its ids in RUN/_ids.parquet.
#
#     BASE/_ledger/2026-11-22.ids.parquet    a cache of a run's hashed ids: its results take 35 times as long

IDS = "_ids.parquet"
"""In a pruned run: the hashes of its ids that are ok."""

SCHEMA = pa.schema([("id", pa.binary(HASH_BYTES))])


@contextmanager
def sifting(base: Store, runs: Sequence[FoundRun], display: Notes) -> Iterator[Sift]:
    """During the block, a function that skips the rows whose ids these finished runs have as ok.

    Call it under the lease of the name, since it brings the cache up to date. At the end a note says how many rows were skipped.
    """
    skipped = 0
    with IdIndex() as index:
        for run in runs:
            index.add(hashes_in(ids_of(base, run)["id"]))

        def sift(table: pa.Table) -> pa.Table:
            nonlocal skipped
            is_done = index.has(table["id"].to_pylist())
            skipped += int(is_done.sum())
            return table.filter(pa.array(~is_done))

        yield sift
    display.note(
        f"dedupe: {counted(skipped, 'row')} skipped, whose ids {counted(len(runs), 'finished run')} have as ok"
    )


def ids_of(base: Store, run: FoundRun) -> pa.Table:
    """A table of SCHEMA with the hashed ids that are ok in a finished run; enters it into the cache."""
    if PRUNED in run.level.files:
        return read_parquet(run.store.get(IDS)).replace_schema_metadata(None)
    name = f"_ledger/{run.name.replace('/', '~')}.ids.parquet"  # the character between folders is in no date
    facts = _version(run)
    try:
        table = read_parquet(base.get(name))
        if parquet_metadata(table.schema) == facts and table.schema.equals(SCHEMA):
            return table.replace_schema_metadata(None)
    except (StoreError, pa.ArrowInvalid, OSError):  # missing or damaged
        pass
    table = ok_ids(run.store)
    failpoint("ledger.before_cache")
    base.put(name, write_parquet(table, facts))
    return table


def ok_ids(store: Store) -> pa.Table:
    """The same from the run's results."""
    ok, others = [hashes_of([])], [hashes_of([])]
    for table in latest_rows(passes_of(store), columns=["id", "status"]):
        is_ok = pc.equal(table["status"], "ok")
        ok.append(hashes_of(table.filter(is_ok)["id"].to_pylist()))
        others.append(hashes_of(table.filter(pc.invert(is_ok))["id"].to_pylist()))
    # Of several samples of a row one may have failed.
    return pa.table({"id": column_of(np.concatenate(ok), without=np.concatenate(others))}, schema=SCHEMA)


def _version(run: FoundRun) -> dict[str, str]:
    """What a cached table was made of: this run, not another one that had its name, and so many later passes with more ids."""
    assert run.success is not None, run.name
    folders = run.store.level("passes").folders if "passes" in run.level.folders else ()
    passes = sum(MANIFEST in run.store.level(f"passes/{name}").files for name in folders)
    return {"format": "1", "success": run.success.etag, "passes": str(passes)}
