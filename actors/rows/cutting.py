"""Cuts prompts that are too long for the model (`input.truncate`). Pure: knows tokens and texts, no rows.

    side     of  a b c d e f g h, four are kept     cut off
    left     e f g h                                the beginning
    right    a b c d                                the end
    middle   a b g h                                the middle

Begin tokens stay in front. In a chat, the texts of messages are cut, never the rendered prompt, which would lose the beginning of
the template or the header of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.ids import STAGE
from draftmill.actors.rows.row import Messages
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Side
from draftmill.storage.errors import RowError

IDS = NDArray[np.int32]

MORE_ROUNDS = 8
"""Cutting a text changes the tokens at its edge, so a few tokens may remain to be cut in another round."""


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
