"""From logits to tokens and what decoders want to know of each row, in Triton: notes_reference.py on a GPU.

One launch. Sums over the model's own distribution are float64, as in the reference, so that decoders sort masks alike and compare
them with the same thresholds; those over warped distributions are float64 sums of float32 probabilities.

Legend: R rows, V vocabulary, F wanted notes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftmill.decoders.draws.keys import ORDER, TARGET
from draftmill.decoders.kernels.choice import block_of, contiguous_rows, cuts_any
from draftmill.decoders.kernels.choice_reference import Warp
from draftmill.decoders.kernels.notes_kernel import note_rows
from draftmill.decoders.kernels.notes_reference import WANTED, Wanted


def note(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Wanted],
    warped: bool = False,
    step_R: Tensor | None = None,
    draw_R: Tensor | None = None,
    mask_id: int = -1,
) -> Tensor:
    """See notes_reference.py; logits in float32 or half precision."""
    assert draw_R is not None or "order" not in wanted, "the number of the draw"
    assert mask_id >= 0 or "scores" not in wanted, "scores leave out the mask"
    num_rows, vocab_size = logits_RV.shape
    told_FR = torch.empty(2 + len(wanted), num_rows, dtype=torch.float64, device=logits_RV.device)
    places = {f"AT_{kind.upper()}": 2 + wanted.index(kind) if kind in wanted else 0 for kind in WANTED}
    if num_rows:
        note_rows[(num_rows,)](
            contiguous_rows(logits_RV),
            warp.suppressed_V.view(torch.int8),
            warp.temperature_R,
            warp.top_p_R,
            key_R2.contiguous(),
            position_R,
            position_R if step_R is None else step_R,
            position_R if draw_R is None else draw_R,
            told_FR,
            logits_RV.stride(0),
            num_rows,
            vocab_size,
            warp.top_k or 0,
            mask_id,
            PURPOSE=TARGET,
            ORDER_PURPOSE=ORDER,
            TOP_K=cuts_any(warp.top_k, vocab_size),
            TOP_P=warp.cuts,
            WARPED=warped,
            STEPS=step_R is not None,
            **places,
            BLOCK=block_of(vocab_size),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return told_FR
