"""A sample of masked diffusion: its canvas, whose masks are revealed in any order. Imports no torch.

    position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11        block_length 4, the first mask at 3
    block       0 0 0   0 0 0 0   1 1 1 1    2

Blocks begin at the first mask, so that those of a completion are those of the public code. Masks may be anywhere; positions
without one are never changed. A completion ends as soon as all tokens before an end token, or up to a stop string, are revealed;
tokens after it are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, EngineStats, Outcome, Request, TraceStep
from draftmill.decoders.engine.ends import EOS, STOP, Stops, ending
from draftmill.decoders.engine.looks import Pick
from draftmill.decoders.engine.samples import Sample, Spent, Times


class Canvas(Sample):
    """One request at work. `tokens` are those of the positions, HOLE at masks; `holes` are the positions of the masks, ascending.

    `canvas` are the tokens as an array; `size` is the length of a block, by default of the whole canvas. A decoder that wants
    columns copied after an answer sets `copies`: (from column, to column, count), one after the other.
    """

    __slots__ = ("canvas", "copies", "holes", "keep", "log_p_at", "origin", "size")

    def __init__(
        self,
        request: Request,
        order: list[int] | None,
        prompt: int,
        *,
        block_length: int | None,
        stops: Stops | None,
        times: Times,
        stats: EngineStats,
        traced: bool,
    ) -> None:
        super().__init__(request, order, prompt, stops=stops, times=times, stats=stats, traced=traced)
        self.holes = [position for position, token in enumerate(self.tokens) if token == HOLE]
        self.origin = self.holes[0] if self.holes else 0
        self.size = block_length or max(self.length, 1)
        self.canvas: NDArray[np.int64] = np.array(self.tokens, dtype=np.int64)
        self.copies: Sequence[int] = ()
        self.log_p_at: dict[int, float] = {}
        # How many tokens are kept of a completion that has ended.
        self.keep: int | None = None

    @property
    def revealed(self) -> int:
        """How many tokens were revealed: the number of the next step's draws."""
        return self.decided - self.prompt

    # ---- what decoders ask about ---------------------------------------------------------------------------------

    def block(self, position: int) -> int:
        """The block of a position."""
        return max(position - self.origin, 0) // self.size

    def end_of(self, block: int) -> int:
        """The position after the last one of a block."""
        return min(self.origin + (block + 1) * self.size, self.length)

    def next_masks(self) -> tuple[int, int, int]:
        """The masks that may come next, those of the first block that has any: from position, to position, how many."""
        end = self.end_of(self.block(self.holes[0]))
        return self.holes[0], end, bisect_left(self.holes, end)

    # ---- what decoders reveal ------------------------------------------------------------------------------------

    def reveal(self, picks: Sequence[Pick], proposed: int = 0, drafts: Sequence[int] = ()) -> None:
        """End an iteration: reveal these tokens in their order, fewer where the completion ends.

        All but the first of them count as accepted if any were `proposed`. `drafts` are shown in the trace.
        """
        count = self._until_end(picks)
        for _, position, token, log_p in picks[:count]:
            self.tokens[position] = self.canvas[position] = token
            self.log_p_at[position] = log_p
            self.logprob += log_p
        if count == 1:
            del self.holes[bisect_left(self.holes, picks[0][1])]
        else:
            self.holes = list(compress(self.holes, [self.tokens[position] == HOLE for position in self.holes]))
        if self.keep is not None:
            self.holes = []
        self.decided += count
        self._close_iteration(count, proposed, max(count - 1, 0) if proposed else 0)
        if self.trace is not None:
            tokens, positions = [pick[2] for pick in picks[:count]], [pick[1] for pick in picks[:count]]
            self.trace.append(TraceStep(len(self.trace), self.nfe, list(drafts), tokens, positions))

    def _until_end(self, picks: Sequence[Pick]) -> int:
        if self.end is None or not (self.stop_ids or self.stop_text):
            return len(picks)
        news = [(position - self.origin, token) for _, position, token, _ in picks]
        end = ending(self.tokens[self.origin :], news, Stops(tuple(self.stop_ids), self.stop_text))
        if end is None:
            return len(picks)
        count, self.keep, self.end = end
        assert self.end in (EOS, STOP), "a completion that ends early has a reason"
        return count

    # ---- the result ----------------------------------------------------------------------------------------------

    def _generated(self) -> tuple[list[int], list[float]]:
        positions = sorted(self.log_p_at)[: self.keep]
        return [self.tokens[at] for at in positions], [self.log_p_at[at] for at in positions]

    def outcome(self, spent: Spent | None) -> Outcome:
        """See Sample; of a completion that ended early only what is kept counts."""
        outcome = super().outcome(spent)
        if self.keep is not None and outcome.logprob is not None:
            outcome.logprob = sum(self._generated()[1])
        return outcome
