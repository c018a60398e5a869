"""Finds the kernels that can be used on a device: those that are wanted, installed, and equal to their references there.

None stands for torch's own operations. Triton is imported here and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.kernels.switch import why_no_kernels

Attend = Callable[..., Tensor]
"""Attention over a layer of the slot cache: attention.py, or its reference, whose signature it has."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The product with the weights of experts: experts.py, or its reference."""
Sample = Callable[..., Tensor]
"""From logits to tokens and what decoders want to know of each row: sampling.py, or its reference, whose signature it has."""


def find_attention(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int, relative: bool = False
) -> Attend | None:
    """The kernel for heads of this kind; `relative` if the model adds a score that depends on distances."""
    heads = {"num_heads": num_heads, "key_heads": key_heads, "width": width, "relative": relative}
    if _problem("attention", device, dtype, **heads) is not None:
        return None
    from draftmill.decoders.kernels.attention import attend

    return attend


def find_product(device: torch.device, dtype: torch.dtype) -> Product | None:
    """The product with the weights of experts."""
    if _problem("experts", device, dtype) is not None:
        return None
    from draftmill.decoders.kernels.experts import product

    return product


def find_sampling(device: torch.device, dtype: torch.dtype) -> Sample | None:
    """What draws the tokens of a model of this dtype, and tells of them."""
    if _problem("sampling", device, dtype) is not None:
        return None
    from draftmill.decoders.kernels.sampling import sample

    return sample


_VERDICTS: Final[dict[str, str]] = {}
# What each trial has found in this process: one takes seconds, and a decoder asks for the same kernel several times.
_TRIED: Final[dict[tuple[object, ...], str | None]] = {}


def verdicts() -> dict[str, str]:
    """What was last found in this process for each kernel that was asked for: `on`, or `off: ` and why."""
    return dict(_VERDICTS)


def _problem(name: str, device: torch.device, dtype: torch.dtype, **heads: int) -> str | None:
    """Why a kernel is not used, in a few words; None if it is."""
    reason = "float64 is computed by torch" if dtype == torch.float64 else why_no_kernels(device)
    if reason is None:
        from draftmill.decoders.kernels import trial

        trials: dict[str, Callable[[], str | None]] = {
            "attention": lambda: trial.attention_problem(device, dtype, **heads),
            "experts": lambda: trial.experts_problem(device, dtype),
            "sampling": lambda: trial.sampling_problem(device),
        }
        key = name, device, *((dtype, *sorted(heads.items())) if name in ("attention", "experts") else ())
        if key not in _TRIED:
            _TRIED[key] = trials[name]()
        reason = _TRIED[key]
    _VERDICTS[name] = "on" if reason is None else f"off: {reason}"
    return reason
