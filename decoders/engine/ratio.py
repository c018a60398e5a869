"""The rejection rule: a draft from q holds with probability min(1, p/q); after the first that does not, a token of the residual.

After the last draft that holds the bonus is drawn from p. Every draw has a random number of its own, addressed by (key, position,
purpose, number of decided tokens) and computed on the host. The distributions of drafts wait in a ring on the device until they
are judged. Drafts that are drawn and drafts that are judged share a forward and its record.

Sources: Leviathan et al., 2023; Chen et al., 2023; ASSD, Algorithm 1.

Legend: R answered rows, D rows that draft, J rows that judge, C samples that judge, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.draws import keys
from decoders.draws.sampling import inverse_cdf_draw, residual
from decoders.engine.asks import DRAFT, NO_DRAFT, SURE
from decoders.engine.kernel_draws import KernelDraws
from decoders.engine.lanes import Lane
from decoders.engine.packing import Asked, Ints
from decoders.engine.parcels import Parcel, Sent
from decoders.engine.rings import Places, Ring
from decoders.engine.row_laws import RowLaws

Work = Callable[[Sent, Tensor], Tensor]
"""(sent, hidden states or logits or distributions of rows) -> what is made of them."""
Told = tuple[Ints | None, Ints, NDArray[np.float64]]
"""(accepted drafts of each sample, [B]; tokens [R]; log-probabilities [R])."""


class Ratio:
    """Draws and judges by the samples' uniform numbers. `logits` and `parts` are those of NoiseAnswers."""

    def __init__(
        self,
        rows: RowLaws,
        places: Places,
        laws: Ring | None,
        kernel: KernelDraws | None,
        *,
        window: int,
        logits: Callable[[Lane, Tensor], Tensor],
        parts: Callable[[int], Iterator[slice]],
    ) -> None:
        self._rows, self._places, self._laws, self._kernel = rows, places, laws, kernel
        self._window, self._logits, self._parts = window, logits, parts

    def plan(self, lane: Lane, asked: Asked, parcel: Parcel) -> tuple[Work, Callable[[NDArray[np.float64]], Told]]:
        """Draw the drafts and judge the others, in one record; a sample has rows of one sort only."""
        is_draft_R, groups, samples = asked.kind_R == DRAFT, list[tuple[Ints, str | None, Work]](), np.arange(0)
        for is_judged in (False, True):
            chosen_R = ~is_draft_R if is_judged else is_draft_R
            if not chosen_R.any():
                continue
            # The part leaves out samples without rows, whose windows a head drafts from this forward.
            which, (part, owners) = np.flatnonzero(chosen_R), asked.part(chosen_R)
            places = None if chosen_R.all() else parcel.enclose(which)
            groups.append((which, places, (self._judged if is_judged else self._drafted)(lane, part, parcel)))
            samples = owners if is_judged else samples

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            found = [one(sent, hidden_RD if places is None else hidden_RD[sent[places]]) for _, places, one in groups]
            return torch.cat([record.flatten() for record in found])

        def read(told: NDArray[np.float64]) -> Told:
            accepted_B: Ints = np.zeros(len(asked.size_B), dtype=np.int64)
            token_R, log_p_R, first = np.zeros(asked.num_rows, dtype=np.int64), np.zeros(asked.num_rows), 0
            for which, _, _ in groups:
                token_R[which] = told[first : first + len(which)].astype(np.int64)
                log_p_R[which] = told[first + len(which) : first + 2 * len(which)]
                first += 2 * len(which)
            accepted_B[samples] = told[first:].astype(np.int64)
            return accepted_B, token_R, log_p_R

        return work, read

    # ---- drafts ----------------------------------------------------------------------------------------------------

    def _drafted(self, lane: Lane, asked: Asked, parcel: Parcel) -> Work:
        """Draw drafts from q and keep it: tokens and log-probabilities, float64 [2, R]."""
        plans = [
            (
                part,
                self._own(asked.slot_R[part], parcel),
                self.keep_and_draw(asked, part, parcel),
                lane.noting(asked, part, parcel),
            )
            for part in self._parts(asked.num_rows)
        ]

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            found = []
            for part, own, draw, note in plans:
                logits_RV = self._logits(lane, hidden_RD[part])
                law_RV = self._rows.law(logits_RV, None if own is None else sent[own])
                token_R = draw(sent, law_RV)
                note(sent, token_R)
                log_p_R = torch.zeros_like(token_R, dtype=torch.float64)
                if lane.is_target:
                    log_p_R = self._rows.log_p(logits_RV, law_RV, token_R)
                found.append(torch.stack([token_R.to(torch.float64), log_p_R]))
            return torch.cat(found, 1)

        return work

    def keep_and_draw(self, asked: Asked, part: slice, parcel: Parcel) -> Work:
        """Keep the distributions of some rows, and draw a draft from each, [R]."""
        laws, cells = self._laws, parcel.enclose(self._cells(asked, part))
        assert laws is not None, "this decoder does not draft"
        uniforms = parcel.enclose(self._uniform(asked, part, keys.DRAFT))

        def work(sent: Sent, law_RV: Tensor) -> Tensor:
            laws.data_CV[sent[cells]] = law_RV
            return inverse_cdf_draw(law_RV.exp(), sent[uniforms])

        return work

    def draw_on_host(self, asked: Asked, token_RT: Tensor, law_RT: Tensor, device: torch.device) -> Tensor:
        """Draw one of some tokens of each row, by its place, int64 [R]; the distribution is sent to where drafts are judged."""
        laws, parcel = self._laws, Parcel()
        assert laws is not None, "this decoder does not draft"
        cells = parcel.enclose(self._cells(asked, slice(None)))
        tokens, law = parcel.enclose(token_RT.numpy()), parcel.enclose(law_RT.to(torch.float64).numpy())
        sent = parcel.send(device)
        # Places that fill a row up hold no mass: where two name one token, the greater counts.
        kept_RV = laws.data_CV.new_full((len(token_RT), laws.data_CV.shape[1]), -torch.inf)
        kept_RV.scatter_reduce_(1, sent[tokens], sent[law].to(kept_RV.dtype), "amax")
        laws.data_CV[sent[cells]] = kept_RV
        return inverse_cdf_draw(law_RT.exp(), torch.from_numpy(self._uniform(asked, slice(None), keys.DRAFT)))

    def _cells(self, asked: Asked, index_N: slice) -> Ints:
        assert self._laws is not None, "no distributions are kept"
        assert (asked.rank_R - asked.when_R <= self._window).all(), "a rank beyond the window"
        return self._laws.cells(asked.slot_R[index_N], asked.rank_R[index_N])

    def _uniform(self, asked: Asked, index_N: slice, purpose: int) -> NDArray[np.float64]:
        """One uniform a row, [N]."""
        slot_N, rank_N, when_N = asked.slot_R[index_N], asked.rank_R[index_N], asked.when_R[index_N]
        return keys.uniform_rows(self._places.key_S2[slot_N], self._places.positions(slot_N, rank_N), purpose, when_N)

    def _own(self, slot_R: Ints, parcel: Parcel) -> str | None:
        own_2R = self._rows.own(slot_R)
        return None if own_2R is None else parcel.enclose(own_2R)

    # ---- judging ---------------------------------------------------------------------------------------------------

    def _judged(self, lane: Lane, asked: Asked, parcel: Parcel) -> Work:
        """Judge the drafts of each sample; where one is refused, or none is left, draw the token that comes there.

        Tokens, log-probabilities and accepted drafts, float64 [2 R + C].
        """
        everything, sure = slice(None), bool((asked.kind_R == SURE).any())
        is_draft, drafts = parcel.enclose(asked.drafts_R != NO_DRAFT), parcel.enclose(np.maximum(asked.drafts_R, 0))
        cells = None if sure else parcel.enclose(self._cells(asked, everything))
        purposes = keys.ACCEPT, keys.RESIDUAL, keys.BONUS
        uniforms = [parcel.enclose(self._uniform(asked, everything, purpose)) for purpose in purposes]
        sizes, owners = parcel.enclose(asked.size_B), parcel.enclose(asked.owner_R)
        weigh = [(part, self._weighing(lane, asked.slot_R[part], parcel)) for part in self._parts(asked.num_rows)]
        slot_C = asked.slot_R[asked.size_B.cumsum() - asked.size_B]
        owns_C = [(part, self._own(slot_C[part], parcel)) for part in self._parts(len(slot_C))]

        def work(sent: Sent, hidden_JD: Tensor) -> Tensor:
            is_draft_J, draft_J = sent[is_draft].bool(), sent[drafts]
            log_q_J = torch.zeros_like(draft_J, dtype=torch.float64)
            if cells is not None:
                # What the kept distributions gave these tokens; it means nothing where a row judges no draft.
                log_q_J = torch.where(is_draft_J, self._kept()[sent[cells], draft_J].to(torch.float64), log_q_J)
            weighed = [one(sent, hidden_JD[part], draft_J[part], log_q_J[part]) for part, one in weigh]
            held = weighed[0][2:] if len(weighed) == 1 else None
            log_ratio_J, log_p_J = (torch.cat([one[field] for one in weighed]) for field in (0, 1))
            accept_J, recovering_J, bonus_J = (sent[name] for name in uniforms)
            good_J = is_draft_J & (accept_J < log_ratio_J.exp())
            size_C, owner_J = sent[sizes], sent[owners]
            first_C = size_C.cumsum(0) - size_C
            step_J = torch.arange(len(good_J), device=good_J.device) - first_C[owner_J]
            accepted_C = size_C.scatter_reduce(0, owner_J, torch.where(good_J, size_C[owner_J], step_J), "amin")
            # Where every draft of a sample holds and no row is left, the token drawn means nothing.
            last_C = first_C + torch.minimum(accepted_C, size_C - 1)
            refused_C, draft_C = is_draft_J[last_C], draft_J[last_C]
            uniform_C = torch.where(refused_C, recovering_J[last_C], bonus_J[last_C])
            ends = []
            for part, own in owns_C:
                own_2N = None if own is None else sent[own]
                logits_NV, p_NV = self._again(lane, hidden_JD, last_C[part], own_2N, held)
                if cells is None:
                    q_NV = torch.full_like(p_NV, -torch.inf).scatter_(1, draft_C[part].unsqueeze(1), 0.0)
                else:
                    q_NV = self._kept()[sent[cells][last_C[part]]]
                mass_NV = torch.where(refused_C[part].unsqueeze(1), residual(p_NV, q_NV), p_NV.exp())
                token_N = inverse_cdf_draw(mass_NV, uniform_C[part])
                ends.append(torch.stack([token_N.to(torch.float64), self._rows.log_p(logits_NV, p_NV, token_N)]))
            token_C, log_p_C = torch.cat(ends, 1)
            token_J = draft_J.to(torch.float64)
            over_C = accepted_C < size_C
            token_J[last_C] = torch.where(over_C, token_C, token_J[last_C])
            log_p_J[last_C] = torch.where(over_C, log_p_C, log_p_J[last_C])
            return torch.cat([token_J, log_p_J, accepted_C.to(torch.float64)])

        return work

    def _kept(self) -> Tensor:
        assert self._laws is not None, "no distributions are kept"
        return self._laws.data_CV

    def _weighing(self, lane: Lane, slot_R: Ints, parcel: Parcel) -> Callable[..., tuple[Tensor, ...]]:
        """log p - log q of the drafts, log p under the model itself, logits and distributions, which the kernel does not need."""
        if self._kernel is not None:
            weigh = self._kernel.weighing(slot_R, parcel)

            def by_kernel(sent: Sent, hidden_RD: Tensor, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, ...]:
                logits_RV = self._logits(lane, hidden_RD)
                return *weigh(sent, logits_RV, draft_R, log_q_R), logits_RV

            return by_kernel
        own = self._own(slot_R, parcel)

        def by_law(sent: Sent, hidden_RD: Tensor, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, ...]:
            logits_RV = self._logits(lane, hidden_RD)
            law_RV = self._rows.law(logits_RV, None if own is None else sent[own])
            log_p_R = law_RV.gather(-1, draft_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)
            return log_p_R - log_q_R, self._rows.log_p(logits_RV, law_RV, draft_R), logits_RV, law_RV

        return by_law

    def _again(
        self, lane: Lane, hidden_JD: Tensor, row_N: Tensor, own_2N: Tensor | None, held: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor]:
        """Logits and distributions of some rows again: those held, else computed once more, which gives the same bits."""
        logits_NV = self._logits(lane, hidden_JD[row_N]) if held is None else held[0][row_N]
        if held is not None and len(held) > 1:
            return logits_NV, held[1][row_N]
        return logits_NV, self._rows.law(logits_NV, own_2N)
