"""Choosers make the random choices of a reference decoder; the two acceptance rules for one sample use them.

One chooser reads the sample's noise, as the batched decoders do; another takes every branch in turn with its probability,
so that the exact output distribution of the decoding code is summed up. Knows nothing of models.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys, noise
from draftmill.decoders.draws.sampling import inverse_cdf_draw, residual
from tests.decoders.references.sampling import coupled_draw

_NOTHING = 1e-14
"""A smaller probability than this is rounding, not a branch."""


class Chooser(Protocol):
    """Makes every random choice of a reference decoder under the rejection rule."""

    def choose(self, log_law_V: Tensor, purpose: int, position: int, when: int) -> int:
        """Draw a token from log-probabilities, which need not be normalised."""
        ...

    def accept(self, probability: float, position: int, when: int) -> bool:
        """Return True with the given probability (values above 1 count as 1)."""
        ...


class NoiseChooser:
    """Reads the sample's own noise, as the batched decoders do."""

    def __init__(self, key: int) -> None:
        self._key = key

    def _uniform(self, purpose: int, position: int, when: int) -> Tensor:
        return torch.from_numpy(keys.uniforms(self._key, np.array([position]), purpose, when))

    def choose(self, log_law_V: Tensor, purpose: int, position: int, when: int) -> int:
        """Inverse CDF over ascending token ids."""
        return int(inverse_cdf_draw(log_law_V.exp().unsqueeze(0), self._uniform(purpose, position, when)))

    def accept(self, probability: float, position: int, when: int) -> bool:
        """u < probability."""
        return float(self._uniform(keys.ACCEPT, position, when)) < probability


class EnumeratingChooser:
    """Follows a prescribed list of branches, then always the first possible one, and notes the branches not taken."""

    def __init__(self, path: Sequence[int]) -> None:
        self._path = list(path)
        self._taken: list[int] = []
        self.probability = 1.0
        self.untaken: list[list[int]] = []

    def _branch(self, probabilities: list[float]) -> int:
        possible = [index for index, mass in enumerate(probabilities) if mass > _NOTHING]
        depth = len(self._taken)
        if depth < len(self._path):
            index = self._path[depth]
        else:
            index = possible[0]
            self.untaken += [[*self._taken, other] for other in possible[1:]]
        self._taken.append(index)
        self.probability *= probabilities[index]
        return index

    def choose(self, log_law_V: Tensor, purpose: int, position: int, when: int) -> int:
        """Branch over the tokens with mass."""
        mass_V = log_law_V.to(torch.float64).exp()
        return self._branch((mass_V / mass_V.sum()).tolist())

    def accept(self, probability: float, position: int, when: int) -> bool:
        """Branch over no (0) and yes (1)."""
        yes = min(probability, 1.0)
        return bool(self._branch([1.0 - yes, yes]))


def enumerate_law(run: Callable[[Chooser], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of what `run` returns, by taking every branch of every choice it makes."""
    law: dict[tuple[int, ...], float] = {}
    paths: list[list[int]] = [[]]
    while paths:
        chooser = EnumeratingChooser(paths.pop())
        result = run(chooser)
        law[result] = law.get(result, 0.0) + chooser.probability
        paths += chooser.untaken
    return law


class Rule(Protocol):
    """An acceptance rule for one sample."""

    def draft(self, q_V: Tensor, position: int, when: int, number: int = 0) -> int:
        """Draw a draft; `number` is that of the step's noise under coupled acceptance."""
        ...

    def settle(
        self, p_V: Tensor, q_V: Tensor, token: int, position: int, when: int, number: int = 0
    ) -> tuple[bool, int]:
        """Return (accepted, the token to commit) for one draft."""
        ...

    def direct(self, p_V: Tensor, position: int, when: int) -> int:
        """Draw a token at a rank without a draft."""
        ...


class RejectionRule:
    """min(1, p/q) and the residual; choices by a chooser."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def draft(self, q_V: Tensor, position: int, when: int, number: int = 0) -> int:
        """Draw from q."""
        return self._chooser.choose(q_V, keys.DRAFT, position, when)

    def settle(
        self, p_V: Tensor, q_V: Tensor, token: int, position: int, when: int, number: int = 0
    ) -> tuple[bool, int]:
        """Accept the draft or draw from the positive part of p - q."""
        ratio = float((p_V[token].to(torch.float64) - q_V[token].to(torch.float64)).exp())
        if self._chooser.accept(ratio, position, when):
            return True, token
        mass_V = residual(p_V.unsqueeze(0), q_V.unsqueeze(0))[0]
        return False, self._chooser.choose(mass_V.log(), keys.RESIDUAL, position, when)

    def direct(self, p_V: Tensor, position: int, when: int) -> int:
        """Draw from p."""
        return self._chooser.choose(p_V, keys.BONUS, position, when)


class CoupledRule:
    """Target and draft read the same Gumbel noise; the target's own token is always committed."""

    def __init__(self, key: int, sampling: Sampling) -> None:
        self._key, self._greedy = noise.key_words([key]), sampling.temperature == 0.0

    def direct(self, p_V: Tensor, position: int, when: int, number: int = 0) -> int:
        """argmax of log p + g; `when` does not matter."""
        where, draws = torch.tensor([position]), torch.tensor([number])
        gumbel = None if self._greedy else noise.gumbel_rows(self._key, where, len(p_V), draws_R=draws)
        return int(coupled_draw(p_V.unsqueeze(0), gumbel))

    def draft(self, q_V: Tensor, position: int, when: int, number: int = 0) -> int:
        """argmax of log q + g."""
        return self.direct(q_V, position, when, number)

    def settle(
        self, p_V: Tensor, q_V: Tensor, token: int, position: int, when: int, number: int = 0
    ) -> tuple[bool, int]:
        """Compare with the target's own token."""
        own = self.direct(p_V, position, when, number)
        return own == token, own


def rule_of(key: int, sampling: Sampling) -> Rule:
    """The rule of these settings with the sample's own noise."""
    if sampling.acceptance == "rejection" and sampling.temperature:
        return RejectionRule(NoiseChooser(key))
    return CoupledRule(key, sampling)
