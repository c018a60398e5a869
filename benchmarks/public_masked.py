"""The public baseline for masked diffusion: the published sampler's loop, one canvas at a time.

It follows LLaDA's public code (Nie et al., 2025): every step runs the whole
canvas without a cache, takes the softmax of every position in float64, and reveals the most confident masks of the block.
The network is transformers' Llama under a mask that hides nothing, with the checkpoint's own weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.public_causal import Generated
from draftmill.decoders.base import HOLE, ModelInfo, Request
from recipes.absorbing_folder import load_model


@dataclass(frozen=True, slots=True)
class PublicMasked:
    """One canvas at a time; see the module's docstring. `suppressed` ids are never revealed."""

    model: Any
    mask_id: int
    suppressed: list[int]
    device: torch.device

    @classmethod
    def of(cls, folder: Path, info: ModelInfo, device: str) -> PublicMasked:
        """The loop over the weights in the folder of a builtin model."""
        assert info.mask_id is not None, "a masked-diffusion model without a mask"
        place = torch.device(device)
        return cls(load_model(folder, place), info.mask_id, sorted({*info.suppressed, info.mask_id}), place)

    @torch.no_grad()
    def stepwise(self, requests: Sequence[Request], *, block_length: int) -> Generated:
        """Complete every canvas greedily, one token a forward."""
        texts, forwards, started = {}, 0, time.perf_counter()
        for request in requests:
            canvas = torch.from_numpy(request.canvas.astype("int64")).to(self.device)
            holes = canvas == HOLE
            canvas = torch.where(holes, self.mask_id, canvas)
            forwards += self._fill(canvas, int(holes.nonzero()[0]), block_length)
            texts[request.index] = canvas[holes].tolist()
        return Generated(texts, forwards, time.perf_counter() - started)

    def _fill(self, canvas_L: Tensor, first: int, block_length: int) -> int:
        everything = torch.zeros(1, 1, len(canvas_L), len(canvas_L), device=self.device)
        forwards = 0
        for end in range(first + block_length, len(canvas_L) + block_length, block_length):
            while bool((canvas_L[:end] == self.mask_id).any()):
                logits_LV = self.model(canvas_L[None], attention_mask=everything).logits[0]
                logits_LV[:, self.suppressed] = -torch.inf
                tokens_L = logits_LV.argmax(-1)
                sure_L = torch.softmax(logits_LV.to(torch.float64), -1).gather(-1, tokens_L[:, None])[:, 0]
                sure_L[canvas_L != self.mask_id] = -torch.inf
                sure_L[end:] = -torch.inf
                best = sure_L.argmax()
                canvas_L[best] = tokens_L[best]
                forwards += 1
        return forwards
