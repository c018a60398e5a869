"""CausalDecoder, the base of the causal decoders: the forward over a slot's columns, and commits that end at a stop.

A canvas is a prompt of at least one token and then holes, so rank = column = position for every committed token:

    column    0 .. prompt-1 | prompt .. decided-1 | decided .. length-1
    holds     the prompt    | generated           | drafts and junk
    the row at column c predicts the token of column c + 1

Knows nothing of tokenizers; stop strings come as an object (engine/ends.py). Legend: Q rows asked for.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from decoders.backbones.base import TokenBackbone, TokenRows
from decoders.backbones.visibility import visible
from decoders.base import Outcome, Request
from decoders.engine.ends import EOS, FINISHES, LENGTH, STOP, Stops
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident, SlotState

# At most one new sample in this many joins the others: more of them fill a forward of their own.
_FEW_PROMPTS: Final = 4


def rows_between(state: SlotState, slots_B: Tensor, start_B: Tensor, end_B: Tensor) -> TokenRows:
    """The rows of the columns [start, end) of each slot, under plain causal visibility."""
    num_rows_B = end_B - start_B
    offsets = torch.arange(int(num_rows_B.max()), device=state.device)
    valid_BT = offsets < num_rows_B.unsqueeze(1)
    columns_BT = torch.where(valid_BT, start_B.unsqueeze(1) + offsets, 0)
    return TokenRows(
        slots_B=slots_B,
        tokens_BT=state.tokens_SW[slots_B].gather(1, columns_BT),
        positions_BT=columns_BT,
        columns_BT=columns_BT,
        valid_BT=valid_BT,
        visible_BTW=visible(columns_BT + 1, int(end_B.max())),
    )


class CausalDecoder(SlotDecoder):
    """A decoder of completions; `stops` defines what ends one before its last hole.

    With `joins_prompts`, the prompts of a few new samples run with the rows of the others: alone they would take a forward in
    which the others wait. On a GPU they run alone, since there attention computes a whole rectangle of rows.
    """

    backbone: TokenBackbone
    joins_prompts = True

    def __init__(self, setup: Setup, *, max_commit: int = 1, window: int = 1) -> None:
        super().__init__(setup, max_commit=max_commit, window=window)
        self.stops = setup.stops or Stops()
        self._stop_ids = torch.tensor(self.stops.ids, dtype=torch.int64, device=self.state.device)
        self._finish_S = self.state.column()

    def _start(self, slot: int, request: Request) -> None:
        holes = request.canvas < 0
        num_prompt = int(len(holes) - holes.sum())
        if num_prompt == 0 or bool(holes[:num_prompt].any()):
            raise ValueError("a causal model completes a prompt of at least one token; the holes must come after it")
        super()._start(slot, request)

    # ---- forwards ------------------------------------------------------------------------------------------------

    def _next_group(self) -> Group:
        few = 0 < _FEW_PROMPTS * len(self._fresh) <= self._num_dense
        if not (few and self.joins_prompts and self.state.device.type == "cpu"):
            return super()._next_group()
        waiting = self._share_prompts()
        slots = [slot for slot in range(self._num_dense) if slot not in waiting]
        self._fresh = sorted(waiting)
        return Group(slots, torch.tensor(slots, dtype=torch.int64, device=self.state.device), fresh=False, joined=True)

    def _num_shared(self, slot: int) -> int:
        # The row of the prompt's last token predicts the first hole.
        return int(self.state.prompt_S[slot]) - 1

    def _forward(self, group: Group, end_B: Tensor) -> Tensor:
        """Run the columns [cached, end) of each slot, under plain causal visibility; returns all hidden states [B, T, D].

        Row t of a slot is its column cached + t. The caller updates what counts as cached, since drafts may be rejected.
        """
        start_B = self.state.cached_S[group.index_B]
        return self.counting.forward(rows_between(self.state, group.index_B, start_B, end_B), group.slots)

    def _rows_at(self, hidden_BTD: Tensor, start_B: Tensor, columns_BQ: Tensor) -> Tensor:
        """The hidden states of the rows at these columns, where row 0 is at `start_B`; [B, Q, D]."""
        index_BQ = (columns_BQ - start_B.unsqueeze(1)).clamp(0, hidden_BTD.shape[1] - 1)
        return hidden_BTD.gather(1, index_BQ.unsqueeze(2).expand(-1, -1, hidden_BTD.shape[2]))

    def _advance_by_one(self, group: Group) -> None:
        """One token for each slot, drawn from the target alone; the first forward runs the prompt."""
        state, slots_B = self.state, group.index_B
        decided_B, start_B = state.decided_S[slots_B], state.cached_S[slots_B]
        hidden_BTD = self._forward(group, decided_B)
        state.cached_S[slots_B] = decided_B
        last_BD = self._rows_at(hidden_BTD, start_B, decided_B.unsqueeze(1) - 1)[:, 0]
        tokens_B, log_p_B = self._say(last_BD, slots_B, decided_B)
        one_B, none_B = torch.ones_like(decided_B), torch.zeros_like(decided_B)
        counts_B = self._commit_until_stop(group, tokens_B.unsqueeze(1), one_B, log_p_B.unsqueeze(1))
        self.stats.verified += len(group.slots)
        self._close_iteration(group, counts_B, none_B, none_B, one_B == 1)
        self._trace(group, tokens_B.unsqueeze(1), none_B, decided_B, one_B == 1)

    # ---- commits -------------------------------------------------------------------------------------------------

    def _commit_until_stop(self, group: Group, tokens_BT: Tensor, counts_B: Tensor, log_p_BT: Tensor) -> Tensor:
        """Commit up to `counts_B` tokens of each slot, fewer where the canvas or the completion ends; returns how many.

        Callers must count drafts by the returned numbers: the first end token or stop string ends the sample there.
        """
        state, slots_B = self.state, group.index_B
        counts_B = torch.minimum(counts_B, state.length_S[slots_B] - state.decided_S[slots_B])
        finish_B = torch.full_like(counts_B, LENGTH)
        if self.stops.ids:
            counts_B, finish_B = self._until_stop_id(tokens_BT, counts_B, finish_B)
        if any(self._stop_text(slot, self.stops.text) is not None for slot in group.slots):
            counts_B, finish_B = self._until_stop_text(group, tokens_BT, counts_B, finish_B)
        self._commit(group, tokens_BT, counts_B, log_p_BT)
        ended_B = finish_B != LENGTH
        state.length_S[slots_B] = torch.where(ended_B, state.decided_S[slots_B], state.length_S[slots_B])
        self._finish_S[slots_B] = finish_B
        return counts_B

    def _until_stop_id(self, tokens_BT: Tensor, counts_B: Tensor, finish_B: Tensor) -> tuple[Tensor, Tensor]:
        offsets_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        hit_BT = (tokens_BT.unsqueeze(2) == self._stop_ids).any(2) & (offsets_T < counts_B.unsqueeze(1))
        hit_B = hit_BT.any(1)
        first_B = hit_BT.to(torch.int8).argmax(1)
        return torch.where(hit_B, first_B + 1, counts_B), torch.where(hit_B, EOS, finish_B)

    def _until_stop_text(
        self, group: Group, tokens_BT: Tensor, counts_B: Tensor, finish_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts, finishes = counts_B.tolist(), finish_B.tolist()
        for row, slot in enumerate(group.slots):
            stop_text = self._stop_text(slot, self.stops.text)
            if stop_text is None:
                continue
            span = slice(int(self.state.prompt_S[slot]), int(self.state.decided_S[slot]))
            before = self.state.tokens_SW[slot, span].tolist()
            # The text of a stop id is not part of the completion.
            num_new = counts[row] - (finishes[row] == EOS)
            keep = stop_text.find([*before, *tokens_BT[row, :num_new].tolist()], len(before))
            if keep is not None:
                counts[row], finishes[row] = keep - len(before), STOP
        return counts_B.new_tensor(counts), finish_B.new_tensor(finishes)

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        outcome.finish = FINISHES[int(self._finish_S[slot])]
        return outcome
