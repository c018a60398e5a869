"""From logits to tokens, log-probabilities and judgements, in Triton: choice_reference.py on a GPU.

One launch in place of some hundred. The integers of the noise are the reference's. Logarithms and sums are rounded by the device,
so that a token may differ where two candidates are equal but for that.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.draws.keys import TARGET
from draftmill.decoders.kernels.choice_kernel import choose_rows, weigh_rows
from draftmill.decoders.kernels.choice_reference import Chosen, Warp

_BLOCK: Final = 2048


def choose(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    draft_R: Tensor | None = None,
    scored_R: Tensor | None = None,
) -> Chosen:
    """See choice_reference.py; logits in float32 or half precision."""
    num_rows, vocab_size = logits_RV.shape
    none_R = torch.full_like(position_R, -1)
    token_R, log_p_R = torch.empty_like(position_R), _numbers(logits_RV)
    accepted_R = torch.empty(num_rows, dtype=torch.int8, device=logits_RV.device)
    if num_rows:
        choose_rows[(num_rows,)](
            contiguous_rows(logits_RV),
            warp.suppressed_V.view(torch.int8),
            warp.temperature_R,
            warp.top_p_R,
            key_R2.contiguous(),
            position_R,
            none_R if draft_R is None else draft_R,
            none_R if scored_R is None else scored_R,
            token_R,
            log_p_R,
            accepted_R,
            logits_RV.stride(0),
            vocab_size,
            warp.top_k or 0,
            PURPOSE=TARGET,
            TOP_K=cuts_any(warp.top_k, vocab_size),
            TOP_P=warp.cuts,
            BLOCK=block_of(vocab_size),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return Chosen(token_R, log_p_R, accepted_R.view(torch.bool))


def weigh(logits_RV: Tensor, warp: Warp, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, Tensor]:
    """See choice_reference.py; logits in float32 or half precision."""
    num_rows, vocab_size = logits_RV.shape
    ratio_R, log_p_R = _numbers(logits_RV), _numbers(logits_RV)
    if num_rows:
        weigh_rows[(num_rows,)](
            contiguous_rows(logits_RV),
            warp.suppressed_V.view(torch.int8),
            warp.temperature_R,
            warp.top_p_R,
            draft_R,
            log_q_R,
            ratio_R,
            log_p_R,
            logits_RV.stride(0),
            vocab_size,
            warp.top_k or 0,
            TOP_K=cuts_any(warp.top_k, vocab_size),
            TOP_P=warp.cuts,
            BLOCK=block_of(vocab_size),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return ratio_R, log_p_R


def contiguous_rows(logits_RV: Tensor) -> Tensor:
    """Logits as they are: the kernels know only the distance between rows."""
    assert logits_RV.stride(1) == 1, "the logits of a row follow each other"
    return logits_RV


def _numbers(logits_RV: Tensor) -> Tensor:
    return torch.empty(logits_RV.shape[0], dtype=torch.float64, device=logits_RV.device)


def cuts_any(top_k: int | None, vocab_size: int) -> bool:
    """Whether top-k leaves any token out."""
    return top_k is not None and top_k < vocab_size


def block_of(vocab_size: int) -> int:
    """How many tokens a program reads at once."""
    return max(16, min(_BLOCK, 1 << (vocab_size - 1).bit_length()))
