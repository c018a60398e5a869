"""Turns an input row into holes for a causal model that fills in the middle. Pure: no files, no model.

The masks are those of canvas.py, but the holes' lengths are unknown here: a hole ends with an end token, or at the limit
given by `task.max_new_tokens` (by default DEFAULT_LIMIT) or by its own marker, such as `<mask:12>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.canvas import Canvas, CanvasMaker, Size, Values, runs
from draftmill.actors.rows.fim import Template
from draftmill.actors.rows.ids import STAGE, given_ids
from draftmill.actors.rows.infilling import IDS, Infilling
from draftmill.actors.rows.masking import Range, hole_length, marker_pattern, masked_positions
from draftmill.actors.rows.row import text_of
from draftmill.actors.rows.row_settings import Asked
from draftmill.actors.task import Columns, Infill, Marker, SpanFraction, Spans
from draftmill.decoders.base import HOLE
from draftmill.storage.errors import RowError

DEFAULT_LIMIT: Final = 128


@dataclass(frozen=True, slots=True)
class FimMaker(CanvasMaker):
    """Everything that a row's holes depend on, except the row and its key."""

    template: Template

    def _made(self, values: Values, key: int, asked: Asked) -> Canvas:
        """The canvas of the row's first hole, with the whole row; RowError if the row does not fit the mask or the model."""
        task = self.task
        if asked.max_new_tokens is not None:
            task = task.model_copy(update={"max_new_tokens": asked.max_new_tokens})
        pieces, limits = replace(self, task=task)._row(values, key)
        row = Infilling(self.template, tuple(pieces), tuple(limits), self.info.max_length)
        if row.room is not None and row.room < 1:
            raise RowError(
                "too_long",
                STAGE,
                f"a hole of up to {max(limits)} tokens leaves no room for text; the model takes {self.info.max_length}",
            )
        tokens = row.ask([]).canvas
        return Canvas(tokens, tuple(runs(tokens == HOLE)), infilling=row)

    def sizes(self, rows: Sequence[tuple[Values, int]]) -> list[Size | RowError]:
        """Return the size of each row's longest canvas, or its error; rows are (values, key)."""
        return [self._size(values, key) for values, key in rows]

    def _row(self, values: Values, key: int) -> tuple[list[IDS], list[int]]:
        """The visible pieces, and the maximum tokens of each hole."""
        mask = self.task.mask
        if isinstance(mask, SpanFraction) or (isinstance(mask, Spans) and self.columns.spans is None):
            ids = self._ids(values)
            hidden = np.zeros(len(ids), dtype=np.bool_)
            hidden[masked_positions(mask, key, len(ids))] = True
            ranges = list(runs(hidden))
            return between(ids, ranges), [self._limit] * len(ranges)
        if isinstance(mask, Marker):
            texts, limits = self._marked(mask, values)
        else:
            text, ranges = self._hidden_text(values, key)
            texts, limits = [text[start:end] for start, end in visible(ranges, len(text))], [self._limit] * len(ranges)
        return [self._encode_piece(piece, first=not number) for number, piece in enumerate(texts)], limits

    @property
    def _limit(self) -> int:
        assert isinstance(self.task, Infill), "holes that are filled, not scored"
        return DEFAULT_LIMIT if self.task.max_new_tokens is None else self.task.max_new_tokens

    def _ids(self, values: Values) -> NDArray[np.int32]:
        if self.columns.tokens is not None:
            return given_ids(values, self.columns.tokens, self.info, nulls=False)
        return self._encode(text_of(values, self.columns))

    def _marked(self, mask: Marker, values: Values) -> tuple[list[str], list[int]]:
        names = (self.columns.prefix, self.columns.suffix)
        if names != (None, None):
            return ["" if name is None else text_of(values, Columns(text=name)) for name in names], [self._limit]
        parts = marker_pattern(mask.marker).split(text_of(values, self.columns))
        if len(parts) == 1:
            raise RowError("marker_absent", STAGE, f"the text has no marker {mask.marker!r}")
        return parts[::2], [hole_length(written, mask) if written else self._limit for written in parts[1::2]]

    def _encode_piece(self, text: str, *, first: bool) -> IDS:
        if first:
            return self._encode(text)
        return self._checked_ids(self._tokenizer().encode_behind(text))


def visible(ranges: Sequence[Range], size: int) -> list[Range]:
    """The gaps before, between and after sorted, disjoint ranges: one more than there are ranges."""
    edges = [0, *(edge for pair in ranges for edge in pair), size]
    return list(zip(edges[::2], edges[1::2], strict=True))


def between(ids: IDS, ranges: Sequence[Range]) -> list[IDS]:
    """The ids outside the ranges, in one piece more than there are ranges."""
    return [ids[start:end] for start, end in visible(ranges, len(ids))]
