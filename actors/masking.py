"""Where the holes go: pure choices over positions, lines and sentences, all drawn from the sample's own noise.

Legend: L tokens of the canvas. Every choice takes the places of least noise, so it is a function of the sample's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.task import Lines, Random, Sentences, SpanFraction, Spans
from decoders.noise import MASK, uniforms
from storage.errors import RowError

Range = tuple[int, int]
"""[start, end)"""

STAGE = "tokenize"
DEFAULT_SPAN = 16

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+")


def bad_mask(message: str) -> RowError:
    """The error of a row that its mask does not fit."""
    return RowError("bad_mask", STAGE, message)


def least(key: int, choices: int, count: int) -> NDArray[np.int64]:
    """Return the `count` of `choices` places with the least noise, sorted."""
    if count >= choices:
        return np.arange(choices, dtype=np.int64)
    noise = uniforms(key, np.arange(choices, dtype=np.int64), MASK)
    return np.sort(np.argsort(noise, kind="stable")[:count]).astype(np.int64)


def rounded(share: float, total: int) -> int:
    """Half up, and at least one of what there is."""
    return min(total, max(1, int(share * total + 0.5)))


def masked_count(mask: Random | Spans | SpanFraction, length: int) -> int:
    """How many of L tokens such a mask hides; known without any noise. Raises RowError where the mask does not fit."""
    if length == 0:
        return 0
    if isinstance(mask, Random):
        return rounded(mask.rate, length)
    if isinstance(mask, SpanFraction):
        return rounded(mask.fraction, length)
    count, span = mask.count or 1, mask.length or DEFAULT_SPAN
    # One visible token at least stands between two spans, or they would be one hole.
    if count * span + count - 1 > length:
        raise bad_mask(f"{count} separate spans of {span} tokens do not fit into {length} tokens")
    return count * span


def masked_positions(mask: Random | Spans | SpanFraction, key: int, length: int) -> NDArray[np.int64]:
    """Return the hidden ones of L positions, sorted, int64 [masked_count]."""
    hidden = masked_count(mask, length)
    if isinstance(mask, Random) or hidden == 0:
        return least(key, length, hidden)
    if isinstance(mask, SpanFraction):
        return least(key, length - hidden + 1, 1)[0] + np.arange(hidden, dtype=np.int64)
    count, span = mask.count or 1, mask.length or DEFAULT_SPAN
    # Shrink each span and the token behind it to one place: every choice of places is one choice of separate spans.
    places = least(key, length - count * span + 1, count)
    starts = places + np.arange(count, dtype=np.int64) * span
    return (starts[:, None] + np.arange(span, dtype=np.int64)).reshape(-1)


def line_ranges(mask: Lines, key: int, text: str) -> list[Range]:
    """The characters of the lines to hide, without their line ends; blank lines are never hidden."""
    lines = [found.span() for found in re.finditer(r"[^\r\n]*[^\s][^\r\n]*", text)]
    if not lines:
        return []
    count = rounded(mask.rate, len(lines)) if mask.rate is not None else mask.count or 1
    return [lines[index] for index in least(key, len(lines), count)]


def sentence_ranges(mask: Sentences, key: int, sentences: Sequence[Range]) -> list[Range]:
    """The characters of the sentences to hide; neighbours become one range, with what separates them."""
    chosen = _chosen_sentences(mask, key, len(sentences))
    ranges: list[Range] = []
    for position, index in enumerate(chosen):
        start, end = sentences[index]
        if position and chosen[position - 1] == index - 1:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return ranges


def _chosen_sentences(mask: Sentences, key: int, total: int) -> list[int]:
    if mask.which == "middle":
        if total < 3:
            raise bad_mask(f"the inner sentences are to be hidden, but there are only {total}; at least 3 are needed")
        return list(range(1, total - 1))
    if mask.which == "random":
        if total == 0:
            raise bad_mask("there is no sentence to hide")
        return [int(index) for index in least(key, total, mask.count)]
    outside = [index for index in mask.which if not -total <= index < total]
    if outside:
        raise bad_mask(f"there is no sentence {outside[0]}: the row has {total}")
    return sorted({index % total for index in mask.which})


def split_sentences(text: str) -> list[Range]:
    """The characters of each sentence, without the space between: a simple rule, ends are . ! ? before white space."""
    ranges: list[Range] = []
    start = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    for found in _SENTENCE_END.finditer(text, start, end):
        stop = found.end() - len(found[0]) + len(found[0].rstrip())
        ranges.append((start, stop))
        start = found.end()
    return [*ranges, (start, end)] if start < end else ranges


def merged(ranges: Iterable[Range], size: int) -> list[Range]:
    """Sort ranges within [0, size) and join those that touch; RowError where one is empty or lies outside."""
    out: list[Range] = []
    for start, end in sorted(ranges):
        if not 0 <= start < end <= size:
            raise bad_mask(f"the span [{start}, {end}) is empty or outside the text of {size} characters")
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
