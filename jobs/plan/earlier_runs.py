"""The finished runs that draft (`decoder.drafter: {kind: run}`): found, checked, and what identifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import Notes
from draftmill.jobs.plan.plan import Plan, load_plan, pass_place
from draftmill.storage.errors import UserError
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.runs.run_texts import FinishedRun
from draftmill.storage.runs.unit_table import parts_of
from draftmill.storage.stores.interface import Place, about
from draftmill.storage.stores.store import open_store

FIELD = "decoder.drafter.path"
LAST = "last"


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """The runs as workers read them, and the fingerprints of their jobs, which are a part of this job's."""

    runs: tuple[FinishedRun, ...] = ()
    fingerprints: tuple[str, ...] = ()


def earlier_runs(spec: JobSpec, tokenizer: str, plan: Plan | None, display: Notes) -> EarlierRuns | None:
    """The runs that the spec names, None if its drafter is another one; UserError if one of them is not finished.

    `tokenizer` is the hash of this job's. A job that is resumed (it has a `plan`) does without runs that are gone, with a note:
    under coupled acceptance its texts are the same.
    """
    drafter = getattr(spec.decoder, "drafter", None)
    if not isinstance(drafter, RunDrafterSettings):
        return None
    runs, fingerprints = list[FinishedRun](), list[str]()
    for path in drafter.path:
        try:
            fingerprint, run = finished_run(path, spec.place(path), tokenizer)
        except UserError as error:
            if plan is None or spec.sampling.acceptance == "rejection":
                raise
            display.note(f"{FIELD}: {error.message}; its texts do not draft")
            continue
        runs.append(run)
        fingerprints.append(fingerprint)
    planned: Sequence[str] | None = None if plan is None else plan.results["decoder"].get("drafter", {}).get("runs")
    if planned is not None and set(fingerprints) < set(planned):
        fingerprints = list(planned)
    return EarlierRuns(tuple(runs), tuple(fingerprints))


def finished_run(path: str, place: Place, tokenizer: str) -> tuple[str, FinishedRun]:
    """The fingerprint of the run at a place, and its results with all passes; UserError if it is not finished."""
    if path == LAST:
        raise UserError(
            f"{LAST!r} is the last finished date of a recurring job, or the last finished case of a sweep; allowed: run "
            "directories, or with `draftmill run` a date in output.path: base/{date:%Y-%m-%d}",
            field=FIELD,
        )
    with about(FIELD):
        store = open_store(place)
        plan = load_plan(store)
        if plan is None or not is_closed(store):
            what = "no run directory" if plan is None else "not finished; `draftmill run` resumes it"
            raise UserError(f"{path!r} is {what}", field=FIELD)
        if next(store.list("data/"), None) is None:
            raise UserError(f"the results of {path!r} were deleted by `draftmill prune`", field=FIELD)
        passes = [(place, parts_of(plan.parts))]
        while (later := load_plan(inner := open_store(pass_place(place, len(passes) + 1)))) and is_closed(inner):
            passes.append((inner.place, parts_of(later.parts)))
        column: Literal["tokens", "text"] = "tokens" if plan.results["model"]["tokenizer"] == tokenizer else "text"
        return plan.fingerprint, FinishedRun(tuple(reversed(passes)), column)
