"""What drafting has won or lost so far, measured against steps without drafts: the bound on what finding out may cost.

Estimates of costs and acceptances (budget.py) say what to try; only this says whether it paid, all of it: a drafter that reads
the texts that it missed, the search for drafts, a busy machine. Knows seconds and tokens, no models and no clock.
"""

from __future__ import annotations

from typing import Final

# What may be lost on trying: so many steps without drafts at first, and this share of all the time spent since.
_AT_FIRST, _SHARE = 2.0, 0.015
# What was won is remembered as at most this share of the time spent: when drafts cease to come true, that much may be lost.
_MOST_WON: Final = 0.05
# A machine that is held up makes any step long, one without drafts too: what is lost in one step counts as at most so many of it.
_HELD_UP: Final = 2.0


class Ledger:
    """Each step: `spend` its seconds as they become known and `win` its tokens, then `close` it."""

    def __init__(self) -> None:
        self._total_s, self._balance_s = 0.0, 0.0
        self._step_s, self._step_tokens = 0.0, 0
        self._was_drafting = False

    def spend(self, seconds: float) -> None:
        """Something of this step took so long."""
        self._step_s += seconds

    def win(self, tokens: int) -> None:
        """This step committed so many tokens."""
        self._step_tokens += tokens

    def close(self, *, drafting: bool, plain_step_s: float, num_slots: int) -> None:
        """The step is over; without drafts so many slots would have taken `plain_step_s`, 0 if nobody knows.

        A step that followed one with drafts belongs to them: an iteration may take two forwards.
        """
        self._total_s += self._step_s
        if plain_step_s and (drafting or self._was_drafting):
            won_s = self._step_tokens * plain_step_s / num_slots - self._step_s
            self._balance_s += max(won_s, -_HELD_UP * plain_step_s)
            self._balance_s = min(self._balance_s, _MOST_WON * self._total_s)
        self._was_drafting = drafting
        self._step_s, self._step_tokens = 0.0, 0

    def drop(self) -> None:
        """The step is over, and nobody knows what it would have taken without drafts."""
        self._was_drafting = False
        self._step_s, self._step_tokens = 0.0, 0

    def allows(self, plain_step_s: float) -> bool:
        """Whether there is something left to try with, where a step without drafts takes `plain_step_s`."""
        return self._balance_s + _SHARE * self._total_s + _AT_FIRST * plain_step_s >= 0.0
