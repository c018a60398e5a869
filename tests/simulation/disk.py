"""The fake store of the simulation: what lies in the run directory, one process' view of it, and the promises on writing.

Every access may go wrong as the world says (world.py). Knows nothing of schedulers and workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.runs.commit import MANIFEST, SUCCESS
from draftmill.storage.runs.lease import LEASE
from draftmill.storage.stores.store import AlreadyExists, Conflict, NotFound, Place, Stat, Store

if TYPE_CHECKING:
    from tests.simulation.world import World


class Crash(BaseException):
    """This process is gone: nothing of it runs on, not even what `finally` would do to the store."""


class Broken(AssertionError):
    """A promise was broken."""


def hold(condition: bool, promise: str) -> None:
    if not condition:
        raise Broken(promise)


@dataclass(slots=True)
class Job:
    """What is to be done: `rows` in each unit, and what becomes of a worker that decodes a poisoned (unit, row)."""

    rows: list[int]
    poison: dict[tuple[int, int], str]
    workers: int
    attempts: int

    def sizes(self) -> Iterator[UnitSize]:
        """As a plan gives them."""
        return (UnitSize(unit, rows, rows * (1 + unit % 3)) for unit, rows in enumerate(self.rows))

    def ids(self, unit: int) -> list[str]:
        return [f"{unit}:{row}" for row in range(self.rows[unit])]


class Disk:
    """The objects of the run directory, which outlive every process; checks each write against the promises."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objects: dict[str, tuple[bytes, Stat]] = {}
        self.versions = 0
        self.stale_manifests = 0

    def write(self, name: str, data: bytes, metadata: dict[str, str] | None, epoch: int) -> Stat:
        """Set an object. `epoch` is the writer's."""
        if name.startswith("data/"):
            hold(name not in self.objects, f"committed bytes changed: {name} was written twice")
        if name == MANIFEST:
            self._check_manifest(json.loads(data), epoch)
        if name == SUCCESS:
            hold(MANIFEST in self.objects, "_SUCCESS without a manifest")
        self.versions += 1
        stat = Stat(name, len(data), f"v{self.versions}", dict(metadata or {}))
        self.objects[name] = (data, stat)
        return stat

    def delete(self, name: str) -> None:
        if MANIFEST in self.objects:
            listed = {unit["object"] for unit in json.loads(self.objects[MANIFEST][0])["units"]}
            hold(name not in listed, f"{name} was deleted, and the manifest lists it")
        self.objects.pop(name, None)

    def _check_manifest(self, new: dict[str, Any], epoch: int) -> None:
        hold([unit["unit"] for unit in new["units"]] == list(range(len(self.job.rows))), "a manifest lacks units")
        hold(new["totals"]["rows"] == sum(self.job.rows), "a manifest lacks rows")
        for unit in new["units"]:
            data, stat = self.objects.get(unit["object"], (b"", None))
            hold(
                stat is not None and stat.etag == unit["etag"],
                f"the manifest lists {unit['object']}, which is not there",
            )
            hold(sha256(data).hexdigest() == unit["sha256"], f"{unit['object']} is not what the manifest says")
        holder = json.loads(self.objects[LEASE][0])
        if epoch < holder["epoch"]:
            self.stale_manifests += 1
            hold(MANIFEST not in self.objects, "a driver that had lost its lease replaced the manifest")


@dataclass(slots=True)
class Process:
    """A driver or a worker; `epoch` is its driver's."""

    name: str
    is_driver: bool
    epoch: int = 0
    alive: bool = True
    busy_s: float = 0.0
    """Until when a worker waits for the store."""

    def die(self) -> None:
        """End it."""
        self.alive = False
        raise Crash(self.name)


class Handle(Store):
    """The store as one process sees it. Hashable by identity, as stores are."""

    url = "sim://run"
    place = Place(url)

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.disk, self.process = world, world.disk, process

    def _access(self, verb: str, name: str, act: Callable[[], Any]) -> Any:
        """One access: what may go wrong before and after it."""
        if not self.process.alive:
            raise Crash(self.process.name)
        self.world.wait_for_answer(self.process, verb, name)
        fate = self.world.fate(self.process, verb, name)
        if fate == "crash before":
            self.process.die()
        if fate == "denied":
            raise StoreRefused(f"denied: {verb} {name}")
        if fate == "refused":
            raise StoreError(f"refused: {verb} {name}")
        if fate == "pause before":
            self.world.pause()
        result = act()
        if fate == "crash after":
            self.process.die()
        if fate == "lost":
            raise StoreError(f"no answer: {verb} {name}")
        if fate == "pause after":
            self.world.pause()
        return result

    def get(self, name: str) -> bytes:
        return self._access("get", name, lambda: self._get(name))[0]

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        return self.get(name)[start : start + length]

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        return self._access("create", name, lambda: self._create(name, data, metadata))

    def put(self, name: str, data: bytes) -> Stat:
        return self._access("put", name, lambda: self._write(name, data, None))

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        return self._access("replace", name, lambda: self._replace(name, data, etag))

    def list(self, prefix: str = "") -> Iterator[Stat]:
        found = self._access(
            "list", prefix, lambda: [self.disk.objects[n][1] for n in sorted(self.disk.objects) if n.startswith(prefix)]
        )
        return iter(found)

    def stat(self, name: str) -> Stat | None:
        return self._access("stat", name, lambda: self.disk.objects.get(name, (b"", None))[1])

    def delete(self, name: str) -> None:
        self._access("delete", name, lambda: self.disk.delete(name))

    def _get(self, name: str) -> tuple[bytes, Stat]:
        if name not in self.disk.objects:
            raise NotFound(name)
        return self.disk.objects[name]

    def _create(self, name: str, data: bytes, metadata: dict[str, str] | None) -> Stat:
        if name in self.disk.objects:
            raise AlreadyExists(self.disk.objects[name][1])
        return self._write(name, data, metadata)

    def _replace(self, name: str, data: bytes, etag: str) -> Stat:
        if name not in self.disk.objects or self.disk.objects[name][1].etag != etag:
            raise Conflict(name)
        return self._write(name, data, None)

    def _write(self, name: str, data: bytes, metadata: dict[str, str] | None) -> Stat:
        return self.disk.write(name, data, metadata, self.process.epoch)


def check_promise(disk: Disk, *, disturbed: bool) -> None:
    """Every row once, with a reason where it failed, in the files that the manifest lists, and no others.

    Undisturbed, no row is quarantined but the poisoned ones.
    """
    units = json.loads(disk.objects[MANIFEST][0])["units"]
    listed = {unit["object"] for unit in units}
    there = {name for name in disk.objects if name.startswith("data/")}
    hold(listed == there, "files that the manifest does not list")
    for unit in units:
        _check_unit(disk.job, unit, json.loads(disk.objects[unit["object"]][0])["rows"], disturbed)


def _check_unit(job: Job, unit: dict[str, Any], rows: list[list[str]], disturbed: bool) -> None:
    number = unit["unit"]
    hold([name for name, _, _ in rows] == job.ids(number), f"unit {number}: not every row once")
    failed = {row for row, (_, status, _) in enumerate(rows) if status == "failed"}
    hold(unit["failed"] == len(failed), f"unit {number}: the manifest counts other failures")
    hold(all(bool(reason) == (status == "failed") for _, status, reason in rows), "a failed row without a reason")
    guilty = {row for poisoned, row in job.poison if poisoned == number}
    hold(failed >= guilty, f"unit {number}: a row that can't be decoded is ok")
    hold(disturbed or failed == guilty, f"unit {number}: a row was quarantined for another's fault")
