"""Prompts that are too long for the model, cut to what fits (`input.truncate`). Pure: knows tokens and texts, no rows.

    side     of  a b c d e f g h, four are kept     what is cut away
    left     e f g h                                the beginning
    right    a b c d                                the end
    middle   a b g h                                what lies between

Begin tokens stay in front. Of a chat the texts of messages are cut, never the rendered prompt, which would lose the beginning of
the template, or the header of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.ids import STAGE
from actors.rows import Messages
from actors.task import Side
from actors.text import Tokenizer
from storage.errors import RowError

IDS = NDArray[np.int32]

MORE_ROUNDS = 8
"""Cutting a text changes how its edge is cut into tokens, so a few tokens may be left over to cut again."""


def prompt_room(most: int, new: int) -> int:
    """How many tokens of prompt leave room for `new` ones in a model that takes `most`; half of these at least."""
    return most - min(new, most // 2)


def cut_ids(ids: IDS, keep: int, side: Side, *, fixed: int) -> IDS:
    """The ids with as many cut away as makes them `keep`; the first `fixed` stay. int32."""
    front, _, back = _sides(len(ids) - fixed, max(0, keep - fixed), side)
    return np.concatenate([ids[: fixed + front], ids[len(ids) - back :]])


def cut_text(text: str, excess: int, side: Side, tokenizer: Tokenizer) -> str:
    """The text without `excess` of its tokens, or empty where it has no more."""
    _, offsets = tokenizer.offsets(text)
    front, _, back = _sides(len(offsets), max(0, len(offsets) - excess), side)
    begin = offsets[front - 1][1] if front else 0
    return text[:begin] + (text[max(begin, offsets[len(offsets) - back][0]) :] if back else "")


def _sides(count: int, keep: int, side: Side) -> tuple[int, int, int]:
    """How many of `count` are kept in front, cut, and kept behind."""
    keep = min(count, keep)
    front = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
    return front, count - keep, keep - front


def cut_chat(messages: Messages, keep: int, side: Side, tokenizer: Tokenizer, render: Callable[[Messages], IDS]) -> IDS:
    """The rendered conversation in `keep` tokens at most: the longest text is cut, then the next longest one.

    System messages are cut last. RowError, `too_long`, where the template alone has more tokens.
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
    raise RowError("too_long", STAGE, f"{len(ids)} tokens of chat template and short messages; {keep} leave room")


def _longest(messages: Sequence[dict[str, object]], tokenizer: Tokenizer) -> int | None:
    """The message with the longest text, one of the system's only where no other has any; None where none has."""
    sizes = [
        (message.get("role") != "system", len(tokenizer.encode(content)), -index)
        for index, message in enumerate(messages)
        if isinstance(content := message.get("content"), str) and content
    ]
    return -max(sizes)[2] if sizes else None
