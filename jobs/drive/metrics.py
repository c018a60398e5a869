"""The metrics of a run, through Ray's own exporter: names, kinds, labels, and the watcher that reports them.

Ray serves them at each node's metrics port, with `ray_` in front of the names here and `_total` behind those of counters. The
driver reports all of them, at most once a second: a metric of Ray's costs up to 0.1 ms, and a killed process loses its series.
Totals that must not be lost are in the run directory.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from draftmill.actors.messages import Failure, Receipt, TurnReport
from draftmill.jobs.drive.driver import Watcher
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.schedule.scheduler import Scheduler

EVERY_S = 1.0
"""Seconds between two reports to Ray."""

SILENT_S = 10.0
"""A worker that has not reported for this long decodes nothing: its slots are not in use."""

COMMIT_BUCKETS_S = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, what it is, its help text, and its labels besides `run` and `decoder`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name under which Ray serves it; a histogram has `_bucket`, `_sum` and `_count` behind it."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("draftmill_running", "gauge", "1 while the driver's loop runs, 0 after its end"),
    Metric("draftmill_samples", "counter", "samples in committed units", ("status",)),
    Metric("draftmill_samples_planned", "gauge", "samples of the plan"),
    Metric("draftmill_samples_done", "gauge", "samples that have ended, in earlier sessions too"),
    Metric("draftmill_tokens", "counter", "tokens generated (score: scored) in committed units"),
    Metric("draftmill_prompt_tokens", "counter", "tokens given in committed units"),
    Metric("draftmill_decoded_tokens", "counter", "tokens as they are decoded, also of units that will fail or be decoded again"),
    Metric("draftmill_nfe", "counter", "forwards of the model, summed over the samples of committed units"),
    Metric("draftmill_nfe_draft", "counter", "the same of what drafts"),
    Metric("draftmill_drafts_proposed", "counter", "draft tokens in committed units"),
    Metric("draftmill_drafts_accepted", "counter", "draft tokens that were accepted"),
    Metric("draftmill_slots", "gauge", "slots of the workers, mean of the last second"),
    Metric("draftmill_slots_used", "gauge", "slots with a sample, mean of the last second"),
    Metric("draftmill_units", "gauge", "units of this session by state", ("status",)),
    Metric("draftmill_workers", "gauge", "workers by state", ("status",)),
    Metric("draftmill_worker_deaths", "counter", "workers that died or were killed; each is replaced"),
    Metric("draftmill_errors", "counter", "failed samples in committed units, by class", ("error_class",)),
    Metric("draftmill_unit_failures", "counter", "units that failed on a worker and are tried again, by class", ("error_class",)),
    Metric("draftmill_commit_seconds", "histogram", "seconds to write a unit's file"),
    Metric("draftmill_seconds_without_progress", "gauge", "seconds since a token was committed or a sample ended"),
    Metric("draftmill_device_seconds", "counter", "seconds for which workers held their devices"),
)  # fmt: skip
"""Every metric; docs/watching.md, infra/grafana.json and infra/alerts.yaml use exactly these (tests check it)."""

COUNTED = {
    "draftmill_tokens": "new_tokens",
    "draftmill_prompt_tokens": "prompt_tokens",
    "draftmill_nfe": "nfe",
    "draftmill_nfe_draft": "nfe_draft",
    "draftmill_drafts_proposed": "proposed",
    "draftmill_drafts_accepted": "accepted",
}
"""Counters that are sums over receipts, each with its field of Tally."""

Labels = tuple[tuple[str, str], ...]
Make = Callable[[Metric], Any]


def ray_metric(metric: Metric) -> Any:
    """The metric of Ray's with this name; Ray must be running."""
    from ray.util import metrics

    labels = ("run", "decoder", *metric.labels)
    match metric.kind:
        case "counter":
            return metrics.Counter(metric.name, metric.help, tag_keys=labels)
        case "gauge":
            return metrics.Gauge(metric.name, metric.help, tag_keys=labels)
        case "histogram":
            return metrics.Histogram(metric.name, metric.help, boundaries=COMMIT_BUCKETS_S, tag_keys=labels)


@dataclass(slots=True)
class SlotUse:
    """The slots of one worker: their number and those in use, of the last second in which it decoded."""

    updated_s: float = 0.0
    slots: float = 0.0
    used: float = 0.0


class MetricsWatcher(Watcher):
    """Reports the metrics of one session to Ray, at most every EVERY_S seconds. `make` makes a metric of Ray's."""

    name = "metrics"

    def __init__(
        self, run: str, decoder: str, *, make: Make = ray_metric, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base = {"run": run, "decoder": decoder}
        self._make = make
        self._metrics: dict[str, Any] = {}
        self._clock = clock
        self._next_s = 0.0
        self._moved_s = clock()
        self._sums: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._commits_s: list[float] = []
        self._steps: dict[str, Counter[str]] = {}
        self._slots: dict[str, SlotUse] = {}
        self._reported_s = 0.0

    def reported(self, worker: str, report: TurnReport) -> None:
        engine = report.effort.engine
        if report.moved:
            self._moved_s = self._clock()
        self._add("draftmill_decoded_tokens", engine.committed)
        steps = self._steps.setdefault(worker, Counter())
        steps.update(steps=engine.steps, slots=engine.slot_steps, used=engine.active_slot_steps)

    def committed(self, receipt: Receipt) -> None:
        tally = receipt.tally
        self._moved_s = self._clock()
        for status in ("ok", "failed", "skipped"):
            self._add("draftmill_samples", getattr(tally, status), status=status)
        for name, field in COUNTED.items():
            self._add(name, getattr(tally, field))
        for kind, count in receipt.error_kinds.items():
            self._add("draftmill_errors", count, error_class=kind)
        self._commits_s.append(receipt.commit_s)

    def failed(self, failure: Failure) -> None:
        self._add("draftmill_unit_failures", 1, error_class=failure.error_kind)

    def died(self, worker: str) -> None:
        self._add("draftmill_worker_deaths", 1)
        self._slots.pop(worker, None)
        self._steps.pop(worker, None)

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + EVERY_S
            self._report(totals, scheduler, running=1)

    def over(self, totals: Totals, scheduler: Scheduler) -> None:
        self._report(totals, scheduler, running=0)

    def _add(self, name: str, value: float, **labels: str) -> None:
        if value > 0:
            self._sums[name, tuple(labels.items())] += value

    def _report(self, totals: Totals, scheduler: Scheduler, *, running: int) -> None:
        self._metrics = self._metrics or {metric.name: self._make(metric) for metric in METRICS}
        self._spend(totals)
        for (name, labels), value in self._sums.items():
            self._metrics[name].inc(value, tags=self._base | dict(labels))
        self._sums.clear()
        for seconds in self._commits_s:
            self._metrics["draftmill_commit_seconds"].observe(seconds, tags=self._base)
        self._commits_s.clear()
        self._set("draftmill_running", running)
        self._set("draftmill_samples_planned", totals.rows)
        self._set("draftmill_samples_done", totals.rows_done)
        self._set("draftmill_seconds_without_progress", self._clock() - self._moved_s if running else 0.0)
        self._count_slots()
        self._set("draftmill_slots", sum(worker.slots for worker in self._slots.values()))
        self._set("draftmill_slots_used", sum(worker.used for worker in self._slots.values()))
        for status, count in {"up": totals.workers if running else 0, "loading": totals.loading}.items():
            self._set("draftmill_workers", count, status=status)
        for status, count in scheduler.state.states().items():
            self._set("draftmill_units", count, status=status)

    def _spend(self, totals: Totals) -> None:
        """Counters of sums that the totals already have: report how much they have grown."""
        total_s = totals.devices.sums.up_s
        self._add("draftmill_device_seconds", total_s - self._reported_s)
        self._reported_s = total_s

    def _count_slots(self) -> None:
        now_s = self._clock()
        for worker, steps in self._steps.items():
            if steps["steps"]:
                number = steps["steps"]
                self._slots[worker] = SlotUse(now_s, steps["slots"] / number, steps["used"] / number)
        self._steps.clear()
        for slots in self._slots.values():
            slots.used = slots.used if now_s - slots.updated_s < SILENT_S else 0.0

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._metrics[name].set(value, tags=self._base | labels)
