"""Finds the finished runs that `draftmill compare` and `draftmill report` read: run directories, and the cases of sweeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftmill.jobs.finished.passes import Pass, finished, passes_of
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.spec.sweep_spec import short_names
from draftmill.storage.errors import DamagedRun
from draftmill.storage.runs.commit import MANIFEST
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import open_store

SWEEP = "sweep.json"
CASES = "cases/"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run. `name` is unique among the runs that are read together; `place` is its directory or URL.

    `short` is set for a case of a sweep: its name, or what tells it apart from the grid's other cases.
    """

    name: str
    place: str
    passes: tuple[Pass, ...]
    short: str = ""

    @property
    def plan(self) -> Plan:
        """The plan of the first pass, which has every row."""
        return self.passes[0].plan

    @property
    def store(self) -> Store:
        """The run directory."""
        return self.passes[0].store


@dataclass(frozen=True, slots=True)
class Found:
    """The runs at some places. `unfinished` names the cases of sweeps that have no complete results (yet)."""

    runs: tuple[FinishedRun, ...]
    unfinished: tuple[str, ...] = ()


def find_runs(places: Iterable[str], *, s3: S3Options | None = None) -> Found:
    """The runs at these places, in order; a sweep's directory stands for its cases.

    Raises UserError if a place is neither, or if a run is not finished. An unfinished case of a sweep is left out and named.
    """
    runs: list[FinishedRun] = []
    unfinished: list[str] = []
    for place in places:
        store = open_store(place, s3=s3)
        if not store.exists(SWEEP):
            runs.append(open_run(place, s3=s3))
            continue
        names = short_names(cases_of(store))
        for name in names:
            case = f"{place.rstrip('/')}/{CASES}{name}"
            if open_store(case, s3=s3).exists(MANIFEST):
                runs.append(replace(open_run(case, s3=s3), name=name, short=names[name]))
            else:
                unfinished.append(name)
    return Found(tuple(_with_unique_names(runs)), tuple(unfinished))


def open_run(place: str, *, s3: S3Options | None = None) -> FinishedRun:
    """The finished run at a place; UserError if there is none."""
    store = open_store(place, s3=s3)
    return FinishedRun(_last_part(place), place, tuple(finished(passes_of(store, s3=s3))))


def cases_of(store: Store) -> dict[str, dict[str, Any]]:
    """A sweep's cases with their changes, in the order of its file."""
    try:
        cases = json.loads(store.get(SWEEP))["cases"]
        known: list[dict[str, Any]] = [{"name": one} if isinstance(one, str) else one for one in cases]
        return {str(one["name"]): dict(one.get("changes") or {}) for one in known}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRun(f"{store.url}/{SWEEP}", error, "run the sweep again") from None


def _last_part(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2] or place


def _with_unique_names(runs: Sequence[FinishedRun]) -> Iterable[FinishedRun]:
    """Runs of one name are named by their places; a run that is given again, by its place and a number."""
    counts = Counter(run.name for run in runs)
    times: Counter[str] = Counter()
    for run in runs:
        place = run.place.rstrip("/")
        times[place] += 1
        again = f" ({times[place]})" if times[place] > 1 else ""
        yield run if counts[run.name] == 1 else replace(run, name=f"{place}{again}")
