"""Turns an input row into a canvas with holes, and a decoded canvas into text. Pure: no files, no model.

Masks that hide tokens (random, spans, span_fraction, given) work on the row's tokens. Masks that hide text (marker, lines,
sentences, and spans by characters) encode the visible and the hidden pieces separately, so that every visible character is
preserved:

    text     "def f(x):\n    return x\n"      hidden: "    return x"
    pieces   "def f(x):\n" | "    return x" | "\n"
    canvas   [ 41  7  .. ] | [-1 -1 -1 ] | [ 9 ]          holes ((4, 7),)

If a vocabulary can't encode pieces separately (Tokenizer.joins is false), the tokens that overlap a hidden range are the hole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows import masking
from draftmill.actors.rows.constraints import rules_of
from draftmill.actors.rows.fim import Infilling
from draftmill.actors.rows.lengths import CAL_BIAS, OpenLengths
from draftmill.actors.rows.masking import Range
from draftmill.actors.rows.prompts import Prompter
from draftmill.actors.rows.row import (
    Values,
    check_ids,
    check_length,
    check_text,
    given_ids,
    is_id,
    require,
    string_of,
    text_of,
)
from draftmill.actors.rows.row_settings import OwnSettings, RowRules
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import (
    Columns,
    ConstraintSettings,
    Given,
    Infill,
    Lines,
    Marker,
    Mask,
    Random,
    Score,
    Sentences,
    SpanFraction,
    Spans,
    Task,
)
from draftmill.decoders.base import HOLE, JOB_SETTINGS, RowSettings
from draftmill.storage.errors import RowError

Piece = str | int | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Canvas:
    """A decoder's input: int32 [L] with HOLE at each token to generate, and its holes as maximal [start, end) ranges.

    `hidden` are the ids that the mask hid in the holes, in canvas order, None if unknown.

    A canvas to score has all its tokens: those from `score_from` on are scored, and `text` is their text, if known. With a mask
    only the positions `scored` (int64) are scored, which are in its `holes`.
    `truncated` is the number of prompt tokens that were cut because they did not fit.
    If a causal model fills the holes one after another, this is the first hole's canvas, and `infilling` has the whole row.

    `settings` are the row's own settings; `endpoint` is the endpoint of an OpenAI request.
    With open `lengths` the holes have the greatest ones that fit, until those of a sample are found (`with_lengths`).
    `rules` are the constraints of the holes, and `constraint` is what the results call them.
    """

    tokens: NDArray[np.int32]
    holes: tuple[Range, ...]
    score_from: int | None = None
    text: str | None = None
    infilling: Infilling | None = None
    truncated: int = 0
    settings: RowSettings = JOB_SETTINGS
    endpoint: str | None = None
    hidden: NDArray[np.int32] | None = None
    scored: NDArray[np.int64] | None = None
    rules: tuple[ConstraintSettings | None, ...] = ()
    constraint: str | None = None
    lengths: OpenLengths | None = None

    def with_lengths(self, lengths: Sequence[int]) -> Canvas:
        """The canvas with holes of the lengths that were found."""
        assert self.lengths is not None, "a canvas whose lengths are open"
        return replace(self, tokens=self.lengths.canvas(lengths), holes=self.lengths.holes(lengths), lengths=None)

    @property
    def num_masked(self) -> int:
        """The maximum number of tokens to generate."""
        return sum(self.limits)

    @property
    def limits(self) -> list[int]:
        """The most tokens of each hole, also of those that a causal model fills later."""
        return [end - start for start, end in self.holes] if self.infilling is None else list(self.infilling.limits)

    @property
    def size(self) -> CanvasSize:
        """The canvas's size, for the planner."""
        length = len(self.tokens) if self.infilling is None else self.infilling.longest
        if self.scored is not None:
            return CanvasSize(length, len(self.scored))
        masked = self.num_masked if self.score_from is None else length - self.score_from
        return CanvasSize(length, masked, is_constrained=any(self.rules))


@dataclass(frozen=True, slots=True)
class CanvasSize:
    """A canvas's length in tokens, and the number of tokens to generate (or score).

    `beginning` are the tokens before the first one to generate, all tokens of a text to score; None where nothing is won by
    knowing them (makers.shares_beginnings). `is_constrained`: a hole has a constraint.
    """

    length: int
    masked: int
    beginning: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
    is_constrained: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class RowMaker(RowRules):
    """What turns rows into canvases: everything that a canvas depends on, except the row and its key. `columns` are those of a
    row that was filled."""

    task: Task
    columns: Columns
    prompter: Prompter

    def make(self, values: Values, key: int) -> Canvas:
        """Return the row's canvas; RowError if the row does not fit the task, the decoder or the model."""
        own = self.own_settings(values)
        settings = self.settings(own)
        made = self._make(self.prompter.fill(values), key, own)
        canvas = replace(made, settings=settings, endpoint=own.endpoint)
        given, maker = self.constraint(own), self.constraints
        if given is None or not canvas.limits:
            return canvas
        canvas = replace(canvas, rules=rules_of(given, canvas.rules, len(canvas.limits)))
        return canvas if maker is None else maker.applied(canvas)

    def size(self, values: Values, key: int) -> CanvasSize:
        """Return the size of the row's canvas; RowError as `make`."""
        return self.make(values, key).size

    def _make(self, values: Values, key: int, own: OwnSettings) -> Canvas:
        """The canvas without the row's settings."""
        raise NotImplementedError

    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "the spec needs a tokenizer"
        return self.tokenizer

    def _encode(self, text: str) -> NDArray[np.int32]:
        return check_ids(self._tokenizer().encode(text), self.info)


@dataclass(frozen=True, kw_only=True)
class CanvasMaker(RowMaker):
    """Makes canvases with holes.

    In the task `score`, holes without a text of their own (marker, given) hide the row's `reference`.
    """

    task: Infill | Score

    def _make(self, values: Values, key: int, own: OwnSettings) -> Canvas:
        mask = self._mask
        if self.columns.tokens is not None:
            tokens = given_ids(values, self.columns.tokens, self.info, nulls=mask.kind == "given")
            if isinstance(mask, Random | Spans | SpanFraction):
                return self._punch(tokens, key)
            return self._canvas(tokens, self._missing_ids(values, tokens) if self._hides_reference else None)
        if isinstance(mask, Random | SpanFraction) or (isinstance(mask, Spans) and self.columns.spans is None):
            return self._punch(self._encode(text_of(values, self.columns)), key)
        if isinstance(mask, Marker):
            texts, lengths = self._split_at_markers(mask, values, mask.lengths, own)
            rules = tuple(rule for _, rule in lengths)
            if self._hides_reference:
                holes: Sequence[Piece] = [self._encode(text) for text in self._references(values, len(lengths))]
            elif any(least < most for (least, most), _ in lengths):
                return replace(self._open(mask, texts, [pair for pair, _ in lengths], own), rules=rules)
            else:
                holes = [most for (_, most), _ in lengths]
            pieces = [texts[0], *(piece for pair in zip(holes, texts[1:], strict=True) for piece in pair)]
            return replace(self._join(pieces), rules=rules)
        text, ranges = self._hidden_text(values, key)
        return self._without_ranges(text, ranges)

    def size(self, values: Values, key: int) -> CanvasSize:
        """Draws no noise where a mask hides a known number of a text's tokens: that takes as long as to tokenize it."""
        mask, own = self._mask, self.own_settings(values)
        has_places = self.columns.tokens is not None or self.columns.spans is not None
        if not isinstance(mask, Random | Spans | SpanFraction) or has_places or self.constraint(own) is not None:
            return RowMaker.size(self, values, key)
        length = len(self._encode(text_of(self.prompter.fill(values), self.columns)))
        check_length(length, self.info)
        return CanvasSize(length, masking.masked_count(mask, length)) if length else RowMaker.size(self, values, key)

    # ---- tokens

    @property
    def _mask(self) -> Mask:
        assert self.task.mask is not None, "a task without a mask has no holes"
        return self.task.mask

    def _canvas(self, tokens: NDArray[np.int32], hidden: NDArray[np.int32] | None) -> Canvas:
        check_length(len(tokens), self.info)
        return Canvas(tokens, tuple(runs(tokens == HOLE)), hidden=hidden)

    def _punch(self, tokens: NDArray[np.int32], key: int) -> Canvas:
        mask = self._mask
        assert isinstance(mask, Random | Spans | SpanFraction)
        check_length(len(tokens), self.info)
        punched, where = tokens.copy(), masking.masked_positions(mask, key, len(tokens))
        punched[where] = HOLE
        return self._canvas(punched, tokens[where])

    def _join(self, pieces: Sequence[Piece]) -> Canvas:
        """The canvas of pieces: each is a text, a number of HOLEs, or the ids that HOLEs hide."""
        check_length(sum(piece for piece in pieces if isinstance(piece, int)), self.info)
        parts = [np.zeros(0, dtype=np.int32), *map(self._tokens_of, pieces)]
        ids = [piece for piece in pieces if isinstance(piece, np.ndarray)]
        hidden = None if any(isinstance(piece, int) for piece in pieces) else np.concatenate([parts[0], *ids])
        return self._canvas(np.concatenate(parts), hidden)

    def _tokens_of(self, piece: Piece) -> NDArray[np.int32]:
        if isinstance(piece, str):
            return self._encode(piece)
        return np.full(piece if isinstance(piece, int) else len(piece), HOLE, dtype=np.int32)

    # ---- text

    def _open(self, mask: Marker, texts: Sequence[str], ranges: Sequence[Range], own: OwnSettings) -> Canvas:
        """The canvas with the greatest lengths that fit, of holes whose lengths are to be found."""
        decoder = self.recipe.decoder.baseline
        if not decoder.finds_lengths:
            raise masking.bad_mask(
                f"decoder {decoder.name()!r} can't find a hole's length; allowed: a number of tokens"
            )
        pieces = tuple(self._encode(text) for text in texts)
        if not all(map(len, pieces[1:-1])):
            raise masking.bad_mask(
                "two holes stand side by side, and one is of unknown length; allowed: text between them"
            )
        visible, limit, bias = sum(map(len, pieces)), self.info.max_length, None
        check_length(visible + sum(least for least, _ in ranges), self.info)
        if self.info.kind == "masked":
            bias = mask.bias or CAL_BIAS
        found = OpenLengths(
            pieces,
            tuple(tuple(range(least, most + 1)) for least, most in ranges),
            None if limit is None else limit - visible,
            self.recipe.sampling.temperature if own.temperature is None else own.temperature,
            bias,
        )
        return replace(self._canvas(found.canvas(found.longest), None), lengths=found)

    def _split_at_markers(
        self, mask: Marker, values: Values, default: Range, own: OwnSettings
    ) -> tuple[list[str], list[tuple[Range, ConstraintSettings | None]]]:
        """As masking.split_at_markers; the names are those of the row's constraints."""
        names = (self.columns.prefix, self.columns.suffix)
        if names != (None, None):
            return ["" if name is None else text_of(values, Columns(text=name)) for name in names], [(default, None)]
        given = self.constraint(own)
        named = None if isinstance(self.task, Score) else given if isinstance(given, Mapping) else {}
        return masking.split_at_markers(text_of(values, self.columns), mask.marker, default, named)

    @property
    def _hides_reference(self) -> bool:
        return isinstance(self.task, Score) and isinstance(self.task.mask, Marker | Given)

    def _references(self, values: Values, count: int) -> list[str]:
        """The text of each of `count` holes: a text for a single hole, else a list of texts."""
        column = self.columns.reference or "reference"
        texts = require(values, column)
        if not isinstance(texts, list | tuple):
            texts = [string_of(values, column)]
        if len(texts) != count or not all(isinstance(text, str) for text in texts):
            raise masking.bad_mask(f"{column!r} must give a text for each of the row's {count} holes")
        return [check_text(text, column) for text in texts]

    def _missing_ids(self, values: Values, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        column, count = self.columns.reference or "reference", int((tokens == HOLE).sum())
        ids = given_ids(values, column, self.info, nulls=False)
        if len(ids) != count:
            raise masking.bad_mask(f"{column!r} has {len(ids)} ids, but the row's tokens have {count} nulls")
        return ids

    def _hidden_text(self, values: Values, key: int) -> tuple[str, list[Range]]:
        mask = self._mask
        if isinstance(mask, Sentences) and self.columns.sentences is not None:
            text, sentences = _own_sentences(values, self.columns.sentences, mask.separator)
            return text, masking.sentence_ranges(mask, key, sentences)
        text = text_of(values, self.columns)
        if isinstance(mask, Sentences):
            return text, masking.sentence_ranges(mask, key, masking.split_sentences(text)) if text else []
        if isinstance(mask, Lines):
            return text, masking.line_ranges(mask, key, text)
        assert isinstance(mask, Spans) and self.columns.spans is not None
        spans = require(values, self.columns.spans)
        if not isinstance(spans, list | tuple):
            raise masking.bad_mask(f"{self.columns.spans!r} must be a list of [start, end) pairs")
        return text, masking.merge([_pair(item, self.columns.spans) for item in spans], len(text))

    def _without_ranges(self, text: str, ranges: Sequence[Range]) -> Canvas:
        if not self._tokenizer().joins:
            return self._without_overlapping(text, ranges)
        pieces: list[Piece] = []
        shown = 0
        for start, end in ranges:
            pieces += [text[shown:start], self._encode(text[start:end])]
            shown = end
        return self._join([*pieces, text[shown:]])

    def _without_overlapping(self, text: str, ranges: Sequence[Range]) -> Canvas:
        ids, offsets = self._tokenizer().offsets(text)
        tokens = check_ids(ids, self.info)
        where = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        covered = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in ranges:
            covered |= (where[:, 0] < end) & (where[:, 1] > start)
        return self._canvas(np.where(covered, np.int32(HOLE), tokens), tokens[covered])


def finish_row(
    canvas: Canvas, tokens: NDArray[np.int32], tokenizer: Tokenizer | None, *, skip_special: bool = False
) -> tuple[str | None, list[dict[str, Any]]]:
    """Put the generated `tokens` (in canvas order) into the holes; returns the whole text and each hole's text, None without a
    tokenizer.

    With `skip_special`, generated special tokens have no text; special tokens of the row keep theirs.
    A character whose bytes are on both sides of a hole's edge appears as U+FFFD in the fill's text, but not in the whole.
    """
    filled = canvas.tokens.copy()
    assert len(tokens) == canvas.num_masked, "one generated token for each masked position"
    holes = filled == HOLE
    filled[holes] = tokens
    shown = np.ones(len(filled), dtype=np.bool_)
    if skip_special and tokenizer is not None:
        shown = ~(holes & np.isin(filled, list(tokenizer.special)))

    def text(start: int, end: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode(filled[start:end][shown[start:end]].tolist())

    fills = [{"start": start, "end": end, "text": text(start, end)} for start, end in canvas.holes]
    return text(0, len(filled)), fills


def runs(hidden: NDArray[np.bool_]) -> Iterator[Range]:
    """Yield the maximal [start, end) ranges in which `hidden` is true."""
    edges = np.flatnonzero(np.diff(hidden.astype(np.int8), prepend=0, append=0))
    yield from ((start, end) for start, end in edges.reshape(-1, 2).tolist())


def _own_sentences(values: Values, column: str, separator: str) -> tuple[str, list[Range]]:
    given = require(values, column)
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
        raise RowError("bad_row", "read", f"{column!r} must be a list of strings")
    ranges, start = [], 0
    for sentence in given:
        ranges.append((start, start + len(sentence)))
        start += len(sentence) + len(separator)
    return check_text(separator.join(given), column), ranges


def _pair(item: Any, column: str) -> Range:
    if isinstance(item, Mapping):
        item = (item.get("start"), item.get("end"))
    if not isinstance(item, list | tuple) or len(item) != 2 or not all(is_id(number) for number in item):
        raise masking.bad_mask(f"{item!r} in {column!r} is not a [start, end) pair of characters")
    return int(item[0]), int(item[1])
