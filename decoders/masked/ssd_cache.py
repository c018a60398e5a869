"""Places the nodes of `ssd` around a cache: what each runs, where it reads the rest, what is copied afterwards.

A chain of nodes stands for forwards of `stepwise` that would follow each other. So each node runs the window that its forward
would run, and reads every other position from the last node before it that ran it, in the same layer of the same forward:

    block_length 3, refresh 9    the canvas     block 0   block 1         runs                reads
    node 0 (the root)            the big _      _ _ _     . . .           block 0             the cache
    node 1                       the big cat    _ _ _     . . .           blocks 0 and 1      the cache
    node 2                       the big cat    _ on _    . . .           block 1             block 0 as node 1 ran it, the cache

A node whose forward would rebuild the cache (a *refresh*) runs its whole canvas, and later nodes read it. Such a node costs far
more rows than others, so there is at most one, and only if the caller wants it. Keys and values that the last right node reads,
and that the next forward won't recompute, are copied into the cache. Knows nothing of models, drafts or acceptance.

Legend: N nodes of all slots, R copied columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.base import HOLE
from decoders.masked.canvases import CanvasState, first_block
from decoders.masked.rows import Nodes, beside
from decoders.masked.ssd_tree import Tree
from decoders.masked.windows import CachedWindows


@dataclass(frozen=True, slots=True)
class NodeCache:
    """The columns of nodes in the cache, and the state to continue from one of them.

    `seen_NW` is the column at which node n sees a position. `block_N` is the block of its next masks; `made_N` says how many
    tokens were decided when the cache that it reads was made. `blocks_NW` is the block of each position.
    """

    nodes: Nodes
    seen_NW: Tensor
    block_N: Tensor
    made_N: Tensor
    blocks_NW: Tensor


def stand(
    windows: CachedWindows, canvas: CanvasState, slots_B: Tensor, roots: Nodes, tree: Tree, *, base: int, fused: bool
) -> NodeCache:
    """Place the nodes of a round around the cache; columns from `base` on are free. `fused` says that nodes may refresh."""
    slots_N, before_N, is_root_N = slots_B[tree.row_N], tree.before(), tree.place_N == 0
    blocks_NW = canvas.blocks(slots_N, tree.tokens_NW.shape[1])
    block_N = first_block(tree.tokens_NW == HOLE, blocks_NW)
    came_N, made_N = block_N[before_N], windows.made_at_S[slots_N]
    run_NW = windows.between(slots_N, came_N, block_N, blocks_NW)
    if fused:
        anew_N = ~is_root_N & windows.anew_after(slots_N, tree.place_N, came_N, block_N)
        run_NW |= anew_N.unsqueeze(1)
        decided_N = windows.decided(slots_N) + tree.place_N
        made_N = tree.gather(tree.spread(torch.where(anew_N, decided_N, made_N)).cummax(1).values)
    fed_NW = torch.where(is_root_N.unsqueeze(1), roots.fed_NW[tree.row_N], run_NW & roots.visible_NC[tree.row_N])
    nodes, seen_NW = beside(roots, tree.tokens_NW, tree.row_N, before_N, fed_NW, base)
    return NodeCache(nodes, seen_NW, block_N, made_N, blocks_NW)


def go_on(
    windows: CachedWindows, slots_B: Tensor, standing: NodeCache, last_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue from the nodes `last_B`: record their blocks and caches.

    Returns the columns to copy, (slots, columns, columns to copy them to), [R] each: all that such a node sees outside of the
    canvas's columns, except what the next forward runs anyway.
    """
    block_B, blocks_BW = standing.block_N[last_B], standing.blocks_NW[last_B]
    seen_BW, positions_W = standing.seen_NW[last_B], torch.arange(blocks_BW.shape[1], device=slots_B.device)
    moved_BW = (seen_BW != positions_W) & ~windows.window(slots_B, block_B, blocks_BW)
    row_R, position_R = moved_BW.nonzero(as_tuple=True)
    windows.enter(slots_B, block_B, standing.made_N[last_B])
    return slots_B[row_R], seen_BW[moved_BW], position_R
