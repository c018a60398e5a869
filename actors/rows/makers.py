"""Selects the maker that turns the rows of a task into canvases: holes, prompts, holes to score, holes to fill in the middle.

    complete   | lead  prompt | _ _ _ _ _ |                 holes: up to max_new_tokens, as many as the model has room for
    score      | lead  prompt | completion |                score_from: the completion's first token
    score      | begin        | text       |                without a prompt: after the begin token

An OpenAI request says itself whether it is a conversation; for other rows, the task does.
`lead` are the special tokens that transformers' `tokenizer(text)` puts before a text. The tokenizer's chat template renders
a conversation with every special token spelled out; they are then parsed wherever they occur.

Prompts that are too long for the model are cut on one side (`input.truncate`). Of a b c d e f g h, four are kept:

    left     e f g h        right    a b c d        middle    a b g h

Begin tokens stay in front. In a chat, the texts of messages are cut, never the rendered prompt, which would lose the beginning of
the template or the header of the answer. Pure: no files, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.canvas import Canvas, CanvasMaker, CanvasSize, RowMaker, runs
from draftmill.actors.rows.constraints import ConstraintMaker
from draftmill.actors.rows.fim import IDS, Infilling, Template, fills_in_middle, template_of
from draftmill.actors.rows.masking import Range, masked_positions
from draftmill.actors.rows.prompts import own_columns, prompter_of
from draftmill.actors.rows.row import (
    Messages,
    Values,
    check_ids,
    check_length,
    check_scored,
    check_text,
    given_ids,
    prompt_of,
    scored_text,
    text_of,
    token_error,
)
from draftmill.actors.rows.row_settings import OwnSettings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import (
    Complete,
    ConstraintSettings,
    Infill,
    Marker,
    Score,
    Side,
    SpanFraction,
    Spans,
    Task,
)
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.storage.inputs.kept import plain

MORE_ROUNDS = 8
"""Cutting a text changes the tokens at its edge, so a few tokens may remain to be cut in another round."""


@dataclass(frozen=True, kw_only=True)
class PromptMaker(RowMaker):
    """Makes the canvas of a completion, or of a text to score; where beginnings are shared, sizes say how the canvas begins."""

    task: Complete | Score

    def _make(self, values: Values, key: int, own: OwnSettings) -> Canvas:
        if isinstance(self.task, Complete):
            return self._complete(values, self.task, own)
        return self._score(values, own)

    def size(self, values: Values, key: int) -> CanvasSize:
        canvas = self.make(values, key)
        size = canvas.size
        if not shares_beginnings(self.task, self.info):
            return size
        end = canvas.holes[0][0] if canvas.holes else size.length
        return CanvasSize(size.length, size.masked, canvas.tokens[:end].copy())  # without the holes, which may be many

    # ---- canvases

    def _complete(self, values: Values, task: Complete, own: OwnSettings) -> Canvas:
        names_prompts = any(
            (self.columns.prompt, self.columns.text, self.columns.messages)
        )  # overrides a request's body
        chat = task.chat if own.chat is None or names_prompts else own.chat
        if self.columns.tokens is not None:
            prompt = given_ids(values, self.columns.tokens, self.info, nulls=False)
        else:
            prompt = self._chat_ids(self._messages(values), own) if chat else self._begin(self._plain(values))
        mask = self.info.mask_id
        if mask is None and not len(prompt):
            raise token_error("empty_prompt", "the prompt has no tokens, not even a begin token")
        if mask is not None and bool((prompt == mask).any()):  # it would be filled
            raise token_error("bad_tokens", f"id {mask} is the model's mask, which is not allowed in a prompt")
        most, room = self.info.max_length, own.max_new_tokens or task.max_new_tokens
        whole = len(prompt)
        if most is not None:
            prompt = self._cut(values, prompt, prompt_room(most, room), own if chat else None)
            room = min(room, most - len(prompt))
        if room < 1:
            reason = f"a prompt of {len(prompt)} tokens leaves no room; the model's limit is {most}"
            raise token_error("too_long", reason)
        holes = ((len(prompt), len(prompt) + room),)
        tokens = np.append(prompt, np.full(room, HOLE, dtype=np.int32))
        return Canvas(tokens, holes, truncated=whole - len(prompt))

    def _score(self, values: Values, own: OwnSettings) -> Canvas:
        if self.columns.tokens is not None:
            return self._score_ids(given_ids(values, self.columns.tokens, self.info, nulls=False), values)
        text, is_completion = scored_text(values, self.columns)
        if self.task.chat:
            prompt = self._chat_ids(self._messages(values), own)
        else:
            has_prompt = self.columns.prompt is not None or (is_completion and values.get("prompt") is not None)
            before = self._plain(values) if has_prompt else ""
            if before and not self._tokenizer().joins:
                return self._score_at_once(before, text)
            prompt = self._begin(before)
        scored, whole = self._encode(text), len(prompt)
        if self.info.max_length is not None:
            prompt = self._cut(values, prompt, self.info.max_length - len(scored), own if self.task.chat else None)
        return self._behind(np.append(prompt, scored), len(prompt), text, whole - len(prompt))

    def _score_ids(self, ids: NDArray[np.int32], values: Values) -> Canvas:
        """The row's own tokens; with a reference, these are the prompt and the reference's ids are scored."""
        if self.columns.reference is None:
            return self._behind(ids, 0, None)
        scored, whole = given_ids(values, self.columns.reference, self.info, nulls=False), len(ids)
        if self.info.max_length is not None:
            ids = self._cut(values, ids, self.info.max_length - len(scored))
        return self._behind(np.append(ids, scored), len(ids), None, whole - len(ids))

    def _behind(self, tokens: NDArray[np.int32], start: int, text: str | None, truncated: int = 0) -> Canvas:
        """Score from `start` on; under a causal model a first token without a predecessor has no probability: it is given."""
        check_length(len(tokens), self.info)
        causal = self.info.kind == "causal"
        start, text = (1, None) if causal and not start else (start, text)
        if len(tokens) <= start:
            why = "no token of the text has a token before it" if causal else "the text has no token"
            raise token_error("empty_text", f"there is nothing to score: {why}")
        check_scored(tokens, np.arange(start, len(tokens), dtype=np.int64), self.info)
        return Canvas(tokens, (), score_from=start, text=text, truncated=truncated)

    def _score_at_once(self, before: str, text: str) -> Canvas:
        """For vocabularies that can't encode pieces: scores every token that contains a character of the text."""
        ids, offsets = self._tokenizer().offsets(before + text)
        lead = self._tokenizer().lead
        start = len(lead) + sum(end <= len(before) for _, end in offsets)
        tokens = check_ids([*lead, *ids], self.info)
        prompt, scored = tokens[:start], tokens[start:]
        if self.recipe.truncate is not None and self.info.max_length is not None:
            keep = max(len(lead), self.info.max_length - len(scored))
            prompt = cut_ids(prompt, keep, self.recipe.truncate, fixed=len(lead))
        return self._behind(np.append(prompt, scored), len(prompt), text, start - len(prompt))

    # ---- prompts that are too long

    def _cut(
        self, values: Values, prompt: NDArray[np.int32], keep: int, chat: OwnSettings | None = None
    ) -> NDArray[np.int32]:
        """The prompt cut to `keep` tokens; unchanged if it fits, if the spec forbids cutting, or if none of it would remain.

        `chat` are the row's settings if the prompt is a conversation, else None.
        """
        lead = () if self.tokenizer is None else self.tokenizer.lead
        if self.recipe.truncate is None or len(prompt) <= keep or keep <= len(lead):
            return prompt
        if chat is not None and self.columns.tokens is None:
            render = partial(self._chat_ids, own=chat)
            return cut_chat(self._messages(values), keep, self.recipe.truncate, self._tokenizer(), render)
        fixed = len(lead) if tuple(prompt[: len(lead)].tolist()) == tuple(lead) else 0
        return cut_ids(prompt, keep, self.recipe.truncate, fixed=fixed)

    # ---- prompts

    def _messages(self, values: Values) -> Messages:
        prompt = prompt_of(values, self.columns, self.task, chat=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.prompter.surround(messages, values)

    def _chat_ids(self, messages: Messages, own: OwnSettings) -> NDArray[np.int32]:
        return check_ids(self._tokenizer().parse(self._render(messages, own)), self.info)

    def _plain(self, values: Values) -> str:
        text = prompt_of(values, self.columns, self.task, chat=False)
        assert isinstance(text, str), "messages without a chat"
        return text

    def _begin(self, text: str) -> NDArray[np.int32]:
        """A prompt's ids like those of transformers' `tokenizer(text)`; an empty prompt is the begin token, if there is one."""
        tokenizer = self._tokenizer()
        if isinstance(self.task, Score) and self.info.kind == "any_subset":
            return self._encode(text)  # as in texts with holes, which have no begin token
        ids = [*tokenizer.lead, *tokenizer.encode(text)]
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return check_ids(ids, self.info)

    def _render(self, messages: Messages, own: OwnSettings) -> str:
        chat = self._tokenizer().chat
        if chat is None:
            # If every row has this error kind, it becomes an error of the spec.
            raise token_error("missing_column", "the row has messages, but the tokenizer has no chat template for them")
        try:
            kwargs = plain(self.recipe.chat.template_kwargs) | own.template_kwargs
            text = chat(messages, self.task.chat_date, kwargs)
        except Exception as error:  # noqa: BLE001 - a template is the checkpoint's own program and may raise anything
            lacks = "the chat template needs something that the messages lack: "
            reason = f"{lacks if 'Undefined' in type(error).__name__ else ''}{type(error).__name__}: {error}"
            raise token_error("bad_messages", reason[:1000]) from None
        return check_text(text, "messages")


# ---- cutting


def prompt_room(most: int, new: int) -> int:
    """The maximum prompt length that leaves room for `new` tokens in a model limited to `most`; at least half of `most`."""
    return most - min(new, most // 2)


def cut_ids(ids: IDS, keep: int, side: Side, *, fixed: int) -> IDS:
    """The ids cut down to `keep`; the first `fixed` are never cut. int32."""
    front, back = _sides(len(ids) - fixed, max(0, keep - fixed), side)
    return np.concatenate([ids[: fixed + front], ids[len(ids) - back :]])


def cut_text(text: str, excess: int, side: Side, tokenizer: Tokenizer) -> str:
    """The text without `excess` of its tokens; empty if it has no more than that."""
    _, offsets = tokenizer.offsets(text)
    front, back = _sides(len(offsets), max(0, len(offsets) - excess), side)
    begin = offsets[front - 1][1] if front else 0
    return text[:begin] + (text[max(begin, offsets[len(offsets) - back][0]) :] if back else "")


def _sides(count: int, keep: int, side: Side) -> tuple[int, int]:
    """How many of `count` are kept at the front, and at the back."""
    keep = min(count, keep)
    front = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
    return front, keep - front


def cut_chat(messages: Messages, keep: int, side: Side, tokenizer: Tokenizer, render: Callable[[Messages], IDS]) -> IDS:
    """The rendered conversation in at most `keep` tokens: cuts the longest text, then the next longest one.

    Cuts system messages last. RowError `too_long` if the template alone has more tokens.
    """
    ids = render(messages)
    for _ in range(len(messages) + MORE_ROUNDS):
        longest = _longest(messages, tokenizer)
        if len(ids) <= keep or longest is None:
            break
        shorter = cut_text(messages[longest]["content"], len(ids) - keep, side, tokenizer)
        messages = [
            message | {"content": shorter} if index == longest else message for index, message in enumerate(messages)
        ]
        ids = render(messages)
    if len(ids) <= keep:
        return ids
    raise token_error("too_long", f"{len(ids)} tokens of chat template and short messages; at most {keep} fit")


def _longest(messages: Sequence[dict[str, object]], tokenizer: Tokenizer) -> int | None:
    """The message with the longest text, a system message only if no other has text; None if no message has text."""
    sizes = [
        (message.get("role") != "system", len(tokenizer.encode(content)), -index)
        for index, message in enumerate(messages)
        if isinstance(content := message.get("content"), str) and content
    ]
    return -max(sizes)[2] if sizes else None


Maker = RowMaker
DEFAULT_LIMIT: Final = 128


def maker_for(
    recipe: RowRecipe, tokenizer: Tokenizer | None, info: ModelInfo, *, constraints: ConstraintMaker | None = None
) -> RowMaker:
    """Return the maker of a job's canvases; without `constraints`, as in planning, they have none.

    Raises UserError if a causal model has to fill holes but lacks the special tokens for it.
    """
    task, rules = recipe.task, (recipe, tokenizer, info, constraints)
    reads: dict[str, Any] = {"columns": own_columns(recipe), "prompter": prompter_of(recipe)}
    if isinstance(task, Infill) and fills_in_middle(task, info):
        return FimMaker(*rules, task=task, template=template_of(task.fim, tokenizer, info), **reads)
    if isinstance(task, Infill):
        return CanvasMaker(*rules, task=task, **reads)
    if isinstance(task, Score) and task.mask is not None:
        return ScoreMaker(*rules, task=task, **reads)
    return PromptMaker(*rules, task=task, **reads)


def shares_beginnings(task: Task, info: ModelInfo) -> bool:
    """Whether rows that begin alike belong into one unit, since a worker then computes what they have in common once.

    Causal models and block diffusion take over beginnings of prompts (Algorithm.reusable). Block diffusion's scores and masked
    diffusion take over nothing, any-subset models equal prompts only. Texts with holes don't begin with a prompt.
    """
    if isinstance(task, Complete):
        return info.kind in {"causal", "blocks"}
    return isinstance(task, Score) and task.mask is None and info.kind == "causal"


@dataclass(frozen=True, kw_only=True)
class ScoreMaker(CanvasMaker):
    """Makes canvases of which a mask's hidden tokens are scored, given all the others.

        text      "def f(x):\\n    return x\\n"      hidden by the mask: "    return x"
        canvas    [ 41  7  .. ] | [ 4 88 13 ] | [ 9 ]       scored: the positions of 4, 88 and 13

    The masks are those of infilling (canvas.py), so that the same rows are filled and scored.
    """

    def make(self, values: Values, key: int) -> Canvas:
        """Return the row's canvas; RowError if the row does not fit the mask or the model, or if nothing is hidden."""
        canvas = CanvasMaker.make(self, values, key)
        scored = np.flatnonzero(canvas.tokens == HOLE).astype(np.int64)
        if not len(scored):
            raise token_error("empty_text", "there is nothing to score: the mask hides no token")
        assert canvas.hidden is not None, "a hole whose text is unknown"
        tokens = canvas.tokens.copy()
        tokens[scored] = canvas.hidden
        check_scored(tokens, scored, self.info)
        return Canvas(tokens, canvas.holes, score_from=int(scored[0]), scored=scored, endpoint=canvas.endpoint)


@dataclass(frozen=True, kw_only=True)
class FimMaker(CanvasMaker):
    """Makes the holes of a causal model that fills in the middle.

    The masks are those of canvas.py, but the holes' lengths are unknown here: a hole ends with an end token, or at the limit
    given by `task.max_new_tokens` (by default DEFAULT_LIMIT) or by its own marker, such as `<mask:12>`.
    """

    task: Infill
    template: Template

    def _make(self, values: Values, key: int, own: OwnSettings) -> Canvas:
        """The canvas of the row's first hole, with the whole row; RowError if the row does not fit the mask or the model."""
        most = own.max_new_tokens or self.task.max_new_tokens or DEFAULT_LIMIT
        pieces, limits, rules = self._row(values, key, own, most)
        row = Infilling(self.template, tuple(pieces), tuple(limits), self.info.max_length)
        if row.room is not None and row.room < 1:
            reason = f"a hole of up to {max(limits)} tokens leaves no room for text"
            raise token_error("too_long", f"{reason}; the model takes {self.info.max_length}")
        tokens = row.ask([]).canvas
        return Canvas(tokens, tuple(runs(tokens == HOLE)), infilling=row, rules=rules)

    size = RowMaker.size  # of the longest canvas, which no mask alone tells

    def _row(
        self, values: Values, key: int, own: OwnSettings, most: int
    ) -> tuple[list[IDS], list[int], tuple[ConstraintSettings | None, ...]]:
        """The visible pieces, the maximum tokens of each hole, and the constraint that its marker names."""
        mask = self.task.mask
        if isinstance(mask, SpanFraction) or (isinstance(mask, Spans) and self.columns.spans is None):
            if self.columns.tokens is not None:
                ids = given_ids(values, self.columns.tokens, self.info, nulls=False)
            else:
                ids = self._encode(text_of(values, self.columns))
            hidden = np.zeros(len(ids), dtype=np.bool_)
            hidden[masked_positions(mask, key, len(ids))] = True
            ranges = list(runs(hidden))
            return [ids[start:end] for start, end in _visible(ranges, len(ids))], [most] * len(ranges), ()
        rules: tuple[ConstraintSettings | None, ...] = ()
        if isinstance(mask, Marker):
            texts, said = self._split_at_markers(mask, values, (most, most), own)
            limits, rules = [limit for (_, limit), _ in said], tuple(rule for _, rule in said)
        else:
            text, ranges = self._hidden_text(values, key)
            texts, limits = [text[start:end] for start, end in _visible(ranges, len(text))], [most] * len(ranges)
        behind = [check_ids(self._tokenizer().encode_behind(text), self.info) for text in texts[1:]]
        return [self._encode(texts[0]), *behind], limits, rules


def _visible(ranges: Sequence[Range], size: int) -> list[Range]:
    """The gaps before, between and after sorted, disjoint ranges: one more than there are ranges."""
    edges = [0, *(edge for pair in ranges for edge in pair), size]
    return list(zip(edges[::2], edges[1::2], strict=True))
