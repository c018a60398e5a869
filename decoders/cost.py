"""What a forward costs: seconds = a + b x tokens + c x kv_tokens, fitted to the forwards of the run itself.

Nothing is timed beforehand and nothing depends on a clock but the choice of how many tokens to draft (budget.py). Forwards are
kept in cells by their number of tokens, so that a shape that was met once is not forgotten among many of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_CELLS_PER_OCTAVE: Final = 4
_MEMORY: Final = 16
# A forward that took longer than this many times its cell's mean was held up by something else.
_OUTLIER: Final = 3.0
# From so many cells on, the keys that are read can be told from the tokens that are computed.
_CELLS_FOR_KEYS: Final = 5


@dataclass(slots=True)
class _Cell:
    """Running means of forwards of about one size."""

    num: int = 0
    tokens: float = 0.0
    kv_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        if self.num >= 3:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.num += 1
        share = max(1.0 / self.num, 1.0 / _MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.kv_tokens += share * (kv_tokens - self.kv_tokens)
        self.seconds += share * (seconds - self.seconds)


@dataclass(frozen=True, slots=True)
class Cost:
    """The three coefficients, in seconds, none of them negative."""

    base: float
    per_token: float
    per_kv_token: float

    def fixed(self, kv_tokens: float) -> float:
        """Seconds of a forward before its first token."""
        return self.base + self.per_kv_token * kv_tokens


class CostTable:
    """Forwards as they were timed, and the line through them."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._num_seen = 0
        self._cost: Cost | None = None

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Add one forward: rows computed, columns read (summed over its slots), seconds."""
        self._num_seen += 1
        if self._num_seen == 1 or tokens < 1:
            return  # The first forward allocates memory and chooses kernels.
        self._cells.setdefault(round(_CELLS_PER_OCTAVE * math.log2(tokens)), _Cell()).add(tokens, kv_tokens, seconds)
        self._cost = None

    def cost(self) -> Cost | None:
        """The fitted coefficients; None until two sizes have been met."""
        if self._cost is None and len(self._cells) > 1:
            self._cost = _fit(list(self._cells.values()))
        return self._cost


def _fit(cells: list[_Cell]) -> Cost:
    """Least squares of relative errors, each cell weighted by what it has seen lately."""
    features = np.array([[1.0, cell.tokens, cell.kv_tokens] for cell in cells])
    seconds = np.array([max(cell.seconds, 1e-9) for cell in cells])
    weights = np.sqrt([min(cell.num, _MEMORY) for cell in cells]) / seconds
    columns = [0, 1, 2] if len(cells) >= _CELLS_FOR_KEYS else [0, 1]
    found = _non_negative(features * weights[:, None], seconds * weights, columns)
    return Cost(*found.tolist())


def _non_negative(
    features: NDArray[np.float64], wanted: NDArray[np.float64], columns: list[int]
) -> NDArray[np.float64]:
    """Solve least squares over these columns; a negative coefficient is set to zero, the last column's first."""
    found = np.zeros(features.shape[1])
    while columns:
        scale = np.linalg.norm(features[:, columns], axis=0)
        scale[scale == 0.0] = 1.0
        solution = np.linalg.lstsq(features[:, columns] / scale, wanted, rcond=1e-9)[0] / scale
        if (solution >= 0.0).all():
            found[columns] = solution
            break
        columns = [column for column in columns if column != columns[int(np.flatnonzero(solution < 0.0)[-1])]]
    return found
