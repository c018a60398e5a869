"""Turns an input row into a canvas that a model continues or scores. Pure: no files, no model.

    complete   | lead  prompt | _ _ _ _ _ |                 holes: up to max_new_tokens, as many as the model has room for
    score      | lead  prompt | completion |                score_from: the completion's first token
    score      | begin        | text       |                without a prompt: after the begin token

What a mask hides of a text is scored by other canvases (ScoreMaker in makers.py).

An OpenAI request says itself whether it is a conversation; for other rows, the task does.
`lead` are the special tokens that transformers' `tokenizer(text)` puts before a text. The tokenizer's chat template renders
a conversation with every special token spelled out; they are then parsed wherever they occur.

Prompts that are too long for the model are cut on one side (`input.truncate`). Of a b c d e f g h, four are kept:

    left     e f g h        right    a b c d        middle    a b g h

Begin tokens stay in front. In a chat, the texts of messages are cut, never the rendered prompt, which would lose the beginning of
the template or the header of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.canvas import Canvas, Size
from draftmill.actors.rows.row import (
    STAGE,
    Messages,
    Values,
    check_ids,
    check_length,
    check_scored,
    checked_text,
    given_ids,
    prompt_of,
    scored_text,
)
from draftmill.actors.rows.row_settings import Asked, RowRules
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Complete, Score, Side
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.storage.errors import RowError

IDS = NDArray[np.int32]

MORE_ROUNDS = 8
"""Cutting a text changes the tokens at its edge, so a few tokens may remain to be cut in another round."""


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Everything that the canvas of a completion, or of a text to score, depends on, except the row.

    With `notes_beginnings`, sizes say how the canvas begins.
    """

    task: Complete | Score
    columns: Columns
    tokenizer: Tokenizer | None
    info: ModelInfo
    truncate: Side | None = None
    rules: RowRules | None = field(default=None, kw_only=True)
    notes_beginnings: bool = field(default=False, kw_only=True)

    def make(self, values: Values, key: int) -> Canvas:
        """Return the row's canvas; RowError if the row has none, or does not fit decoder or model. Does not use `key`."""
        asked = Asked() if self.rules is None else self.rules.asked(values)
        if not isinstance(self.task, Complete):
            return replace(self._scored(values), endpoint=asked.endpoint)
        canvas = self._completed(values, self.task, asked)
        if self.rules is None:
            return canvas
        settings, stops = self.rules.settings(asked)
        return replace(canvas, settings=settings, stops=stops, endpoint=asked.endpoint)

    def sizes(self, rows: Sequence[tuple[Values, int]]) -> list[Size | RowError]:
        """Return the size of each row's canvas, or its error; rows are (values, key)."""
        return [self._size(values, key) for values, key in rows]

    def _size(self, values: Values, key: int) -> Size | RowError:
        try:
            canvas = self.make(values, key)
        except RowError as error:
            return error
        size = canvas.size
        if not self.notes_beginnings:
            return size
        end = canvas.holes[0][0] if canvas.holes else size.length
        return Size(size.length, size.masked, canvas.tokens[:end].copy())  # without the holes, which may be many

    # ---- canvases

    def _completed(self, values: Values, task: Complete, asked: Asked) -> Canvas:
        chat = task.chat if asked.chat is None or self._names_prompts else asked.chat
        prompt = self._given(values) if self.columns.tokens is not None else self._prompt(values, chat=chat)
        self._check_prompt(prompt)
        most, room = self.info.max_length, asked.max_new_tokens or task.max_new_tokens
        whole = len(prompt)
        if most is not None:
            prompt = self._cut(values, prompt, prompt_room(most, room), chat=chat)
            room = min(room, most - len(prompt))
        if room < 1:
            raise RowError(
                "too_long", STAGE, f"a prompt of {len(prompt)} tokens leaves no room; the model's limit is {most}"
            )
        holes = ((len(prompt), len(prompt) + room),)
        tokens = np.append(prompt, np.full(room, HOLE, dtype=np.int32))
        return Canvas(tokens, holes, truncated=whole - len(prompt))

    def _check_prompt(self, prompt: NDArray[np.int32]) -> None:
        """Reject an empty prompt (causal models), or a prompt with the mask token (masked models), which would be filled."""
        mask = self.info.mask_id
        if mask is None and not len(prompt):
            raise RowError("empty_prompt", STAGE, "the prompt has no tokens, not even a begin token")
        if mask is not None and bool((prompt == mask).any()):
            raise RowError("bad_tokens", STAGE, f"id {mask} is the model's mask, which is not allowed in a prompt")

    def _scored(self, values: Values) -> Canvas:
        if self.columns.tokens is not None:
            return self._scored_ids(self._given(values), values)
        text, is_completion = scored_text(values, self.columns)
        if self.task.chat:
            prompt = self._prompt(values, chat=True)
        else:
            has_prompt = self.columns.prompt is not None or (is_completion and values.get("prompt") is not None)
            before = self._plain(values) if has_prompt else ""
            if before and not self._tokenizer().joins:
                return self._scored_at_once(before, text)
            prompt = self._begun(before)
        scored, whole = self._checked(self._tokenizer().encode(text)), len(prompt)
        if self.info.max_length is not None:
            prompt = self._cut(values, prompt, self.info.max_length - len(scored), chat=self.task.chat)
        canvas = self._behind(np.append(prompt, scored), len(prompt), text)
        return replace(canvas, truncated=whole - len(prompt))

    def _scored_ids(self, ids: NDArray[np.int32], values: Values) -> Canvas:
        """The row's own tokens; with a reference, these are the prompt and the reference's ids are scored."""
        if self.columns.reference is None:
            return self._behind(ids, 0, None)
        scored, whole = given_ids(values, self.columns.reference, self.info, nulls=False), len(ids)
        if self.info.max_length is not None:
            ids = self._cut(values, ids, self.info.max_length - len(scored), chat=False)
        return replace(self._behind(np.append(ids, scored), len(ids), None), truncated=whole - len(ids))

    def _behind(self, tokens: NDArray[np.int32], start: int, text: str | None) -> Canvas:
        """Score from `start` on; under a causal model a first token without a predecessor has no probability: it is given."""
        check_length(len(tokens), self.info)
        causal = self.info.kind == "causal"
        start, text = (1, None) if causal and not start else (start, text)
        if len(tokens) <= start:
            why = "no token of the text has a token before it" if causal else "the text has no token"
            raise RowError("empty_text", STAGE, f"there is nothing to score: {why}")
        check_scored(tokens, np.arange(start, len(tokens), dtype=np.int64), self.info)
        return Canvas(tokens, (), score_from=start, text=text)

    def _scored_at_once(self, before: str, text: str) -> Canvas:
        """For vocabularies that can't encode pieces: scores every token that contains a character of the text."""
        ids, offsets = self._tokenizer().offsets(before + text)
        lead = self._tokenizer().lead
        start = len(lead) + sum(end <= len(before) for _, end in offsets)
        tokens = self._checked([*lead, *ids])
        prompt, scored = tokens[:start], tokens[start:]
        if self.truncate is not None and self.info.max_length is not None:
            keep = max(len(lead), self.info.max_length - len(scored))
            prompt = cut_ids(prompt, keep, self.truncate, fixed=len(lead))
        canvas = self._behind(np.append(prompt, scored), len(prompt), text)
        return replace(canvas, truncated=start - len(prompt))

    # ---- prompts that are too long

    def _cut(self, values: Values, prompt: NDArray[np.int32], keep: int, *, chat: bool) -> NDArray[np.int32]:
        """The prompt cut to `keep` tokens; unchanged if it fits, if the spec forbids cutting, or if none of it would remain."""
        lead = () if self.tokenizer is None else self.tokenizer.lead
        if self.truncate is None or len(prompt) <= keep or keep <= len(lead):
            return prompt
        if chat and self.columns.tokens is None:
            return cut_chat(self._messages(values), keep, self.truncate, self._tokenizer(), self._chat_ids)
        fixed = len(lead) if tuple(prompt[: len(lead)].tolist()) == tuple(lead) else 0
        return cut_ids(prompt, keep, self.truncate, fixed=fixed)

    # ---- prompts

    @property
    def _names_prompts(self) -> bool:
        """Whether the spec names the prompt's column, which overrides a request's body."""
        return any((self.columns.prompt, self.columns.text, self.columns.messages))

    def _prompt(self, values: Values, *, chat: bool) -> NDArray[np.int32]:
        if not chat:
            return self._begun(self._plain(values))
        return self._chat_ids(self._messages(values))

    def _messages(self, values: Values) -> Messages:
        found = prompt_of(values, self.columns, self.task, chat=True)
        return [{"role": "user", "content": found}] if isinstance(found, str) else found

    def _chat_ids(self, messages: Messages) -> NDArray[np.int32]:
        return self._checked(self._tokenizer().parse(self._rendered(messages)))

    def _plain(self, values: Values) -> str:
        text = prompt_of(values, self.columns, self.task, chat=False)
        assert isinstance(text, str), "messages without a chat"
        return text

    def _begun(self, text: str) -> NDArray[np.int32]:
        """A prompt's ids like those of transformers' `tokenizer(text)`; an empty prompt is the begin token, if there is one."""
        tokenizer = self._tokenizer()
        if isinstance(self.task, Score) and self.info.kind == "any_subset":
            return self._checked(tokenizer.encode(text))  # as in texts with holes, which have no begin token
        ids = [*tokenizer.lead, *tokenizer.encode(text)]
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return self._checked(ids)

    def _rendered(self, messages: Messages) -> str:
        chat = self._tokenizer().chat
        if chat is None:
            # If every row has this error kind, it becomes an error of the spec.
            raise RowError(
                "missing_column", STAGE, "the row has messages, but the tokenizer has no chat template for them"
            )
        try:
            text = chat(messages, self.task.chat_date)
        except Exception as error:  # noqa: BLE001 - a template is the checkpoint's own program and may raise anything
            lacks = (
                "the chat template needs something that the messages lack: "
                if "Undefined" in type(error).__name__
                else ""
            )
            raise RowError("bad_messages", STAGE, f"{lacks}{type(error).__name__}: {error}"[:1000]) from None
        return checked_text(text, "messages")

    # ---- tokens

    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "the spec needs a tokenizer"
        return self.tokenizer

    def _given(self, values: Values) -> NDArray[np.int32]:
        assert self.columns.tokens is not None
        return given_ids(values, self.columns.tokens, self.info, nulls=False)

    def _checked(self, ids: Sequence[int]) -> NDArray[np.int32]:
        return check_ids(np.asarray(ids, dtype=np.int64), self.info)


# ---- cutting


def prompt_room(most: int, new: int) -> int:
    """The maximum prompt length that leaves room for `new` tokens in a model limited to `most`; at least half of `most`."""
    return most - min(new, most // 2)


def cut_ids(ids: IDS, keep: int, side: Side, *, fixed: int) -> IDS:
    """The ids cut down to `keep`; the first `fixed` are never cut. int32."""
    front, _, back = _sides(len(ids) - fixed, max(0, keep - fixed), side)
    return np.concatenate([ids[: fixed + front], ids[len(ids) - back :]])


def cut_text(text: str, excess: int, side: Side, tokenizer: Tokenizer) -> str:
    """The text without `excess` of its tokens; empty if it has no more than that."""
    _, offsets = tokenizer.offsets(text)
    front, _, back = _sides(len(offsets), max(0, len(offsets) - excess), side)
    begin = offsets[front - 1][1] if front else 0
    return text[:begin] + (text[max(begin, offsets[len(offsets) - back][0]) :] if back else "")


def _sides(count: int, keep: int, side: Side) -> tuple[int, int, int]:
    """How many of `count` are kept at the front, cut, and kept at the back."""
    keep = min(count, keep)
    front = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
    return front, count - keep, keep - front


def cut_chat(messages: Messages, keep: int, side: Side, tokenizer: Tokenizer, render: Callable[[Messages], IDS]) -> IDS:
    """The rendered conversation in at most `keep` tokens: cuts the longest text, then the next longest one.

    Cuts system messages last. RowError `too_long` if the template alone has more tokens.
    """
    ids = render(messages)
    for _ in range(len(messages) + MORE_ROUNDS):
        if len(ids) <= keep:
            return ids
        longest = _longest(messages, tokenizer)
        if longest is None:
            break
        shorter = cut_text(messages[longest]["content"], len(ids) - keep, side, tokenizer)
        messages = [
            message | {"content": shorter} if index == longest else message for index, message in enumerate(messages)
        ]
        ids = render(messages)
    if len(ids) <= keep:
        return ids
    raise RowError("too_long", STAGE, f"{len(ids)} tokens of chat template and short messages; at most {keep} fit")


def _longest(messages: Sequence[dict[str, object]], tokenizer: Tokenizer) -> int | None:
    """The message with the longest text, a system message only if no other has text; None if no message has text."""
    sizes = [
        (message.get("role") != "system", len(tokenizer.encode(content)), -index)
        for index, message in enumerate(messages)
        if isinstance(content := message.get("content"), str) and content
    ]
    return -max(sizes)[2] if sizes else None
