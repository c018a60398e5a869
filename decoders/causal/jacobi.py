"""`jacobi`: every forward refines a block of drafts and commits those that equal the target's own tokens.

A forward runs the last decided token and the drafts after it, in the undecided columns, under plain causal visibility.
Drafts that equal the prediction of the row before them, from the first one on, are accepted, and so is the prediction after
them. The predictions of the other rows are the next drafts.

    column      .. D-1 | D   D+1  D+2  D+3          D tokens decided, four drafts
    tokens      .. the | cat sat  mat  .
    target says    cat | sat on   .    ""           for the column after: two drafts were right
    next        .. the   cat sat  on | .    ""      three tokens committed, the drafts after them replaced

Every forward commits at least one token, so there are never more forwards than in `autoregressive`. A token is
argmax(log p + g) with the noise g of its position: the fixed point is the sequential text at any temperature.

`window: fixed` finishes a block of n tokens before the next begins; `running` always keeps n drafts ahead. The token after a
fully accepted block is the next block's first. If a block ends with the token after the accepted drafts, the next block's n
drafts run in the same forward that finds its first token. The last position is never fed, since nothing comes after it.

A TraceStep holds, as `proposed`, the drafts as they were fed: the first at positions[0], the others after it, up to the end
of the block (or window, or the position before the canvas's last). With `window: fixed` block i is [P + i n, P + (i + 1) n)
for a prompt of P tokens. Its state in an iteration is what the steps before have committed of it, then `proposed`; the
block's first step shows the initial state, and the outcome's tokens the fixed point. A canvas of whole blocks and one token
more shows every state in full.

`multiblock_jacobi`: Jacobi decoding of several blocks at once, with candidates from rejected drafts. The undecided columns
are cut into blocks of n. The first one not finished is *real-active*: only its tokens are committed. Up to K - 1
*pseudo-active* blocks after it are refined on top of its drafts; tokens that no longer change are accepted provisionally,
held fixed, and verified again when the block is promoted. The newest block having ceil(r n) accepted tokens, the next one
opens. Candidates for the rest of the real-active block, from the sample's n-gram pool, are verified in the same forward, in
columns of their own.

    columns     .. D-1 | D .. e-1      e .. e+n-1 ..  end-1 | end .. end+m-1  end+m ..
    hold        decided| real-active   pseudo-active        | candidate 1     candidate 2
    positions   the column itself                           | D .. e-1        D .. e-1
    sees        all columns up to itself                    | columns < D, and its own candidate up to itself

The chain of blocks is one run of drafts, so acceptance continues into the promoted block within the forward that finished
the block before it. If a candidate wins, its tokens are committed, and the next forward runs them again in their own
columns: this costs rows, not forwards. `proposed` counts the drafts of the chain, which a TraceStep shows as `jacobi` shows
its block (accepted tokens and drafts alike), not those of the candidates.

Details that the paper leaves open: a pseudo-active block's first token is compared with the prediction of the last row before
the block; a new block starts with that row's token and then context tokens, not with a shifted copy of the real-active drafts.

Sources: Hu et al., "Fast and accurate causal parallel decoding using Jacobi forcing" (pcLLM), section 2 and figure 4 (running
window), Algorithm 1 and section 3.2 (several blocks, rejection recycling); Santilli et al., 2023; Fu et al., "Break the
sequential dependency of LLM inference using lookahead decoding", 2024 (the pool).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from draftmill.decoders.causal.settings import JacobiSettings, MultiblockJacobiSettings
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import FAR, NO_DRAFT, TARGET, Answer, Ask, Decoding, Run, Span
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


def jacobi(s: Sample, block_size: int, *, running: bool) -> Decoding:
    fill_with_prompt(s)
    last = s.length - 1
    while s.decided < s.length:
        d = s.decided
        end = min(d + block_size if running else s.prompt + ((d - s.prompt) // block_size + 1) * block_size, last)
        drafts = s.tokens[d:end]
        accepted, tokens, log_ps, _ = yield s.causal(end, end - d + 1, TARGET, [*drafts, NO_DRAFT])
        s.tokens[d : end + 1] = tokens
        s.cached = d + accepted
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted, shown=len(drafts))


def fill_with_prompt(s: Sample) -> None:
    """Fill every place that is open with a random token of the prompt, so that every window has drafts."""
    positions = np.arange(s.decided, s.length, dtype=np.int64)
    places = (keys.uniforms(s.key, positions, keys.JACOBI) * s.prompt).astype(np.int64)
    s.tokens[s.decided :] = [s.tokens[place] for place in places.tolist()]


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
        """The column after this number of blocks; the canvas's last position is never an input."""
        return min(self._s.prompt + opened * self._n, self._s.length - 1)

    def holds(self, column: int) -> bool:
        """Whether the token in a column is provisionally accepted, and so stays."""
        block, place = divmod(column - self._s.prompt, self._n)
        return self.active < block < self.opened and place < self._held.get(block, 0)

    def hold(self, first: int, chain: list[int], drafts: list[int]) -> None:
        """Accept provisionally, in every pseudo-active block, the drafts that equal the chain's predictions. Both lists begin
        at the column `first` and are equally long."""
        same = [prediction == draft for prediction, draft in zip(chain, drafts, strict=True)]
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


class Line(NamedTuple):
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
    """The line of the proposal with the most accepted tokens: the chain's, or the first of the best candidates. After the
    real-active block the line follows the chain."""
    best, first = chain, len(chain.tokens)
    for candidate in candidates:
        predicted = [chain.tokens[0], *answer.tokens[first : first + num]]
        accepted = next((place for place, token in enumerate(candidate) if token != predicted[place]), num)
        if accepted > best.accepted:
            log_ps = [chain.log_ps[0], *answer.log_ps[first : first + num]]
            best = Line(predicted + chain.tokens[num + 1 :], log_ps + chain.log_ps[num + 1 :], accepted)
        first += num
    return best


class NgramPool:
    """Token runs that one sample's iterations rejected: the last `size` different ones, the most recent first. Each has at most
    `longest` tokens."""

    def __init__(self, size: int, longest: int) -> None:
        self._size, self._longest = size, longest
        self._runs: list[list[int]] = []

    def push(self, run: list[int]) -> None:
        """Put a run into the pool, cut to `longest` tokens; one that is there already becomes the most recent. A run of fewer
        than two tokens proposes nothing and is skipped."""
        if len(run) < 2:
            return
        run = run[: self._longest]
        if run in self._runs:
            self._runs.remove(run)
        self._runs.insert(0, run)
        del self._runs[self._size :]

    def candidates(self, last: int, drafts: list[int], most: int) -> list[list[int]]:
        """Up to `most` different proposals for what follows the token `last`, each as long as the drafts. A run proposes the
        tokens after its first occurrence of `last`, cut to the number of drafts or filled up with the current drafts. Proposals
        that equal the drafts themselves are skipped."""
        proposals: list[list[int]] = []
        for run in self._runs:
            # A token at the end of a run has nothing after it.
            if last not in run[:-1]:
                continue
            after = run[run.index(last) + 1 :][: len(drafts)]
            proposal = after + drafts[len(after) :]
            if proposal != drafts and proposal not in proposals:
                proposals.append(proposal)
            if len(proposals) == most:
                break
        return proposals


def jacobi_algorithm(setup: Setup, settings: JacobiSettings) -> Algorithm:
    decode = partial(jacobi, block_size=settings.block_size, running=settings.window == "running")
    return Algorithm(decode=decode, window=settings.block_size + 1)


def multiblock_algorithm(setup: Setup, settings: MultiblockJacobiSettings) -> Algorithm:
    n, most = settings.block_size, settings.verify_size - 1 if settings.pool_size else 0
    decode = partial(multiblock_jacobi, n=n, blocks=settings.blocks, most=most, pool_size=settings.pool_size)
    return Algorithm(
        decode=partial(decode, spawn_at=math.ceil(settings.spawn_ratio * n)),
        window=n * settings.blocks + 1,
        columns=lambda length: length + most * n,
    )
