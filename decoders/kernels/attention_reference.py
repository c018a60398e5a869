"""Attention of flat rows over one layer of the slot cache, in torch: what attention.py must give.

Legend: N flat rows, H heads, K key heads, G = H / K, S slots, W columns, P distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.decoders.kernels.seen import Seen


def attend(
    query_NHd: Tensor,
    layer_2SKWd: Tensor,
    seen: Seen,
    *,
    scaling: float,
    window: int | None = None,
    relative_NHP: Tensor | None = None,
) -> Tensor:
    """Mix the values of the columns that each row sees by the softmax of its scores, [N, H, d]; sums are in float32 or better.

    A score is scaling x (query . key). With `relative_NHP` the row's number for the distance of the two positions is added, as it
    is: position of the row - position of the column + P / 2, cut to 0 .. P - 1. A row that sees nothing gets zeros.
    """
    num_columns = layer_2SKWd.shape[3]
    group = query_NHd.shape[1] // layer_2SKWd.shape[2]
    wide = torch.promote_types(query_NHd.dtype, torch.float32)
    key_NHWd, value_NHWd = layer_2SKWd[:, seen.slot_N].to(wide).repeat_interleave(group, 2)
    score_NHW = (key_NHWd @ query_NHd.to(wide).unsqueeze(3)).squeeze(3) * scaling
    if relative_NHP is not None:
        score_NHW += _by_distance(relative_NHP.to(wide), seen, num_columns)
    hidden_N1W = ~seen.visible_NW(num_columns, window).unsqueeze(1)
    weight_NHW = score_NHW.masked_fill(hidden_N1W, -torch.inf).softmax(2).masked_fill(hidden_N1W, 0.0)
    return (weight_NHW.unsqueeze(2) @ value_NHWd).squeeze(2).to(query_NHd.dtype)


def _by_distance(relative_NHP: Tensor, seen: Seen, num_columns: int) -> Tensor:
    assert seen.position_N is not None and seen.positions_SW is not None, "relative scores read positions"
    distance_NW = seen.position_N.unsqueeze(1) - seen.positions_SW[seen.slot_N, :num_columns]
    num_distances = relative_NHP.shape[2]
    place_NW = (distance_NW + num_distances // 2).clamp(0, num_distances - 1)
    return relative_NHP.gather(2, place_NW.unsqueeze(1).expand(-1, relative_NHP.shape[1], -1))
