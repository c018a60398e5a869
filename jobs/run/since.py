"""`input.since: last_success`: the inputs that no finished run of a recurring job already read.

A set difference between today's listing and the inputs of all finished runs; no clock decides anything. A file is new if its
place and its name are unknown, and changed if its etag (S3), or its size and mtime (disk), are those of no finished run. A local
file of which only the mtime or the place has changed is hashed: with the same name and content it counts as the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import planned_inputs
from draftmill.jobs.results.runs import FoundRun, base_store, finished_runs
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import with_hashes
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.parallel import parallel_map

FILES = pa.schema(
    [
        ("uri", pa.string()),
        ("name", pa.string()),
        ("size", pa.int64()),
        ("etag", pa.string()),
        ("mtime_s", pa.float64()),
        ("sha256", pa.string()),
    ]
)
"""What tells inputs and their versions apart."""


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


def runs_store(spec: JobSpec, path: str) -> Store:
    """The folder with the runs of all dates, of an output path as it is written; UserError if it has no date."""
    if not has_date(path):
        raise UserError(
            f"{path!r} has no date, so the runs before it are not known; allowed: base/{{date:%Y-%m-%d}}",
            field="output.path",
        )
    return base_store(spec.place(path))


def done_inputs(base: Store, runs: Sequence[FoundRun]) -> pa.Table:
    """A table of FILES with the inputs of these runs, which are finished; their plans are read in parallel."""
    tables = [FILES.empty_table()]
    for _, table in parallel_map(base, runs, lambda run: pa.Table.from_pylist(planned_inputs(run.store), FILES)):
        tables.append(table.result())
    return pa.concat_tables(tables)


def difference(listed: Sequence[InputFile], done: pa.Table, *, runs: int) -> NewInputs:
    """The listed files without those that are in `done` (a table of FILES) in the same version."""
    table = pa.Table.from_pylist([file.facts() for file in listed], FILES)
    is_known = _among(table["uri"], done["uri"]) | _among(table["name"], done["name"])
    is_same = _among(versions(table, "uri"), versions(done, "uri"))
    is_same |= _among(versions(table, "name"), versions(done, "name"))
    unsure = np.flatnonzero(is_known & ~is_same)
    is_same[_same_content([(index, listed[index]) for index in unsure.tolist()], done)] = True
    is_gone = ~(_among(done["uri"], table["uri"]) | _among(done["name"], table["name"]))
    return NewInputs(
        files=[file for file, same in zip(listed, is_same.tolist(), strict=True) if not same],
        new=int((~is_known).sum()),
        changed=int((is_known & ~is_same).sum()),
        same=int(is_same.sum()),
        vanished=pc.count_distinct(done["uri"].filter(pa.array(is_gone))).as_py(),
        runs=runs,
    )


def versions(table: pa.Table, key: str) -> pa.ChunkedArray:
    """Of each row of a table of FILES a text that names the file, by its uri or name, and its version; null if it has none.

    An mtime tells versions apart in one place only, so a name needs an etag.
    """
    tagged = pc.binary_join_element_wise(_text(table["size"]), table["etag"], " ")
    dated = pc.binary_join_element_wise(_text(table["size"]), _text(table["mtime_s"]), "\t")
    version = pc.coalesce(tagged, dated) if key == "uri" else tagged
    return pc.binary_join_element_wise(table[key], version, "\n")


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(pc.cast(column, pa.string()), "")


def _among(column: pa.ChunkedArray, values: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Of each entry whether it is among the values; not if it is null."""
    return np.array(pc.is_in(column, value_set=pc.drop_null(values).combine_chunks(), skip_nulls=True).to_numpy())


def _same_content(files: Sequence[tuple[int, InputFile]], done: pa.Table) -> list[int]:
    """The numbers of the local files whose content a finished run already read; only those of a known size are hashed."""
    known = done.filter(pc.is_valid(done["sha256"]))
    here = [(number, file) for number, file in files if file.etag is None]
    contents: dict[tuple[str, str, int], set[str]] = {}
    for key in ("uri", "name"):
        wanted = pa.array([getattr(file, key) for _, file in here], pa.string())
        part = known.filter(pc.is_in(known[key], value_set=wanted))
        columns = (part[column].to_pylist() for column in (key, "size", "sha256"))
        for value, size, sha256 in zip(*columns, strict=True):
            contents.setdefault((key, value, size), set()).add(sha256)

    def hashes(file: InputFile) -> set[str]:
        size = file.size or 0
        return contents.get(("uri", file.uri, size), set()) | contents.get(("name", file.name, size), set())

    candidates = [(number, file) for number, file in here if hashes(file)]
    files_here = with_hashes([file for _, file in candidates])
    return [number for (number, _), file in zip(candidates, files_here, strict=True) if file.sha256 in hashes(file)]
