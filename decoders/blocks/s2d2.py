"""`s2d2`: the model verifies its own block drafts at block size 1, when the router decides that it pays.

A drafting forward predicts a token for every mask. The first run of masks is the span. If the router finds the span worth a
forward (routers.py), its drafts are put in place, and the model predicts each of these positions from the tokens to its left
alone. Drafts are accepted from left to right. The first rejected one is replaced by the verification's token (verdicts.py), and
nothing after it is kept. There is no bonus token. Without a verification the schedule of `block_diffusion` chooses what to
reveal; after one it does so only if fewer tokens came out than the step's share.

    block        a b _ _ _ c _ _                        span: places 2 to 4; c was revealed by the schedule
    draft        a b x y z c u v
    verified     p(. | a b)  p(. | a b x)  p(. | a b x y)      without c, which is to the right

If every span is verified, no revealed token depends on tokens to its right. With a causal cache the text then has exactly the
distribution of block size 1, and under coupled acceptance it is the same text.

Source: "S2D2" (2026), section 3 and Algorithm 3; its public code for what a step does after a verification.

Legend: T places of a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decoders.blocks.block_diffusion import BlockDecoder, Cells, Draft
from decoders.blocks.routers import Routing, Signals, first_span
from decoders.blocks.rows import Stretch
from decoders.blocks.schedules import Choice, firsts, num_surer
from decoders.blocks.settings import S2d2Settings
from decoders.blocks.state import VERIFY, Blocks
from decoders.blocks.verdicts import DraftsToJudge, Judge
from decoders.engine.acceptance import leading
from decoders.engine.setup import Setup
from decoders.engine.state import Group


class S2d2Decoder(BlockDecoder):
    """See the module's docstring."""

    rules: S2d2Settings

    def __init__(self, setup: Setup, settings: S2d2Settings) -> None:
        super().__init__(setup, settings)
        state, size = self.state, self.size
        self.routing = Routing(state, settings.router, settings.estimator, settings.cost)
        by_ratio = settings.paper_compat if self.draws.greedy else not self.draws.coupled
        self.judge = Judge(self.draws, self._logits, self._parts, by_ratio, settings.temper)
        self._after[VERIFY] = self._after_verify
        # The draft under verification, and where its span lies.
        self._tokens_ST, self._span_ST = state.column(size), state.column(size, dtype=torch.bool)
        self._sure_ST, self._log_p_ST, self._entropy_ST = (state.column(size, dtype=torch.float64) for _ in range(3))
        # The distribution of a rejected draft is recomputed from its row.
        width = self.backbone.width if by_ratio else 0
        self._hidden_STD = state.column(size, width, dtype=self.backbone.dtype)

    # ---- drafting ------------------------------------------------------------------------------------------------

    def _draft_limits(self, blocks: Blocks) -> Tensor:
        limits_B1 = super()._draft_limits(blocks)
        if not self.rules.causal_draft:
            return limits_B1
        front_BT = blocks.offsets_T < self._front(blocks).unsqueeze(1)
        return torch.where(front_BT, blocks.positions_BT + 1, limits_B1)

    def _front(self, blocks: Blocks) -> Tensor:
        """How many places of each block are drafted causally: those before its first mask, [B]."""
        return blocks.first_mask()

    def _read_more(self, draft: Draft, cells: Cells, logits_RV: Tensor, law_RV: Tensor) -> None:
        super()._read_more(draft, cells, logits_RV, law_RV)
        if not self.routing.reads_law:
            return
        warm_RV = self.draws.warm_law(logits_RV, law_RV)
        draft.alpha_BT[cells] = self.routing.note(warm_RV, draft.tokens_BT[cells]).to(torch.float64)

    def _look_again(self, group: Group, quiet_B: Tensor) -> None:
        # A router also needs the drafts without masks.
        none_BT = torch.zeros(len(group.slots), self.size, dtype=torch.bool, device=self.state.device)
        self.routing.decide(group.index_B, self._signals(group.index_B, none_BT, Draft.empty(none_BT)))
        super()._look_again(group, quiet_B)

    def _decide(self, group: Group, masks_BT: Tensor, draft: Draft, hidden_BTD: Tensor) -> None:
        verify_B = self.routing.decide(group.index_B, self._signals(group.index_B, masks_BT, draft))
        if bool(verify_B.any()):
            self._keep(group.part(verify_B), masks_BT[verify_B], draft.part(verify_B), hidden_BTD[verify_B])
        if not bool(verify_B.all()):
            self._reveal_unverified(group.part(~verify_B), masks_BT[~verify_B], draft.part(~verify_B))

    def _signals(self, slots_B: Tensor, masks_BT: Tensor, draft: Draft) -> Signals:
        decided_B = self.blocks.masks_S[slots_B] - self.blocks.at(slots_B).masks_BT.sum(1)
        return self.routing.signals(
            masks_BT,
            draft.alpha_BT,
            num_sure_B=num_surer(draft.sure_BT, masks_BT, self.rules.tau),
            progress_B=decided_B / self.size,
            size=self.sub_block,
        )

    def _reveal_unverified(self, group: Group, masks_BT: Tensor, draft: Draft) -> None:
        choice = self._choose(masks_BT, self._share(group.index_B), draft)
        self.routing.learn(group.index_B, choice.counts_B, torch.zeros_like(masks_BT[:, 0]))
        self._reveal(group, draft.news(choice))
        self._go_on(group)

    def _keep(self, group: Group, masks_BT: Tensor, draft: Draft, hidden_BTD: Tensor) -> None:
        """Store a draft for its verification, the next forward of these slots."""
        slots_B = group.index_B
        self.blocks.phase_S[slots_B] = VERIFY
        self._span_ST[slots_B] = first_span(masks_BT)
        self._tokens_ST[slots_B], self._sure_ST[slots_B] = draft.tokens_BT, draft.sure_BT
        self._log_p_ST[slots_B], self._entropy_ST[slots_B] = draft.log_p_BT, draft.entropy_BT
        if self.judge.by_ratio:
            rows_T = torch.arange(self.size, device=slots_B.device) - self.info.shift
            self._hidden_STD[slots_B] = hidden_BTD[:, rows_T.clamp(min=0, max=hidden_BTD.shape[1] - 1)]

    def _kept(self, slots_B: Tensor) -> Draft:
        fields = (self._tokens_ST, self._sure_ST, self._log_p_ST, self._entropy_ST, self._entropy_ST)
        return Draft(*(field[slots_B] for field in fields))

    # ---- the rows of a verification ------------------------------------------------------------------------------

    def _stretches(self, group: Group, phases_B: Tensor) -> list[Stretch]:
        rows, *more = super()._stretches(group, phases_B)
        if not bool((phases_B == VERIFY).any()):
            return [rows, *more]
        return [rows, self._copies(self.blocks.at(group.index_B), phases_B).trimmed(), *more]

    def _block_rows(self, blocks: Blocks, phases_B: Tensor) -> Stretch:
        """In a verification the block up to the end of the span, with its drafts, causally."""
        rows, verifying_B1 = super()._block_rows(blocks, phases_B), (phases_B == VERIFY).unsqueeze(1)
        span_BT, drafts_BT = self._span_ST[blocks.slots_B], self._tokens_ST[blocks.slots_B]
        upto_BT = span_BT.flip(1).cumsum(1).flip(1) > 0
        return Stretch(
            torch.where(verifying_B1 & span_BT, drafts_BT, rows.tokens_BT),
            rows.positions_BT,
            rows.columns_BT,
            torch.where(verifying_B1, blocks.positions_BT + 1, rows.limits_BT),
            torch.where(verifying_B1, upto_BT, rows.valid_BT),
        )

    def _copied(self, blocks: Blocks) -> Tensor:
        """The places of the spans that no row to their left predicts, bool [B, T]."""
        span_BT = self._span_ST[blocks.slots_B]
        return span_BT & (blocks.positions_BT < 1) if self.info.shift else span_BT

    def _copies(self, blocks: Blocks, phases_B: Tensor) -> Stretch:
        """A mask for each copied place, in separate columns after the block, without gaps."""
        copied_BT = self._copied(blocks) & (phases_B == VERIFY).unsqueeze(1)
        positions_BT = blocks.start_B.unsqueeze(1) + firsts(copied_BT)
        columns_BT = blocks.end_B.unsqueeze(1) + blocks.offsets_T
        valid_BT = blocks.offsets_T < copied_BT.sum(1).unsqueeze(1)
        return Stretch(torch.full_like(positions_BT, self.mask_id), positions_BT, columns_BT, positions_BT, valid_BT)

    def _verdict_rows(self, blocks: Blocks, parts: list[Tensor]) -> Tensor:
        """The hidden state that predicts each place of the spans, [R, D], slot after slot and from left to right."""
        copied_BT = self._copied(blocks)
        batch_R, place_R = self._span_ST[blocks.slots_B].nonzero(as_tuple=True)
        copy_R = (copied_BT.cumsum(1) - 1)[batch_R, place_R].clamp(min=0, max=parts[1].shape[1] - 1)
        own_RD = parts[0][batch_R, (place_R - self.info.shift).clamp(min=0)]
        return torch.where(copied_BT[batch_R, place_R].unsqueeze(1), parts[1][batch_R, copy_R], own_RD)

    # ---- judging -------------------------------------------------------------------------------------------------

    def _after_verify(self, group: Group, parts: list[Tensor]) -> None:
        slots_B, blocks = group.index_B, self.blocks.at(group.index_B)
        span_BT, draft = self._span_ST[slots_B], self._kept(slots_B)
        drafts = DraftsToJudge(
            blocks.slots_BT[span_BT],
            blocks.positions_BT[span_BT],
            draft.tokens_BT[span_BT],
            draft.sure_BT[span_BT],
            self._verdict_rows(blocks, parts),
        )
        verdict = self.judge.judge(drafts)
        passed_BT = _spread(verdict.passed_R, span_BT)
        # Places outside of the span count as accepted, so that the count starts at the span.
        accepted_B = leading(passed_BT | (span_BT.cumsum(1) == 0)) - (span_BT.cumsum(1) == 0).sum(1)
        tokens_R, log_p_R = self._with_recovered(drafts, verdict.tokens_R, verdict.log_p_R, accepted_B, span_BT)
        self.stats.verified += len(tokens_R)
        self.state.proposed_S[slots_B] += span_BT.sum(1)
        self.state.accepted_S[slots_B] += accepted_B
        counts_B = torch.minimum(accepted_B + 1, span_BT.sum(1))
        judged_BT = span_BT & (span_BT.cumsum(1) <= counts_B.unsqueeze(1))
        told = replace(
            draft,
            tokens_BT=torch.where(judged_BT, _spread(tokens_R, span_BT), draft.tokens_BT),
            log_p_BT=torch.where(judged_BT, _spread(log_p_R, span_BT), draft.log_p_BT),
        )
        self._reveal_judged(group, told, judged_BT)

    def _with_recovered(
        self, drafts: DraftsToJudge, tokens_R: Tensor, log_p_R: Tensor, accepted_B: Tensor, span_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the spans, with the token that replaces the first rejected draft of each."""
        refused_BT = span_BT & (span_BT.cumsum(1) - 1 == accepted_B.unsqueeze(1))
        refused_R = refused_BT[span_BT]
        if not self.judge.by_ratio or not bool(refused_R.any()):
            return tokens_R, log_p_R
        q_hidden_RD = self._hidden_STD[drafts.slots_R[refused_R], refused_BT.nonzero(as_tuple=True)[1]]
        found = self.judge.recover(drafts.part(refused_R), q_hidden_RD)
        return tokens_R.masked_scatter(refused_R, found[0]), log_p_R.masked_scatter(refused_R, found[1])

    def _reveal_judged(self, group: Group, told: Draft, judged_BT: Tensor) -> None:
        """Reveal the verified tokens; if these are fewer than the step's share, the schedule reveals more."""
        slots_B, masks_BT = group.index_B, self.blocks.at(group.index_B).segment(self.sub_block)
        counts_B, span_BT = judged_BT.sum(1), self._span_ST[slots_B]
        missing_B = torch.minimum(self._share(slots_B), masks_BT.sum(1)) - counts_B
        more = self._choose(masks_BT & ~judged_BT, missing_B.clamp(min=0), told)
        # First the verified places from left to right, then the schedule's.
        places_BT = torch.arange(self.size, device=slots_B.device).expand_as(span_BT)
        rank_BT = torch.empty_like(more.order_BT).scatter_(1, more.order_BT, self.size + places_BT)
        order_BT = torch.where(judged_BT, places_BT, rank_BT).argsort(1)
        total_B = counts_B + more.counts_B
        self.routing.learn(slots_B, total_B, torch.ones_like(span_BT[:, 0]))
        proposed_BT = self._tokens_ST[slots_B].gather(1, firsts(span_BT))
        news = replace(told.news(Choice(order_BT, total_B)), proposed_BT=proposed_BT, num_proposed_B=span_BT.sum(1))
        self._reveal(group, news)
        self._go_on(group)

    def _knows_logprob(self) -> bool:
        """Whether every token comes from a verification, which sees only the tokens to its left."""
        return self.rules.verifies_always and not self.editing and self._takes_all_steps()


def _spread(values_R: Tensor, where_BT: Tensor) -> Tensor:
    """Put a value to each marked place, row after row; zero elsewhere, [B, T]."""
    return torch.zeros(where_BT.shape, dtype=values_R.dtype, device=values_R.device).masked_scatter_(where_BT, values_R)
