"""Scores the end of a text under block diffusion: exactly at block size 1, else by a bound over random masks in each block.

The probability of a block's tokens is that of masked diffusion given the clean blocks before it. So one forward runs the clean
text up to the last block, and after it a masked copy of every block that is scored (the layout of these models' training).
Several draws share the clean text, as far as their copies take no more rows than it:

    columns       0 .. last block's start | draw 0: block 3, block 4, .. | draw 1: block 3, block 4, ..
    a row sees    its block and those before it (causal_cache: the tokens to its left)
                                          | the clean blocks before its own, and its copy

With blocks of one token each copy is a single mask, so every token's own probability is read: the score is exact.

In models that predict the next token (Fast-dLLM v2), the first token of a block is predicted by the clean row before it, as when
decoding, so it is never masked; only at position 0 there is no such row. The last block ends with the text, as in training.

Sources: Arriola et al., "Block diffusion" (BD3-LM, 2025), the bound of a sum over blocks; SDAR (Cheng et al., 2025).

Legend: N canvases of a forward, T rows of a canvas, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.backbones.base import TokenBackbone, TokenRows
from decoders.base import Request
from decoders.blocks.settings import BlockDiffusionSettings
from decoders.common_settings import Estimate
from decoders.engine.estimates import BoundScorer, Canvas
from decoders.engine.setup import Setup

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one canvas, [T] each: a row sees the columns below `limit_T` and those in [`low_T`, `high_T`).

    `asked_R` are the rows that predict the asked tokens, draw after draw.
    """

    tokens_T: Ints
    positions_T: Ints
    columns_T: Ints
    limit_T: Ints
    low_T: Ints
    high_T: Ints
    asked_R: Ints


class BlockScorer(BoundScorer):
    """See the module's docstring."""

    backbone: TokenBackbone

    def __init__(self, setup: Setup, settings: BlockDiffusionSettings, estimate: Estimate) -> None:
        super().__init__(setup, settings, estimate)
        self.size, self.causal_cache = settings.size_for(setup.info), settings.causal_cache
        if self.info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {self.info.family!r} have no mask to score with")
        self.mask_id = self.info.mask_id

    def columns(self, length: int) -> int:
        return 2 * length  # the clean text, and copies that are not longer than the whole text

    def _start(self, slot: int, request: Request) -> None:
        scored = request.to_score()
        if len(request.canvas) - int(scored[0]) != len(scored):
            raise ValueError("block diffusion scores the end of a text: all tokens from the first scored one on")
        super()._start(slot, request)

    def _grouped(self, request: Request, scored: Ints) -> tuple[list[Ints], Ints]:
        is_alone = (
            (scored % self.size == 0) & (scored > 0) if self.info.shift else np.zeros(len(scored), dtype=np.bool_)
        )
        masked = scored[~is_alone]
        blocks = masked // self.size
        return [masked[blocks == block] for block in np.unique(blocks)], scored[is_alone]

    def _per_canvas(self, length: int, positions: Sequence[Ints]) -> int:
        if not positions:
            return 1
        first, last = (int(positions[number][0]) // self.size * self.size for number in (0, -1))
        return max(1, last // (length - first))

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _num_clean(self, positions: Sequence[Ints], alone: Ints) -> int:
        """How many clean rows there are: up to the last block with masks, or the last token that the row before it predicts."""
        last_block = int(positions[-1][0]) // self.size * self.size if positions else 0
        return max(last_block, int(alone[-1]) if len(alone) else 0)

    def _rows(self, canvas: Canvas) -> Rows:
        text, size = canvas.text, self.size
        length, clean = len(text.tokens_L), self._num_clean(text.positions, text.alone)
        positions = np.arange(clean, dtype=np.int64)
        ends = positions + 1 if self.causal_cache else (positions // size + 1) * size
        none = np.zeros(clean, dtype=np.int64)
        parts = [(text.tokens_L[:clean], positions, positions, np.minimum(ends, clean), none, none)]
        asked, used = [], clean
        for draw in canvas.draws:
            tokens = text.tokens_L.copy()
            tokens[draw.masked] = self.mask_id
            place_L = np.full(length, -1, dtype=np.int64)
            for block in np.unique(draw.masked // size):
                start, end = int(block) * size, min(int(block + 1) * size, length)
                copy = np.arange(start, end, dtype=np.int64)
                columns = used + copy - start
                place_L[start:end] = columns
                full = np.ones(end - start, dtype=np.int64)
                parts.append((tokens[start:end], copy, columns, full * start, full * used, full * (used + end - start)))
                used += end - start
            asked.append(self._asked(draw.asked_R, place_L))
        grids = [np.concatenate(each) for each in zip(*parts, strict=True)]
        tokens_T, positions_T, columns_T, limit_T, low_T, high_T = grids
        return Rows(tokens_T, positions_T, columns_T, limit_T, low_T, high_T, np.concatenate(asked))

    def _asked(self, positions_R: Ints, place_L: Ints) -> Ints:
        """The row that predicts each position; a row's number is its column."""
        if not self.info.shift:
            return place_L[positions_R]
        before_R = np.maximum(positions_R - 1, 0)
        is_alone_R = (positions_R % self.size == 0) & (positions_R > 0)
        return np.where(is_alone_R, before_R, place_L[before_R])

    def _run(self, canvases: Sequence[Canvas], owners: list[int]) -> Tensor:
        each = [self._rows(canvas) for canvas in canvases]
        most = max(len(rows.tokens_T) for rows in each)
        device = self.state.device

        def grid(name: str) -> Tensor:
            values_NT = np.zeros((len(each), most), dtype=np.int64)
            for row, rows in enumerate(each):
                values = getattr(rows, name)
                values_NT[row, : len(values)] = values
            return torch.from_numpy(values_NT).to(device)

        lengths_N1 = torch.tensor([[len(rows.tokens_T)] for rows in each], device=device)
        columns_W = torch.arange(most, device=device)
        limit_NT1, low_NT1, high_NT1 = (grid(name).unsqueeze(2) for name in ("limit_T", "low_T", "high_T"))
        hidden_BTD = self.counting.forward(
            TokenRows(
                slots_B=torch.arange(len(each), device=device),
                tokens_BT=grid("tokens_T"),
                positions_BT=grid("positions_T"),
                columns_BT=grid("columns_T"),
                valid_BT=columns_W < lengths_N1,
                visible_BTW=(columns_W < limit_NT1) | ((columns_W >= low_NT1) & (columns_W < high_NT1)),
            ),
            owners,
        )
        asked = [rows.asked_R + row * most for row, rows in enumerate(each)]
        return hidden_BTD.flatten(0, 1)[torch.from_numpy(np.concatenate(asked)).to(device)]
