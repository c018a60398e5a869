"""Decides which worker decodes which unit and handles failures: a state machine with one mutator, `on(event)`.

It knows no Ray, no clock, no disk and no model. Events go in, commands come out (jobs/schedule/events.py); the same events always
give the same commands. The driver (jobs/drive/driver.py) executes them.

The states of a unit:

* waiting   no worker holds it, and it may be leased now
* held      one worker holds a lease on it, or two if an idle worker took a copy at the end of the job
* resting   the store or a machine failed; the unit becomes waiting again after a pause
* bisection   it killed its workers or kept raising; probes look for the guilty rows (jobs/schedule/unit_leases.py)
* done      its file is committed; only the unit's number is kept

A unit that was once suspected stays `alone`: its worker holds nothing else, so that no other unit is blamed for its failures.

The states of a worker: starting (requested, not yet up), up, leaving (its machine will be removed: it finishes what it decodes,
gets nothing more, and another worker replaces it), and gone (forgotten). A worker holds at most four leases.
If `WorkerReported` does not renew a lease for `lease_s`, because its worker is silent or makes no progress, the worker is killed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from draftmill.actors import messages
from draftmill.jobs.schedule import events
from draftmill.jobs.schedule.unit_leases import (
    COPIES,
    MAX_ROUNDS,
    Bisection,
    FailureCause,
    Limits,
    Range,
    SchedulerState,
    Unit,
    UnitLease,
    Worker,
)
from draftmill.jobs.schedule.units import UnitSize, UnitSizes, WaitingUnits

DEFAULT = Limits()

LOOK_EVERY_S = 1.0
"""Seconds between two looks at all leases and workers, for those that hang, and for units that an idle worker may now take."""


class Scheduler:
    """Leases units, in the order of units.py, to `workers` workers, or more if there is room, until all are done."""

    def __init__(
        self, units: UnitSizes | Iterable[UnitSize], *, workers: int, limits: Limits = DEFAULT, pass_: int = 1
    ) -> None:
        assert workers > 0
        self.limits = limits
        self.wanted = workers  # fewer once starts have failed, so that a bad machine does not end the job
        self._failed_starts = self._deaths_in_a_row = 0
        self.state = SchedulerState(units, pass_, workers)
        self.now_s = 0.0
        self.draining = False
        self.finished: events.Finish | None = None
        self._look_at_s = 0.0
        self._out: list[events.Command] = []

    def on(self, event: events.Event) -> list[events.Command]:
        """Process an event; returns the commands to execute, in order."""
        if self.finished is not None:
            return []
        self._out = []
        # Most events by far change nothing; with many workers, assigning units is expensive.
        if isinstance(event, messages.WorkerReported) and not self.state.note_report(
            event, self.now_s, self.limits.lease_s
        ):
            return []
        if isinstance(event, events.Tick) and not self._tick(event.now_s):
            return []
        self._handle(event)
        if self.finished is None:
            self._settle()
        return self._out

    @property
    def remaining(self) -> int:
        """Number of units that are not done."""
        return len(self.state.sizes) - len(self.state.done)

    # ---- events

    def _handle(self, event: events.Event) -> None:
        match event:
            case messages.WorkerLoaded(name) if name in self.state.workers:
                self.state.workers[name].up = True
                self._failed_starts = 0
            case messages.WorkerLost(name, reason, idle, device):
                self._worker_died(name, reason, idle=idle, device=device)
            case messages.NodeLeaving(name, left_s) if name in self.state.workers:
                self._leaves(self.state.workers[name], left_s)
            case events.MoreRoom(workers):
                self.wanted = max(self.wanted, workers)
            case messages.Receipt(lease=number, unit=unit, committed=committed) if committed is not None:
                self._unit_done(number, unit)
            case messages.Receipt(lease=number) if number in self.state.leases:
                self._deaths_in_a_row = 0
                self._end_probe(self.state.release(number), None)
            case messages.Failure():
                self._unit_failed(event)
            case events.Drain():
                self.draining = True
                for worker in self.state.workers.values():
                    self._unburden(worker)

    def _tick(self, now_s: float) -> bool:
        """Let the time pass; returns whether units should be assigned. Looks for workers that hang once in LOOK_EVERY_S."""
        self.now_s = max(self.now_s, now_s)
        woke = self.state.wake(self.now_s)
        if self.now_s < self._look_at_s:
            return woke
        self._look_at_s = (self.now_s // LOOK_EVERY_S + 1) * LOOK_EVERY_S
        for name, reason in self.state.overdue(self.now_s, self.limits):
            self._out.append(events.KillWorker(name, reason))
            self._worker_died(name, reason)
        for name in sorted(worker.name for worker in self.state.workers.values() if worker.leave_by_s <= self.now_s):
            self._let_go(name)
        if self.limits.idle_s < math.inf and not self.draining:
            for name in self.state.idle_workers(self.now_s, self.limits.idle_s):
                if self.state.num_staying > self.remaining:
                    self._let_go(name)
        return True

    def _leaves(self, worker: Worker, left_s: float | None) -> None:
        """A worker finishes what it decodes, if its machine stays long enough; it ends shortly before the machine does."""
        worker.leaving = True
        if left_s is not None:
            worker.leave_by_s = self.now_s + left_s - min(5.0, left_s / 2)
        self._unburden(worker)

    def _let_go(self, name: str) -> None:
        """End a worker; units that it still holds are queued again, without suspicion."""
        known = self.state.dismiss(name)
        assert known is not None
        for lease in known[1]:
            self._give_back(lease)
        self._out.append(events.LetGo(name, lost=bool(known[1])))

    def _worker_died(self, name: str, reason: str, *, idle: bool = False, device: bool = False) -> None:
        known = self.state.dismiss(name)
        if known is None:
            return
        worker, leases = known
        if not worker.leaving:
            self._count_loss(worker, reason)
        cause = FailureCause("worker_died", "decode", f"a worker that decoded only this died: {reason}")
        for lease in leases:
            if worker.leaving or idle:  # the death was announced, or had another cause: no row is to blame
                self._give_back(lease)
            elif device and self._blames_machine(lease):
                self._rest(lease, cause.message)
            else:
                self._note_failure(lease, cause, death=True)

    def _blames_machine(self, lease: UnitLease) -> bool:
        """Whether a lost device is the machine's fault, not this unit's, to which it may have happened on several workers."""
        unit = self.state.touched[lease.unit]
        unit.lost_devices += 1
        return not unit.alone and lease.rows is None and unit.lost_devices <= self.limits.devices

    def _count_loss(self, worker: Worker, reason: str) -> None:
        """Give up after too many failed starts, or worker deaths without a success in between."""
        self._deaths_in_a_row += worker.up
        self._failed_starts += not worker.up
        if self._failed_starts >= self.limits.starts * self.wanted:
            self._failed_starts, self.wanted = 0, len(self.state.staying())
            if not self.wanted:
                self._finish("failed", f"workers can't start: {reason}")
        elif self._deaths_in_a_row >= max(self.limits.fruitless, 3 * self.wanted):
            self._finish("failed", f"workers keep dying: {reason}")

    def _unit_done(self, number: int, unit: int) -> None:
        """Enter a committed unit as done. After a late answer it may be done already, waiting, resting or in a bisection."""
        if unit in self.state.done or unit not in self.state.sizes:
            return
        self._deaths_in_a_row = 0
        for lease in self.state.finish(unit):
            if lease.number != number:
                self._out.append(events.Revoke(lease.worker, lease.number))

    def _unit_failed(self, event: messages.Failure) -> None:
        if event.lease not in self.state.leases:
            return
        lease = self.state.release(event.lease)
        if event.kind == "TASK":
            self._note_failure(lease, FailureCause(event.error_kind, event.stage, event.error), death=False)
        else:
            self._rest(lease, event.error, event.error_kind)

    def _unburden(self, worker: Worker) -> None:
        """Take back the leases that a worker has not begun, and its probes, which may never end."""
        for number in [n for n in worker.leases if not worker.runs(n) or self.state.leases[n].rows is not None]:
            self._out.append(events.Revoke(worker.name, number))
            self._give_back(self.state.release(number))

    # ---- what follows a failure

    def _note_failure(self, lease: UnitLease, cause: FailureCause, *, death: bool) -> None:
        unit = self.state.touched[lease.unit]
        if lease.rows is not None:
            return self._end_probe(lease, cause)
        unit.deaths += death
        unit.task_failures += not death
        if unit.leases:  # another worker still decodes a copy
            return None
        if (death and unit.alone) or unit.task_failures >= self.limits.attempts:
            return self._open_bisection(unit, cause)
        unit.alone = unit.alone or unit.deaths >= self.limits.deaths
        return self.state.enqueue(lease.unit)

    def _rest(self, lease: UnitLease, message: str, kind: str = "store") -> None:
        unit = self.state.touched[lease.unit]
        unit.infra_failures += 1
        full = kind == messages.STORE_FULL
        if kind == messages.CHANGED_INPUT:
            self._finish("unusable", message)
        elif unit.infra_failures >= (self.limits.full if full else self.limits.infra):
            reason = f"unit {lease.unit} failed {unit.infra_failures} times: {message}"
            self._finish("full" if full else "failed", reason)
        if unit.bisection is not None and lease.rows is not None:
            unit.bisection.requeue(lease.rows)
        elif unit.leases:  # another worker still decodes a copy
            return
        pause_s = min(self.limits.rest_s * 2.0 ** (unit.infra_failures - 1), self.limits.max_rest_s)
        unit.resting_until_s = self.now_s + pause_s
        self.state.resting.add(lease.unit)
        self.state.delicate.discard(lease.unit)

    def _open_bisection(self, unit: Unit, cause: FailureCause) -> None:
        number, everything = unit.size.unit, (0, unit.size.rows)
        unit.rounds += 1
        unit.alone = True
        if unit.rounds > MAX_ROUNDS + 1:
            self._finish("failed", f"unit {number} fails even without its rows: {cause.message}")
        elif unit.rounds > MAX_ROUNDS:
            self._condemn(unit, messages.QuarantinedRows(*everything, *cause))
        else:
            unit.bisection = Bisection()
            unit.bisection.suspect(everything, cause)
        self.state.enqueue(number)

    def _end_probe(self, lease: UnitLease, cause: FailureCause | None) -> None:
        """A probe has ended: its rows are cleared if `cause` is None."""
        unit = self.state.touched[lease.unit]
        assert unit.bisection is not None and lease.rows is not None
        unit.bisection.asked.remove(lease.rows)
        verdict = unit.bisection.suspect(lease.rows, cause) if cause else None
        if verdict is not None:
            self._condemn(unit, verdict)
        if unit.bisection.closed:
            unit.bisection = None
        if unit.resting_until_s is None:
            self.state.enqueue(lease.unit)

    def _condemn(self, unit: Unit, verdict: messages.QuarantinedRows) -> None:
        unit.verdicts += (verdict,)
        self._out.append(events.Quarantine(unit.size.unit, verdict))

    # ---- assignment

    def _settle(self) -> None:
        for worker in [w for w in self.state.workers.values() if w.leaving and not w.leases]:
            self._let_go(worker.name)
        if not self.remaining:
            self._finish("done")
        elif self.draining and not self.state.leases:
            self._finish("drained")
        elif not self.draining:
            while self.state.num_staying < min(self.wanted, self.remaining):
                self._out.append(events.StartWorker(self.state.hire(self.now_s).name))
            self._assign()

    def _assign(self) -> None:
        """Assign delicate units first, to workers that hold nothing else; then the waiting units; then copies."""
        hands = deque(self.state.hands(busy=bool(self.state.delicate)))
        for number in sorted(self.state.delicate):
            while hands and number in self.state.delicate:
                worker = hands.popleft()  # reserved for this unit, even while the worker still holds others
                if not worker.leases:
                    bisection = self.state.touched[number].bisection
                    rows = bisection.ask() if bisection else None
                    if bisection is None or not bisection.waiting:
                        self.state.delicate.discard(number)
                    self._lease(worker, number, rows)
        idle = self._deal(hands)
        if idle and not self.state.waiting and not self.state.delicate:
            self._copy(idle)

    def _deal(self, hands: deque[Worker]) -> list[Worker]:
        """Assign the waiting units, to workers with the fewest leases first; returns the workers that have none afterwards."""
        idle: list[Worker] = []
        # Before the end, speeds, which take time to look at, don't matter: the next unit fits into every worker's share.
        staying, waiting = self.state.staying(), self.state.waiting
        is_near_end = bool(waiting) and waiting.tokens < 16 * waiting.next_tokens() * len(staying)
        view = outlook(self.state, staying, self.now_s) if hands and is_near_end else None
        while hands:
            worker = hands.popleft()
            number: int | None = None
            if worker.has_room:  # the next unit, or near the end one that fits the worker's speed (see below)
                number = waiting.take() if view is None else fitting_unit(waiting, view, worker.name)
            if number is not None:
                if view is not None:
                    view.give(worker.name, self.state.sizes[number].tokens)
                self._lease(worker, number, None)
                hands.append(worker)
            elif not worker.leases:
                idle.append(worker)
        return idle

    def _copy(self, idle: list[Worker]) -> None:
        """Assign copies of other workers' units to idle workers.

        Where speeds are known, of the units that will be done last, where an idle worker would finish them sooner; fast ones
        first. Where the fastest idle worker would not finish a unit sooner, no other one would.
        """
        view, leases = outlook(self.state, self.state.workers.values(), self.now_s), self.state.slow()
        holders = {lease.number: self.state.workers[lease.worker] for lease in leases}
        stays = {number: not (holder.leaving or is_silent(holder, self.now_s)) for number, holder in holders.items()}
        ends: dict[int, float] = {}
        if view is not None:
            ends = {
                number: end_s for worker in self.state.workers.values() for number, end_s in self._ends(view, worker)
            }
            idle = sorted(idle, key=lambda worker: (-view.speeds[worker.name], worker.name))
            leases.sort(key=lambda lease: (stays[lease.number], -ends[lease.number], -lease.number))
        for lease in leases:
            unit, number = self.state.touched[lease.unit], lease.number
            if not idle or len(unit.leases) >= COPIES:
                continue
            if view is None or not stays[number] or view.finish_s(idle[0].name, unit.size.tokens) < ends[number]:
                self._lease(idle.pop(0), lease.unit, None)

    def _ends(self, view: WorkLeft, worker: Worker) -> Iterator[tuple[int, float]]:
        """When a worker will have finished each of its leases, if it decodes them in their order."""
        behind = 0
        for number in reversed(worker.leases):
            yield number, view.finish_s(worker.name, -behind)
            behind += self.state.touched[self.state.leases[number].unit].size.tokens

    def _lease(self, worker: Worker, number: int, rows: Range | None) -> None:
        self._out.append(
            events.Assign(
                worker.name, self.state.lease(worker, number, rows, self.now_s + self.limits.lease_s, self.now_s)
            )
        )

    def _give_back(self, lease: UnitLease) -> None:
        """Queue the work of a lease that was released before it was done."""
        unit = self.state.touched[lease.unit]
        if unit.bisection is not None and lease.rows is not None:
            unit.bisection.requeue(lease.rows)
        if unit.resting_until_s is None and (unit.bisection is not None or not unit.leases):
            self.state.enqueue(lease.unit)

    def _finish(self, how: Literal["done", "drained", "full", "failed", "unusable"], message: str = "") -> None:
        if self.finished is None:
            self.finished = events.Finish(how, message)
            self._out.append(self.finished)


# ---- who takes which of the last units
#
# A worker's *share* is its part of all remaining tokens, in proportion to its measured speed. It takes the longest unit that fits
# into most of its share next to what it still has to do: fast workers take the long units, slow ones the short ones, and all end
# at about the same time. If none fits, it takes the shortest one, unless another worker would finish that one sooner. Only ratios
# of speeds matter.
#
# Uniform machines: Graham's longest-processing-time rule by finishing times (Gonzalez, Ibarra, Sahni 1977).

EARLY_PART: Final = 0.8
LATE_PART: Final = 0.9
"""The part of its share that a worker fills with long units, while all remaining tokens wait, and when no token waits any more.

Shares shrink when workers join or a unit comes back, less so near the end; a worker that has taken too long a unit ends last.
"""

SLOWEST: Final = 10
"""A worker of unknown speed gets long units as the fastest of the slowest 1/SLOWEST of the workers does."""

SILENT_S: Final = 20.0
"""Seconds without a token after which a worker's units are copied first, if workers are idle; it is killed much later."""


@dataclass(slots=True)
class WorkLeft:
    """What is known while units are given away: all remaining tokens, those that wait, and each worker's load and speed.

    `guesses` are the speeds for which workers of unknown speed get long units; `barred` workers can't be the first.
    """

    waiting: float
    loads: dict[str, float]
    speeds: dict[str, float]
    guesses: Mapping[str, float] = field(default_factory=dict)
    barred: Collection[str] = ()
    remaining: float = field(init=False)
    speed: float = field(init=False)
    _first: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remaining, self.speed = self.waiting + sum(self.loads.values()), sum(self.speeds.values())

    def give(self, name: str, tokens: int) -> None:
        """A waiting unit of so many tokens goes to a worker."""
        self.waiting -= tokens
        self.loads[name] += tokens
        self._first.clear()

    def fitting(self, name: str) -> float:
        """The tokens of the longest unit that fits into most of the worker's share next to what it still has to decode."""
        part = LATE_PART - (LATE_PART - EARLY_PART) * self.waiting / self.remaining if self.remaining > 0 else LATE_PART
        return part * self.remaining * self.guesses.get(name, self.speeds[name]) / self.speed - self.loads[name]

    def is_first(self, name: str, tokens: int) -> bool:
        """Whether no other worker that may take units would finish one of so many tokens sooner."""
        if tokens not in self._first:
            free = (other for other in self.loads if other not in self.barred)
            self._first[tokens] = min((self.finish_s(other, tokens) for other in free), default=0.0)
        return self.finish_s(name, tokens) <= self._first[tokens]

    def finish_s(self, name: str, tokens: float) -> float:
        """When a worker would finish a unit that it gets now; in units of tokens per speed."""
        return (self.loads[name] + tokens) / self.speeds[name]


def fitting_unit(waiting: WaitingUnits, view: WorkLeft, name: str) -> int | None:
    """Remove and return the unit that a worker should take; None if other workers should take those that wait.

    It is the next one of all as long as that fits. Else it is one of the last windows, or the next one if they are empty.
    """
    fits = view.fitting(name)
    if not waiting.is_last and waiting.next_tokens() <= fits:
        return waiting.take()
    number = waiting.take_fitting(fits)
    if number is not None:
        return number
    shortest = waiting.shortest()
    if shortest is not None:
        return waiting.take_fitting(shortest) if view.is_first(name, shortest) else None
    return waiting.take() if view.is_first(name, waiting.next_tokens()) else None


def outlook(state: SchedulerState, workers: Iterable[Worker], now_s: float) -> WorkLeft | None:
    """The outlook for these workers; None as long as no speed is known.

    A worker without a known speed counts as an average one, but gets long units only as one of the slowest would. The first to
    finish a waiting unit is not a worker whose unit runs alone, or that has generated nothing for SILENT_S.
    """
    workers = list(workers)
    speeds = {worker.name: worker.speed for worker in workers}
    known = sorted(speed for speed in speeds.values() if speed > 0)
    if not known:
        return None
    usual, low = sum(known) / len(known), known[len(known) // SLOWEST]
    return WorkLeft(
        state.waiting.tokens,
        {worker.name: state.tokens_left(worker) for worker in workers},
        {name: speed or usual for name, speed in speeds.items()},
        guesses={name: low for name, speed in speeds.items() if not speed},
        barred={worker.name for worker in workers if is_silent(worker, now_s) or state.holds_alone(worker)},
    )


def is_silent(worker: Worker, now_s: float) -> bool:
    """Whether a worker holds units and has generated nothing for SILENT_S: it may hang."""
    return bool(worker.leases) and now_s - worker.moved_s > SILENT_S
