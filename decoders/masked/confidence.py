"""Reads masked positions of a forward: a token for each, the model's confidence in it, and its log-probability.

Confidences come from the untempered distribution of the model, in float64, without the suppressed ids; only
the token itself is drawn from the warped distribution. Pure functions over rows.

    top1      p(token)               LLaDA's low_confidence, Dream's maskgit_plus
    margin    p of the best token - p of the second best
    entropy   sum p log p            the negative entropy
    random    a uniform number of the position: an order that does not depend on the text

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025).

Legend: N canvases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reading:
    """The predictions of one forward for the requested positions, [N, W]; `confidence_NW` is -inf at all others."""

    tokens_NW: Tensor
    confidence_NW: Tensor
    log_p_NW: Tensor

    @classmethod
    def empty(cls, like_NW: Tensor) -> Reading:
        """A reading of nothing."""
        nothing_NW = torch.full(like_NW.shape, -torch.inf, dtype=torch.float64, device=like_NW.device)
        return cls(torch.zeros_like(nothing_NW, dtype=torch.int64), nothing_NW, torch.zeros_like(nothing_NW))

    def at(self, positions_NT: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities at these positions, [N, T] each."""
        return self.tokens_NW.gather(1, positions_NT), self.log_p_NW.gather(1, positions_NT)

    def best(self, among_NW: Tensor) -> Tensor:
        """The position of the highest confidence among the marked ones, the lowest on ties, [N]."""
        return self.confidence_NW.masked_fill(~among_NW, -torch.inf).argmax(1)


def confidence(kind: str, law_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """The confidence in each row's token under untempered log-probabilities, float64 [R]."""
    match kind:
        case "top1":
            return law_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).exp()
        case "margin":
            best_R2 = law_RV.topk(2, dim=1).values.exp()
            return best_R2[:, 0] - best_R2[:, 1]
        case "entropy":
            mass_RV = law_RV.exp()
            return torch.where(mass_RV > 0, mass_RV * law_RV, mass_RV).sum(1)
    raise AssertionError(f"no confidence is named {kind!r}")


def ranked(confidence_NW: Tensor) -> Tensor:
    """Positions in descending confidence, ties by position, int64 [N, W]."""
    return confidence_NW.sort(dim=1, descending=True, stable=True).indices
