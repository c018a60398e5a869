"""Answers rows that asks name one by one: draws tokens, judges drafts, and notes what the decoder wants to know of each row.

All rows of a forward are read at once, whatever their kind; one record goes to the host. At temperature 0 distributions are the
model's own in float64, so that confidences and ratios mean something; tokens are then their maxima.

By ratio (the rejection rule, or S2D2's public code at temperature 0) a draft holds with probability min(1, (p/q)^temper), and the
token after the first that does not is drawn from the positive part of p - q. q(draft) is the host's, which sends it back. The
rest of q is needed only where a chain breaks: it is computed again, from the hidden state that the draft's row left in a cell.

Sources: S2D2 (2026), Algorithm 3; Leviathan et al., 2023. Legend: R rows, J rows that judge, C chains, N some rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.draws import keys
from decoders.draws.sampling import coupled_draw, inverse_cdf_draw, log_law, residual
from decoders.engine.algorithm import Algorithm
from decoders.engine.answers import NoiseAnswers
from decoders.engine.asks import NO_DRAFT, Noted
from decoders.engine.lanes import Lane
from decoders.engine.memory import Account
from decoders.engine.named import Chains, NamedRows
from decoders.engine.notes import entropy, plain_log_p, worth
from decoders.engine.packing import Ints
from decoders.engine.rings import Ring
from decoders.engine.setup import Setup

_TOKEN, _LOG_P, _SURE = range(3)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the rows of a forward say: `told_FR` (see `_read`), by ratio also log p(token), and what it was read from.

    `held` are logits and distributions of all rows, where they fit into memory at once.
    """

    lane: Lane
    hidden_RD: Tensor
    asked: NamedRows
    chains: Chains
    told_FR: Tensor
    weighed_R: Tensor | None
    held: tuple[Tensor, Tensor] | None


class NamedAnswers(NoiseAnswers):
    """See the module's docstring; samples have no sampling settings of their own."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, account: Callable[[], Account]) -> None:
        super().__init__(setup, algorithm, account=account)
        self._sampling, self._notes = setup.sampling, algorithm.notes
        self._greedy = setup.sampling.temperature == 0.0
        # What routers and the public code use at temperature 0.
        self._warm = setup.sampling.model_copy(update={"temperature": 1.0})
        backbone, cells = setup.backbone, algorithm.notes.cells
        self._states = (
            Ring(cells, backbone.width, backbone.dtype, backbone.device) if algorithm.notes.by_ratio else None
        )

    # ---- slots ---------------------------------------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        """See Answers."""
        super().move(source, target)
        if self._states is not None:
            self._states.move(source, target)

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

    def named(self, lane: Lane, hidden_RD: Tensor, asked: NamedRows) -> Iterator[Noted]:
        """See Answers. Where no row is asked about (prompts and commits), nothing waits for the device."""
        if not asked.num_rows:
            return (Noted(0, [], [], [], [], []) for _ in asked.size_B)
        reading = self._reading(lane, hidden_RD, asked)
        chains, told_FR = reading.chains, reading.told_FR
        if reading.weighed_R is None:
            told = lane.record(told_FR)
            good_J = (told[_TOKEN].astype(np.int64) == asked.drafts_R)[chains.rows_J]
            return self._by_sample(told, chains.accepted(good_J, len(asked.size_B)), asked.size_B)
        accepted_C = self._weigh_chains(reading)
        record = lane.record(torch.cat([told_FR.flatten(), accepted_C.to(torch.float64)]))
        told = record[: told_FR.numel()].reshape(told_FR.shape)
        accepted_B: Ints = np.zeros(len(asked.size_B), dtype=np.int64)
        accepted_B[chains.owner_C] = record[told_FR.numel() :].astype(np.int64)
        return self._by_sample(told, accepted_B, asked.size_B)

    def _reading(self, lane: Lane, hidden_RD: Tensor, asked: NamedRows) -> Reading:
        parts = list(self._parts(asked.num_rows))
        read = [self._read(lane, hidden_RD[part], asked, part) for part in parts]
        told_FR, weighed_R = torch.cat([told_FN for told_FN, _ in read], 1), None
        if self._states is not None:
            told_FR, weighed_R = told_FR[:-1], told_FR[-1]
        held = read[0][1] if len(parts) == 1 else None
        return Reading(lane, hidden_RD, asked, asked.chains(), told_FR, weighed_R, held)

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

    def _read(
        self, lane: Lane, hidden_ND: Tensor, asked: NamedRows, part: slice
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What is told of some rows, float64 [F, N], and their logits and distributions.

        Token, log-probability, probability; then entropy and worth, if they are wanted; by ratio log p(token), with which a row
        judges. A row that judges by ratio says its draft.
        """
        logits_NV = self._logits(lane, hidden_ND)
        law_NV = self.law(logits_NV)
        token_N = self._tokens(law_NV, asked, part)
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

    def _tokens(self, law_NV: Tensor, asked: NamedRows, part: slice) -> Tensor:
        """The token of each row: by ratio the draft that it judges, else one drawn by the sample's numbers, [N]."""
        if not self._notes.by_ratio:
            return self._sampled(law_NV, asked, np.arange(asked.num_rows)[part])
        says = asked.is_judged[part] & (asked.drafts_R[part] != NO_DRAFT)
        draws = np.flatnonzero(~says)
        token_N = self._put(np.maximum(asked.drafts_R[part], 0))
        if len(draws):
            where = self._put(draws)
            token_N[where] = self._sampled(law_NV[where], asked, draws + part.start)
        return token_N

    def _sampled(self, law_NV: Tensor, asked: NamedRows, rows_N: Ints) -> Tensor:
        if self._greedy:
            return law_NV.argmax(-1)
        if self._coupled:
            ring = self._noise_ring()
            slot_N, position_N = asked.slot_R[rows_N], asked.position_R[rows_N]
            return coupled_draw(law_NV, ring.rows(slot_N, position_N, asked.first_R[rows_N]))
        uniform_N = self.uniforms(asked, rows_N, keys.BONUS)
        drafts = asked.is_draft[rows_N]
        if drafts.any():
            uniform_N[drafts] = self.uniforms(asked, rows_N[drafts], keys.DRAFT)
        return inverse_cdf_draw(law_NV.exp(), self._put(uniform_N))

    def uniforms(self, asked: NamedRows, rows_N: Ints, purpose: int) -> NDArray[np.float64]:
        """One number in (0, 1) a row, new in every draw of a sample, [N]."""
        key_N2 = self._places.key_S2[asked.slot_R[rows_N]]
        return keys.uniform_rows(key_N2, asked.position_R[rows_N], purpose, asked.when_R[rows_N])

    def _put(self, numbers: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
        held = torch.from_numpy(numbers)
        return held if self._device.type == "cpu" else held.pin_memory().to(self._device, non_blocking=True)

    # ---- the rejection rule --------------------------------------------------------------------------------------

    def _weigh_chains(self, reading: Reading) -> Tensor:
        """Judge the chains by ratio, then keep the hidden states of new drafts; accepted drafts, int64 [C]."""
        assert self._states is not None, "states are kept for the rejection rule"
        asked, accepted_C = reading.asked, self._put(np.arange(0))
        if len(reading.chains.rows_J):
            accepted_C = self._settled(reading)
        rows = np.flatnonzero(asked.is_draft)
        cells = self._states.cells(asked.slot_R[rows], asked.cell_R[rows])
        self._states.data_CV[self._put(cells)] = reading.hidden_RD[self._put(rows)]
        return accepted_C

    def _settled(self, reading: Reading) -> Tensor:
        """How many drafts of each chain hold, [C]; writes the token that replaces the first that does not into `told_FR`."""
        assert self._states is not None and reading.weighed_R is not None, "drafts are judged by ratio"
        asked, chains, told_FR = reading.asked, reading.chains, reading.told_FR
        rows_J = self._put(chains.rows_J)
        is_draft_J = self._put(asked.drafts_R[chains.rows_J] != NO_DRAFT)
        step_J, chain_J = self._put(chains.steps()), self._put(chains.numbers())
        first_C, size_C = self._put(chains.firsts()), self._put(chains.size_C)
        good_J = self.accepts(reading.weighed_R[rows_J], asked, chains.rows_J) & is_draft_J
        accepted_C = size_C.scatter_reduce(0, chain_J, torch.where(good_J, size_C[chain_J], step_J), "amin")
        last_C = first_C + torch.minimum(accepted_C, size_C - 1)
        refused_C, row_C = (accepted_C < size_C) & is_draft_J[last_C], rows_J[last_C]
        logits_CV, law_CV = self._reread(reading, row_C)
        cells_J = self._put(self._states.cells(asked.slot_R[chains.rows_J], asked.cell_R[chains.rows_J]))
        q_CV = self.law(self._logits(reading.lane, self._states.data_CV[cells_J[last_C]]))
        mass_CV = residual(self.warm_law(logits_CV, law_CV), q_CV)
        token_C = self.recovers(mass_CV, last_C, asked, chains.rows_J)
        told_CF = torch.stack([token_C.to(torch.float64), plain_log_p(logits_CV, token_C)])
        told_FR[:_SURE, row_C] = torch.where(refused_C, told_CF, told_FR[:_SURE, row_C])
        return accepted_C

    def _reread(self, reading: Reading, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and distributions of some rows again: the held ones, else computed once more, which gives the same bits."""
        if reading.held is not None:
            return reading.held[0][row_N], reading.held[1][row_N]
        logits_NV = self._logits(reading.lane, reading.hidden_RD[row_N])
        return logits_NV, self.law(logits_NV)

    def accepts(self, log_p_J: Tensor, asked: NamedRows, rows_J: Ints) -> Tensor:
        """Whether each draft holds by its own number if all before it do, bool [J]; `log_p_J` are those of the drafts under p."""
        ratio_J = (self._notes.temper * (log_p_J - self._put(asked.sure_R[rows_J]).log())).exp()
        return self._put(self.uniforms(asked, rows_J, keys.ACCEPT)) < ratio_J

    def recovers(self, mass_CV: Tensor, last_C: Tensor, asked: NamedRows, rows_J: Ints) -> Tensor:
        """Draw the tokens that replace refused drafts, in proportion to mass, [C]; `last_C` says at which of `rows_J`."""
        return inverse_cdf_draw(mass_CV, self._put(self.uniforms(asked, rows_J, keys.RESIDUAL))[last_C])
