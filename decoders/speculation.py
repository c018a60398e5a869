"""What speculative decoders share: the noise of a sliding window of ranks, and the settling of a draft.

Two acceptance rules, one interface. Coupled: draft and target read the same noise, and the target's own token is committed
always. Rejection: min(1, p/q) and the residual, with uniforms of their own streams. Knows nothing of models or phases.

Legend: S slots, B slots of this step, D drafts, R flat rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from decoders import noise
from decoders.sampling import inverse_cdf_draw, nucleus_draw, residual
from decoders.state import SlotState

_AHEAD: Final = 1 << 16
"""Noise that is computed at once, in numbers: making a few is all overhead."""


class NoiseWindow:
    """Target noise of the next few ranks of every slot, each rank computed once however often it is read.

    A ring over ranks: `size` must cover the ranks that are alive at one time. Float32 [S, size + ahead, V]: where few ranks
    are asked for and the vocabulary is small, up to `ahead` more of each slot are computed along with them.
    """

    def __init__(self, state: SlotState, size: int, vocab_size: int) -> None:
        self._ahead = min(15, _AHEAD // vocab_size)
        self._state, self._size, self._vocab_size = state, size + self._ahead, vocab_size
        size = self._size
        self._ring_SRV = state.column(size, vocab_size, dtype=torch.float32)
        # Which rank each cell of the ring holds, plus one; a new sample starts with none.
        self._held_SR = state.column(size)

    def rows(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Return the noise at each (slot, rank), in any order, [R, V]. Ranks of one slot must lie within `size` of each other."""
        new_R = self._held_SR[slots_R, ranks_R % self._size] != ranks_R + 1
        if bool(new_R.any()):
            self._fill(*self._with_next(slots_R[new_R], ranks_R[new_R]))
        return self._ring_SRV[slots_R, ranks_R % self._size]

    def _with_next(self, slots_R: Tensor, ranks_R: Tensor) -> tuple[Tensor, Tensor]:
        """The places asked for, each once, and where these are few the places after them."""
        width = self._state.order_SW.shape[1]
        more = min(self._ahead, _AHEAD // (len(slots_R) * self._vocab_size) - 1)
        if more > 0:
            last_R1 = torch.maximum(self._state.length_S[slots_R] - 1, ranks_R).unsqueeze(1)
            slots_R = slots_R.repeat_interleave(1 + more)
            next_R = torch.arange(1 + more, device=ranks_R.device)
            ranks_R = torch.minimum(ranks_R.unsqueeze(1) + next_R, last_R1).flatten()
        # Several rows may ask for one rank: compute it once.
        cells = torch.unique(slots_R * width + ranks_R)
        return cells // width, cells % width

    def _fill(self, slots_R: Tensor, ranks_R: Tensor) -> None:
        state = self._state
        positions_R = state.order_SW[slots_R, ranks_R]
        self._ring_SRV[slots_R, ranks_R % self._size] = noise.gumbel_rows(
            state.key_S2[slots_R], positions_R, self._vocab_size
        )
        self._held_SR[slots_R, ranks_R % self._size] = ranks_R + 1


@dataclass(frozen=True, slots=True)
class Window:
    """The drafts of one iteration, and the rows of the target that judge them.

    `drafts_BA` stand at `ranks_BA`; only the first `num_drafts_B` of a slot are drafts. `valid_BA` marks the ranks for which
    there is a row: the drafts and, where it is wanted, the rank after them, whose row gives the bonus. `when_B` is the number
    of tokens that were decided when the drafts were drawn.
    """

    slots_B: Tensor
    when_B: Tensor
    num_drafts_B: Tensor
    drafts_BA: Tensor
    ranks_BA: Tensor
    valid_BA: Tensor

    def is_draft(self) -> Tensor:
        """Where there is a draft, bool [B, A]."""
        return torch.arange(self.ranks_BA.shape[1], device=self.ranks_BA.device) < self.num_drafts_B.unsqueeze(1)

    def slots(self) -> Tensor:
        """The slot of every cell."""
        return self.slots_B.unsqueeze(1).expand_as(self.ranks_BA)

    def ending(self, accepted_B: Tensor, last_B: Tensor) -> Tensor:
        """The drafts, with `last_B` in the place after the accepted ones, [B, A]."""
        offsets_A = torch.arange(self.ranks_BA.shape[1], device=self.ranks_BA.device)
        return torch.where(offsets_A == accepted_B.unsqueeze(1), last_B.unsqueeze(1), self.drafts_BA)


class Acceptance:
    """One acceptance rule over the slots of a decoder: draws drafts, settles them, draws target tokens.

    Every draw is addressed by (slot, rank, when), where `when` is the number of decided tokens at the time of drafting: it
    grows with every iteration, so no random number serves twice. `top_p` is the nucleus that laws are still to be cut to when
    a token is drawn; None where they come cut, or where there is none.
    """

    def __init__(
        self, state: SlotState, *, coupled: bool, greedy: bool, top_p: float | None, window: int, vocab_size: int
    ) -> None:
        self._state = state
        self.coupled, self.top_p = coupled, top_p
        self._window = None if greedy else NoiseWindow(state, window, vocab_size)

    def target(self, law_RV: Tensor, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Draw the sequential decoder's token at each rank, [R]."""
        gumbel = None if self._window is None else self._window.rows(slots_R, ranks_R)
        return nucleus_draw(law_RV, gumbel, self.top_p)

    def draft(self, law_RV: Tensor, slots_R: Tensor, ranks_R: Tensor, when_R: Tensor) -> Tensor:
        """Draw a draft token from q at each rank, [R]."""
        if self.coupled:
            return self.target(law_RV, slots_R, ranks_R)
        return inverse_cdf_draw(law_RV.exp(), self._uniform(slots_R, ranks_R, noise.DRAFT, when_R))

    def judge(self, p_RV: Tensor, q_BKV: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
        """Return (drafts accepted, the token after them: recovered or bonus), each [B].

        `p_RV` are the target's laws in the rows where `window.valid_BA`, in that order. `q_BKV` are the laws of the drafts;
        None says that each had no alternative (a point mass). Coupled acceptance reads no q. Where all drafts are accepted
        and the window has no row for a bonus, the second result means nothing.
        """
        if self.coupled:
            tokens_BA, valid_BA = torch.zeros_like(window.drafts_BA), window.valid_BA
            tokens_BA[valid_BA] = self.target(p_RV, window.slots()[valid_BA], window.ranks_BA[valid_BA])
            accepted_B = leading(window.is_draft() & (tokens_BA == window.drafts_BA))
            return accepted_B, _pick(tokens_BA, accepted_B)
        return self._judge_by_ratio(p_RV, q_BKV, window)

    def _judge_by_ratio(self, p_RV: Tensor, q_BKV: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
        is_draft_BA, valid_BA, drafts_BA = window.is_draft(), window.valid_BA, window.drafts_BA
        log_ratio_BA = torch.zeros(valid_BA.shape, dtype=torch.float64, device=valid_BA.device)
        log_ratio_BA[valid_BA] = p_RV.gather(-1, drafts_BA[valid_BA].unsqueeze(-1)).squeeze(-1).to(torch.float64)
        if q_BKV is not None:
            first = slice(0, min(q_BKV.shape[1], valid_BA.shape[1]))
            log_q_BK = q_BKV[:, first].gather(-1, drafts_BA[:, first].unsqueeze(-1)).squeeze(-1)
            log_ratio_BA[:, first] -= torch.where(is_draft_BA[:, first], log_q_BK.to(torch.float64), 0.0)
        uniform_BA = torch.ones_like(log_ratio_BA)
        slots_R, when_BA = window.slots()[is_draft_BA], window.when_B.unsqueeze(1).expand_as(drafts_BA)
        uniform_BA[is_draft_BA] = self._uniform(
            slots_R, window.ranks_BA[is_draft_BA], noise.ACCEPT, when_BA[is_draft_BA]
        )
        accepted_B = leading(is_draft_BA & (uniform_BA < log_ratio_BA.exp()))
        return accepted_B, self._after_accepted(p_RV, q_BKV, window, accepted_B)

    def _after_accepted(self, p_RV: Tensor, q_BKV: Tensor | None, window: Window, accepted_B: Tensor) -> Tensor:
        """Draw from the residual where a draft was refused, from p itself where none was, [B]."""
        slots_B, when_B = window.slots_B, window.when_B
        row_BA = window.valid_BA.flatten().cumsum(0).view_as(window.valid_BA) - 1
        p_BV, ranks_B = p_RV[_pick(row_BA, accepted_B)], _pick(window.ranks_BA, accepted_B)
        if q_BKV is None:
            q_BV = torch.full_like(p_BV, -torch.inf).scatter_(1, _pick(window.drafts_BA, accepted_B).unsqueeze(1), 0.0)
        else:
            each_B = torch.arange(len(slots_B), device=slots_B.device)
            q_BV = q_BKV[each_B, accepted_B.clamp(max=q_BKV.shape[1] - 1)]
        refused_B = accepted_B < window.num_drafts_B
        mass_BV = torch.where(refused_B.unsqueeze(1), residual(p_BV, q_BV), p_BV.exp())
        recovering_B = self._uniform(slots_B, ranks_B, noise.RESIDUAL, when_B)
        bonus_B = self._uniform(slots_B, ranks_B, noise.BONUS, when_B)
        return inverse_cdf_draw(mass_BV, torch.where(refused_B, recovering_B, bonus_B))

    def _uniform(self, slots_R: Tensor, ranks_R: Tensor, purpose: int, when_R: Tensor) -> Tensor:
        positions_R = self._state.order_SW[slots_R, ranks_R]
        return noise.uniform_rows(self._state.key_S2[slots_R], positions_R, purpose, when_R)


def leading(flags_BD: Tensor) -> Tensor:
    """Count the leading True of each row."""
    return flags_BD.to(torch.int64).cumprod(1).sum(1)


def _pick(tokens_BD: Tensor, index_B: Tensor) -> Tensor:
    return tokens_BD.gather(1, index_B.clamp(max=tokens_BD.shape[1] - 1).unsqueeze(1)).squeeze(1)
