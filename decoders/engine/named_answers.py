"""Answers rows that asks name one by one: draws tokens, judges drafts, and notes what the decoder wants to know of each row.

All rows of a forward are read at once, whatever their kind; one record goes to the host. At temperature 0 distributions are the
model's own in float64, so that confidences and ratios mean something; tokens are then their maxima.

By ratio (the rejection rule, or S2D2's public code at temperature 0) a draft holds with probability min(1, (p/q)^temper), and the
token after the first that does not is drawn from the positive part of p - q. q(draft) is the host's, which sends it back. The
rest of q is needed only where a chain breaks: it is computed again, from the hidden state that the draft's row left in a cell.

Sources: S2D2 (2026), Algorithm 3; Leviathan et al., 2023. Legend: R rows, J rows that judge, C chains, N some rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.draws import keys
from draftmill.decoders.draws.sampling import coupled_draw, inverse_cdf_draw, log_law, residual
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.answers import NoiseAnswers
from draftmill.decoders.engine.asks import NO_DRAFT, Noted
from draftmill.decoders.engine.kernel_notes import KernelNotes, can_tell
from draftmill.decoders.engine.lanes import Lane, Reading
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.named import Chains, NamedRows
from draftmill.decoders.engine.notes import entropy, plain_log_p, worth
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.rings import Ring, passing
from draftmill.decoders.engine.rolls import Draft
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.kernels.find import find_notes

_TOKEN, _LOG_P, _SURE = range(3)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a forward's rows say: `told_FR` (see `_read`), log p(token) of each, and logits and distributions, if they are held.

    They are held where those of all rows fit into memory at once.
    """

    hidden_RD: Tensor
    told_FR: Tensor
    weighed_R: Tensor
    held: tuple[Tensor, Tensor] | None


Read = Callable[[Sent, Tensor], tuple[Tensor, tuple[Tensor, Tensor] | None]]
"""(sent, hidden states of some rows) -> what is told of them, float64 [F, N], and their logits and distributions.

The kernel makes no distributions.
"""


class NamedAnswers(NoiseAnswers):
    """See the module's docstring; samples have no sampling settings of their own."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, account: Callable[[], Account]) -> None:
        super().__init__(setup, algorithm, account=account)
        self._sampling, self._notes = setup.sampling, algorithm.notes
        self._greedy = setup.sampling.temperature == 0.0
        # What routers and the public code use at temperature 0.
        self._warm = setup.sampling.model_copy(update={"temperature": 1.0})
        backbone, cells = setup.backbone, algorithm.notes.cells
        note = find_notes(backbone.device, backbone.dtype) if can_tell(setup.sampling, algorithm.notes) else None
        self._told: KernelNotes | None = None
        if note is not None:
            self._told = KernelNotes(note, setup.info, self._rows, self._places, algorithm.notes, backbone.device)
        self._states = (
            Ring(cells, backbone.width, backbone.dtype, backbone.device) if algorithm.notes.by_ratio else None
        )

    # ---- slots ---------------------------------------------------------------------------------------------------

    def use(self, num_slots: int) -> None:
        """See Answers."""
        states = None if self._states is None else self._states.resized(num_slots)
        super().use(num_slots)
        if self._states is not None and states is not None:
            self._states.data_CV = states

    @property
    def slot_bytes(self) -> int:
        """See Answers; twice, since both sizes exist while slots are added."""
        return 0 if self._states is None else 2 * self._states.slot_bytes

    # ---- distributions -------------------------------------------------------------------------------------------

    def law(self, logits_RV: Tensor) -> Tensor:
        """The log-probabilities for drawing tokens and for confidences; at temperature 0 the model's own, in float64."""
        if self._greedy:
            return torch.log_softmax(logits_RV.to(torch.float64), dim=-1)
        return log_law(logits_RV, self._sampling)

    def warm_law(self, logits_RV: Tensor, law_RV: Tensor) -> Tensor:
        """The distribution (at temperature 0 that of temperature 1) after top-k and top-p."""
        if not self._greedy or (self._sampling.top_k is None and self._sampling.top_p is None):
            return law_RV
        return log_law(logits_RV.to(torch.float64), self._warm)

    # ---- answers -------------------------------------------------------------------------------------------------

    def named(self, lane: Lane, asked: NamedRows, parcel: Parcel) -> Reading[Noted]:
        """See Answers. Where no row is asked about (prompts and commits), nothing waits for the device."""
        if not asked.num_rows:
            return Reading(None, lambda _: (Noted(0, [], [], [], [], []) for _ in asked.size_B))
        if self._told is not None and (size := self._captured_size(lane, asked.num_rows)) is not None:
            return self._by_kernel_at_once(lane, self._told, asked, size, parcel)
        reads = [(part, self._reading(lane, asked, part, parcel)) for part in self._parts(asked.num_rows)]
        if self._states is not None:
            return self._by_chains(lane, asked, reads, parcel)

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            return torch.cat([read(sent, hidden_RD[part])[0] for part, read in reads], 1)

        return Reading(work, lambda told_FR: self._matched(told_FR, asked))

    def _by_kernel_at_once(
        self, lane: Lane, told: KernelNotes, asked: NamedRows, size: int, parcel: Parcel
    ) -> Reading[Noted]:
        """All rows at once, and more, which mean nothing: a forward that can be captured."""
        tell = told.plan(asked.slot_R, asked.position_R, asked.number_R, parcel, size=size)

        def read(record: NDArray[np.float64]) -> Iterator[Noted]:
            return self._matched(record.reshape(-1, size)[:, : asked.num_rows], asked)

        form = ("named", self._rows.cuts(asked.slot_R))
        return Reading(lambda sent, hidden_RD: tell(sent, lane.logits(hidden_RD)), read, form=form, num_rows=size)

    def _matched(self, told_FR: NDArray[np.float64], asked: NamedRows) -> Iterator[Noted]:
        """Answers from what is told of the rows: a draft holds if the token is equal."""
        chains = asked.chains()
        good_J = (told_FR[_TOKEN].astype(np.int64) == asked.drafts_R)[chains.rows_J]
        return self._by_sample(told_FR, chains.accepted(good_J, len(asked.size_B)), asked.size_B)

    def _by_sample(self, told_FR: NDArray[np.float64], accepted_B: Ints, size_B: Ints) -> Iterator[Noted]:
        tokens, lists = told_FR[_TOKEN].astype(np.int64).tolist(), told_FR[1:].tolist()
        if not self._notes.entropy:
            lists.insert(_SURE, [])
        if self._notes.worth is None:
            lists.append([])
        first = 0
        for good, size in zip(accepted_B.tolist(), size_B.tolist(), strict=True):
            end = first + size
            yield Noted(good, tokens[first:end], *(one[first:end] for one in lists))
            first = end

    def _reading(self, lane: Lane, asked: NamedRows, part: slice, parcel: Parcel) -> Read:
        """What is told of some rows: token, log-probability, probability; then entropy and worth, if they are wanted.

        By ratio also log p(token), with which a row judges; a row that judges by ratio says its draft.
        """
        if self._told is not None:
            tell = self._told.plan(asked.slot_R[part], asked.position_R[part], asked.number_R[part], parcel)
            return lambda sent, hidden_ND: (tell(sent, lane.logits(hidden_ND)), None)
        tokens = self._tokens(asked, part, parcel)

        def read(sent: Sent, hidden_ND: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits_NV = self._logits(lane, hidden_ND)
            law_NV = self.law(logits_NV)
            token_N = tokens(sent, law_NV)
            sure_N = law_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1).to(torch.float64).exp()
            told = [token_N.to(torch.float64), plain_log_p(logits_NV, token_N), sure_N]
            if self._notes.entropy:
                told.append(entropy(law_NV))
            if self._notes.worth is not None or self._notes.by_ratio:
                warm_NV = self.warm_law(logits_NV, law_NV)
                if self._notes.worth is not None:
                    told.append(worth(*self._notes.worth, warm_NV, token_N))
                if self._notes.by_ratio:
                    told.append(warm_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1).to(torch.float64))
            return torch.stack(told), (logits_NV, law_NV)

        return read

    def _tokens(self, asked: NamedRows, part: slice, parcel: Parcel) -> Draft:
        """The token of each row: by ratio the draft that it judges, else one drawn by the sample's numbers, [N]."""
        if not self._notes.by_ratio:
            return self._sampled(asked, np.arange(asked.num_rows)[part], parcel)
        says = asked.is_judged[part] & (asked.drafts_R[part] != NO_DRAFT)
        draws = np.flatnonzero(~says)
        drafts = parcel.enclose(np.maximum(asked.drafts_R[part], 0))
        where, sampled = parcel.enclose(draws), self._sampled(asked, draws + part.start, parcel) if len(draws) else None

        def tokens(sent: Sent, law_NV: Tensor) -> Tensor:
            if sampled is None:
                return sent[drafts]
            return sent[drafts].index_copy(0, sent[where], sampled(sent, law_NV[sent[where]]))

        return tokens

    def _sampled(self, asked: NamedRows, rows_N: Ints, parcel: Parcel) -> Draft:
        if self._greedy:
            return lambda _, law_NV: law_NV.argmax(-1)
        if self._coupled:
            slot_N, position_N = asked.slot_R[rows_N], asked.position_R[rows_N]
            if self._notes.fresh:
                noise = passing(self._places, self._vocab_size, slot_N, position_N, asked.number_R[rows_N], parcel)
            else:
                noise = self._noise_ring().plan(slot_N, position_N, asked.first_R[rows_N], parcel)
            return lambda sent, law_NV: coupled_draw(law_NV, noise(sent))
        uniform_N = self.uniforms(asked, rows_N, keys.BONUS)
        drafts = asked.is_draft[rows_N]
        if drafts.any():
            uniform_N[drafts] = self.uniforms(asked, rows_N[drafts], keys.DRAFT)
        uniforms = parcel.enclose(uniform_N)
        return lambda sent, law_NV: inverse_cdf_draw(law_NV.exp(), sent[uniforms])

    def uniforms(self, asked: NamedRows, rows_N: Ints, purpose: int) -> NDArray[np.float64]:
        """One number in (0, 1) a row, new in every draw of a sample, [N]."""
        key_N2 = self._places.key_S2[asked.slot_R[rows_N]]
        return keys.uniform_rows(key_N2, asked.position_R[rows_N], purpose, asked.when_R[rows_N])

    # ---- the rejection rule --------------------------------------------------------------------------------------

    def _by_chains(
        self, lane: Lane, asked: NamedRows, reads: Sequence[tuple[slice, Read]], parcel: Parcel
    ) -> Reading[Noted]:
        """Judge the chains by ratio, then keep the hidden states of new drafts."""
        states, chains = self._states, asked.chains()
        assert states is not None, "states are kept for the rejection rule"
        settle = self._settling(lane, asked, chains, parcel) if len(chains.rows_J) else None
        rows = np.flatnonzero(asked.is_draft)
        drafts, cells = parcel.enclose(rows), parcel.enclose(states.cells(asked.slot_R[rows], asked.cell_R[rows]))

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            found = [read(sent, hidden_RD[part]) for part, read in reads]
            told_FR = torch.cat([told_FN for told_FN, _ in found], 1)
            record = told_FR[:-1].flatten()
            if settle is not None:
                seen = Seen(hidden_RD, told_FR[:-1], told_FR[-1], found[0][1] if len(found) == 1 else None)
                accepted_C = settle(sent, seen)
                record = torch.cat([seen.told_FR.flatten(), accepted_C.to(torch.float64)])
            states.data_CV[sent[cells]] = hidden_RD[sent[drafts]]
            return record

        def read(record: NDArray[np.float64]) -> Iterator[Noted]:
            accepted_B: Ints = np.zeros(len(asked.size_B), dtype=np.int64)
            count = len(record) - len(chains.owner_C)
            accepted_B[chains.owner_C] = record[count:].astype(np.int64)
            return self._by_sample(record[:count].reshape(-1, asked.num_rows), accepted_B, asked.size_B)

        return Reading(work, read)

    def _settling(self, lane: Lane, asked: NamedRows, chains: Chains, parcel: Parcel) -> Callable[[Sent, Seen], Tensor]:
        """How many drafts of each chain hold, [C]; writes the token that replaces the first that does not into `told_FR`."""
        assert self._states is not None, "drafts are judged by ratio"
        rows_J = chains.rows_J
        numbers = (
            rows_J,
            asked.drafts_R[rows_J] != NO_DRAFT,
            chains.steps(),
            chains.numbers(),
            chains.firsts(),
            chains.size_C,
        )
        names = [parcel.enclose(each) for each in numbers]
        cells = parcel.enclose(self._states.cells(asked.slot_R[rows_J], asked.cell_R[rows_J]))
        sures, accepting = (
            parcel.enclose(asked.sure_R[rows_J]),
            parcel.enclose(self.uniforms(asked, rows_J, keys.ACCEPT)),
        )
        recovering = parcel.enclose(self.uniforms(asked, rows_J, keys.RESIDUAL))

        def settle(sent: Sent, seen: Seen) -> Tensor:
            assert self._states is not None, "drafts are judged by ratio"
            row_J, is_draft_J, step_J, chain_J, first_C, size_C = (sent[name] for name in names)
            is_draft_J = is_draft_J.bool()
            good_J = self.accepts(seen.weighed_R[row_J], sent[sures], sent[accepting]) & is_draft_J
            accepted_C = size_C.scatter_reduce(0, chain_J, torch.where(good_J, size_C[chain_J], step_J), "amin")
            last_C = first_C + torch.minimum(accepted_C, size_C - 1)
            refused_C, row_C = (accepted_C < size_C) & is_draft_J[last_C], row_J[last_C]
            logits_CV, law_CV = self._reread(lane, seen, row_C)
            q_CV = self.law(self._logits(lane, self._states.data_CV[sent[cells][last_C]]))
            mass_CV = residual(self.warm_law(logits_CV, law_CV), q_CV)
            token_C = self.recovers(mass_CV, sent[recovering][last_C])
            told_CF = torch.stack([token_C.to(torch.float64), plain_log_p(logits_CV, token_C)])
            seen.told_FR[:_SURE, row_C] = torch.where(refused_C, told_CF, seen.told_FR[:_SURE, row_C])
            return accepted_C

        return settle

    def _reread(self, lane: Lane, seen: Seen, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and distributions of some rows again: the held ones, else computed once more, which gives the same bits."""
        if seen.held is not None:
            return seen.held[0][row_N], seen.held[1][row_N]
        logits_NV = self._logits(lane, seen.hidden_RD[row_N])
        return logits_NV, self.law(logits_NV)

    def accepts(self, log_p_J: Tensor, sure_J: Tensor, uniform_J: Tensor) -> Tensor:
        """Whether each draft holds by its own number if all before it do, bool [J].

        `log_p_J` are those of the drafts under p, `sure_J` their probabilities under q.
        """
        return uniform_J < (self._notes.temper * (log_p_J - sure_J.log())).exp()

    def recovers(self, mass_CV: Tensor, uniform_C: Tensor) -> Tensor:
        """Draw the tokens that replace refused drafts, in proportion to mass, [C]."""
        return inverse_cdf_draw(mass_CV, uniform_C)
