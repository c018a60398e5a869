"""The masks with which a masked-diffusion model scores a text: which tokens each one hides, and its weight. Numpy, no torch.

Such a model bounds the log-probability of L tokens by a mean over masks M, with weights w:

    bound = E[ w(M) * sum of log p(token i | tokens outside of M), i in M ]

    llada   the number of masked tokens l is uniform in 1..L, then any l tokens are equally likely; w = L / l
    mdlm    the share t is uniform in (0, 1), then each token is masked with probability t;         w = 1 / t

Both have the same expectation if p does not depend on l or t. Samples come in pairs: pair h of H draws both of its l (or t) from
the h-th of H equal parts of their range. That removes the variance between parts, as the evenly spaced times in the public code
do, and the difference within each pair gives an unbiased estimate of the variance. Where `llada` has no more masks than samples,
every mask is used once, with its probability: the bound is then exact.

All numbers come from the noise field (keys.py), so a text's masks depend on its key and on which of its tokens are scored.

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025), the conditional likelihood of the section on inference, and
the public `get_log_likelihood`; Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), the continuous-time
bound. MDLM's code draws t from (0.001, 1) and masks with probability 0.999 t; here both limits are used, so that the mean is the
bound.

Legend: L tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.draws.keys import SCORE_MASK, SCORE_SHARE, uniforms


@dataclass(frozen=True, slots=True)
class Mask:
    """What one draw hides of a group, bool [L], the weight of its tokens' log-probabilities, and the share that it stands for."""

    hidden_L: NDArray[np.bool_]
    weight: float
    share: float


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """Tokens that are masked together: those of a text, or of one block. `places_L` are their numbers among all scored tokens.

    `number` tells the groups of one text apart. The weights of a group's masks include the division by their number.
    """

    key: int
    number: int
    places_L: NDArray[np.int64]
    kind: str
    samples: int

    @property
    def enumerated(self) -> bool:
        """Whether every mask is used once."""
        # The first test keeps the power small.
        return self.kind == "llada" and len(self.places_L) <= self.samples and self._num_masks <= self.samples

    @property
    def _num_masks(self) -> int:
        return int(2 ** len(self.places_L)) - 1

    @property
    def num_masks(self) -> int:
        """How many masks are used."""
        return self._num_masks if self.enumerated else self.samples

    def mask(self, draw: int) -> Mask:
        """The mask number `draw`."""
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
