"""Finds the finished runs that `draftmill compare` and `draftmill report` read: run directories, and the cases of sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftmill.actors.task import Infill, Lines, Random, Sentences, SpanFraction, Spans
from draftmill.jobs.config.sweep_spec import CASES, RECORD, short_names
from draftmill.jobs.plan.fingerprint import changed_files, flat, format_value, shorten
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.results.passes import Pass, finished_passes, passes_of
from draftmill.storage.errors import DamagedRun, UserError
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import MANIFEST
from draftmill.storage.stores.store import Place, Store, open_store


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run. `name` is unique among the runs that are read together.

    `short` is set for a case of a sweep: its name, or what tells it apart from the grid's other cases.
    """

    name: str
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


def find_runs(places: Iterable[Place]) -> tuple[list[FinishedRun], list[str]]:
    """The runs at these places, in order; a sweep's directory stands for its cases. Then the names of its unfinished cases.

    UserError if a place is neither a run nor a sweep, or if a run that is no case of a sweep is not finished.
    """
    runs: list[FinishedRun] = []
    unfinished: list[str] = []
    for place in places:
        store = open_store(place)
        if not store.exists(RECORD):
            runs.append(open_run(place))
            continue
        names = short_names(cases_of(store))
        for name in names:
            case = place.below(f"{CASES}/{name}")
            if open_store(case).exists(MANIFEST):
                runs.append(replace(open_run(case), name=name, short=names[name]))
            else:
                unfinished.append(name)
    return list(_with_unique_names(runs)), unfinished


def open_run(place: Place) -> FinishedRun:
    """The finished run at a place; UserError if there is none."""
    passes = finished_passes(passes_of(open_store(place)))
    return FinishedRun(place.url.rstrip("/").rpartition("/")[2] or place.url, tuple(passes))


def cases_of(store: Store) -> dict[str, dict[str, Any]]:
    """A sweep's cases with their changes, in the order of its file."""
    try:
        cases = parse_json(store.get(RECORD))["cases"]
        return {str(case["name"]): dict(case["changes"]) for case in cases}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRun(f"{store.url}/{RECORD}", error, "run the sweep again") from None


def _with_unique_names(runs: Sequence[FinishedRun]) -> Iterable[FinishedRun]:
    """Runs of one name are named by their places; a run that is given again, by its place and a number."""
    counts = Counter(run.name for run in runs)
    times: Counter[str] = Counter()
    for run in runs:
        place = run.store.url.rstrip("/")
        times[place] += 1
        again = f" ({times[place]})" if times[place] > 1 else ""
        yield run if counts[run.name] == 1 else replace(run, name=f"{place}{again}")


FREE_INPUT = ("path", "run", "where", "limit", "keep", "columns", "since", "dedupe")
"""Keys of `input` that don't change what a sample's canvas is. Paths count by content; `columns` has rules of its own."""

FREE_COLUMNS = ("reference", "temperature", "top_p")
"""Columns that don't change a sample's canvas; neither does `seed`, unless it places the mask."""

FREE_TASK = ("fim", "estimate")
"""How a causal model is asked to fill a hole, and how closely a score is estimated: how the work is done, not what it is."""

OF_SOME = ("task.max_new_tokens", "seed", "input.columns.seed", "model.tokenizer")
"""Keys that matter to some models or masks, and are compared only where they matter to both runs."""

FILES = "input.files"


def check_same_work(name: str, plan: Plan, other_name: str, other: Plan) -> None:
    """Raise UserError, naming the keys that differ, unless both runs decoded the same samples (or parts of the same)."""
    before, now = dict(flat(work_of(plan))), dict(flat(work_of(other)))
    for key in OF_SOME:
        if (key in before) != (key in now):
            before.pop(key, None)
            now.pop(key, None)
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if not keys:
        return
    differences = [
        f"{key} is {format_value(before, key)} in {name}, {format_value(now, key)} in {other_name}"
        for key in keys
        if key != FILES
    ]
    if FILES in keys:
        differences.append(f"{FILES}: {shorten(changed_files(plan.files, other.files) or ['other contents'])}")
    raise UserError(
        f"{other_name} did not decode the same as {name}: {shorten(differences)}; "
        "only runs of the same inputs, task and canvases can be compared",
        field=keys[0],
    )


def work_of(plan: Plan) -> dict[str, Any]:
    """What a run decoded, as JSON data with the keys of the spec."""
    spec, results = plan.spec, plan.results
    task = {key: value for key, value in spec.task.model_dump(mode="json").items() if key not in FREE_TASK}
    if isinstance(spec.task, Infill) and spec.decoder.baseline.runs_on != "causal":
        task.pop("max_new_tokens")  # only causal models use it; the holes of other models have their lengths
    full = spec.input.model_dump(mode="json")
    columns = {key: value for key, value in full["columns"].items() if key not in FREE_COLUMNS}
    mask, own = getattr(spec.task, "mask", None), spec.input.columns
    counts_tokens = isinstance(mask, Random | SpanFraction) or (isinstance(mask, Spans) and own.spans is None)
    is_drawn = counts_tokens or isinstance(mask, Lines) or (isinstance(mask, Sentences) and mask.which == "random")
    if not is_drawn:
        columns.pop("seed")
    work: dict[str, Any] = {
        "task": task,
        "input": {key: value for key, value in full.items() if key not in FREE_INPUT}
        | {"columns": columns, "files": results["input"]["files"]},
    }
    if is_drawn and own.seed is None:  # a row's own seed replaces the job's
        work["seed"] = spec.seed
    if counts_tokens and own.tokens is None:  # a tokenizer decides what such a mask hides
        work["model"] = {"tokenizer": results["model"]["tokenizer"]}
    return work


def same_tokenizer(plan: Plan, other: Plan) -> bool:
    """Whether token ids mean the same in both runs."""
    return bool(plan.results["model"]["tokenizer"] == other.results["model"]["tokenizer"])
