"""Which rows of a unit does no worker survive? Bisection, as pure bookkeeping.

A range of rows that failed while it ran alone is `accused`: it is halved, and each half is asked again by a probe. A
single row is condemned only when it failed alone twice, since a machine may also die for reasons of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import Verdict

STRIKES = 2
"""How often a row must fail alone before it is condemned."""

MAX_ROUNDS = 2
"""Inquests over the same unit before all of its rows are condemned together."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a range failed: becomes the error of the rows that are found guilty."""

    kind: str
    stage: str
    message: str

    def verdict(self, rows: Range) -> Verdict:
        """The verdict that condemns `rows` for this."""
        return Verdict(rows[0], rows[1], self.kind, self.stage, self.message)


@dataclass(slots=True)
class Inquest:
    """The open questions about one unit.

    `waiting` holds ranges that no probe is asking about, `asked` those that one is. The inquest is closed when both are
    empty. Ranges of the two lists never overlap.
    """

    waiting: list[Range] = field(default_factory=list)
    asked: list[Range] = field(default_factory=list)
    strikes: dict[int, int] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether nothing is left to ask."""
        return not self.waiting and not self.asked

    def accuse(self, rows: Range, cause: Cause) -> Verdict | None:
        """`rows` failed alone. Returns a verdict if that settles it, else there is more to ask."""
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
        """Take the next range to probe: the lowest rows first, so that the order is always the same."""
        rows = min(self.waiting)
        self.waiting.remove(rows)
        self.asked.append(rows)
        return rows

    def answered(self, rows: Range) -> None:
        """The probe of `rows` has ended, one way or another."""
        self.asked.remove(rows)

    def unanswered(self, rows: Range) -> None:
        """The probe of `rows` told nothing: ask again."""
        self.asked.remove(rows)
        self.waiting.append(rows)
