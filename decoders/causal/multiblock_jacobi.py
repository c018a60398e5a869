"""`multiblock_jacobi`: Jacobi decoding of several blocks at once, with candidates from rejected drafts.

The undecided columns are cut into blocks of n. The first one not finished is *real-active*: only its tokens are committed. Up
to K - 1 *pseudo-active* blocks after it are refined on top of its drafts; tokens that no longer change are accepted
provisionally, held fixed, and verified again when the block is promoted. The newest block having ceil(r n) accepted tokens,
the next one opens. Candidates for the rest of the real-active block, from the sample's n-gram pool, are verified in the same
forward: at the same positions, in separate columns after the chain, with the decided prefix shared through visibility.

    columns     .. D-1 | D .. e-1      e .. e+n-1 ..  end-1 | end .. end+m-1  end+m ..
    hold        decided| real-active   pseudo-active        | candidate 1     candidate 2
    positions   the column itself                           | D .. e-1        D .. e-1
    sees        all columns up to itself                    | columns < D, and its own candidate up to itself

The chain of blocks is one run of drafts, so acceptance continues into the promoted block within the same forward that finished
the block before it. If a candidate wins, its tokens are committed. Their keys and values are in its columns, so the next
forward runs those tokens again in their own columns; this costs rows, not forwards.

Details that the paper leaves open: a pseudo-active block's first token is compared with the prediction of the last row before
the block; a new block starts with that row's token and then context tokens, not with a shifted copy of the real-active drafts.

`proposed` counts the drafts of the chain, not those of the candidates. A TraceStep shows the chain as `jacobi` shows its block:
the drafts of the real-active block, then those of the pseudo-active blocks (accepted tokens and drafts alike).

Source: pcLLM, Algorithm 1 and section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from draftmill.decoders.causal.autoregressive import prompt_but_one
from draftmill.decoders.causal.jacobi import fill_with_prompt
from draftmill.decoders.causal.ngram_pool import NgramPool
from draftmill.decoders.causal.settings import MultiblockJacobiSettings
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import FAR, NO_DRAFT, TARGET, Answer, Ask, Decoding, Run, Span
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


class Blocks:
    """Which blocks of a sample are open, and how many provisionally accepted tokens each pseudo-active one holds."""

    def __init__(self, s: Sample, n: int, most: int, spawn_at: int) -> None:
        self._s, self._n, self._most, self._spawn_at = s, n, most, spawn_at
        self.opened = 1
        self._held: dict[int, int] = {}

    @property
    def active(self) -> int:
        """The number of the real-active block."""
        return (self._s.decided - self._s.prompt) // self._n

    def end(self, opened: int) -> int:
        """The column after so many blocks; the canvas's last position is never fed."""
        return min(self._s.prompt + opened * self._n, self._s.length - 1)

    def holds(self, column: int) -> bool:
        """Whether the token in a column is provisionally accepted, and so stays."""
        block, place = divmod(column - self._s.prompt, self._n)
        return self.active < block < self.opened and place < self._held.get(block, 0)

    def hold(self, first: int, chain: list[int], drafts: list[int]) -> None:
        """Accept provisionally, in every pseudo-active block, the drafts that equal the chain's predictions.

        Both lists begin at the column `first` and are equally long.
        """
        same = [said == draft for said, draft in zip(chain, drafts, strict=True)]
        for block in range(self.active + 1, self.opened):
            start, held, count = self._s.prompt + block * self._n - first, self._held.get(block, 0), 0
            while count < self._n and (count < held or any(same[start + count : start + count + 1])):
                count += 1
            self._held[block] = count

    def open(self) -> None:
        """Open the next block where the newest one has enough accepted tokens; the real-active one is always open."""
        active = self.active
        self.opened = max(self.opened, active + 1)
        newest = self.opened - 1
        committed = self._s.decided - self._s.prompt - active * self._n
        accepted = committed if newest == active else self._held.get(newest, 0)
        if accepted >= self._spawn_at and self.opened - active < self._most:
            self._held[self.opened] = 0
            self.opened += 1


@dataclass(frozen=True, slots=True)
class Line:
    """What the rows of a proposal say from the column D on, and how many of its drafts are accepted."""

    tokens: list[int]
    log_ps: list[float]
    accepted: int


def multiblock_jacobi(s: Sample, n: int, blocks: int, spawn_at: int, most: int, pool_size: int) -> Decoding:
    """Blocks of n tokens, at most `blocks` open; up to `most` candidates from a pool of `pool_size` runs."""
    fill_with_prompt(s)
    state, pool = Blocks(s, n, blocks, spawn_at), NgramPool(pool_size, longest=n * blocks)
    is_first = True
    while s.decided < s.length:
        d, active = s.decided, state.active
        end, num = state.end(state.opened), state.end(active + 1) - d
        drafts, before = s.tokens[d:end], s.tokens[d : end + 1]
        candidates: list[list[int]] = []
        # A new sample's pool is empty: it is not looked at.
        if most and not is_first:
            candidates = pool.candidates(s.tokens[d - 1], drafts[:num], most)
            s.nfe_draft += 1
        is_first = False
        answer = yield window(s, end, drafts, candidates)
        chain = Line(answer.tokens[: len(before)], answer.log_ps[: len(before)], answer.accepted)
        best = best_line(answer, chain, candidates, num)
        for place, token in enumerate(best.tokens):
            if not state.holds(d + place):
                s.tokens[d + place] = token
        s.commit(best.tokens, best.log_ps, best.accepted + 1, drafts, best.accepted, shown=len(drafts))
        # Beyond the chain's accepted drafts its columns hold the states of other tokens.
        s.cached = d + chain.accepted
        if most:
            # The committed tokens of the block that was real-active and the rejected ones after them are one run.
            pool.push(s.tokens[s.prompt + active * n : end + 1])
        state.hold(d, chain.tokens, before)
        state.open()


def window(s: Sample, end: int, drafts: list[int], candidates: list[list[int]]) -> Ask:
    """The chain in its own columns [cached, end), and the candidates behind it at the positions of the first drafts."""
    d, start = s.decided, s.cached
    tokens, judged = s.tokens[start:end], [*drafts, NO_DRAFT]
    spans: Sequence[int] = Span(end - start, start, start)
    runs: Sequence[int] = Run(d - 1 - start, end - d + 1, d, TARGET)
    for candidate in candidates:
        column, count = start + len(tokens), len(candidate)
        spans = (*spans, *Span(count, column, d, d, FAR, own=column))
        runs = (*runs, *Run(len(tokens), count, d + 1, TARGET))
        tokens, judged = tokens + candidate, judged + [NO_DRAFT] * count
    return Ask(tokens, spans, runs, judged)


def best_line(answer: Answer, chain: Line, candidates: list[list[int]], num: int) -> Line:
    """The line of the proposal with the most accepted tokens: the chain's, or the first of the best candidates.

    After the real-active block the line follows the chain.
    """
    best, first = chain, len(chain.tokens)
    for candidate in candidates:
        said = [chain.tokens[0], *answer.tokens[first : first + num]]
        accepted = next((place for place, token in enumerate(candidate) if token != said[place]), num)
        if accepted > best.accepted:
            log_ps = [chain.log_ps[0], *answer.log_ps[first : first + num]]
            best = Line(said + chain.tokens[num + 1 :], log_ps + chain.log_ps[num + 1 :], accepted)
        first += num
    return best


def algorithm(setup: Setup, settings: MultiblockJacobiSettings) -> Algorithm:
    """How the engine runs these settings."""
    n, most = settings.block_size, settings.verify_size - 1 if settings.pool_size else 0
    spawn_at = math.ceil(settings.spawn_ratio * n)
    return Algorithm(
        decode=partial(
            multiblock_jacobi, n=n, blocks=settings.blocks, spawn_at=spawn_at, most=most, pool_size=settings.pool_size
        ),
        window=n * settings.blocks + 1,
        columns=lambda length: length + most * n,
        reusable=prompt_but_one,
    )
