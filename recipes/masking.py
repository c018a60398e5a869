"""Which tokens of a training window are masked, and in which order they are decoded.

The order is the binary-lattice rule of any-subset models: the prompt positions first, then the masked positions from
left to right. Every draw comes from a generator seeded by (seed, step), so a step's batch does not depend on the steps
before it and an interrupted run needs no generator state.

Legend: B = windows, L = tokens of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.corpus import TokenStream

PATTERNS = ("random", "spans", "line_ends")
PATTERN_SHARES = (0.45, 0.35, 0.20)
MAX_SPANS = 4
LINE_START_SHARE = 0.5
MAX_STALE = 5


@dataclass(frozen=True)
class Windows:
    """A batch: token ids [B, L], masked [B, L] and, per position, how many ranks its query row sees [B, L]."""

    ids: NDArray[np.int64]
    masked: NDArray[np.bool_]
    limit: NDArray[np.int64]


@dataclass(frozen=True)
class MaskSchedule:
    """Prompt share m ~ U[low, high], reached from an easy start over `warmup` steps (masking-rate warm-up)."""

    low: float = 0.0
    high: float = 0.85
    start_low: float = 0.5
    start_high: float = 0.95
    warmup: int = 400
    stale_share: float = 0.12

    def shares(self, rng: np.random.Generator, step: int, count: int) -> NDArray[np.float64]:
        """Prompt shares of `count` windows, one in each of `count` equal strata: every batch covers the range."""
        progress = min(1.0, step / max(1, self.warmup))
        low = self.start_low + progress * (self.low - self.start_low)
        high = self.start_high + progress * (self.high - self.start_high)
        strata = (rng.permutation(count) + rng.random(count)) / count
        return low + (high - low) * strata


def decoding_ranks(masked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rank of every position [..., L]: prompt positions first, then masked ones, each from left to right."""
    prompt = ~masked
    num_prompt = prompt.sum(-1, keepdims=True)
    ranks = np.where(masked, num_prompt + np.cumsum(masked, -1) - 1, np.cumsum(prompt, -1) - 1)
    return ranks.astype(np.int64)


def draw_windows(stream: TokenStream, rng: np.random.Generator, *, count: int, length: int) -> NDArray[np.int64]:
    """Indices [B, L] into `stream`: windows inside one file, uniform over tokens, half of them from a line start."""
    sizes = np.diff(stream.bounds)
    long_enough = np.flatnonzero(sizes >= length)
    weights = (sizes[long_enough] - length + 1).astype(np.float64)
    chosen = long_enough[rng.choice(len(long_enough), size=count, p=weights / weights.sum())]
    first = stream.bounds[chosen]
    starts = first + (rng.random(count) * (sizes[chosen] - length + 1)).astype(np.int64)
    for row in np.flatnonzero(rng.random(count) < LINE_START_SHARE):
        starts[row] = _line_start_before(stream.line_starts, int(first[row]), int(starts[row]))
    index: NDArray[np.int64] = starts[:, None] + np.arange(length)
    return index


def _line_start_before(line_starts: NDArray[np.bool_], first: int, start: int) -> int:
    """The last line start in [first, start]; the file's first token is always one."""
    return first + int(np.flatnonzero(line_starts[first : start + 1])[-1])


def random_mask(rng: np.random.Generator, length: int, num_masked: int) -> NDArray[np.bool_]:
    """`num_masked` positions drawn without replacement."""
    masked = np.zeros(length, dtype=np.bool_)
    masked[rng.permutation(length)[:num_masked]] = True
    return masked


def span_mask(rng: np.random.Generator, length: int, num_masked: int) -> NDArray[np.bool_]:
    """`num_masked` positions in 1 to MAX_SPANS runs at random places (runs may touch)."""
    spans = min(int(rng.integers(1, MAX_SPANS + 1)), max(1, num_masked))
    sizes = _composition(rng, num_masked, spans)
    gaps = _composition(rng, length - num_masked, spans + 1)
    masked = np.zeros(length, dtype=np.bool_)
    position = 0
    for gap, size in zip(gaps, sizes, strict=False):
        masked[position + gap : position + gap + size] = True
        position += gap + size
    return masked


def _composition(rng: np.random.Generator, total: int, parts: int) -> NDArray[np.int64]:
    """`parts` non-negative integers that sum to `total`."""
    cuts = np.sort(rng.integers(0, total + 1, size=parts - 1))
    return np.diff(np.concatenate([[0], cuts, [total]]))


def line_end_mask(rng: np.random.Generator, line_starts: NDArray[np.bool_], num_masked: int) -> NDArray[np.bool_]:
    """Ends of lines, each from a random cut, line after line in random order, until `num_masked` positions are masked.

    Positions still missing when every line has lost its end are drawn at random.
    """
    length = len(line_starts)
    starts = np.union1d([0], np.flatnonzero(line_starts))
    ends = np.append(starts[1:], length)
    masked = np.zeros(length, dtype=np.bool_)
    for line in rng.permutation(len(starts)):
        cut = int(rng.integers(starts[line], ends[line]))
        room = num_masked - int(masked.sum())
        masked[cut : min(int(ends[line]), cut + room)] = True
    free = np.flatnonzero(~masked)
    masked[rng.permutation(free)[: num_masked - int(masked.sum())]] = True
    return masked


def draw_mask(
    rng: np.random.Generator, line_starts: NDArray[np.bool_], num_masked: int, pattern: str
) -> NDArray[np.bool_]:
    """A mask [L] of exactly `num_masked` positions; ValueError for an unknown pattern."""
    if pattern == "random":
        return random_mask(rng, len(line_starts), num_masked)
    if pattern == "spans":
        return span_mask(rng, len(line_starts), num_masked)
    if pattern == "line_ends":
        return line_end_mask(rng, line_starts, num_masked)
    raise ValueError(f"unknown mask pattern {pattern!r}")


def query_limits(rng: np.random.Generator, masked: NDArray[np.bool_], stale_share: float) -> NDArray[np.int64]:
    """How many ranks each position's query row sees: its own rank, or for a `stale_share` of the rows 1 to 5 fewer.

    A row always sees the prompt.
    """
    ranks = decoding_ranks(masked)
    lag = rng.integers(1, MAX_STALE + 1, size=masked.shape) * (rng.random(masked.shape) < stale_share)
    limit: NDArray[np.int64] = np.maximum(ranks - lag, (~masked).sum(-1, keepdims=True))
    return limit


def training_batch(
    stream: TokenStream, schedule: MaskSchedule, *, seed: int, step: int, count: int, length: int
) -> Windows:
    """The batch of one training step, a function of (seed, step) alone. At least one position of a window is masked."""
    rng = np.random.default_rng([seed, step])
    index = draw_windows(stream, rng, count=count, length=length)
    shares = schedule.shares(rng, step, count)
    patterns = rng.choice(PATTERNS, size=count, p=PATTERN_SHARES)
    masked = np.stack(
        [
            draw_mask(rng, stream.line_starts[index[row]], length - min(length - 1, int(shares[row] * length)), pattern)
            for row, pattern in enumerate(patterns)
        ]
    )
    return Windows(stream.ids[index], masked, query_limits(rng, masked, schedule.stale_share))
