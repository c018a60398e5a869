"""RowRecipe: what makes a canvas of a row, beside the model and its tokenizer. Planning, workers and `validate` share it."""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.actors.task import NO_CHAT, NO_PROMPT, Chat, Columns, Prompt, Side, Task
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings


@dataclass(frozen=True, slots=True)
class RowRecipe:
    """The keys of a spec that decide how rows are read, what their canvases are, and which settings a row may have.

    `prompt` has the rows of the examples in place of their file. `ends` are the end tokens of the checkpoint and the tokenizer,
    `truncate` is the side of a long prompt that is cut, None for none. `seed` is that of the samples' keys.
    """

    task: Task
    columns: Columns
    decoder: DecoderSettings
    sampling: Sampling
    ends: tuple[int, ...] = ()
    truncate: Side | None = None
    chunk_chars: int | None = None
    seed: int = 0
    prompt: Prompt = NO_PROMPT
    chat: Chat = NO_CHAT
