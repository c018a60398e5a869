"""`input.since: last_success`: the inputs that no finished run of a recurring job already read.

A set difference between today's listing and the inputs of all finished runs; no clock decides anything. A file is new if its
place and its name are unknown, and changed if its etag (S3), or its size and mtime (disk), are those of no finished run. A local
file of which only the mtime or the place has changed is hashed: with the same name and content it counts as the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from draftmill.jobs.config.dates import has_date, read_date
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.earlier_runs import LAST
from draftmill.jobs.plan.plan import load_plan, planned_inputs
from draftmill.jobs.results.runs import FoundRun, base_store, finished_runs, runs_of
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import with_hashes
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.parallel import parallel_map


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
    for _, facts in parallel_map(base, runs, lambda run: planned_inputs(run.store)):
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
