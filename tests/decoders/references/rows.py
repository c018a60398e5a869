"""What rows see, from a mask."""

import torch
from torch import Tensor


def intervals_of(seen_NW: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of columns that a mask [N, W] lets each row see, as `low_IN`, `high_IN`; unused ones are empty."""
    padded = torch.nn.functional.pad(seen_NW.to(torch.int8), (1, 1)).diff(dim=1)
    starts, ends = (padded == 1).nonzero(), (padded == -1).nonzero()
    counts_N = seen_NW.new_zeros(len(seen_NW), dtype=torch.int64).index_add_(
        0, starts[:, 0], torch.ones_like(starts[:, 0])
    )
    low_IN, high_IN = torch.zeros(
        2, max(1, int(counts_N.max())), len(seen_NW), dtype=torch.int64, device=seen_NW.device
    )
    which = torch.arange(len(starts), device=seen_NW.device) - (counts_N.cumsum(0) - counts_N)[starts[:, 0]]
    low_IN[which, starts[:, 0]], high_IN[which, starts[:, 0]] = starts[:, 1], ends[:, 1]
    return low_IN, high_IN
