"""Attention of flat rows over one layer of the slot cache, in Triton: attention_reference.py on a GPU.

Few rows over long slots would keep only a part of the device busy: then the columns are shared out among several programs and
their sums added by a second kernel. How many shares there are depends on shapes alone, never on what the rows see.

Legend: N flat rows, H heads, K key heads, G = H / K, S slots, W columns, P distances.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.kernels.attention_kernel import add_shares, attend_tiles
from draftmill.decoders.kernels.seen import Seen, line_bytes

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""What the kernel computes with; anything else is the reference's."""
# Tensor cores multiply 16 lines at a time.
_LEAST_LINES: Final = 16
_LEAST_WIDTH: Final = 16
# Two stages of keys and values take two thirds of the 99 KiB of shared memory that a program may have on every GPU since Ampere
# (8.6, 8.9 and 12.0 have the least), the queries of a tile the other third (seen.py).
_STAGES: Final = 2
_BLOCK_BYTES: Final = 64 * 1024
_MOST_BLOCK: Final = 64
# Programs that keep a large GPU busy (an H100 has 132 multiprocessors), and columns below which a share is not worth its sum.
_BUSY: Final = 256
_LEAST_SHARE: Final = 512
_MOST_SHARES: Final = 16


def attend(
    query_NHd: Tensor,
    layer_2SKWd: Tensor,
    seen: Seen,
    *,
    scaling: float,
    window: int | None = None,
    relative_NHP: Tensor | None = None,
    shares: int | None = None,
) -> Tensor:
    """See attention_reference.py. The columns are cut into `shares` parts, a power of two; None: as many as are worth it.

    Raises ValueError where query and cache have dtypes that the kernel does not know.
    """
    if query_NHd.dtype not in DTYPES or layer_2SKWd.dtype != query_NHd.dtype:
        raise ValueError(f"query {query_NHd.dtype}, cache {layer_2SKWd.dtype}; allowed: the same one of {DTYPES}")
    num_rows, num_heads, width = query_NHd.shape
    _, _, key_heads, num_columns, _ = layer_2SKWd.shape
    group = num_heads // key_heads
    out_NHd = torch.empty(num_rows, num_heads, width, dtype=query_NHd.dtype, device=query_NHd.device)
    if not num_rows:
        return out_NHd
    assert seen.low_IN.is_contiguous() and seen.high_IN.is_contiguous(), "stretches of rows follow each other"
    query_NHd = query_NHd if query_NHd.stride(2) == 1 else query_NHd.contiguous()
    lines, padded = max(_LEAST_LINES, _power(seen.rows_at_once * group)), max(_LEAST_WIDTH, _power(width))
    block = _block(width, query_NHd.dtype)
    num_tiles = seen.first_T.shape[0]
    shares = shares or _shares(num_tiles * key_heads, num_columns)
    found = out_NHd
    largest = totals = out_NHd
    if shares > 1:
        found = out_NHd.new_empty(shares, num_rows, num_heads, width, dtype=torch.float32)
        largest, totals = out_NHd.new_empty(2, shares, num_rows, num_heads, dtype=torch.float32)
    positions, row_positions, relative = seen.slot_N, seen.slot_N, query_NHd
    if window is not None or relative_NHP is not None:
        assert seen.positions_SW is not None and seen.position_N is not None, (
            "windows and relative scores read positions"
        )
        positions, row_positions = seen.positions_SW, seen.position_N
    if relative_NHP is not None:
        assert relative_NHP.stride(2) == 1, "the numbers of a row's distances follow each other"
        relative = relative_NHP
    attend_tiles[(num_tiles, key_heads, shares)](
        query_NHd,
        layer_2SKWd[0],
        layer_2SKWd[1],
        found,
        largest,
        totals,
        seen.first_T,
        seen.slot_N,
        seen.low_IN,
        seen.high_IN,
        row_positions,
        positions,
        relative,
        scaling * math.log2(math.e),
        num_rows,
        num_columns,
        window or 0,
        relative.shape[-1],
        query_NHd.stride(0),
        query_NHd.stride(1),
        *layer_2SKWd.stride()[1:4],
        positions.stride(0),
        relative.stride(0),
        relative.stride(1),
        HEADS=num_heads,
        GROUP=group,
        LINES=lines,
        WIDTH=width,
        PADDED=padded,
        ROWS=seen.rows_at_once,
        INTERVALS=seen.low_IN.shape[0],
        BLOCK=block,
        SHARES=shares,
        WINDOW=window is not None,
        RELATIVE=relative_NHP is not None,
        WIDE=query_NHd.dtype == torch.float32,
        num_warps=8 if lines * padded > 1 << 13 else 4,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )
    if shares > 1:
        add_shares[(num_rows * num_heads,)](
            found, largest, totals, out_NHd, num_rows * num_heads, WIDTH=width, PADDED=padded, SHARES=shares
        )
    return out_NHd


def _block(width: int, dtype: torch.dtype) -> int:
    """Columns that a program reads at once, a power of two."""
    most = 32 if dtype == torch.float32 else _MOST_BLOCK
    return max(16, min(most, _BLOCK_BYTES // (2 * _STAGES * line_bytes(width, dtype))))


def _shares(num_programs: int, num_columns: int) -> int:
    """Into how many parts the columns are cut: enough to keep the device busy, none of them short."""
    wanted = min(_BUSY // max(1, num_programs), num_columns // _LEAST_SHARE, _MOST_SHARES)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
