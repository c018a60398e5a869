"""Selects the maker that turns the rows of a task into canvases: holes, prompts, holes to score, holes to fill in the middle.

Pure: no files, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.canvas import Canvas, CanvasMaker, Size, runs
from draftmill.actors.rows.fim import IDS, Infilling, Template, fills_in_middle, template_of
from draftmill.actors.rows.masking import Range, masked_positions
from draftmill.actors.rows.prompts import PromptMaker
from draftmill.actors.rows.row import STAGE, Values, check_scored, given_ids, text_of
from draftmill.actors.rows.row_settings import Asked, RowRules
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Complete, Infill, Marker, Score, Side, SpanFraction, Spans, Task
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.errors import RowError

DEFAULT_LIMIT: Final = 128


class Maker(Protocol):
    """Turns rows into canvases; holds everything that a canvas depends on, except its row and key."""

    def make(self, values: Values, key: int) -> Canvas:
        """Return the row's canvas; RowError if the row does not fit the task or the model."""
        ...

    def sizes(self, rows: Sequence[tuple[Values, int]]) -> list[Size | RowError]:
        """Return the size of each row's canvas, or its error; rows are (values, key)."""
        ...


def maker_for(
    task: Task,
    columns: Columns,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    decoder: DecoderSettings,
    sampling: Sampling,
    ends: Sequence[int] = (),
    truncate: Side | None = None,
) -> Maker:
    """Return the maker of a task's canvases; `truncate` says which side of a long prompt is cut, None for none.

    `decoder` and `sampling` decide which settings a row may have; `ends` are the job's end tokens. Raises UserError if a causal
    model has to fill holes but lacks the special tokens for it.
    """
    open_ended = isinstance(task, Infill) and fills_in_middle(task, info)
    rules = RowRules(task, columns, decoder.kind, sampling, tokenizer, tuple(ends), open_ended)
    if isinstance(task, Infill) and open_ended:
        return FimMaker(task, columns, tokenizer, info, template_of(task.fim, tokenizer, info), rules=rules)
    if isinstance(task, Infill):
        return CanvasMaker(task, columns, tokenizer, info, rules=rules)
    if isinstance(task, Score) and task.mask is not None:
        return ScoreMaker(CanvasMaker(task, columns, tokenizer, info, rules=rules))
    noted = shares_beginnings(task, info)
    return PromptMaker(task, columns, tokenizer, info, truncate=truncate, rules=rules, notes_beginnings=noted)


def shares_beginnings(task: Task, info: ModelInfo) -> bool:
    """Whether rows that begin alike belong into one unit, since a worker then computes what they have in common once.

    Causal models and block diffusion take over beginnings of prompts (Algorithm.reusable). Block diffusion's scores and masked
    diffusion take over nothing, any-subset models equal prompts only. Texts with holes don't begin with a prompt.
    """
    if isinstance(task, Complete):
        return info.kind in {"causal", "blocks"}
    return isinstance(task, Score) and task.mask is None and info.kind == "causal"


@dataclass(frozen=True, slots=True)
class ScoreMaker:
    """Makes canvases of which a mask's hidden tokens are scored, given all the others.

        text      "def f(x):\\n    return x\\n"      hidden by the mask: "    return x"
        canvas    [ 41  7  .. ] | [ 4 88 13 ] | [ 9 ]       scored: the positions of 4, 88 and 13

    The masks are those of infilling (canvas.py), so that the same rows are filled and scored.
    """

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


@dataclass(frozen=True, slots=True)
class FimMaker(CanvasMaker):
    """Makes the holes of a causal model that fills in the middle.

    The masks are those of canvas.py, but the holes' lengths are unknown here: a hole ends with an end token, or at the limit
    given by `task.max_new_tokens` (by default DEFAULT_LIMIT) or by its own marker, such as `<mask:12>`.
    """

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
            return [ids[start:end] for start, end in _visible(ranges, len(ids))], [self._limit] * len(ranges)
        if isinstance(mask, Marker):
            texts, limits = self._marked(mask, values, self._limit)
        else:
            text, ranges = self._hidden_text(values, key)
            texts, limits = [text[start:end] for start, end in _visible(ranges, len(text))], [self._limit] * len(ranges)
        behind = [self._checked_ids(self._tokenizer().encode_behind(text)) for text in texts[1:]]
        return [self._encode(texts[0]), *behind], limits

    @property
    def _limit(self) -> int:
        assert isinstance(self.task, Infill), "holes that are filled, not scored"
        return DEFAULT_LIMIT if self.task.max_new_tokens is None else self.task.max_new_tokens

    def _ids(self, values: Values) -> NDArray[np.int32]:
        if self.columns.tokens is not None:
            return given_ids(values, self.columns.tokens, self.info, nulls=False)
        return self._encode(text_of(values, self.columns))


def _visible(ranges: Sequence[Range], size: int) -> list[Range]:
    """The gaps before, between and after sorted, disjoint ranges: one more than there are ranges."""
    edges = [0, *(edge for pair in ranges for edge in pair), size]
    return list(zip(edges[::2], edges[1::2], strict=True))
