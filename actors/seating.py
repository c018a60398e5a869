"""The order in which a unit's samples come to the decoder: longest first, and those that begin alike after one another.

Groups (beginnings.py) are ordered by their longest sample, and so are the samples of a group. It changes no result, only what is
computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actors.beginnings import grouped
from actors.samples import Sample, length_of


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, each with a canvas, in the order in which they shall be admitted."""
    ranked = sorted(samples, key=lambda sample: (-length_of(sample), sample.index))
    canvases = [_canvas(sample) for sample in ranked]
    by_text = sorted(range(len(ranked)), key=lambda number: canvases[number].tobytes())
    shared = [common(canvases[one], canvases[other]) for one, other in pairwise(by_text)]
    length = np.array([len(canvas) for canvas in canvases], dtype=np.int64)
    found = grouped(np.array(by_text, np.int64), np.array(shared, np.int64), length, np.arange(len(ranked)))
    return [ranked[number] for number in found.order.tolist()]


def common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many leading tokens two canvases have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _canvas(sample: Sample) -> NDArray[np.int32]:
    assert sample.canvas is not None, "a row without a canvas is not decoded"
    return sample.canvas
