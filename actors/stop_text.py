"""What ends a completion: end tokens, and stop strings, which are looked for in the text as it grows.

A stop string may begin in one token and end in another, and a token may hold a part of a character only. So a completion is
looked at token by token: the first token behind which the text holds a stop string is the last one kept. Whether tokens come
one at a time or many at once, as drafts that were accepted, the same token is found. Special tokens that the row's text leaves
out (`task.skip_special_tokens`) are left out here, too.

    tokens   | d | ef f | (x): \\n  | \\n return |        stop "\\n\\n": the fourth completes it and is kept
    text     d  ef f  (x):                              the row's text ends in front of it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.fim import fills_in_middle, template_of
from actors.task import Complete, Infill, Task
from actors.text import Tokenizer
from decoders.base import ModelInfo
from decoders.engine.ends import Stops


class StopStrings:
    """Finds stop strings in generated tokens; see decoders.base.StopText."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special: bool = False) -> None:
        assert stops and all(stops), "a stop string has at least one character"
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stops = tuple(stops)
        # Up to three bytes without a character show as U+FFFD each, and become one character with the fourth.
        self._chars_before = 4 * max(map(len, stops))

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """How many of `tokens` to keep so that their text just holds a stop string; None where it has none."""
        start = self._window(tokens, num_checked)
        for count in range(num_checked + 1, len(tokens) + 1):
            text = self._text(tokens[start:count])
            if any(stop in text for stop in self._stops):
                return count
        return None

    def _window(self, tokens: Sequence[int], num_checked: int) -> int:
        """Where to begin so that every stop string that ends behind the tokens checked lies within what follows.

        Bytes that make up a character are decoded together, so the window does not begin inside a run of them.
        """
        step = self._chars_before // 2
        start = max(0, num_checked - step)
        while start > 0 and len(self._text(tokens[start:num_checked])) < self._chars_before:
            start, step = max(0, start - step), 2 * step
        while start > 0 and self._tokenizer.is_byte(tokens[start]):
            start -= 1
        return start

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.continuation(tokens, skip_special=self._skip_special)

    def cut(self, text: str) -> str:
        """The text in front of its stop string; of several the one that ends first, and of those the longest."""
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        return text[: min(found)[1]] if found else text


def end_ids(task: Task, folder: Path, tokenizer: Tokenizer | None, info: ModelInfo) -> tuple[int, ...]:
    """The end tokens of a completion, sorted: those of the checkpoint's generation config, and the tokenizer's.

    A hole that a causal model fills has them, too, and those that its way of filling in the middle has.
    """
    from decoders.backbones.checkpoint import stop_ids

    if isinstance(task, Infill) and fills_in_middle(task, info):
        own = template_of(task.fim, tokenizer, info).ends
    elif isinstance(task, Complete) and not task.ignore_eos:
        own = ()
    else:
        return ()
    if tokenizer is not None and tokenizer.eos_id is not None:
        own = (*own, tokenizer.eos_id)
    return tuple(sorted({token for token in (*stop_ids(folder), *own) if 0 <= token < info.vocab_size}))


def stop_strings(task: Task, tokenizer: Tokenizer | None) -> StopStrings | None:
    """What looks for the task's stop strings; None where it names none."""
    if not isinstance(task, Complete) or not task.stop:
        return None
    assert tokenizer is not None, "the spec asks for stop strings where there is no tokenizer"
    return StopStrings(tokenizer, task.stop, skip_special=task.skip_special_tokens)


def stops_of(task: Task, folder: Path, tokenizer: Tokenizer | None, info: ModelInfo) -> Stops | None:
    """All that ends a completion, or a hole that a causal model fills; None for tasks that have no such end."""
    if not isinstance(task, Complete) and not fills_in_middle(task, info):
        return None
    return Stops(end_ids(task, folder, tokenizer, info), stop_strings(task, tokenizer))
