"""Which positions a forward with a cache runs: the whole canvas when the cache is rebuilt, else a window around its masks.

    block_length 4           position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    the cache is made                    x x x   x x x x   x x x x    x
    then, in the first block             . . .   x x x x   . . . .    .      `prefix` runs all after it too
    the first in the second block,
    where the cache is not rebuilt     . . .   x x x x   x x x x    .

Other positions are read from the cache. It is rebuilt at the start of each block; or, with `refresh`, after that many tokens,
wherever blocks begin. In the latter case a block that ended since the last forward runs once more, so that its last token is not
read as the mask that it was. A model with a shift reads a position from the row before it, so that row runs with the window.

Source: Wu et al., "Fast-dLLM" (2025), section 3.2, whose caches live as long as a block; the interval in tokens is that of the
SSD paper, section 4.1, which does not specify how to treat a finished block.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.decoders.engine.canvas_samples import Canvas

Run = tuple[int, int]
"""The positions from the first number up to the second."""


@dataclass(frozen=True, slots=True)
class Caching:
    """The cache's kind, after how many tokens it is rebuilt (None: at each block), and the model's shift."""

    kind: str = "none"
    refresh: int | None = None
    shift: int = 0


class Windows:
    """When the cache of a sample was made, and the windows that follow from it."""

    def __init__(self, s: Canvas, caching: Caching) -> None:
        self._s, self._caching = s, caching
        # The block of the last forward, -1 before the first; how many tokens were decided when the cache was made.
        self.last, self.made_at = -1, s.decided

    @property
    def shift(self) -> int:
        """A row speaks of the position that many after its own."""
        return self._caching.shift

    def window(self, block: int) -> Run:
        """What a forward in a block runs without rebuilding the cache."""
        start = self._s.origin + block * self._s.size
        return max(start - self._caching.shift, 0), (
            self._s.length if self._caching.kind == "prefix" else self._s.end_of(block)
        )

    def next_runs(self, block: int) -> list[Run]:
        """What the next forward runs, whose next masks are in `block`; from then on it counts as the last one."""
        last, self.last = self.last, block
        if self._caching.kind == "none":
            return [(0, self._s.length)]
        refresh = self._caching.refresh
        if last < 0 or (last != block if refresh is None else self.since() >= refresh):
            self.made_at = self._s.decided
            return [(0, self._s.length)]
        return self.between(last, block)

    def between(self, last: int, block: int) -> list[Run]:
        """What a forward in `block` runs after one in `last` where the cache is not rebuilt."""
        (first, middle), (start, end) = sorted((self.window(last), self.window(block)))
        return [(first, max(middle, end))] if start <= middle else [(first, middle), (start, end)]

    def since(self) -> int:
        """How many tokens were revealed since the cache was made."""
        return self._s.decided - self.made_at
