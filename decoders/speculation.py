"""What speculative decoders share: the noise of a sliding window of ranks, and the settling of a draft.

Two acceptance rules, one interface. Coupled: draft and target read the same noise, and the target's own token is committed
always. Rejection: min(1, p/q) and the residual, with uniforms of their own streams. Knows nothing of models or phases.

Legend: S slots, B slots of this step, D drafts, R flat rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders import noise
from decoders.sampling import inverse_cdf_draw, nucleus_draw, residual
from decoders.state import SlotState


class NoiseWindow:
    """Target noise of the next few ranks of every slot, each rank computed once however often it is read.

    A ring over ranks: `size` must cover the ranks that are alive at one time. Float32 [S, size, V].
    """

    def __init__(self, state: SlotState, size: int, vocab_size: int) -> None:
        self._state, self._size, self._vocab_size = state, size, vocab_size
        self._ring_SRV = state.column(size, vocab_size, dtype=torch.float32)
        # Ranks below this one have been computed; a new sample starts at 0.
        self._computed_S = state.column()

    def rows(self, slots_R: Tensor, ranks_R: Tensor) -> Tensor:
        """Return the noise at each (slot, rank), [R, V]. Ranks of one slot must lie within `size` of each other."""
        new_R = ranks_R >= self._computed_S[slots_R]
        if bool(new_R.any()):
            # Several rows may ask for one rank: compute it once.
            pairs = torch.unique(torch.stack([slots_R[new_R], ranks_R[new_R]], 1), dim=0)
            self._fill(pairs[:, 0], pairs[:, 1])
        return self._ring_SRV[slots_R, ranks_R % self._size]

    def _fill(self, slots_R: Tensor, ranks_R: Tensor) -> None:
        state = self._state
        positions_R = state.order_SW[slots_R, ranks_R]
        self._ring_SRV[slots_R, ranks_R % self._size] = noise.gumbel_rows(
            state.key_S2[slots_R], positions_R, self._vocab_size
        )
        self._computed_S.scatter_reduce_(0, slots_R, ranks_R + 1, "amax")


@dataclass(frozen=True, slots=True)
class Settled:
    """How a draft ended in each slot: accepted drafts, and the token that the target puts after them.

    `recovered_B` means something only where a draft was rejected.
    """

    num_accepted_B: Tensor
    recovered_B: Tensor


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

    def direct(self, law_RV: Tensor, slots_R: Tensor, ranks_R: Tensor, when_R: Tensor) -> Tensor:
        """Draw a token that no draft stood for (the bonus, or the only token left), [R]."""
        if self.coupled:
            return self.target(law_RV, slots_R, ranks_R)
        return inverse_cdf_draw(law_RV.exp(), self._uniform(slots_R, ranks_R, noise.BONUS, when_R))

    def settle(
        self,
        p_BDV: Tensor,
        q_BDV: Tensor | None,
        drafts_BD: Tensor,
        *,
        valid_BD: Tensor,
        slots_B: Tensor,
        ranks_BD: Tensor,
        when_B: Tensor,
    ) -> Settled:
        """Accept drafts from left to right until the first that fails; `valid_BD` marks real drafts (a prefix)."""
        if self.coupled:
            return self._settle_coupled(p_BDV, drafts_BD, valid_BD, slots_B, ranks_BD)
        assert q_BDV is not None, "rejection acceptance needs the draft's law"
        return self._settle_rejection(
            p_BDV, q_BDV, drafts_BD, valid_BD=valid_BD, slots_B=slots_B, ranks_BD=ranks_BD, when_B=when_B
        )

    def _settle_coupled(
        self, p_BDV: Tensor, drafts_BD: Tensor, valid_BD: Tensor, slots_B: Tensor, ranks_BD: Tensor
    ) -> Settled:
        slots_BD = slots_B.unsqueeze(1).expand_as(drafts_BD)
        tokens_BD = torch.zeros_like(drafts_BD)
        tokens_BD[valid_BD] = self.target(p_BDV[valid_BD], slots_BD[valid_BD], ranks_BD[valid_BD])
        num_accepted_B = _leading(valid_BD & (tokens_BD == drafts_BD))
        return Settled(num_accepted_B, _pick(tokens_BD, num_accepted_B))

    def _settle_rejection(
        self,
        p_BDV: Tensor,
        q_BDV: Tensor,
        drafts_BD: Tensor,
        *,
        valid_BD: Tensor,
        slots_B: Tensor,
        ranks_BD: Tensor,
        when_B: Tensor,
    ) -> Settled:
        slots_BD, when_BD = slots_B.unsqueeze(1).expand_as(drafts_BD), when_B.unsqueeze(1).expand_as(drafts_BD)
        drafts = drafts_BD.unsqueeze(-1)
        log_ratio = p_BDV.gather(-1, drafts).to(torch.float64) - q_BDV.gather(-1, drafts).to(torch.float64)
        uniform = self._uniform(slots_BD.flatten(), ranks_BD.flatten(), noise.ACCEPT, when_BD.flatten())
        num_accepted_B = _leading(valid_BD & (uniform.view_as(drafts_BD) < log_ratio.squeeze(-1).exp()))
        # Only the first rejected row needs its residual.
        row_B = num_accepted_B.clamp(max=drafts_BD.shape[1] - 1)
        each_B = torch.arange(len(slots_B), device=slots_B.device)
        mass_BV = residual(p_BDV[each_B, row_B], q_BDV[each_B, row_B])
        uniform_B = self._uniform(slots_B, ranks_BD[each_B, row_B], noise.RESIDUAL, when_B)
        return Settled(num_accepted_B, inverse_cdf_draw(mass_BV, uniform_B))

    def _uniform(self, slots_R: Tensor, ranks_R: Tensor, purpose: int, when_R: Tensor) -> Tensor:
        positions_R = self._state.order_SW[slots_R, ranks_R]
        return noise.uniform_rows(self._state.key_S2[slots_R], positions_R, purpose, when_R)


def _leading(flags_BD: Tensor) -> Tensor:
    """Count the leading True of each row."""
    return flags_BD.to(torch.int64).cumprod(1).sum(1)


def _pick(tokens_BD: Tensor, index_B: Tensor) -> Tensor:
    return tokens_BD.gather(1, index_B.clamp(max=tokens_BD.shape[1] - 1).unsqueeze(1)).squeeze(1)
