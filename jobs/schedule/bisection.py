"""Finds, by bisection, the rows of a unit that make it fail or kill its workers. Pure bookkeeping.

A range of rows that failed while it ran alone is `accused`: it is halved, and a probe decodes each half again. A single
row is quarantined only after it failed alone twice, since a machine may also die for unrelated reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftmill.actors.messages import Verdict

STRIKES = 2
"""Failures of a row on its own before it is quarantined."""

MAX_ROUNDS = 2
"""Bisections into the same unit before all of its rows are quarantined together."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a range failed; becomes the error of the quarantined rows."""

    kind: str
    stage: str
    message: str

    def verdict(self, rows: Range) -> Verdict:
        """The verdict that condemns `rows` for this cause."""
        return Verdict(rows[0], rows[1], self.kind, self.stage, self.message)


@dataclass(slots=True)
class Bisection:
    """The open questions about one unit.

    `waiting` holds ranges that still need a probe, `asked` the ranges that a probe is decoding. The bisection is closed when
    both are empty. Ranges of the two lists never overlap.
    """

    waiting: list[Range] = field(default_factory=list)
    asked: list[Range] = field(default_factory=list)
    strikes: dict[int, int] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether no range needs a probe or is being probed."""
        return not self.waiting and not self.asked

    def suspect(self, rows: Range, cause: Cause) -> Verdict | None:
        """Note that `rows` failed alone. Returns a verdict if that settles it; otherwise queues further probes."""
        start, stop = rows
        if stop - start > 1:
            middle = (start + stop) // 2
            self.waiting += [(start, middle), (middle, stop)]
            return None
        self.strikes[start] = self.strikes.get(start, 0) + 1
        if self.strikes[start] >= STRIKES:
            return cause.verdict(rows)
        self.waiting.append(rows)
        return None

    def ask(self) -> Range:
        """Take the next range to probe: the lowest rows first, so that the order is deterministic."""
        rows = min(self.waiting)
        self.waiting.remove(rows)
        self.asked.append(rows)
        return rows

    def answered(self, rows: Range) -> None:
        """Note that the probe of `rows` has ended, whatever its result."""
        self.asked.remove(rows)

    def unanswered(self, rows: Range) -> None:
        """Queue `rows` again: their probe gave no result."""
        self.asked.remove(rows)
        self.waiting.append(rows)
