"""When a text ends before its last token: at an end token or a stop string.

A text that is revealed out of order ends at the first of them with no mask before it. Pure: imports no torch, knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.decoders.base import HOLE, StopText

FILLED, LENGTH, EOS, STOP = "filled", "length", "eos", "stop"
"""`Outcome.finish`: LENGTH (all requested tokens were generated), EOS or STOP; FILLED where texts have no ends."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion: any of `ids` (kept as the last token), or a stop string. The first event wins."""

    ids: tuple[int, ...] = ()
    text: StopText | None = None

    def first(self, text: Sequence[int], num_checked: int) -> tuple[int, str] | None:
        """(number of tokens to keep, EOS or STOP) for a text that ends after its first `num_checked` tokens; None if it does
        not end."""
        eos = next((place for place in range(num_checked, len(text)) if text[place] in self.ids), None)
        if self.text is not None:
            # The text of an end token is not part of the completion.
            keep = self.text.find(text[:eos], num_checked)
            if keep is not None:
                return keep, STOP
        return None if eos is None else (eos + 1, EOS)


class NeverStops:
    """Never finds a stop string; for a request without stop strings in a job that has some."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        return None


def ending(tokens: Sequence[int], news: Sequence[tuple[int, int]], stops: Stops) -> tuple[int, int, str] | None:
    """Reveal `news` (place, token) one by one in a completion that has not ended yet. Returns (number of tokens to reveal until
    it ends, number of its tokens to keep, EOS or STOP); None if it does not end."""
    canvas = list(tokens)
    known = _first_mask(canvas, 0)
    for count, (place, token) in enumerate(news, 1):
        canvas[place] = token
        if place == known:
            run = _first_mask(canvas, known)
            end = stops.first(canvas[:run], known)
            if end is not None:
                return (count, *end)
            known = run
    return None


def _first_mask(canvas: Sequence[int], start: int) -> int:
    """The place of the first mask from `start` on, the length if there is none."""
    return next((place for place in range(start, len(canvas)) if canvas[place] == HOLE), len(canvas))
