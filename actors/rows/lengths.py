"""Holes whose lengths are not known: which lengths are tried for a row, and which one is taken. Pure.

    row      t0 [1-3] t1 [2-4] t2     each hole at each of its lengths, those after it at a length in the middle
    tried    t0 _ t1 ___ t2
             t0 __ t1 ___ t2          the first hole takes 2
             t0 ___ t1 ___ t2
             t0 __ t1 __ t2           then the second, beside what the first one took
             t0 __ t1 ____ t2         (3 was tried already; in masked diffusion not for this hole)

Any-subset models. Each canvas is filled by the job's decoder, and a probe gives the joint probability of its tokens from left to
right. That joint is p(visible | L) p(fill | visible, L), and the decoder knows the second factor: so the weight of a length

    w(L) = log p(fill, after | before) - log p(fill | visible) = log p(after | before, L)

does not depend on the fill, if the model's orders agree. The posterior of L is proportional to prior x exp(w), with a uniform
prior over the lengths that are tried, and one of them is drawn with the sample's own noise. It comes with its fill: together they
are a draw from p(L, fill | visible). In a trained model the orders differ a little, and w depends on the fill as well.

Masked diffusion. Each canvas has one probe, the confidence c(L) of its first step, and is not filled. That has a peak near the
true length, hidden by a bias b(L) that depends on the length alone. The length with the greatest c(L) / b(L) is taken,
then filled.

A text is the one that a job with these lengths gives: the noise of a position does not depend on what was tried before.

Sources: Chib, "Marginal likelihood from the Gibbs output" (1995), for the ratio; Liu, Yang, Su, "Diffusion LMs can approximate
optimal infilling lengths implicitly" (CAL, 2026), sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.fim import Requests, costs
from draftmill.decoders.base import HOLE, Outcome, Request, RowSettings
from draftmill.decoders.draws.keys import LENGTH, uniforms

IDS = NDArray[np.int32]
Lengths = tuple[int, ...]
Bias = tuple[float, float, float, float, float]

CAL_BIAS: Final[Bias] = (1.0, 1.77, 0.56, 0.06, 0.24)
"""The bias that the public code of CAL has for LLaDA-8B, DiffuCoder and DreamCoder (see `bias_at`)."""


def bias_at(bias: Bias, length: int) -> float:
    """b(L) = a exp(-b L) + c exp(-d L) + e."""
    a, b, c, d, e = bias
    return a * math.exp(-b * length) + c * math.exp(-d * length) + e


@dataclass(frozen=True, slots=True)
class OpenLengths:
    """A row's visible `pieces`, one more than its holes; the lengths that each hole may have, ascending; the tokens that fit into
    all holes together, None without a limit. Lengths are drawn at this `temperature`. `bias` is that of a masked-diffusion model;
    None: an any-subset one."""

    pieces: tuple[IDS, ...]
    choices: tuple[Lengths, ...]
    room: int | None = None
    temperature: float = 1.0
    bias: Bias | None = None

    def canvas(self, lengths: Sequence[int]) -> IDS:
        """The canvas with holes of these lengths, int32."""
        holes = [np.full(length, HOLE, dtype=np.int32) for length in lengths]
        return np.concatenate([*chain.from_iterable(zip(self.pieces, holes, strict=False)), self.pieces[-1]])

    def holes(self, lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The [start, end) ranges of the holes on that canvas."""
        ranges, end = [], 0
        for length, piece in zip(lengths, self.pieces, strict=False):
            start = end + len(piece)
            end = start + length
            ranges.append((start, end))
        return tuple(ranges)

    def options(self, taken: Lengths) -> list[Lengths]:
        """The lengths of all holes that are tried for the first hole without one, after those that were taken."""
        own, later = self.choices[len(taken)], self.choices[len(taken) + 1 :]
        for rest in (tuple(each[len(each) // 2] for each in later), tuple(each[0] for each in later)):
            room = math.inf if self.room is None else self.room - sum(taken) - sum(rest)
            if own[-1] <= room or rest == tuple(each[0] for each in later):
                return [(*taken, length, *rest) for length in own if length <= room]
        raise AssertionError("the shortest lengths fit")

    @property
    def longest(self) -> Lengths:
        """The greatest lengths that fit, the first holes before the others."""
        taken: Lengths = ()
        for index, own in enumerate(self.choices):
            least = sum(each[0] for each in self.choices[index + 1 :])
            room = math.inf if self.room is None else self.room - sum(taken) - least
            taken = (*taken, max([length for length in own if length <= room], default=own[0]))
        return taken


@dataclass(slots=True)
class LengthSearch:
    """Finds the lengths of one sample's holes. `taken` are those of the first holes; `logprob` is the log-probability of all that
    were taken under their posteriors, None in masked diffusion; `num_tried` is how many were tried, of all holes together."""

    row: OpenLengths
    key: int
    settings: RowSettings
    taken: Lengths = ()
    logprob: float | None = 0.0
    num_tried: int = 0

    @property
    def is_over(self) -> bool:
        """Whether all holes have their lengths."""
        return len(self.taken) == len(self.row.choices)

    def requests(self) -> Requests:
        """Yields each request and is sent its outcome. Returns the fill of the lengths that were taken, with the forwards and
        times of all that was tried; drafts are those of the fill alone."""
        outcomes, fills, weights = list[Outcome](), dict[Lengths, Outcome](), dict[Lengths, float]()
        while not self.is_over:
            options = self.row.options(self.taken)
            is_last = len(self.taken) + 1 == len(self.row.choices)
            if self.row.bias is not None:
                weights = {}  # a joint weighs all holes of a canvas, a confidence is that of one hole
            # An only length needs no weight, but the last canvas of an any-subset model is the one that is filled.
            if len(options) > 1 or (is_last and self.row.bias is None):
                for lengths in [each for each in options if each not in weights]:
                    self.num_tried += 1
                    canvas, places = self.row.canvas(lengths), self.row.holes(lengths)
                    if self.row.bias is not None:
                        start, end = places[len(self.taken)]
                        sure, scored = RowSettings(temperature=0.0), np.arange(start, end, dtype=np.int64)
                        probed = yield Request(0, self.key, canvas, settings=sure, probe=True, scored=scored)
                        outcomes.append(probed)
                        weights[lengths] = _logprob(probed) - math.log(bias_at(self.row.bias, end - start))
                    else:
                        fill = fills[lengths] = yield Request(0, self.key, canvas, settings=self.settings)
                        filled = canvas.copy()
                        filled[canvas == HOLE] = fill.tokens
                        probed = yield Request(0, self.key, filled, score_from=places[0][0], probe=True)
                        outcomes += [fill, probed]
                        weights[lengths] = _logprob(probed) - _logprob(fill)
            self._choose(options, np.array([weights[each] if len(options) > 1 else 0.0 for each in options]))
        if self.row.bias is None:
            return replace(fills[self.taken], **costs(outcomes))
        fill = yield Request(0, self.key, self.row.canvas(self.taken), settings=self.settings)
        return replace(fill, **costs([*outcomes, fill]))

    def _choose(self, options: Sequence[Lengths], weights_L: NDArray[np.float64]) -> None:
        hole = len(self.taken)
        if self.row.bias is not None:
            self.logprob, best = None, int(np.argmax(weights_L))
        else:
            log_p_L = log_posterior(weights_L)
            lengths = [each[hole] for each in options]
            best = drawn(log_p_L, lengths, key=self.key, hole=hole, temperature=self.row.temperature)
            assert self.logprob is not None, "an any-subset model has a posterior"
            self.logprob += float(log_p_L[best])
        self.taken = options[best][: hole + 1]


def _logprob(outcome: Outcome) -> float:
    assert outcome.logprob is not None, "fills and probes have a log-probability"
    return outcome.logprob


def log_posterior(weights_L: NDArray[np.float64]) -> NDArray[np.float64]:
    """log p(L | visible) of the lengths that were tried, under a uniform prior."""
    shifted_L = weights_L - weights_L.max()
    return shifted_L - math.log(math.fsum(np.exp(shifted_L).tolist()))


def drawn(log_p_L: NDArray[np.float64], lengths: Sequence[int], *, key: int, hole: int, temperature: float) -> int:
    """The index of a length drawn from p^(1/temperature); at temperature 0 of the most probable one, ties to the shortest. Each
    length has its own noise, whichever others are tried."""
    if temperature == 0.0:
        return int(np.argmax(log_p_L))
    uniform_L = uniforms(key, np.asarray(lengths, dtype=np.int64), LENGTH, hole)
    return int(np.argmax(log_p_L / temperature - np.log(-np.log(uniform_L))))
