"""Texts that are scored under masked diffusion by a mean over random masks; each mask is a canvas.

A text is a sample whose canvases each need one forward and keep nothing. The engine (score_engine.py) puts as many canvases of
several texts into a forward as fit.

    text          tokens that are scored       canvases                     a forward
    A             * * * *                      A0 A1 A2 .. A127             A126 A127 B0 B1
    B             * *                          B0 B1 B2

A canvas's result is the same in any forward, and a text's sums are exact (fsum), so its score does not depend on the batch.

The distribution is the model's own (temperature 1, no truncation), without ids that have no token, as in every decoder.

Such a model bounds the log-probability of L tokens by a mean over masks M, with weights w:

    bound = E[ w(M) * sum of log p(token i | tokens outside of M), i in M ]

    llada   the number of masked tokens l is uniform in 1..L, then any l tokens are equally likely; w = L / l
    mdlm    the share t is uniform in (0, 1), then each token is masked with probability t;         w = 1 / t

Both have the same expectation if p does not depend on l or t. Samples come in pairs: pair h of H draws both of its l (or t) from
the h-th of H equal parts of their range. That removes the variance between parts, as the evenly spaced times in the public code
do, and the difference within each pair gives an unbiased estimate of the variance. Where `llada` has no more masks than samples,
every mask is used once, with its probability: the bound is then exact.

All numbers come from the noise field (draws/keys.py), so a text's masks depend on its key and on which of its tokens are scored.

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025), the conditional likelihood of the section on inference, and
the public `get_log_likelihood`; Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), the continuous-time
bound. MDLM's code draws t from (0.001, 1) and masks with probability 0.999 t; here both limits are used, so that the mean is the
bound.

Legend: L tokens of a group, R tokens that are read, M draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, fsum, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.common_settings import DecoderChoice, Estimate
from draftmill.decoders.draws.keys import SCORE_MASK, SCORE_SHARE, uniforms
from draftmill.decoders.engine.algorithm import Algorithm, no_prompt
from draftmill.decoders.engine.asks import SCORE, Answer, Ask, Ints, Span
from draftmill.decoders.engine.samples import Sample, runs_of


class Mask(NamedTuple):
    """What one draw hides of a group, bool [L], the weight of its tokens' log-probabilities, and the share that it stands for."""

    hidden_L: NDArray[np.bool_]
    weight: float
    share: float


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """Tokens that are masked together: those of a text, or of one block. `places_L` are their numbers among all scored tokens.
    `number` tells the groups of one text apart. The weights of a group's masks include the division by their number."""

    key: int
    number: int
    places_L: NDArray[np.int64]
    kind: str
    samples: int

    @property
    def enumerated(self) -> bool:
        """Whether every mask is used once."""
        return self.kind == "llada" and 2 ** min(len(self.places_L), 64) - 1 <= self.samples

    @property
    def num_masks(self) -> int:
        return 2 ** len(self.places_L) - 1 if self.enumerated else self.samples

    def mask(self, draw: int) -> Mask:
        length = len(self.places_L)
        if self.enumerated:
            hidden_L = ((draw + 1) >> np.arange(length)) % 2 == 1
            count = int(hidden_L.sum())
            return Mask(hidden_L, 1.0 / (count * comb(length, count)), count / length)
        uniform = float(uniforms(self.key, np.asarray([self.number]), SCORE_SHARE, draw)[0])
        share = (draw // 2 + uniform) / (self.samples // 2)
        noise_L = uniforms(self.key, self.places_L, SCORE_MASK, draw)
        if self.kind == "mdlm":
            return Mask(noise_L < share, 1.0 / (share * self.samples), share)
        count = min(length, 1 + int(share * length))
        hidden_L = np.zeros(length, dtype=np.bool_)
        hidden_L[np.argsort(noise_L, kind="stable")[:count]] = True
        return Mask(hidden_L, length / (count * self.samples), count / length)


class ScoredRows(NamedTuple):
    """A canvas whose tokens are all known, as the rows of a forward that keeps nothing. `tokens` are those of the rows in
    `spans`. `rows` are numbers among them (a row may be read twice), each of which is asked for the log-probability of its one
    of `wanted`. `sigmas` holds the total noise of the canvas, for a model that diffuses."""

    tokens: Ints
    spans: Sequence[int]
    rows: Ints
    wanted: Ints
    sigmas: Sequence[float] = ()


class Draw(NamedTuple):
    """One draw of masks: the masked positions, those that are read (the masked ones, and those alone), and their weights.
    `share` is the share of its text's tokens that it stands for."""

    number: int
    masked: Ints
    asked_R: Ints
    weights_R: NDArray[np.float64]
    sampled_R: NDArray[np.bool_]
    share: float


RowsOf = Callable[["Text", list[Draw]], ScoredRows]
Grouping = tuple[list[Ints], Ints, int]
"""The scored positions that are masked together, group by group, those that are read alone, without a mask, and how many draws
share a canvas; a function of the text."""


class Text(Sample):
    """A text that is being scored: its masks, and what was read from its canvases so far. `sampled_M` are each draw's sums over
    groups with random masks, `exact_M` over all other tokens. `rows_of` lays out the rows of a canvas with some draws."""

    def __init__(
        self,
        request: Request,
        *args: Any,
        rows_of: RowsOf,
        grouping: Callable[[Request], Grouping],
        kind: str,
        samples: int,
        **more: Any,
    ) -> None:
        super().__init__(request, *args, **more)
        self.scored, self._rows_of, self._running = request.to_score(), rows_of, list[Draw]()
        self.positions, self.alone, self.per_canvas = grouping(request)
        places = [np.searchsorted(self.scored, each).astype(np.int64) for each in self.positions]
        self.groups = [MaskedGroup(request.key, number, each, kind, samples) for number, each in enumerate(places)]
        # Whether each token's own probability is known: none is masked together with another.
        self.is_exact = all(group.enumerated and len(group.places_L) == 1 for group in self.groups)
        self.num_draws = max((group.num_masks for group in self.groups), default=1)
        self.num_canvases, self.num_run = -(-self.num_draws // self.per_canvas), 0
        self.sampled_M, self.exact_M = np.zeros(self.num_draws), np.zeros(self.num_draws)
        self.by_position: dict[int, float] = {}
        self.is_greedy = True if self.is_exact else None

    @property
    def left(self) -> int:
        return self.num_canvases - self.num_run

    def run(self, count: int) -> None:
        """Ask about this many canvases in the next forward."""
        self.canvases, size = count, self.per_canvas
        numbers = range(self.num_run * size, min((self.num_run + count) * size, self.num_draws))
        self._running = draws = [self._draw(number) for number in numbers]
        parts = [draws[first : first + size] for first in range(0, len(draws), size)]
        self.ask = ask_about([self._rows_of(self, part) for part in parts])

    def _draw(self, number: int) -> Draw:
        masked, weights, sampled, share = [], [], [], 0.0
        for group, positions in zip(self.groups, self.positions, strict=True):
            if number < group.num_masks:
                hidden_L, weight, share = group.mask(number)
                masked.append(positions[hidden_L])
                weights.append(weight)
                sampled.append(not group.enumerated)
        alone = self.alone if number == 0 else self.alone[:0]
        sizes, asked_R = [*map(len, masked), len(alone)], np.concatenate([*masked, alone])
        weights_R, sampled_R = np.repeat([*weights, 1.0], sizes), np.repeat([*sampled, False], sizes)
        return Draw(number, asked_R[: len(asked_R) - len(alone)], asked_R, weights_R, sampled_R, share)

    def read(self, answer: Answer) -> None:
        """Add the log-probabilities that canvases gave to the tokens of their draws; after the last the text has its score."""
        assert isinstance(self.ask, Ask), "a forward has run"
        log_p_R, is_first_R, first = answer.log_ps[0], answer.tokens[0] == self.ask.drafts, 0
        for draw in self._running:
            end = first + len(draw.asked_R)
            each_R = draw.weights_R * log_p_R[first:end]
            self.sampled_M[draw.number] = fsum(each_R[draw.sampled_R].tolist())
            self.exact_M[draw.number] = fsum(each_R[~draw.sampled_R].tolist())
            if self.is_exact:
                self.by_position |= dict(zip(draw.asked_R.tolist(), log_p_R[first:end].tolist(), strict=True))
                self.is_greedy = bool(self.is_greedy and is_first_R[first:end].all())
            first = end
        committed = len(self.scored) * self.num_run // self.num_canvases
        self.num_run += self.canvases
        self.stats.committed += len(self.scored) * self.num_run // self.num_canvases - committed
        if not self.left:
            self.decided = self.length
            self.logprob = fsum([*self.sampled_M.tolist(), *self.exact_M.tolist()])
            if self.is_exact:
                self.log_ps = [self.by_position[position] for position in self.scored.tolist()]

    def _generated_tokens(self) -> tuple[list[int], list[float]]:
        return [self.tokens[position] for position in self.scored.tolist()], self.log_ps or []

    def outcome(self) -> Outcome:
        """See Sample; the standard error of an estimate comes from the difference of each pair of masks."""
        outcome = super().outcome()
        if outcome.error_kind is None and not self.is_exact:
            sampled_M = self.sampled_M[: len(self.sampled_M) // 2 * 2]
            outcome.logprob_stderr = sqrt(fsum(((sampled_M[0::2] - sampled_M[1::2]) ** 2).tolist()))
        return outcome


def ask_about(canvases: Sequence[ScoredRows]) -> Ask:
    """Canvases of a text as one ask: each has its own slot for the time of a forward."""
    spans, first, row_R = list[int](), 0, list[Ints]()
    for node, canvas in enumerate(canvases):
        numbers = np.array(canvas.spans, dtype=np.int64).reshape(-1, len(Span._fields))
        numbers[:, Span._fields.index("node")] = node
        spans += numbers.reshape(-1).tolist()
        row_R.append(first + canvas.rows)
        first += len(canvas.tokens)
    rows = np.concatenate(row_R)
    return Ask(
        np.concatenate([canvas.tokens for canvas in canvases]),
        spans,
        runs_of(rows, rows, SCORE),
        np.concatenate([canvas.wanted for canvas in canvases]),
        sigmas=[sigma for canvas in canvases for sigma in canvas.sigmas],
    )


def estimate_algorithm(
    settings: DecoderChoice, estimate: Estimate, rows_of: RowsOf, grouping: Callable[[Request], Grouping], **more: Any
) -> Algorithm:
    """How the engine estimates scores, with the family's own estimator for `auto`."""
    kind = settings.estimates[0] if estimate.kind == "auto" else estimate.kind
    return Algorithm(
        decode=lambda text: (ask for ask in list[Ask]()),  # the engine asks (score_engine.py)
        scores=True,
        estimates=True,
        sample=partial(Text, rows_of=rows_of, grouping=grouping, kind=kind, samples=estimate.samples),
        has_prompt=no_prompt,
        keeps=False,
        **more,
    )
