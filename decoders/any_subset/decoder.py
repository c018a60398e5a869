"""Any-subset decoders without speculation: `any_subset` (one token per forward) and `parallel` (all holes at once).

`any_subset` is the baseline that the speculative decoders must equal. `parallel` draws every hole independently given the
prompt: one forward, and lossy, since holes do not see each other.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), the sequential
sampler of their section on decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from decoders.any_subset.drafters import Draw
from decoders.any_subset.settings import AnySubsetSettings, ParallelSettings
from decoders.backbones.base import Backbone, Rows
from decoders.backbones.visibility import content_limits
from decoders.base import Outcome, Request
from decoders.draws.noise import gumbel_rows
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident, Wide


class AnySubsetDecoder(SlotDecoder):
    """Shared by the any-subset decoders: building a forward from cached columns and queries."""

    backbone: Backbone

    def _start(self, slot: int, request: Request) -> None:
        self.backbone.set_order(slot, self.state.start(slot, request))

    def _num_shared(self, slot: int) -> int:
        return int(self.state.prompt_S[slot])

    def _forward(
        self, group: Group, content_end_B: Tensor, ranks_BQ: Tensor, limits_BQ: Tensor, valid_BQ: Tensor
    ) -> Tensor:
        """Run the content columns [cached, content_end) and the queries; returns the queries' hidden states [B, Q, D]."""
        state, slots_B = self.state, group.index_B
        start_B = state.cached_S[slots_B]
        num_content = int((content_end_B - start_B).max())
        offsets = torch.arange(num_content, device=state.device)
        valid_BC = offsets < (content_end_B - start_B).unsqueeze(1)
        columns_BC = torch.where(valid_BC, start_B.unsqueeze(1) + offsets, 0)
        ranks_BQ, limits_BQ = torch.where(valid_BQ, ranks_BQ, 0), torch.where(valid_BQ, limits_BQ, 0)
        limits_BC = content_limits(columns_BC, state.prompt_S[slots_B])
        rows = Rows(
            slots_B=slots_B,
            content_tokens_BC=state.tokens_SW[slots_B].gather(1, columns_BC),
            content_columns_BC=columns_BC,
            content_limits_BC=limits_BC,
            content_valid_BC=valid_BC,
            query_columns_BQ=ranks_BQ,
            query_limits_BQ=limits_BQ,
            query_valid_BQ=valid_BQ,
            num_columns=max(int(limits_BC.max()) if num_content else 0, int(limits_BQ.max())),
            num_positions=self._longest(group),
        )
        hidden_BQD = self.counting.forward(rows, group.slots)
        state.cached_S[slots_B] = content_end_B
        return hidden_BQD

    def _kept_laws(self, num_drafts: int) -> Wide:
        """Bytes of the distributions of each slot's drafts, which the rejection rule needs."""
        return self.state.wide(num_drafts, self.info.vocab_size, dtype=self.law_dtype)

    def _longest(self, group: Group) -> int:
        """Length of the longest canvas in the group."""
        return max(len(r.request.canvas) for slot in group.slots if (r := self._residents[slot]) is not None)

    def _decide_next(self, group: Group, num_drafts: int = 0) -> None:
        """One forward and one target token per slot; counts it as `num_drafts` accepted drafts."""
        state, slots_B = self.state, group.index_B
        decided_B = state.decided_S[slots_B]
        ranks_B1 = decided_B.unsqueeze(1)
        every_B = torch.ones_like(decided_B, dtype=torch.bool)
        hidden_B1D = self._forward(group, decided_B, ranks_B1, ranks_B1, every_B.unsqueeze(1))
        tokens_B, log_p_B = self._say(hidden_B1D[:, 0], slots_B, decided_B)
        one_B, drafts_B = torch.ones_like(decided_B), torch.full_like(decided_B, num_drafts)
        self._commit(group, tokens_B.unsqueeze(1), one_B, log_p_B.unsqueeze(1))
        self.stats.verified += len(group.slots)
        self._close_iteration(group, one_B, drafts_B, drafts_B, every_B)
        self._trace(group, tokens_B.unsqueeze(1), drafts_B, decided_B, every_B)

    @contextmanager
    def _timed_drafts(self, num_slots: int, num_drafts: int) -> Iterator[None]:
        """Report the seconds of the enclosed drawing of drafts to the budget, in a step that is `_timed`."""
        began_s = time.perf_counter()
        yield
        if self.budget is not None and num_drafts:
            self.budget.drafted(num_slots, num_drafts, time.perf_counter() - began_s)

    def _draw(self, slots_B: Tensor, when_B: Tensor) -> Draw:
        """Return the function that drafters call to turn logits into (q, tokens), with each rank's own noise."""

        def draw(logits_BV: Tensor, ranks_B: Tensor) -> tuple[Tensor, Tensor]:
            law_BV = self._law(self._suppress(logits_BV), slots_B)
            return law_BV, self.acceptance.draft(law_BV, slots_B, ranks_B, when_B)

        return draw


class Sequential(AnySubsetDecoder):
    """One token a forward, in decoding order; NFE equals the number of holes."""

    def __init__(self, setup: Setup, settings: AnySubsetSettings) -> None:
        super().__init__(setup)

    def _advance(self, group: Group) -> None:
        self._decide_next(group)


class Parallel(AnySubsetDecoder):
    """All holes in one forward, each given the prompt alone; the log-probability of the result is unknown."""

    def __init__(self, setup: Setup, settings: ParallelSettings) -> None:
        super().__init__(setup)

    def _knows_logprob(self) -> bool:
        return False

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        decided_B, counts_B = state.decided_S[slots_B].clone(), (state.length_S - state.decided_S)[slots_B]
        offsets_Q = torch.arange(int(counts_B.max()), device=state.device)
        valid_BQ = offsets_Q < counts_B.unsqueeze(1)
        ranks_BQ = decided_B.unsqueeze(1) + offsets_Q
        limits_BQ = decided_B.unsqueeze(1).expand_as(ranks_BQ)
        hidden_BQD = self._forward(group, decided_B, ranks_BQ, limits_BQ, valid_BQ)
        tokens_BQ = torch.zeros_like(ranks_BQ)
        log_p_BQ = torch.zeros(ranks_BQ.shape, dtype=torch.float64, device=state.device)
        slots_R, ranks_R = slots_B.unsqueeze(1).expand_as(ranks_BQ)[valid_BQ], ranks_BQ[valid_BQ]
        hidden_RD, told = hidden_BQD[valid_BQ], []
        for part in self._parts(len(hidden_RD)):
            logits_RV = self._logits(hidden_RD[part])
            law_RV = self._law(logits_RV, slots_R[part])
            tokens_R = self._independent(law_RV, slots_R[part], ranks_R[part])
            told.append((tokens_R, self._log_p(logits_RV, law_RV, tokens_R)))
        tokens_BQ[valid_BQ], log_p_BQ[valid_BQ] = (torch.cat(parts) for parts in zip(*told, strict=True))
        self._commit(group, tokens_BQ, counts_B, log_p_BQ)
        self._trace(group, tokens_BQ, torch.zeros_like(counts_B), decided_B, counts_B > 0)

    def _independent(self, law_QV: Tensor, slots_Q: Tensor, ranks_Q: Tensor) -> Tensor:
        if self.warps.greedy:
            return self.warps.draw(law_QV, None, slots_Q)
        # Every rank is drawn once, so its noise need not be kept.
        positions_Q = self.state.order_SW[slots_Q, ranks_Q]
        gumbel_QV = gumbel_rows(self.state.key_S2[slots_Q], positions_Q, self.info.vocab_size)
        return self.warps.draw(law_QV, gumbel_QV, slots_Q)

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        outcome.iterations = 1
        outcome.accept_hist = [0] * int(self.state.length_S[slot] - self.state.prompt_S[slot]) + [1]
        return outcome
