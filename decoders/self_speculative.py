"""`ssd`: one forward says what the next ones would reveal, and proves it.

What the last forward said of the masks that are still there are the drafts: a token for each, in the order in which they would
come next (blocks first, then confidence). The first N of them make a chain of canvases, each with one draft more, and all of
them run in one forward:

    node 0    the big _ sat _ _ .      the canvas as it is          says: cat at 2 next       the first draft: go on
    node 1    the big cat sat _ _ .    with the first draft         says: mat at 5 next       the second draft: go on
    node 2    the big cat sat _ mat .  with the first two drafts    says: on at 4 next        not the third: take it and stop

A node whose canvas is right reveals what `stepwise` reveals from that canvas, whether it was drafted or not, so every forward
reveals at least one token and at most N + 1, and the text and the order of revealing are those of `stepwise`. The last right
node's forward has said what the next drafts are. With `tree: mixed` each node but the last two has one more child that takes the
draft after the next first: when only the order of two drafts was wrong, the walk gets one token further.

With a cache, a block's first forward runs node 0 whole and the others' windows in the same forward: a window reads node 0's fresh
keys and values in every layer, as `stepwise` would in its next forward, so nothing is lost by refreshing. No draft goes past a
block's end there, since the next block's forwards read another cache.

Source: "Self speculative decoding for diffusion large language models" (SSD, Algorithm 1, figure 4). Differs on purpose: the
first forward's own token counts; blocks after the next one give drafts too; sampled texts are decoded as well, since drafts
read the noise of their positions.

Legend: S slots, B slots of this step, K drafts of a slot, M nodes of a slot, N nodes of all slots, W positions, C columns,
T positions revealed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoders.base import HOLE, Request
from decoders.canvases import next_up
from decoders.confidence import Reading
from decoders.drafted_canvases import Candidates, Tree, choose_candidates, near_masks, plant
from decoders.masked_diffusion import MaskedDecoder
from decoders.node_rows import Nodes, separate
from decoders.settings import SelfSpeculative as SelfSpeculativeSettings
from decoders.speculation import leading
from decoders.state import Group


@dataclass(frozen=True, slots=True)
class Walk:
    """What one round reveals: places and the nodes that say so, in order, [B, T]; only the first `counts_B` count.

    `last_B` is the last node whose canvas is right: the number of a node of its slot, as those in `nodes_BT`.
    """

    positions_BT: Tensor
    nodes_BT: Tensor
    counts_B: Tensor
    last_B: Tensor


class SelfSpeculative(MaskedDecoder):
    """See the module's docstring. `proposed` counts nodes beside the root: a sample's NFE and it are its sequence-forwards."""

    def __init__(self, *args: Any, settings: SelfSpeculativeSettings, **kwargs: Any) -> None:
        self.draft_length = settings.draft_length
        self.mixed = settings.tree == "mixed"
        self.most_nodes = 1 + settings.draft_length + (settings.draft_length - 1 if self.mixed else 0)
        super().__init__(
            *args,
            block_length=settings.block_length,
            confidence=settings.confidence,
            cache=settings.cache,
            **kwargs,
        )

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        columns = self.state.tokens_SW.shape[1]
        if self.cache == "none":
            self.backbone.allocate(self.max_rows * self.most_nodes, columns)
        else:
            self.backbone.allocate(self.max_rows, columns + (self.most_nodes - 1) * self._stride(columns))

    def _columns(self, length: int) -> int:
        return length + (self.most_nodes - 1) * (length if self.cache == "none" else self._stride(length))

    def _stride(self, columns: int) -> int:
        """How many columns a node's window takes."""
        block = self.canvas.block_length
        return columns if block is None or self.cache == "prefix" else min(columns, block + self.info.shift)

    # ---- one round -----------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        roots, slots_B = self._roots(group), group.index_B
        drafts = self._candidates(group, roots)
        tree = plant(roots.tokens_NW, drafts, mixed=self.mixed)
        nodes = self._nodes(group, roots, tree)
        blocks_NW = self.canvas.blocks(slots_B, nodes.tokens_NW.shape[1])[tree.row_N]
        masked_NW = nodes.tokens_NW == HOLE
        source_W = (torch.arange(masked_NW.shape[1], device=masked_NW.device) - self.info.shift).clamp(min=0)
        readable_NW = nodes.fed_NW[:, source_W]
        asked_NW = near_masks(masked_NW, blocks_NW, self._num_asked()) & readable_NW
        reading = self._look(group, nodes, slots_B[tree.row_N], asked_NW)
        picks_N = reading.best(next_up(masked_NW, blocks_NW))
        said_N = tuple(told_N1.squeeze(1) for told_N1 in reading.at(picks_N.unsqueeze(1)))
        walk = self._walk(drafts, tree.spread(picks_N), tree.spread(said_N[0]))
        told_BT = tuple(tree.spread(values_N).gather(1, walk.nodes_BT) for values_N in said_N)
        num_nodes_B = tree.exists_BM.sum(1) - 1
        counts_B = self._reveal(
            group, walk.positions_BT, (told_BT[0], told_BT[1]), walk.counts_B, (drafts.tokens_BK, drafts.num_B)
        )
        self.state.proposed_S[slots_B] += num_nodes_B
        self.state.accepted_S[slots_B] += (counts_B - 1).clamp(min=0)
        self._keep_drafts(slots_B, tree.number(walk.last_B), reading, asked_NW)

    def _num_asked(self) -> int:
        """Of how many masks a node is asked, at least: its own choice and the drafts after it, which may be the next block's."""
        block = 0 if self.cache == "none" else self.canvas.block_length or 0
        return self.draft_length + 1 + block

    def _candidates(self, group: Group, roots: Nodes) -> Candidates:
        slots_B, width = group.index_B, roots.tokens_NW.shape[1]
        blocks_BW = self.canvas.blocks(slots_B, width)
        open_BW = masked_BW = roots.tokens_NW == HOLE
        if self.cache != "none":
            open_BW = next_up(masked_BW, blocks_BW)
        # The last mask needs no draft: whoever comes to it takes it anyway.
        most_B = (open_BW.sum(1) - 1).clamp(max=self.draft_length)
        drafts_BW, sure_BW = self.canvas.drafts_SW[slots_B, :width], self.canvas.draft_sure_SW[slots_B, :width]
        return choose_candidates(drafts_BW, sure_BW.masked_fill(~open_BW, -torch.inf), blocks_BW, most_B)

    def _nodes(self, group: Group, roots: Nodes, tree: Tree) -> Nodes:
        """Where the nodes stand: in slots of their own, or around the cache that they share."""
        if self.cache == "none":
            return separate(tree.tokens_NW, self._lengths(group)[tree.row_N])
        slots_B, width = group.index_B, roots.tokens_NW.shape[1]
        blocks_BW = self.canvas.blocks(slots_B, width)
        window_BW = self._window(slots_B, blocks_BW, self._refreshed_S[slots_B] - 1) & roots.visible_NC
        first_N = window_BW.to(torch.int8).argmax(1)[tree.row_N]
        is_root_N, base = tree.place_N == 0, self.state.tokens_SW.shape[1]
        stride = self._stride(base)
        start_N1 = (base + (tree.place_N - 1) * stride - first_N).unsqueeze(1)
        positions_W = torch.arange(width, device=slots_B.device)
        columns_NW = torch.where(is_root_N.unsqueeze(1), positions_W, start_N1 + positions_W)
        window_NW = window_BW[tree.row_N]
        fed_NW = torch.where(is_root_N.unsqueeze(1), roots.fed_NW[tree.row_N], window_NW)
        num_columns = base + (tree.exists_BM.shape[1] - 1) * stride
        visible_NC = torch.zeros(len(is_root_N), num_columns, dtype=torch.bool, device=slots_B.device)
        shared_NW = roots.visible_NC[tree.row_N] & (is_root_N.unsqueeze(1) | ~window_NW)
        visible_NC[:, :width] = shared_NW
        node_R, position_R = fed_NW.nonzero(as_tuple=True)
        visible_NC[node_R, columns_NW[node_R, position_R]] = True
        return Nodes(slots_B, tree.row_N, tree.tokens_NW, fed_NW, columns_NW, visible_NC)

    def _walk(self, drafts: Candidates, positions_BM: Tensor, tokens_BM: Tensor) -> Walk:
        """Follow the chain as long as a node's own choice is the next draft; take the last one's own choice too."""
        num_drafts = drafts.tokens_BK.shape[1]
        offsets_K = torch.arange(num_drafts, device=positions_BM.device)
        same_BK = self._same(drafts, positions_BM, tokens_BM, slice(0, num_drafts))
        accepted_B = leading(same_BK & (offsets_K < drafts.num_B.unsqueeze(1)))
        last_B, counts_B = accepted_B, accepted_B + 1
        nodes_BT = torch.arange(num_drafts + 2, device=positions_BM.device).repeat(len(last_B), 1)
        if self.mixed and num_drafts > 1:
            swapped_BK = drafts.shifted()
            jump_BK = self._same(swapped_BK, positions_BM, tokens_BM, slice(0, num_drafts - 1))
            can_B = accepted_B <= drafts.num_B - 2
            jumps_B = can_B & jump_BK.gather(1, accepted_B.clamp(max=num_drafts - 2).unsqueeze(1)).squeeze(1)
            last_B = torch.where(jumps_B, num_drafts + 1 + accepted_B, last_B)
            counts_B = counts_B + jumps_B
            nodes_BT.scatter_(1, counts_B.unsqueeze(1) - 1, last_B.unsqueeze(1))
        nodes_BT.clamp_(max=positions_BM.shape[1] - 1)
        return Walk(positions_BM.gather(1, nodes_BT), nodes_BT, counts_B, last_B)

    @staticmethod
    def _same(drafts: Candidates, positions_BM: Tensor, tokens_BM: Tensor, which: slice) -> Tensor:
        """Whether the choices of these nodes are these drafts, position and token."""
        return (positions_BM[:, which] == drafts.positions_BK) & (tokens_BM[:, which] == drafts.tokens_BK)

    def _keep_drafts(self, slots_B: Tensor, nodes_B: Tensor, reading: Reading, asked_NW: Tensor) -> None:
        """What the last right nodes said of the masks that are left are the next drafts."""
        row_R, position_R = asked_NW[nodes_B].nonzero(as_tuple=True)
        told = (nodes_B[row_R], position_R)
        where = (slots_B[row_R], position_R)
        self.canvas.drafts_SW[where] = reading.tokens_NW[told]
        self.canvas.draft_sure_SW[where] = reading.confidence_NW[told]
