"""A sample of a block-diffusion model: a canvas that is revealed block after block, in any order inside of a block.

    position    0 1 2 3 | 4 5 6 7 | 8 9 10 11      block size 4, a prompt of 6, up to 3 new tokens
    holds       prompt  | p p _ _ | _ . .  .       the places after the canvas are masks too, and cut off at the end

Rank = column = position, and HOLE marks a remaining mask. Blocks begin at multiples of their size, so a prompt's tail lies in the
block that is filled first. The last block has full size where the model's length allows it, even if less of it was requested.

A completion ends as soon as all requested tokens are revealed, or all tokens before an end token or up to a stop string; tokens
revealed after it are dropped. With editing the block must be finished first, since its tokens may still change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from draftmill.decoders.base import HOLE, Outcome, TraceStep
from draftmill.decoders.engine.asks import Ask
from draftmill.decoders.engine.ends import LENGTH, ending
from draftmill.decoders.engine.samples import Sample

PREFILL, DRAFTED, VERIFY, COMMIT = range(4)
KINDS: Final = ("prefill", "draft", "verify", "commit")
"""The purposes of a forward."""


class Revealed(NamedTuple):
    """A token for a position, and its log-probability under the model itself."""

    position: int
    token: int
    log_p: float


class BlockSample(Sample):
    """See the module's docstring. `draws` counts drafting forwards: under the rejection rule each has random numbers of its
    own. Under coupled acceptance they are those of the step `number`, counted from the beginning of a block. `log_p_at` are
    log-probabilities by position, `kinds` forwards by purpose. `is_over`: nothing is left to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if HOLE in self.tokens[: self.prompt]:
            raise ValueError("block diffusion decodes from left to right: the holes must come after the prompt")
        self.kinds, self.draws, self.is_over = [0] * len(KINDS), 0, False
        self.number = 0
        self.log_p_at: list[float] = []

    def widen(self, length: int) -> None:
        """Begin with a canvas of this length, which may end after what was requested."""
        self.tokens += [HOLE] * (length - len(self.tokens))
        self.log_p_at = [0.0] * length

    def runs(self, kind: int, rows: Sequence[int], positions: Sequence[int], bank: int = 0) -> list[int]:
        """Sampled rows of one kind, and the positions that they speak of, as runs."""
        runs = list[int]()
        for row, position in zip(rows, positions, strict=True):
            if runs and row == runs[-6] + runs[-5] and position == runs[-4] + runs[-5]:
                runs[-5] += 1
            else:
                runs += (row, 1, position, kind, self.number, bank)
        return runs

    def forward(
        self, purpose: int, tokens: list[int], spans: Sequence[int], runs: Sequence[int], drafts: Sequence[int]
    ) -> Ask:
        self.kinds[purpose] += 1
        return Ask(tokens, spans, runs, drafts, when=self.draws)

    def reveal(self, news: Sequence[Revealed], proposed: Sequence[int] = (), *, stops: bool = True) -> None:
        """End an iteration: write what it reveals, in this order, up to the end of the completion (if it looks for stops)."""
        if self.may_clash and len(news) > 1:
            news = [news[index] for index in self.fitting([(new.position, new.token) for new in news])]
        if stops and self.can_stop:
            news = news[: self.until_end(news)]
        new = 0
        for position, token, log_p in news:
            self.tokens[position], self.log_p_at[position] = token, log_p
            if self.is_shaped:
                self.decide(position, token)
            self.logprob += log_p
            new += position < self.length
        self.decided += new
        self._close_iteration(new, 0, 0)
        self.show(news, proposed)

    def is_open(self, position: int) -> bool:
        return self.tokens[position] == HOLE

    def edit(self, news: Sequence[Revealed]) -> None:
        """Replace tokens that were revealed before; part of an iteration."""
        for position, token, log_p in news:
            self.tokens[position], self.log_p_at[position] = token, log_p
        if news:
            self.show(news)

    def skip_iteration(self) -> None:
        self._close_iteration(0, 0, 0)

    def show(self, news: Sequence[Revealed], proposed: Sequence[int] = ()) -> None:
        """Trace what was written, and the drafts that a verification judged."""
        if self.trace is not None:
            tokens, positions = [revealed.token for revealed in news], [revealed.position for revealed in news]
            self.trace.append(TraceStep(len(self.trace), self.nfe, list(proposed), tokens, positions))

    @property
    def is_complete(self) -> bool:
        """Whether a completion that is not edited has ended."""
        return self.end != LENGTH or self.decided >= self.length

    def until_end(self, news: Sequence[Revealed]) -> int:
        """The number of these tokens that are revealed until the completion ends; notes the end if it does."""
        pairs = [(position - self.prompt, token) for position, token, _ in news]
        end_at = ending(self.tokens[self.prompt :], pairs, self.stops)
        if end_at is None or self.prompt + end_at[1] > self.length:
            return len(news)
        count, kept, self.end = end_at
        self.length = self.prompt + kept
        return count

    def end_edited(self, start: int, end: int) -> None:
        """Look for an end in a finished block, from left to right."""
        if not self.can_stop:
            return
        start = max(start, self.prompt)
        tokens = self.tokens[start:end]
        self.tokens[start:end] = [HOLE] * len(tokens)
        self.until_end([Revealed(start + place, token, 0.0) for place, token in enumerate(tokens)])
        self.tokens[start:end] = tokens

    def outcome(self) -> Outcome:
        """See Sample; the log-probability is that of the tokens that stayed."""
        if not self.nfe:
            return super().outcome()
        self.decided = self.length
        if math.isfinite(self.logprob):
            self.logprob = sum(self.log_p_at[self.prompt : self.length])
        outcome = super().outcome()
        outcome.nfe_kinds = dict(zip(KINDS, self.kinds, strict=True))
        return outcome
