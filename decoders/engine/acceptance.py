"""Shared by speculative decoders: noise for a sliding window of ranks, and the acceptance rules for drafts.

Two acceptance rules, one interface. Coupled: draft and target read the same noise, and the target's own token is committed
in all cases. Rejection: accept with probability min(1, p/q), else draw from the residual; each draw has a random stream of
its own. Knows nothing of models or phases.

Legend: D drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from decoders.draws import noise
from decoders.draws.sampling import inverse_cdf_draw, residual
from decoders.engine.state import SlotState
from decoders.engine.warps import Warps

_AHEAD: Final = 1 << 16
"""How many noise values to compute at once: for a few values the overhead dominates."""


class NoiseWindow:
    """Target noise of the next few ranks of every slot, each rank computed once however often it is read.

    A ring over ranks: `size` must cover the ranks that are alive at one time. Float32 [S, size + ahead, V]: where few ranks
    are asked for and the vocabulary is small, up to `ahead` more of each slot are computed along with them. The first slots have
    a ring, as many as the state's `noise_bytes` allow; for the others each call computes the noise of each rank once.
    """

    def __init__(self, state: SlotState, size: int, vocab_size: int) -> None:
        self._ahead = min(15, _AHEAD // vocab_size)
        self._state, self._size, self._vocab_size = state, size + self._ahead, vocab_size
        size = self._size
        self._ring = state.wide(size, vocab_size, dtype=torch.float32, is_noise=True)
        # The rank that each cell of the ring holds, plus one; 0 where a cell is empty.
        self._held_SR = state.column(size)

    def rows(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Return the noise at each (slot, rank), in any order, [R, V]. Ranks of one slot must lie within `size` of each other."""
        num_kept = len(self._ring.data)
        if num_kept >= self._state.num_used > 0:
            return self._kept(slots_R, ranks_R)
        near_R = slots_R < num_kept
        noise_RV = torch.empty(len(slots_R), self._vocab_size, dtype=torch.float32, device=slots_R.device)
        noise_RV[near_R] = self._kept(slots_R[near_R], ranks_R[near_R])
        noise_RV[~near_R] = self._passing(slots_R[~near_R], ranks_R[~near_R])
        return noise_RV

    def _kept(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        new_R = self._held_SR[slots_R, ranks_R % self._size] != ranks_R + 1
        if bool(new_R.any()):
            self._fill(*self._with_next(slots_R[new_R], ranks_R[new_R]))
        return self._ring.data[slots_R, ranks_R % self._size]

    def _passing(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Noise that is not kept."""
        width = self._state.order_SW.shape[1]
        cells, which_R = torch.unique(slots_R * width + ranks_R, return_inverse=True)
        return self._computed(cells // width, cells % width)[which_R]

    def _computed(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        positions_R = self._state.order_SW[slots_R, ranks_R]
        return noise.gumbel_rows(self._state.key_S2[slots_R], positions_R, self._vocab_size)

    def _with_next(self, slots_R: Tensor, ranks_R: Tensor) -> tuple[Tensor, Tensor]:
        """The requested places without duplicates; where these are few, also the places after them."""
        width = self._state.order_SW.shape[1]
        more = min(self._ahead, _AHEAD // (len(slots_R) * self._vocab_size) - 1)
        if more > 0:
            last_R1 = torch.maximum(self._state.length_S[slots_R] - 1, ranks_R).unsqueeze(1)
            slots_R = slots_R.repeat_interleave(1 + more)
            next_R = torch.arange(1 + more, device=ranks_R.device)
            ranks_R = torch.minimum(ranks_R.unsqueeze(1) + next_R, last_R1).flatten()
        # Several rows may need the same rank: compute it once.
        cells = torch.unique(slots_R * width + ranks_R)
        return cells // width, cells % width

    def _fill(self, slots_R: Tensor, ranks_R: Tensor) -> None:
        self._ring.data[slots_R, ranks_R % self._size] = self._computed(slots_R, ranks_R)
        self._held_SR[slots_R, ranks_R % self._size] = ranks_R + 1


@dataclass(frozen=True, slots=True)
class Window:
    """The drafts of one iteration, and the target rows that verify them.

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
    grows with every iteration, so no random number serves twice. Distributions come as `warps` gives them, and tokens are drawn
    by it.
    """

    def __init__(self, state: SlotState, warps: Warps, *, coupled: bool, window: int, vocab_size: int) -> None:
        self._state, self._warps, self.coupled = state, warps, coupled
        self._sizes = (window, vocab_size)
        # At temperature 0 there is no noise, until a request sets another temperature.
        self._window = None if warps.greedy else NoiseWindow(state, *self._sizes)

    def target(self, law_RV: Tensor, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Draw the sequential decoder's token at each rank, [R]."""
        if self._warps.greedy:
            return self._warps.draw(law_RV, None, slots_R)
        if self._window is None:
            self._window = NoiseWindow(self._state, *self._sizes)
        return self._warps.draw(law_RV, self._window.rows(slots_R, ranks_R), slots_R)

    def draft(self, law_RV: Tensor, slots_R: Tensor, ranks_R: Tensor, when_R: Tensor) -> Tensor:
        """Draw a draft token from q at each rank, [R]."""
        if self.coupled:
            return self.target(law_RV, slots_R, ranks_R)
        return inverse_cdf_draw(law_RV.exp(), self._uniform(slots_R, ranks_R, noise.DRAFT, when_R))

    def compare(self, tokens_BA: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Verify coupled drafts against the target's own tokens: (number accepted, the token after them), each [B].

        Where all drafts are accepted and the window has no row for a bonus, the second result means nothing.
        """
        accepted_B = leading(window.is_draft() & (tokens_BA == window.drafts_BA))
        return accepted_B, pick(tokens_BA, accepted_B)

    def weigh(self, log_p_BA: Tensor, q_BKV: Tensor | None, window: Window) -> Tensor:
        """Verify drafts by the rejection rule: the number of drafts accepted, [B].

        `log_p_BA` are the target's log-probabilities of the drafts, float64. `q_BKV` are the draft distributions; None if each
        had no alternative (a point mass).
        """
        is_draft_BA, drafts_BA = window.is_draft(), window.drafts_BA
        log_ratio_BA = log_p_BA.clone()
        if q_BKV is not None:
            first = slice(0, min(q_BKV.shape[1], drafts_BA.shape[1]))
            log_q_BK = q_BKV[:, first].gather(-1, drafts_BA[:, first].unsqueeze(-1)).squeeze(-1)
            log_ratio_BA[:, first] -= torch.where(is_draft_BA[:, first], log_q_BK.to(torch.float64), 0.0)
        uniform_BA = torch.ones_like(log_ratio_BA)
        slots_R, when_BA = window.slots()[is_draft_BA], window.when_B.unsqueeze(1).expand_as(drafts_BA)
        uniform_BA[is_draft_BA] = self._uniform(
            slots_R, window.ranks_BA[is_draft_BA], noise.ACCEPT, when_BA[is_draft_BA]
        )
        return leading(is_draft_BA & (uniform_BA < log_ratio_BA.exp()))

    def replace(self, p_RV: Tensor, q_BKV: Tensor | None, window: Window, accepted_B: Tensor, part: slice) -> Tensor:
        """Draw the token after the accepted drafts of some slots: from the residual after a rejection, else from p, [R].

        `p_RV` are the target's distributions there, in the slots of `part`.
        """
        slots_R, when_R, accepted_R = window.slots_B[part], window.when_B[part], accepted_B[part]
        ranks_R = pick(window.ranks_BA[part], accepted_R)
        if q_BKV is None:
            drafts_R1 = pick(window.drafts_BA[part], accepted_R).unsqueeze(1)
            q_RV = torch.full_like(p_RV, -torch.inf).scatter_(1, drafts_R1, 0.0)
        else:
            each_R = torch.arange(len(window.slots_B), device=slots_R.device)[part]
            q_RV = q_BKV[each_R, accepted_R.clamp(max=q_BKV.shape[1] - 1)]
        refused_R = accepted_R < window.num_drafts_B[part]
        mass_RV = torch.where(refused_R.unsqueeze(1), residual(p_RV, q_RV), p_RV.exp())
        recovering_R = self._uniform(slots_R, ranks_R, noise.RESIDUAL, when_R)
        bonus_R = self._uniform(slots_R, ranks_R, noise.BONUS, when_R)
        return inverse_cdf_draw(mass_RV, torch.where(refused_R, recovering_R, bonus_R))

    def _uniform(self, slots_R: Tensor, ranks_R: Tensor, purpose: int, when_R: Tensor) -> Tensor:
        positions_R = self._state.order_SW[slots_R, ranks_R]
        return noise.uniform_rows(self._state.key_S2[slots_R], positions_R, purpose, when_R)


def leading(flags_BD: Tensor) -> Tensor:
    """Count the leading True of each row."""
    return flags_BD.to(torch.int64).cumprod(1).sum(1)


def pick(tokens_BD: Tensor, index_B: Tensor) -> Tensor:
    """One cell of each row; the last one where the index lies beyond it."""
    return tokens_BD.gather(1, index_B.clamp(max=tokens_BD.shape[1] - 1).unsqueeze(1)).squeeze(1)
