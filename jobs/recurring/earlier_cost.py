"""What an earlier run of a recurring job took, as the estimate of the next one's device hours."""

from __future__ import annotations

from typing import Any

from draftmill.jobs.driving.attempts import read_sessions
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.recurring.runs_below import runs_of
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.jobs.watching.estimate import Estimate, estimate_from
from draftmill.storage.errors import StoreError, UserError

NEWEST = 3
"""Finished runs that are looked at, from the newest on."""


def earlier_estimate(path: str, spec: JobSpec, results: dict[str, Any], tokens: int) -> Estimate | None:
    """The estimate for `tokens` planned tokens from the newest finished run that did the same with other rows.

    `path` is the output path with the date, `results` what the job's fingerprint is made of.
    """
    try:
        finished = [one for one in runs_of(path, s3=spec.s3.options()) if one.run.success is not None]
        for one in reversed(finished[-NEWEST:]):
            plan = load_plan(one.run.store)
            if plan is not None and same_but_inputs(plan, results):
                took = read_sessions(one.run.store)
                source, made = f"the run {one.run.name}", took.committed.new_tokens
                found = estimate_from(took.devices, plan.tokens, tokens, source, tokens=made)
                if found is not None:
                    return found
    except (StoreError, UserError):  # another run's directory must not stop this one
        return None
    return None


def same_but_inputs(plan: Plan, results: dict[str, Any]) -> bool:
    """Whether a plan's job differs in nothing but its inputs from the job with these `results`."""
    return _without_files(plan.results) == _without_files(results)


def _without_files(results: dict[str, Any]) -> dict[str, Any]:
    rows = {name: value for name, value in results.get("input", {}).items() if name != "files"}
    return results | {"input": rows}
