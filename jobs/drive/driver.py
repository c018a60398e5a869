"""The driver's loop: turns the pool's reports into scheduler events and executes the scheduler's commands. Decides nothing.

A signal only sets a flag, and the loop checks the flag every 0.2 s: an exception raised in a signal handler does not
interrupt Ray.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from draftmill.actors import messages
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.exit_codes import INTERRUPTED, TOO_MANY_FAILED, Ended
from draftmill.jobs.schedule import events
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.storage.errors import StoreError, StoreFull, UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts

if TYPE_CHECKING:
    from draftmill.actors.loop.worker import LocalPool
    from draftmill.actors.ray.pool import RayPool

_log = logging.getLogger(__name__)

WorkerPool: TypeAlias = "LocalPool | RayPool"

POLL_S = 0.2

CLOSING_S = 5.0
"""Seconds of the grace period reserved for ending the workers, writing the log and shutting down Ray."""

TOO_MANY = "more samples failed than `errors` allows"


@dataclass(slots=True)
class StopFlag:
    """Set by a signal or by the lease keeper; `reason` says which. Set twice, it is urgent: there is no grace period."""

    reason: str | None = None
    urgent: bool = False
    _warned: bool = False

    def set(self, reason: str) -> None:
        """Ask the driver to stop; keeps the first reason."""
        self.urgent = self.reason is not None and not self._warned
        self._warned = False
        self.reason = self.reason or reason

    def warn(self, reason: str) -> None:
        """Ask the driver to stop ahead of an expected signal; that signal then counts as the first, so it is not urgent."""
        self._warned = self._warned or self.reason is None
        self.reason = self.reason or reason

    @property
    def by_signal(self) -> bool:
        return self.reason in signal.Signals.__members__

    def on_signals(self) -> AbstractContextManager[None]:
        """During the block, SIGINT and SIGTERM set the flag. Enter it after ray.init, which installs its own SIGTERM handler.

        In any other thread than the main one, which alone receives signals, nothing sets it.
        """
        if threading.current_thread() is not threading.main_thread():
            return nullcontext()
        return _handling(lambda number, frame: self.set(signal.Signals(number).name), *SIGNALS)


def interruptible() -> AbstractContextManager[None]:
    """During the block, SIGTERM raises KeyboardInterrupt, as SIGINT does: resources are released; no unit is finished.

    For use before and after the driver's loop; the loop itself uses StopFlag.
    """
    return _handling(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object], *signals: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


SIGNALS = (signal.SIGINT, signal.SIGTERM)

HEARD_S = 1.0
"""Seconds after a second signal in which the process may still end in order."""


@contextmanager
def forced_end(grace_s: float) -> Iterator[None]:
    """During the block, a thread ends the process where signals can't: in a long forward, or while a store does not answer.

    It does so HEARD_S after a second SIGINT or SIGTERM, and when the grace period is over. No result is lost: commits are atomic.
    For a program's main thread alone.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    most_s = max(grace_s, CLOSING_S) + HEARD_S
    threading.Thread(target=_end_by_force, args=(ours, most_s), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        theirs.close()


def _end_by_force(signals: socket.socket, most_s: float) -> None:
    """End the process with exit code 4 once `signals`, the numbers of those that came, ask for it."""
    end_s, told_s, name = float("inf"), float("inf"), ""
    while (now_s := time.monotonic()) < end_s:
        if now_s >= told_s:
            told_s = float("inf")
            line = f"{name}: ends within {end_s - now_s:.0f} s; a second signal ends it at once. No committed result is lost"
            _log.warning(line)
        until_s = min(end_s, told_s)
        signals.settimeout(until_s - now_s if until_s < float("inf") else None)
        try:
            number = signals.recv(1)
        except TimeoutError:
            continue
        if not number:
            return
        if number[0] in SIGNALS:
            now_s = time.monotonic()
            told_s = now_s + HEARD_S if not name else told_s
            end_s = now_s + most_s if not name else min(end_s, now_s + HEARD_S)
            name = signal.Signals(number[0]).name
    _log.error(f"ended by force after {name}; run it again to resume")
    os._exit(INTERRUPTED)


def raise_unfinished(finish: events.Finish, stop: StopFlag, progress: Callable[[], str]) -> None:
    """Raise the error that says how unfinished work ended: Ended, UserError or StoreError; `progress` says how far it is."""
    match finish.how:
        case "full":
            raise StoreFull(f"{finish.message}; make room, then run it again to continue")
        case "unusable":
            raise UserError(finish.message)
        case "failed":
            raise StoreError(f"{finish.message}; run it again to resume")
        case "hopeless":
            raise Ended(f"stopped with {progress()}: {finish.message}; raise it to continue", TOO_MANY_FAILED)
        case "drained":
            raise Ended(f"interrupted with {progress()}; run it again to resume", INTERRUPTED, by_signal=stop.by_signal)


class Watcher:
    """Looks on in a run, and decides nothing. Each method must return at once; by default it does nothing."""

    name = "watcher"

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        """Called after each poll of the workers, some times a second."""

    def reported(self, worker: str, report: messages.TurnReport) -> None:
        """A worker reports a turn."""

    def over(self, totals: Totals, scheduler: Scheduler) -> None:
        """The driver's loop has ended."""


@dataclass(slots=True)
class Driver:
    """Runs a scheduler against a pool until the scheduler finishes. `committed` collects the facts of this session's units.

    `hopeless` tells whether this many failed samples make the job pointless; the driver then drains. `room` returns how many
    workers fit now, including those that exist. `look` gets each committed unit and its worker; what it raises ends the run.
    `need` is called now and then with the number of units that are left. A watcher that raises is not called again.
    """

    scheduler: Scheduler
    pool: WorkerPool
    display: Display
    totals: Totals
    stop: StopFlag
    grace_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    look: Callable[[str, CommittedUnit], None] = lambda worker, committed: None
    hopeless: Callable[[int], bool] = lambda failed: False
    room: Callable[[], int] = lambda: 0
    need: Callable[[int], None] = lambda units: None
    watchers: list[Watcher] = field(default_factory=list)
    committed: UnitFacts = field(default_factory=UnitFacts)
    _looked_s: float | None = None
    _watched_s: float = 0.0
    _deadline_s: float | None = None
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _room: int | None = None
    _room_at_s: float = 0.0
    _held_at_s: float = 0.0
    _moved: tuple[int, ...] = ()
    _moved_s: float = 0.0

    def run(self) -> events.Finish:
        """Run until the scheduler finishes, or until the grace period after a stop request is over."""
        while True:
            self._tell(events.Tick(self._advance_clock()))
            self._look_for_room()
            if self.stop.reason is not None and self._deadline_s is None:
                self._drain(self.stop.reason)
            for event in self.pool.poll(POLL_S) if self.scheduler.finished is None else ():
                self._take(event)
            self._note_progress()
            self.display.show(self.totals)
            self.watch(lambda watcher: watcher.look(self.totals, self.scheduler))
            finish = self.scheduler.finished
            if (
                finish is None
                and self._deadline_s is not None
                and (self.stop.urgent or self.clock() > self._deadline_s)
            ):
                finish = events.Finish("drained", "the grace period is over")
            if finish is not None:
                is_hopeless = finish.how == "drained" and self.stop.reason == TOO_MANY
                return events.Finish("hopeless", TOO_MANY) if is_hopeless else finish

    def watch(self, call: Callable[[Watcher], None]) -> None:
        for watcher in list(self.watchers):
            try:
                call(watcher)
            except Exception as error:  # noqa: BLE001 - a run does not depend on its watchers
                self.watchers.remove(watcher)
                self.display.note(f"{watcher.name} end here, the run continues: {type(error).__name__}: {error}")

    def _advance_clock(self) -> float:
        """Seconds in which workers could report. Excludes time in which the driver itself was suspended: their silence in
        that time is not their fault.
        """
        now_s = self.clock()
        self._watched_s += min(10.0, max(0.0, now_s - (self._looked_s or now_s)))
        self._looked_s = now_s
        return self._watched_s

    def _note_progress(self) -> None:
        """Note since when nothing has moved and, once a second, how many units are held: with many workers, that takes long."""
        if self._watched_s >= self._held_at_s or self.scheduler.finished is not None:
            self._held_at_s = self._watched_s + 1.0
            self.totals.units_held = len({lease.unit for lease in self.scheduler.state.leases.values()})
        moved = self.totals.effort.engine.committed, self.totals.decoded.rows, self.totals.units_done
        if moved != self._moved:
            self._moved, self._moved_s = moved, self._watched_s
        self.totals.still_s = self._watched_s - self._moved_s

    def _look_for_room(self) -> None:
        """Report room only when it has grown: do not ask again for workers given up because of a bad machine."""
        if self._watched_s < self._room_at_s:
            return
        self._room_at_s = self._watched_s + 5.0
        self.need(0 if self.scheduler.draining else self.scheduler.remaining)
        before, self._room = self._room, self.room()
        if before is not None and self._room > before:
            self._tell(events.MoreRoom(self._room))

    def _drain(self, reason: str) -> None:
        run_on_s = max(0.0, self.grace_s - CLOSING_S)
        self._deadline_s = self.clock() + run_on_s
        self.display.note(f"{reason}: finishing the running units, for at most {run_on_s:.0f} s")
        self._tell(events.Drain())

    # ---- events in

    def _take(self, event: messages.PoolEvent) -> None:
        match event:
            case messages.WorkerLoaded(worker, node, pid, facts):
                self.totals.worker_up(worker, facts)
                self.display.event("worker_up", worker=worker, node=node, pid=pid, **facts)
                self._tell(event)
            case messages.WorkerLost(worker, reason):
                known, counts = self.scheduler.state.workers.get(worker), self.scheduler.finished is None
                self.totals.worker_ended(worker, died=counts, lost=known is not None and bool(known.leases))
                if counts:
                    message = f"worker {worker} died: {reason}"
                    self.display.event("worker_died", message, level=logging.WARNING, worker=worker, reason=reason)
                self._tell(event)
            case messages.NodeLeaving(worker, left_s):
                within = "" if left_s is None else f" within {left_s:.0f} s"
                message = f"worker {worker} is on a node that is being drained{within}"
                self.display.event("worker_leaving", message, worker=worker, left_s=left_s)
                self._tell(event)
            case messages.HomeLeaving(left_s):
                self.grace_s = self.grace_s if left_s is None else min(self.grace_s, left_s)
                self.stop.warn("this node is being drained")
            case messages.WorkerReported(worker, report):
                self.totals.add_report(worker, report)
                self.watch(lambda watcher: watcher.reported(worker, report))
                for item in report.answers:
                    self._answer(item)
                self._tell(event)

    def _answer(self, item: messages.Receipt | messages.Failure) -> None:
        if isinstance(item, messages.Failure):
            message, kind = None, (item.error_kind, item.stage)
            # Of each kind only the first since a unit was committed has a message; a TASK failure when its rows are quarantined.
            if item.kind != "TASK" and kind not in self._reported:
                self._reported.add(kind)
                what = "stored" if item.stage == "store" else "read"
                message = f"unit {item.unit} can't be {what}: {item.error}; it is retried"
            facts = {"kind": item.kind, "stage": item.stage, "error": item.error}
            self.display.event("failed", message, level=logging.WARNING, unit=item.unit, worker=item.worker, **facts)
            self._tell(item)
        else:
            if item.committed is not None:
                failpoint("driver.receipt")
                if item.unit not in self.committed.listed:
                    self._note_commit(item, item.committed)
            self._tell(item)

    def _note_commit(self, receipt: messages.Receipt, committed: CommittedUnit) -> None:
        self.look(receipt.worker, committed)
        self.committed.add(committed)
        self._reported.clear()
        self.totals.add_receipt(receipt)
        if self.hopeless(self.totals.committed.failed) and self.stop.reason is None:
            self.stop.set(TOO_MANY)
        facts = asdict(committed) | {"sums": json.loads(committed.sums or "null")}
        names: dict[str, Any] = {"unit": receipt.unit, "worker": receipt.worker, "rows": committed.rows}
        self.display.event("done", **names, failed=committed.failed, facts=facts)

    # ---- commands out

    def _tell(self, event: events.Event) -> None:
        for command in self.scheduler.on(event):
            self._obey(command)

    def _obey(self, command: events.Command) -> None:
        match command:
            case events.StartWorker(worker):
                self.totals.loading.add(worker)
                self.pool.start(worker)
            case events.KillWorker(worker, reason):
                self.pool.kill(worker)
                self.totals.worker_ended(worker, died=True, lost=True)
                message = f"worker {worker} killed: {reason}"
                self.display.event("worker_killed", message, level=logging.WARNING, worker=worker, reason=reason)
            case events.LetGo(worker, lost):
                self.pool.kill(worker)
                self.totals.worker_ended(worker, lost=lost)
                self.display.event("worker_left", worker=worker)
            case events.Assign(worker, unit):
                self.pool.assign(worker, unit)
            case events.Revoke(worker, lease):
                self.pool.revoke(worker, lease)
            case events.Quarantine(unit, rows):
                message = f"unit {unit}: rows {rows.start} to {rows.stop - 1} are quarantined ({rows.kind})"
                facts = {"start": rows.start, "stop": rows.stop, "kind": rows.kind, "error": rows.message}
                self.display.event("quarantined", message, level=logging.WARNING, unit=unit, **facts)
            case events.Finish():
                pass
