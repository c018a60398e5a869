"""Canvases with drafts in them: which masks are drafted, and the chain or tree of canvases that `ssd` runs at once.

Pure functions over index tensors.

    nodes of a slot with K = 3 drafts a, b, c     chain: 0 = {}, 1 = {a}, 2 = {a b}, 3 = {a b c}
                                                  mixed: also 4 = {b}, 5 = {a c}

Legend: B slots, K drafts of a slot, M nodes of a slot, N nodes of all slots, W positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafts of a round in the order in which they are expected: the first `num_B` of a slot."""

    positions_BK: Tensor
    tokens_BK: Tensor
    num_B: Tensor

    def shifted(self) -> Candidates:
        """All but the first."""
        return Candidates(self.positions_BK[:, 1:], self.tokens_BK[:, 1:], self.num_B - 1)


def choose_candidates(drafts_BW: Tensor, sure_BW: Tensor, blocks_BW: Tensor, most_B: Tensor) -> Candidates:
    """Take up to `most_B` drafts: block by block, in each the surest first, equals by position; -inf marks what is none."""
    order_BW = sure_BW.sort(dim=1, descending=True, stable=True).indices
    is_draft_BW = sure_BW != -torch.inf
    block_BW = torch.where(is_draft_BW, blocks_BW, torch.iinfo(torch.int64).max).gather(1, order_BW)
    order_BW = order_BW.gather(1, block_BW.sort(dim=1, stable=True).indices)
    num_B = torch.minimum(most_B, is_draft_BW.sum(1))
    positions_BK = order_BW[:, : int(num_B.max())]
    return Candidates(positions_BK, drafts_BW.gather(1, positions_BK), num_B)


def near_masks(masked_NW: Tensor, blocks_NW: Tensor, count: int) -> Tensor:
    """Mark the masks of the first blocks that hold `count` of them, or all, bool [N, W]."""
    near_NW = masked_NW & (masked_NW.cumsum(1) <= count)
    return masked_NW & (blocks_NW <= torch.where(near_NW, blocks_NW, -1).amax(1, keepdim=True))


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of a round. Node n is number `place_N` of row `row_N`; `exists_BM` says which numbers a row has."""

    tokens_NW: Tensor
    row_N: Tensor
    place_N: Tensor
    exists_BM: Tensor

    def spread(self, values_N: Tensor) -> Tensor:
        """One value a node as [B, M], 0 where there is no node."""
        spread_BM = values_N.new_zeros(self.exists_BM.shape)
        spread_BM[self.exists_BM] = values_N
        return spread_BM

    def number(self, place_B: Tensor) -> Tensor:
        """Which of all nodes is number `place_B` of each row, [B]."""
        number_BM = self.exists_BM.flatten().cumsum(0).view_as(self.exists_BM) - 1
        return number_BM.gather(1, place_B.unsqueeze(1)).squeeze(1)


def plant(tokens_BW: Tensor, drafts: Candidates, *, mixed: bool) -> Tree:
    """Put drafts into canvases: 0, 1, .. K of them; where `mixed`, also without the last but one of two or more."""
    num = drafts.tokens_BK.shape[1]
    steps_K = torch.arange(num, device=tokens_BW.device)
    placed_MK = steps_K < torch.arange(num + 1, device=tokens_BW.device).unsqueeze(1)
    needs_M = placed_MK.sum(1)
    if mixed and num > 1:
        swapped_MK = placed_MK[:-2] | (steps_K == steps_K[:-1].unsqueeze(1) + 1)
        placed_MK = torch.cat([placed_MK, swapped_MK])
        needs_M = torch.cat([needs_M, steps_K[:-1] + 2])
    exists_BM = needs_M <= drafts.num_B.unsqueeze(1)
    row_N, place_N = exists_BM.nonzero(as_tuple=True)
    tokens_NW = tokens_BW[row_N]
    node_R, step_R = placed_MK[place_N].nonzero(as_tuple=True)
    tokens_NW[node_R, drafts.positions_BK[row_N[node_R], step_R]] = drafts.tokens_BK[row_N[node_R], step_R]
    return Tree(tokens_NW, row_N, place_N, exists_BM)
