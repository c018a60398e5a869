"""Selects the maker that turns the rows of a task into canvases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftmill.actors.rows.canvas import Canvas, CanvasMaker, Size
from draftmill.actors.rows.fim import fills_in_middle, template_of
from draftmill.actors.rows.fim_maker import FimMaker
from draftmill.actors.rows.ids import STAGE, check_scored
from draftmill.actors.rows.prompts import PromptMaker
from draftmill.actors.rows.row import Values
from draftmill.actors.rows.row_settings import RowRules
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Complete, Infill, Score, Side, Task
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.errors import RowError


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
