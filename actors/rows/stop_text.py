"""Finds the end of a completion: end tokens, and stop strings, which are searched in the growing text.

A stop string may begin in one token and end in another, and a token may hold only a part of a character. So a completion is
checked token by token: the first token after which the text contains a stop string is the last one kept. The result is the
same whether tokens come one at a time or many at once, as accepted drafts do. Special tokens that the row's text skips
(`task.skip_special_tokens`) are skipped here, too. A stop string that one of the first `min_new_tokens` tokens completes is an
ordinary text, as an end token there is none.

    tokens   | d | ef f | (x): \\n  | \\n return |        stop "\\n\\n": the fourth completes it and is kept
    text     d  ef f  (x):                              the row's text ends before it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftmill.actors.rows.fim import fills_in_middle, template_of
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Task
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops


class StopStrings:
    """Finds stop strings in generated tokens; see draftmill.decoders.base.StopText."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special: bool = False, min_new: int = 0
    ) -> None:
        assert stops and all(stops), "a stop string has at least one character"
        self._min_new = min_new
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stops = tuple(stops)
        # Up to three bytes of an incomplete character appear as U+FFFD each, and become one character with the fourth.
        self._chars_before = 4 * max(map(len, stops))

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """The smallest number of `tokens` whose text contains a stop string; None if there is none."""
        start = self._window(tokens, num_checked)
        known = self._chars(tokens[start : self._min_new])
        for count in range(max(num_checked, self._min_new) + 1, len(tokens) + 1):
            if self._first(self._text(tokens[start:count]), known):
                return count
        return None

    def _chars(self, tokens: Sequence[int]) -> int:
        """Characters of tokens, without an incomplete one at the end."""
        return len(self._text(tokens).rstrip("\ufffd")) if tokens else 0

    def _first(self, text: str, known: int) -> tuple[int, int] | None:
        """The end and start of the stop string that ends first behind `known` characters; of several, of the longest."""
        starts = ((text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self._stops)
        return min(((start + size, start) for start, size in starts if start >= 0), default=None)

    def _window(self, tokens: Sequence[int], num_checked: int) -> int:
        """The start of a window that contains every stop string that ends after the checked tokens.

        Bytes of one character are decoded together, so the window does not start inside a run of byte tokens.
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

    def cut(self, text: str, tokens: Sequence[int] = ()) -> str:
        """The text of `tokens` before its stop string; of several, the one that ends first, and of those the longest."""
        first = self._first(text, self._chars(tokens[: self._min_new]))
        return text[: first[1]] if first else text


def end_ids(task: Task, folder: Path, tokenizer: Tokenizer | None, info: ModelInfo) -> tuple[int, ...]:
    """The end tokens of a completion, sorted: those of the checkpoint's generation config and of the tokenizer.

    A hole that a causal model fills has the same end tokens, plus those of its fill-in-the-middle template.
    """
    from draftmill.decoders.backbones.checkpoint import stop_ids

    if isinstance(task, Infill) and fills_in_middle(task, info):
        own = template_of(task.fim, tokenizer, info).ends
    elif isinstance(task, Complete) and not task.ignore_eos:
        own = ()
    else:
        return ()
    if tokenizer is not None and tokenizer.eos_id is not None:
        own = (*own, tokenizer.eos_id)
    return tuple(sorted({token for token in (*stop_ids(folder), *own) if 0 <= token < info.vocab_size}))


def stop_strings(task: Task, sampling: Sampling, tokenizer: Tokenizer | None) -> StopStrings | None:
    """The search for the task's stop strings; None if it has none."""
    if not isinstance(task, Complete) or not task.stop:
        return None
    assert tokenizer is not None, "stop strings need a tokenizer"
    skips, min_new = task.skip_special_tokens, sampling.min_new_tokens
    return StopStrings(tokenizer, task.stop, skip_special=skips, min_new=min_new)


def stops_of(
    task: Task, sampling: Sampling, folder: Path, tokenizer: Tokenizer | None, info: ModelInfo
) -> Stops | None:
    """Everything that ends a completion, or a hole that a causal model fills; None for other tasks."""
    if not isinstance(task, Complete) and not fills_in_middle(task, info):
        return None
    return Stops(end_ids(task, folder, tokenizer, info), stop_strings(task, sampling, tokenizer))
