"""The public baseline for any-subset speculation: batch 1, two full XLNetLMHeadModel passes per iteration.

It follows the published algorithm (Guo and Ermon, ASSD, Algorithm 1) the way its authors run
it: transformers' model, `perm_mask` and `target_mapping` over the whole canvas, nothing cached, torch's own random numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import XLNetLMHeadModel

from draftmill.decoders.engine.samples import decoding_order

_MASK = 6


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Tokens decided, forwards made and seconds spent."""

    tokens: int
    forwards: int
    seconds: float


class PublicLoop:
    """One canvas at a time; see the module's docstring."""

    def __init__(self, model: XLNetLMHeadModel, *, k: int) -> None:
        self._model, self._k = model.eval(), k

    @classmethod
    def load(cls, folder: Path, *, k: int) -> PublicLoop:
        """Load the checkpoint in float32."""
        return cls(XLNetLMHeadModel.from_pretrained(folder, dtype=torch.float32), k=k)

    @torch.no_grad()
    def decode(self, canvas: NDArray[np.int32], *, max_iterations: int | None = None) -> LoopResult:
        """Decode one canvas, or its first iterations."""
        order, start = decoding_order(canvas)
        positions = torch.from_numpy(order)
        rank = torch.empty_like(positions)
        rank[positions] = torch.arange(len(order))
        tokens = torch.from_numpy(np.where(canvas < 0, _MASK, canvas).astype(np.int64))
        n, forwards, iterations, started = start, 0, 0, time.perf_counter()
        while n < len(order) and (max_iterations is None or iterations < max_iterations):
            n, count = self._iterate(tokens, positions, rank, start, n)
            forwards += count
            iterations += 1
        return LoopResult(n - start, forwards, time.perf_counter() - started)

    def _iterate(self, tokens: Tensor, positions: Tensor, rank: Tensor, start: int, n: int) -> tuple[int, int]:
        where = positions[n : n + self._k]
        hidden_rank = torch.where(rank < n, rank, len(rank))
        q = self._probabilities(tokens, hidden_rank, start, where)
        drafts = torch.multinomial(q, 1).squeeze(1)
        tokens[where] = drafts
        if n == len(rank) - 1:
            return n + 1, 1
        p = self._probabilities(tokens, rank, start, where)
        for offset, draft in enumerate(drafts.tolist()):
            if offset and torch.rand(1) >= p[offset, draft] / q[offset, draft]:
                rest = (p[offset] - q[offset]).clamp(min=0)
                tokens[where[offset]] = torch.multinomial(rest if float(rest.sum()) > 0 else p[offset], 1)
                tokens[where[offset + 1 :]] = _MASK
                return n + offset + 1, 2
        return n + len(where), 2

    def _probabilities(self, tokens: Tensor, rank: Tensor, start: int, where: Tensor) -> Tensor:
        mask = rank[:, None] <= rank[None, :]
        prompt = rank < start
        mask[prompt[:, None] & prompt[None, :]] = False
        mapping = torch.zeros(1, len(where), len(rank))
        mapping[0, torch.arange(len(where)), where] = 1.0
        logits: Tensor = self._model(
            tokens[None], perm_mask=mask[None].float(), target_mapping=mapping, use_mems=False
        ).logits[0]
        logits[:, _MASK] = -torch.inf
        return torch.softmax(logits, -1)
