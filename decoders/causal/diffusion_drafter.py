"""A masked-diffusion model as drafter for a causal one: reveals masks after the text in a few forwards.

    window       the | cat | [M]  [M]  [M]  [M]         four drafts in T = 2 forwards, left to right
    forward 1              | sat   on  [M]  [M]         the first chunk of ceil(4 / 2), tokens independent
    forward 2              | sat   on   a   mat         the second, which sees the first

q is the warped softmax of the forward that revealed a token. From left to right, q is the token's distribution given exactly the
tokens before it, so the rejection rule is exact. In the `native` order, which is random, a token may depend on later ones: q is
then not conditioned on the tokens before it alone, and under rejection the texts do not follow the target's distribution.
Coupled acceptance is exact in any order.

The drafts of one forward are independent: their distribution is a product of marginals, and later drafts are accepted less
often. A draft head (backbones/heads.py, trained for this pair of models) makes it a chain: from left to right, each row is
corrected for the token before it, known or just drafted, and for the number of tokens that the row has not seen. q is then the
distribution of the corrected row, so all of the above holds. The products are small, but run one after the other.

The model sees its whole window in both directions, so nothing is cached and each forward runs the window. A `short` window holds
as much of the text as fits, and the masks; a `full` one has as many tokens as the model was trained on, with masks to the end.
A token that the model does not know reads as a mask.

Differs from Christopher et al., "Speculative Diffusion Decoding" (2025), Algorithm 1: it starts from Gaussian noise, where
absorbing diffusion starts from masks; its indices are off; and it does not define q for a draft of several steps.

Legend: R masks to be revealed, T rows of a window.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from decoders.backbones.base import CountingBackbone, TokenBackbone, TokenRows
from decoders.backbones.heads import MarkovHead, distance_index
from decoders.backbones.invariance import at_least_rows
from decoders.backbones.packed import block_of_rows
from decoders.base import ModelInfo
from decoders.causal.drafters import Allot, DrawAt
from decoders.draws import noise
from decoders.draws.absorbing import noise_of_share
from decoders.engine.cost import CostTable
from decoders.engine.memory import give
from decoders.engine.state import Group, SlotState


@dataclass(frozen=True, slots=True)
class Revealing:
    """How masks become drafts: in at most `steps` forwards; `gamma` drafts if there is room, None if chosen at run time."""

    steps: int
    gamma: int | None
    order: Literal["left_to_right", "native"] = "left_to_right"

    def chunk(self, counts_B: Tensor) -> Tensor:
        """How many drafts each slot reveals in a forward, [B]; the last drafts of a canvas are fewer and take fewer forwards."""
        whole_B = counts_B if self.gamma is None else torch.full_like(counts_B, self.gamma)
        return -(-whole_B // self.steps)

    def forwards(self, most: int) -> list[int]:
        """How many forwards 0 .. `most` drafts take, if their number is chosen at run time."""
        return [0, *(-(-count // -(-count // self.steps)) for count in range(1, most + 1))]


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks that one forward reveals; `place_R` numbers those of each slot from left to right."""

    slots_R: Tensor
    ranks_R: Tensor
    decided_R: Tensor
    place_R: Tensor

    def at(self, index_N: Tensor) -> _Masks:
        """Some of them."""
        return _Masks(self.slots_R[index_N], self.ranks_R[index_N], self.decided_R[index_N], self.place_R[index_N])


class DiffusionDrafter:
    """A CausalDrafter; `draw` is the decoder's, so that drafts read the target's noise.

    `info` is the drafter's: its mask, its shift, its suppressed ids and its longest window. With `full` every
    window has that length. A vocabulary of another size than the target's is cut or padded. `head` is for drafts from left
    to right. `costs` times the forwards, and `drawing` the sequential draws with a head.
    """

    def __init__(
        self,
        backbone: TokenBackbone,
        info: ModelInfo,
        state: SlotState,
        draw: DrawAt,
        *,
        revealing: Revealing,
        full: bool,
        vocab_size: int,
        keep_laws: bool,
        head: MarkovHead | None = None,
        costs: CostTable | None = None,
        drawing: CostTable | None = None,
    ) -> None:
        assert info.mask_id is not None, "a drafter without a mask token"
        assert head is None or revealing.order == "left_to_right", "a head corrects for what stands before"
        self._backbone, self._info, self._state, self._draw = backbone, info, state, draw
        self._mask_id, self._revealing, self._full = info.mask_id, revealing, full
        self._vocab_size, self._keep_laws, self._head = vocab_size, keep_laws, head
        self._costs, self._drawing, self._drawing_s = costs, drawing, 0.0
        self._shape = (0, 0)
        self.counting = CountingBackbone(backbone, state.num_slots)
        never = sorted({*info.suppressed, info.mask_id})
        self._never = torch.tensor([token for token in never if token < vocab_size], dtype=torch.int64).to(state.device)

    @property
    def forward_s(self) -> float:
        """Seconds of its forwards."""
        return self.counting.forward_s

    # ---- drafting ------------------------------------------------------------------------------------------------

    def draft(self, group: Group, most_B: Tensor, allot: Allot) -> tuple[Tensor, Tensor | None]:
        """Reveal each slot's masks chunk by chunk; a slot with few masks skips the last forwards."""
        if self._info.max_length is not None:
            # At least one token of the text stays in the window.
            most_B = most_B.clamp(max=self._info.max_length - 1)
        counts_B = allot(most_B)
        step_BK = self._schedule(group.index_B, counts_B)
        laws_BKV: Tensor | None = None
        self._drawing_s = 0.0
        for step in range(int(step_BK.max()) + 1 if step_BK.numel() else 0):
            now_BK = step_BK == step
            part_B = now_BK.any(1)
            law_RV = self._reveal(group.part(part_B), counts_B[part_B], step_BK[part_B], step)
            if law_RV is not None:
                if laws_BKV is None:
                    laws_BKV = law_RV.new_zeros(*step_BK.shape, law_RV.shape[1])
                laws_BKV[now_BK] = law_RV
        if self._drawing is not None and self._drawing_s and not (group.fresh or group.joined):
            self._drawing.observe(int(counts_B.max()), int(counts_B.sum()), self._drawing_s)
        return counts_B, laws_BKV

    def _schedule(self, slots_B: Tensor, counts_B: Tensor) -> Tensor:
        """The forward that reveals each draft, [B, K]; -1 where there is none."""
        offsets_K = torch.arange(int(counts_B.max()), device=counts_B.device)
        is_draft_BK = offsets_K < counts_B.unsqueeze(1)
        place_BK = offsets_K.expand_as(is_draft_BK)
        if self._revealing.order == "native":
            place_BK = self._shuffled(slots_B, is_draft_BK)
        chunk_B1 = self._revealing.chunk(counts_B).clamp(min=1).unsqueeze(1)
        return torch.where(is_draft_BK, place_BK // chunk_B1, -1)

    def _shuffled(self, slots_B: Tensor, is_draft_BK: Tensor) -> Tensor:
        """The place of each draft in the slot's random order, by the sample's own noise, [B, K]."""
        state, decided_B = self._state, self._state.decided_S[slots_B]
        row_R, offset_R = is_draft_BK.nonzero(as_tuple=True)
        slots_R, when_R = slots_B[row_R], decided_B[row_R]
        positions_R = state.order_SW[slots_R, when_R + offset_R]
        uniform_BK = torch.full(is_draft_BK.shape, 2.0, dtype=torch.float64, device=state.device)
        uniform_BK[is_draft_BK] = noise.uniform_rows(state.key_S2[slots_R], positions_R, noise.ORDER, when_R)
        return uniform_BK.argsort(dim=1, stable=True).argsort(dim=1)

    def _reveal(self, group: Group, counts_B: Tensor, step_BK: Tensor, step: int) -> Tensor | None:
        """Run the slots' windows, draw and store this step's drafts; returns their distributions [R, V] if kept."""
        slots_B, began_s = group.index_B, time.perf_counter()
        decided_B, now_BK = self._state.decided_S[slots_B], step_BK == step
        start_B, end_B = self._bounds(decided_B, counts_B)
        rows = self._rows(slots_B, start_B, end_B, (step_BK >= 0) & (step_BK < step))
        hidden_BTD = self.counting.forward(rows, group.slots)
        row_R, offset_R = now_BK.nonzero(as_tuple=True)
        masks = _Masks(slots_B[row_R], decided_B[row_R] + offset_R, decided_B[row_R], now_BK.cumsum(1)[now_BK] - 1)
        hidden_RD = hidden_BTD[row_R, masks.ranks_R - start_B[row_R] - self._info.shift]
        drawing_began_s = time.perf_counter()
        law_RV = self._drawn(hidden_RD, masks) if self._head is None else self._chained(self._head, hidden_RD, masks)
        num_drafts, num_kv = int(counts_B.sum()), int(decided_B.sum())
        self._note(group, num_drafts, num_kv, drawing_began_s - began_s, time.perf_counter() - drawing_began_s)
        return law_RV if self._keep_laws else None

    def _note(self, group: Group, num_drafts: int, num_kv: int, forward_s: float, drawing_s: float) -> None:
        """Time a forward; drawing all drafts at once is part of it, drawing them one by one with a head is not."""
        if self._head is not None:
            self._drawing_s += drawing_s
            drawing_s = 0.0
        if self._costs is not None and not (group.fresh or group.joined):
            self._costs.observe(num_drafts, num_kv, forward_s + drawing_s)

    def _drawn(self, hidden_RD: Tensor, masks: _Masks) -> Tensor:
        """Draw all of these drafts at once and write them down; returns their distributions [R, V]."""
        logits_RV = self._fitted(self.counting.logits(hidden_RD))
        law_RV, tokens_R = self._draw(logits_RV, masks.slots_R, masks.ranks_R, masks.decided_R)
        self._state.tokens_SW[masks.slots_R, masks.ranks_R] = tokens_R
        return law_RV

    def _chained(self, head: MarkovHead, hidden_RD: Tensor, masks: _Masks) -> Tensor | None:
        """The same, one place after the other, in all slots at once: each row is corrected for the drafts before it."""
        order_R, laws = masks.place_R.argsort(stable=True), list[Tensor]()
        for index_N in order_R.split(masks.place_R.bincount().tolist()):
            part = masks.at(index_N)
            laws.append(self._drawn(self._corrected(head, hidden_RD[index_N], part), part))
        return torch.cat(laws)[order_R.argsort()] if self._keep_laws else None

    def _corrected(self, head: MarkovHead, hidden_RD: Tensor, masks: _Masks) -> Tensor:
        """The rows' hidden states given the token before each, and the one before that where the row has not seen it."""
        earlier = [(masks.ranks_R - back).clamp(min=0) for back in (1, 2)]
        prev_RD, before_RD = (self._embedded(self._state.tokens_SW[masks.slots_R, ranks_R]) for ranks_R in earlier)
        return self.counting.part_of_forward(
            at_least_rows,
            block_of_rows(max(len(hidden_RD), self._backbone.min_rows)),
            head,
            hidden_RD,
            prev_RD=prev_RD,
            prev_distance_R=distance_index(masks.ranks_R, earlier[0]),
            before_RD=before_RD,
            before_distance_R=distance_index(masks.ranks_R, earlier[1]),
            num_unseen_R=masks.place_R,
        )

    def _embedded(self, tokens_R: Tensor) -> Tensor:
        """Embeddings [R, D]; of the mask for tokens that the drafter does not know."""
        return self._backbone.embed(torch.where(tokens_R < self._backbone.vocab_size, tokens_R, self._mask_id))

    # ---- the window ----------------------------------------------------------------------------------------------

    def _bounds(self, decided_B: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks [start, end) of each window: all of the text where it fits, else its end."""
        end_B, longest = decided_B + counts_B, self._info.max_length
        if longest is None:
            return torch.zeros_like(end_B), end_B
        start_B = (end_B - longest).clamp(min=0)
        return start_B, start_B + longest if self._full else end_B

    def _rows(self, slots_B: Tensor, start_B: Tensor, end_B: Tensor, revealed_BK: Tensor) -> TokenRows:
        """One row for each token and mask of the windows, from column and position 0 on; each sees its whole window."""
        length_B, state = end_B - start_B, self._state
        offsets_T = torch.arange(int(length_B.max()), device=state.device)
        valid_BT = offsets_T < length_B.unsqueeze(1)
        ranks_BT = start_B.unsqueeze(1) + offsets_T
        draft_BT = ranks_BT - state.decided_S[slots_B].unsqueeze(1)
        known_BT = draft_BT < 0
        if revealed_BK.shape[1]:
            within_BT = (draft_BT >= 0) & (draft_BT < revealed_BK.shape[1])
            known_BT |= within_BT & revealed_BK.gather(1, draft_BT.clamp(0, revealed_BK.shape[1] - 1))
        tokens_BT = state.tokens_SW[slots_B].gather(1, ranks_BT.clamp(max=state.tokens_SW.shape[1] - 1))
        known_BT &= tokens_BT < self._backbone.vocab_size
        is_mask_BT = valid_BT & ~known_BT
        share_B1 = is_mask_BT.sum(1, keepdim=True).to(torch.float64) / length_B.unsqueeze(1)
        columns_BT = torch.where(valid_BT, offsets_T, 0)
        return TokenRows(
            slots_B=slots_B,
            tokens_BT=torch.where(known_BT, tokens_BT, self._mask_id),
            positions_BT=columns_BT,
            columns_BT=columns_BT,
            valid_BT=valid_BT,
            visible_BTW=valid_BT.unsqueeze(1).expand(-1, valid_BT.shape[1], -1),
            sigma_BT=noise_of_share(share_B1).expand_as(columns_BT),
        )

    def _fitted(self, logits_RV: Tensor) -> Tensor:
        """Give the logits the width of the target's vocabulary, and suppress the drafter's suppressed ids."""
        missing = self._vocab_size - logits_RV.shape[1]
        fitted_RV = functional.pad(logits_RV, (0, missing), value=-torch.inf) if missing > 0 else logits_RV
        return fitted_RV[:, : self._vocab_size].index_fill(-1, self._never, -torch.inf)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def known(self, slots_B: Tensor, end_B: Tensor) -> None:
        """Nothing is cached."""

    def make_room(self, num_slots: int, num_columns: int) -> None:
        """Make room for windows."""
        had, self._shape = self._shape, (0, 0)
        shape = (num_slots, self._window(num_columns) if num_slots else 0)
        give(self._backbone, *shape, had)
        self._shape = shape

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes of a window in the drafter's cache, its rows' activations, and the distributions of its drafts."""
        cell = int(getattr(self._backbone, "cell_bytes", 0)) + int(getattr(self._backbone, "row_bytes", 0))
        laws = self._state.histogram_SH.shape[1] * self._vocab_size * 4 if self._keep_laws else 0
        return self._window(num_columns) * cell + laws

    def _window(self, num_columns: int) -> int:
        longest = self._info.max_length
        if longest is None:
            return num_columns
        return longest if self._full else min(num_columns, longest)

    def start(self, slot: int) -> None:
        """Count again."""
        self.counting.counters.reset(slot)

    def move(self, source: int, target: int) -> None:
        """Move the counts; the drafter's cache is rewritten in every forward."""
        self.counting.counters.move(source, target)

    def spent(self, slot: int) -> tuple[int, float]:
        """The drafter's forwards and seconds for the sample in `slot`."""
        counters = self.counting.counters
        return counters.nfe[slot], counters.device_s[slot]
