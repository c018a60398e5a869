"""Products of rows with the weights of their experts, in torch: what experts.py must give.

Legend: P rows, sorted by expert, E experts, D numbers in, M numbers out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert, [P, M]; sums are in float32 or better.

    Expert e has the rows from the end of the expert before it up to `end_E[e]` (int32); the last end is P.
    """
    wide = torch.promote_types(rows_PD.dtype, torch.float32)
    row_P = torch.arange(rows_PD.shape[0], dtype=end_E.dtype, device=end_E.device)
    expert_P = torch.searchsorted(end_E, row_P, right=True)
    return (weight_EMD.to(wide)[expert_P] @ rows_PD.to(wide).unsqueeze(2)).squeeze(2).to(rows_PD.dtype)
