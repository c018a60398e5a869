"""The order in which a unit's samples come to the decoder: longest first, and those that begin alike after one another.

Groups (beginnings.py) are ordered by their longest sample, and so are the samples of a group. It changes no result, only what is
computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.planning.beginnings import grouped
from draftmill.actors.rows.samples import Sample, length_of
from draftmill.decoders.base import HOLE


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, each with a canvas, in the order in which they shall be admitted."""
    ranked = sorted(samples, key=lambda sample: (-length_of(sample), sample.index))
    begin = [_beginning(sample) for sample in ranked]
    by_text = sorted(range(len(ranked)), key=lambda number: begin[number].tobytes())
    shared = [common(begin[one], begin[other]) for one, other in pairwise(by_text)]
    length = np.array([len(tokens) for tokens in begin], dtype=np.int64)
    found = grouped(np.array(by_text, np.int64), np.array(shared, np.int64), length, np.arange(len(ranked)))
    return [ranked[number] for number in found.order.tolist()]


def common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many leading tokens two texts have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _beginning(sample: Sample) -> NDArray[np.int32]:
    """The tokens before the first one to generate, as the plan notes them: room for more is nothing that texts share."""
    assert sample.canvas is not None, "a row without a canvas is not decoded"
    holes = np.flatnonzero(sample.canvas == HOLE)
    return sample.canvas[: holes[0]] if len(holes) else sample.canvas
