"""From the hidden states of answered rows to answers: draws tokens by each sample's noise, and judges drafts.

Two acceptance rules, of which decoders know nothing. Coupled: drafts and target read the same noise, each token is the target's
own, and a draft holds if it equals it. Rejection: a draft drawn from q holds with probability min(1, p/q); after the first that
does not, a token is drawn from the residual, and after the last one the bonus from p. Every draw has a random number of its own,
addressed by (key, position, purpose, number of decided tokens).

    rows of a sample     JUDGE a   JUDGE b   JUDGE c   JUDGE -           three drafts, and the row after them
    coupled              x         y         z         w                 all are drawn; a = x and b = y hold: (2, [x, y, z, w])
    rejection            holds     holds     residual                    (2, [a, b, r, ...])

One transfer to the host an answer. Sources: Leviathan et al., 2023; Chen et al., 2023; ASSD, Algorithm 1.

Legend: R answered rows, D rows that draft, J rows that judge, C samples that judge, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.backbones.heads import DraftHeads
from decoders.draws import keys
from decoders.draws.sampling import inverse_cdf_draw, residual
from decoders.engine.algorithm import Algorithm
from decoders.engine.asks import DRAFT, GIVEN, LOOSE, NO_DRAFT, SURE, TARGET, Answer, Noted, Weights
from decoders.engine.kernel_draws import KernelDraws
from decoders.engine.lanes import Lane
from decoders.engine.memory import Account
from decoders.engine.named import NamedRows
from decoders.engine.packing import Asked, Ints, count_leading
from decoders.engine.rings import NoiseRing, Places, Ring
from decoders.engine.rolls import Rolling
from decoders.engine.row_laws import RowLaws
from decoders.engine.samples import Sample
from decoders.engine.setup import Setup
from decoders.engine.transfers import put
from decoders.kernels.find import find_choice

Told = tuple[Ints | None, Ints, NDArray[np.float64]]
"""(accepted drafts of each sample, [B], or None if none were judged; tokens [R]; log-probabilities [R])."""


class Answers(Protocol):
    """Answers asks; the engine's part that enumerations replace."""

    def start(self, sample: Sample) -> None:
        """Begin with a new sample, in its slot."""
        ...

    def move(self, source: int, target: int) -> None:
        """A sample moves from one slot to another."""
        ...

    def release(self, slot: int) -> None:
        """A slot has become free."""
        ...

    def use(self, num_slots: int) -> None:
        """Make room for this many slots; if memory runs out, nothing changes."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes that are kept for a slot, apart from noise."""
        ...

    def answer(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Iterator[Answer]:
        """The answers of all samples that asked, in their order."""
        ...

    def roll(self, lane: Lane, heads: DraftHeads, rolling: Rolling) -> Iterator[Answer]:
        """The drafts of the windows that a head rolls over, in their order."""
        ...

    def weighed(self, lane: Lane, samples: Sequence[Sample], asks: Sequence[Weights]) -> Iterator[Answer]:
        """Drafts from distributions that decoders name."""
        ...

    def named(self, lane: Lane, hidden_RD: Tensor, asked: NamedRows) -> Iterator[Noted]:
        """The answers of all samples that named rows, in their order."""
        ...


def by_sample(told: Told, size_B: Ints) -> Iterator[Answer]:
    """Cut the rows' results into answers."""
    accepted_B, token_R, log_p_R = told
    tokens, log_ps, first = token_R.tolist(), log_p_R.tolist(), 0
    accepted: Sequence[int] = [0] * len(size_B) if accepted_B is None else accepted_B.tolist()
    for good, size in zip(accepted, size_B.tolist(), strict=True):
        end = first + size
        yield Answer(good, tokens[first:end], log_ps[first:end])
        first = end


class NoiseAnswers:
    """Answers by the samples' own noise, for all rows of a forward at once. `account` says what fits into memory."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, account: Callable[[], Account]) -> None:
        sampling, info, backbone = setup.sampling, setup.info, setup.backbone
        self._coupled, self._device = sampling.acceptance == "coupled", backbone.device
        self._vocab_size, self._account = info.vocab_size, account
        self._law_dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=backbone.device)
        self._rows, self._places = (
            RowLaws(sampling, setup.max_rows, backbone.device),
            Places(setup.max_rows),
        )
        choice = find_choice(backbone.device, backbone.dtype)
        self._kernel = KernelDraws(choice, info, self._rows, self._places, backbone.device) if choice else None
        self._window = algorithm.window
        # Made when a token is first drawn by it: at temperature 0 there is none.
        self._noise: NoiseRing | None = None
        self._num_used = 0
        # The distributions of drafts, until they are judged.
        drafts = algorithm.keeps_laws and not self._coupled
        self._laws = Ring(self._window, info.vocab_size, self._law_dtype, backbone.device) if drafts else None

    # ---- slots ---------------------------------------------------------------------------------------------------

    def start(self, sample: Sample) -> None:
        """See Answers."""
        self._rows.start(sample.slot, sample.request.settings)
        self._places.start(sample)
        if self._noise is not None:
            self._noise.start(sample)

    def _noise_ring(self) -> NoiseRing:
        if self._noise is None:
            made = NoiseRing(self._places, window=self._window, vocab_size=self._vocab_size, device=self._device)
            made.take(made.use(self._num_used, self._account().noise))
            self._noise = made
        return self._noise

    def move(self, source: int, target: int) -> None:
        """See Answers."""
        self._rows.move(source, target)
        self._places.move(source, target)
        if self._noise is not None:
            self._noise.move(source, target)
        if self._laws is not None:
            self._laws.move(source, target)

    def release(self, slot: int) -> None:
        """See Answers."""
        self._rows.release(slot)

    def use(self, num_slots: int) -> None:
        """See Answers."""
        noise = None if self._noise is None else self._noise.use(num_slots, self._account().noise)
        laws = None if self._laws is None else self._laws.resized(num_slots)
        self._num_used = num_slots
        if self._noise is not None and noise is not None:
            self._noise.take(noise)
        if self._laws is not None and laws is not None:
            self._laws.data_CV = laws

    @property
    def slot_bytes(self) -> int:
        """See Answers; twice, since both sizes exist while slots are added."""
        return 0 if self._laws is None else 2 * self._laws.slot_bytes

    # ---- answers -------------------------------------------------------------------------------------------------

    def answer(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Iterator[Answer]:
        """See Answers. Where no row is asked about, nothing is drawn: a `Roll` follows."""
        if not asked.num_rows:
            return (Answer(0, [], []) for _ in asked.size_B)
        judges = not self._coupled and not np.isin(asked.kind_R, (TARGET, LOOSE, GIVEN)).all()
        told = self._by_ratio(lane, hidden_RD, asked) if judges else self._by_noise(lane, hidden_RD, asked)
        return by_sample(told, asked.size_B)

    def _by_noise(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Told:
        parts = [self._drawn(lane, hidden_RD, asked, part) for part in self._parts(asked.num_rows)]
        token_R, log_p_R = lane.record(torch.cat(parts, 1))
        tokens = token_R.astype(np.int64)
        accepted_B = None
        if (asked.drafts_R != NO_DRAFT).any():
            accepted_B = count_leading(tokens == asked.drafts_R, asked.size_B)
        return accepted_B, tokens, log_p_R

    def _drawn(self, lane: Lane, hidden_RD: Tensor, asked: Asked, part: slice) -> Tensor:
        """Tokens and log-probabilities of some rows, float64 [2, R]; ids are far below what float64 can't hold."""
        if self._kernel is not None:
            given = (asked.kind_R[part] == GIVEN).any()
            token_R, log_p_R = self._kernel.draw(
                lane.logits(hidden_RD[part]),
                asked.slot_R[part],
                asked.rank_R[part],
                asked.drafts_R[part] if given else None,
            )
            return torch.stack([token_R.to(torch.float64), log_p_R])
        logits_RV, slot_R = self._logits(lane, hidden_RD[part]), asked.slot_R[part]
        law_RV = self._rows.law(logits_RV, slot_R)
        gumbel_RV = None
        if not self._rows.greedy:
            loose = (asked.kind_R[part] == LOOSE).all()
            gumbel_RV = self._noise_ring().rows(slot_R, asked.rank_R[part], None if loose else asked.when_R[part])
        token_R = self._rows.draw(law_RV, gumbel_RV, slot_R)
        scored_R = token_R
        if (asked.kind_R[part] == GIVEN).any():
            scored_R = lane.put(asked.drafts_R[part])
        return torch.stack([token_R.to(torch.float64), self._log_p(lane, logits_RV, law_RV, scored_R)])

    def _log_p(self, lane: Lane, logits_RV: Tensor, law_RV: Tensor, token_R: Tensor) -> Tensor:
        if not lane.is_target:
            return torch.zeros(len(token_R), dtype=torch.float64, device=self._device)
        return self._rows.log_p(logits_RV, law_RV, token_R)

    def _logits(self, lane: Lane, hidden_RD: Tensor) -> Tensor:
        """Logits in which ids that are never generated are impossible."""
        return self._suppress(lane.logits(hidden_RD))

    def _suppress(self, logits_RV: Tensor) -> Tensor:
        return logits_RV.index_fill_(-1, self._suppressed, -torch.inf) if len(self._suppressed) else logits_RV

    def _parts(self, num_rows: int) -> Iterator[slice]:
        return self._account().parts(num_rows, self._vocab_size * self._law_dtype.itemsize)

    def named(self, lane: Lane, hidden_RD: Tensor, asked: NamedRows) -> Iterator[Noted]:
        """See Answers, and named_answers.py."""
        raise AssertionError("this decoder names no rows")

    # ---- drafts that need no forward of their own ------------------------------------------------------------------

    def roll(self, lane: Lane, heads: DraftHeads, rolling: Rolling) -> Iterator[Answer]:
        """See Answers."""

        def draw(logits_RV: Tensor, slot_R: Ints, rank_R: Ints, when_R: Ints) -> Tensor:
            return self._draft(self._suppress(logits_RV), Asked.drafting(slot_R, rank_R, when_R))

        drafts = lane.record(rolling.drawn(lane, heads, draw).to(torch.float64)).astype(np.int64).tolist()
        return (Answer(0, own[:count], [0.0] * count) for own, count in zip(drafts, rolling.counts, strict=True))

    def weighed(self, lane: Lane, samples: Sequence[Sample], asks: Sequence[Weights]) -> Iterator[Answer]:
        """See Answers."""
        weights_BV = np.zeros((len(asks), self._vocab_size))
        for row_V, ask in zip(weights_BV, asks, strict=True):
            row_V[ask.tokens or slice(None)] = ask.weights or 1.0
        log_BV = put(weights_BV, self._device).log().to(self._law_dtype)
        slots, whens = ([getattr(sample, name) for sample in samples] for name in ("slot", "decided"))
        asked = Asked.drafting(np.array(slots), np.array([ask.rank for ask in asks]), np.array(whens))
        return (Answer(0, [token], [0.0]) for token in self._draft(self._suppress(log_BV), asked).tolist())

    def _draft(self, logits_RV: Tensor, asked: Asked) -> Tensor:
        """Draw a draft from each row's distribution, which the rejection rule keeps, [R]."""
        if self._coupled and self._kernel is not None:
            return self._kernel.draw(logits_RV, asked.slot_R, asked.rank_R, None)[0]
        law_RV = self._rows.law(logits_RV, asked.slot_R)
        if not self._coupled:
            return self._keep_and_draw(law_RV, asked, slice(None))
        gumbel_RV = None
        if not self._rows.greedy:
            gumbel_RV = self._noise_ring().rows(asked.slot_R, asked.rank_R, asked.when_R)
        return self._rows.draw(law_RV, gumbel_RV, asked.slot_R)

    # ---- the rejection rule --------------------------------------------------------------------------------------

    def _by_ratio(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Told:
        """Draw the drafts and judge the others, in one record; a sample has rows of one sort only."""
        drafts_R = asked.kind_R == DRAFT
        accepted_B: Ints = np.zeros(len(asked.size_B), dtype=np.int64)
        records, rows, samples = [], [], np.arange(0)
        if drafts_R.any():
            which = np.flatnonzero(drafts_R)
            part = asked if drafts_R.all() else asked.part(drafts_R)[0]
            hidden_DD = hidden_RD if drafts_R.all() else hidden_RD[put(which, self._device)]
            records.append(self._drafted(lane, hidden_DD, part).flatten())
            rows.append(which)
        if not drafts_R.all():
            which = np.flatnonzero(~drafts_R)
            part, samples = asked.part(~drafts_R)
            hidden_JD = hidden_RD[put(which, self._device)] if drafts_R.any() else hidden_RD
            records.append(self._judged(lane, hidden_JD, part))
            rows.append(which)
        told = lane.record(torch.cat(records))
        token_R, log_p_R, first = np.zeros(asked.num_rows, dtype=np.int64), np.zeros(asked.num_rows), 0
        for which in rows:
            token_R[which] = told[first : first + len(which)].astype(np.int64)
            log_p_R[which] = told[first + len(which) : first + 2 * len(which)]
            first += 2 * len(which)
        accepted_B[samples] = told[first:].astype(np.int64)
        return accepted_B, token_R, log_p_R

    def _uniform(self, asked: Asked, index_N: Ints | slice, purpose: int) -> Tensor:
        """One uniform a row, float64 [N]; computed on the host."""
        slot_N, rank_N, when_N = asked.slot_R[index_N], asked.rank_R[index_N], asked.when_R[index_N]
        key_N2 = self._places.key_S2[slot_N]
        found = keys.uniform_rows(key_N2, self._places.positions(slot_N, rank_N), purpose, when_N)
        return put(found, self._device)

    def _drafted(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Tensor:
        """Draw drafts from q and keep it: tokens and log-probabilities, float64 [2, R]."""
        found = []
        for part in self._parts(asked.num_rows):
            logits_RV = self._logits(lane, hidden_RD[part])
            law_RV = self._rows.law(logits_RV, asked.slot_R[part])
            token_R = self._keep_and_draw(law_RV, asked, part)
            found.append(torch.stack([token_R.to(torch.float64), self._log_p(lane, logits_RV, law_RV, token_R)]))
        return torch.cat(found, 1)

    def _keep_and_draw(self, law_RV: Tensor, asked: Asked, part: slice) -> Tensor:
        assert self._laws is not None, "this decoder does not draft"
        self._laws.data_CV[self._cells(asked, part)] = law_RV
        return inverse_cdf_draw(law_RV.exp(), self._uniform(asked, part, keys.DRAFT))

    def _cells(self, asked: Asked, index_N: Ints | slice) -> Tensor:
        assert self._laws is not None, "no distributions are kept"
        assert (asked.rank_R - asked.when_R <= self._window).all(), "a rank beyond the window"
        return put(self._laws.cells(asked.slot_R[index_N], asked.rank_R[index_N]), self._device)

    def _judged(self, lane: Lane, hidden_JD: Tensor, asked: Asked) -> Tensor:
        """Judge the drafts of each sample; where one is refused, or none is left, draw the token that comes there.

        Tokens, log-probabilities and accepted drafts, float64 [2 R + C].
        """
        is_draft_J = put(asked.drafts_R != NO_DRAFT, self._device)
        draft_J = put(np.maximum(asked.drafts_R, 0), self._device)
        sure = bool((asked.kind_R == SURE).any())
        log_q_J = torch.zeros(asked.num_rows, dtype=torch.float64, device=self._device)
        if not sure:
            log_q_J = torch.where(is_draft_J, self._log_q(asked, draft_J), log_q_J)
        ratios, plain, held = [], [], None
        for part in self._parts(asked.num_rows):
            logits_RV = self._logits(lane, hidden_JD[part])
            ratio_R, log_p_R, law_RV = self._weighed(logits_RV, asked.slot_R[part], draft_J[part], log_q_J[part])
            ratios.append(ratio_R)
            plain.append(log_p_R)
            held = (logits_RV, law_RV) if len(logits_RV) == asked.num_rows else None
        log_ratio_J = torch.cat(ratios)
        good_J = is_draft_J & (self._uniform(asked, slice(None), keys.ACCEPT) < log_ratio_J.exp())
        size_C = put(asked.size_B, self._device)
        owner_J = put(asked.owner_R, self._device)
        first_C = size_C.cumsum(0) - size_C
        step_J = torch.arange(asked.num_rows, device=self._device) - first_C[owner_J]
        accepted_C = size_C.scatter_reduce(0, owner_J, torch.where(good_J, size_C[owner_J], step_J), "amin")
        # Where every draft of a sample holds and no row is left, the token drawn means nothing.
        last_C = first_C + torch.minimum(accepted_C, size_C - 1)
        refused_C, draft_C = is_draft_J[last_C], draft_J[last_C]
        slot_C = asked.slot_R[asked.size_B.cumsum() - asked.size_B]
        recovering_J, bonus_J = (self._uniform(asked, slice(None), purpose) for purpose in (keys.RESIDUAL, keys.BONUS))
        uniform_C = torch.where(refused_C, recovering_J[last_C], bonus_J[last_C])
        cells_C = None if sure else self._cells(asked, slice(None))[last_C]
        ends = []
        for part in self._parts(len(last_C)):
            logits_NV, p_NV = self._again(lane, hidden_JD, last_C[part], slot_C[part], held)
            if cells_C is None:
                q_NV = torch.full_like(p_NV, -torch.inf).scatter_(1, draft_C[part].unsqueeze(1), 0.0)
            else:
                assert self._laws is not None, "no distributions are kept"
                q_NV = self._laws.data_CV[cells_C[part]]
            mass_NV = torch.where(refused_C[part].unsqueeze(1), residual(p_NV, q_NV), p_NV.exp())
            token_N = inverse_cdf_draw(mass_NV, uniform_C[part])
            ends.append(torch.stack([token_N.to(torch.float64), self._rows.log_p(logits_NV, p_NV, token_N)]))
        token_C, log_p_C = torch.cat(ends, 1)
        token_J, log_p_J = draft_J.to(torch.float64), torch.cat(plain)
        over_C = accepted_C < size_C
        token_J[last_C] = torch.where(over_C, token_C, token_J[last_C])
        log_p_J[last_C] = torch.where(over_C, log_p_C, log_p_J[last_C])
        return torch.cat([token_J, log_p_J, accepted_C.to(torch.float64)])

    def _log_q(self, asked: Asked, draft_J: Tensor) -> Tensor:
        """What the kept distributions gave these tokens, float64 [J]; it means nothing where a row judges no draft."""
        assert self._laws is not None, "no distributions are kept"
        return self._laws.data_CV[self._cells(asked, slice(None)), draft_J].to(torch.float64)

    def _weighed(
        self, logits_RV: Tensor, slot_R: Ints, draft_R: Tensor, log_q_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """log p - log q of the drafts, log p under the model itself, and the distributions, which the kernel does not need."""
        if self._kernel is not None:
            return *self._kernel.weigh(logits_RV, slot_R, draft_R, log_q_R), None
        law_RV = self._rows.law(logits_RV, slot_R)
        log_p_R = law_RV.gather(-1, draft_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        return log_p_R - log_q_R, self._rows.log_p(logits_RV, law_RV, draft_R), law_RV

    def _again(
        self,
        lane: Lane,
        hidden_JD: Tensor,
        row_N: Tensor,
        slot_N: Ints,
        held: tuple[Tensor, Tensor | None] | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits and distributions of some rows again: the held ones, else computed once more, which gives the same bits."""
        if held is not None and held[1] is not None:
            return held[0][row_N], held[1][row_N]
        logits_NV = self._logits(lane, hidden_JD[row_N]) if held is None else held[0][row_N]
        return logits_NV, self._rows.law(logits_NV, slot_N)
