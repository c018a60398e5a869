"""Conversations as prompts: lm-evaluation-harness's few-shot examples and questions through the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from draftmill.storage.errors import UserError

END: Final = "END_OF_THE_GIVEN_ANSWER "
"""Marks the end of a begun answer while the template renders it; the trailing space shows whether the template trims."""

Chat = Callable[[list[dict[str, Any]]], str]
"""Renders a conversation up to the start of the model's answer."""


def rendered(chat: Chat, messages: Sequence[dict[str, Any]], *, begun: bool) -> str:
    """The conversation as a prompt; with `begun` the last message is the beginning of the answer, and the prompt ends with it.

    A template that refuses the conversation gets it without its system messages, as in lm_eval's `hf` model. UserError if that
    does not help.
    """
    try:
        return _rendered(chat, messages, begun)
    except Exception as error:  # noqa: BLE001 - a template is the checkpoint's own program and may raise anything
        others = [message for message in messages if message.get("role") != "system"]
        if len(others) == len(messages):
            raise _refused(error) from None
    try:
        return _rendered(chat, others, begun)
    except Exception as error:  # noqa: BLE001
        raise _refused(error) from None


def _rendered(chat: Chat, messages: Sequence[dict[str, Any]], begun: bool) -> str:
    if not begun:
        return chat(list(messages))
    last = messages[-1]
    text = chat([*messages[:-1], {**last, "content": last["content"] + END}])
    place = text.rindex(END.strip())
    trims = text[place : place + len(END)] != END
    return text[:place].rstrip() if trims else text[:place]


def _refused(error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(f"the tokenizer's chat template refuses a conversation: {reason}", field="--apply_chat_template")
