"""How sure a model of masked diffusion is of a token, from the untempered distribution of its row, in float64.

    top1      p(token)               LLaDA's low_confidence, Dream's maskgit_plus
    margin    p of the best token - p of the second best
    entropy   sum p log p            the negative entropy

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025). Pure functions over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
