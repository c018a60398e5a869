"""When a text ends before its last token: at an end token or a stop string.

A text that is revealed out of order ends at the first of them with no mask before it. Pure: imports no torch, knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from draftmill.decoders.base import HOLE, StopText

LENGTH: Final = 0
EOS: Final = 1
STOP: Final = 2
FINISHES: Final = ("length", "eos", "stop")
"""`Outcome.finish`: LENGTH (all requested tokens were generated), EOS or STOP."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion: any of `ids` (kept as the last token), or a stop string. The first event wins."""

    ids: tuple[int, ...] = ()
    text: StopText | None = None


class NeverStops:
    """Never finds a stop string; for a request without stop strings in a job that has some."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        return None


def ending(tokens: Sequence[int], news: Sequence[tuple[int, int]], stops: Stops) -> tuple[int, int, int] | None:
    """Reveal `news` (place, token) one by one in a completion that has not ended yet. Returns (how many to reveal until it
    ends, how many tokens of it to keep, EOS or STOP); None if it does not end."""
    canvas = list(tokens)
    known = _run(canvas)
    for count, (place, token) in enumerate(news, 1):
        canvas[place] = token
        run = _run(canvas)
        if run > known:
            end = _end_of(canvas[:run], known, stops)
            if end is not None:
                return (count, *end)
            known = run
    return None


def _run(canvas: Sequence[int]) -> int:
    """How many tokens stand before the first mask."""
    return next((place for place, token in enumerate(canvas) if token == HOLE), len(canvas))


def _end_of(text: Sequence[int], num_checked: int, stops: Stops) -> tuple[int, int] | None:
    """How many tokens to keep and why, where the text contains an end; the first one wins."""
    eos = next((place for place in range(num_checked, len(text)) if text[place] in stops.ids), None)
    if stops.text is not None:
        # The text of an end token is not part of the completion.
        keep = stops.text.find(text[:eos], num_checked)
        if keep is not None:
            return keep, STOP
    return None if eos is None else (eos + 1, EOS)
