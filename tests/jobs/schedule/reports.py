"""What workers report, with the facts alone that a scheduler looks at."""

from draftmill.actors.messages import Effort, Receipt, Tally, TurnReport, WorkerLoaded, WorkerReported
from draftmill.decoders.base import EngineStats
from draftmill.storage.runs.unit_facts import CommittedUnit, unit_name


def worker_up(worker: str) -> WorkerLoaded:
    return WorkerLoaded(worker, "node", 1)


def answered(worker: str, spent: tuple[int, ...] = (), *, moved: bool = True, tokens: int = 0) -> WorkerReported:
    """A report with these tokens, or without any, and then with an ended sample if it `moved`."""
    decoded = Tally(rows=int(moved and not tokens))
    return WorkerReported(worker, TurnReport((), Effort(EngineStats(committed=tokens)), decoded, spent))


def unit_done(lease: int, unit: int) -> Receipt:
    committed = CommittedUnit(unit, unit_name(unit), "", 1, 1, 0, 0, 1, bytes(32).hex())
    return Receipt(lease, unit, "worker", "node", committed, Tally())


def probe_done(lease: int) -> Receipt:
    return Receipt(lease, 0, "worker", "node", None, Tally())
