"""One-pass any-subset speculation: one forward verifies the current drafts and brings the proposals for the next window.

Speculative acceptance is exact for any proposal that is known when the draft is drawn, so the rows that propose may be stale:
computed without the tokens that this very forward decides. n = first undecided rank, D drafts at ranks n .. n+D-1.

    rows           rank        limit   for
    content        n-1 .. n+D-1  own   the last decided token and the drafts
    verification   n+a         n+a     a = 0..D; the last gives the bonus token
    stale (rows)   n+s+o       n+s     s in S, o >= 1: if the window ends at n+A, the next drafts come from the largest s <= A

S is 0..D with `rows: all`, {0, D} with `rows: ends`. A Markov draft head corrects a stale row with what it has not seen.
`fused: chain` has no stale rows: a recurrent head rolls on from the verification row that decided the last token.
Every forward decides at least one token, so NFE <= number of holes.

Beyond the paper (ASSD pays two forwards an iteration); the law is the sequential one by the same argument as in Leviathan et
al. (2023). Legend: B slots, D drafts, K drafts of a window, Q query rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoders.any_subset import AnySubsetDecoder
from decoders.drafters import Drafts, HeadRoller
from decoders.heads import DraftHeads
from decoders.settings import Assd
from decoders.state import Group


class OnePassDecoder(AnySubsetDecoder):
    """`assd` with `fused: rows` or `fused: chain`; `heads` may be None for `rows` only."""

    def __init__(self, *args: Any, settings: Assd, heads: DraftHeads | None, **kwargs: Any) -> None:
        super().__init__(*args, window=settings.k + 1, max_commit=settings.k + 1, **kwargs)
        assert settings.fused in ("rows", "chain"), settings.fused
        if settings.fused == "chain" and heads is None:
            raise ValueError(
                "decoder.fused: 'chain' needs a draft head, and the model has none; allowed here: none, rows"
            )
        self.k, self._heads, self._chain = settings.k, heads, settings.fused == "chain"
        self._ends = settings.rows == "ends"
        self._num_drafts_S = self.state.column()
        self._law_SKV: Tensor | None = None

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        decided_B, num_drafts_B = state.decided_S[slots_B].clone(), self._num_drafts_S[slots_B].clone()
        ranks_BQ, limits_BQ, valid_BQ = self._queries(decided_B, num_drafts_B, state.length_S[slots_B])
        hidden_BQD = self._forward(group, decided_B + num_drafts_B, ranks_BQ, limits_BQ, valid_BQ)
        num_accepted_B = self._verify(group, hidden_BQD, valid_BQ, decided_B, num_drafts_B)
        self._propose(slots_B, hidden_BQD, decided_B, num_drafts_B, num_accepted_B)

    # ---- rows ----------------------------------------------------------------------------------------------------

    @property
    def _num_checks(self) -> int:
        return self.k + 1

    def _queries(self, decided_B: Tensor, num_drafts_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ranks, limits, valid) of all query rows, [B, Q]: k+1 verification rows, then the stale rows."""
        offsets, staleness = self._row_table()
        ranks_BQ = decided_B.unsqueeze(1) + offsets
        limits_BQ = ranks_BQ - staleness
        cut_BQ = (offsets - staleness).expand_as(ranks_BQ)
        drafts_B1 = num_drafts_B.unsqueeze(1)
        valid_BQ = (ranks_BQ < length_B.unsqueeze(1)) & (cut_BQ <= drafts_B1)
        if self._ends and not self._chain:
            valid_BQ = valid_BQ & self._useful_ends(offsets, staleness, cut_BQ, drafts_B1)
        return ranks_BQ, limits_BQ, valid_BQ

    def _row_table(self) -> tuple[Tensor, Tensor]:
        """Return for each query row its rank's offset from n, and how many ranks its limit lies below its rank, [Q].

        The numbering is the same in every window: the verification rows, then the stale rows of cut 0, 1, .. k.
        """
        device, k = self.state.device, self.k
        checks = torch.arange(self._num_checks, device=device)
        offsets, staleness = [checks], [torch.zeros_like(checks)]
        if self._chain:
            return offsets[0], staleness[0]
        for cut in range(k + 1):
            reach = torch.arange(1, self._reach(cut) + 1, device=device)
            offsets.append(cut + reach)
            staleness.append(reach)
        return torch.cat(offsets), torch.cat(staleness)

    def _reach(self, cut: int) -> int:
        """How many ranks beyond its cut the stale rows of a cut go; with `ends`, cut 0 serves every early end."""
        return 2 * self.k - 1 if self._ends and cut == 0 else self.k

    def _useful_ends(self, offsets_Q: Tensor, staleness_Q: Tensor, cut_BQ: Tensor, drafts_B1: Tensor) -> Tensor:
        """Keep verification rows, the rows of cut 0 that some end 0 .. D-1 can use, and the rows of cut D."""
        first = (cut_BQ == 0) & (staleness_Q <= torch.clamp(drafts_B1 - 1, min=0) + self.k)
        last = (cut_BQ == drafts_B1) & (staleness_Q <= self.k)
        return (staleness_Q == 0) | first | last

    # ---- verification --------------------------------------------------------------------------------------------

    def _verify(
        self, group: Group, hidden_BQD: Tensor, valid_BQ: Tensor, decided_B: Tensor, num_drafts_B: Tensor
    ) -> Tensor:
        """Commit the accepted drafts and the token after them; returns the number accepted, [B]."""
        state, slots_B = self.state, group.index_B
        checks = self._num_checks
        check_BA = valid_BQ[:, :checks]
        logits_BAV = self._spread(hidden_BQD[:, :checks], check_BA)
        p_BAV = self._law(logits_BAV)
        offsets_A = torch.arange(checks, device=state.device)
        ranks_BA = torch.minimum(decided_B.unsqueeze(1) + offsets_A, state.length_S[slots_B].unsqueeze(1) - 1)
        drafts_BA = state.tokens_SW[slots_B].gather(1, ranks_BA)
        num_accepted_B, last_B = self._settle(
            p_BAV, drafts_BA, slots_B=slots_B, ranks_BA=ranks_BA, decided_B=decided_B, num_drafts_B=num_drafts_B
        )
        # After the last rank of the canvas there is no row for a bonus.
        extra_B = decided_B + num_accepted_B < state.length_S[slots_B]
        tokens_BA = torch.where(offsets_A == num_accepted_B.unsqueeze(1), last_B.unsqueeze(1), drafts_BA)
        log_p_BA = self._log_p(logits_BAV, p_BAV, tokens_BA)
        counts_B = num_accepted_B + extra_B.to(torch.int64)
        self._commit(group, tokens_BA, counts_B, log_p_BA)
        state.cached_S[slots_B] = decided_B + num_accepted_B
        self.stats.verified += int(check_BA.sum())
        every_B = torch.ones_like(extra_B)
        self._close_iteration(group, counts_B, num_drafts_B, num_accepted_B, every_B)
        self._trace(group, drafts_BA, num_drafts_B, decided_B, every_B)
        return num_accepted_B

    def _settle(
        self,
        p_BAV: Tensor,
        drafts_BA: Tensor,
        *,
        slots_B: Tensor,
        ranks_BA: Tensor,
        decided_B: Tensor,
        num_drafts_B: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (number accepted, the token after them: recovered or bonus), each [B]."""
        k, first = self.k, slice(0, self.k)
        q_BKV = None if self._law_SKV is None else self._law_SKV[slots_B]
        if q_BKV is None and not self.acceptance.coupled:
            # Before the first window there is no draft, and so no law to read.
            q_BKV = torch.zeros_like(p_BAV[:, first])
        settled = self.acceptance.settle(
            p_BAV[:, first],
            q_BKV,
            drafts_BA[:, first],
            valid_BD=torch.arange(k, device=slots_B.device) < num_drafts_B.unsqueeze(1),
            slots_B=slots_B,
            ranks_BD=ranks_BA[:, first],
            when_B=decided_B,
        )
        each_B = torch.arange(len(slots_B), device=slots_B.device)
        bonus_law_BV, bonus_rank_B = p_BAV[each_B, num_drafts_B], ranks_BA[each_B, num_drafts_B]
        bonus_B = self.acceptance.direct(bonus_law_BV, slots_B, bonus_rank_B, decided_B)
        all_accepted_B = settled.num_accepted_B == num_drafts_B
        return settled.num_accepted_B, torch.where(all_accepted_B, bonus_B, settled.recovered_B)

    # ---- the next window -----------------------------------------------------------------------------------------

    def _propose(
        self, slots_B: Tensor, hidden_BQD: Tensor, before_B: Tensor, num_drafts_B: Tensor, num_accepted_B: Tensor
    ) -> None:
        """Draft the ranks after the token just decided, from the rows that this forward brought for this end."""
        state = self.state
        remaining_B = state.length_S[slots_B] - state.decided_S[slots_B]
        going_B = remaining_B > 0
        if not bool(going_B.any()):
            return
        slots_B, before_B, accepted_B = slots_B[going_B], before_B[going_B], num_accepted_B[going_B]
        hidden_BQD, num_drafts_B = hidden_BQD[going_B], num_drafts_B[going_B]
        drafts = self._roll(slots_B, hidden_BQD, before_B, num_drafts_B, accepted_B)
        self._num_drafts_S[slots_B] = remaining_B[going_B].clamp(max=self.k)
        if not self.acceptance.coupled:
            law_BKV = drafts.joined_laws()
            if self._law_SKV is None:
                self._law_SKV = state.column(self.k, law_BKV.shape[2], dtype=law_BKV.dtype)
            self._law_SKV[slots_B] = law_BKV

    def _roll(
        self, slots_B: Tensor, hidden_BQD: Tensor, before_B: Tensor, num_drafts_B: Tensor, accepted_B: Tensor
    ) -> Drafts:
        decided_B = self.state.decided_S[slots_B]
        roller = HeadRoller(self.counting, self.state, slots_B, self._draw(slots_B, decided_B))
        each_B = torch.arange(len(slots_B), device=slots_B.device)
        if self._chain:
            assert self._heads is not None
            start_BD = hidden_BQD[each_B, accepted_B]
            return roller.chain(self._heads.chain, start_BD, decided_B, self.k)
        cut_B = accepted_B
        if self._ends:
            cut_B = torch.where(accepted_B == num_drafts_B, num_drafts_B, torch.zeros_like(accepted_B))
        offsets_K = torch.arange(self.k, device=slots_B.device)
        # The rows of a cut start after the cut's own rank; the window starts accepted + 1 ranks after n.
        rows_BK = self._first_row(cut_B).unsqueeze(1) + (accepted_B - cut_B).unsqueeze(1) + offsets_K
        limits_BK = (before_B + cut_B).unsqueeze(1).expand_as(rows_BK)
        hidden_BKD = hidden_BQD[each_B.unsqueeze(1), rows_BK]
        head = None if self._heads is None else self._heads.markov
        return roller.markov(head, hidden_BKD, decided_B, limits_BK)

    def _first_row(self, cut_B: Tensor) -> Tensor:
        """The number of the first stale row of each cut, as laid out by `_row_table`."""
        sizes = torch.tensor([self._reach(cut) for cut in range(self.k + 1)], device=cut_B.device)
        starts = self._num_checks + sizes.cumsum(0) - sizes
        return starts[cut_B]
