"""The chain or tree of canvases that `ssd` runs at once: choosing drafts, placing them, walking the tree.

Pure functions over index tensors.

    nodes of a slot with K = 3 drafts a, b, c     chain: 0 = {}, 1 = {a}, 2 = {a b}, 3 = {a b c}
                                                  mixed: also 4 = {b}, 5 = {a c}

Legend: M nodes of a slot, N nodes of all slots, T positions revealed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.engine.acceptance import leading


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
    """Take up to `most_B` drafts: by block, then confidence, then position; -inf marks positions without a draft."""
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
    """The nodes of a round. Node n is number `place_N` of row `row_N`; `exists_BM` marks the numbers that a row has.

    The first `num_chain` numbers are the chain, the root first; the others are the further children of the chain's nodes.
    """

    tokens_NW: Tensor
    row_N: Tensor
    place_N: Tensor
    exists_BM: Tensor
    num_chain: int

    def before(self) -> Tensor:
        """The node that each node continues, itself for roots, [N]."""
        parent_N = torch.where(self.place_N < self.num_chain, self.place_N - 1, self.place_N - self.num_chain)
        return self._numbers()[self.row_N, parent_N.clamp(min=0)]

    def spread(self, values_N: Tensor) -> Tensor:
        """One value a node as [B, M], 0 where there is no node."""
        spread_BM = values_N.new_zeros(self.exists_BM.shape)
        spread_BM[self.exists_BM] = values_N
        return spread_BM

    def gather(self, values_BM: Tensor) -> Tensor:
        """The reverse of `spread`, [N]."""
        return values_BM[self.exists_BM]

    def number(self, place_B: Tensor) -> Tensor:
        """Which of all nodes is number `place_B` of each row, [B]."""
        return self._numbers().gather(1, place_B.unsqueeze(1)).squeeze(1)

    def _numbers(self) -> Tensor:
        return self.exists_BM.flatten().cumsum(0).view_as(self.exists_BM) - 1


def plant(tokens_BW: Tensor, drafts: Candidates, *, mixed: bool) -> Tree:
    """Put the first 0, 1, .. K drafts into canvases; if `mixed`, also two or more of them without the last but one."""
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
    return Tree(tokens_NW, row_N, place_N, exists_BM, num + 1)


@dataclass(frozen=True, slots=True)
class Walk:
    """What one round reveals: places and the nodes that choose them, in order, [B, T]; only the first `counts_B` are valid.

    `last_B` is the last node whose canvas is right: the number of a node of its slot, as those in `nodes_BT`.
    """

    positions_BT: Tensor
    nodes_BT: Tensor
    counts_B: Tensor
    last_B: Tensor


def follow(drafts: Candidates, positions_BM: Tensor, tokens_BM: Tensor, *, mixed: bool) -> Walk:
    """Walk the chain while a node's own choice is the next draft; also take the last node's own choice.

    `positions_BM` and `tokens_BM` are the choices of the nodes that `plant` has put there.
    """
    num_drafts = drafts.tokens_BK.shape[1]
    offsets_K = torch.arange(num_drafts, device=positions_BM.device)
    same_BK = _same(drafts, positions_BM, tokens_BM)
    accepted_B = leading(same_BK & (offsets_K < drafts.num_B.unsqueeze(1)))
    last_B, counts_B = accepted_B, accepted_B + 1
    nodes_BT = torch.arange(num_drafts + 2, device=positions_BM.device).repeat(len(last_B), 1)
    if mixed and num_drafts > 1:
        jump_BK = _same(drafts.shifted(), positions_BM, tokens_BM)
        can_B = accepted_B <= drafts.num_B - 2
        jumps_B = can_B & jump_BK.gather(1, accepted_B.clamp(max=num_drafts - 2).unsqueeze(1)).squeeze(1)
        last_B = torch.where(jumps_B, num_drafts + 1 + accepted_B, last_B)
        counts_B = counts_B + jumps_B
        nodes_BT.scatter_(1, counts_B.unsqueeze(1) - 1, last_B.unsqueeze(1))
    nodes_BT.clamp_(max=positions_BM.shape[1] - 1)
    return Walk(positions_BM.gather(1, nodes_BT), nodes_BT, counts_B, last_B)


def _same(drafts: Candidates, positions_BM: Tensor, tokens_BM: Tensor) -> Tensor:
    """Whether the choices of the first nodes are these drafts, position and token."""
    which = slice(0, drafts.tokens_BK.shape[1])
    return (positions_BM[:, which] == drafts.positions_BK) & (tokens_BM[:, which] == drafts.tokens_BK)
