"""Accounts of what drafting has gained or lost in seconds, which bound the cost of trials.

Estimates of costs and acceptances (budget.py) say what to try. The ledger measures whether it paid, all costs included: a drafter
that catches up with texts, the search for drafts, a busy machine. Knows seconds and tokens, no models and no clock.
"""

from __future__ import annotations

from typing import Final

# The loss allowed for trials: the time of this many steps without drafts, plus this share of all time spent since.
_AT_FIRST, _SHARE = 2.0, 0.015
# Gains are remembered up to this share of the time spent: when drafts stop being accepted, that much may be lost.
_MOST_WON: Final = 0.05
# A busy machine makes any step long: the loss of one step counts as at most this many steps without drafts.
_HELD_UP: Final = 2.0


class Ledger:
    """Each step: `spend` its seconds as they become known and `win` its tokens, then `close` it."""

    def __init__(self) -> None:
        self._total_s, self._balance_s = 0.0, 0.0
        self._step_s, self._step_tokens = 0.0, 0
        self._was_drafting = False

    def spend(self, seconds: float) -> None:
        """Add seconds to this step."""
        self._step_s += seconds

    def win(self, tokens: int) -> None:
        """Add committed tokens to this step."""
        self._step_tokens += tokens

    def close(self, *, drafting: bool, plain_step_s: float, num_slots: int) -> None:
        """End the step; without drafts it would have taken `plain_step_s`, 0 if unknown.

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
        """End a step whose time without drafts is unknown."""
        self._was_drafting = False
        self._step_s, self._step_tokens = 0.0, 0

    def allows(self, plain_step_s: float) -> bool:
        """Whether the accounts allow another trial, if a step without drafts takes `plain_step_s`."""
        return self._balance_s + _SHARE * self._total_s + _AT_FIRST * plain_step_s >= 0.0
