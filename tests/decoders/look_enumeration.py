"""The exact law of the decoders of masked diffusion: their generators on the real engine, with a chooser in place of noise.

A mask's token is drawn by the noise of its position, and every forward until it is revealed reads the same noise. So the draws
of one position under different distributions are not independent. With exponential noise E the token is the v with the least
E_v / p_v. Only E / sum(E) matters, which for three tokens is a random point x of a triangle. A distribution cuts the triangle
into a region for each token: that of a is where x_a / p_a <= x_v / p_v for all v, and its share of the area is p_a. After a
draw the point is known to lie in one region. The next distribution cuts that region again, and the shares of the parts are the
probabilities of the next draw.

The chooser takes every branch. All else is the engine's own: distributions, confidences, the order of picks, what they reveal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.base import Request
from decoders.common_settings import DecoderChoice
from decoders.draws import noise
from decoders.engine.engine import Engine
from decoders.engine.picks import Masks, Picks
from decoders.engine.samples import Sample
from decoders.engine.setup import Setup
from decoders.references.choosers import Chooser, enumerate_law
from decoders.registry import algorithm_of
from tests.decoders.enumeration import Law, decoded

Points = NDArray[np.float64]

_NOTHING = 1e-14
"""A region with a smaller share than this is rounding, not a branch."""


class Triangle:
    """Where the noise of one position may lie: a convex polygon of points x, x_0 + x_1 + x_2 = 1."""

    def __init__(self, corners: Points | None = None) -> None:
        self.corners: Points = np.eye(3) if corners is None else corners

    @property
    def area(self) -> float:
        """Its area, in an unit of no meaning."""
        if len(self.corners) < 3:
            return 0.0
        x, y = (self.corners[1:, :2] - self.corners[0, :2]).T
        return float(abs((x[:-1] * y[1:] - x[1:] * y[:-1]).sum()))

    def where(self, token: int, law: Points) -> Triangle:
        """The part in which `token` wins under these three probabilities."""
        part = self
        for other in range(3):
            if other != token:
                part = part.cut(law[token] * part.corners[:, other] - law[other] * part.corners[:, token])
        return part

    def cut(self, above: Points) -> Triangle:
        """The part where a linear function, given at the corners, is at least 0."""
        corners = []
        for at in range(len(self.corners)):
            one, two = above[at - 1], above[at]
            if (one < 0) != (two < 0):
                corners.append(self.corners[at - 1] + (self.corners[at] - self.corners[at - 1]) * one / (one - two))
            if two >= 0:
                corners.append(self.corners[at])
        return Triangle(np.array(corners).reshape(-1, 3))


class ChosenPicks(Picks):
    """Draws the tokens of some samples by choosers, by their requests' indices; those of all others by their own noise."""

    def __init__(self, picks: Picks, choosers: Mapping[int, Chooser]) -> None:
        self.__dict__.update(picks.__dict__)
        self.choosers = choosers
        self.inside: dict[int, int] = {}
        self.known: dict[tuple[int, int], Triangle] = {}

    def start(self, sample: Sample) -> None:
        super().start(sample)
        self.inside[sample.slot] = sample.request.index

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.inside[target] = self.inside[source]

    def _drawn(self, law_RV: Tensor, masks: Masks) -> Tensor:
        token_R = super()._drawn(law_RV, masks)
        for row, (slot, position) in enumerate(zip(masks.slots.tolist(), masks.position_R.tolist(), strict=True)):
            if self.inside[slot] in self.choosers:
                token_R[row] = self._chosen(self.inside[slot], position, law_RV[row].to(torch.float64).exp())
        return token_R

    def _chosen(self, index: int, position: int, law_V: Tensor) -> int:
        """Choose a token, given what the draws before said of the position's noise."""
        law = np.zeros(3)
        law[: len(law_V)] = law_V[:3]
        assert float(law_V.sum()) - law.sum() < 1e-12, "three tokens at most"
        before = self.known.get((index, position), Triangle())
        parts = [before.where(token, law) if law[token] else Triangle(np.zeros((0, 3))) for token in range(3)]
        shares = torch.tensor([part.area / before.area for part in parts], dtype=torch.float64)
        shares[shares < _NOTHING] = 0.0
        token = self.choosers[index].choose(shares.log(), noise.TARGET, position, 0)
        self.known[index, position] = parts[token]
        return token

    def _uniform(self, chance_R: Tensor, masks: Masks) -> Tensor:
        uniform_R = super()._uniform(chance_R, masks)
        for row, (slot, position) in enumerate(zip(masks.slots.tolist(), masks.position_R.tolist(), strict=True)):
            if (index := self.inside[slot]) in self.choosers:
                chance, step = float(chance_R[row]), int(masks.step_R3[row, 2])
                struck = self.choosers[index].accept(chance, position, step)
                # Close to the chance, so that any other limit is found.
                uniform_R[row] = chance * 0.999 if struck else chance + 0.001 * (1.0 - chance)
        return uniform_R


def engine_of(setup: Setup, settings: DecoderChoice, choosers: Mapping[int, Chooser]) -> Engine:
    """The engine that runs these settings, with choosers for some requests."""
    engine = Engine(setup, algorithm_of(setup, settings))
    lane: Any = engine.lanes[0]
    lane.picks = ChosenPicks(lane.picks, choosers)
    return engine


def law_of(setup: Setup, settings: DecoderChoice, requests: Sequence[Request], index: int) -> Law:
    """The exact law of the text of one request, while the others' texts come from their own noise."""

    def run(chooser: Chooser) -> tuple[int, ...]:
        return tuple(decoded(engine_of(setup, settings, {index: chooser}), requests)[index].tokens.tolist())

    return enumerate_law(run)
