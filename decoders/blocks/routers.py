"""S2D2's routing: decides for each sample whether to verify the first run of masks in a drafted block.

    estimator   how likely each drafted token of the span is accepted: alpha_1 .. alpha_n
    K           sum_k prod_{i <= k} alpha_i, the tokens that a verification is expected to accept
    score       K - c (static), or K - c N with the N masks that the confidence rule would reveal at once (dynamic)
    router      span >= n | score >= tau | hysteresis of the score | a bandit that learns what pays (UCB)

Hysteresis begins above `on` and ends below `off`, both strictly, as in the public code (the paper has >= for the first); a
margin must be above its threshold. The bandit first tries actions that it has not tried yet, and verifies on a tie. A router's
memory lies in columns of the slot state: it is cleared for each new sample and depends only on that sample's history. Knows
nothing of models and of how blocks are drafted; nothing here waits for the device.

Source: Han et al., "Fast decoding for diffusion LLMs via training-free self-speculation" (S2D2, 2026), and its public code.

Legend: B slots that decide, T places of a block, R drafted rows, A actions (0 reveal, 1 verify), C contexts of the bandit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.blocks.router_settings import (
    Bandit,
    Confidence,
    Entropy,
    Estimator,
    HardEntropy,
    Hysteresis,
    LinearMargin,
    Margin,
    MinSpan,
    Renyi,
    Router,
    ScoreRouter,
    VerificationCost,
)
from decoders.engine.state import SlotState

# ---- reading a draft -------------------------------------------------------------------------------------------------


def first_span(masks_BT: Tensor) -> Tensor:
    """Mark the first run of masks in each block, bool [B, T]."""
    begun_BT = masks_BT.cumsum(1) > 0
    broken_BT = (begun_BT & ~masks_BT).cumsum(1) > 0
    return begun_BT & ~broken_BT


def normalised_entropy(law_RV: Tensor) -> Tensor:
    """H / log V of log-probabilities over the whole vocabulary, between 0 and 1, [R]."""
    mass_RV = law_RV.exp()
    entropy_R = -torch.where(mass_RV > 0, mass_RV * law_RV, 0.0).sum(1)
    return entropy_R / max(math.log(law_RV.shape[1]), 1e-12)


def survival(estimator: Estimator, law_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """How likely each row's drafted token is accepted, between 0 and 1, [R].

    `law_RV` are the log-probabilities of the distribution that drafted; at temperature 0 those of the model itself.
    """
    match estimator:
        case Entropy(beta=beta):
            return torch.exp(-beta * normalised_entropy(law_RV))
        case HardEntropy(tau=tau):
            return (normalised_entropy(law_RV) < tau).to(law_RV.dtype)
        case Margin(tau=tau):
            return (_margin(law_RV) > tau).to(law_RV.dtype)
        case LinearMargin(coefficient=coefficient):
            return (coefficient * _margin(law_RV)).clamp(max=1.0)
        case Confidence(power=power):
            return law_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).exp().clamp(max=1.0) ** power
        case Renyi():
            return law_RV.exp().square().sum(1).clamp(max=1.0)


def _margin(law_RV: Tensor) -> Tensor:
    best_R2 = law_RV.topk(2, dim=1).values.exp()
    return best_R2[:, 0] - best_R2[:, 1]


def expected_accepted(alpha_BT: Tensor, span_BT: Tensor) -> Tensor:
    """K of each block, sum_k prod_{i <= k} alpha_i over its span, [B]; values outside of the span are ignored."""
    product_BT = torch.where(span_BT, alpha_BT, 1.0).cumprod(1)
    return torch.where(span_BT, product_BT, 0.0).sum(1)


@dataclass(frozen=True, slots=True)
class Signals:
    """The inputs of a router, one row per slot that drafted.

    `span_B` is the length of the first run of masks, `expected_B` its K, `num_sure_B` how many masks of the block the confidence
    rule would reveal, `progress_B` the decided share of the block, `entropy_B` a mean of H / log V. `size` is the
    number of places in a block, or in a sub-block where those are decoded one after the other.
    """

    span_B: Tensor
    expected_B: Tensor
    num_sure_B: Tensor
    progress_B: Tensor
    entropy_B: Tensor
    size: int


# ---- routing ---------------------------------------------------------------------------------------------------------


class Routing:
    """One router for all slots, its memory in columns of `state`, where it moves and is cleared with the samples.

    Call `decide` once for each slot that drafted, then `learn` when that step's tokens are revealed. A block without masks,
    drafted once more where tokens are edited, isn't verified and ends a hysteresis, as in the public code.
    """

    def __init__(self, state: SlotState, router: Router, estimator: Estimator, cost: VerificationCost) -> None:
        self.router, self.estimator, self.cost = router, estimator, cost
        self._on_S = state.column(dtype=torch.bool)
        self._bandit = UpperConfidence(state, router) if isinstance(router, Bandit) else None

    @property
    def reads_law(self) -> bool:
        """Whether the router needs probabilities at all."""
        return not isinstance(self.router, MinSpan)

    def note(self, law_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """The router's input for each drafted row, [R]: its entropy for a bandit, else its chance of acceptance."""
        if isinstance(self.router, Bandit):
            return normalised_entropy(law_RV)
        return survival(self.estimator, law_RV, tokens_R)

    def signals(
        self, masks_BT: Tensor, notes_BT: Tensor, *, num_sure_B: Tensor, progress_B: Tensor, size: int
    ) -> Signals:
        """Build the inputs from the rows' `note`, [B, T], each at its place; other places are ignored."""
        span_BT = first_span(masks_BT)
        expected_B = entropy_B = notes_BT.new_zeros(len(notes_BT))
        if isinstance(self.router, Bandit):
            over_BT = span_BT if self.router.entropy_of == "span" else masks_BT
            entropy_B = torch.where(over_BT, notes_BT, 0.0).sum(1) / over_BT.sum(1).clamp(min=1)
        elif self.reads_law:
            expected_B = expected_accepted(notes_BT, span_BT)
        return Signals(span_BT.sum(1), expected_B, num_sure_B, progress_B, entropy_B, size)

    def score(self, signals: Signals) -> Tensor:
        """K minus the cost of a verification, float64 [B]; -inf if there is nothing to verify."""
        expected_B, c = signals.expected_B.to(torch.float64), self.cost.c
        score_B = expected_B - c * (signals.num_sure_B if self.cost.kind == "dynamic" else 1.0)
        return torch.where(signals.span_B > 0, score_B, -torch.inf)

    def decide(self, slots_B: Tensor, signals: Signals) -> Tensor:
        """Whether to verify each slot's span, bool [B]; updates the memory of these slots."""
        match self.router:
            case MinSpan(span=span):
                return signals.span_B >= span
            case ScoreRouter(tau=tau):
                return self.score(signals) >= tau
            case Hysteresis(on=on, off=off):
                score_B = self.score(signals)
                self._on_S[slots_B] = torch.where(self._on_S[slots_B], score_B >= off, score_B > on)
                return self._on_S[slots_B]
            case Bandit():
                assert self._bandit is not None
                return self._bandit.decide(slots_B, signals)

    def learn(self, slots_B: Tensor, decoded_B: Tensor, verified_B: Tensor) -> None:
        """Report how many tokens these slots decoded after their last `decide`, with or without a verification."""
        if self._bandit is not None:
            self._bandit.learn(slots_B, decoded_B, verified_B)


class UpperConfidence:
    """The UCB bandit: for each sample and context, the tokens per forward of revealing and of verifying."""

    def __init__(self, state: SlotState, settings: Bandit) -> None:
        self._settings = settings
        num_contexts = settings.span_bins * settings.progress_bins * settings.entropy_bins
        self._decisions_S, self._context_S = state.column(), state.column()
        self._asked_S = state.column(dtype=torch.bool)
        self._counts_SCA = state.column(num_contexts, 2, dtype=torch.float64)
        self._rewards_SCA = state.column(num_contexts, 2, dtype=torch.float64)

    def decide(self, slots_B: Tensor, signals: Signals) -> Tensor:
        """Verify where the upper bound of verifying is at least that of revealing, bool [B]."""
        asked_B, context_B = signals.span_B > 0, self._contexts(signals)
        self._asked_S[slots_B], self._context_S[slots_B] = asked_B, context_B
        self._decisions_S[slots_B] += asked_B
        counts_BA, rewards_BA = self._counts_SCA[slots_B, context_B], self._rewards_SCA[slots_B, context_B]
        log_t_B1 = self._decisions_S[slots_B].clamp(min=1).to(torch.float64).log().unsqueeze(1)
        bound_BA = rewards_BA / counts_BA + self._settings.beta * (log_t_B1 / counts_BA).sqrt()
        bound_BA = torch.where(counts_BA > 0, bound_BA, torch.inf)
        return asked_B & (bound_BA[:, 1] >= bound_BA[:, 0])

    def _contexts(self, signals: Signals) -> Tensor:
        """Number of the cell in which a draft lies, [B]."""
        settings, span_B = self._settings, signals.span_B.to(torch.float64)
        # Spans go from 1 to the block's size; blocks of size 1 have only one.
        share_B = (span_B - 1.0) / max(signals.size - 1, 1)
        number_B = _bin(share_B, settings.span_bins) * settings.progress_bins
        number_B = (number_B + _bin(signals.progress_B, settings.progress_bins)) * settings.entropy_bins
        return number_B + _bin(signals.entropy_B, settings.entropy_bins)

    def learn(self, slots_B: Tensor, decoded_B: Tensor, verified_B: Tensor) -> None:
        """Credit the chosen action with its tokens per forward; a verification is a second forward."""
        place = (slots_B, self._context_S[slots_B], verified_B.to(torch.int64))
        asked_B = self._asked_S[slots_B].to(torch.float64)
        self._counts_SCA[place] += asked_B
        self._rewards_SCA[place] += asked_B * decoded_B / (1 + verified_B.to(torch.int64))


def _bin(share_B: Tensor, num_bins: int) -> Tensor:
    """The bin of a number between 0 and 1, each closed below, the last one also above, int64 [B]."""
    return (share_B.to(torch.float64) * num_bins).to(torch.int64).clamp(0, num_bins - 1)
