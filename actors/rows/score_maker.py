"""Turns a row into a canvas of which a mask's hidden tokens are scored, given all the others. Pure: no files, no model.

    text      "def f(x):\\n    return x\\n"      hidden by the mask: "    return x"
    canvas    [ 41  7  .. ] | [ 4 88 13 ] | [ 9 ]       scored: the positions of 4, 88 and 13

The masks are those of infilling (canvas.py), so that the same rows are filled and scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftmill.actors.rows.canvas import Canvas, CanvasMaker, Size, Values
from draftmill.actors.rows.ids import STAGE, check_scored
from draftmill.decoders.base import HOLE
from draftmill.storage.errors import RowError


@dataclass(frozen=True, slots=True)
class ScoreMaker:
    """Makes canvases from those with holes."""

    holes: CanvasMaker

    def make(self, values: Values, key: int) -> Canvas:
        """Return the row's canvas; RowError if the row does not fit the mask or the model, or if nothing is hidden."""
        canvas = self.holes.make(values, key)
        scored = np.flatnonzero(canvas.tokens == HOLE).astype(np.int64)
        if not len(scored):
            raise _nothing()
        assert canvas.hidden is not None, "a hole whose text is unknown"
        tokens = canvas.tokens.copy()
        tokens[scored] = canvas.hidden
        check_scored(tokens, scored, self.holes.info)
        return Canvas(tokens, canvas.holes, score_from=int(scored[0]), scored=scored, endpoint=canvas.endpoint)

    def sizes(self, rows: Sequence[tuple[Values, int]]) -> list[Size | RowError]:
        """Return the size of each row's canvas, or its error; rows are (values, key)."""
        return [_nothing() if isinstance(size, Size) and not size.masked else size for size in self.holes.sizes(rows)]


def _nothing() -> RowError:
    return RowError("empty_text", STAGE, "there is nothing to score: the mask hides no token")
