"""From the hidden states of answered rows to answers: draws tokens by each sample's noise, and judges drafts.

Two acceptance rules, of which decoders know nothing. Coupled: drafts and target read the same noise, each token is the target's
own, and a draft holds if it equals it. Rejection (ratio.py): a draft drawn from q holds with probability min(1, p/q).

    rows of a sample     JUDGE a   JUDGE b   JUDGE c   JUDGE -           three drafts, and the row after them
    coupled              x         y         z         w                 all are drawn; a = x and b = y hold: (2, [x, y, z, w])
    rejection            holds     holds     residual                    (2, [a, b, r, ...])

Everything is planned before the forward (lanes.Reading): what the host knows goes down with the forward's rows, and one record
comes up.

Legend: R answered rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.backbones.heads import DraftHeads
from draftmill.decoders.draws.noise import gumbel_at
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import GIVEN, LOOSE, NO_DRAFT, TARGET, Answer, Noted, Weights
from draftmill.decoders.engine.kernel_draws import KernelDraws
from draftmill.decoders.engine.lanes import Lane, Reading
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.named import NamedRows
from draftmill.decoders.engine.packing import Asked, Ints, count_leading
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.ratio import Ratio
from draftmill.decoders.engine.rings import NoiseRing, Places, Ring
from draftmill.decoders.engine.rolls import Draft, Rolling
from draftmill.decoders.engine.row_laws import RowLaws
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.kernels.find import find_choice

Draw = Callable[[Sent, Tensor], Tensor]
"""(sent, hidden states of rows) -> their tokens and log-probabilities, float64 [2, R]."""


class Answers(Protocol):
    """Answers asks; the engine's part that enumerations replace."""

    def start(self, sample: Sample) -> None:
        """Begin with a new sample, in its slot."""
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

    def answer(self, lane: Lane, asked: Asked, parcel: Parcel) -> Reading[Answer]:
        """Plan the answers of all samples that asked, in their order."""
        ...

    def roll(self, lane: Lane, heads: DraftHeads, rolling: Rolling) -> Iterator[Answer]:
        """The drafts of the windows that a head rolls over, in their order."""
        ...

    def weighed(self, lane: Lane, samples: Sequence[Sample], asks: Sequence[Weights]) -> Iterator[Answer]:
        """Drafts from distributions that decoders name."""
        ...

    def named(self, lane: Lane, asked: NamedRows, parcel: Parcel) -> Reading[Noted]:
        """Plan the answers of all samples that named rows, in their order."""
        ...


def by_sample(accepted_B: Ints | None, token_R: Ints, log_p_R: NDArray[np.float64], size_B: Ints) -> Iterator[Answer]:
    """Cut the rows' tokens and log-probabilities into answers; `accepted_B` are the accepted drafts, if any were judged."""
    tokens, log_ps, first = token_R.tolist(), log_p_R.tolist(), 0
    accepted: Sequence[int] = [0] * len(size_B) if accepted_B is None else accepted_B.tolist()
    for good, size in zip(accepted, size_B.tolist(), strict=True):
        end = first + size
        yield Answer(good, tokens[first:end], log_ps[first:end])
        first = end


def _told(token_R: Tensor, log_p_R: Tensor) -> Tensor:
    """Tokens and log-probabilities as a record, float64 [2, R]; ids are far below what float64 can't hold."""
    return torch.stack([token_R, log_p_R])


def _matched(told_2R: NDArray[np.float64], asked: Asked) -> Iterator[Answer]:
    """Answers from tokens and log-probabilities: a draft holds if the token is equal."""
    token_R, accepted_B = told_2R[0].astype(np.int64), None
    if (asked.drafts_R != NO_DRAFT).any():
        accepted_B = count_leading(token_R == asked.drafts_R, asked.size_B)
    return by_sample(accepted_B, token_R, told_2R[1], asked.size_B)


def spread(asks: Sequence[Weights], vocab_size: int, never: frozenset[int]) -> tuple[Tensor, Tensor]:
    """Tokens in ascending order, int64 [B, T], and their weights, float64, 0 where a row has fewer; without those in `never`.

    Where an ask names no others, all of them are alike.
    """
    rows = list[tuple[list[int], list[float]]]()
    for ask in asks:
        weight_of = {token: weight for token, weight in zip(ask.tokens, ask.weights, strict=True) if token not in never}
        if not weight_of:
            weight_of = dict.fromkeys((token for token in range(vocab_size) if token not in never), 1)
        tokens = sorted(weight_of)
        rows.append((tokens, [float(weight_of[token]) for token in tokens]))
    most = max(len(tokens) for tokens, _ in rows)
    token_BT = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens, _ in rows], dtype=torch.int64)
    weight_BT = torch.tensor([weights + [0.0] * (most - len(weights)) for _, weights in rows], dtype=torch.float64)
    return token_BT, weight_BT


def _on_host(own_2R: NDArray[np.float64] | None) -> Tensor | None:
    return None if own_2R is None else torch.from_numpy(own_2R)


class NoiseAnswers:
    """Answers by the samples' own noise, for all rows of a forward at once. `account` says what fits into memory."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, account: Callable[[], Account]) -> None:
        sampling, info, backbone = setup.sampling, setup.info, setup.backbone
        self._coupled, self._device = sampling.acceptance == "coupled", backbone.device
        self._vocab_size, self._account = info.vocab_size, account
        self._law_dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=backbone.device)
        self._never = frozenset(info.suppressed)
        self._rows, self._places = RowLaws(sampling, setup.max_rows), Places(setup.max_rows)
        choice = find_choice(backbone.device, backbone.dtype)
        self._kernel = KernelDraws(choice, info, self._rows, self._places, backbone.device) if choice else None
        self._window = algorithm.window
        # Made when a token is first drawn by it: at temperature 0 there is none.
        self._noise: NoiseRing | None = None
        self._num_used = 0
        # The distributions of drafts, until they are judged.
        drafts = algorithm.keeps_laws and not self._coupled
        self._laws = Ring(self._window, info.vocab_size, self._law_dtype, backbone.device) if drafts else None
        self._ratio = Ratio(
            self._rows,
            self._places,
            self._laws,
            self._kernel,
            window=self._window,
            logits=self._logits,
            parts=self._parts,
        )

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

    def answer(self, lane: Lane, asked: Asked, parcel: Parcel) -> Reading[Answer]:
        """See Answers. Where no row is asked about, nothing is drawn: a `Roll` follows."""
        if not asked.num_rows:
            return Reading(None, lambda _: (Answer(0, [], []) for _ in asked.size_B))
        judges = not self._coupled and not np.isin(asked.kind_R, (TARGET, LOOSE, GIVEN)).all()
        return self._by_ratio(lane, asked, parcel) if judges else self._by_noise(lane, asked, parcel)

    def _by_noise(self, lane: Lane, asked: Asked, parcel: Parcel) -> Reading[Answer]:
        if self._kernel is not None and (size := self._captured_size(lane, asked.num_rows)) is not None:
            return self._by_kernel(lane, asked, size, parcel)
        parts = [(part, self._draw(lane, asked, part, parcel)) for part in self._parts(asked.num_rows)]

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            drawn = [draw(sent, hidden_RD[part]) for part, draw in parts]
            return torch.cat(drawn, 1) if len(drawn) > 1 else drawn[0]

        return Reading(work, lambda told_2R: _matched(told_2R, asked))

    def _captured_size(self, lane: Lane, num_rows: int) -> int | None:
        """To how many rows the kernel's draws are filled up, so that they can be captured; None where they can't."""
        size = lane.size(num_rows)
        return None if size is None or len(list(self._parts(size))) > 1 else size

    def _by_kernel(self, lane: Lane, asked: Asked, size: int, parcel: Parcel) -> Reading[Answer]:
        """All rows at once, and more, which mean nothing."""
        assert self._kernel is not None, "only the kernel's draws are captured"
        is_given, cuts = bool((asked.kind_R == GIVEN).any()), self._rows.cuts(asked.slot_R)
        scored_R = asked.drafts_R if is_given else None
        choose = self._kernel.plan(asked.slot_R, asked.rank_R, scored_R, parcel, size=size)
        note = lane.noting(asked, slice(None), parcel, size)

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            token_R, log_p_R = choose(sent, lane.logits(hidden_RD))
            note(sent, token_R)
            return _told(token_R, log_p_R)

        def read(record: NDArray[np.float64]) -> Iterator[Answer]:
            return _matched(record.reshape(2, size)[:, : asked.num_rows], asked)

        return Reading(work, read, form=(is_given, cuts), num_rows=size)

    def _draw(self, lane: Lane, asked: Asked, part: slice, parcel: Parcel) -> Draw:
        """Tokens and log-probabilities of some rows."""
        slot_R, rank_R, given = asked.slot_R[part], asked.rank_R[part], None
        is_given, note = bool((asked.kind_R[part] == GIVEN).any()), lane.noting(asked, part, parcel)
        if (kernel := self._kernel) is not None:
            choose = kernel.plan(slot_R, rank_R, asked.drafts_R[part] if is_given else None, parcel)

            def chosen(sent: Sent, hidden_RD: Tensor) -> Tensor:
                token_R, log_p_R = choose(sent, lane.logits(hidden_RD))
                note(sent, token_R)
                return _told(token_R, log_p_R)

            return chosen
        if is_given:
            given = parcel.enclose(asked.drafts_R[part])
        own, noise = self._own(slot_R, parcel), None
        if not self._rows.greedy:
            loose = (asked.kind_R[part] == LOOSE).all()
            noise = self._noise_ring().plan(slot_R, rank_R, None if loose else asked.when_R[part], parcel)

        def draw(sent: Sent, hidden_RD: Tensor) -> Tensor:
            logits_RV, law_RV = self._logits(lane, hidden_RD), None
            own_2R = None if own is None else sent[own]
            if noise is None:
                token_R = logits_RV.argmax(-1)
            else:
                law_RV = self._rows.law(logits_RV, own_2R)
                token_R = self._rows.draw(law_RV, noise(sent), own_2R)
            note(sent, token_R)
            scored_R = token_R if given is None else sent[given]
            return _told(token_R, self._log_p(lane, logits_RV, law_RV, scored_R))

        return draw

    def _by_ratio(self, lane: Lane, asked: Asked, parcel: Parcel) -> Reading[Answer]:
        size = None if self._kernel is None else self._captured_size(lane, asked.num_rows)
        if size is not None and (planned := self._ratio.plan_filled(lane, asked, size, parcel)) is not None:
            filled, told, form = planned
            cuts = self._rows.cuts(asked.slot_R)
            return Reading(
                filled, lambda record: by_sample(*told(record), asked.size_B), form=(form, cuts), num_rows=size
            )
        work, read = self._ratio.plan(lane, asked, parcel)
        return Reading(work, lambda record: by_sample(*read(record), asked.size_B))

    def _own(self, slot_R: Ints, parcel: Parcel) -> str | None:
        """Enclose the settings of samples that have some of their own."""
        own_2R = self._rows.own(slot_R)
        return None if own_2R is None else parcel.enclose(own_2R)

    def _log_p(self, lane: Lane, logits_RV: Tensor, law_RV: Tensor | None, token_R: Tensor) -> Tensor:
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

    def named(self, lane: Lane, asked: NamedRows, parcel: Parcel) -> Reading[Noted]:
        """See Answers, and named_answers.py."""
        raise AssertionError("this decoder names no rows")

    # ---- drafts that need no forward of their own ------------------------------------------------------------------

    def roll(self, lane: Lane, heads: DraftHeads, rolling: Rolling) -> Iterator[Answer]:
        """See Answers."""
        parcel, num_windows = Parcel(), len(rolling.counts)
        captured = self._coupled and self._kernel is not None
        size = self._captured_size(lane, num_windows) if captured else None
        work = rolling.plan(lane, heads, partial(self._draft, size=size), parcel, size=size)
        form = None if size is None else ("roll", self._rows.cuts(rolling.slot_B))
        return rolling.drafts(lane.after(form, parcel, work))

    def weighed(self, lane: Lane, samples: Sequence[Sample], asks: Sequence[Weights]) -> Iterator[Answer]:
        """See Answers. These are few tokens: they are drawn on the host, and no device is waited for."""
        token_BT, weight_BT = spread(asks, self._vocab_size, self._never)
        slots, whens = ([getattr(sample, name) for sample in samples] for name in ("slot", "decided"))
        asked = Asked.drafting(np.array(slots), np.array([ask.rank for ask in asks]), np.array(whens))
        own_2B = self._rows.own(asked.slot_R)
        law_BT = self._rows.law(weight_BT.log().to(self._law_dtype), own := _on_host(own_2B))
        if not self._coupled:
            place_B = self._ratio.draw_on_host(asked, token_BT, law_BT, self._device)
        else:
            place_B = self._rows.draw(law_BT, None if self._rows.greedy else self._noise_at(asked, token_BT), own)
        tokens = token_BT.gather(1, place_B.unsqueeze(1)).squeeze(1).tolist()
        return (Answer(0, [token], [0.0]) for token in tokens)

    def _noise_at(self, asked: Asked, token_RT: Tensor) -> Tensor:
        """The noise of some tokens, on the host. Where that is the device, the ring has it, or will be asked for it soon."""
        if self._device.type == "cpu":
            parcel = Parcel()
            noise = self._noise_ring().plan(asked.slot_R, asked.rank_R, asked.when_R, parcel)
            return noise(parcel.send(self._device)).gather(1, token_RT)
        keys_R2 = torch.from_numpy(self._places.key_S2[asked.slot_R])
        return gumbel_at(keys_R2, torch.from_numpy(self._places.positions(asked.slot_R, asked.rank_R)), token_RT)

    def _draft(self, asked: Asked, parcel: Parcel, *, size: int | None = None) -> Draft:
        """Plan to draw a draft from each row's logits; the rejection rule keeps what it was drawn from.

        With `size` so many rows are drawn, as in KernelDraws.
        """
        if not self._coupled:
            own, keep_and_draw = self._own(asked.slot_R, parcel), self._ratio.keep_and_draw(asked, slice(None), parcel)

            def by_uniform(sent: Sent, logits_RV: Tensor) -> Tensor:
                return keep_and_draw(
                    sent, self._rows.law(self._suppress(logits_RV), None if own is None else sent[own])
                )

            return by_uniform
        if (kernel := self._kernel) is not None:
            choose = kernel.plan(asked.slot_R, asked.rank_R, None, parcel, size=size)
            return lambda sent, logits_RV: choose(sent, self._suppress(logits_RV))[0]
        own, noise = self._own(asked.slot_R, parcel), None
        if not self._rows.greedy:
            noise = self._noise_ring().plan(asked.slot_R, asked.rank_R, asked.when_R, parcel)

        def by_noise(sent: Sent, logits_RV: Tensor) -> Tensor:
            own_2R = None if own is None else sent[own]
            law_RV = self._rows.law(self._suppress(logits_RV), own_2R)
            return self._rows.draw(law_RV, None if noise is None else noise(sent), own_2R)

        return by_noise
