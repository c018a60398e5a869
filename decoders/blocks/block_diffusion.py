"""`block_diffusion`: decodes blocks of masks one after the other, each in several denoising steps.

Each sample goes through its own phases, and one forward serves slots in all phases (rows.py):

    prefill -> draft -> draft -> .. -> commit -> draft -> ..

A drafting forward runs the block and predicts a token for each of its masks; the schedule reveals some of them (schedules.py).
The keys and values of a finished block were computed while it still had masks, so a commit runs it once more if another block
follows. In models that predict the next token, the last row of a commit (or of the prefill) predicts the first token of the
next block.

Sources: Cheng et al., "SDAR" (2025); Wu et al., "Fast-dLLM v2" (2025: sub-blocks); LLaDA2.1 (editing).

Legend: T places of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.blocks.decoder import BlockSlots, Revealed
from decoders.blocks.draws import entropy, plain_log_p
from decoders.blocks.rows import Stretch, finished, lined_up
from decoders.blocks.schedules import Choice, choose, firsts, share
from decoders.blocks.settings import BlockDiffusionSettings, BlockSettings
from decoders.blocks.state import COMMIT, DRAFT, PREFILL, Blocks
from decoders.draws import noise
from decoders.engine.setup import Setup
from decoders.engine.state import Group

Cells = tuple[Tensor, Tensor]
"""Numbers of slots and of places."""
After = Callable[[Group, list[Tensor]], None]
"""The function that reads the hidden states of each stretch after a forward."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a forward predicts for the places of a block, [B, T] each; zeros at places that were not asked for.

    `sure_BT` is the probability of the token in the distribution that it was drawn from. `entropy_BT` is the entropy of that
    distribution in nats, if the schedule needs it. `alpha_BT` is the input of a router.
    """

    tokens_BT: Tensor
    sure_BT: Tensor
    log_p_BT: Tensor
    entropy_BT: Tensor
    alpha_BT: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor) -> Draft:
        """A draft of nothing."""
        nothing_BT = torch.zeros(like_BT.shape, dtype=torch.float64, device=like_BT.device)
        return cls(nothing_BT.to(torch.int64), *(nothing_BT.clone() for _ in range(4)))

    def part(self, keep_B: Tensor) -> Draft:
        """The slots where `keep_B` (bool)."""
        return Draft(*(getattr(self, name)[keep_B] for name in self.__slots__))

    def news(self, choice: Choice) -> Revealed:
        """The chosen places as `Revealed`."""
        tokens_BT, log_p_BT = (grid_BT.gather(1, choice.order_BT) for grid_BT in (self.tokens_BT, self.log_p_BT))
        return Revealed(choice.order_BT, tokens_BT, log_p_BT, choice.counts_B)


class BlockDecoder(BlockSlots):
    """See the module's docstring; a subclass decides what to do with a drafted block, and may add phases."""

    def __init__(self, setup: Setup, settings: BlockSettings) -> None:
        super().__init__(setup, settings)
        self._after: dict[int, After] = {
            PREFILL: self._after_prefill,
            DRAFT: self._after_draft,
            COMMIT: self._after_commit,
        }
        if self.rules.fused:
            self._after[PREFILL] = self._after_draft

    # ---- one forward ---------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        phases_B = self.blocks.phase_S[group.index_B]
        self.blocks.nfe_SK[group.index_B, phases_B] += 1
        stretches = self._stretches(group, phases_B)
        hidden_BTD = self.counting.forward(lined_up(group.index_B, stretches), group.slots)
        parts = hidden_BTD.split([one.valid_BT.shape[1] for one in stretches], 1)
        for phase, after in self._after.items():
            here_B = phases_B == phase
            if bool(here_B.any()):
                after(group.part(here_B), [part_BTD[here_B] for part_BTD in parts])

    def _stretches(self, group: Group, phases_B: Tensor) -> list[Stretch]:
        """The rows of this step: of the prompts, or of every slot's block; a subclass may append more."""
        slots_B, uncommitted_S = group.index_B, self.blocks.uncommitted_S
        if group.fresh and not self.rules.fused:
            return [self._prefill_rows(slots_B)]
        blocks = self.blocks.at(slots_B)
        # A prompt that runs together with a draft comes after it, like a block that is committed with one.
        rows = self._block_rows(blocks, torch.where(phases_B == PREFILL, DRAFT, phases_B)).trimmed()
        if group.fresh:
            return [rows, self._prefill_rows(slots_B)]
        return [rows, self._before(blocks)] if bool(uncommitted_S[slots_B].any()) else [rows]

    def _before(self, blocks: Blocks) -> Stretch:
        """The blocks that are committed in the drafting forward of those after them."""
        uncommitted_B1 = self.blocks.uncommitted_S[blocks.slots_B].unsqueeze(1)
        positions_BT = torch.where(uncommitted_B1, blocks.positions_BT - self.size, 0)
        tokens_BT = self.state.tokens_SW[blocks.slots_BT, positions_BT]
        self.blocks.uncommitted_S[blocks.slots_B] = False
        return self._finished(tokens_BT, positions_BT, uncommitted_B1.expand_as(positions_BT))

    def _prefill_rows(self, slots_B: Tensor) -> Stretch:
        start_B1 = self.blocks.start_S[slots_B].unsqueeze(1)
        positions_BT = torch.arange(int(start_B1.max()), device=slots_B.device).expand(len(slots_B), -1)
        tokens_BT = self.state.tokens_SW[slots_B, : positions_BT.shape[1]]
        return self._finished(tokens_BT, positions_BT, positions_BT < start_B1)

    def _finished(self, tokens_BT: Tensor, positions_BT: Tensor, valid_BT: Tensor) -> Stretch:
        return finished(tokens_BT, positions_BT, valid_BT, size=self.size, causal=self.rules.causal_cache)

    def _block_rows(self, blocks: Blocks, phases_B: Tensor) -> Stretch:
        """The rows of the blocks: in a draft each sees its whole block, in a commit what the cache is to hold."""
        tokens_BT = torch.where(blocks.masks_BT, self.mask_id, blocks.tokens_BT)
        rows = self._finished(tokens_BT, blocks.positions_BT, blocks.inside_BT)
        drafting_B1 = (phases_B == DRAFT).unsqueeze(1)
        limits_BT = torch.where(drafting_B1, self._draft_limits(blocks), rows.limits_BT)
        return Stretch(tokens_BT, rows.positions_BT, rows.columns_BT, limits_BT, rows.valid_BT)

    def _draft_limits(self, blocks: Blocks) -> Tensor:
        """How far each row of a drafting forward sees, [B, T] or [B, 1]."""
        return blocks.end_B.unsqueeze(1)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self, hidden_BTD: Tensor, blocks: Blocks, asked_BT: Tensor) -> Draft:
        """Draw a token at each place that is asked for."""
        draft = Draft.empty(asked_BT)
        batch_R, place_R = asked_BT.nonzero(as_tuple=True)
        hidden_RD = hidden_BTD[batch_R, (place_R - self.info.shift).clamp(min=0)]
        for part in self._parts(len(hidden_RD)):
            cells = (batch_R[part], place_R[part])
            logits_RV = self._logits(hidden_RD[part])
            law_RV = self.draws.law(logits_RV)
            tokens_R = self.draws.draw(law_RV, blocks.slots_BT[cells], blocks.positions_BT[cells], noise.DRAFT)
            draft.tokens_BT[cells], draft.log_p_BT[cells] = tokens_R, plain_log_p(logits_RV, tokens_R)
            draft.sure_BT[cells] = law_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1).to(torch.float64).exp()
            self._read_more(draft, cells, logits_RV, law_RV)
        self.stats.verified += len(hidden_RD)
        return draft

    def _read_more(self, draft: Draft, cells: Cells, logits_RV: Tensor, law_RV: Tensor) -> None:
        """Store what else is needed of these places."""
        if self.rules.schedule == "entropy":
            draft.entropy_BT[cells] = entropy(law_RV)

    # ---- after a forward -----------------------------------------------------------------------------------------

    def _after_prefill(self, group: Group, parts: list[Tensor]) -> None:
        self._enter(group, parts[0], self.blocks.start_S[group.index_B] - 1)

    def _after_commit(self, group: Group, parts: list[Tensor]) -> None:
        self.blocks.enter(group.index_B, self.blocks.end_S[group.index_B])
        self._enter(group, parts[0], torch.full_like(group.index_B, self.size - 1))

    def _enter(self, group: Group, hidden_BTD: Tensor, last_B: Tensor) -> None:
        """Begin a block; row `last_B`, the one before it, predicts its first token in models that predict the next token."""
        self.blocks.phase_S[group.index_B] = DRAFT
        open_B = self.blocks.at(group.index_B).masks_BT[:, 0]
        if self.info.shift and bool(open_B.any()):
            each_B = torch.arange(len(last_B), device=last_B.device)
            self._say_first(group.part(open_B), hidden_BTD[each_B, last_B][open_B])

    def _say_first(self, group: Group, hidden_BD: Tensor) -> None:
        blocks, logits_BV = self.blocks.at(group.index_B), self._logits(hidden_BD)
        law_BV = self.draws.law(logits_BV)
        tokens_B = self.draws.draw(law_BV, blocks.slots_B, blocks.start_B, noise.BONUS)
        log_p_B, zeros_B1 = plain_log_p(logits_BV, tokens_B), torch.zeros_like(tokens_B).unsqueeze(1)
        self.stats.verified += len(tokens_B)
        self._segment_S[group.index_B] = -1
        self._reveal(group, Revealed(zeros_B1, tokens_B.unsqueeze(1), log_p_B.unsqueeze(1), torch.ones_like(tokens_B)))
        self._go_on(group)

    def _after_draft(self, group: Group, parts: list[Tensor]) -> None:
        slots_B, blocks = group.index_B, self.blocks.at(group.index_B)
        masks_BT = blocks.segment(self.sub_block)
        self._segment_S[slots_B] = blocks.first_mask() // self.sub_block
        self.blocks.drafts_S[slots_B] += 1
        draft = self._read(parts[0], blocks, masks_BT | self._editable(blocks))
        edited_B, masked_B = self._edit(group, blocks, draft), masks_BT.any(1)
        if bool(masked_B.any()):
            self._decide(group.part(masked_B), masks_BT[masked_B], draft.part(masked_B), parts[0][masked_B])
        if not bool(masked_B.all()):
            self._look_again(group.part(~masked_B), ~edited_B[~masked_B])

    def _look_again(self, group: Group, quiet_B: Tensor) -> None:
        """Record another step of blocks without masks; `quiet_B` says that nothing was edited."""
        self.blocks.post_S[group.index_B] += 1
        self.state.iterations_S[group.index_B] += 1
        self.state.histogram_SH[group.index_B, 0] += 1
        self._go_on(group, quiet_B=quiet_B)

    @abstractmethod
    def _decide(self, group: Group, masks_BT: Tensor, draft: Draft, hidden_BTD: Tensor) -> None:
        """Apply the decoder's rule to a draft of blocks that have masks; `masks_BT` marks the masks in question."""

    def _share(self, slots_B: Tensor) -> Tensor:
        """The least number of masks that this step reveals."""
        return share(self.blocks.step_S[slots_B], self.sub_block, self.rules.steps)

    def _choose(self, masks_BT: Tensor, share_B: Tensor, draft: Draft) -> Choice:
        rules = self.rules
        return choose(
            rules.schedule, masks_BT, share_B, sure_BT=draft.sure_BT, entropy_BT=draft.entropy_BT, tau=rules.tau
        )

    def _takes_all_steps(self) -> bool:
        """Whether there is a step for every place."""
        return self.rules.steps is None or self.rules.steps >= self.sub_block

    # ---- editing -------------------------------------------------------------------------------------------------

    def _editable(self, blocks: Blocks) -> Tensor:
        """Where a revealed token may be replaced."""
        if not self.editing:
            return torch.zeros_like(blocks.inside_BT)
        new_BT = blocks.positions_BT >= self.state.prompt_S[blocks.slots_B].unsqueeze(1)
        # In a model that predicts the next token, no row of the block predicts the block's first token.
        return blocks.inside_BT & ~blocks.masks_BT & new_BT & (blocks.offsets_T >= self.info.shift)

    def _edit(self, group: Group, blocks: Blocks, draft: Draft) -> Tensor:
        """Replace revealed tokens where the draft is confident enough of another; returns the slots with a change, bool [B]."""
        if self.rules.tau_edit is None:
            return torch.zeros_like(blocks.inside_BT[:, 0])
        where_BT = self._editable(blocks) & (draft.sure_BT > self.rules.tau_edit)
        where_BT &= draft.tokens_BT != blocks.tokens_BT
        cells, edited_B = (blocks.slots_BT[where_BT], blocks.positions_BT[where_BT]), where_BT.any(1)
        self.state.tokens_SW[cells], self.blocks.log_p_SW[cells] = draft.tokens_BT[where_BT], draft.log_p_BT[where_BT]
        news = draft.part(edited_B).news(Choice(firsts(where_BT[edited_B]), where_BT.sum(1)[edited_B]))
        self._note(group.part(edited_B), blocks.start_B[edited_B].unsqueeze(1) + news.places_BT, news)
        return edited_B


class BlockDiffusion(BlockDecoder):
    """Reveals the most confident tokens of every draft."""

    rules: BlockDiffusionSettings

    def _decide(self, group: Group, masks_BT: Tensor, draft: Draft, hidden_BTD: Tensor) -> None:
        self._reveal(group, draft.news(self._choose(masks_BT, self._share(group.index_B), draft)))
        self._go_on(group)

    def _knows_logprob(self) -> bool:
        """Whether every token was revealed alone, given all that was revealed before."""
        one_by_one = self.rules.schedule in {"static", "sequential"} and self._takes_all_steps()
        return not self.editing and (self.size == 1 or one_by_one)
