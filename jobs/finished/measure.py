"""Measures the units of a run that lack some of the wanted metrics, in this process or on Ray; resumable and exactly once.

metrics, checked -> units without them -> sets recorded -> workers -> one file per unit and set
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import draftmill
from draftmill.actors.job import WorkerResources
from draftmill.actors.measuring.measure import MeasureJob, UnitMeasured, UnitMeasurer, UnitToMeasure
from draftmill.actors.metrics.base import Stopping
from draftmill.jobs.driving.backend import Backend
from draftmill.jobs.driving.driver import CLOSING_S, POLL_S, StopFlag
from draftmill.jobs.driving.progress import Display
from draftmill.jobs.driving.totals import ratio
from draftmill.jobs.finished.metric_ready import Ready, check_columns
from draftmill.jobs.finished.passes import Pass, finished
from draftmill.jobs.formatting import counted, duration
from draftmill.jobs.plan.worker_job import absolute
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.metric_files import MetricSet, measured_units, metric_sets, record_set
from draftmill.storage.stores.interface import S3Options, Store


@dataclass(slots=True)
class SpareMeasurers:
    """Workers that stay from one run to the next with the judges that they have loaded, so that a sweep loads a judge once."""

    here: UnitMeasurer | None = None
    actors: list[Any] = field(default_factory=list)
    resources: WorkerResources | None = None

    def take(self, resources: WorkerResources) -> list[Any]:
        """The actors, which the caller owns from now on; those that have other resources are ended instead."""
        if (self.resources is None) or (self.resources.cpus, self.resources.gpus) != (resources.cpus, resources.gpus):
            self.end()
        found, self.actors, self.resources = self.actors, [], resources
        return found

    def end(self) -> None:
        """End the actors."""
        if self.actors:
            from draftmill.actors.ray.pool import end_workers

            end_workers(self.actors)
        self.actors = []


@dataclass(slots=True)
class _Measurement:
    """Units to measure, the figures of what is done so far, and when to stop; `rows_before` were measured by earlier commands."""

    job: MeasureJob
    units: list[UnitToMeasure]
    rows_before: int
    display: Display
    stop: StopFlag
    grace_s: float
    began_s: float = field(default_factory=time.monotonic)
    done: int = 0
    rows_done: int = 0
    errors: int = 0
    _until_s: float | None = None

    def take(self, measured: Sequence[UnitMeasured]) -> None:
        """Count measured units, and show how far the measurement is."""
        self.done += len(measured)
        self.rows_done += sum(unit.rows for unit in measured)
        self.errors += sum(unit.errors for unit in measured)
        rows = sum(unit.rows for unit in self.units)
        done, total = self.rows_before + self.rows_done, self.rows_before + rows
        rate, share = ratio(self.rows_done, time.monotonic() - self.began_s), ratio(done, total)
        left = f"ETA {duration((rows - self.rows_done) / rate)}" if rate else "ETA -"
        figures = f"{rate:,.1f} samples/s  {self.errors:,} errors  {left}"
        self.display.line(share, f"measured {done:,}/{total:,} samples ({share:.0%})  {figures}")

    def is_over(self) -> bool:
        """Whether running units must be given up: once the flag is set, they may go on for the grace period."""
        if self.stop.reason is None:
            return False
        if self._until_s is None:
            run_on_s = max(0.0, self.grace_s - CLOSING_S)
            self._until_s = time.monotonic() + run_on_s
            self.display.note(f"{self.stop.reason}: finishing the running units, for at most {run_on_s:.0f} s")
        return self.stop.urgent or time.monotonic() > self._until_s

    def run_here(self, resources: WorkerResources, spare: SpareMeasurers) -> None:
        """Measure in this process."""
        before = spare.here
        measurer = (
            UnitMeasurer(self.job, resources.threads) if before is None else before.for_job(self.job, resources.threads)
        )
        spare.here = measurer
        for unit in self.units:
            if self.stop.reason is not None:
                self.is_over()  # says that it stops
                return
            try:
                self.take([measurer.measure(unit, self.is_over)])
            except Stopping:
                return

    def run_on_ray(self, resources: WorkerResources, count: int, spare: SpareMeasurers) -> None:
        """Measure on Ray; StoreError if a unit can't be measured, after all others."""
        from draftmill.actors.measuring.measure_pool import MeasurePool

        resources = replace(resources, threads=max(1, resources.threads))
        pool = MeasurePool(self.job, resources, count, self.units, spare.take(resources))
        pool.start()
        try:
            while pool.busy:
                self.take(pool.poll(POLL_S))
                if self.stop.reason is not None:
                    pool.stop()
                    if self.is_over():
                        return
            spare.actors = pool.release()
        finally:
            pool.close()
        if pool.failed:
            (pass_, unit), reason = min(pool.failed.items())
            more = f" and {len(pool.failed) - 1} more" if len(pool.failed) > 1 else ""
            raise StoreError(f"unit {unit} of pass {pass_}{more} can't be measured: {reason}; all others are measured")


def units_to_measure(store: Store, passes: Sequence[Pass], ready: Ready) -> list[UnitToMeasure]:
    """The units of all finished passes that lack some of the metrics, each with those that it lacks.

    Reads listings and the descriptions of sets, no unit.
    """
    sets = metric_sets(store)
    check_columns(ready, sets)
    measured = measured_units(store)
    found = []
    for one in finished(passes):
        assert one.manifest is not None
        folder = "" if one.number == 1 else f"passes/{one.number:04d}/"
        for unit in one.manifest.units:
            there = {
                metric.identity
                for name in measured.get((one.number, unit.unit), ())
                if name in sets
                for metric in sets[name].metrics
            }
            lacking = tuple(n for n, metric in enumerate(ready.metrics) if metric.measured.identity not in there)
            if lacking:
                found.append(UnitToMeasure(one.number, unit.unit, f"{folder}{unit.object}", unit.rows, lacking))
    return found


def measure_units(
    store: Store,
    spec: JobSpec,
    passes: Sequence[Pass],
    ready: Ready,
    *,
    backend: Backend,
    local: bool,
    display: Display,
    stop: StopFlag,
    grace_s: float,
    s3: S3Options,
    spare: SpareMeasurers | None = None,
) -> bool:
    """Measure what is missing; returns whether all is measured, False if it was interrupted.

    With `spare`, workers come from there and go back there; the caller ends them. The caller holds the run directory's
    lease. Raises StoreError if a unit can't be measured, after all others.
    """
    units = units_to_measure(store, passes, ready)
    if not units:
        return True
    for lacking in dict.fromkeys(unit.metrics for unit in units):
        record_set(store, MetricSet(tuple(ready.metrics[index].measured for index in lacking)))
    job = MeasureJob(
        store_url=absolute(store.url),
        s3=s3,
        fingerprint=passes[0].plan.fingerprint,
        code_version=draftmill.__version__,
        metrics=ready.metrics,
        reference=ready.reference,
        joiner=ready.joiner,
    )
    rows = sum(unit.rows for unit in units)
    before = sum(one.plan.rows for one in finished(passes)) - rows
    measurement = _Measurement(job, units, before, display, stop, grace_s)
    wanted = {index for unit in units for index in unit.metrics}
    names = ", ".join(dict.fromkeys(ready.metrics[index].settings.shown for index in sorted(wanted)))
    display.note(f"measuring {names}: {counted(len(units), 'unit')}, {rows:,} samples")
    workers = spare or SpareMeasurers()
    with backend.opened(display), stop.on_signals():
        count, resources = _measurers(backend, spec, ready, len(units))
        try:
            if local:
                measurement.run_here(resources, workers)
            else:
                measurement.run_on_ray(resources, count, workers)
        finally:
            if spare is None:  # a unit that failed leaves workers, too
                workers.end()
    return measurement.done == len(units)


def _measurers(backend: Backend, spec: JobSpec, ready: Ready, units: int) -> tuple[int, WorkerResources]:
    """As many workers as the run's own `workers` allow, of one kind; they get GPUs only if there is a judge."""
    if any(metric.place is not None for metric in ready.metrics):
        return backend.allocate(spec, units=units).largest
    workers = spec.shapes[0].model_copy(update={"gpus": 0, "gpus_per_model": 1, "labels": {}})
    bare = spec.model_copy(update={"workers": workers, "model": spec.model.model_copy(update={"device": "cpu"})})
    return backend.allocate(bare, units=units).largest
