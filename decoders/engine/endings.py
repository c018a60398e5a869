"""Where a completion that is revealed out of order ends: at the first end token or stop string with no mask before it.

Pure; knows no models and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from decoders.base import HOLE
from decoders.engine.stops import Stops

EOS: Final = 1
STOP: Final = 2


def ending(tokens: Sequence[int], news: Sequence[tuple[int, int]], stops: Stops) -> tuple[int, int, int] | None:
    """Reveal `news` (place, token) one by one in a completion that has not ended yet.

    Returns (how many to reveal until it ends, how many tokens of it to keep, EOS or STOP); None where it goes on.
    """
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
        # The text of an end token is no part of the completion.
        keep = stops.text.find(text[:eos], num_checked)
        if keep is not None:
            return keep, STOP
    return None if eos is None else (eos + 1, EOS)
