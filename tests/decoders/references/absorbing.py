"""The distributions of MDLM and SEDD as their papers state them, beside which ours are tested.

Sources: see absorbing_rows.py. The shape letters are those of decoders/__init__.py.
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


def law_of_scores(log_scores_RV: Tensor, mask_id: int) -> Tensor:
    """The log-probabilities of a masked row's token, given that it is revealed: the scores, normalised without the mask; [R, V].

    At a row that is not masked SEDD has no such distribution.
    """
    others = torch.tensor([mask_id], device=log_scores_RV.device)
    return log_scores_RV.index_fill(-1, others, -torch.inf).log_softmax(-1)
