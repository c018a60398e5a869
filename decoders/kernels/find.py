"""Finds the kernels that can be used on a device: those that are wanted, installed, and equal to their references there.

None stands for torch's own operations. Triton is imported here and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from draftmill.decoders.kernels.choice_reference import Chosen, Warp
from draftmill.decoders.kernels.notes_reference import Wanted
from draftmill.decoders.kernels.seen import Seen
from draftmill.decoders.kernels.switch import why_no_kernels


class Attend(Protocol):
    """Attention over a layer of the slot cache: attention.py, or its reference."""

    def __call__(
        self,
        query_NHd: Tensor,
        layer_2SKWd: Tensor,
        seen: Seen,
        *,
        scaling: float,
        window: int | None = None,
        relative_NHP: Tensor | None = None,
    ) -> Tensor:
        """See attention_reference.py."""
        ...


Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The product with the weights of experts: experts.py, or its reference."""


class Choice(Protocol):
    """From logits to tokens: choice.py, or its reference."""

    def choose(
        self, logits_RV: Tensor, warp: Warp, key_R2: Tensor, position_R: Tensor, *, scored_R: Tensor | None = None
    ) -> Chosen:
        """See choice_reference.py."""
        ...

    def weigh(self, logits_RV: Tensor, warp: Warp, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, Tensor]:
        """See choice_reference.py."""
        ...


class Note(Protocol):
    """From logits to tokens and what decoders want to know of each row: notes.py, or its reference."""

    def __call__(
        self,
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
        """See notes_reference.py."""
        ...


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


def find_choice(device: torch.device, dtype: torch.dtype) -> Choice | None:
    """What draws the tokens of a model of this dtype."""
    if _problem("choice", device, dtype) is not None:
        return None
    from draftmill.decoders.kernels import choice

    return choice


def find_notes(device: torch.device, dtype: torch.dtype) -> Note | None:
    """What draws the tokens of a model of this dtype where decoders want to know how sure it is of them."""
    if _problem("notes", device, dtype) is not None:
        return None
    from draftmill.decoders.kernels.notes import note

    return note


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
            "choice": lambda: trial.choice_problem(device),
            "notes": lambda: trial.notes_problem(device),
        }
        key = name, device, *((dtype, *sorted(heads.items())) if name in ("attention", "experts") else ())
        if key not in _TRIED:
            _TRIED[key] = trials[name]()
        reason = _TRIED[key]
    _VERDICTS[name] = "on" if reason is None else f"off: {reason}"
    return reason
