"""From logits to tokens and what decoders want to know of each row, in Triton: sampling_reference.py on a GPU.

One launch in place of some hundred. The integers of the noise are the reference's. Logarithms and sums are rounded by the device,
so that a token may differ where two candidates are equal but for that. Where notes are wanted, sums over the model's own
distribution are float64, as in the reference, so that decoders sort masks alike and compare them with the same thresholds; those
over warped distributions are float64 sums of float32 probabilities.

Legend: R rows, V vocabulary, F wanted notes, A draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.draws.keys import TARGET
from draftmill.decoders.kernels.sampling_kernel import sample_rows
from draftmill.decoders.kernels.sampling_reference import WANTED, Wanted, Warp

_BLOCK: Final = 2048
"""The most tokens that a program reads at once."""


def sample(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Wanted] = (),
    warped: bool = False,
    draw_R: Tensor | None = None,
    scored_R: Tensor | None = None,
    mask_id: int = -1,
    ahead: int = 0,
    gumbel: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """See sampling_reference.py; logits in float32 or half precision, which stay as they are."""
    assert warp.own_2R is not None and gumbel is None, "a kernel is told each row's settings, and computes its noise"
    assert mask_id >= 0 or "scores" not in wanted, "scores leave out the mask"
    assert logits_RV.stride(1) == 1, "the logits of a row follow each other"
    (num_rows, vocab_size), top_k = logits_RV.shape, warp.job.top_k
    told_AFR = torch.empty(1 + ahead, 2 + len(wanted), num_rows, dtype=torch.float64, device=logits_RV.device)
    if num_rows:
        sample_rows[(num_rows, 1 + ahead)](
            logits_RV,
            warp.suppressed_V.view(torch.int8),
            *(None if one is None else one.contiguous() for one in (warp.own_2R, key_R2, position_R, draw_R, scored_R)),
            told_AFR,
            logits_RV.stride(0),
            num_rows,
            vocab_size,
            top_k or 0,
            mask_id,
            PURPOSE=TARGET,
            TOP_K=top_k is not None and top_k < vocab_size,
            TOP_P=warp.cuts,
            F=len(wanted),
            WARPED=warped and bool(wanted),
            **{f"AT_{name.upper()}": 2 + wanted.index(name) if name in wanted else 0 for name in WANTED},
            BLOCK=max(16, min(_BLOCK, 1 << (vocab_size - 1).bit_length())),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return told_AFR
