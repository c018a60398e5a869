"""What `draftmill validate` says of a job's device hours and cost: an estimate with its source, or that there is none."""

from __future__ import annotations

from collections.abc import Iterator

from draftmill.jobs.driving.attempts import read_sessions
from draftmill.jobs.forecasting.forecast import Trial, TrialSample
from draftmill.jobs.plan.fingerprint import results_key
from draftmill.jobs.plan.prepare import Prepared
from draftmill.jobs.recurring.earlier_cost import earlier_estimate
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.jobs.watching.cost import device_text, money_text, purposes_text
from draftmill.jobs.watching.estimate import Estimate, estimate_from, per_million_text
from draftmill.storage.stores.verbs import Store

TRIAL = "the trial on this machine, without loading and idle time"


def forecast_lines(
    prepared: Prepared, store: Store, sample: TrialSample, trial: Trial | None, path: str | None
) -> Iterator[str]:
    """The lines of the dry run; `path` is the output path with the date, if it has one."""
    found = earlier_sessions(prepared, store) or earlier_run(prepared, sample, path) or from_trial(sample, trial)
    if found is None:
        yield "devices   unknown: there is no earlier run of this job, and nothing was decoded here"
    else:
        purposes = "" if found.sums is None else f" ({purposes_text(found.sums)})"
        yield f"devices   ~{device_text(found.device_s)} of device time{purposes}; from {found.source}"
    if money := price_text(prepared.spec, found):
        yield f"cost      {money}"


def price_text(spec: JobSpec, found: Estimate | None) -> str:
    """What an estimate costs, if the spec has prices; with several kinds of workers the cheapest and the dearest one's."""
    prices = [shape.price_per_hour for shape in spec.shapes]
    known = sorted({price for price in prices if price is not None})
    if not known:
        return ""
    if found is None or None in prices:
        return "unknown" + ("" if found is None else ": some kinds of workers have no price")
    if len(known) == 1:
        return f"~{money_text(found.cost(known[0]))}{per_million_text(found, known[0])}"
    ends = known[0], known[-1]
    amounts = " to ".join(money_text(found.cost(price)) for price in ends)
    return f"~{amounts}{per_million_text(found, *ends)}, by the kind of worker"


def earlier_sessions(prepared: Prepared, store: Store) -> Estimate | None:
    """From what the sessions of this run directory took for the samples that they committed."""
    if prepared.plan is None:
        return None
    sessions = read_sessions(store)
    rows, source = sessions.committed.rows, f"{sessions.committed.rows:,} samples that this run has decoded"
    return estimate_from(sessions.devices, rows, prepared.plan.rows, source, tokens=sessions.committed.new_tokens)


def earlier_run(prepared: Prepared, sample: TrialSample, path: str | None) -> Estimate | None:
    """From the newest finished run of a recurring job that did the same with other rows."""
    if path is None:
        return None
    results = results_key(prepared.spec, prepared.info, prepared.hashes, prepared.inputs)
    tokens = round(float(sample.lengths().mean()) * sample.total)
    return earlier_estimate(path, prepared.spec, results, tokens)


def from_trial(sample: TrialSample, trial: Trial | None) -> Estimate | None:
    """From the rate of the trial; for completions of at most their maximum length."""
    if trial is None or not trial.tokens or not trial.took_s:
        return None
    todo = float(sample.masked().mean()) * sample.total
    return Estimate(todo * trial.took_s / trial.tokens, TRIAL, "", todo)
