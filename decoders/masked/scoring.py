"""Scores texts under masked diffusion (LLaDA, Dream, MDLM, SEDD): a bound of the log-probability of any tokens given all others.

A canvas is the text with one random mask over its scored tokens (engine/estimates.py, draws/score_masks.py). All rows of a canvas
see all of it, and each masked token's probability is read from the row that predicts it.

A network that is conditioned on the noise (SEDD) gets that of the time at which the canvas's own share of masks is expected: the
given tokens of a text are never masked, so with few scored tokens that is early.

Legend: N canvases of a forward, W positions of the longest one, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.backbones.base import TokenBackbone, TokenRows
from decoders.base import HOLE, Request
from decoders.common_settings import DecoderChoice, Estimate
from decoders.draws.absorbing import time_of_share, total_noise
from decoders.engine.estimates import BoundScorer, Canvas
from decoders.engine.setup import Setup


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
        sigma_N = self._noise(canvases, lengths).to(device)
        hidden_NWD = self.counting.forward(self._rows(tokens_NW, lengths, sigma_N), owners)
        row_R = np.repeat(np.arange(len(canvases)), [len(canvas.draws[0].asked_R) for canvas in canvases])
        position_R = np.concatenate([canvas.draws[0].asked_R for canvas in canvases])
        place_R = row_R * tokens_NW.shape[1] + np.maximum(position_R - self.info.shift, 0)
        return hidden_NWD.flatten(0, 1)[torch.from_numpy(place_R).to(device)]

    def _rows(self, tokens_NW: NDArray[np.int64], lengths: Sequence[int], sigma_N: Tensor) -> TokenRows:
        """Each canvas in a slot of its own, where all of its rows see all of it."""
        tokens = torch.from_numpy(np.where(tokens_NW == HOLE, self.mask_id, tokens_NW)).to(self.state.device)
        positions_W = torch.arange(tokens.shape[1], device=tokens.device)
        inside_NW = positions_W < torch.tensor(lengths, device=tokens.device).unsqueeze(1)
        places_NW = positions_W * inside_NW
        return TokenRows(
            slots_B=torch.arange(len(tokens), device=tokens.device),
            tokens_BT=tokens,
            positions_BT=places_NW,
            columns_BT=places_NW,
            valid_BT=inside_NW,
            visible_BTW=inside_NW.unsqueeze(1) & inside_NW.unsqueeze(2),
            sigma_BT=sigma_N.unsqueeze(1).expand_as(tokens),
        )

    def _noise(self, canvases: Sequence[Canvas], lengths: Sequence[int]) -> Tensor:
        """The total noise of each canvas, float64 [N]."""
        shares = [
            canvas.draws[0].share * len(canvas.text.positions[0]) / length
            for canvas, length in zip(canvases, lengths, strict=True)
        ]
        return total_noise(time_of_share(torch.tensor(shares, dtype=torch.float64)))
