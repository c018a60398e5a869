"""`draftmill rerun --failed`: decodes failed samples again in a new pass, or resumes such a pass.

A pass is a run directory inside the run's own (jobs/finished/passes.py): planned, decoded, committed and closed like any run,
under the run's lease. Earlier passes stay unchanged. The job must be the same; settings that may change between two runs
(batching, workers, errors, the paths of model and inputs) may change here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from draftmill.jobs.driving.backend import backend_of
from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.leases import hold_lease
from draftmill.jobs.driving.progress import Display, make_display
from draftmill.jobs.exit_codes import INTERRUPTED
from draftmill.jobs.finished.passes import Pass, failed_rows, finished, left_failed, pass_store, passes_of, require_plan
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.packing import PlanWriter, discard_parts
from draftmill.jobs.plan.plan import Plan, create_plan
from draftmill.jobs.plan.prepare import prepare
from draftmill.jobs.running.run import measure_run, ready_for
from draftmill.jobs.running.session import Run, RunOptions, decode
from draftmill.jobs.running.verdict import broken_off, judge, print_metrics, print_table
from draftmill.jobs.spec.job_spec import JobSpec, check_overridden
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store, probe


def rerun(run_dir: str, options: RunOptions, *, overrides: Sequence[str] = (), s3: S3Options | None = None) -> int:
    """Decode the failed samples of a finished run again, in a new pass; returns the exit code of the run as a whole.

    Raises UserError if the run is not finished, or if `overrides` (KEY=VALUE), the model or the inputs make it another job.
    """
    store = open_store(run_dir, s3=s3)
    spec = spec_of(require_plan(store), run_dir, overrides, s3)
    finished(passes_of(store, s3=s3))
    with make_display(quiet=options.quiet) as display:
        prepared = prepare(spec, store, display)
    backend = backend_of(address=options.ray_address, local=options.local)
    backend.check(spec)
    conditional = probe(store)
    stop = StopFlag()
    with hold_lease(store, stop.set) as lease, make_display(quiet=options.quiet) as display:
        passes = passes_of(store, s3=s3)  # read again: under the lease, no other driver can start a pass
        plan = unfinished(passes) or plan_pass(passes, s3, display, epoch=lease.epoch)
        if plan is None:
            print(f"{store.url}: no failed samples")
            return judge(spec, passes)
        inside = spec.model_copy(update={"output": spec.output.model_copy(update={"path": plan.store.url})})
        finish = decode(Run(inside, options, prepared, plan.store, plan, conditional, lease, stop, display, backend))
    if finish.how != "done":
        return broken_off(plan.store, plan, finish, conditional=conditional)
    ready = ready_for(spec, plan)
    if ready is not None and not measure_run(store, spec, ready, options, s3=spec.s3.options()):
        return INTERRUPTED
    print_table(inside, plan.store)
    passes = passes_of(store, s3=s3)
    print_metrics(store, passes)
    return judge(spec, passes)


def spec_of(plan: Plan, run_dir: str, overrides: Sequence[str], s3: S3Options | None) -> JobSpec:
    """The spec with which the run was planned, with the run directory's current path and `overrides`.

    Settings given in `s3` apply to the workers too.
    """
    data = plan.spec.model_dump(mode="json")
    data["s3"] |= {key: value for key, value in asdict(s3 or S3Options()).items() if value not in {None, "auto"}}
    spec = check_overridden(data, overrides)
    return spec.model_copy(update={"output": spec.output.model_copy(update={"path": run_dir})})


def unfinished(passes: Sequence[Pass]) -> Plan | None:
    """The plan of an interrupted pass; None if the last pass is finished."""
    return passes[-1].plan if passes[-1].manifest is None else None


def plan_pass(passes: Sequence[Pass], s3: S3Options | None, display: Display, *, epoch: int) -> Plan | None:
    """Plan a pass over the failed rows of the last one, in their order; None if there are none."""
    if not left_failed(passes):
        return None
    first, last = passes[0].plan, passes[-1]
    store = pass_store(first.store, last.number + 1, s3)
    unit_rows = None if first.spec.output.unit_rows == "auto" else first.spec.output.unit_rows
    window = first.spec.batching.window
    writer = PlanWriter(store, window=window, unit_rows=unit_rows, keep_order=True, epoch=epoch)
    discard_parts(store, epoch)
    for table in failed_rows(last):
        writer.add(table)
    writer.finish()
    plan = create_plan(store, first.spec, first.results, first.files, writer, pass_=last.number + 1, keep=first.keep)
    display.note(f"pass {plan.pass_}: {counted(plan.rows, 'failed sample')} in {counted(plan.units, 'unit')}")
    return plan
