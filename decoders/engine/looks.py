"""What a decoder of masked diffusion asks: rows of canvases with drafts in them, and the surest tokens for some of their masks.

    canvas       the  _  sat  _  _  .            a mask at 1, 3 and 4
    node 0       the  _  sat  _  _  .            the canvas as it is
    node 1       the cat sat  _ mat .            with two drafts, which are not revealed: for this forward only
    asked        of node 1, the mask at 3        ->  (how sure, position, token, ..)

A *span* is a run of rows of a node, consecutive in columns and positions: a wide span (asks.py) whose rows see up to five
stretches of columns [LO, HI) instead; empty ones come last. Columns below SIDE are those of the canvas itself, one a position;
columns from SIDE on stand beside it (nodes around a cache). Without a cache each node is a canvas of its own, with one span.

A *stretch* is some masks of one node, the surest of which are answered.

Pure: imports no torch. Sources: docs/engine.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FAR: Final = 1 << 40  # asks.FAR
NODE, LO1 = 11, 12
MOST_SIGHTS: Final = 5
"""How many stretches of columns a row may see; a node of `ssd` needs no more (ssd_nodes.py)."""
NO_MORE: Final = (0,) * (2 * MOST_SIGHTS - 2)
"""What follows the first stretch where it is the only one."""
NODE_FIELDS: Final = LO1 + 2 * MOST_SIGHTS

SIDE: Final = 1 << 24
"""The first column beside the canvas."""

Ints = NDArray[np.int64]
Pick = tuple[float, int, int, float]
"""(-worth, position, token, log-probability under the model itself): so pairs of tuples compare as the surest first."""


class Look(NamedTuple):
    """One sample's part of a forward over canvases; answered with a list of Pick, stretch after stretch.

    `tokens` are those of the rows in `spans`, HOLE at masks. `rows` are numbers among them, each of which speaks of one of
    `positions`, with the random numbers of its one of `draws`. `sizes` are the masks of each stretch, `bests` how many of them
    are answered: the surest first, among equals the one asked about first. `times` are the time of the canvas and that of the
    next step, in models that are conditioned on the noise. With `ahead` the picks are followed by those of so many more steps.
    """

    tokens: Ints
    spans: Sequence[int]
    rows: Ints
    positions: Ints
    draws: Ints
    sizes: Sequence[int]
    bests: Sequence[int]
    times: tuple[float, float] = (0.0, 0.0)
    ahead: int = 0


class LookRows:
    """Collects the rows of a look, and the masks asked about. A row speaks of the position `shift` after its own."""

    def __init__(self, shift: int) -> None:
        self._shift, self.spans, self.num_rows = shift, list[int](), 0
        self._tokens = list[Ints]()
        self._rows, self._positions, self._draws = list[Ints](), list[Sequence[int]](), list[int]()
        self._sizes, self._bests = list[int](), list[int]()

    def run(self, canvas: Ints, low: int, high: int, *, column: int, node: int, sees: Sequence[int]) -> int:
        """Run the positions [low, high) of a canvas; returns what to `read` of them with."""
        self.spans += (high - low, column, low, 0, _FAR, _FAR, 0, 0, 0, 1, 0, node, *sees)
        self._tokens.append(canvas[low:high])
        first, self.num_rows = self.num_rows - low, self.num_rows + high - low
        return first

    def read(self, first: int, positions: Sequence[int], *, best: int, draw: int) -> None:
        """Ask about some masks, in ascending order, whose rows were run as `first`."""
        assert best <= len(positions), "more picks than masks"
        self._rows.append(first + np.maximum(np.array(positions, dtype=np.int64) - self._shift, 0))
        self._positions.append(positions)
        self._draws.append(draw)
        self._sizes.append(len(positions))
        self._bests.append(best)

    def look(self, *, times: tuple[float, float] = (0.0, 0.0), ahead: int = 0) -> Look:
        """The ask."""
        sizes = self._sizes
        return Look(
            tokens=np.concatenate(self._tokens),
            spans=self.spans,
            rows=np.concatenate(self._rows),
            positions=np.concatenate([np.array(each, dtype=np.int64) for each in self._positions]),
            draws=np.repeat(np.array(self._draws, dtype=np.int64), sizes),
            sizes=sizes,
            bests=self._bests,
            times=times,
            ahead=ahead,
        )


def within(positions: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those of ascending positions in [low, high)."""
    return positions[bisect_left(positions, low) : bisect_left(positions, high)]
