"""`ssd`: one forward drafts what the next forwards would reveal, and the next one verifies it.

The last forward's predictions for the remaining masks are the drafts: a token for each, in the order in which they would be
revealed (blocks first, then confidence). The first N drafts make a chain of canvases, each with one more draft, and all of them
run in one forward:

    node 0    the big _ sat _ _ .      the canvas as it is          next: cat at 2            the first draft: go on
    node 1    the big cat sat _ _ .    with the first draft         next: mat at 5            the second draft: go on
    node 2    the big cat sat _ mat .  with the first two drafts    next: on at 4             not the third: take it and stop

A node whose drafts are right reveals what `stepwise` reveals from that canvas, drafted or not. So every forward reveals between
1 and N + 1 tokens, and the text and the order of revealing are those of `stepwise`. The predictions of the last right node are
the next drafts. With `tree: mixed` each node but the last two has one more child, which swaps the next two drafts: if only the
order of two drafts was wrong, the walk gets one token further.

With a cache, when it is rebuilt (windows.py), node 0 runs the whole canvas and the other nodes run their windows in the same
forward: a window reads node 0's new keys and values in every layer, as `stepwise` would in its next forward, so a rebuild is
exact. Drafts end where the next rebuild is due: at the block's end, or with `refresh` after that many tokens, and then they
continue into the next block (ssd_cache.py). With `dual_relaxed` they continue past the rebuild, and the cache is rebuilt after
the round: fewer forwards, but the text may differ from that of `stepwise`.

With `draft_length: auto` the nodes of all slots share a budget (ssd_budget.py), which may also let a node rebuild the cache.

Source: "Self speculative decoding for diffusion large language models" (SSD, Algorithm 1, figure 4). Differs on purpose: the
first forward's own token counts; blocks after the next one give drafts too; sampling is supported as well, since drafts
read the noise of their positions.

Legend: M nodes of a slot, N nodes of all slots, C columns, T positions revealed.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from decoders.base import HOLE
from decoders.engine.budget import MOST_AUTO
from decoders.engine.setup import Setup
from decoders.engine.state import Group
from decoders.masked.canvases import first_block, next_up
from decoders.masked.confidence import Reading
from decoders.masked.decoder import MaskedDecoder
from decoders.masked.rows import Nodes, separate
from decoders.masked.settings import SelfSpeculativeSettings
from decoders.masked.ssd_budget import NodeBudget, num_nodes
from decoders.masked.ssd_cache import go_on, stand
from decoders.masked.ssd_tree import Candidates, Tree, Walk, choose_candidates, follow, near_masks, plant


class SelfSpeculative(MaskedDecoder):
    """See the module's docstring. `proposed` counts nodes beside the root: NFE + `proposed` are a sample's sequence-forwards."""

    budget: NodeBudget | None

    def __init__(self, setup: Setup, settings: SelfSpeculativeSettings) -> None:
        super().__init__(setup, settings)
        self.draft_length = MOST_AUTO if settings.draft_length == "auto" else settings.draft_length
        self.mixed, self.relaxed = settings.tree == "mixed", self.cache == "dual_relaxed"
        self.crosses = self.relaxed or self.windows.refresh is not None
        """Whether drafts continue into the next block and read the existing cache there."""
        self.most_nodes = 1 + num_nodes(self.draft_length, mixed=self.mixed)
        if settings.draft_length == "auto":
            self.budget = NodeBudget(self.state, self.draft_length, mixed=self.mixed)

    @property
    def _slots_each(self) -> int:
        # Without a cache each node is a separate canvas; a budget makes room for the actual nodes.
        return self.most_nodes if self.cache == "none" and self.budget is None else 1

    def columns(self, length: int) -> int:
        # The nodes of a budget get the remaining room.
        return length if self.budget is not None else self._columns_of(length, self.most_nodes)

    def _columns_of(self, length: int, num_of_slot: int) -> int:
        """How many columns a canvas and its nodes take, the root included."""
        # The node that enters the next block runs two blocks.
        num_windows = num_of_slot - 1 + (self.crosses and num_of_slot > 1)
        return length + num_windows * self._stride(length)

    def _stride(self, columns: int) -> int:
        """How many columns a node's window takes."""
        block = self.canvas.block_length
        if block is None or self.cache in {"none", "prefix"}:
            return columns
        return min(columns, block + self.info.shift)

    def _most_drafts(self, num_slots: int, width: int, *, fused: bool) -> int:
        """How many drafts each slot may take within `max_tokens`."""
        if self.budget is None:
            return self.draft_length
        spare = (self._spare(num_slots, width) - fused * width) // self._stride(width) - self.crosses
        return min(max((spare + 1) // 2 if self.mixed else spare, 0), self.draft_length)

    def _spare(self, num_slots: int, width: int) -> int:
        """How many columns each slot has beyond its canvas."""
        return self._most_columns(num_slots if self.cache == "none" else max(num_slots, self._shape[0])) - width

    def _fuses(self, num_slots: int, width: int) -> bool:
        """Whether drafts may continue past a refresh, in a node that runs its whole canvas; a budget decides when it pays."""
        strict = self.cache in {"prefix", "dual_strict"} and self.budget is not None and not self.mixed
        return strict and self._spare(num_slots, width) >= width + self._stride(width)

    # ---- one round -----------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        num_rows, began_s = self.counting.useful_rows, time.perf_counter()
        self._round(group)
        if self.budget is not None:
            self.budget.timed(self.counting.useful_rows - num_rows, 0, time.perf_counter() - began_s)

    def _round(self, group: Group) -> None:
        roots, slots_B = self._roots(group), group.index_B
        if self.budget is not None and not self.budget.open(fresh=False):
            self._go_without(group, roots, self.budget)
            return
        fused = self._fuses(len(slots_B), roots.tokens_NW.shape[1])
        drafts = self._candidates(group, roots, fused=fused)
        tree = plant(roots.tokens_NW, drafts, mixed=self.mixed)
        if self.cache == "none":
            self._look_and_take(group, drafts, tree, separate(tree.tokens_NW, self._lengths(group)[tree.row_N]))
            return
        base = roots.tokens_NW.shape[1]
        standing = stand(self.windows, self.canvas, slots_B, roots, tree, base=base, fused=fused)
        last_B = self._look_and_take(group, drafts, tree, standing.nodes)
        if fused or self.windows.refresh is not None:
            self.backbone.copy_columns(*go_on(self.windows, slots_B, standing, last_B))

    def _go_without(self, group: Group, roots: Nodes, budget: NodeBudget) -> None:
        """A round without drafts, as in `stepwise`; keeps the predictions in case the next round may draft."""
        slots_B = group.index_B
        none_B = budget.plan(slots_B, torch.zeros_like(slots_B), kv_tokens=0, fresh=False)
        asked_BW = next_up(roots.tokens_NW == HOLE, self.canvas.blocks(slots_B, roots.tokens_NW.shape[1]))
        reading = self._look(group, roots, slots_B, asked_BW)
        picks_B1 = reading.best(asked_BW).unsqueeze(1)
        self._reveal(group, picks_B1, reading.at(picks_B1), none_B + 1)
        self._keep_drafts(slots_B, torch.arange(len(slots_B), device=slots_B.device), reading, asked_BW)

    def _look_and_take(self, group: Group, drafts: Candidates, tree: Tree, nodes: Nodes) -> Tensor:
        """Run the nodes, reveal the choices of the right ones, and keep the next drafts; returns the last right nodes, [B]."""
        slots_B, slots_N = group.index_B, group.index_B[tree.row_N]
        if self.budget is not None:
            self._allocate_at_least(len(nodes.slots_B), nodes.visible_NC.shape[1])
        asked_NW = self._asked(slots_N, nodes)
        reading = self._look(group, nodes, slots_N, asked_NW)
        walk = self._walk(group, drafts, tree, nodes, reading)
        last_B = tree.number(walk.last_B)
        for nodes_B in (tree.number(torch.zeros_like(last_B)), last_B):
            self._keep_drafts(slots_B, nodes_B, reading, asked_NW)
        return last_B

    def _walk(self, group: Group, drafts: Candidates, tree: Tree, nodes: Nodes, reading: Reading) -> Walk:
        """Reveal the choices of the right nodes, and count the round."""
        state, slots_B = self.state, group.index_B
        blocks_NW = self.canvas.blocks(slots_B[tree.row_N], nodes.tokens_NW.shape[1])
        picks_N = reading.best(next_up(nodes.tokens_NW == HOLE, blocks_NW))
        tokens_N, log_p_N = (told_N1.squeeze(1) for told_N1 in reading.at(picks_N.unsqueeze(1)))
        walk = follow(drafts, tree.spread(picks_N), tree.spread(tokens_N), mixed=self.mixed)
        told_BT = (tree.spread(tokens_N).gather(1, walk.nodes_BT), tree.spread(log_p_N).gather(1, walk.nodes_BT))
        shown = (drafts.tokens_BK, drafts.num_B)
        counts_B = self._reveal(group, walk.positions_BT, told_BT, walk.counts_B, shown)
        state.proposed_S[slots_B] += tree.exists_BM.sum(1) - 1
        state.accepted_S[slots_B] += (counts_B - 1).clamp(min=0)
        if self.budget is not None:
            self.budget.learn(slots_B, drafts.num_B, walk.counts_B - 1)
        return walk

    def _candidates(self, group: Group, roots: Nodes, *, fused: bool) -> Candidates:
        slots_B, width = group.index_B, roots.tokens_NW.shape[1]
        masked_BW, blocks_BW = roots.tokens_NW == HOLE, self.canvas.blocks(slots_B, width)
        open_BW = self._open(masked_BW, blocks_BW, fused=fused)
        drafts_BW, sure_BW = self.canvas.drafts_SW[slots_B, :width], self.canvas.draft_sure_SW[slots_B, :width]
        sure_BW = sure_BW.masked_fill(~open_BW, -torch.inf)
        # The last mask needs no draft: the node that reaches it reveals it anyway.
        most_B = (open_BW.sum(1) - 1).clamp(max=self._most_drafts(len(slots_B), width, fused=fused))
        left_B = None if self.relaxed else self.windows.until_refresh(slots_B)
        if left_B is not None:
            most_B = torch.minimum(most_B, left_B - 1 + fused * (self.windows.refresh or 0))
        if self.budget is not None:
            refresh_at_B = next_up(masked_BW, blocks_BW).sum(1) if left_B is None else left_B
            sizes = roots.fed_NW.sum(1), self._node_sizes(slots_B, roots, blocks_BW), roots.visible_NC.sum(1)
            self.budget.size(*sizes, refresh_at_B if fused else None)
            most_B = self._allot(group, torch.minimum(most_B, (sure_BW != -torch.inf).sum(1)))
        return choose_candidates(drafts_BW, sure_BW, blocks_BW, most_B)

    def _open(self, masked_BW: Tensor, blocks_BW: Tensor, *, fused: bool) -> Tensor:
        """Mark the masks for which there may be drafts: all, or as far as the cache serves, bool [B, W]."""
        if self.cache == "none":
            return masked_BW
        first_BW = next_up(masked_BW, blocks_BW)
        return first_BW | next_up(masked_BW & ~first_BW, blocks_BW) if self.crosses or fused else first_BW

    def _node_sizes(self, slots_B: Tensor, roots: Nodes, blocks_BW: Tensor) -> Tensor:
        """How many rows a node takes that is not a root, [B]."""
        if self.cache == "none":
            return roots.fed_NW.sum(1)
        block_B = first_block(roots.tokens_NW == HOLE, blocks_BW)
        return (roots.visible_NC & self.windows.window(slots_B, block_B, blocks_BW)).sum(1)

    def _asked(self, slots_N: Tensor, nodes: Nodes) -> Tensor:
        """Mark the masks that each node predicts: its own choice, and possible drafts after it, bool [N, W]."""
        masked_NW = nodes.tokens_NW == HOLE
        count = 1 + self.draft_length + (0 if self.cache == "none" else self.canvas.block_length or 0)
        asked_NW = near_masks(masked_NW, self.canvas.blocks(slots_N, masked_NW.shape[1]), count)
        source_W = (torch.arange(masked_NW.shape[1], device=masked_NW.device) - self.info.shift).clamp(min=0)
        return asked_NW & nodes.fed_NW[:, source_W]

    def _keep_drafts(self, slots_B: Tensor, nodes_B: Tensor, reading: Reading, asked_NW: Tensor) -> None:
        """Keep the last right nodes' predictions for the remaining masks as the next drafts."""
        row_R, position_R = asked_NW[nodes_B].nonzero(as_tuple=True)
        told = (nodes_B[row_R], position_R)
        where = (slots_B[row_R], position_R)
        self.canvas.drafts_SW[where] = reading.tokens_NW[told]
        self.canvas.draft_sure_SW[where] = reading.confidence_NW[told]
