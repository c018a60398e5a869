"""Totals: sums of what a run has done so far and of its device time, and the figures computed from them, as data and as text.

A worker's device is held from the start of loading to the worker's end. The worker measures how long it loaded and decoded, and
how much of that each unit took; the driver measures the rest. A start that never came up is not counted: waiting for a machine
and loading can't be told apart there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftmill.actors.messages import Effort, Receipt, Tally, TurnReport
from draftmill.jobs.formatting import counted, device_text, duration, rate_text
from draftmill.storage.runs.commit import all_exact

HOUR_S = 3600.0

PURPOSES = ("decoding", "loading", "idle", "wasted")
"""What worker seconds go to; in a session that still runs, also to units in progress."""


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """Sums of worker seconds, of one session or of several.

    `up_s` is all of it, including `loading_s`. In `busy_s` workers held units; `counted_s` of these went to units that they
    committed. `lost_s` lies between the last report of workers that died with units and their deaths. `unended` counts sessions
    without a final record: but for one that still runs, their drivers were lost, with the last seconds of their workers.
    """

    up_s: float = 0.0
    loading_s: float = 0.0
    busy_s: float = 0.0
    counted_s: float = 0.0
    lost_s: float = 0.0
    unended: float = 0.0

    def __add__(self, other: DeviceSums) -> DeviceSums:
        return DeviceSums(*(getattr(self, name) + getattr(other, name) for name in DeviceSums.__slots__))

    @property
    def idle_s(self) -> float:
        """Seconds in which workers were up and held no unit."""
        return max(0.0, self.up_s - self.loading_s - self.busy_s - self.lost_s)

    @property
    def open_s(self) -> float:
        """Busy seconds that went to no committed unit: in progress while the session runs, wasted afterwards."""
        return max(0.0, self.busy_s - self.counted_s)


@dataclass(slots=True)
class Totals:
    """Counts of one driver's session, in addition to what was committed before it. Times in seconds of `clock`.

    `loading` are the workers that are not up yet; `lives` has, for each that is up, when it began to load and when it last
    reported. `started_on` counts the workers that came up, by what they compute with. `decoded` counts samples as they end (a
    sample that is decoded twice counts twice); `committed` counts only this session's receipts, `errors` their failed samples by
    class; `waiting` has, for each worker, the ended samples of units that are not committed yet. In the last `still_s` no token
    was committed, and no sample or unit ended. `exact` says whether the receipts' results are bit-identical in any batch; None
    before the first receipt. `counts_open` is False where holes find their lengths: the tokens of all lengths that a sample
    tries would count. `planned_failures` are this session's samples that the plan has as failed.
    """

    units: int
    rows: int
    units_before: int = 0
    rows_before: int = 0
    clock: Callable[[], float] = time.monotonic
    started_s: float | None = None
    ended_s: float | None = None
    loading: set[str] = field(default_factory=set)
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    most_workers: int = 0
    units_held: int = 0
    units_done: int = 0
    decoded: Tally = field(default_factory=Tally)
    committed: Tally = field(default_factory=Tally)
    errors: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, int] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    deaths: int = 0
    still_s: float = 0.0
    exact: bool | None = None
    counts_open: bool = True
    planned_failures: int = 0
    started_on: Counter[str] = field(default_factory=Counter)
    _ended: DeviceSums = field(default_factory=DeviceSums)

    def worker_up(self, worker: str, facts: Mapping[str, Any]) -> None:
        """A worker takes units now, with these facts (actors/loop/device_facts.py). The first one starts the clock."""
        now_s, load_s = self.clock(), float(facts.get("load_s", 0.0))
        if device := facts.get("device"):
            self.started_on[device_text(device)] += 1
        self.started_s = now_s if self.started_s is None else self.started_s
        self.loading.discard(worker)
        self.lives[worker] = now_s - load_s, now_s
        self._ended += DeviceSums(loading_s=load_s)
        self.most_workers = max(self.most_workers, self.workers)

    def worker_ended(self, worker: str, *, died: bool = False, lost: bool = False) -> None:
        """A worker has ended; `lost` if it held units, so that what it did since its last report is lost."""
        self.deaths += died
        self.loading.discard(worker)
        self.waiting.pop(worker, None)
        if worker in self.lives:
            now_s, (began_s, heard_s) = self.clock(), self.lives.pop(worker)
            self._ended += DeviceSums(up_s=now_s - began_s, lost_s=now_s - heard_s if lost else 0.0)

    def add_report(self, worker: str, report: TurnReport) -> None:
        self.decoded += report.decoded
        self.effort += report.effort
        self.waiting[worker] = report.waiting
        if worker in self.lives:
            self.lives[worker] = self.lives[worker][0], self.clock()
        self._ended += DeviceSums(busy_s=report.effort.wall_s)

    def add_receipt(self, receipt: Receipt) -> None:
        """Add a committed unit; call once per unit."""
        self.units_done += 1
        self.committed += receipt.tally
        self.errors.update(receipt.error_kinds)
        self._ended += DeviceSums(counted_s=receipt.spent_s)
        if receipt.committed is not None:
            exact = receipt.committed.exact
            self.exact = exact if self.units_done == 1 else all_exact((self.exact, exact))

    def stop(self) -> None:
        """The session is over: the clock stops, and all workers have ended."""
        self.ended_s = self.clock()
        for worker in list(self.lives):
            self.worker_ended(worker)

    @property
    def workers(self) -> int:
        return len(self.lives)

    @property
    def devices(self) -> DeviceSums:
        """The device time up to now."""
        return self._ended + DeviceSums(up_s=sum(self.clock() - began_s for began_s, _ in self.lives.values()))

    @property
    def wall_s(self) -> float:
        """Seconds since the first worker came up."""
        if self.started_s is None:
            return 0.0
        return (self.clock() if self.ended_s is None else self.ended_s) - self.started_s

    @property
    def worker_s(self) -> float:
        """Available worker seconds: wall time times the largest number of workers."""
        return self.wall_s * self.most_workers

    @property
    def rows_done(self) -> int:
        """Samples that ended before and in this session, capped at the total; not those of units that failed and wait for
        another attempt.
        """
        ended = self.committed.rows + sum(self.waiting.values())
        return min(self.rows, self.rows_before + ended)

    @property
    def tokens(self) -> int:
        """Tokens generated in this session, those of unfinished samples too if `counts_open`."""
        ended = max(self.decoded.new_tokens, self.committed.new_tokens)
        return max(ended, self.effort.engine.committed) if self.counts_open else ended

    @property
    def tokens_per_s(self) -> float:
        return ratio(self.tokens, self.wall_s)

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds at the rate so far; None before there is a rate."""
        ended = self.rows_done - self.rows_before
        return time_left_s(self.rows - self.rows_done, ended, self.wall_s, self.failed, self.planned_failures)

    @property
    def failed(self) -> int:
        """Samples that failed in this session."""
        return max(self.decoded.failed, self.committed.failed)


def exactness(exact: bool | None) -> str:
    """Whether a run's results depend on its batches, in words."""
    if exact is None:
        return "unknown"
    if exact:
        return "true: results are bit-identical in any batch"
    return (
        "false: on GPUs without model.exact, and on CPUs in half or double precision, the batch changes last bits, which can "
        "decide near ties"
    )


def time_left_s(left: int, ended: int, wall_s: float, failed: int, planned_failures: int) -> float | None:
    """Seconds to decode what is left at the rate of what ended; of both, those that failed in the plan take no time."""
    known = min(failed, planned_failures)
    left, decoded = max(0, left - (planned_failures - known)), ended - known
    return left * wall_s / decoded if decoded > 0 else None


def ratio(above: float, below: float) -> float:
    """above / below; 0 if `below` is 0."""
    return above / below if below else 0.0


def efficiency(effort: Effort) -> dict[str, float]:
    """How close a job came to the limit (docs: engine), as shares, without figures that were not counted."""
    engine = effort.engine
    pairs = {
        "token_padding_eff": (engine.useful_rows, engine.computed_rows),
        "lane_eff": (engine.active_slot_steps, engine.slot_steps),
        "engine_eff": (engine.forward_s, effort.wall_s),
        "tail_frac": (effort.tail_s, effort.wall_s),
        "prompts_shared": (engine.prompt_rows_shared, engine.prompt_rows),
    }
    return {name: above / below for name, (above, below) in pairs.items() if below}


def progress_line(totals: Totals) -> str:
    """Samples, tokens per second, NFE per token, errors, workers and the remaining time, in one line."""
    decoded, loading = totals.decoded, 0 if totals.workers else len(totals.loading)
    loads = f"{counted(loading, 'worker')} {'loads' if loading == 1 else 'load'} the model"
    parts = [
        f"{totals.rows_done:,}/{totals.rows:,} samples ({ratio(totals.rows_done, totals.rows):.0%})",
        f"{rate_text(totals.tokens_per_s)} tokens/s",
        f"{ratio(decoded.nfe, decoded.new_tokens):.3f} NFE/token" if decoded.new_tokens else "- NFE/token",
        counted(totals.failed, "error"),
        loads if loading else counted(totals.workers, "worker"),
        f"ETA {duration(totals.eta_s)}" if totals.eta_s is not None else "ETA -",
    ]
    return "  ".join(parts)


def progress_facts(totals: Totals) -> dict[str, Any]:
    """The figures of the progress display, as data."""
    decoded = totals.decoded
    return {
        "samples_done": totals.rows_done,
        "samples": totals.rows,
        "tokens": totals.tokens,
        "tokens_per_s": round(totals.tokens_per_s, 3),
        "nfe_per_token": round(ratio(decoded.nfe, decoded.new_tokens), 4) if decoded.new_tokens else None,
        "errors": totals.failed,
        "workers": totals.workers,
        "loading": len(totals.loading),
        "eta_s": None if totals.eta_s is None else round(totals.eta_s, 1),
    }


# ---- device time in words


def device_time_rows(sums: DeviceSums, *, open_s: float = 0.0) -> list[tuple[str, str]]:
    """The label and the text of this device time, as a row of a table, by purpose; no row if there is none.

    `open_s` are seconds of a session that still runs, on units that it has not committed yet.
    """
    seconds = purposes_of(sums, open_s) | ({"in progress": open_s} if open_s else {})
    purposes = ", ".join(f"{hours_text(amount_s)} {purpose}" for purpose, amount_s in seconds.items())
    least = "at least " if sums.unended else ""
    return [("device time", f"{least}{hours_text(sums.up_s)}  ({purposes})")] if sums.up_s else []


def purposes_of(sums: DeviceSums, open_s: float = 0.0) -> dict[str, float]:
    """Seconds for each of PURPOSES; together they are all of `up_s`, but for the `open_s` that are in progress."""
    wasted_s = max(0.0, sums.busy_s - sums.counted_s - open_s) + sums.lost_s
    return dict(zip(PURPOSES, (sums.counted_s, sums.loading_s, sums.idle_s, wasted_s), strict=True))


def hours_text(seconds: float) -> str:
    """Device time in hours, below an hour in seconds, with three significant digits."""
    if seconds < HOUR_S:
        return f"{seconds:.2f} s" if 0 < seconds < 0.1 else f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds / HOUR_S)} h"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
