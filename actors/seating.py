"""The order in which a unit's samples come to the decoder: longest first, and those that begin alike after one another.

    examples question A end 1        one group: what its samples have in common is computed once (decoders/engine/prefixes.py)
    examples question A end 2
    examples question B end 1        inside of it again groups of what is still alike
    another text                     a group of its own

Groups are ordered by their longest sample, and so are the samples of a group. It changes no result, only what is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from actors.samples import Sample, length_of

LEAST: Final = 16
"""Samples begin alike if they have so many tokens in common, and at least half of the shorter one."""
LEVELS: Final = 8
"""Groups within groups, at most; a task has two or three."""


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, each with a canvas, in the order in which they shall be admitted."""
    by_text = sorted(samples, key=lambda sample: (_canvas(sample).astype(">u4").tobytes(), sample.index))
    return _ordered(by_text, 0, LEVELS)


def _ordered(by_text: list[Sample], known: int, levels: int) -> list[Sample]:
    """Order samples, sorted by their tokens, which all have the first `known` tokens in common."""
    if not levels:
        return sorted(by_text, key=_longest_first)
    found = [
        _ordered(group, common(_canvas(group[0]), _canvas(group[-1])), levels - 1) if len(group) > 1 else group
        for group in _groups(by_text, known)
    ]
    found.sort(key=lambda group: min(map(_longest_first, group)))
    return [sample for group in found for sample in group]


def _groups(by_text: list[Sample], known: int) -> Iterator[list[Sample]]:
    """Runs of samples of which each begins, behind what is known, like the one before it."""
    group = by_text[:1]
    for before, sample in pairwise(by_text):
        one, other = _canvas(before), _canvas(sample)
        more, rest = common(one, other) - known, min(len(one), len(other)) - known
        if more >= LEAST and 2 * more >= rest:
            group.append(sample)
        else:
            yield group
            group = [sample]
    if group:
        yield group


def common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many leading tokens two canvases have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _canvas(sample: Sample) -> NDArray[np.int32]:
    assert sample.canvas is not None, "a row without a canvas is not decoded"
    return sample.canvas


def _longest_first(sample: Sample) -> tuple[int, int]:
    return -length_of(sample), sample.index
