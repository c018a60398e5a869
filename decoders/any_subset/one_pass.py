"""One-pass any-subset speculation: one forward verifies the drafts and makes the proposals for the next window.

Speculative acceptance is exact for any proposal that is known when the draft is drawn, so the rows that propose may be stale:
computed without the tokens that this forward decides. n = first undecided rank, D drafts at ranks n .. n+D-1.

    rows           rank        limit   for
    content        n-1 .. n+D-1  own   the last decided token and the drafts
    verification   n+a         n+a     a = 0..D; the last gives the bonus token
    stale (rows)   n+s+o       n+s     s in S, o >= 1: if the window ends at n+A, the next drafts come from the largest s <= A

S is 0..D with `rows: all`, {0, D} with `rows: ends`. A Markov draft head corrects a stale row with what it has not seen.
`fused: chain` has no stale rows: a recurrent head rolls on from the verification row that decided the last token.
Every forward decides at least one token, so NFE <= number of holes.

Beyond the paper (ASSD needs two forwards per iteration). The distribution is sequential by the argument of Leviathan et
al. (2023). Legend: D drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.any_subset.decoder import AnySubsetDecoder
from decoders.any_subset.drafters import Drafts, HeadRoller
from decoders.any_subset.settings import AssdSettings
from decoders.engine.acceptance import Window
from decoders.engine.budget import MOST_AUTO, DraftBudget
from decoders.engine.setup import Setup
from decoders.engine.state import Group


@dataclass(frozen=True, slots=True)
class _Layout:
    """The query rows of one forward: `depth` + 1 verification rows, then the stale rows of cut 0, 1, .. `depth`.

    `depth` is the most drafts in any slot, `reach` the longest next window of any. The chain has no stale rows.
    """

    depth: int
    reach: int
    ends: bool
    chain: bool

    @property
    def num_checks(self) -> int:
        return self.depth + 1

    def reaches(self) -> list[int]:
        """How many ranks beyond its cut the stale rows of each cut reach; with `ends`, cut 0 serves every early end."""
        if self.chain:
            return []
        first = self.reach + max(self.depth - 1, 0) if self.ends and self.reach else self.reach
        return [first] + [self.reach] * self.depth

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each row, its rank's offset from n, and how many ranks its limit lies below its rank, [Q]."""
        checks = torch.arange(self.num_checks, device=device)
        offsets, staleness = [checks], [torch.zeros_like(checks)]
        for cut, reach in enumerate(self.reaches()):
            stale = torch.arange(1, reach + 1, device=device)
            offsets.append(cut + stale)
            staleness.append(stale)
        return torch.cat(offsets), torch.cat(staleness)

    def first_row(self, cut_B: Tensor) -> Tensor:
        """The number of the first stale row of each cut."""
        sizes = torch.tensor(self.reaches(), device=cut_B.device)
        starts = self.num_checks + sizes.cumsum(0) - sizes
        return starts[cut_B]


class OnePassDecoder(AnySubsetDecoder):
    """`assd` with `fused: rows` or `fused: chain`; `heads` may be None for `rows` only."""

    def __init__(self, setup: Setup, settings: AssdSettings) -> None:
        self.k = MOST_AUTO if settings.k == "auto" else settings.k
        super().__init__(setup, window=self.k + 1, max_commit=self.k + 1)
        heads = setup.heads
        assert settings.fused in ("rows", "chain"), settings.fused
        if settings.fused == "chain" and (heads is None or heads.chain is None):
            raise ValueError(
                "decoder.fused: 'chain' needs a draft head, and the model has none; allowed here: none, rows"
            )
        self._heads, self._chain, self._ends = heads, settings.fused == "chain", settings.rows == "ends"
        self._num_drafts_S = self.state.column()
        self._draft_laws = None if self.acceptance.coupled else self._kept_laws(self.k)
        if settings.k == "auto":
            rows = [self._num_rows(e) for e in range(self.k + 1)]
            self.budget = DraftBudget(self.state, self.k, rows=rows)

    def _num_rows(self, num_drafts: int) -> int:
        """Content and query rows of an iteration in the middle of a sample, for a number of drafts per window."""
        layout = _Layout(num_drafts, num_drafts, self._ends, self._chain)
        # `ends` has no cuts between the two ends.
        stale = layout.reaches() if not self._ends else layout.reaches()[:: max(num_drafts, 1)]
        return 2 * layout.num_checks + sum(stale)

    def _advance(self, group: Group) -> None:
        with self._timed(group):
            self._run_pass(group)

    def _run_pass(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        decided_B, num_drafts_B = state.decided_S[slots_B], self._num_drafts_S[slots_B]
        # This forward decides at least one token; the next window can hold the remaining ones.
        next_B = self._allot(group, (state.length_S[slots_B] - decided_B - 1).clamp(max=self.k))
        if self.budget is not None and not bool((num_drafts_B + next_B).any()):
            # No drafts: this is sequential decoding, at the same cost.
            self._decide_next(group)
            return
        layout = _Layout(int(num_drafts_B.max()), int(next_B.max()), self._ends, self._chain)
        ranks_BQ, limits_BQ, valid_BQ = self._queries(layout, slots_B, decided_B, num_drafts_B, next_B)
        hidden_BQD = self._forward(group, decided_B + num_drafts_B, ranks_BQ, limits_BQ, valid_BQ)
        checks = slice(0, layout.num_checks)
        window = self._window(slots_B, decided_B, num_drafts_B, ranks_BQ[:, checks], valid_BQ[:, checks])
        accepted_B = self._verify(group, hidden_BQD[:, checks][window.valid_BA], window)
        self._propose(layout, hidden_BQD, window, accepted_B, next_B)

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _queries(
        self, layout: _Layout, slots_B: Tensor, decided_B: Tensor, num_drafts_B: Tensor, next_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ranks, limits, valid) of all query rows, [B, Q]; valid are those that some end of the slot's window needs."""
        offsets_Q, staleness_Q = layout.table(decided_B.device)
        ranks_BQ = decided_B.unsqueeze(1) + offsets_Q
        cut_Q, drafts_B1, next_B1 = offsets_Q - staleness_Q, num_drafts_B.unsqueeze(1), next_B.unsqueeze(1)
        stale_BQ = (cut_Q <= drafts_B1) & (staleness_Q <= next_B1)
        if self._ends:
            early_B1 = torch.where(next_B1 > 0, next_B1 + (drafts_B1 - 1).clamp(min=0), 0)
            stale_BQ = (stale_BQ & (cut_Q == drafts_B1)) | ((cut_Q == 0) & (staleness_Q <= early_B1))
        needed_BQ = torch.where(staleness_Q == 0, cut_Q <= drafts_B1, stale_BQ)
        valid_BQ = needed_BQ & (ranks_BQ < self.state.length_S[slots_B].unsqueeze(1))
        return ranks_BQ, ranks_BQ - staleness_Q, valid_BQ

    # ---- verification --------------------------------------------------------------------------------------------

    def _window(
        self, slots_B: Tensor, decided_B: Tensor, num_drafts_B: Tensor, ranks_BA: Tensor, valid_BA: Tensor
    ) -> Window:
        ranks_BA = torch.where(valid_BA, ranks_BA, 0)
        return Window(
            slots_B=slots_B,
            when_B=decided_B,
            num_drafts_B=num_drafts_B,
            drafts_BA=self.state.tokens_SW[slots_B].gather(1, ranks_BA),
            ranks_BA=ranks_BA,
            valid_BA=valid_BA,
        )

    def _verify(self, group: Group, hidden_RD: Tensor, window: Window) -> Tensor:
        """Commit the accepted drafts and the token after them; returns the number accepted, [B]."""
        state, slots_B = self.state, group.index_B
        q_BKV = None if self._draft_laws is None else self._draft_laws.data[slots_B]
        accepted_B, tokens_BA, log_p_BA = self._judge(hidden_RD, q_BKV, window)
        # After the last rank of the canvas there is no row for a bonus.
        extra_B = window.when_B + accepted_B < state.length_S[slots_B]
        counts_B, every_B = accepted_B + extra_B.to(torch.int64), torch.ones_like(extra_B)
        self._commit(group, tokens_BA, counts_B, log_p_BA)
        state.cached_S[slots_B] = window.when_B + accepted_B
        self._close_iteration(group, counts_B, window.num_drafts_B, accepted_B, every_B)
        self._trace(group, window.drafts_BA, window.num_drafts_B, window.when_B, every_B)
        if self.budget is not None:
            self.budget.learn(slots_B, window.num_drafts_B, accepted_B)
        return accepted_B

    # ---- the next window -----------------------------------------------------------------------------------------

    def _propose(self, layout: _Layout, hidden_BQD: Tensor, window: Window, accepted_B: Tensor, next_B: Tensor) -> None:
        """Draft the ranks after the token just decided, from this forward's rows for this end of the window."""
        state = self.state
        remaining_B = (state.length_S - state.decided_S)[window.slots_B]
        num_drafts_B = torch.minimum(remaining_B, next_B)
        self._num_drafts_S[window.slots_B] = num_drafts_B
        going_B = num_drafts_B > 0
        if not bool(going_B.any()):
            return
        with self._timed_drafts(int(going_B.sum()), layout.reach):
            drafts = self._roll(layout, hidden_BQD, window, accepted_B, going_B)
        if self._draft_laws is not None:
            law_BKV = drafts.joined_laws()
            self._draft_laws.data[window.slots_B[going_B], : law_BKV.shape[1]] = law_BKV

    def _roll(self, layout: _Layout, hidden_BQD: Tensor, window: Window, accepted_B: Tensor, going_B: Tensor) -> Drafts:
        """Draft `reach` ranks, or fewer, for the slots where `going_B`."""
        slots_B, before_B, accepted_B = window.slots_B[going_B], window.when_B[going_B], accepted_B[going_B]
        decided_B, hidden_BQD = self.state.decided_S[slots_B], hidden_BQD[going_B]
        roller = HeadRoller(self.counting, self.state, slots_B, self._draw(slots_B, decided_B))
        each_B = torch.arange(len(slots_B), device=slots_B.device)
        if self._chain:
            assert self._heads is not None and self._heads.chain is not None
            return roller.chain(self._heads.chain, hidden_BQD[each_B, accepted_B], decided_B, layout.reach)
        cut_B = accepted_B
        if self._ends:
            cut_B = torch.where(accepted_B == window.num_drafts_B[going_B], accepted_B, 0)
        offsets_K = torch.arange(layout.reach, device=slots_B.device)
        # The rows of a cut start after the cut's own rank; the window starts accepted + 1 ranks after n.
        rows_BK = layout.first_row(cut_B).unsqueeze(1) + (accepted_B - cut_B).unsqueeze(1) + offsets_K
        limits_BK = (before_B + cut_B).unsqueeze(1).expand_as(rows_BK)
        head = None if self._heads is None else self._heads.markov
        return roller.markov(head, hidden_BQD[each_B.unsqueeze(1), rows_BK], decided_B, limits_BK)
