"""`ancestral`: masked diffusion backwards in time (MDLM, SEDD); each step reveals masks at random.

    time      t_0 = that of the canvas's own share of masks .. t_1 .. t_2 ..    t_steps = 1e-5 | the rest at once
    masks     each is revealed with the predictor's chance in every step, with a token drawn from its logits

    ddpm      (MDLM) the chance is (t - s) / t, whatever the model says
    analytic  (SEDD) the chance is the sum of the scores, over a step of the noise
    euler     (SEDD) the same, to first order in the time

A mask draws one uniform number a step, and its token with the noise of its position, so a sample is a function of its key.
With ddpm the chance does not depend on the model. A step that reveals nothing needs no forward, so a sample takes one forward
for each step that reveals something, the last one included. With scores each step takes one.

Differs from the public samplers on purpose: a canvas with a prompt starts at its own share of masks instead of at time 1; the
last masks are drawn like all others instead of by an argmax (MDLM); float32 exponential races, which lower the temperature, are
replaced by the noise field; temperature, top-k and top-p warp the token's distribution, never the chance of being revealed.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), section 3.2; Lou et al., "Discrete
Diffusion Modeling by Estimating the Ratios of the Data Distribution" (2024), section 4.

Legend: T positions revealed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from decoders.base import HOLE, Request
from decoders.draws import noise
from decoders.draws.absorbing import chance_by_scores, log_scores, time_of_share, total_noise
from decoders.engine.setup import Setup
from decoders.engine.state import Group
from decoders.masked.decoder import MaskedDecoder
from decoders.masked.rows import Nodes, lay
from decoders.masked.settings import AncestralSettings

LAST_TIME: Final = 1e-5
"""The time at which the steps end; the remaining masks are then revealed at once."""


class Ancestral(MaskedDecoder):
    """See the module's docstring."""

    def __init__(self, setup: Setup, settings: AncestralSettings) -> None:
        super().__init__(setup)
        self.num_steps = settings.steps
        self.predictor = settings.predictor_for(self.info.family)
        self._step_S = self.state.column()
        self._first_time_S = self.state.column(dtype=torch.float64)

    def _knows_logprob(self) -> bool:
        return False

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        share = torch.tensor((request.canvas == HOLE).mean(), dtype=torch.float64)
        self._first_time_S[slot] = time_of_share(share).clamp(min=2 * LAST_TIME)

    def _time(self, steps: Tensor, slots_B: Tensor) -> Tensor:
        """The start time of each step (int64 [B] or [B, W]), float64; the last step starts at the end time of the others."""
        first_B = self._first_time_S[slots_B].view(-1, *[1] * (steps.dim() - 1))
        return first_B + (LAST_TIME - first_B) * steps.clamp(max=self.num_steps) / self.num_steps

    # ---- one step ------------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        slots_B, nodes = group.index_B, self._roots(group)
        masked_BW = nodes.tokens_NW == HOLE
        if self.predictor == "ddpm":
            step_BW = self._drawn_steps(slots_B, masked_BW)
            step_B = step_BW.amin(1)
            revealed_BW = masked_BW & (step_BW == step_B.unsqueeze(1))
            hidden_RD = self._run(group, nodes, self._time(step_B, slots_B))[revealed_BW]
        else:
            step_B = self._step_S[slots_B].clone()
            hidden_BWD = self._run(group, nodes, self._time(step_B, slots_B))
            revealed_BW = self._struck(slots_B, masked_BW, hidden_BWD, step_B)
            hidden_RD = hidden_BWD[revealed_BW]
            self._step_S[slots_B] += 1
        self._tell(group, revealed_BW, hidden_RD)

    def _run(self, group: Group, nodes: Nodes, time_B: Tensor) -> Tensor:
        """One forward of whole canvases at the noise of their times; the states that predict each position, [B, W, D]."""
        laid = lay(nodes, self.mask_id)
        sigma_BT = total_noise(time_B).unsqueeze(1).expand_as(laid.rows.tokens_BT)
        hidden_BTD = self.counting.forward(replace(laid.rows, sigma_BT=sigma_BT), group.slots)
        return hidden_BTD.flatten(0, 1)[laid.place_NW]

    def _drawn_steps(self, slots_B: Tensor, masked_BW: Tensor) -> Tensor:
        """The step that reveals each mask, int64 [B, W]; beyond all steps where there is no mask.

        Chances of (t - s) / t in every step from t_0 on make the time at which a mask is revealed uniform between 0 and t_0.
        """
        row_R, position_R = masked_BW.nonzero(as_tuple=True)
        slots_R = slots_B[row_R]
        uniform_R = noise.uniform_rows(
            self.state.key_S2[slots_R], position_R, noise.ORDER, torch.zeros_like(position_R)
        )
        first_R = self._first_time_S[slots_R]
        step_R = ((1.0 - uniform_R) * first_R / (first_R - LAST_TIME) * self.num_steps).to(torch.int64)
        step_BW = torch.full(masked_BW.shape, torch.iinfo(torch.int64).max, device=masked_BW.device)
        step_BW[masked_BW] = step_R.clamp(max=self.num_steps)
        return step_BW

    def _struck(self, slots_B: Tensor, masked_BW: Tensor, hidden_BWD: Tensor, step_B: Tensor) -> Tensor:
        """Which masks this step reveals by their scores, bool [B, W]; after the last step all of them."""
        row_R, position_R = masked_BW.nonzero(as_tuple=True)
        slots_R, step_R = slots_B[row_R], step_B[row_R]
        uniform_R = noise.uniform_rows(self.state.key_S2[slots_R], position_R, noise.ORDER, step_R)
        parts = [
            self._chance(hidden_BWD[row_R[part], position_R[part]], step_R[part], slots_R[part])
            for part in self._parts(len(row_R))
        ]
        chance_R = torch.cat(parts)
        struck_BW = torch.zeros_like(masked_BW)
        struck_BW[row_R, position_R] = (uniform_R < chance_R) | (step_R >= self.num_steps)
        return struck_BW

    def _chance(self, hidden_RD: Tensor, step_R: Tensor, slots_R: Tensor) -> Tensor:
        time_R, later_R = self._time(step_R, slots_R), self._time(step_R + 1, slots_R)
        logits_RV = self.counting.logits(hidden_RD).to(torch.float64)
        scores_RV = log_scores(logits_RV, torch.full_like(step_R, self.mask_id), total_noise(time_R))
        return chance_by_scores(scores_RV, self.mask_id, self.predictor == "euler", time_R, later_R)

    def _tell(self, group: Group, revealed_BW: Tensor, hidden_RD: Tensor) -> None:
        """Draw the revealed tokens, from left to right."""
        row_R, position_R = revealed_BW.nonzero(as_tuple=True)
        tokens_BW = torch.zeros_like(revealed_BW, dtype=torch.int64)
        log_p_BW = torch.zeros_like(revealed_BW, dtype=torch.float64)
        for part in self._parts(len(row_R)):
            where = (row_R[part], position_R[part])
            tokens_BW[where], _, log_p_BW[where] = self._read(hidden_RD[part], group.index_B[where[0]], where[1])
        counts_B = revealed_BW.sum(1)
        order_BT = (~revealed_BW).to(torch.int8).argsort(dim=1, stable=True)[:, : max(int(counts_B.max()), 1)]
        self.stats.verified += len(group.slots)
        self._reveal(group, order_BT, (tokens_BW.gather(1, order_BT), log_p_BW.gather(1, order_BT)), counts_B)
