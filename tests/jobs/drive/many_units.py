"""A process that plans, resumes, decodes and closes a job of many units with the real driver, and says what memory it took.

Workers answer at once, half of the units are there before, and of the run directory only plan and manifest are real files.

    python -m tests.jobs.drive.many_units UNITS
"""

import json
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from pytest import MonkeyPatch

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.messages import (
    Effort,
    PoolEvent,
    Receipt,
    Tally,
    TurnReport,
    WorkerLoaded,
    WorkerReported,
    WorkUnit,
)
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan import packing
from draftmill.jobs.plan import plan as plans
from draftmill.jobs.plan.packing import PlanWriter
from draftmill.jobs.plan.plan import create_plan, load_plan
from draftmill.jobs.run import session
from draftmill.storage.runs.commit import MANIFEST, read_manifest
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.runs.unit_table import FOLDER, PLAN, ROW_SCHEMA
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.store import Stat
from tests.jobs.specs import infilling

WINDOW, WORKERS = 50_000, 8


def facts_of(unit: int) -> CommittedUnit:
    """What the file of a unit would say of itself."""
    return CommittedUnit(unit, unit_name(unit), f"{unit:032x}", 1, 1, 0, 0, 20_000 + unit, f"{unit:064x}", True)


class Folder(LocalStore):
    """A run directory whose unit files are only listed: every second unit is there."""

    units = 0

    @property
    def is_fake(self) -> bool:
        return True

    def list(self, prefix: str = "") -> Iterator[Stat]:
        if prefix != "data/":
            return super().list(prefix)
        return (Stat(unit_name(unit), 20_000, f"{unit:032x}", {}, 1.0) for unit in range(0, self.units, 2))

    def stat(self, name: str) -> Stat | None:
        if not name.startswith("data/"):
            return super().stat(name)
        one = facts_of(int(name[10:-8]))
        said = {key: str(getattr(one, key)) for key in ("unit", "rows", "ok", "failed", "skipped", "sha256")}
        said |= {"exact": "true", "fingerprint": "f"}
        return Stat(name, one.bytes, one.etag, said, 1.0)

    def exists(self, name: str) -> bool:
        return name.startswith("data/") or super().exists(name)

    def put(self, name: str, data: bytes) -> Stat:
        return Stat(name, len(data), "0") if name.startswith(FOLDER) else super().put(name, data)


class Pool:
    """Workers that commit a unit as soon as they get it."""

    def __init__(self) -> None:
        self.events: list[PoolEvent] = []

    def resize(self, allocation: Allocation) -> None:
        """There is room for all of them."""

    def start(self, name: str) -> None:
        self.events.append(WorkerLoaded(name, "node", 1))

    def assign(self, name: str, unit: WorkUnit) -> None:
        item = Receipt(unit.lease, unit.unit, name, "node", facts_of(unit.unit), Tally(rows=1, ok=1))
        self.events.append(WorkerReported(name, TurnReport((item,), Effort(), Tally(rows=1))))

    def revoke(self, name: str, lease: int) -> None:
        """Everything is done already."""

    def kill(self, name: str) -> None:
        """There is no process."""

    def close(self) -> None:
        """There is nothing to close."""

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        events, self.events = self.events, []
        return events


class ManyWorkers(LocalBackend):
    """A place for WORKERS workers."""

    def allocate(self, spec: Any, *, units: int) -> Allocation:
        return Allocation((WorkerResources(1.0, 0.0, 1),), (WORKERS,))

    def pool(self, job: Any, allocation: Allocation) -> Any:
        return Pool()

    def end(self, pool: Any, *, is_over: bool) -> None:
        """There is nothing to end."""


def rows(first: int, count: int) -> pa.Table:
    numbers = np.arange(first, first + count)
    length = pa.array((1 + numbers * 7919 % 500).astype(np.int32))
    nothing = pa.nulls(count, pa.string())
    columns = {
        "file": pa.array(np.zeros(count, np.int32)),
        "row": pa.array(numbers),
        "offset": nothing.cast(pa.int64()),
        "id": pa.array(numbers.astype(str)),
        "length": length,
        "holes": length,
        "error_kind": nothing,
        "sample": pa.array(np.zeros(count, np.int32)),
    }
    return pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)


def job(folder: Path, units: int) -> dict[str, float]:
    """Plan, resume, decode and close; returns the peak memory after each step, in MB."""
    store = Folder(folder)
    store.units = units
    spec = check_spec(infilling(output={"path": str(folder)}, workers={"count": WORKERS}))
    peaks = {"begin": peak_mb()}
    writer = PlanWriter(store, window=WINDOW, unit_rows=1)
    for first in range(0, units, WINDOW):
        writer.add(rows(first, min(WINDOW, units - first)))
    writer.finish()
    made = create_plan(store, spec, {"schema_version": 5}, [], writer.totals, writer.parts)
    peaks["planned"] = peak_mb()
    del writer, made
    plan = load_plan(store)
    assert plan is not None and (folder / PLAN).stat().st_size > 5 * units
    peaks["loaded"] = peak_mb()
    run: Any = SimpleNamespace(
        resolved=SimpleNamespace(
            spec=spec, recipe=spec.recipe(), folder=folder, info=SimpleNamespace(num_parameters=1)
        ),
        options=SimpleNamespace(grace_s=5.0, ray_address=None, local=True),
        plan=plan,
        lease=SimpleNamespace(epoch=1, check=lambda: None),
        stop=StopFlag(),
        display=Display(),
        backend=ManyWorkers(),
        loads=False,
        watchers=(),
    )
    session.decode(run)
    peaks["closed"] = peak_mb()
    manifest = read_manifest(store)
    assert manifest is not None and len(manifest.units) == manifest.total("ok") == units
    assert manifest.units[units - 1] == facts_of(units - 1) and isinstance(manifest.units, UnitFacts)
    assert [int(number) for number in manifest.units.numbers()[:3]] == [0, 1, 2]
    with (folder / MANIFEST).open("rb") as lines:
        assert sum(1 for _ in lines) == units + 2
    return peaks | {"read": peak_mb()}


def peak_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main(units: int) -> None:
    """Print what a job of `units` units took more than one of 2,000."""
    with MonkeyPatch.context() as patch:
        patch.setattr(packing, "part_bytes", lambda tables: bytes(100))  # a million row groups take a minute
        patch.setattr(plans, "digest", lambda results: "f")
        patch.setattr(session, "make_job", lambda *_, **__: None)
        with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
            job(Path(small, "run"), 2000)
            peaks = job(Path(large, "run"), units)
    print(json.dumps({step: round(peak - peaks["begin"], 1) for step, peak in peaks.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
