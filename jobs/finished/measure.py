"""Measures the units of a run that lack some of the wanted metrics; resumable and exactly once.

metrics, checked -> units without them -> sets recorded -> scheduler, driver and workers of a run -> one file per unit and set
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import draftmill
from draftmill.actors.job import Allocation
from draftmill.actors.measuring.measure import MeasureJob, UnitToMeasure
from draftmill.jobs.driving.backend import Backend
from draftmill.jobs.driving.driver import Driver, StopFlag
from draftmill.jobs.driving.events import Level
from draftmill.jobs.driving.progress import Display
from draftmill.jobs.driving.totals import Totals, ratio
from draftmill.jobs.finished.metric_ready import Ready, check_columns
from draftmill.jobs.finished.passes import Pass, finished
from draftmill.jobs.formatting import counted, duration
from draftmill.jobs.plan.worker_job import absolute, limits_of
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSize
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.metric_files import MetricSet, measured_units, metric_sets, record_set
from draftmill.storage.stores.interface import S3Options, Store

MARGIN_S = 30.0
"""Seconds beyond the time limit of a row after which a worker that can't interrupt its metric is killed."""


class MeasureDisplay(Display):
    """Shows samples where a run shows tokens; of the events it shows the messages, as notes."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.note = display.note  # type: ignore[method-assign]

    def event(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        if event == "quarantined":  # the rows of a unit are here the values to measure, see actors/measuring/measure.py
            count = counted(facts["stop"] - facts["start"], "value")
            message = f"unit {facts['unit']}: {count} can't be measured: {facts['error']}"
        super().event(event, message, level=level, **facts)

    def show(self, totals: Totals) -> None:
        done, rows = totals.rows_done, totals.rows
        share, rate = ratio(done, rows), ratio(done - totals.rows_before, totals.wall_s)
        left = "-" if totals.eta_s is None else duration(totals.eta_s)
        figures = f"{rate:,.1f} samples/s  {totals.committed.failed:,} errors  ETA {left}"
        self._display.line(share, f"measured {done:,}/{rows:,} samples ({share:.0%})  {figures}")


def units_to_measure(store: Store, passes: Sequence[Pass], ready: Ready) -> dict[int, UnitToMeasure]:
    """The units of all finished passes that lack some of the metrics, each with those that it lacks, by their numbers.

    The units of the first pass have their own numbers, those of later passes the following ones. Reads listings and the
    descriptions of sets, no unit.
    """
    sets = metric_sets(store)
    check_columns(ready, sets)
    measured = measured_units(store)
    units: dict[int, UnitToMeasure] = {}
    first = 0
    for part in finished(passes):
        assert part.manifest is not None
        folder = "" if part.number == 1 else f"passes/{part.number:04d}/"
        for unit in part.manifest.units:
            there = {
                metric.identity
                for name in measured.get((part.number, unit.unit), ())
                if name in sets
                for metric in sets[name].metrics
            }
            lacking = tuple(n for n, metric in enumerate(ready.metrics) if metric.measured.identity not in there)
            if lacking:
                place = UnitToMeasure(part.number, unit.unit, f"{folder}{unit.object}", unit.rows, lacking)
                units[first + unit.unit] = place
        first += part.plan.units
    return units


def measure_units(
    store: Store,
    spec: JobSpec,
    passes: Sequence[Pass],
    ready: Ready,
    *,
    backend: Backend,
    display: Display,
    stop: StopFlag,
    grace_s: float,
    s3: S3Options,
) -> bool:
    """Measure what is missing; returns whether all is measured, False if it was interrupted.

    A metric has `workers.stall_s` for a row. A row on which a metric takes longer, or ends its process again and again, gets the
    reason as that metric's error. The caller holds the run directory's lease. Raises StoreError if the workers can't go on.
    """
    units = units_to_measure(store, passes, ready)
    if not units:
        return True
    lacking = dict.fromkeys(unit.metrics for unit in units.values())
    for indices in lacking:
        record_set(store, MetricSet(tuple(ready.metrics[index].measured for index in indices)))
    limits = limits_of(spec)
    job = MeasureJob(
        store_url=absolute(store.url),
        s3=s3,
        fingerprint=passes[0].plan.fingerprint,
        code_version=draftmill.__version__,
        metrics=ready.metrics,
        units=units,
        row_s=limits.lease_s,
        reference=ready.reference,
        joiner=ready.joiner,
    )
    rows, all_rows = sum(unit.rows for unit in units.values()), sum(part.plan.rows for part in finished(passes))
    totals = Totals(units=len(units), rows=all_rows, rows_before=all_rows - rows)
    indices = sorted({index for unit in units.values() for index in unit.metrics})
    names = ", ".join(dict.fromkeys(ready.metrics[index].settings.shown for index in indices))
    display.note(f"measuring {names}: {counted(len(units), 'unit')}, {rows:,} samples")
    sizes = [
        UnitSize(number, unit.rows * len(unit.metrics), unit.rows * len(unit.metrics)) for number, unit in units.items()
    ]
    with backend.opened(display), stop.on_signals():
        allocation = _allocate_measurers(backend, spec, ready, len(units))
        pool = backend.pool(job, allocation)
        scheduler = Scheduler(
            sizes, workers=allocation.count, limits=replace(limits, lease_s=limits.lease_s + MARGIN_S)
        )
        is_done = False
        try:
            finish = Driver(scheduler, pool, MeasureDisplay(display), totals, stop, grace_s).run()
            is_done = finish.how == "done"
        finally:
            if is_done:
                backend.retire(pool)
            else:
                pool.close()
    if finish.how in {"failed", "full"}:
        raise StoreError(f"{finish.message}; run it again to resume")
    return is_done


def _allocate_measurers(backend: Backend, spec: JobSpec, ready: Ready, units: int) -> Allocation:
    """As many workers as the run's own `workers` allow, of one kind; they get GPUs only if there is a judge."""
    if not any(metric.place is not None for metric in ready.metrics):
        workers = spec.shapes[0].model_copy(update={"gpus": 0, "gpus_per_model": 1, "labels": {}})
        model = spec.model.model_copy(update={"device": "cpu"})
        spec = spec.model_copy(update={"workers": workers, "model": model})
    count, resources = backend.allocate(spec, units=units).largest
    return Allocation((replace(resources, threads=max(1, resources.threads), processes=1),), (count,))
