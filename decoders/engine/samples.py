"""A sample while it is decoded: its tokens by rank, what is decided, and all that is counted of it; and the table of slots, with
what the host knows of the sample in each. No torch.

    rank      0 .. prompt-1 | prompt .. decided-1 | decided .. length-1
    holds     the prompt    | generated           | drafts and junk
    cached    |<------ the model's columns hold what stands there ------>|

In a causal model rank = column = position; in an any-subset model `order` gives the position of each rank.

Legend: S slots, W ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, EngineStats, Outcome, Request, TraceStep
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.constraints.trackers import Tracker
from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.draws.settings import Uses, column_of
from draftmill.decoders.engine.asks import DRAFT, FAR, JUST_ONE, TARGET, UNREAD, Ask, Decoding, Ints, Run, Span, Wish
from draftmill.decoders.engine.ends import FILLED, LENGTH, Stops
from draftmill.decoders.engine.penalties import PenaltyTracker

Tops = dict[tuple[int, float], list[tuple[int, float]]]
"""Tokens and their log-probabilities, the best first, of rows that speak of a position and say that its token has this
log-probability: so the row that decided a token is found."""


class Times(NamedTuple):
    """When a sample came (perf_counter seconds) and when it got its slot, also as Unix time."""

    queued_s: float
    admitted_s: float
    started_at_s: float


def fresh_queries(rank: int, count: int) -> Span:
    """Queries at `count` ranks from `rank` on, each of which sees the ranks before its own."""
    return Span(count, rank, rank, lag=1)


def equal_queries(rank: int, count: int, below: int) -> Span:
    """Queries at `count` ranks from `rank` on that see the ranks below `below`."""
    return Span(count, rank, rank, below, FAR)


def decoding_order(
    canvas: NDArray[np.int32], hole_order: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], int]:
    """Return (position at each rank, number of prompt tokens): prompt positions first, then the holes from left to right.
    This is the binary-lattice rule: one order for each pattern of holes, so that the density is unique. `hole_order`
    replaces the order of the holes; it must be a permutation of them. Source: Guo and Ermon, "Reviving any-subset
    autoregressive models" (ASSD), on orders."""
    is_hole = canvas == HOLE
    prompt, holes = np.flatnonzero(~is_hole), np.flatnonzero(is_hole)
    if hole_order is not None:
        assert np.array_equal(np.sort(hole_order), holes), "hole_order is not a permutation of the holes"
        holes = hole_order.astype(np.int64)
    return np.concatenate([prompt, holes]), len(prompt)


class Sample:
    """One request at work.

    Decoders read it, and write `tokens`, `cached`, `cached_draft`, `nfe_draft` and `reused`; all else is the engine's. A
    decoder that wants columns copied after an answer sets `copies`: (from column, to column, count) each.

    Of a forward the engine counts for each of its samples all rows, and of its seconds an equal share: `device_s`, of which
    `first_s` is the first evaluation's, `batch_rows` samples, `used_rows` that were asked for, `computed_rows` with padding.
    """

    canvases = 1
    """How many canvases of it a forward runs, an evaluation each; a text that is scored has several (estimates.py)."""

    def __init__(
        self,
        request: Request,
        order: list[int] | None,
        prompt: int,
        *,
        stops: Stops | None,
        times: Times,
        stats: EngineStats,
        traced: bool,
    ) -> None:
        self.request, self.key, self.times, self.stats = request, request.key, times, stats
        self.order, self.prompt = order, prompt
        # The rank of each position; empty where that is the position itself.
        self.rank_at: dict[int, int] = {} if order is None else {position: rank for rank, position in enumerate(order)}
        canvas = request.canvas.tolist()
        self.tokens: list[int] = canvas if order is None else [canvas[position] for position in order]
        self.decided = prompt
        self.cached = self.cached_draft = 0
        # How many columns before its rank a token stands in the drafting model's cache: a draft head reads none at rank 0.
        self.draft_lag = 0
        self.length = len(self.tokens)
        self.logprob = 0.0
        self.log_ps: list[float] | None = [] if request.settings.token_logprobs else None
        # The model's best tokens by rank, if the request asks for them; and in places that are not decided yet.
        self.tops: list[list[tuple[int, float]]] | None = [] if request.settings.top_logprobs else None
        self.tops_at: Tops = {}
        self.nfe = self.nfe_draft = 0
        self.iterations = self.proposed = self.accepted = self.reused = 0
        self.histogram: list[int] = []
        self.is_greedy: bool | None = None
        # How the sample ends where nothing stops it.
        self.end = FILLED if stops is None else LENGTH
        own = request.settings
        self.stops = Stops()
        if stops is not None:
            text = stops.text if own.stop_text is None else own.stop_text
            self.stops = Stops((*stops.ids, *own.stop_ids), text)
        self.can_stop = bool(self.stops.ids) or self.stops.text is not None
        self.trace: list[TraceStep] | None = [] if traced else None
        # What the text must match, and what changes its logits; None if nothing does.
        self.tracker: Tracker | None = None
        self.penalties: PenaltyTracker | None = None
        # Rows of the prompt that run in this forward, before anything is asked (scheduler.py).
        self.chunk = 0
        self.copies: Sequence[tuple[int, int, int]] = ()
        # Whether a forward gave it NaN or infinity: then it fails.
        self.is_bad = False
        self.first_s = self.device_s = 0.0
        self.batch_rows = self.used_rows = self.computed_rows = 0
        self.slot = -1
        self.decoding: Decoding | None = None
        self.ask: Wish | None = None

    def causal(self, end: int, sampled: int, kind: int, drafts: Sequence[int]) -> Ask:
        """Run the columns [cached, end) under causal visibility; the last `sampled` rows are sampled. The row of column c
        speaks of rank c + 1. The decoder itself moves `cached`, since drafts may be refused."""
        start = self.cached
        assert sampled <= end - start, "more rows are sampled than run: `cached` is too high"
        run = Run(end - start - sampled, sampled, end - sampled + 1, kind)
        return Ask(self.tokens[start:end], Span(end - start, start, start), run, drafts)

    def causal_next(self) -> Ask | None:
        """The ask after one for the next token, whose token is on the device; None where the text ends with that token."""
        rank = self.decided
        if rank + 1 >= self.length:
            return None
        return Ask([UNREAD], Span(1, rank, rank), Run(0, 1, rank + 1, TARGET), JUST_ONE)

    def draft_next(self, rank: int) -> Ask:
        """Let the drafting model run its columns up to `rank`, and draft there: the decided ones, or its last draft."""
        start, self.cached_draft = self.cached_draft, rank
        tokens = self.tokens[start:rank] if rank == self.decided else [UNREAD]
        span = Span(rank - start, start - self.draft_lag, start)
        return Ask(tokens, span, Run(rank - start - 1, 1, rank, DRAFT), JUST_ONE, model=1)

    def catch_up(self, count: int) -> Ask:
        """Let the drafting model run `count` columns more, and sample nothing."""
        start = self.cached_draft
        self.cached_draft += count
        span = Span(count, start - self.draft_lag, start)
        return Ask(self.tokens[start : start + count], span, (), (), model=1)

    def two_stream(self, end: int, queries: Sequence[int], kind: int, drafts: Sequence[int]) -> Ask:
        """Write the content of the columns [cached, end) of an any-subset canvas, and run query rows; the first ones are
        sampled. As many as there are `drafts`; they are consecutive ranks. The prompt sees all of itself, every other token
        what was decided before it. `cached` moves to `end`: where drafts are refused, the decoder moves it back."""
        start, self.cached = self.cached, end
        content = Span(end - start, start, start, self.prompt) if start < end else ()
        return Ask(self.tokens[start:end], content, Run(0, len(drafts), queries[1], kind), drafts, queries)

    def two_stream_next(self) -> Ask | None:
        """As `causal_next`, of an any-subset canvas."""
        rank = self.decided
        if rank + 1 >= self.length:
            return None
        run = Run(0, 1, rank + 1, TARGET)
        return Ask([UNREAD], Span(1, rank, rank, self.prompt), run, JUST_ONE, fresh_queries(rank + 1, 1))

    def commit(
        self,
        tokens: Sequence[int],
        log_ps: Sequence[float],
        count: int,
        drafts: Sequence[int] = (),
        accepted: int = 0,
        *,
        shown: int | None = None,
    ) -> int:
        """End an iteration: decide the next `count` tokens, fewer where the text ends; returns how many. Of the `drafts` of the
        iteration, the first `accepted` held. A stop drops what comes after it, also from the count of proposed drafts. The
        trace shows the first `shown` drafts; by default those that count as proposed."""
        before = self.decided
        kept, is_over = self._until_stop(tokens, min(count, self.length - before))
        self.tokens[before : before + kept] = tokens[:kept]
        if self.is_shaped:
            for rank in range(before, before + kept):
                self.decide(rank if self.order is None else self.order[rank], self.tokens[rank])
        for log_p in log_ps[:kept]:
            self.logprob += log_p
        if self.log_ps is not None:
            self.log_ps += log_ps[:kept]
        if self.tops is not None:
            places = range(before, before + kept) if self.order is None else self.order[before : before + kept]
            self.tops += [self.tops_at[where] for where in zip(places, log_ps[:kept], strict=True)]
            self.tops_at = {}
        self.decided = before + kept
        if is_over:
            self.length = self.decided
        proposed = min(len(drafts), kept) if is_over else len(drafts)
        self._close_iteration(kept, proposed, min(accepted, kept))
        if self.trace is not None:
            span, seen = slice(before, self.decided), list(drafts[: proposed if shown is None else shown])
            positions = list(range(before, self.decided)) if self.order is None else self.order[span]
            self.trace.append(TraceStep(len(self.trace), self.nfe, seen, self.tokens[span], positions))
        return kept

    @property
    def is_shaped(self) -> bool:
        """Whether its rows draw from other logits than the model's."""
        return self.tracker is not None or self.penalties is not None

    @property
    def may_clash(self) -> bool:
        """Whether tokens that have not seen each other may be impossible together."""
        return self.tracker is not None or (self.penalties is not None and self.penalties.penalties.bans)

    def decide(self, position: int, token: int) -> None:
        """A token stands at a position from now on: tell what follows from it."""
        if self.tracker is not None:
            self.tracker.decide(position, token)
        if self.penalties is not None:
            self.penalties.decide(position, token)

    def is_open(self, position: int) -> bool:
        """Whether the token at a position is not decided."""
        return (position if self.order is None else self.rank_at[position]) >= self.decided

    def fitting(self, news: Sequence[tuple[int, int]]) -> list[int]:
        """Which of some tokens (position, token) satisfy the constraint, and are not banned, if they are decided in this order:
        tokens of one forward have not seen each other. The first one does."""
        if not self.may_clash:
            return list(range(len(news)))
        kept = list[int]()
        for index, (position, token) in enumerate(news):
            known = [news[before] for before in kept]
            allowed = None if self.tracker is None else self.tracker.allowed(position, known)
            banned = self.penalties is not None and token in self.penalties.bans(position, known)
            if (allowed is None or allowed[1]()[token]) and not banned:
                kept.append(index)
        return kept

    def grade(self, log_ps: Sequence[float], first_choices: int) -> None:
        """Score all tokens after the prompt: their log-probabilities, and how many leading ones are the model's first choice."""
        self.decided = self.length
        self.logprob, self.log_ps = math.fsum(log_ps), list(log_ps)
        self.is_greedy = first_choices == len(log_ps)
        self.stats.committed += len(log_ps)

    def _until_stop(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        """How many of the first `count` tokens are kept, and whether the text ends with them."""
        # Only stop strings read the text before.
        known = [] if self.stops.text is None else self.tokens[self.prompt : self.decided]
        end = self.stops.first([*known, *tokens[:count]], len(known)) if self.can_stop else None
        if end is None:
            return count, False
        keep, self.end = end
        return keep - len(known), True

    def _close_iteration(self, committed: int, proposed: int, accepted: int) -> None:
        self.iterations += 1
        self.proposed += proposed
        self.accepted += accepted
        self.stats.committed += committed
        histogram = self.histogram
        if committed >= len(histogram):
            histogram += [0] * (committed + 1 - len(histogram))
        histogram[committed] += 1

    def _places(self) -> list[int]:
        """The ranks of the generated tokens in canvas order."""
        places = list(range(self.prompt, self.decided))
        if self.order is not None:
            places.sort(key=self.order.__getitem__)
        return places

    def _generated_tokens(self) -> tuple[list[int], list[float]]:
        """The generated tokens in canvas order, and their log-probabilities if the request asks for them."""
        places = self._places()
        log_ps = [] if self.log_ps is None else [self.log_ps[place - self.prompt] for place in places]
        return [self.tokens[place] for place in places], log_ps

    def outcome(self) -> Outcome:
        now, ran = time.perf_counter(), self.nfe > 0
        broken = self.is_bad or not math.isfinite(self.logprob)
        text, log_ps = self._generated_tokens()
        most, tops = self.request.settings.top_logprobs, None
        if self.tops is not None and ran and not broken:
            tops = [self.tops[place - self.prompt][:most] for place in self._places()]
        asks_scores = self.log_ps is not None and ran and not broken
        scores = np.array(log_ps, dtype=np.float32) if asks_scores else None
        wait_s = self.times.admitted_s - self.times.queued_s
        decode_s = now - self.times.admitted_s - self.first_s if ran else 0.0
        return Outcome(
            index=self.request.index,
            tokens=np.array([] if broken else text, dtype=np.int32),
            finish=self.end if ran else FILLED,
            logprob=None if broken else self.logprob,
            nfe=self.nfe,
            nfe_draft=self.nfe_draft,
            iterations=self.iterations,
            proposed=self.proposed,
            accepted=self.accepted,
            accept_hist=self.histogram,
            wait_s=wait_s,
            prefill_s=self.first_s,
            decode_s=decode_s,
            total_s=wait_s + self.first_s + decode_s,
            device_s=self.device_s,
            batch_rows=self.batch_rows / self.nfe if ran else 0.0,
            pad_fraction=1.0 - self.used_rows / self.computed_rows if ran else 0.0,
            started_at_s=self.times.started_at_s,
            error_kind="nan_logits" if broken else None,
            error="the model gave logits that are not finite" if broken else None,
            trace=self.trace,
            token_logprobs=scores,
            top_logprobs=tops,
            is_greedy=None if broken else self.is_greedy,
            reused=self.reused,
        )


class SlotTable:
    """What the host knows of the sample in each slot: its key, its decoding order, and its sampling settings. `key_S2` are
    words of keys (noise.key_words). `order_SW` gives the position of each rank; None where that is the rank itself. `start_S`
    says where each slot begins in a cache that is one pool of cells; None where the cache knows.
    `settings_4S` as in draws/settings.py, the job's in free slots; `uses` says which of them matter in any slot."""

    def __init__(self, sampling: Sampling, num_slots: int) -> None:
        self._job = sampling
        self.key_S2: Ints = np.zeros((num_slots, 2), dtype=np.int64)
        self.length_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self.order_SW: Ints | None = None
        self.start_S: Ints | None = None
        self._usual = column_of(sampling)
        self.settings_4S = np.repeat(np.array([self._usual]).T, num_slots, axis=1)
        self.uses = Uses.of(self.settings_4S)

    def start(self, sample: Sample) -> None:
        slot, own = sample.slot, sample.request.settings
        self.key_S2[slot], self.length_S[slot] = split_key(sample.key), sample.length
        self._set(slot, column_of(self._job, (own.temperature, own.top_p, own.min_p, own.top_k)))
        if sample.order is None:
            return
        if self.order_SW is None:
            self.order_SW = np.zeros((len(self.length_S), sample.length), dtype=np.int64)
        if (missing := sample.length - self.order_SW.shape[1]) > 0:
            self.order_SW = np.pad(self.order_SW, ((0, 0), (0, missing)))
        self.order_SW[slot, : sample.length] = sample.order

    def _set(self, slot: int, settings: tuple[float, ...]) -> None:
        if tuple(self.settings_4S[:, slot]) != settings:
            self.settings_4S[:, slot] = settings
            self.uses = Uses.of(self.settings_4S)

    def release(self, slot: int) -> None:
        self._set(slot, self._usual)


def runs_of(row_R: Ints, rank_R: Ints, kind: int, draw_R: Ints | int = 0) -> Ints:
    """Sampled rows, in any order, their ranks and draws as flat runs."""
    draw_R = np.broadcast_to(draw_R, row_R.shape)
    breaks = np.flatnonzero((np.diff(row_R) != 1) | (np.diff(rank_R) != 1) | (np.diff(draw_R) != 0)) + 1
    starts = np.concatenate([[0], breaks])[: len(row_R)]
    runs_UF = np.zeros((len(starts), len(Run._fields)), dtype=np.int64)
    runs_UF[:, 0], runs_UF[:, 1], runs_UF[:, 2] = row_R[starts], np.diff(starts, append=len(row_R)), rank_R[starts]
    runs_UF[:, 3], runs_UF[:, 4] = kind, draw_R[starts]
    return runs_UF.reshape(-1)
