"""The distributions of MDLM and SEDD as their papers state them, beside which ours are tested.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), SUBS parameterisation; Lou et al.,
"Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution" (2024), absorbing graph, log-linear noise.
"""

import torch
from torch import Tensor


def masked_share(sigma: Tensor) -> Tensor:
    """The share of tokens that is masked at a total noise: 1 - exp(-sigma)."""
    return -torch.expm1(-sigma)


def subs_log_law(logits_RV: Tensor, tokens_R: Tensor, mask_id: int) -> Tensor:
    """MDLM's log p(x_0) of every row (SUBS): never the mask, and an unmasked token stays as it is; [R, V]."""
    law_RV = logits_RV.index_fill(-1, torch.tensor([mask_id], device=logits_RV.device), -torch.inf).log_softmax(-1)
    kept_R1 = (tokens_R != mask_id).unsqueeze(1)
    decided_RV = torch.full_like(law_RV, -torch.inf).scatter_(-1, tokens_R.unsqueeze(1), 0.0)
    return torch.where(kept_R1, decided_RV, law_RV)
