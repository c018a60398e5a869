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

from draftmill.actors.messages import Failure, TurnReport
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
    """A metric: its name, what it is, its help text, and its labels besides `run` and `decoder`.

    `tally` is the field of Tally of a counter that is a sum over receipts.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    tally: str = ""

    @property
    def exported(self) -> str:
        """The name under which Ray serves it; a histogram has `_bucket`, `_sum` and `_count` behind it."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("draftmill_running", "gauge", "1 while the driver's loop runs, 0 after its end"),
    Metric("draftmill_samples", "counter", "samples in committed units", ("status",)),
    Metric("draftmill_samples_planned", "gauge", "samples of the plan"),
    Metric("draftmill_samples_done", "gauge", "samples that have ended, in earlier sessions too"),
    Metric("draftmill_tokens", "counter", "tokens generated (score: scored) in committed units", tally="new_tokens"),
    Metric("draftmill_prompt_tokens", "counter", "tokens given in committed units", tally="prompt_tokens"),
    Metric("draftmill_decoded_tokens", "counter", "tokens as they are decoded, also of units that will fail or be decoded again"),
    Metric("draftmill_nfe", "counter", "forwards of the model, summed over the samples of committed units", tally="nfe"),
    Metric("draftmill_nfe_draft", "counter", "the same of what drafts", tally="nfe_draft"),
    Metric("draftmill_drafts_proposed", "counter", "draft tokens in committed units", tally="proposed"),
    Metric("draftmill_drafts_accepted", "counter", "draft tokens that were accepted", tally="accepted"),
    Metric("draftmill_slots", "gauge", "slots of the workers, as of their last reports"),
    Metric("draftmill_slots_used", "gauge", "slots with a sample, as of their last reports"),
    Metric("draftmill_units", "gauge", "units of this session by state", ("status",)),
    Metric("draftmill_workers", "gauge", "workers by state", ("status",)),
    Metric("draftmill_worker_deaths", "counter", "workers that died or were killed; each is replaced"),
    Metric("draftmill_errors", "counter", "failed samples in committed units, by class", ("error_class",)),
    Metric("draftmill_unit_failures", "counter", "units that failed on a worker and are retried, by class", ("error_class",)),
    Metric("draftmill_commit_seconds", "histogram", "seconds to write a unit's file"),
    Metric("draftmill_seconds_without_progress", "gauge", "seconds since a token was committed or a sample ended"),
    Metric("draftmill_device_seconds", "counter", "seconds for which workers held their devices"),
)  # fmt: skip
"""Every metric; docs/watching.md, infra/grafana.json and infra/alerts.yaml use exactly these (tests check it)."""

Make = Callable[[Metric], Any]


def ray_metric(metric: Metric) -> Any:
    """The metric of Ray's with this name; Ray must be running."""
    from ray.util import metrics

    kind = {"counter": metrics.Counter, "gauge": metrics.Gauge, "histogram": metrics.Histogram}[metric.kind]
    bounds = {"boundaries": COMMIT_BUCKETS_S} if metric.kind == "histogram" else {}
    return kind(metric.name, metric.help, tag_keys=("run", "decoder", *metric.labels), **bounds)


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
        self._counted: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._failures: Counter[str] = Counter()
        self._commits_s: list[float] = []
        self._slots: dict[str, tuple[float, float, float]] = {}  # when it decoded last, its slots, those in use then

    def reported(self, worker: str, report: TurnReport) -> None:
        engine = report.effort.engine
        if number := engine.steps:
            self._slots[worker] = self._clock(), engine.slot_steps / number, engine.active_slot_steps / number
        for answer in report.answers:
            if isinstance(answer, Failure):
                self._failures[answer.error_kind] += 1
            elif answer.committed is not None:
                self._commits_s.append(answer.commit_s)

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + EVERY_S
            self._report(totals, scheduler, running=1)

    def over(self, totals: Totals, scheduler: Scheduler) -> None:
        self._report(totals, scheduler, running=0)

    def _report(self, totals: Totals, scheduler: Scheduler, *, running: int) -> None:
        self._metrics = self._metrics or {metric.name: self._make(metric) for metric in METRICS}
        for metric in (metric for metric in METRICS if metric.tally):
            self._count(metric.name, getattr(totals.committed, metric.tally))
        for status in ("ok", "failed", "skipped"):
            self._count("draftmill_samples", getattr(totals.committed, status), status=status)
        for name, kinds in {"draftmill_errors": totals.errors, "draftmill_unit_failures": self._failures}.items():
            for kind, count in kinds.items():
                self._count(name, count, error_class=kind)
        self._count("draftmill_decoded_tokens", totals.effort.engine.committed)
        self._count("draftmill_worker_deaths", totals.deaths)
        self._count("draftmill_device_seconds", totals.devices.up_s)
        for seconds in self._commits_s:
            self._metrics["draftmill_commit_seconds"].observe(seconds, tags=self._base)
        self._commits_s.clear()
        self._set("draftmill_running", running)
        self._set("draftmill_samples_planned", totals.rows)
        self._set("draftmill_samples_done", totals.rows_done)
        self._set("draftmill_seconds_without_progress", totals.still_s if running else 0.0)
        for gone in self._slots.keys() - scheduler.state.workers.keys():
            del self._slots[gone]
        self._set("draftmill_slots", sum(slots for _, slots, _ in self._slots.values()))
        heard = (used for seen_s, _, used in self._slots.values() if self._clock() - seen_s < SILENT_S)
        self._set("draftmill_slots_used", sum(heard))
        for status, count in {"up": totals.workers if running else 0, "loading": len(totals.loading)}.items():
            self._set("draftmill_workers", count, status=status)
        for status, count in scheduler.state.states().items():
            self._set("draftmill_units", count, status=status)

    def _count(self, name: str, total: float, **labels: str) -> None:
        """Report how much a counter has grown."""
        series = name, "".join(labels.values())
        if total > self._counted[series]:
            self._metrics[name].inc(total - self._counted[series], tags=self._base | labels)
            self._counted[series] = total

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._metrics[name].set(value, tags=self._base | labels)
