"""Where the holes go: pure choices over positions, lines and sentences, all drawn from the sample's own noise.

Legend: L tokens of the canvas. Every choice takes the places of least noise, so it is a function of the sample's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from actors.ids import STAGE
from actors.task import Lines, Marker, Random, Sentences, SpanFraction, Spans
from decoders.draws.keys import MASK, uniforms
from storage.errors import RowError

Range = tuple[int, int]
"""[start, end)"""

DEFAULT_SPAN = 16

_CLOSING = ">])}"
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
    """The characters of the sentences to hide, each with the white space in front of it; neighbours are one range.

    Vocabularies write a word with the space before it: a visible space at a hole's front would be followed by a second.
    """
    chosen = _chosen_sentences(mask, key, len(sentences))
    size = sentences[-1][1] if sentences else 0
    behind = [0, *(end for _, end in sentences)]
    ranges = [(behind[index] if index else sentences[0][0], sentences[index][1]) for index in chosen]
    return merged((piece for piece in ranges if piece[0] < piece[1]), size)


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


@lru_cache(maxsize=16)
def marker_pattern(marker: str) -> re.Pattern[str]:
    """Matches the marker; its one group is the length in the form `<mask:12>`, which needs a closing bracket."""
    if marker[-1] in _CLOSING and len(marker) > 1:
        return re.compile(rf"{re.escape(marker[:-1])}(|:\d+){re.escape(marker[-1])}")
    return re.compile(f"{re.escape(marker)}()")


def hole_length(written: str, mask: Marker) -> int:
    """Tokens of the hole whose marker says `written`: '' or ':12'."""
    if not written:
        return mask.length
    if len(written) > 10 or int(written[1:]) == 0:
        raise bad_mask(f"{mask.marker[:-1]}{written}{mask.marker[-1]}: a hole has at least one token")
    return int(written[1:])
