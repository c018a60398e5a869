"""Plans or resumes a job, decodes the missing units and closes the run. Idempotent.

    spec -> model, inputs -> Ray -> plan (new, or existing and compared) -> done set -> driver -> manifest, _SUCCESS

Checks the spec, the model, the inputs and the cluster's resources before it writes anything to the run directory.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime

from draftmill.jobs.driving.backend import Backend, backend_of
from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.driver_log import LoggedDisplay
from draftmill.jobs.driving.progress import Display, make_display
from draftmill.jobs.driving.session import RayDidNotStart
from draftmill.jobs.exit_codes import INTERRUPTED, OK, UNEXPECTED
from draftmill.jobs.finished.measure import measure_units
from draftmill.jobs.finished.measure_session import measure_run, say_interrupted
from draftmill.jobs.finished.metric_ready import Ready, kept_in, ready_metrics
from draftmill.jobs.finished.passes import PRUNED, passes_of
from draftmill.jobs.plan.plan import NothingLeft, Plan
from draftmill.jobs.plan.prepare import Prepared, make_plan, prepare
from draftmill.jobs.recurring.base_lease import Held, base_lease, run_lease, wait_until_free
from draftmill.jobs.recurring.earlier_cost import earlier_estimate
from draftmill.jobs.recurring.known_ids import sifting
from draftmill.jobs.recurring.new_inputs import base_path, new_files
from draftmill.jobs.recurring.runs_below import finished_below
from draftmill.jobs.running.session import Run, RunOptions, decode
from draftmill.jobs.running.verdict import broken_off, close, without_ray
from draftmill.jobs.spec.dated_path import base_of, has_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date
from draftmill.jobs.spec.places import check_places
from draftmill.jobs.watching.ending import Ending, ended
from draftmill.storage.runs.commit import (
    is_closed,
)
from draftmill.storage.runs.lease import LeaseLost
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import delete_strays, open_store, probe


def run_job(spec: JobSpec, options: RunOptions) -> int:
    """Run or resume a job; returns the exit code. Raises UserError if the spec, an input or the directory is unusable.

    A date in the output path is filled in, from one reading of the clock, unless the spec has a logical date; then the lease
    of the base path is held, too.
    """
    dated = at_date(spec, datetime.now(UTC))
    return wait_until_free(lambda: _in_name(spec, dated, options), options.if_running)


def _in_name(spec: JobSpec, dated: JobSpec, options: RunOptions) -> int:
    stop = StopFlag()
    if not has_date(spec.output.path):
        return _run(dated, options, stop)
    check_places(dated)
    with base_lease(open_store(base_of(spec.output.path), s3=spec.s3.options()), stop.set):
        return _run(dated, options, stop, path=spec.output.path)


def _run(spec: JobSpec, options: RunOptions, stop: StopFlag, *, path: str | None = None) -> int:
    """Run or resume a job whose output path is complete; raises Held if another driver has the run directory.

    `path` is the output path with the date, if it had one; then the lease of the name is held. How the run ends is told to its
    log and to the receivers of `notify`.
    """
    store = open_store(spec.output.path, s3=spec.s3.options())
    code = UNEXPECTED
    with ended(spec, store, ignored=(Held, LeaseLost)) as ending:
        ending.code = code = _work(spec, store, options, stop, ending, path=path)
    return code


def _work(spec: JobSpec, store: Store, options: RunOptions, stop: StopFlag, ending: Ending, *, path: str | None) -> int:
    news = new_files(spec, store, path, keep=True)
    if news is not None:
        print(f"input.since: {news.text}")
        if not news.files:
            print(f"nothing is new in {spec.input.shown}; no run is started")
            return OK
    with make_display(quiet=options.quiet) as display:
        prepared = prepare(spec, store, display, loaders=None if news is None else news.loaders())
    ready = ready_for(spec, prepared.plan)
    if prepared.plan is not None and is_closed(store):
        if store.exists(PRUNED):
            print(f"{store.url} is already finished; its results were deleted by `draftmill prune`")
            return OK
        print(f"{store.url} is already finished")
        s3 = spec.s3.options()
        is_measured = ready is None or measure_run(store, spec, ready, options, s3=s3, lease=run_lease)
        return close(spec, store) if is_measured else INTERRUPTED
    backend = backend_of(address=options.ray_address, local=options.local)
    backend.check(spec)
    conditional = probe(store)
    try:
        with run_lease(store, stop.set) as lease, make_display(quiet=options.quiet) as shown:
            display = LoggedDisplay(shown, ending.log)
            delete_strays(store)
            if not conditional:
                display.note(f"{store.url} ignores conditional writes: the driver records which file of a unit counts")
            with ExitStack() as stack:
                # Fail on missing resources before writing anything; where there may be nothing to do, plan without Ray.
                if prepared.plan is None and spec.input.dedupe is None:
                    stack.enter_context(backend.opening(display, prepared))
                plan = prepared.plan or planned(backend, prepared, store, display, epoch=lease.epoch, path=path)
                earlier = None if path is None else earlier_estimate(path, spec, plan.results, plan.tokens)
                run = Run(spec, options, prepared, store, plan, conditional, lease, stop, display, backend)
                run.ending, run.earlier = ending, earlier
                finish = decode(run)
                is_measured = finish.how != "done" or ready is None or measured(run, ready)
    except NothingLeft:
        print(f"nothing is new in {spec.input.shown}: finished runs have all its ids as ok; no run is started")
        return OK
    except RayDidNotStart as error:
        raise without_ray(error, store) from error
    if finish.how != "done":
        return broken_off(store, plan, finish, conditional=conditional)
    return close(spec, store) if is_measured else INTERRUPTED


def planned(
    backend: Backend, prepared: Prepared, store: Store, display: Display, *, epoch: int, path: str | None
) -> Plan:
    """Plan the job; with `input.dedupe` without the rows whose ids finished runs have. NothingLeft if there are no others."""
    spec, s3 = prepared.spec, prepared.spec.s3.options()
    if spec.input.dedupe is None:
        return make_plan(prepared, store, display, epoch=epoch, survey=backend.survey(prepared, display))
    path = base_path(spec, path)
    with sifting(open_store(base_of(path), s3=s3), finished_below(path, s3=s3), display, s3=s3) as sift:
        return make_plan(prepared, store, display, epoch=epoch, sift=sift)


def ready_for(spec: JobSpec, plan: Plan | None) -> Ready | None:
    """The spec's metrics, checked before anything is decoded; None if it has none."""
    if not spec.metrics:
        return None
    fields = [f"metrics.{index}" for index in range(len(spec.metrics))]
    kept = spec.kept if plan is None else kept_in(plan)
    return ready_metrics(spec.metrics, fields, spec, kept, s3=spec.s3.options())


def measured(run: Run, ready: Ready) -> bool:
    """Measure the spec's metrics on the run that has just finished; returns whether all is measured."""
    s3 = run.spec.s3.options()
    is_done = measure_units(
        run.store,
        run.spec,
        passes_of(run.store, s3=s3),
        ready,
        backend=run.backend,
        local=run.options.local,
        display=run.display,
        stop=run.stop,
        grace_s=run.options.grace_s,
        s3=s3,
    )
    if not is_done:
        say_interrupted(run.store, ready, s3=s3)
    return is_done
