"""Drafters of the any-subset decoders: the context n-gram, and draft heads that step over the ranks of a window.

Drafters only propose: they return tokens and the distribution q they were drawn from. Knows nothing of acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.backbones.base import CountingBackbone
from decoders.backbones.heads import ChainHead, MarkovHead, distance_index
from decoders.backbones.invariance import at_least_rows
from decoders.engine.state import SlotState

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [B, V], ranks [B]) -> (distribution q [B, V], tokens [B]): warps, draws with the noise of each rank."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens [B, K], and the log-probabilities they were drawn from, one [B, V] per rank."""

    tokens_BK: Tensor
    laws: list[Tensor]

    def joined_laws(self) -> Tensor:
        """All distributions, [B, K, V]: a copy, which coupled acceptance never asks for."""
        return torch.stack(self.laws, 1)


def stack_drafts(tokens: list[Tensor], laws: list[Tensor]) -> Drafts:
    """Join the drafts of one rank after the other."""
    return Drafts(torch.stack(tokens, 1), laws)


# ---- context n-grams ---------------------------------------------------------------------------------------------


def ngram_counts(canvas_BP: Tensor, decided_BP: Tensor, left_B: Tensor, has_left_B: Tensor, vocab_size: int) -> Tensor:
    """Return how often each token follows `left_B` among decided neighbours, or, if none does, how often it occurs; [B, V].

    ASSD's Algorithm 2. Its Eq. 23 divides by the count of the left token, which includes occurrences at the end or before a
    hole; counting pairs alone makes the row sum to one. `canvas_BP` holds tokens by position, `decided_BP` marks the decided.
    Drafted tokens never count. A row in which nothing is decided is all zero.
    """
    weights = decided_BP.to(torch.float64)
    counts = torch.zeros(canvas_BP.shape[0], vocab_size, dtype=torch.float64, device=canvas_BP.device)
    follows_BP = decided_BP[:, :-1] & decided_BP[:, 1:] & (canvas_BP[:, :-1] == left_B.unsqueeze(1))
    follows_BP = follows_BP & has_left_B.unsqueeze(1)
    pairs = counts.scatter_add(1, canvas_BP[:, 1:], follows_BP.to(torch.float64))
    singles = counts.scatter_add(1, canvas_BP, weights)
    return torch.where(pairs.sum(1, keepdim=True) > 0, pairs, singles)


def canvas_by_position(state: SlotState, slots_B: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, decided) of each slot by position, int64 and bool [B, P]; undecided cells hold 0."""
    order_BW = state.order_SW[slots_B]
    columns_W = torch.arange(order_BW.shape[1], device=state.device)
    decided_BW = columns_W < state.decided_S[slots_B].unsqueeze(1)
    # Columns beyond the canvas write to a cell that is cut off.
    where_BW = torch.where(decided_BW, order_BW, num_positions)
    tokens = torch.zeros(len(slots_B), num_positions + 1, dtype=torch.int64, device=state.device)
    decided = torch.zeros_like(tokens, dtype=torch.bool)
    tokens.scatter_(1, where_BW, torch.where(decided_BW, state.tokens_SW[slots_B], 0))
    decided.scatter_(1, where_BW, decided_BW)
    return tokens[:, :num_positions], decided[:, :num_positions]


# ---- draft heads -------------------------------------------------------------------------------------------------


class HeadRoller:
    """Rolls a draft head over the ranks of one window, one rank at a time, for many slots at once.

    Drafts are written into the state as they are drawn, since the next rank reads them. Ranks at or beyond a canvas's end
    are drawn too and mean nothing; they are neither written nor read.
    """

    def __init__(self, counting: CountingBackbone, state: SlotState, slots_B: Tensor, draw: Draw) -> None:
        self._backbone, self._logits, self._network = counting.backbone, counting.logits, counting.part_of_forward
        self._state, self._slots_B, self._call_draw = state, slots_B, draw
        self._last_B = state.length_S[slots_B] - 1
        self._tokens: list[Tensor] = []
        self._laws: list[Tensor] = []

    def markov(self, head: MarkovHead | None, hidden_BKD: Tensor, first_rank_B: Tensor, limits_BK: Tensor) -> Drafts:
        """Draft ranks first_rank .. first_rank + K - 1 from rows computed with the given limits, corrected by the head.

        All tokens below `first_rank` must stand in the state. Without a head, or for a row that saw all that came before
        it, the row's own logits are used.
        """
        for offset in range(hidden_BKD.shape[1]):
            ranks_B, hidden_BD = first_rank_B + offset, hidden_BKD[:, offset]
            num_unseen_B = ranks_B - limits_BK[:, offset]
            if head is not None:
                corrected_BD = self._corrected(head, hidden_BD, ranks_B, num_unseen_B)
                hidden_BD = torch.where((num_unseen_B > 0).unsqueeze(1), corrected_BD, hidden_BD)
            self._draw(hidden_BD, ranks_B)
        return stack_drafts(self._tokens, self._laws)

    def chain(self, head: ChainHead, start_BD: Tensor, first_rank_B: Tensor, num_drafts: int) -> Drafts:
        """Draft `num_drafts` ranks from the hidden state of the row that decided the token just before `first_rank`."""
        canvas = _Neighbours(self._state, self._slots_B, first_rank_B)
        state_BD = start_BD
        for offset in range(num_drafts):
            ranks_B = first_rank_B + offset
            state_BD = self._rolled(head, state_BD, ranks_B, canvas)
            canvas.add(ranks_B, self._draw(state_BD, ranks_B))
        return stack_drafts(self._tokens, self._laws)

    def _corrected(self, head: MarkovHead, hidden_BD: Tensor, ranks_B: Tensor, num_unseen_B: Tensor) -> Tensor:
        position_B, prev_B, prev_position_B = self._around(ranks_B, 1)
        _, before_B, before_position_B = self._around(ranks_B, 2)
        return self._network(
            at_least_rows,
            self._backbone.min_rows,
            head,
            hidden_BD,
            prev_RD=self._backbone.embed(prev_B),
            prev_distance_R=distance_index(position_B, prev_position_B),
            before_RD=self._backbone.embed(before_B),
            before_distance_R=distance_index(position_B, before_position_B),
            num_unseen_R=num_unseen_B.clamp(min=1),
        )

    def _rolled(self, head: ChainHead, state_BD: Tensor, ranks_B: Tensor, canvas: _Neighbours) -> Tensor:
        position_B, prev_B, prev_position_B = self._around(ranks_B, 1)
        left_B, has_left_B = canvas.at(position_B - 1)
        right_B, has_right_B = canvas.at(position_B + 1)
        return self._network(
            at_least_rows,
            self._backbone.min_rows,
            head,
            state_BD,
            prev_RD=self._backbone.embed(prev_B),
            distance_R=distance_index(position_B, prev_position_B),
            left_RD=self._backbone.embed(left_B),
            has_left_R=has_left_B,
            right_RD=self._backbone.embed(right_B),
            has_right_R=has_right_B,
        )

    def _around(self, ranks_B: Tensor, back: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (position at the rank, token and position `back` ranks earlier), each [B]."""
        state, slots_B = self._state, self._slots_B
        ranks_B = torch.minimum(ranks_B, self._last_B)
        earlier_B = (ranks_B - back).clamp(min=0)
        return state.order_SW[slots_B, ranks_B], state.tokens_SW[slots_B, earlier_B], state.order_SW[slots_B, earlier_B]

    def _draw(self, hidden_BD: Tensor, ranks_B: Tensor) -> Tensor:
        inside_B = ranks_B <= self._last_B
        law_BV, tokens_B = self._call_draw(self._logits(hidden_BD), torch.minimum(ranks_B, self._last_B))
        self._state.tokens_SW[self._slots_B[inside_B], ranks_B[inside_B]] = tokens_B[inside_B]
        self._tokens.append(tokens_B)
        self._laws.append(law_BV)
        return tokens_B


class _Neighbours:
    """Tokens by position, as far as they are decided or drafted."""

    def __init__(self, state: SlotState, slots_B: Tensor, known_ranks_B: Tensor) -> None:
        order_BW = state.order_SW[slots_B]
        num_columns = order_BW.shape[1]
        self._state, self._slots_B = state, slots_B
        # Cells: one before position 0, the positions, one after the last; columns not known are sent to cell 0.
        known_BW = torch.arange(num_columns, device=state.device) < known_ranks_B.unsqueeze(1)
        cells_BW = torch.where(known_BW, order_BW + 1, 0)
        self._tokens = torch.zeros(len(slots_B), num_columns + 2, dtype=torch.int64, device=state.device)
        self._known = torch.zeros_like(self._tokens, dtype=torch.bool)
        self._tokens.scatter_(1, cells_BW, state.tokens_SW[slots_B])
        self._known.scatter_(1, cells_BW, known_BW)
        self._known[:, 0] = False

    def at(self, positions_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (token, known) at each position, which may be -1 or one past the end."""
        cells = (positions_B + 1).unsqueeze(1)
        return self._tokens.gather(1, cells).squeeze(1), self._known.gather(1, cells).squeeze(1)

    def add(self, ranks_B: Tensor, tokens_B: Tensor) -> None:
        """Note a draft at each rank that lies inside its canvas."""
        state = self._state
        inside_B = ranks_B < state.length_S[self._slots_B]
        ranks_B = torch.minimum(ranks_B, state.length_S[self._slots_B] - 1)
        cells_B = torch.where(inside_B, state.order_SW[self._slots_B, ranks_B] + 1, 0).unsqueeze(1)
        self._tokens.scatter_(1, cells_B, tokens_B.unsqueeze(1))
        self._known.scatter_(1, cells_B, inside_B.unsqueeze(1))
        self._known[:, 0] = False
