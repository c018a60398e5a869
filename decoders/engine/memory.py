"""Divides a device's memory among the parts of a batch, and so limits its slots. actors/memory.py measures.

The memory that is free after all models are loaded is divided once:

    cache and state     the remainder; a slot takes its columns' bytes and its decoder's state
    prompts             the activations of a forward over prompts, for a limited number of rows
    logits              a part of a forward's logits, with its probabilities, noise and float64 copies; once more for graphs,
                        which keep memory of their own
    noise               cached noise, in bytes; noise that does not fit is recomputed in each forward; none where kernels draw
    a tenth             fragmentation, kernels' workspaces, and layers that exist twice while the cache grows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

_MiB: Final = 1 << 20
_CPU_LOGITS, _GPU_LOGITS = 32 * _MiB, 256 * _MiB
_CPU_NOISE, _GPU_NOISE = 256 * _MiB, 1024 * _MiB
# The logits of a part and their copies: raw, probabilities, noise, and float64 or int64 twice.
_COPIES: Final = 8
_LEAST_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes by purpose. `slots` and `prompt_rows` are None if memory was not measured: then only `batching` bounds them."""

    logits: int
    noise: int
    slots: int | None = None
    prompt_rows: int | None = None

    @classmethod
    def unmeasured(cls, device: torch.device) -> Account:
        """For a device whose free memory is unknown."""
        on_cpu = device.type == "cpu"
        return cls(_CPU_LOGITS if on_cpu else _GPU_LOGITS, _CPU_NOISE if on_cpu else _GPU_NOISE)

    @classmethod
    def of(
        cls,
        device: torch.device,
        free_bytes: int,
        *,
        row_bytes: int,
        keeps_noise: bool = True,
        captures: bool = False,
    ) -> Account:
        """Share out what is free; `row_bytes` are the activations of a token row in a forward.

        `keeps_noise`: draws read noise from memory; `captures`: forwards are captured as graphs.
        """
        most = cls.unmeasured(device)
        logits, prompts = min(most.logits, free_bytes // 64), free_bytes // 8
        noise = min(most.noise, free_bytes // 16) if keeps_noise else 0
        slots = free_bytes * 9 // 10 - _COPIES * logits * (2 if captures else 1) - noise - prompts
        return cls(logits, noise, slots, max(1, prompts // max(1, row_bytes)))

    def parts(self, num_rows: int, num_bytes: int) -> Iterator[slice]:
        """Cut rows of `num_bytes` each into parts whose logits are held at once; one empty part where there are no rows.

        No part is made smaller than a product's least rows, which it would be padded to.
        """
        step = max(_LEAST_ROWS, self.logits // max(1, num_bytes))
        return (slice(first, first + step) for first in range(0, max(num_rows, 1), step))


def column_multiple(backbone: object) -> int:
    """What a backbone rounds its columns up to."""
    rules = getattr(backbone, "rules", None)
    return 1 if rules is None else int(rules.column_multiple)


def give(backbone: object, num_slots: int, num_columns: int, had: tuple[int, int]) -> None:
    """Resize a backbone's cache from `had` to these slots and columns; toy backbones, which only grow, don't shrink."""
    grows = num_slots >= had[0] and num_columns >= had[1]
    change = None if grows else getattr(backbone, "resize", None)
    (change or backbone.allocate)(num_slots, num_columns)  # type: ignore[attr-defined]
