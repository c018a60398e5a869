"""What draws of one position say of its noise, which several forwards read under different distributions.

A token is drawn by the noise of its position. With exponential noise E it is the v with the least E_v / p_v. Only E / sum(E)
matters, which for three tokens is a random point x of a triangle. A distribution cuts the triangle into a region for each token:
that of a is where x_a / p_a <= x_v / p_v for all v, and its share of the area is p_a. After a draw the point is known to lie in
one region. The next distribution cuts that region again, and the shares of the parts are the probabilities of the next draw.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.draws import keys
from tests.decoders.references.choosers import Chooser

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

    def gumbels(self) -> Points:
        """Gumbel noise of points inside of it, one close to each corner."""
        return np.asarray(-np.log(0.999 * self.corners + 0.001 * self.corners.mean(0)))


class Regions:
    """Where the noise of each position lies, after the draws so far; a chooser takes the branches."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, int], Triangle] = {}

    def chosen(
        self, chooser: Chooser, index: int, position: int, log_law_V: Tensor, step: int = 0
    ) -> tuple[int, Triangle]:
        """A token of a request's position, and where the noise (of a step) now lies."""
        law_V = log_law_V.to(torch.float64).exp()
        law = np.zeros(3)
        law[: len(law_V)] = law_V[:3]
        assert float(law_V.sum()) - law.sum() < 1e-12, "three tokens at most"
        before = self.known.get((index, position, step), Triangle())
        parts = [before.where(token, law) if law[token] else Triangle(np.zeros((0, 3))) for token in range(3)]
        shares = torch.tensor([part.area / before.area for part in parts], dtype=torch.float64)
        shares[shares < _NOTHING] = 0.0
        token = chooser.choose(shares.log(), keys.TARGET, position, step)
        self.known[index, position, step] = parts[token]
        return token, parts[token]
