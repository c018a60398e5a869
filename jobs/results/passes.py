"""The passes of a run: the first covers every row; each `draftmill rerun` adds one over the rows that are still failed.

    RUN/                    pass 1
    RUN/passes/0002/        a run directory of the same job; its rows are the failed rows of pass 1, in the same order
    RUN/passes/0003/        the same for pass 2

A pass counts once it has its manifest. Files of earlier passes are never changed. Since every pass keeps the order of the
one before, all passes are read in parallel to find each row's latest result, with one unit of each pass in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.config.sweep_spec import CASES, RECORD
from draftmill.jobs.plan.plan import PASSES, Plan, load_plan, names_of, pass_place
from draftmill.storage.errors import DamagedRun, UserError
from draftmill.storage.runs.commit import Manifest, read_manifest
from draftmill.storage.runs.lease import LEASE, holder
from draftmill.storage.runs.records import read_results
from draftmill.storage.runs.unit_table import PLAN, ROW_SCHEMA
from draftmill.storage.stores.store import FolderLevel, Store, open_store

FOLDER = PASSES

PRUNED = "_pruned.json"
"""In a run whose results `draftmill prune` has deleted: when, how much, and the sums of the run."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass; `store` is its own run directory, `manifest` is None until the pass is finished."""

    number: int
    store: Store
    plan: Plan
    manifest: Manifest | None


class PassRows:
    """The rows of many tables as one stream; `take` returns any number of them."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._held: pa.Table | None = None

    def take(self, count: int) -> pa.Table | None:
        """The next `count` rows, fewer at the end; None after the end."""
        taken = [] if self._held is None else [self._held]
        while sum(table.num_rows for table in taken) < count:
            table = next(self._tables, None)
            if table is None:
                break
            taken.append(table)
        if not taken:
            return None
        joined = pa.concat_tables(taken)
        self._held = joined.slice(count) if joined.num_rows > count else None
        return joined.slice(0, count)


def joined(tables: Iterable[pa.Table], most_rows: int, most_bytes: float = math.inf) -> Iterator[pa.Table]:
    """Small tables together, up to about so many rows or bytes."""
    held, rows, size = list[pa.Table](), 0, 0
    for table in chain(tables, [None]):
        if table is not None:
            held.append(table)
            rows, size = rows + table.num_rows, size + table.nbytes
        if held and (table is None or rows >= most_rows or size >= most_bytes):
            yield held[0] if len(held) == 1 else pa.concat_tables(held).unify_dictionaries().combine_chunks()
            held, rows, size = [], 0, 0


class NoPlanYet(UserError):
    """A run directory without a plan: `driver` is planning it; if that is None, its planning was interrupted."""

    def __init__(self, store: Store, driver: str | None) -> None:
        state = f"is being planned, driver {driver}" if driver else "was interrupted while it was planned: run it again"
        super().__init__(f"{store.url} {state}")
        self.driver = driver


def is_unplanned(level: FolderLevel) -> bool:
    """Whether a folder is a run directory that has no plan yet: it has a lease, and nothing else but parts of a plan."""
    return LEASE in level.files and PLAN not in level.files and set(level.folders) <= {"plan", "attempts", "input"}


def require_plan(store: Store) -> Plan:
    """Load the plan; NoPlanYet if there is none yet, another UserError if this is not a run directory."""
    plan = load_plan(store)
    if plan is not None:
        return plan
    if store.exists(RECORD):
        raise UserError(f"{store.url} is a sweep; its run directories are {store.url.rstrip('/')}/{CASES}/NAME")
    if is_unplanned(store.level()):
        held = holder(store)
        raise NoPlanYet(store, None if held is None else held.owner)
    raise UserError(
        f"{store.url} is not a run directory: there is no {PLAN}; `draftmill status` shows the runs below a folder"
    )


def pass_store(store: Store, number: int) -> Store:
    """The run directory of a pass, inside the run's own directory."""
    return store if number == 1 else open_store(pass_place(store.place, number))


def passes_of(store: Store) -> list[Pass]:
    """Every pass that has a plan, in order; only the last may lack its manifest. UserError if there is no plan."""
    passes = [Pass(1, store, require_plan(store), read_manifest(store))]
    while passes[-1].manifest is not None:
        place = pass_store(store, len(passes) + 1)
        plan = load_plan(place)
        if plan is None:
            break
        passes.append(Pass(len(passes) + 1, place, plan, read_manifest(place)))
    return passes


def finished_passes(passes: Sequence[Pass]) -> list[Pass]:
    """The finished passes; UserError if not even the first one is finished."""
    if passes[0].manifest is None:
        raise UserError(f"{passes[0].store.url} is not finished: there is no manifest; `draftmill run` resumes it")
    if passes[0].store.exists(PRUNED):
        raise UserError(f"the results of {passes[0].store.url} were deleted by `draftmill prune`")
    return [part for part in passes if part.manifest is not None]


def count_failed(passes: Sequence[Pass]) -> int:
    """The number of samples that are still failed: the failed samples of the last finished pass."""
    manifest = finished_passes(passes)[-1].manifest
    assert manifest is not None
    return manifest.total("failed")


def failed_rows(part: Pass) -> Iterator[pa.Table]:
    """The plan's entries (ROW_SCHEMA) of a finished pass's failed rows, in the order of the pass."""
    assert part.manifest is not None
    wanted = (unit.object for unit in part.manifest.units if unit.failed)
    tables = read_results(part.store, objects=wanted, columns=["id", "sample", "status"])
    for unit, planned in zip(part.manifest.units, part.plan.tables(), strict=True):
        if unit.failed:
            results = next(tables)
            if names_of(planned) != names_of(results):
                raise _mismatch(part, "the rows of a unit differ from the planned ones")
            yield planned.filter(pc.equal(results["status"], "failed")).select(ROW_SCHEMA.names)


def latest_rows(passes: Sequence[Pass], *, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Every row of the run once, in plan order, from the last finished pass that has it; one table per unit.

    `columns` selects columns, None for all. Raises DamagedRun if the passes don't match each other.
    """
    wanted = None if columns is None else list(dict.fromkeys(["id", "sample", "status", *columns]))
    first, *later = finished_passes(passes)
    for table in reduce(lambda before, part: _overlay(before, part, wanted), later, _rows_of(first, wanted)):
        yield table if columns is None else table.select(list(columns))


def _rows_of(part: Pass, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    assert part.manifest is not None
    if columns is not None and set(columns) >= set(part.plan.schema.names):
        columns = None  # to look up each of them in each file takes longer than to read it
    for table in read_results(part.store, objects=(unit.object for unit in part.manifest.units), columns=columns):
        yield table.replace_schema_metadata(None)


def _overlay(before: Iterator[pa.Table], after: Pass, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """The rows of `before`, with the failed ones replaced by the rows of the pass `after`, in order."""
    later = PassRows(_rows_of(after, columns))
    for table in before:
        places = np.flatnonzero(pc.equal(table["status"], "failed").to_numpy())
        if not len(places):
            yield table
            continue
        fresh = later.take(len(places))
        if fresh is None or names_of(fresh) != names_of(table.take(places)):
            raise _mismatch(after, "its rows differ from the failed rows of the pass before it")
        order = np.arange(table.num_rows)
        order[places] = table.num_rows + np.arange(len(places))
        yield pa.concat_tables([table, fresh]).unify_dictionaries().take(order)
    if later.take(1) is not None:
        raise _mismatch(after, "it has rows that did not fail in the pass before it")


def _mismatch(part: Pass, reason: str) -> DamagedRun:
    return DamagedRun(part.store.url, reason, "`draftmill verify` says more")
