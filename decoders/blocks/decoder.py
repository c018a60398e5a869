"""Shared by the block decoders: admission, revealing tokens, finding the end of a text, counters, outcomes.

A completion ends as soon as all requested tokens are revealed, or all tokens before an end token or up to a stop string; tokens
revealed after it are dropped. With editing the block must be finished first, since its tokens may still change.

Knows nothing of models and schedules. Legend: T places of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.backbones.base import TokenBackbone
from decoders.base import HOLE, Outcome, Request, TraceStep
from decoders.blocks.draws import Draws
from decoders.blocks.settings import BlockSettings
from decoders.blocks.state import COMMIT, DRAFT, KINDS, PREFILL, BlockState
from decoders.engine.ends import FINISHES, Stops, ending
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident


@dataclass(frozen=True, slots=True)
class Revealed:
    """The first `counts_B` tokens of each slot are revealed, in this order, at these places of its block.

    `proposed_BT` are the drafts that a verification judged, `num_proposed_B` of each slot; None where there was none.
    """

    places_BT: Tensor
    tokens_BT: Tensor
    log_p_BT: Tensor
    counts_B: Tensor
    proposed_BT: Tensor | None = None
    num_proposed_B: Tensor | None = None

    def cut(self, counts_B: Tensor) -> Revealed:
        """Only the first `counts_B` of each slot."""
        return Revealed(self.places_BT, self.tokens_BT, self.log_p_BT, counts_B, self.proposed_BT, self.num_proposed_B)


class BlockSlots(SlotDecoder):
    """See the module's docstring; an iteration reveals up to a block's tokens, and `bonus` more."""

    backbone: TokenBackbone

    def __init__(self, setup: Setup, settings: BlockSettings, *, bonus: int = 0) -> None:
        info = setup.info
        settings.check_model(info)
        self.size = settings.size_for(info)
        super().__init__(setup, max_commit=self.size + bonus)
        if info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {info.family!r} have no mask to start from")
        self.mask_id, self.stops, self.rules = info.mask_id, setup.stops or Stops(), settings
        self.editing = settings.tau_edit is not None
        self.sub_block = settings.sub_block or self.size
        self.blocks = BlockState(self.state, self.size, info.max_length)
        self.draws = Draws(self.state, self.blocks.drafts_S, setup.sampling, info.vocab_size)
        self._finish_S, self._segment_S = self.state.column(), self.state.column()

    # ---- admission -----------------------------------------------------------------------------------------------

    def columns(self, length: int) -> int:
        # Copies come after the last block, and a block that is cut short has as many columns as any other.
        return self.blocks.full(length) + 2 * self.size

    def _start(self, slot: int, request: Request) -> None:
        holes = request.canvas < 0
        if bool(holes[: int(len(holes) - holes.sum())].any()):
            raise ValueError("block diffusion decodes from left to right: the holes must come after the prompt")
        self.state.widen(self.columns(len(request.canvas)))
        super()._start(slot, request)
        self.blocks.start(slot, request)
        self.draws.noise.forget(slot)

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
        self.blocks.move(source, target)
        self.draws.noise.move(source, target)

    def _next_group(self) -> Group:
        # A prompt shorter than a block needs no prefill: its sample drafts at once.
        self._fresh = [slot for slot in self._fresh if int(self.blocks.phase_S[slot]) == PREFILL]
        return super()._next_group()

    # ---- revealing -----------------------------------------------------------------------------------------------

    def _reveal(self, group: Group, news: Revealed) -> None:
        """Write the revealed tokens up to the end of the completion; count and trace them as one iteration."""
        state, slots_B = self.state, group.index_B
        positions_BT = self.blocks.start_S[slots_B].unsqueeze(1) + news.places_BT
        news = news.cut(self._until_end(group, positions_BT, news))
        keep_BT = torch.arange(positions_BT.shape[1], device=state.device) < news.counts_B.unsqueeze(1)
        cells = (slots_B.unsqueeze(1).expand_as(keep_BT)[keep_BT], positions_BT[keep_BT])
        state.tokens_SW[cells], self.blocks.log_p_SW[cells] = news.tokens_BT[keep_BT], news.log_p_BT[keep_BT]
        wanted_B = self._wanted_end(slots_B)
        new_B = (keep_BT & (positions_BT < wanted_B.unsqueeze(1))).sum(1)
        state.decided_S[slots_B] += new_B
        state.logprob_S[slots_B] += torch.where(keep_BT, news.log_p_BT, 0.0).sum(1)
        state.iterations_S[slots_B] += 1
        state.histogram_SH[slots_B, new_B] += 1
        self.stats.committed += int(new_B.sum())
        self._note(group, positions_BT, news)

    def _wanted_end(self, slots_B: Tensor) -> Tensor:
        """The end of the requested canvas; tokens beyond it are cut off."""
        return self.state.length_S[slots_B]

    def _until_end(self, group: Group, positions_BT: Tensor, news: Revealed) -> Tensor:
        if self.editing or not self._may_stop(group):
            return news.counts_B
        counts = news.counts_B.tolist()
        for row, slot in enumerate(group.slots):
            count = counts[row]
            if count:
                pairs = zip(positions_BT[row, :count].tolist(), news.tokens_BT[row, :count].tolist(), strict=True)
                counts[row] = self._find_end(slot, list(pairs))
        return news.counts_B.new_tensor(counts)

    def _may_stop(self, group: Group) -> bool:
        """Whether end tokens or stop strings can end a completion of the group early."""
        return bool(self.stops.ids) or any(self._stop_text(slot, self.stops.text) for slot in group.slots)

    def _find_end(self, slot: int, news: list[tuple[int, int]]) -> int:
        """How many of these (position, token) are revealed until the completion ends; records the end if it does."""
        first, last = int(self.state.prompt_S[slot]), int(self.blocks.end_S[slot])
        canvas = self.state.tokens_SW[slot, first:last].tolist()
        stops = Stops(self.stops.ids, self._stop_text(slot, self.stops.text))
        end = ending(canvas, [(position - first, token) for position, token in news], stops)
        if end is None or first + end[1] > int(self.state.length_S[slot]):
            return len(news)
        count, keep, self._finish_S[slot] = end
        self.state.length_S[slot] = first + keep
        return count

    def _note(self, group: Group, positions_BT: Tensor, news: Revealed) -> None:
        """Trace what was written."""
        if not self.tracing:
            return
        for row, slot in enumerate(group.slots):
            resident, count = self._residents[slot], int(news.counts_B[row])
            if resident is None or resident.trace is None:
                continue
            proposed: list[int] = []
            if news.proposed_BT is not None and news.num_proposed_B is not None:
                proposed = news.proposed_BT[row, : int(news.num_proposed_B[row])].tolist()
            resident.trace.append(
                TraceStep(
                    iteration=len(resident.trace),
                    nfe=self.counting.counters.nfe[slot],
                    proposed=proposed,
                    committed=news.tokens_BT[row, :count].tolist(),
                    positions=positions_BT[row, :count].tolist(),
                )
            )

    # ---- what comes next -----------------------------------------------------------------------------------------

    def _go_on(self, group: Group, *, quiet_B: Tensor | None = None) -> None:
        """After a step: end the sample, commit the block, or draft again.

        `quiet_B` says of slots whose block had no mask left that nothing was edited in it.
        """
        blocks, slots_B = self.blocks, group.index_B
        now = blocks.at(slots_B)
        same_B = now.first_mask() // self.sub_block == self._segment_S[slots_B]
        blocks.step_S[slots_B] = torch.where(same_B, blocks.step_S[slots_B] + 1, 0)
        finished_B = ~now.masks_BT.any(1)
        if self.editing:
            over_B = blocks.post_S[slots_B] >= self.rules.post_steps
            finished_B &= over_B if quiet_B is None else over_B | quiet_B
            self._end_edited(group.part(finished_B))
        blocks.phase_S[slots_B] = torch.where(finished_B, COMMIT, DRAFT)
        blocks.done_S[slots_B] = self._ended(slots_B, finished_B)
        if self.rules.fused:
            self._take_along(slots_B[finished_B & ~blocks.done_S[slots_B]])

    def _take_along(self, slots_B: Tensor) -> None:
        """Enter the next block at once; its first draft commits this one."""
        self.blocks.enter(slots_B, self.blocks.end_S[slots_B])
        self.blocks.phase_S[slots_B], self.blocks.uncommitted_S[slots_B] = DRAFT, True

    def _ended(self, slots_B: Tensor, finished_B: Tensor) -> Tensor:
        """Whether a sample is finished, bool [B]."""
        length_B = self.state.length_S[slots_B]
        if self.editing:
            return finished_B & (self.blocks.end_S[slots_B] >= length_B)
        return (self._finish_S[slots_B] != 0) | (self.state.decided_S[slots_B] >= length_B)

    def _end_edited(self, group: Group) -> None:
        """Look for an end in finished blocks, from left to right."""
        if not self._may_stop(group):
            return
        for slot in group.slots:
            start = max(int(self.blocks.start_S[slot]), int(self.state.prompt_S[slot]))
            where = slice(start, int(self.blocks.end_S[slot]))
            tokens = self.state.tokens_SW[slot, where].clone()
            self.state.tokens_SW[slot, where] = HOLE
            self._find_end(slot, list(zip(range(start, start + len(tokens)), tokens.tolist(), strict=True)))
            self.state.tokens_SW[slot, where] = tokens

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def _harvest(self, group: Group) -> list[Outcome]:
        done = self.blocks.done_S[group.index_B].tolist()
        return [self._release(slot) for slot, is_done in zip(group.slots, done, strict=True) if is_done]

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        outcome.finish = FINISHES[int(self._finish_S[slot])]
        outcome.nfe_kinds = dict(zip(KINDS, self.blocks.nfe_SK[slot].tolist(), strict=True))
        if outcome.logprob is not None:
            first, last = int(self.state.prompt_S[slot]), int(self.state.length_S[slot])
            outcome.logprob = float(self.blocks.log_p_SW[slot, first:last].sum())
        return outcome
