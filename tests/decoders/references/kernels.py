"""What the kernels must give, in torch: attention, what stands between products, fixed products, and products of experts.

What the kernel for sampling must give is production code (draws/sampling.py).

Legend: N flat rows, H heads, W columns, P distances; of layers and experts: P rows, E experts, D numbers in, M numbers out; of
fixed products: K numbers in, M numbers out.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.kernels.seen import Seen


def rows_of_pool(layer_2SKWd: Tensor, seen: Seen) -> tuple[Tensor, Seen]:
    """Keys and values of a pool as if each row had a slot of its own; copies. Cells behind a slot's own are those of others, as a
    kernel would read them."""
    if seen.start_N is None:
        return layer_2SKWd, seen
    assert seen.num_columns is not None, "slots of a pool have a width"
    start_N, num_cells = seen.start_N, layer_2SKWd.shape[3]
    column_W = torch.arange(seen.num_columns, device=start_N.device)
    cell_NW = (start_N.unsqueeze(1) + column_W).clamp(max=num_cells - 1)
    positions_NW = None if seen.positions_SW is None else seen.positions_SW[0][cell_NW]
    row_N = torch.arange(len(start_N), device=start_N.device)
    cells_2NKWd = layer_2SKWd[:, 0][:, :, cell_NW].transpose(1, 2)
    return cells_2NKWd, replace(seen, slot_N=row_N, positions_SW=positions_NW)


def attend(query_NHd: Tensor, layer_2SKWd: Tensor, seen: Seen, *, scaling: float, **more) -> Tensor:
    """Mix the values of the columns that each row sees by the softmax of its scores, [N, H, d]; sums are in float32 or better.
    A score is scaling x (query . key); with `cap`, cap x tanh(that / cap). With `relative_NHP` the row's number for the distance
    of the two positions is added, as it is: position of the row - position of the column + P / 2, cut to 0 .. P - 1. A head's
    sink is one more score, of a place that every row sees and that holds nothing. A row that sees nothing gets zeros."""
    layer_2SKWd, seen = rows_of_pool(layer_2SKWd, seen)
    group = query_NHd.shape[1] // layer_2SKWd.shape[2]
    wide = torch.promote_types(query_NHd.dtype, torch.float32)
    key_NHWd, value_NHWd = layer_2SKWd[:, seen.slot_N].to(wide).repeat_interleave(group, 2)
    score_NHW = (key_NHWd @ query_NHd.to(wide).unsqueeze(3)).squeeze(3) * scaling
    weight_NHW = weights_of(score_NHW, seen, **more)
    return (weight_NHW.unsqueeze(2) @ value_NHWd).squeeze(2).to(query_NHd.dtype)


def weights_of(
    score_NHW: Tensor,
    seen: Seen,
    *,
    window: int | None = None,
    relative_NHP: Tensor | None = None,
    cap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """What each row weighs the columns with, by its scaled scores for all of them, [N, H, W]."""
    num_heads, num_columns = score_NHW.shape[1:]
    if cap is not None:
        score_NHW = cap * (score_NHW / cap).tanh()
    if relative_NHP is not None:
        assert seen.position_N is not None and seen.positions_SW is not None, "relative scores read positions"
        distance_NW = seen.position_N.unsqueeze(1) - seen.positions_SW[seen.slot_N, :num_columns]
        num_distances = relative_NHP.shape[2]
        place_N1W = (distance_NW + num_distances // 2).clamp(0, num_distances - 1).unsqueeze(1)
        score_NHW = score_NHW + relative_NHP.to(score_NHW.dtype).gather(2, place_N1W.expand(-1, num_heads, -1))
    hidden_N1W = ~seen.visible_NW(num_columns, window).unsqueeze(1)
    score_NHW = score_NHW.masked_fill(hidden_N1W, -torch.inf)
    if sink_H is not None:
        sink_NH1 = sink_H.to(score_NHW.dtype)[:, None].expand(len(score_NHW), -1, 1)
        score_NHW = torch.cat([score_NHW, sink_NH1], 2)
    return score_NHW.softmax(2)[:, :, :num_columns].masked_fill(hidden_N1W, 0.0)


def add_norm(states_PD: Tensor, added_PD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add to the states, in place, and return the sums divided by their root mean square and weighed, [P, D]."""
    if added_PD is not None:
        states_PD += added_PD
    wide = torch.promote_types(states_PD.dtype, torch.float32)
    return functional.rms_norm(states_PD.to(wide), weight_D.shape, weight_D.to(wide), eps).to(states_PD.dtype)


def rotate(
    heads_PJd: Tensor,
    position_P: Tensor,
    cell_P: Tensor,
    pool_2CKd: Tensor,
    turn: tuple[Tensor, float],
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    """Turn each row's queries, in place, and its keys by its position (`turn`: radians a position, float32 [d / 2], and a factor
    of cosines and sines), and write keys and values, which follow the queries, into cell `cell_P` of the cache.
    `norms`: first norm queries and keys, by the weights of each and an epsilon."""
    key_heads, wide = pool_2CKd.shape[2], torch.promote_types(heads_PJd.dtype, torch.float32)
    turned, values = heads_PJd.to(wide).split_with_sizes([heads_PJd.shape[1] - key_heads, key_heads], 1)
    if norms is not None:
        weights_J1d = torch.cat([norms[0].expand(turned.shape[1] - key_heads, -1), norms[1].expand(key_heads, -1)])
        turned = functional.rms_norm(turned, turned.shape[2:], None, norms[2]) * weights_J1d
    frequency_h, factor = turn
    angle_P1h = (position_P.float().unsqueeze(1) * frequency_h).unsqueeze(1)
    cosine, sine = angle_P1h.cos() * factor, angle_P1h.sin() * factor
    low, high = turned.chunk(2, 2)
    turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], 2).to(heads_PJd.dtype)
    heads_PJd[:, : -2 * key_heads] = turned[:, :-key_heads]
    pool_2CKd[0, cell_P], pool_2CKd[1, cell_P] = turned[:, -key_heads:], values.to(heads_PJd.dtype)


def gated(both_PI: Tensor) -> Tensor:
    """silu of the first half of each row times the second half, [P, I / 2]."""
    gate, up = both_PI.to(torch.promote_types(both_PI.dtype, torch.float32)).chunk(2, 1)
    return (functional.silu(gate) * up).to(both_PI.dtype)


def fixed_product(rows_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, [N, M]; with heads, rows [N, H, K] and weights [H, M, K] give [N, H, M]. The kernel's sums are
    in float32 and in one order. Here they are in float64: once they are rounded, the order shows in one number of a billion."""
    rows_HNK = rows_NK.to(torch.float64).transpose(0, -2)
    out_NM = (rows_HNK @ weight_MK.to(torch.float64).mT).transpose(0, -2)
    if bias_M is not None:
        out_NM = out_NM + bias_M.to(torch.float64)
    return out_NM.to(rows_NK.dtype).contiguous()


def product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert, [P, M]; sums are in float32 or better. Expert e has the rows from the
    end of the expert before it up to `end_E[e]` (int32); the last end is P."""
    wide = torch.promote_types(rows_PD.dtype, torch.float32)
    row_P = torch.arange(rows_PD.shape[0], dtype=end_E.dtype, device=end_E.device)
    expert_P = torch.searchsorted(end_E, row_P, right=True)
    return (weight_EMD.to(wide)[expert_P] @ rows_PD.to(wide).unsqueeze(2)).squeeze(2).to(rows_PD.dtype)


LAYERS: Final = SimpleNamespace(add_norm=add_norm, rotate=rotate, gated=gated)
"""What layers.py must give."""
