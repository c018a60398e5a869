"""The rejection rule: a draft from q holds with probability min(1, p/q); after the first that does not, a token of the residual.

After the last draft that holds the bonus is drawn from p. Every draw has a random number of its own, addressed by (key, position,
purpose, number of decided tokens) and computed on the host. The distributions of drafts wait in a ring on the device until they
are judged. Drafts that are drawn and drafts that are judged share a forward and its record.

Sources: Leviathan et al., 2023; Chen et al., 2023; ASSD, Algorithm 1.

Legend: R answered rows, D rows that draft, J rows that judge, C samples that judge, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.draws import keys
from draftmill.decoders.draws.sampling import inverse_cdf_draw, residual
from draftmill.decoders.engine.asks import DRAFT, JUDGE, NO_DRAFT, SURE
from draftmill.decoders.engine.kernel_draws import KernelDraws
from draftmill.decoders.engine.lanes import Lane
from draftmill.decoders.engine.packing import Asked, Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.rings import Places, Ring
from draftmill.decoders.engine.row_laws import RowLaws

Work = Callable[[Sent, Tensor], Tensor]
"""(sent, hidden states or logits or distributions of rows) -> what is made of them."""
FromLaws = Callable[[Sent, Tensor, Tensor], Tensor]
"""(sent, logits, distributions of all rows) -> what is told of some of them."""
Told = tuple[Ints | None, Ints, NDArray[np.float64]]
"""(accepted drafts of each sample, [B]; tokens [R]; log-probabilities [R])."""


@dataclass(frozen=True, slots=True)
class Judging:
    """Rows that judge, [J] each, and their samples, [C]: what the host knows of them, on the device.

    `cell_J` are the places of the drafts' distributions; None where drafts had no alternative.
    """

    is_draft_J: Tensor
    draft_J: Tensor
    cell_J: Tensor | None
    accept_J: Tensor
    recovering_J: Tensor
    bonus_J: Tensor
    size_C: Tensor
    owner_J: Tensor


@dataclass(frozen=True, slots=True)
class Filling:
    """Fills rows that judge up to `num_rows`: further samples of these `sizes`, which judge nothing."""

    num_rows: int
    sizes: Ints

    @classmethod
    def of(cls, num_rows: int, num_samples: int, size: Callable[[int], int | None]) -> Filling | None:
        """The least that is allowed by `size`; None if that is too much. Each further sample has a row."""
        samples = size(num_samples + 1)
        rows = None if samples is None else size(num_rows + samples - num_samples)
        if samples is None or rows is None:
            return None
        sizes: Ints = np.ones(samples - num_samples, dtype=np.int64)
        sizes[-1] += rows - num_rows - len(sizes)
        return cls(rows, sizes)


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

    def plan_filled(
        self, lane: Lane, asked: Asked, size: int, parcel: Parcel
    ) -> tuple[Work, Callable[[NDArray[np.float64]], Told], Hashable] | None:
        """As `plan`, for `size` rows, of which the last ones mean nothing, so that the work can be captured; and its form.

        All distributions are made at once. None if there are too many rows.
        """
        is_draft_R, parts, samples = asked.kind_R == DRAFT, list[tuple[Ints, int, FromLaws]](), np.arange(0)
        drafting, judging = np.flatnonzero(is_draft_R), np.flatnonzero(~is_draft_R)
        own_2R = self._rows.own(asked.slot_R)
        own = None if own_2R is None else parcel.enclose(own_2R, size=size, fill=1)
        if len(drafting):
            parts.append((drafting, *self._filled_drafts(lane, asked, drafting, parcel)))
        if len(judging):
            judged, samples = asked.part(~is_draft_R)
            filling = Filling.of(len(judging), len(samples), lane.size)
            if filling is None:
                return None
            parts.append((judging, filling.num_rows, self._filled_judges(judged, judging, filling, parcel)))

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            logits_RV = self._logits(lane, hidden_RD)
            law_RV = self._rows.law(logits_RV, None if own is None else sent[own])
            return torch.cat([one(sent, logits_RV, law_RV) for _, _, one in parts])

        def read(record: NDArray[np.float64]) -> Told:
            accepted_B: Ints = np.zeros(len(asked.size_B), dtype=np.int64)
            token_R, log_p_R, first = np.zeros(asked.num_rows, dtype=np.int64), np.zeros(asked.num_rows), 0
            for which, count, _ in parts:
                token_R[which] = record[first : first + len(which)].astype(np.int64)
                log_p_R[which] = record[first + count : first + count + len(which)]
                first += 2 * count
            accepted_B[samples] = record[first : first + len(samples)].astype(np.int64)
            return accepted_B, token_R, log_p_R

        return work, read, ("ratio", own is None, len(drafting) > 0, len(judging) > 0)

    def _filled_drafts(self, lane: Lane, asked: Asked, which: Ints, parcel: Parcel) -> tuple[int, FromLaws]:
        """Keep the distributions of these rows and draw from them: how many it is filled up to, and float64 [2 D]."""
        laws, count = self._laws, lane.size(len(which))
        assert laws is not None and count is not None, "this decoder drafts, and has no more drafts than rows"
        arrays = (which, 0), (self._cells(asked, which), laws.trash), (self._uniform(asked, which, keys.DRAFT), 0)
        names = [parcel.enclose(one, size=count, fill=fill) for one, fill in arrays]
        note = lane.noting(asked, which, parcel, count)

        def work(sent: Sent, logits_RV: Tensor, law_RV: Tensor) -> Tensor:
            row_D, cell_D, uniform_D = (sent[name] for name in names)
            law_DV = law_RV[row_D]
            self._kept()[cell_D] = law_DV
            token_D = inverse_cdf_draw(law_DV.exp(), uniform_D)
            note(sent, token_D)
            log_p_D = torch.zeros_like(uniform_D)
            if lane.is_target:
                log_p_D = self._rows.log_p(logits_RV[row_D], law_DV, token_D)
            return torch.cat([token_D.to(torch.float64), log_p_D])

        return count, work

    def _filled_judges(self, judged: Asked, which: Ints, filling: Filling, parcel: Parcel) -> FromLaws:
        """Judge the drafts of these rows: see `_settled`."""
        told, rows = self._told(judged, parcel, filling), parcel.enclose(which, size=filling.num_rows)

        def work(sent: Sent, logits_RV: Tensor, law_RV: Tensor) -> Tensor:
            logits_JV, law_JV, judging = logits_RV[sent[rows]], law_RV[sent[rows]], told(sent)
            log_draft_J = law_JV.gather(1, judging.draft_J.unsqueeze(1)).squeeze(1).to(torch.float64)
            log_p_J = self._rows.log_p(logits_JV, law_JV, judging.draft_J)

            def again(row_C: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
                yield slice(None), logits_JV[row_C], law_JV[row_C]

            return self._settled(judging, log_draft_J - self._log_q(judging), log_p_J, again)

        return work

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

    def _cells(self, asked: Asked, index_N: slice | Ints) -> Ints:
        assert self._laws is not None, "no distributions are kept"
        assert (asked.rank_R - asked.when_R <= self._window).all(), "a rank beyond the window"
        return self._laws.cells(asked.slot_R[index_N], asked.rank_R[index_N])

    def _uniform(self, asked: Asked, index_N: slice | Ints, purpose: int) -> NDArray[np.float64]:
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
        told = self._told(asked, parcel)
        weigh = [(part, self._weighing(lane, asked.slot_R[part], parcel)) for part in self._parts(asked.num_rows)]
        slot_C = asked.slot_R[asked.size_B.cumsum() - asked.size_B]
        owns_C = [(part, self._own(slot_C[part], parcel)) for part in self._parts(len(slot_C))]

        def work(sent: Sent, hidden_JD: Tensor) -> Tensor:
            judging = told(sent)
            draft_J, log_q_J = judging.draft_J, self._log_q(judging)
            weighed = [one(sent, hidden_JD[part], draft_J[part], log_q_J[part]) for part, one in weigh]
            held = weighed[0][2:] if len(weighed) == 1 else None
            log_ratio_J, log_p_J = (torch.cat([one[field] for one in weighed]) for field in (0, 1))

            def again(row_C: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
                for part, own in owns_C:
                    yield part, *self._again(lane, hidden_JD, row_C[part], None if own is None else sent[own], held)

            return self._settled(judging, log_ratio_J, log_p_J, again)

        return work

    def _told(self, asked: Asked, parcel: Parcel, fill: Filling | None = None) -> Callable[[Sent], Judging]:
        """Enclose what the host knows of the rows that judge, with rows and samples that fill them up."""
        sure, everything = bool((asked.kind_R == SURE).any()), slice(None)
        assert not (sure and (asked.kind_R == JUDGE).any()), "a decoder judges drawn drafts or certain ones, not both"
        rows = None if fill is None else fill.num_rows
        is_draft = parcel.enclose(asked.drafts_R != NO_DRAFT, size=rows)
        drafts = parcel.enclose(np.maximum(asked.drafts_R, 0), size=rows)
        cells = None
        if not sure:
            assert self._laws is not None, "no distributions are kept"
            cells = parcel.enclose(self._cells(asked, everything), size=rows, fill=self._laws.trash)
        purposes = keys.ACCEPT, keys.RESIDUAL, keys.BONUS
        uniforms = [parcel.enclose(self._uniform(asked, everything, purpose), size=rows) for purpose in purposes]
        size_C = asked.size_B if fill is None else np.append(asked.size_B, fill.sizes)
        sizes, owners = parcel.enclose(size_C), parcel.enclose(np.repeat(np.arange(len(size_C)), size_C))

        def told(sent: Sent) -> Judging:
            accept_J, recovering_J, bonus_J = (sent[name] for name in uniforms)
            return Judging(
                is_draft_J=sent[is_draft].bool(),
                draft_J=sent[drafts],
                cell_J=None if cells is None else sent[cells],
                accept_J=accept_J,
                recovering_J=recovering_J,
                bonus_J=bonus_J,
                size_C=sent[sizes],
                owner_J=sent[owners],
            )

        return told

    def _log_q(self, judging: Judging) -> Tensor:
        """What the kept distributions gave the drafts, float64 [J]; it means nothing where a row judges no draft."""
        log_q_J = torch.zeros_like(judging.draft_J, dtype=torch.float64)
        if judging.cell_J is None:
            return log_q_J
        kept_J = self._kept()[judging.cell_J, judging.draft_J].to(torch.float64)
        return torch.where(judging.is_draft_J, kept_J, log_q_J)

    def _settled(
        self,
        judging: Judging,
        log_ratio_J: Tensor,
        log_p_J: Tensor,
        again: Callable[[Tensor], Iterator[tuple[slice, Tensor, Tensor]]],
    ) -> Tensor:
        """Tokens, log-probabilities and accepted drafts, float64 [2 J + C].

        `again` gives the logits and distributions of some of the rows that judge, part by part.
        """
        is_draft_J, draft_J, size_C, owner_J = judging.is_draft_J, judging.draft_J, judging.size_C, judging.owner_J
        good_J = is_draft_J & (judging.accept_J < log_ratio_J.exp())
        first_C = size_C.cumsum(0) - size_C
        step_J = torch.arange(len(good_J), device=good_J.device) - first_C[owner_J]
        accepted_C = size_C.scatter_reduce(0, owner_J, torch.where(good_J, size_C[owner_J], step_J), "amin")
        # Where every draft of a sample holds and no row is left, the token drawn means nothing.
        last_C = first_C + torch.minimum(accepted_C, size_C - 1)
        refused_C, draft_C = is_draft_J[last_C], draft_J[last_C]
        uniform_C = torch.where(refused_C, judging.recovering_J[last_C], judging.bonus_J[last_C])
        ends = []
        for part, logits_NV, p_NV in again(last_C):
            if judging.cell_J is None:
                q_NV = torch.full_like(p_NV, -torch.inf).scatter_(1, draft_C[part].unsqueeze(1), 0.0)
            else:
                q_NV = self._kept()[judging.cell_J[last_C[part]]]
            mass_NV = torch.where(refused_C[part].unsqueeze(1), residual(p_NV, q_NV), p_NV.exp())
            token_N = inverse_cdf_draw(mass_NV, uniform_C[part])
            ends.append(torch.stack([token_N.to(torch.float64), self._rows.log_p(logits_NV, p_NV, token_N)]))
        token_C, log_p_C = torch.cat(ends, 1)
        token_J = draft_J.to(torch.float64)
        over_C = accepted_C < size_C
        token_J[last_C] = torch.where(over_C, token_C, token_J[last_C])
        log_p_J[last_C] = torch.where(over_C, log_p_C, log_p_J[last_C])
        return torch.cat([token_J, log_p_J, accepted_C.to(torch.float64)])

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
