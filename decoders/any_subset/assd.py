"""Any-subset speculative decoding (ASSD): draft k tokens from the model's own marginals or an n-gram, then verify them.

An iteration is a draft forward and a density forward (self drafter), or a density forward alone (n-gram). Slots in either
phase share one forward, so that no sample waits for another.

    phase    content rows          query rows                     decides
    DRAFT    last decided token    ranks n .. n+k-1, limit n      drafts; at rank n the target's own token
    VERIFY   drafts but the last   ranks n+1 .. n+D-1, own rank   accepted drafts, then the recovered token

The first self-draft comes from the same row that would verify it, so it is accepted by construction, without a comparison
of floats; a window of one needs no density forward. With `head`, a draft head corrects the rows after the first.

Source: Guo and Ermon, ASSD, Algorithms 1 and 2 (its line 9 means N - 1). Legend: D drafts.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from decoders.any_subset.decoder import AnySubsetDecoder
from decoders.any_subset.drafters import Drafts, HeadRoller, canvas_by_position, ngram_counts, stack_drafts
from decoders.any_subset.settings import AssdSettings
from decoders.engine.acceptance import Window
from decoders.engine.budget import MOST_AUTO, DraftBudget
from decoders.engine.setup import Setup
from decoders.engine.state import Group

_DRAFT: Final = 0
_VERIFY: Final = 1


class AssdDecoder(AnySubsetDecoder):
    """`assd` with `fused: none`; `heads` is None without a draft head."""

    def __init__(self, setup: Setup, settings: AssdSettings) -> None:
        self.k, self.ngram = MOST_AUTO if settings.k == "auto" else settings.k, settings.drafter == "ngram"
        super().__init__(setup, window=self.k + 1, max_commit=self.k)
        if settings.k == "auto":
            self.budget = self._make_budget()
        self._head = None if setup.heads is None or self.ngram else setup.heads.markov
        self._phase_S = self.state.column()
        self._num_drafts_S = self.state.column()
        # 1 where the first draft is the target's own token, 0 where it has to be verified like the others.
        self._num_sure_S = self.state.column()
        self._draft_laws = None if self.acceptance.coupled else self._kept_laws(self.k)
        self._first_log_p_S = self.state.column(dtype=torch.float64)

    def _make_budget(self) -> DraftBudget:
        """The cost of an iteration with a window of 1 + e drafts, in content and query rows."""
        extra = range(self.k)
        if self.ngram:
            return DraftBudget(self.state, self.k - 1, rows=[2 * e + 2 for e in extra])
        forwards = [1 if e == 0 else 2 for e in extra]
        rows = [2 if e == 0 else 3 * e + 2 for e in extra]
        return DraftBudget(self.state, self.k - 1, rows=rows, forwards=forwards)

    def _advance(self, group: Group) -> None:
        with self._timed(group):
            if self.ngram:
                self._draft_ngrams(group)
            self._run_phases(group)

    def _run_phases(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        verify_B = self._phase_S[slots_B] == _VERIFY
        decided_B, drafts_B = state.decided_S[slots_B], self._num_drafts_S[slots_B]
        first_B = torch.where(verify_B, self._num_sure_S[slots_B], 0)
        last_B = drafts_B if bool(verify_B.all()) else torch.where(verify_B, drafts_B, self._lengths(group))
        if self.budget is not None and int((last_B + verify_B).max()) == 1:
            # No drafts: this is sequential decoding, at the same cost.
            self._decide_next(group, num_drafts=1)
            return
        offsets_K = torch.arange(int((last_B - first_B).max()), device=state.device)
        ranks_BK = decided_B.unsqueeze(1) + first_B.unsqueeze(1) + offsets_K
        valid_BK = offsets_K < (last_B - first_B).unsqueeze(1)
        limits_BK = torch.where(verify_B.unsqueeze(1), ranks_BK, decided_B.unsqueeze(1))
        # The last draft's content is seen by no query row of this window.
        content_end_B = torch.where(verify_B, decided_B + drafts_B - 1, decided_B)
        hidden_BKD = self._forward(group, content_end_B, ranks_BK, limits_BK, valid_BK)
        draft_B = ~verify_B
        if bool(draft_B.any()):
            self._take_drafts(group.part(draft_B), hidden_BKD[draft_B], decided_B[draft_B], last_B[draft_B])
        if bool(verify_B.any()):
            self._verify(group.part(verify_B), hidden_BKD[verify_B], valid_BK[verify_B], ranks_BK[verify_B])

    def _lengths(self, group: Group) -> Tensor:
        """How long a window each slot would draft now, [B]."""
        remaining_B = self.state.length_S[group.index_B] - self.state.decided_S[group.index_B]
        return 1 + self._allot(group, remaining_B.clamp(max=self.k) - 1)

    # ---- drafting ------------------------------------------------------------------------------------------------

    def _take_drafts(self, group: Group, hidden_BKD: Tensor, decided_B: Tensor, num_drafts_B: Tensor) -> None:
        """Draw the window's drafts; a window of one is decided at once, since its token is the target's own."""
        slots_B, num_ranks = group.index_B, int(num_drafts_B.max())
        limits_BK = decided_B.unsqueeze(1).expand(-1, num_ranks)
        roller = HeadRoller(self.counting, self.state, slots_B, self._draw(slots_B, decided_B))
        with self._timed_drafts(len(slots_B), num_ranks):
            drafts = roller.markov(self._head, hidden_BKD[:, :num_ranks], decided_B, limits_BK)
        logits_BV = self._logits(hidden_BKD[:, 0])
        first_log_p_B = self._log_p(logits_BV, drafts.laws[0], drafts.tokens_BK[:, 0])
        self._first_log_p_S[slots_B] = first_log_p_B
        self._keep(slots_B, drafts, num_drafts_B, sure=1)
        single_B = num_drafts_B == 1
        if bool(single_B.any()):
            part = group.part(single_B)
            one_B = torch.ones_like(part.index_B)
            self._finish_round(part, drafts.tokens_BK[single_B, :1], one_B, first_log_p_B[single_B].unsqueeze(1), one_B)

    def _keep(self, slots_B: Tensor, drafts: Drafts, num_drafts_B: Tensor, *, sure: int) -> None:
        self._num_drafts_S[slots_B] = num_drafts_B
        self._num_sure_S[slots_B] = sure
        self._phase_S[slots_B] = _VERIFY
        if self._draft_laws is not None:
            law_BKV = drafts.joined_laws()
            self._draft_laws.data[slots_B, : law_BKV.shape[1]] = law_BKV

    def _draft_ngrams(self, group: Group) -> None:
        """Fill the window of every slot that is about to draft, unless its first hole has no left neighbour."""
        state, slots_B = self.state, group.index_B
        if self.budget is not None and not self.budget.open(fresh=group.fresh):
            return
        first_position_B = state.order_SW[slots_B].gather(1, state.decided_S[slots_B].unsqueeze(1)).squeeze(1)
        ready_B = (self._phase_S[slots_B] == _DRAFT) & (first_position_B > 0)
        if not bool(ready_B.any()):
            return
        slots_B, num_drafts_B = slots_B[ready_B], self._lengths(group)[ready_B]
        num_ranks = int(num_drafts_B.max())
        with self._timed_drafts(len(slots_B), num_ranks):
            drafts = self._roll_ngrams(slots_B, state.decided_S[slots_B], num_ranks)
        state.lookups_S[slots_B] += num_drafts_B
        self._keep(slots_B, drafts, num_drafts_B, sure=0)

    def _roll_ngrams(self, slots_B: Tensor, decided_B: Tensor, num_ranks: int) -> Drafts:
        state = self.state
        num_positions = int(state.length_S[slots_B].max())
        canvas_BP, decided_BP = canvas_by_position(state, slots_B, num_positions)
        known_BP, drafted_BP = decided_BP.clone(), canvas_BP.clone()
        draw, each_B = self._draw(slots_B, decided_B), torch.arange(len(slots_B), device=state.device)
        tokens, laws = [], []
        for offset in range(num_ranks):
            ranks_B = decided_B + offset
            inside_B = ranks_B < state.length_S[slots_B]
            ranks_B = torch.minimum(ranks_B, state.length_S[slots_B] - 1)
            positions_B = state.order_SW[slots_B, ranks_B]
            left_B = (positions_B - 1).clamp(min=0)
            has_left_B = (positions_B > 0) & known_BP[each_B, left_B]
            counts = ngram_counts(canvas_BP, decided_BP, drafted_BP[each_B, left_B], has_left_B, self.info.vocab_size)
            # Nothing is decided anywhere, so there is nothing to count: use the uniform distribution.
            counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, torch.ones_like(counts))
            law_BV, tokens_B = draw(counts.log().to(self.law_dtype), ranks_B)
            state.tokens_SW[slots_B[inside_B], ranks_B[inside_B]] = tokens_B[inside_B]
            drafted_BP[each_B[inside_B], positions_B[inside_B]] = tokens_B[inside_B]
            known_BP[each_B[inside_B], positions_B[inside_B]] = True
            tokens.append(tokens_B)
            laws.append(law_BV)
        return stack_drafts(tokens, laws)

    # ---- verification --------------------------------------------------------------------------------------------

    def _verify(self, group: Group, hidden_BKD: Tensor, valid_BK: Tensor, ranks_BK: Tensor) -> None:
        """Verify the uncertain drafts; commit the accepted ones and the token that replaces the first rejected one."""
        state, slots_B = self.state, group.index_B
        decided_B, num_drafts_B = state.decided_S[slots_B], self._num_drafts_S[slots_B]
        sure_B = self._num_sure_S[slots_B]
        num_checked_B, ranks_BK = num_drafts_B - sure_B, torch.where(valid_BK, ranks_BK, 0)
        window = Window(
            slots_B=slots_B,
            when_B=decided_B,
            num_drafts_B=num_checked_B,
            drafts_BA=state.tokens_SW[slots_B].gather(1, ranks_BK),
            ranks_BA=ranks_BK,
            valid_BA=valid_BK,
        )
        good_B, tokens_BK, log_p_BK = self._judge(hidden_BKD[valid_BK], self._laws(slots_B, sure_B), window)
        accepted_B = sure_B + good_B
        counts_B = accepted_B + (good_B < num_checked_B).to(torch.int64)
        tokens_BK, log_p_BK = self._put_sure_first(slots_B, decided_B, sure_B, tokens_BK, log_p_BK)
        # Columns up to the first rejection hold true content; the recovered token's and the last draft's do not yet.
        state.cached_S[slots_B] = decided_B + torch.minimum(accepted_B, num_drafts_B - 1)
        self._finish_round(group, tokens_BK, counts_B, log_p_BK, accepted_B)

    def _laws(self, slots_B: Tensor, sure_B: Tensor) -> Tensor | None:
        """The draft distributions of the rows to verify: shifted by one where the first draft is certain."""
        if self._draft_laws is None:
            return None
        offsets_K = torch.arange(self.k, device=self.state.device)
        index_BK = (sure_B.unsqueeze(1) + offsets_K).clamp(max=self.k - 1)
        law_BKV = self._draft_laws.data[slots_B]
        return law_BKV.gather(1, index_BK.unsqueeze(2).expand(-1, -1, law_BKV.shape[2]))

    def _put_sure_first(
        self, slots_B: Tensor, decided_B: Tensor, sure_B: Tensor, tokens_BK: Tensor, log_p_BK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Shift the verified tokens right by one where the first draft was certain, and put that draft before them."""
        first_B1 = self.state.tokens_SW[slots_B].gather(1, decided_B.unsqueeze(1))
        shifted_BT = torch.cat([first_B1, tokens_BK], 1)
        shifted_log_p_BT = torch.cat([self._first_log_p_S[slots_B].unsqueeze(1), log_p_BK], 1)
        is_sure_B1 = (sure_B == 1).unsqueeze(1)
        return (
            torch.where(is_sure_B1, shifted_BT, functional.pad(tokens_BK, (0, 1))),
            torch.where(is_sure_B1, shifted_log_p_BT, functional.pad(log_p_BK, (0, 1))),
        )

    def _finish_round(
        self, group: Group, tokens_BT: Tensor, counts_B: Tensor, log_p_BT: Tensor, accepted_B: Tensor
    ) -> None:
        slots_B = group.index_B
        before_B = self.state.decided_S[slots_B].clone()
        num_drafts_B = self._num_drafts_S[slots_B].clone()
        proposed = self._proposed(slots_B, before_B)
        self._commit(group, tokens_BT, counts_B, log_p_BT)
        every_B = torch.ones_like(counts_B, dtype=torch.bool)
        self._close_iteration(group, counts_B, num_drafts_B, accepted_B, every_B)
        if self.budget is not None:
            # The first token of an iteration costs what a sequential one does; the others are the gain.
            self.budget.learn(slots_B, num_drafts_B - 1, counts_B - 1)
        self._phase_S[slots_B] = _DRAFT
        self._trace(group, proposed, num_drafts_B, before_B, every_B)

    def _proposed(self, slots_B: Tensor, before_B: Tensor) -> Tensor:
        """The drafts in the state, [B, K]; only traces read them."""
        return self._tokens_from(slots_B, before_B, self.k)
