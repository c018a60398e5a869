"""S2D2's routing and verification: whether to verify the first run of masks in a drafted block of a sample, and the verification.

    estimator   how likely each drafted token of the run is accepted: alpha_1 .. alpha_n (settings.py)
    K           sum_k prod_{i <= k} alpha_i, the tokens that a verification is expected to accept
    score       K - c (static), or K - c N with the N masks that the confidence rule would reveal at once (dynamic)
    router      run >= n | score >= tau | hysteresis of the score | a bandit that learns what pays (UCB)

Hysteresis begins above `on` and ends below `off`, both strictly, as in the public code (the paper has >= for the first); a
margin must be above its threshold. The bandit first tries actions that it has not tried yet, and verifies on a tie. A router is
made for each sample, and depends only on that sample's history.

Source: Han et al., "Fast decoding for diffusion LLMs via training-free self-speculation" (S2D2, 2026), and its public code.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftmill.decoders.blocks import settings as blocks
from draftmill.decoders.blocks.samples import VERIFY, BlockSample, Revealed
from draftmill.decoders.blocks.settings import Rules, S2d2Settings
from draftmill.decoders.draws.settings import Note
from draftmill.decoders.engine.asks import JUDGE, SELF, Answer, Span

if TYPE_CHECKING:
    from draftmill.decoders.blocks.block_diffusion import Block, Draft


def first_run(masks: list[int]) -> list[int]:
    """The first run of masks, given the places of all."""
    return masks[: next((index for index, place in enumerate(masks) if place != masks[0] + index), len(masks))]


def measure_of(router: blocks.Router, estimator: blocks.Estimator) -> Note | None:
    """The note of each drafted row that a router's numbers are made of."""
    if isinstance(router, blocks.MinSpan):
        return None
    if isinstance(router, blocks.Bandit):
        return "entropy"
    return estimator.note


def expected_tokens(alphas: Iterable[float]) -> float:
    """K of a run, sum_k prod_{i <= k} alpha_i."""
    expected, product = 0.0, 1.0
    for alpha in alphas:
        product *= alpha
        expected += product
    return expected


class Signals(NamedTuple):
    """The inputs of a router. `span` is the length of the first run of masks, `expected` its K, `num_sure` how many masks of
    the block the confidence rule would reveal, `progress` the decided share of the block, `entropy` a mean of H / log V. `size`
    is the number of places in a block, or in a sub-block where those are decoded one after the other."""

    span: int
    expected: float
    num_sure: int
    progress: float
    entropy: float
    size: int


class Threshold:
    """Compares the run's length or its score; hysteresis remembers what it did last."""

    def __init__(
        self, router: blocks.MinSpan | blocks.ScoreRouter | blocks.Hysteresis, cost: blocks.VerificationCost
    ) -> None:
        self._router, self._cost, self._on = router, cost, False

    def score(self, signals: Signals) -> float:
        """K minus the cost of a verification; -inf if there is nothing to verify."""
        if not signals.span:
            return -math.inf
        return signals.expected - self._cost.c * (signals.num_sure if self._cost.kind == "dynamic" else 1.0)

    def decide(self, signals: Signals) -> bool:
        match self._router:
            case blocks.MinSpan(span=span):
                return signals.span >= span
            case blocks.ScoreRouter(tau=tau):
                return self.score(signals) >= tau
            case blocks.Hysteresis(on=on, off=off):
                score = self.score(signals)
                self._on = score >= off if self._on else score > on
                return self._on

    def learn(self, decoded: int, *, verified: bool) -> None:
        """Note the number of tokens that the step after the last `decide` revealed; nothing is learned."""


Context = tuple[int, int, int]
"""The bins in which a draft lies: of its span, progress and entropy."""


class UpperConfidence:
    """The UCB bandit: for each context, the tokens per forward of revealing (0) and of verifying (1)."""

    def __init__(self, settings: blocks.Bandit) -> None:
        self._settings = settings
        self._decisions, self._asked = 0, False
        self._context: Context = (0, 0, 0)
        self._counts: dict[tuple[Context, bool], int] = {}
        self._rewards: dict[tuple[Context, bool], float] = {}

    def decide(self, signals: Signals) -> bool:
        """Verify where the upper bound of verifying is at least that of revealing."""
        self._asked, self._context = signals.span > 0, self._context_of(signals)
        self._decisions += self._asked
        return self._asked and self._bound(verified=True) >= self._bound(verified=False)

    def _bound(self, *, verified: bool) -> float:
        arm = self._context, verified
        count = self._counts.get(arm, 0)
        if not count:
            return math.inf
        log_t = math.log(max(self._decisions, 1))
        return self._rewards[arm] / count + self._settings.beta * math.sqrt(log_t / count)

    def _context_of(self, signals: Signals) -> Context:
        settings = self._settings
        # Spans go from 1 to the block's size; blocks of size 1 have only one.
        share = (signals.span - 1.0) / max(signals.size - 1, 1)
        return (
            _bin(share, settings.span_bins),
            _bin(float(np.float32(signals.progress)), settings.progress_bins),
            _bin(signals.entropy, settings.entropy_bins),
        )

    def learn(self, decoded: int, *, verified: bool) -> None:
        """Credit the chosen action with its tokens per forward; a verification is a second forward."""
        if self._asked:
            arm = self._context, verified
            self._counts[arm] = self._counts.get(arm, 0) + 1
            self._rewards[arm] = self._rewards.get(arm, 0.0) + decoded / (1 + verified)


def _bin(share: float, num_bins: int) -> int:
    """The bin of a number between 0 and 1, each closed below, the last one also above."""
    return 0 if math.isnan(share) else min(max(int(share * num_bins), 0), num_bins - 1)


Route = Threshold | UpperConfidence
"""A router at work on one sample. Call `decide` once for each draft, then `learn` when that step's tokens are revealed. A
block without masks, drafted once more where tokens are edited, isn't verified and ends a hysteresis, as in public code."""


def route_of(router: blocks.Router, cost: blocks.VerificationCost) -> Route:
    return UpperConfidence(router) if isinstance(router, blocks.Bandit) else Threshold(router, cost)


class SelfVerifier:
    """Judges the drafts of a run of masks by the tokens to their left, when the router decides so."""

    def __init__(self, rules: Rules, settings: S2d2Settings) -> None:
        self._rules, self._settings, self.route = rules, settings, route_of(settings.router, settings.cost)

    def wants(self, masks: list[int], draft: Draft, *, num_sure: int, progress: float) -> list[int]:
        """The places to verify; none if it does not pay. The measure of a draft is that of `measure_of`."""
        router, most, run = self._settings.router, self._rules.most_entropy, first_run(masks)
        expected = entropy = 0.0
        if isinstance(router, blocks.Bandit):
            over = run if router.entropy_of == "span" else masks
            entropy = sum(draft[place].measured / most for place in over) / max(len(over), 1)
        elif not isinstance(router, blocks.MinSpan):
            estimator = self._settings.estimator
            expected = expected_tokens(estimator.alpha(draft[place].measured, most) for place in run)
        signals = Signals(len(run), expected, num_sure, progress, entropy, self._rules.sub_block)
        return run if self.route.decide(signals) else []

    def verdict(
        self, s: BlockSample, block: Block, run: list[int], draft: Draft
    ) -> Generator[Any, Answer, list[Revealed]]:
        """Verify the drafts of a run; returns the accepted ones, and the token that replaces the first rejected one."""
        start, first, count, shift = block.start, block.start + run[0], len(run), self._rules.left_shift
        drafts, end = [draft[place].token for place in run], first + count
        spans: tuple[int, ...] = Span(end - start, start, start)
        copied = count if not shift else int(first == 0)
        if copied:
            # Column block.end + j stands for position first + j.
            spans += Span(copied, block.end, first, 0, block.end + 1 - first, own=SELF)
        rows = [end - start + j if j < copied else run[j] - shift for j in range(count)]
        tokens = s.tokens[start:first] + drafts + [self._rules.mask] * copied
        answer = yield s.forward(VERIFY, tokens, spans, s.runs(JUDGE, rows, range(first, end)), drafts)
        s.proposed += count
        s.accepted += answer.accepted
        judged = min(answer.accepted + 1, count)
        return [Revealed(first + j, answer.tokens[j], answer.log_ps[j]) for j in range(judged)]
