"""Builds the rows of one masked-diffusion forward from canvases.

Every canvas of a forward, a *node*, feeds some of its positions; a row of it sees the columns that the node names, in both
directions. Nodes that share a slot of the cache have their own columns and also see the shared ones:

    no cache    each node has its own slot: nothing is shared, and no row sees another node
    cache       the root uses the columns of its positions, the other nodes' windows the columns after the canvas:

        columns     0 .. canvas .. main-1 | window of node 1 | window of node 2 | ..
        the root    sees the canvas
        node i      sees its own columns; other positions in the last node before it that fed them, else in the canvas

Knows nothing of how nodes are chosen. Legend: N nodes, B rows of the batch, C cache columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.backbones.base import TokenRows
from decoders.base import HOLE


@dataclass(frozen=True, slots=True)
class Nodes:
    """The canvases of one forward.

    `tokens_NW` has HOLE at masks. Node n runs in the slot `slots_B[batch_N[n]]`, feeds the positions where `fed_NW` into the
    columns `columns_NW`, and its rows see the columns where `visible_NC`. The nodes of one slot follow each other.
    """

    slots_B: Tensor
    batch_N: Tensor
    tokens_NW: Tensor
    fed_NW: Tensor
    columns_NW: Tensor
    visible_NC: Tensor


def separate(tokens_NW: Tensor, lengths_N: Tensor) -> Nodes:
    """Each whole canvas in its own slot."""
    each_N = torch.arange(tokens_NW.shape[0], device=tokens_NW.device)
    positions_W = torch.arange(tokens_NW.shape[1], device=tokens_NW.device)
    inside_NW = positions_W < lengths_N.unsqueeze(1)
    return Nodes(each_N, each_N, tokens_NW, inside_NW, positions_W.expand_as(tokens_NW), inside_NW)


def beside(
    root: Nodes, tokens_NW: Tensor, row_N: Tensor, before_N: Tensor, fed_NW: Tensor, base: int
) -> tuple[Nodes, Tensor]:
    """Each slot's nodes around their shared cache: the root in the canvas's columns, the others in columns from `base` on.

    Node n of row `row_N` continues node `before_N` (a root itself): positions that it does not feed it reads as that node does. A
    chain of nodes follows its root without gaps, each continuing the last; other nodes may follow the chain. Returns the nodes,
    and the column at which each sees a position, [N, W].
    """
    each_N = torch.arange(len(row_N), device=row_N.device)
    is_root_N = before_N == each_N
    positions_W = torch.arange(tokens_NW.shape[1], device=row_N.device)
    counts_N = fed_NW.sum(1).masked_fill(is_root_N, 0)
    ends_N = counts_N.cumsum(0)
    offset_N = ends_N - counts_N - ends_N[is_root_N][row_N]
    columns_NW = torch.where(is_root_N.unsqueeze(1), positions_W, (base + offset_N).unsqueeze(1) + fed_NW.cumsum(1) - 1)
    seen_NW = columns_NW.gather(0, _last_feeder(before_N, fed_NW))
    inside_NW = root.visible_NC[row_N]
    num_columns = base + int((offset_N + counts_N).max())
    visible_NC = torch.zeros(len(row_N), num_columns, dtype=torch.bool, device=row_N.device)
    node_R, position_R = inside_NW.nonzero(as_tuple=True)
    visible_NC[node_R, seen_NW[node_R, position_R]] = True
    return Nodes(root.slots_B, row_N, tokens_NW, fed_NW, columns_NW, visible_NC), seen_NW


def _last_feeder(before_N: Tensor, fed_NW: Tensor) -> Tensor:
    """The node that each position of a node is read from: itself, or the last before it that fed it, else the root."""
    each_N1 = torch.arange(len(before_N), device=before_N.device).unsqueeze(1)
    before_N1 = before_N.unsqueeze(1)
    is_root_N1, in_chain_N1 = before_N1 == each_N1, before_N1 == each_N1 - 1
    # A root holds every position, so no maximum reaches back over it to the slot before.
    chain_NW = torch.where(is_root_N1 | (fed_NW & in_chain_N1), each_N1, -1).cummax(0).values
    return torch.where(fed_NW, each_N1, chain_NW[before_N])


@dataclass(frozen=True, slots=True)
class Laid:
    """The rows of a forward, and the index of each node's positions in them: `place_NW` into [B * T], junk where not fed."""

    rows: TokenRows
    place_NW: Tensor


def lay(nodes: Nodes, mask_id: int) -> Laid:
    """Give every fed position a row of its slot."""
    node_R, position_R = nodes.fed_NW.nonzero(as_tuple=True)
    batch_R = nodes.batch_N[node_R]
    num_batch = nodes.slots_B.shape[0]
    counts_B = torch.bincount(batch_R, minlength=num_batch)
    before_B = counts_B.cumsum(0) - counts_B
    line_R = torch.arange(len(batch_R), device=batch_R.device) - before_B[batch_R]
    num_lines = int(counts_B.max())
    place_R = batch_R * num_lines + line_R

    def spread(values_R: Tensor) -> Tensor:
        spread_BT = values_R.new_zeros(num_batch * num_lines, *values_R.shape[1:])
        spread_BT[place_R] = values_R
        return spread_BT.view(num_batch, num_lines, *values_R.shape[1:])

    tokens_R = nodes.tokens_NW[node_R, position_R]
    place_NW = torch.zeros_like(nodes.tokens_NW)
    place_NW[node_R, position_R] = place_R
    rows = TokenRows(
        slots_B=nodes.slots_B,
        tokens_BT=spread(torch.where(tokens_R == HOLE, mask_id, tokens_R)),
        positions_BT=spread(position_R),
        columns_BT=spread(nodes.columns_NW[node_R, position_R]),
        valid_BT=spread(torch.ones_like(node_R, dtype=torch.bool)),
        visible_BTW=spread(nodes.visible_NC[node_R]),
    )
    return Laid(rows, place_NW)
