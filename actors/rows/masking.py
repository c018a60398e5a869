"""Chooses the positions, lines or sentences to mask, with noise from the sample's key. Pure.
Every choice takes the places with the least noise, so it is a function of the sample's key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.row import token_error
from draftmill.actors.task import (
    AUTO_LENGTHS,
    MOST_LENGTHS,
    ConstraintSettings,
    Lines,
    Random,
    Sentences,
    SpanFraction,
    Spans,
)
from draftmill.decoders.draws.keys import MASK, uniforms
from draftmill.storage.errors import RowError, list_names

Range = tuple[int, int]
"""[start, end)"""

DEFAULT_SPAN = 16

_CLOSING = ">])}"
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+")


def bad_mask(message: str) -> RowError:
    """The error of a row that does not fit the mask."""
    return token_error("bad_mask", message)


def least(key: int, choices: int, count: int) -> NDArray[np.int64]:
    """Return the `count` of `choices` places with the least noise, sorted."""
    if count >= choices:
        return np.arange(choices, dtype=np.int64)
    noise = uniforms(key, np.arange(choices, dtype=np.int64), MASK)
    return np.sort(np.argsort(noise, kind="stable")[:count]).astype(np.int64)


def round_share(share: float, total: int) -> int:
    """`share` of `total`, round_share half up, and at least one (but at most `total`)."""
    return min(total, max(1, int(share * total + 0.5)))


def masked_count(mask: Random | Spans | SpanFraction, length: int) -> int:
    """How many of L tokens such a mask hides; needs no noise. Raises RowError if the mask does not fit."""
    if length == 0:
        return 0
    if isinstance(mask, Random):
        return round_share(mask.rate, length)
    if isinstance(mask, SpanFraction):
        return round_share(mask.fraction, length)
    count, span = mask.count or 1, mask.length or DEFAULT_SPAN
    # At least one visible token separates two spans, or they would be one hole.
    if count * span + count - 1 > length:
        raise bad_mask(f"{count} separate spans of {span} tokens do not fit into {length} tokens")
    return count * span


def masked_positions(mask: Random | Spans | SpanFraction, key: int, length: int) -> NDArray[np.int64]:
    """Return which of L positions are hidden, sorted, int64 [masked_count]."""
    hidden = masked_count(mask, length)
    if isinstance(mask, Random) or hidden == 0:
        return least(key, length, hidden)
    if isinstance(mask, SpanFraction):
        return least(key, length - hidden + 1, 1)[0] + np.arange(hidden, dtype=np.int64)
    count, span = mask.count or 1, mask.length or DEFAULT_SPAN
    # Shrink each span and the token after it to one place: every choice of places is one choice of separate spans.
    places = least(key, length - count * span + 1, count)
    starts = places + np.arange(count, dtype=np.int64) * span
    return (starts[:, None] + np.arange(span, dtype=np.int64)).reshape(-1)


def line_ranges(mask: Lines, key: int, text: str) -> list[Range]:
    """The characters of the lines to hide, without their line ends; blank lines are never hidden."""
    lines = [match.span() for match in re.finditer(r"[^\r\n]*[^\s][^\r\n]*", text)]
    if not lines:
        return []
    count = round_share(mask.rate, len(lines)) if mask.rate is not None else mask.count or 1
    return [lines[index] for index in least(key, len(lines), count)]


def sentence_ranges(mask: Sentences, key: int, sentences: Sequence[Range]) -> list[Range]:
    """The characters of the sentences to hide, each with the white space before it; adjacent sentences form one range.

    Vocabularies encode a word with the space before it: a visible space before a hole would be followed by a second one.
    """
    chosen = _chosen_sentences(mask, key, len(sentences))
    size = sentences[-1][1] if sentences else 0
    behind = [0, *(end for _, end in sentences)]
    ranges = [(behind[index] if index else sentences[0][0], sentences[index][1]) for index in chosen]
    return merge((piece for piece in ranges if piece[0] < piece[1]), size)


def _chosen_sentences(mask: Sentences, key: int, total: int) -> list[int]:
    if mask.which == "middle":
        if total < 3:
            raise bad_mask(f"hiding the inner sentences needs at least 3 sentences; the row has {total}")
        return list(range(1, total - 1))
    if mask.which == "random":
        if total == 0:
            raise bad_mask("the row has no sentence to hide")
        return [int(index) for index in least(key, total, mask.count)]
    outside = [index for index in mask.which if not -total <= index < total]
    if outside:
        raise bad_mask(f"there is no sentence {outside[0]}; the row has {total} sentences")
    return sorted({index % total for index in mask.which})


def split_sentences(text: str) -> list[Range]:
    """The characters of each sentence, without the space between. A simple rule: a sentence ends at . ! ? before white space."""
    ranges: list[Range] = []
    start = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    for match in _SENTENCE_END.finditer(text, start, end):
        ranges.append((start, match.end() - len(match[0]) + len(match[0].rstrip())))
        start = match.end()
    return [*ranges, (start, end)] if start < end else ranges


def merge(ranges: Iterable[Range], size: int) -> list[Range]:
    """Sort ranges within [0, size) and join those that touch; RowError if one is empty or outside."""
    out: list[Range] = []
    for start, end in sorted(ranges):
        if not 0 <= start < end <= size:
            raise bad_mask(f"the span [{start}, {end}) is empty or outside the text of {size} characters")
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def split_at_markers(
    text: str, marker: str, default: Range, named: Mapping[str, ConstraintSettings] | None
) -> tuple[list[str], list[tuple[Range, ConstraintSettings | None]]]:
    """The texts around the holes; the fewest and the most tokens of each hole, `default` unless its marker says how many, and its
    constraint, one of those `named` (None: a marker may name any, and none is kept).

    RowError without a marker, and for what begins like one: a hole that stays in the text would be found too late.
    """
    pattern, begins = _marker_pattern(marker)
    pieces = pattern.split(text)
    for piece in pieces[::2]:
        if begins and begins in piece:
            raise bad_mask(f"{piece[piece.index(begins) :][:40]!r} begins like a marker, but has no end on its line")
    if len(pieces) == 1:
        raise token_error("marker_absent", f"the text has no marker {marker!r}")
    return pieces[::2], [_hole_of(written, default, named) for written in pieces[1::2]]


@lru_cache(maxsize=16)
def _marker_pattern(marker: str) -> tuple[re.Pattern[str], str]:
    """A pattern for the marker, whose one group is what it says of its hole, and how a marker begins that says something.

    `<mask>` may say a length, as in `<mask:12>`, `<mask:4-12>` or `<mask:auto>`, if it ends in a closing bracket, or the name of
    a constraint, as in `<mask:int>` or `<mask:int:4>`. In `{{...}}` the dots stand for a label before that: `{{age:int:4}}`.
    """
    head, _, tail = marker.partition("...")
    if not head or not tail:
        if marker[-1] not in _CLOSING or len(marker) == 1:
            return re.compile(f"{re.escape(marker)}()"), ""
        head, tail, colon = marker[:-1], marker[-1], ":"
    else:
        colon = ""
    inside = "." if head[0].isalnum() else rf"[^\n{re.escape(head[0])}]"
    says = f"{inside}*?" if not colon else f"(?::{inside}*?)?"
    return re.compile(f"{re.escape(head)}({says}){re.escape(tail)}"), head + colon


def _hole_of(
    written: str, default: Range, named: Mapping[str, ConstraintSettings] | None
) -> tuple[Range, ConstraintSettings | None]:
    """What a marker says of its hole: '', ':12', ':4-12', ':auto', ':int', 'age:int:12', or 'int', a label that is a name."""
    label, *parts = written.split(":")
    if not parts and (label == "auto" or label in (named or ())):
        label, parts = "", [label]
    lengths: Range | None = None
    rule: ConstraintSettings | None = None
    if not re.fullmatch(r"\w*", label):
        raise bad_mask(f"a marker says {written!r}; allowed: a label of letters and digits, then :12, :4-12 or a name")
    for part in parts:
        numbers = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if rule is None and part in (named or ()):
            rule = (named or {})[part]
        elif lengths is None and part == "auto":
            lengths = AUTO_LENGTHS
        elif lengths is None and numbers:
            lengths = int(numbers[1]), int(numbers[2] or numbers[1])
            if not 1 <= lengths[0] <= lengths[1] < lengths[0] + MOST_LENGTHS:
                raise bad_mask(
                    f"a marker says {part}; allowed: from 1 on, the fewer first, at most {MOST_LENGTHS} lengths"
                )
        elif named is not None or numbers or not re.fullmatch(r"\w+", part):
            names = f", and a name: {list_names(named)}" if named else ""
            raise bad_mask(f"a marker says {written!r}; allowed: a length, such as :12, :4-12 or :auto{names}")
    return lengths or default, rule
