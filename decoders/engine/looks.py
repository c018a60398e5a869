"""What a decoder of masked diffusion asks: canvases with drafts in them, and the surest tokens for some of their masks.

The canvas of a sample stays on the device, where the tokens that it reveals are written between two forwards. So an ask names no
rows and no masks, only stretches of the canvas, and is as short for a long canvas as for a short one:

    canvas       the  _  sat  _  _  .            a mask at 1, 3 and 4
    drafts       cat at 1, mat at 4              not revealed: for this forward only
    node 0       the  _  sat  _  _  .            the canvas as it is
    node 1       the cat sat  _  _  .            with the first draft (LEAD 1)
    node 2       the cat sat  _ mat .            with the first two (LEAD 2)
    asked        of node 1, the stretch [3, 5): 2 masks, the surest one     ->  (position, token, ..)

A *span* is a run of rows of a node, consecutive in columns and positions:

    COUNT              rows
    COLUMN, POSITION   of its first row
    NODE               the canvas that it belongs to
    LEAD, MORE         the node has the first LEAD drafts, and the one numbered MORE (-1: no other)
    LO1, HI1 ..        each row sees the columns [LO1, HI1), .. [LO5, HI5); empty ones come last

Columns below SIDE are those of the canvas itself, one a position; columns from SIDE on stand beside it (nodes around a cache).
Without a cache each node is a canvas of its own, and has one span.

What is *asked* is a stretch of positions of a span's node:

    SPAN               the span, by its number in the ask; its rows must hold those that predict the stretch
    LO, HI             the positions [LO, HI)
    MASKS              how many of them are masks of the node
    BEST               how many of these are answered, the surest first, among equals the one further left

Pure: imports no torch. Sources: docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

COUNT, COLUMN, POSITION, NODE, LEAD, MORE, LO1 = range(7)
MOST_SIGHTS: Final = 5
"""How many stretches of columns a row may see; a node of `ssd` needs no more (ssd_nodes.py)."""
NO_MORE: Final = (0,) * (2 * MOST_SIGHTS - 2)
"""What follows the first stretch where it is the only one."""
SPAN_FIELDS: Final = LO1 + 2 * MOST_SIGHTS

SPAN, LO, HI, MASKS, BEST = range(5)
ASKED_FIELDS: Final = 5

SIDE: Final = 1 << 24
"""The first column beside the canvas."""

Pick = tuple[float, int, int, float]
"""(-worth, position, token, log-probability under the model itself): so pairs of tuples compare as the surest first."""


class Look(NamedTuple):
    """One sample's part of a forward over canvases; answered with a list of Pick, stretch after stretch.

    `drafts` are (position, token) pairs, one after the other. `times` are the time of the canvas and that of the next step, in
    models that are conditioned on the noise, and `draw` numbers the random numbers of the root's step (picks.py): a node with n
    drafts has the numbers of the n-th step after it. With `ahead` the picks are followed by those of so many more steps.
    """

    spans: Sequence[int]
    asked: Sequence[int]
    drafts: Sequence[int] = ()
    times: tuple[float, float] = (0.0, 0.0)
    draw: int = 0
    ahead: int = 0
