"""Finds the kernels that can be used on a device: those that are wanted, installed, and equal to their references there.

None stands for torch's own operations. Triton is imported here and nowhere before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftmill.decoders.kernels.choice_reference import Chosen, Warp
from draftmill.decoders.kernels.notes_reference import Wanted
from draftmill.decoders.kernels.seen import Seen
from draftmill.decoders.kernels.switch import use_kernels


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
    device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int
) -> Attend | None:
    """The kernel for heads of this kind."""
    if dtype == torch.float64 or not use_kernels(device):
        return None
    from draftmill.decoders.kernels.attention import attend
    from draftmill.decoders.kernels.trial import attention_works

    works = attention_works(device, dtype, num_heads=num_heads, key_heads=key_heads, width=width)
    return attend if works else None


def find_product(device: torch.device, dtype: torch.dtype) -> Product | None:
    """The product with the weights of experts."""
    if dtype == torch.float64 or not use_kernels(device):
        return None
    from draftmill.decoders.kernels.experts import product
    from draftmill.decoders.kernels.trial import experts_work

    return product if experts_work(device, dtype) else None


def find_choice(device: torch.device, dtype: torch.dtype) -> Choice | None:
    """What draws the tokens of a model of this dtype."""
    if dtype == torch.float64 or not use_kernels(device):
        return None
    from draftmill.decoders.kernels import choice
    from draftmill.decoders.kernels.trial import choice_works

    return choice if choice_works(device) else None


def find_notes(device: torch.device, dtype: torch.dtype) -> Note | None:
    """What draws the tokens of a model of this dtype where decoders want to know how sure it is of them."""
    if dtype == torch.float64 or not use_kernels(device):
        return None
    from draftmill.decoders.kernels.notes import note
    from draftmill.decoders.kernels.trial import notes_work

    return note if notes_work(device) else None
