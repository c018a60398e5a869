"""Finds the run directories below a folder, level by level, without listing their units."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from draftmill.jobs.finished.passes import is_unplanned
from draftmill.jobs.spec.dated_path import base_of, below_base, date_in, depth_of
from draftmill.storage.runs.commit import MANIFEST, SUCCESS
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import Level, S3Options, Stat, Store, level_of
from draftmill.storage.stores.parallel import thread_pool
from draftmill.storage.stores.store import open_store

MOST_LEVELS = 12
"""How deep runs are searched for; a folder tree below that is not one of runs."""

THREADS = 16


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run directory: its name below the folder that was searched (empty for the folder itself), and its own level.

    The names of the level's Stats begin at the folder that was searched.
    """

    name: str
    store: Store
    level: Level

    @property
    def is_planned(self) -> bool:
        """Whether its plan is there."""
        return PLAN in self.level.files

    @property
    def success(self) -> Stat | None:
        """The facts of `_SUCCESS` of a finished run, None for others."""
        is_finished = PLAN in self.level.files and MANIFEST in self.level.files
        return self.level.files.get(SUCCESS) if is_finished else None


def runs_below(store: Store, *, s3: S3Options | None = None, levels: int = MOST_LEVELS) -> list[FoundRun]:
    """Every run directory at most `levels` below a folder, sorted by name; the folder itself if it is one.

    A folder with `_lease.json` that holds nothing else but parts of a plan is a run that is being planned, or was.
    """
    with thread_pool(THREADS, "levels") as threads:
        found: list[FoundRun] = []
        names = [""]
        for depth in range(levels + 1):
            looked = zip(names, threads.map(lambda name: level_of(store, name), names), strict=True)
            names = []
            for name, level in looked:
                if PLAN in level.files or (name and is_unplanned(level)):
                    found.append(FoundRun(name, _store_at(store, name, s3), level))
                elif depth < levels:
                    names += [
                        f"{name}/{one}" if name else one for one in level.folders if one[:1] not in "._"
                    ]  # S3 may have a folder without a name
    return sorted(found, key=lambda run: run.name)


def _store_at(store: Store, name: str, s3: S3Options | None) -> Store:
    return open_store(f"{store.url.rstrip('/')}/{name}", s3=s3) if name else store


@dataclass(frozen=True, slots=True)
class DatedRun:
    """A run of a recurring job."""

    date: datetime
    run: FoundRun


def runs_of(path: str, *, s3: S3Options | None = None) -> list[DatedRun]:
    """The runs of a recurring job, by date; `path` is its output path with the date. Other folders below the base are ignored."""
    runs = runs_below(open_store(base_of(path), s3=s3), s3=s3, levels=depth_of(path))
    dated = ((date_in(below_base(path), run.name), run) for run in runs)
    return sorted((DatedRun(date, run) for date, run in dated if date is not None), key=lambda one: one.date)


def finished_below(path: str, *, s3: S3Options | None = None) -> list[FoundRun]:
    """Every finished run below the base path, whatever its name: the base belongs to this job alone."""
    return [run for run in runs_below(open_store(base_of(path), s3=s3), s3=s3) if run.success is not None]
