"""How a run ends: what is printed of it, its exit code, and what its log, `--log json` and the receivers of `notify` get."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.driver import Watcher
from draftmill.jobs.drive.log import FACTS, is_command, now_text, print_result
from draftmill.jobs.drive.notify import TIMEOUT_S, check_receivers, send
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import RunLog, read_sessions
from draftmill.jobs.drive.totals import HOUR_S, Totals, purposes_of
from draftmill.jobs.exit_codes import INTERRUPTED, OK, TOO_MANY_FAILED, Ended, code_of, failed_text, too_many_failed
from draftmill.jobs.plan.plan import NothingLeft, load_plan
from draftmill.jobs.results.passes import Pass, count_failed, finished_passes, passes_of
from draftmill.jobs.results.summary import error_rows, metric_lines, read_summary, table_lines
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.storage.errors import AnotherDriver, StoreError, UserError
from draftmill.storage.runs.commit import SUCCESS, done_units, read_manifest
from draftmill.storage.runs.records import Sums
from draftmill.storage.secrets import presentable
from draftmill.storage.stores.store import Store

_log = logging.getLogger(__name__)

STALL_S = 1800.0

INTERRUPTED_S = 3.0
"""Most seconds that notices of an interruption may take: the machine may be about to go."""

MESSAGES = {
    OK: "finished",
    INTERRUPTED: "interrupted; run it again to resume",
}


@dataclass(slots=True)
class RunOutcome(Watcher):
    """Reports how a run ends, to its log and the receivers of `notify`: the block in it finishes the run, or raises.

    As a watcher of the run it notifies them when it makes no progress for STALL_S; once, until it makes progress again. They are
    not notified of a run that wrote nothing, unless it failed, nor of one that another driver has. Raises UserError before the
    block if a receiver of notices can't be used.
    """

    name = "stall notices"

    spec: JobSpec
    store: Store
    log: RunLog = field(default_factory=RunLog)
    _is_stalled: bool = False

    def __enter__(self) -> Self:
        check_receivers(self.spec.notify)
        FACTS["run"] = self.spec.name
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case AnotherDriver():
                self.log.add("ended", str(error), level=logging.WARNING)
                self.log.write_out()
                return
            case None | NothingLeft():
                code, message = OK, MESSAGES[OK]
            case KeyboardInterrupt():
                code, message = INTERRUPTED, MESSAGES[INTERRUPTED]
            case Ended():
                code, message = error.code, MESSAGES.get(error.code) or str(error).splitlines()[0].partition("; see")[0]
            case Exception():
                code, message = code_of(error), str(error)
            case _:
                return
        by_error = isinstance(error, Exception) and not isinstance(error, Ended | NothingLeft)
        try:
            self._report(code, message, by_error=by_error)
        except Exception as failure:  # noqa: BLE001 - reporting an end must not change it
            self.warn(f"the end of the run was not reported to all: {type(failure).__name__}: {failure}")

    def warn(self, message: str) -> None:
        """Note on stderr and in the log that a notice was not taken."""
        self.log.add("note", message, level=logging.WARNING)
        _log.warning(presentable(message))

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        was_stalled, self._is_stalled = self._is_stalled, totals.still_s >= STALL_S
        if self._is_stalled and not was_stalled:
            message = f"no progress for {totals.still_s:.0f} s, {totals.rows_done:,} of {totals.rows:,} samples done"
            notice = self._head(message, None) | {
                "samples": {"planned": totals.rows, "done": totals.rows_done},
                "units": {"planned": totals.units, "done": totals.units_before + totals.units_done},
                "workers": totals.workers,
                "tokens": totals.tokens,
                "seconds_without_progress": round(totals.still_s, 1),
                "session_device_hours": round(totals.devices.up_s / HOUR_S, 6),
            }
            arguments = (self.spec.notify, "stall", notice, self.warn)
            threading.Thread(target=send, args=arguments, name="notify", daemon=True).start()

    def _head(self, message: str, code: int | None) -> dict[str, Any]:
        return {
            "run": self.spec.name,
            "path": self.store.url,
            "time": now_text(),
            "exit_code": code,
            "message": presentable(message),
            "text": presentable(f"draftmill run {self.spec.name}: {message}"),
        }

    def _report(self, code: int, message: str, *, by_error: bool) -> None:
        """Log that the run has ended with this exit code, and send the notices; `by_error` says that an error ended it."""
        facts = payload(self.store) if self.log.is_attached else {}
        event = {OK: "finish", INTERRUPTED: "interrupt"}.get(code, "failure")
        level = {OK: logging.INFO, INTERRUPTED: logging.WARNING}.get(code, logging.ERROR)
        ended = {"exit_code": code, "path": self.store.url, "summary": facts}
        Display(self.log).event("ended", message, level=level, **ended)
        self.log.write_out()
        if self.log.is_attached or by_error:
            timeout_s = INTERRUPTED_S if event == "interrupt" else TIMEOUT_S
            if facts:
                samples = facts["samples"]
                failed = f", {samples['failed']:,} failed" if samples["failed"] else ""
                message += f"; {samples['ok']:,} of {samples['planned']:,} samples ok{failed}"
            send(self.spec.notify, event, {**self._head(message, code), **facts}, self.warn, timeout_s=timeout_s)
        self.log.write_out()


def payload(store: Store, sums: Sums | None = None) -> dict[str, Any]:
    """What a run has done, finished or not, as JSON data; {} if it has no plan, or its directory can't be read.

    `sums` are those over all passes, in place of those of the first one and of what the sessions noted.
    """
    try:
        plan = load_plan(store)
        if plan is None:
            return {}
        manifest, sessions = read_manifest(store), read_sessions(store)
        done = plan.units if manifest else len(done_units(store))
    except (StoreError, UserError):
        return {}
    devices, tally = sessions.devices, sums or sessions.committed
    ok, failed = tally.ok, tally.failed
    if manifest and sums is None:
        ok, failed = manifest.total("ok"), manifest.total("failed")
    hours = {name: round(seconds / HOUR_S, 6) for name, seconds in purposes_of(devices).items()}
    return {
        "fingerprint": plan.fingerprint,
        "pass": plan.pass_,
        "finished": manifest is not None,
        "units": {"planned": plan.units, "done": done},
        "samples": {"planned": plan.rows, "ok": ok, "failed": failed},
        "tokens": tally.new_tokens,
        "prompt_tokens": tally.prompt_tokens,
        "nfe": tally.nfe,
        "drafts_proposed": tally.proposed,
        "drafts_accepted": tally.accepted,
        "decoding_s": round(sessions.wall_s, 3),
        "device_hours": {"total": round(devices.up_s / HOUR_S, 6), **hours},
        "lost_drivers": round(devices.unended),
    }


def close(spec: JobSpec, store: Store, *, shown: int = 0) -> None:
    """Print the table of one pass of a finished run, and its metrics; raises Ended if too many samples are still failed."""
    passes = passes_of(store)
    manifest, part = passes[shown].manifest, passes[shown].store
    if manifest is None:
        raise StoreError(f"{part.url} has {SUCCESS} but no manifest")
    results, sessions = read_summary(part, manifest), read_sessions(part)
    print_result("\n".join(table_lines(spec.name, part.url, manifest, results, sessions, done=spec.task.done)))
    if lines := metric_lines(store, passes[0].plan.rows):
        print_result("\n".join(["  metrics", *(f"  {line}" for line in lines)]))
    judge(spec, passes)


def judge(spec: JobSpec, passes: Sequence[Pass]) -> None:
    """Print how many samples are still failed after several passes; raises Ended if they are too many."""
    rows, failed, count = passes[0].plan.rows, count_failed(passes), len(finished_passes(passes))
    if count > 1:
        print_result(f"  after {count} passes {rows - failed:,} of {rows:,} samples are ok, {failed:,} failed")
    if too_many_failed(failed, rows, spec.errors):
        reasons = "; see the table above" if is_command() else _reasons(finished_passes(passes)[-1])
        raise Ended(failed_text(failed, rows, spec.errors) + reasons, TOO_MANY_FAILED)


def _reasons(last: Pass) -> str:
    """Of each kind of error the first failed samples, with their reasons, each in a line."""
    assert last.manifest is not None
    rows = error_rows(read_summary(last.store, last.manifest))[1:]
    return "".join(f"\n  {label.strip()}: {text}" if label else f"\n  {text}" for label, text in rows)
