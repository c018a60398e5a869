"""Scores texts under masked diffusion (LLaDA, Dream, MDLM, SEDD): a bound of the log-probability of any tokens given all others.

A canvas is the text with one random mask over its scored tokens (engine/estimates.py, draws/score_masks.py). All rows of a canvas
see all of it, and each masked token's probability is read from the row that predicts it.

A network that is conditioned on the noise (SEDD) gets that of the time at which the canvas's own share of masks is expected: the
given tokens of a text are never masked, so with few scored tokens that is early.

Legend: N canvases of a forward, W positions of a canvas, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.backbones.base import TokenBackbone
from decoders.base import HOLE, Request
from decoders.common_settings import DecoderChoice, Estimate
from decoders.draws.absorbing import time_of_share, total_noise
from decoders.engine.estimates import BoundScorer, Canvas
from decoders.engine.setup import Setup
from decoders.masked.rows import lay, separate


class MaskedScorer(BoundScorer):
    """See the module's docstring; the estimator `auto` is MDLM's for models that diffuse in continuous time, else LLaDA's."""

    backbone: TokenBackbone

    def __init__(self, setup: Setup, settings: DecoderChoice, estimate: Estimate) -> None:
        super().__init__(setup, settings, estimate)
        if self.info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {self.info.family!r} have no mask to score with")
        self.mask_id = self.info.mask_id

    def _grouped(
        self, request: Request, scored: NDArray[np.int64]
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        return [scored], scored[:0]

    def _run(self, canvases: Sequence[Canvas], owners: list[int]) -> Tensor:
        lengths = [len(canvas.text.tokens_L) for canvas in canvases]
        tokens_NW = np.zeros((len(canvases), max(lengths)), dtype=np.int64)
        for row, canvas in enumerate(canvases):
            (draw,) = canvas.draws
            tokens_NW[row, : lengths[row]] = canvas.text.tokens_L
            tokens_NW[row, draw.masked] = HOLE
        device = self.state.device
        laid = lay(separate(torch.from_numpy(tokens_NW).to(device), torch.tensor(lengths, device=device)), self.mask_id)
        sigma_N = self._noise(canvases, lengths).to(device)
        rows = replace(laid.rows, sigma_BT=sigma_N.unsqueeze(1).expand_as(laid.rows.tokens_BT))
        hidden_BTD = self.counting.forward(rows, owners)
        row_R = np.repeat(np.arange(len(canvases)), [len(canvas.draws[0].asked_R) for canvas in canvases])
        position_R = np.concatenate([canvas.draws[0].asked_R for canvas in canvases])
        place_R = laid.place_NW[
            torch.from_numpy(row_R).to(device),
            torch.from_numpy(position_R - self.info.shift).clamp(min=0).to(device),
        ]
        return hidden_BTD.flatten(0, 1)[place_R]

    def _noise(self, canvases: Sequence[Canvas], lengths: Sequence[int]) -> Tensor:
        """The total noise of each canvas, float64 [N]."""
        shares = [
            canvas.draws[0].share * len(canvas.text.positions[0]) / length
            for canvas, length in zip(canvases, lengths, strict=True)
        ]
        return total_noise(time_of_share(torch.tensor(shares, dtype=torch.float64)))
