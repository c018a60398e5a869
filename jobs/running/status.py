"""`draftmill status`: shows the progress of a run, read from its directory alone. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from draftmill.jobs.driving.cost import DeviceSums, cost_rows
from draftmill.jobs.driving.run_log import read_sessions
from draftmill.jobs.driving.totals import efficiency, exactness, ratio
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.finished.passes import PRUNED, NoPlanYet, Pass, left_failed, passes_of, require_plan, units_done
from draftmill.jobs.finished.summary import metric_lines
from draftmill.jobs.formatting import duration, rate_text
from draftmill.jobs.plan.plan import Plan
from draftmill.storage.runs.commit import SUCCESS, is_closed, read_manifest
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import open_store


def status(run_dir: str, *, s3: S3Options | None = None) -> int:
    """Print done, running and failed units and samples, the rate and the remaining time; returns the exit code."""
    store = open_store(run_dir, s3=s3)
    try:
        plan = require_plan(store)
    except NoPlanYet as state:
        print(state)
        return OK
    lines = [f"{store.url}: {plan.spec.name}", *status_lines(store, plan)]
    later = passes_of(store, s3=s3)[1:] if store.exists(SUCCESS) else []
    lines += [pass_line(one) for one in later]
    lines += cost_lines([store, *(one.store for one in later)], is_running=driver_of(store) is not None)
    if found := metric_lines(store, plan.rows):
        lines += ["  metrics", *(f"  {line}" for line in found)]
    print("\n".join(lines))
    return OK


def pass_line(one: Pass) -> str:
    """One line on the progress of a later pass."""
    if one.manifest is not None:
        return f"  pass {one.number}   finished: {one.plan.rows:,} samples again, {left_failed([one]):,} of them failed"
    done = len(units_done(one.store))
    return f"  pass {one.number}   {done:,} of {one.plan.units:,} units done; `draftmill rerun --failed` resumes it"


def status_lines(store: Store, plan: Plan) -> Iterator[str]:
    """The report, line by line."""
    if store.exists(PRUNED):
        yield "  state    finished; its results were deleted by `draftmill prune`"
        yield f"  samples  {plan.rows:,} of {plan.rows:,} done (100.0%), {failed_so_far(store)} failed"
        return
    done = units_done(store)
    rows = sum(size.rows for size in plan.sizes() if size.unit in done)
    driver = driver_of(store)
    sessions = read_sessions(store)
    running = 0 if driver is None else min(plan.units - len(done), sessions.units_held)
    yield f"  state    {state_of(store, driver)}"
    yield f"  units    {len(done):,} done, {running:,} running, {plan.units - len(done) - running:,} to go"
    yield f"  samples  {rows:,} of {plan.rows:,} done ({ratio(rows, plan.rows):.1%}), {failed_so_far(store)} failed"
    for text, count in sessions.started_on.items():
        yield f"  workers  {count:,} started on {text}"
    manifest = read_manifest(store)
    if done:
        yield f"  exact    {exactness(manifest.exact if manifest else sessions.exact)}"
    rate = ratio(sessions.committed.rows, sessions.wall_s)
    if rate:
        tokens = ratio(sessions.committed.new_tokens, sessions.wall_s)
        yield f"  rate     {rate:,.1f} samples/s, {rate_text(tokens)} tokens/s"
    if shared := efficiency(sessions.effort).get("prompts_shared"):
        yield f"  prompts  {shared:.1%} of their rows taken over from other samples, not computed"
    if rate and rows < plan.rows:
        yield f"  ETA      {duration((plan.rows - rows) / rate)} of decoding"


def cost_lines(stores: Sequence[Store], *, is_running: bool) -> list[str]:
    """What the workers of all passes cost so far; of a running session it is known what is in progress."""
    sessions = [read_sessions(store) for store in stores]
    sums = sum((one.devices for one in sessions), DeviceSums())
    sums = replace(sums, unended=max(0.0, sums.unended - is_running))
    tokens = sum(one.committed.new_tokens for one in sessions)
    rows = cost_rows(sums, tokens, open_s=sessions[-1].open_s if is_running else 0.0)
    return [f"  {label:<13}{text}" for label, text in rows]


def state_of(store: Store, driver: str | None) -> str:
    """The run's state, in words."""
    if is_closed(store):
        return "finished"
    return f"running, driver {driver}" if driver else "not running; `draftmill run` resumes it"


def failed_so_far(store: Store) -> int:
    """The number of failed samples, from the manifest or else from the recorded sessions."""
    manifest = read_manifest(store)
    return manifest.total("failed") if manifest else read_sessions(store).committed.failed
