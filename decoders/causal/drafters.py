"""Drafters for a causal model: a smaller model with its own cache, or prompt look-up in the text so far.

Drafters write their drafts into the slots' undecided columns and return their number and the distributions that they were drawn
from. They know nothing of acceptance rules; afterwards they are given how far the columns were accepted.

    column               .. D-2  D-1 | D    D+1  D+2           D decided tokens, three drafts
    drafter's forwards   [catch up.. ]  [D]  [D+1]             the last draft is run only when it was accepted: then it is
    target's forward              [D-1   D    D+1  D+2]        caught up with the bonus in the drafter's next forward

Sources: Leviathan et al., 2023; Saxena, "Prompt lookup decoding", 2023.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from decoders.backbones.base import CountingBackbone, TokenBackbone
from decoders.causal.decoder import rows_between
from decoders.causal.settings import NgramDrafterSettings
from decoders.engine.cost import CostTable
from decoders.engine.memory import give
from decoders.engine.state import Group, SlotState

DrawAt = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [R, V], slots [R], ranks [R], decided [R]) -> (distribution q [R, V], tokens [R]): suppresses, warps, draws."""
Allot = Callable[[Tensor], Tensor]
"""How many drafts each slot could have, [B] -> how many it gets, [B]."""


class CausalDrafter(Protocol):
    """A source of drafts for the slots of one decoder."""

    @property
    def forward_s(self) -> float:
        """Seconds of forward evaluations so far."""
        ...

    def draft(self, group: Group, most_B: Tensor, allot: Allot) -> tuple[Tensor, Tensor | None]:
        """Draft at most `most_B` tokens after each slot's decided ones; returns (number [B], distributions [B, K, V] or None).

        None means that the drafts were certain, or that their distributions are not needed.
        """
        ...

    def known(self, slots_B: Tensor, end_B: Tensor) -> None:
        """Record that the tokens below `end_B` are decided as the drafter saw them; later columns may change."""
        ...

    def make_room(self, num_slots: int, num_columns: int) -> None:
        """Resize to this many slots and columns; both 0 frees all."""
        ...

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes that the drafter keeps for a slot with this many columns."""
        ...

    def start(self, slot: int) -> None:
        """Start a new sample in `slot`."""
        ...

    def move(self, source: int, target: int) -> None:
        """Move a sample from one slot to another; the columns of the SlotState move by themselves."""
        ...

    def spent(self, slot: int) -> tuple[int, float]:
        """The forwards in which the slot's sample took part, and its share of their seconds."""
        ...


class ModelDrafter:
    """A small causal model over the same slots; `draw` is the decoder's, so that drafts read the target's noise.

    `max_length` is the longest text that the model takes; longer texts get no drafts. A vocabulary that is only padded to
    another size than the target's is cut or padded; the caller checks that ids mean the same tokens.
    """

    def __init__(
        self,
        backbone: TokenBackbone,
        state: SlotState,
        draw: DrawAt,
        *,
        vocab_size: int,
        keep_laws: bool,
        max_length: int | None = None,
        costs: CostTable | None = None,
    ) -> None:
        self._backbone, self._state, self._draw = backbone, state, draw
        self._vocab_size, self._keep_laws, self._max_length, self._costs = vocab_size, keep_laws, max_length, costs
        self.counting = CountingBackbone(backbone, state.num_slots)
        self._cached_S = state.column()
        self._shape = (0, 0)

    @property
    def forward_s(self) -> float:
        """Seconds of its forwards."""
        return self.counting.forward_s

    def draft(self, group: Group, most_B: Tensor, allot: Allot) -> tuple[Tensor, Tensor | None]:
        """One forward for each draft position that any slot wants; the first also runs the tokens decided since the last call."""
        decided_B = self._state.decided_S[group.index_B]
        if self._max_length is not None:
            most_B = torch.minimum(most_B, (self._max_length + 1 - decided_B).clamp(min=0))
        counts_B = allot(most_B)
        laws_BKV: Tensor | None = None
        for depth in range(int(counts_B.max())):
            deep_B = counts_B > depth
            law_RV = self._draft_one(group.part(deep_B), decided_B[deep_B] + depth, decided_B[deep_B])
            if self._keep_laws:
                if laws_BKV is None:
                    laws_BKV = law_RV.new_zeros(len(counts_B), int(counts_B.max()), law_RV.shape[1])
                laws_BKV[deep_B, depth] = law_RV
        return counts_B, laws_BKV

    def _draft_one(self, group: Group, ranks_R: Tensor, decided_R: Tensor) -> Tensor:
        """Run the columns up to the rank, draw a draft for it and write it down; returns its distribution [R, V]."""
        state, slots_R, began_s = self._state, group.index_B, time.perf_counter()
        start_R = self._cached_S[slots_R]
        rows = rows_between(state, slots_R, start_R, ranks_R)
        # An id that only the target has (padding of its vocabulary) is replaced by another one: the draft may be wrong.
        rows = replace(rows, tokens_BT=rows.tokens_BT.clamp(max=self._backbone.vocab_size - 1))
        hidden_RTD = self.counting.forward(rows, group.slots)
        self._cached_S[slots_R] = ranks_R
        each_R = torch.arange(len(slots_R), device=state.device)
        logits_RV = self._fitted(self.counting.logits(hidden_RTD[each_R, ranks_R - start_R - 1]))
        law_RV, tokens_R = self._draw(logits_RV, slots_R, ranks_R, decided_R)
        state.tokens_SW[slots_R, ranks_R] = tokens_R
        if self._costs is not None and not (group.fresh or group.joined):
            self._costs.observe(rows.num_valid(), int(ranks_R.sum()), time.perf_counter() - began_s)
        return law_RV

    def _fitted(self, logits_RV: Tensor) -> Tensor:
        """Give the logits the width of the target's vocabulary."""
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            return functional.pad(logits_RV, (0, missing), value=-torch.inf)
        return logits_RV[:, : self._vocab_size]

    def known(self, slots_B: Tensor, end_B: Tensor) -> None:
        """Forget the columns of rejected drafts; the column of the last draft was never run."""
        self._cached_S[slots_B] = torch.minimum(self._cached_S[slots_B], end_B)

    def make_room(self, num_slots: int, num_columns: int) -> None:
        """Resize the drafter's cache to this many slots and columns."""
        had, self._shape = self._shape, (0, 0)
        give(self._backbone, num_slots, num_columns, had)
        self._shape = (num_slots, num_columns)

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes of the slot's columns in the drafter's cache, and of the distributions of its drafts."""
        laws = self._state.histogram_SH.shape[1] * self._vocab_size * 4 if self._keep_laws else 0
        return num_columns * int(getattr(self._backbone, "cell_bytes", 0)) + laws

    def start(self, slot: int) -> None:
        """Count again."""
        self.counting.counters.reset(slot)

    def move(self, source: int, target: int) -> None:
        """Move the drafter's slot and its counts."""
        self._backbone.move_slot(source, target)
        self.counting.counters.move(source, target)

    def spent(self, slot: int) -> tuple[int, float]:
        """The drafter's forwards and seconds for the sample in `slot`."""
        counters = self.counting.counters
        return counters.nfe[slot], counters.device_s[slot]


class PromptLookup:
    """Drafts the tokens that followed the last occurrence of the last n tokens, for the largest n within the bounds.

    Each draft is certain (a point mass). If the copy reaches the end of the text it continues with the drafts: a repetition goes
    on.
    """

    def __init__(self, state: SlotState, settings: NgramDrafterSettings) -> None:
        self._state, self._max_n, self._min_n = state, settings.max_n, settings.min_n

    @property
    def forward_s(self) -> float:
        """A look-up is no forward."""
        return 0.0

    def draft(self, group: Group, most_B: Tensor, allot: Allot) -> tuple[Tensor, Tensor | None]:
        """Look up and copy; a slot without a match has no drafts."""
        state, slots_B = self._state, group.index_B
        if not bool((most_B > 0).any()):
            return allot(most_B), None
        decided_B = state.decided_S[slots_B]
        text_BW = state.tokens_SW[slots_B, : int(decided_B.max())]
        found_B = last_match(text_BW, decided_B, max_n=self._max_n, min_n=self._min_n)
        state.lookups_S[slots_B] += most_B > 0
        counts_B = allot(torch.where(found_B > 0, most_B, 0))
        offsets_K = torch.arange(int(counts_B.max()), device=state.device)
        period_B1 = (decided_B - found_B).unsqueeze(1)
        tokens_BK = text_BW.gather(1, found_B.unsqueeze(1) + offsets_K % period_B1)
        keep_BK, ranks_BK = offsets_K < counts_B.unsqueeze(1), decided_B.unsqueeze(1) + offsets_K
        state.tokens_SW[slots_B.unsqueeze(1).expand_as(keep_BK)[keep_BK], ranks_BK[keep_BK]] = tokens_BK[keep_BK]
        return counts_B, None

    def known(self, slots_B: Tensor, end_B: Tensor) -> None:
        """Nothing is cached."""

    def make_room(self, num_slots: int, num_columns: int) -> None:
        """Nothing is kept."""

    def slot_bytes(self, num_columns: int) -> int:
        """Nothing is kept."""
        return 0

    def start(self, slot: int) -> None:
        """Nothing to prepare."""

    def move(self, source: int, target: int) -> None:
        """Nothing to move: the look-ups are counted in the SlotState."""

    def spent(self, slot: int) -> tuple[int, float]:
        """The number of look-ups; they are not forwards and take no share of their time."""
        return int(self._state.lookups_S[slot]), 0.0


def last_match(text_BW: Tensor, length_B: Tensor, *, max_n: int, min_n: int) -> Tensor:
    """The column after the longest earlier match of each text's end, [B]; 0 without a match.

    A match is an earlier occurrence of the last n tokens, n from `max_n` down to `min_n`; of several the last one wins. The
    result is the column of the token after it. Only the first `length_B` columns are text.
    """
    width = text_BW.shape[1]
    columns_W = torch.arange(width, device=text_BW.device)
    alive_BW = (columns_W > 0) & (columns_W < length_B.unsqueeze(1))
    length_BW = torch.zeros_like(text_BW)
    for back in range(1, min(max_n, width - 1) + 1):
        wanted_B1 = text_BW.gather(1, (length_B - back).clamp(min=0).unsqueeze(1))
        before_BW = functional.pad(text_BW[:, : width - back], (back, 0), value=-1)
        alive_BW = alive_BW & (before_BW == wanted_B1)
        length_BW += alive_BW
    score_BW = torch.where(length_BW >= min_n, length_BW * width + columns_W, 0)
    best_B = score_BW.argmax(1)
    return torch.where(score_BW.gather(1, best_B.unsqueeze(1)).squeeze(1) > 0, best_B, 0)
