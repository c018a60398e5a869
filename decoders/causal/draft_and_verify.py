"""Verifies the drafts of `specdiff` in one forward of the target.

    tokens      .. the | cat  sat  in              D tokens decided, three drafts
    target says    cat | sat  on   .               the row of each token predicts the next one
    committed   .. the   cat  sat  on |            two drafts accepted, `in` replaced; with `in` accepted, `.` would be the bonus

The first forward runs the prompt and the first drafts together, so a sample never needs more forwards than `autoregressive`.
A slot with fewer drafts has fewer rows; a step without drafts is an autoregressive one. Drafts never reach the canvas's end:
there is always a place for the token after them. Under `coupled` acceptance the text is the sequential one whatever is drafted;
under `rejection` it has the sequential distribution.

DraftAndVerify does all of this for any source of drafts (drafters.py; specdiff.py uses diffusion_drafter.py).

Sources: Leviathan et al., 2023; Chen et al., 2023. Legend: A = most drafts + 1.
"""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch import Tensor

from decoders.base import Outcome, Request
from decoders.causal.decoder import CausalDecoder
from decoders.causal.drafters import CausalDrafter
from decoders.engine.acceptance import Window
from decoders.engine.budget import MOST_AUTO
from decoders.engine.setup import Setup
from decoders.engine.state import Group, Resident


class DraftAndVerify(CausalDecoder):
    """Verifies the drafts of `drafter`, which a subclass sets: up to `asked` tokens per iteration, with 'auto' `most_auto`."""

    drafter: CausalDrafter

    def __init__(self, setup: Setup, asked: int | Literal["auto"], *, most_auto: int = MOST_AUTO) -> None:
        self.k = most_auto if asked == "auto" else asked
        super().__init__(setup, window=self.k + 1, max_commit=self.k + 1)

    def _draw_draft(self, logits_RV: Tensor, slots_R: Tensor, ranks_R: Tensor, when_R: Tensor) -> tuple[Tensor, Tensor]:
        law_RV = self._law(self._suppress(logits_RV), slots_R)
        return law_RV, self.acceptance.draft(law_RV, slots_R, ranks_R, when_R)

    # ---- one step ------------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        if self.budget is not None and not self.budget.open(fresh=group.fresh):
            # Drafts don't pay: the step is then exactly that of the baseline.
            self.budget.pass_by()
            with self._timed(group):
                self._advance_by_one(group)
            return
        state, slots_B = self.state, group.index_B
        decided_B, start_B = state.decided_S[slots_B], state.cached_S[slots_B]
        began_s = time.perf_counter()
        counts_B, q_BKV = self._draft(group, decided_B)
        if self.budget is not None:
            self.budget.spent(time.perf_counter() - began_s)
        with self._timed(group):
            hidden_BTD = self._forward(group, decided_B + counts_B)
            window = self._window(slots_B, decided_B, counts_B)
            hidden_BAD = self._rows_at(hidden_BTD, start_B, window.ranks_BA - 1)
            self._settle(group, hidden_BAD[window.valid_BA], q_BKV, window)

    def _draft(self, group: Group, decided_B: Tensor) -> tuple[Tensor, Tensor | None]:
        most_B = (self.state.length_S[group.index_B] - decided_B - 1).clamp(max=self.k)
        return self.drafter.draft(group, most_B, lambda most_B: self._allot(group, most_B))

    def _window(self, slots_B: Tensor, decided_B: Tensor, counts_B: Tensor) -> Window:
        """The drafts of every slot, and one more row for the token after them."""
        offsets_A = torch.arange(int(counts_B.max()) + 1, device=slots_B.device)
        valid_BA = offsets_A <= counts_B.unsqueeze(1)
        ranks_BA = decided_B.unsqueeze(1) + torch.where(valid_BA, offsets_A, 0)
        return Window(
            slots_B=slots_B,
            when_B=decided_B,
            num_drafts_B=counts_B,
            drafts_BA=self.state.tokens_SW[slots_B].gather(1, ranks_BA),
            ranks_BA=ranks_BA,
            valid_BA=valid_BA,
        )

    def _settle(self, group: Group, hidden_RD: Tensor, q_BKV: Tensor | None, window: Window) -> None:
        """Commit the accepted drafts and the token after them, up to the first stop."""
        accepted_B, tokens_BA, log_p_BA = self._judge(hidden_RD, q_BKV, window)
        counts_B = self._commit_until_stop(group, tokens_BA, accepted_B + 1, log_p_BA)
        self.state.cached_S[group.index_B] = window.when_B + accepted_B
        self.drafter.known(group.index_B, window.when_B + accepted_B)
        self._close(group, window, counts_B, accepted_B)

    def _close(self, group: Group, window: Window, counts_B: Tensor, accepted_B: Tensor) -> None:
        """Count the iteration. A stop drops everything after it, also from the count of proposed drafts."""
        stopped_B = self._finish_S[group.index_B] != 0
        proposed_B = torch.where(stopped_B, torch.minimum(window.num_drafts_B, counts_B), window.num_drafts_B)
        accepted_B = torch.minimum(accepted_B, counts_B)
        every_B = torch.ones_like(stopped_B)
        self._close_iteration(group, counts_B, proposed_B, accepted_B, every_B)
        self._trace(group, window.drafts_BA, proposed_B, window.when_B, every_B)
        if self.budget is not None:
            self.budget.learn(group.index_B, proposed_B, accepted_B)

    # ---- the drafter's slots and counts --------------------------------------------------------------------------

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        self.drafter.start(slot)

    def slot_bytes(self, num_columns: int) -> int:
        """See SlotDecoder; adds the drafter's bytes."""
        return super().slot_bytes(num_columns) + self.drafter.slot_bytes(num_columns)

    def _allocate(self, num_slots: int, num_columns: int) -> None:
        self.drafter.make_room(num_slots, num_columns)
        super()._allocate(num_slots, num_columns)

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
        self.drafter.move(source, target)

    def _count(self, group: Group) -> None:
        """Add the drafter's forwards and seconds; its rows and lanes do not count."""
        super()._count(group)
        self.stats.forward_s += self.drafter.forward_s

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        outcome.nfe_draft, drafting_s = self.drafter.spent(slot)
        outcome.device_s += drafting_s
        return outcome
