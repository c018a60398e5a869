"""How many tokens to draft: as many as the tokens they may win are worth, given what a forward costs. `k: auto`.

Each slot may take e = 0 .. most drafts in its next iteration. An iteration wins 1 + S_1 + .. + S_e tokens, where S_j is the
probability that the first j drafts all come true, and takes `forwards[e]` forwards of the target with `rows[e]` rows in all.
All slots share each forward's base cost, so the choice is made for all of them at once: the allocation with most tokens per
second, found by Dinkelbach's iteration (1967): at a rate R a slot takes the e that maximises (gain - R x cost), which gives a
better R. A drafting model costs one forward more for each draft position that any slot wants.

With coupled acceptance no choice can change a text, only its cost; under the rejection rule it would, so that is refused. The
costs are those of the run (cost.py), the probabilities those of its acceptances: nothing is known beforehand, so the first
steps try several lengths, and a length that is not used is tried again now and then.

Source of the idea: the cost model of Leviathan et al. (2023), section 3.3, for one sequence; here for a batch.
Legend: S slots, B slots of this step, K most drafts, E = K + 1 choices, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.cost import Cost, CostTable
from decoders.state import SlotState

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_AUTO: Final = 16
"""The most drafts that `auto` gives to a slot."""
# Draft lengths of the first steps: costs and acceptances of several lengths, the shortest in between for comparison.
_TRIALS: Final = (0, 2, 4, 0, 1, 8, 0)
# While drafting: every so many steps one without, so that its cost stays known.
_PAUSE_EVERY: Final = 64
# While not drafting: after so many steps some slots try, and after twice as many each time that it does not pay.
_PROBE_AFTER, _PROBE_AT_MOST = 16, 1024
_PROBE_DRAFTS: Final = 2
_PROBE_SHARE: Final = 8
# What drafting must win over not drafting, to be worth trusting estimates.
_MARGIN: Final = 1.02
_FIRST_GUESS: Final = 0.6
_POSITION_MEMORY, _POSITION_PRIOR = 0.99, 2.0
_SLOT_MEMORY, _SLOT_PRIOR = 0.9, 8.0
_ROUNDS: Final = 4
# The depths that are compared where each costs a forward of the drafter.
_DEPTHS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])


class Survival:
    """How likely the drafts of a slot are to come true: per position over all slots, and how a slot differs from that."""

    def __init__(self, state: SlotState, most: int) -> None:
        self._reached_K, self._passed_K = np.zeros(most), np.zeros(most)
        self._tried_S = state.column(dtype=torch.float64)
        self._gained_S = state.column(dtype=torch.float64)

    def learn(self, slots_B: Tensor, tried_B: Tensor, gained_B: Tensor) -> None:
        """Take in how many of the drafts tried came true; slots that tried none say nothing."""
        some_B = tried_B > 0
        slots_B, tried_B, gained_B = slots_B[some_B], tried_B[some_B], gained_B[some_B]
        if not len(slots_B):
            return
        for column_S, num_B in ((self._tried_S, torch.minimum(gained_B + 1, tried_B)), (self._gained_S, gained_B)):
            column_S[slots_B] = _SLOT_MEMORY * column_S[slots_B] + num_B
        places_K = np.arange(1, len(self._reached_K) + 1)
        tried_B1, gained_B1 = tried_B.cpu().numpy()[:, None], gained_B.cpu().numpy()[:, None]
        reached_K = ((places_K <= tried_B1) & (places_K <= gained_B1 + 1)).sum(0)
        self._reached_K = _POSITION_MEMORY * self._reached_K + reached_K
        self._passed_K = _POSITION_MEMORY * self._passed_K + (places_K <= gained_B1).sum(0)

    def probabilities(self, slots_B: Tensor) -> Numbers:
        """The probability that the first j drafts come true, j = 1 .. K, [B, K]."""
        rates_K, guess = np.empty_like(self._reached_K), _FIRST_GUESS
        for place in range(len(rates_K)):
            guess = (self._passed_K[place] + _POSITION_PRIOR * guess) / (self._reached_K[place] + _POSITION_PRIOR)
            rates_K[place] = guess
        tried_B1, gained_B1 = (
            self._tried_S[slots_B].cpu().numpy()[:, None],
            self._gained_S[slots_B].cpu().numpy()[:, None],
        )
        survival_BK: Numbers = ((gained_B1 + _SLOT_PRIOR * rates_K) / (tried_B1 + _SLOT_PRIOR)).cumprod(1)
        return survival_BK


class DraftBudget:
    """Chooses how many drafts each slot gets; see the module's docstring.

    `rows` and `forwards` say what an iteration with e = 0 .. K drafts takes of the target; by default 1 + e rows in one forward.
    `drafter` times the forwards of a drafting model, one for each draft position; None where drafts come for nothing.

    Each step: `plan` before drafting, then `timed` with what the step took, and `learn` for the iterations that ended.
    """

    def __init__(
        self,
        state: SlotState,
        most: int = MOST_AUTO,
        *,
        rows: Sequence[int] | None = None,
        forwards: Sequence[int] | None = None,
        drafter: CostTable | None = None,
    ) -> None:
        self.most, self.target, self.drafter = most, CostTable(), drafter
        self.survival = Survival(state, most)
        self._rows_E: Numbers = np.array(rows if rows is not None else range(1, most + 2), dtype=np.float64)
        self._forwards_E: Numbers = np.array(forwards if forwards is not None else [1] * (most + 1), dtype=np.float64)
        assert len(self._rows_E) == len(self._forwards_E) == most + 1, "one entry for each choice"
        self._num_planned = 0
        self._rate = 0.0
        self._resting, self._wait, self._next_probe, self._probes = False, _PROBE_AFTER, 0, 0

    def learn(self, slots_B: Tensor, tried_B: Tensor, gained_B: Tensor) -> None:
        """An iteration ended in each of these slots: of `tried_B` drafts, the first `gained_B` came true."""
        self.survival.learn(slots_B, tried_B, gained_B)

    def timed(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """A step with one forward of the target took so long, its drafting not included."""
        self.target.observe(tokens, kv_tokens, seconds)

    def open(self, *, fresh: bool) -> bool:
        """Whether `plan` might give any drafts at all, so that nobody looks for drafts in vain."""
        return not self._resting or (not fresh and self._num_planned >= self._next_probe)

    def plan(self, slots_B: Tensor, most_B: Tensor, *, kv_tokens: int, fresh: bool) -> Tensor:
        """Return how many drafts each slot gets, at most `most_B`, int64 [B].

        `kv_tokens` is the number of columns that the slots' rows read. With `fresh` the slots' prompts are in this step: it is
        judged by the rate of the other steps, since the prompts have to be read anyway.
        """
        most = most_B.clamp(max=self.most).cpu().numpy()
        if fresh:
            counts = self._best(slots_B, most, kv_tokens, rate=self._rate) if self._rate else np.zeros_like(most)
        else:
            counts = self._plan_regular(slots_B, most, kv_tokens)
        return torch.from_numpy(counts).to(most_B.device)

    def _plan_regular(self, slots_B: Tensor, most: Counts, kv_tokens: int) -> Counts:
        if not most.any():
            # Nothing to decide, and nothing to learn for those who wait.
            self._num_planned += self._resting
            return np.zeros_like(most)
        number = self._num_planned
        self._num_planned += 1
        if number < len(_TRIALS):
            return np.minimum(most, _TRIALS[number])
        if self._resting and number >= self._next_probe:
            return self._probe(most)
        if not self._resting and number % _PAUSE_EVERY == 0:
            return np.zeros_like(most)
        counts = self._best(slots_B, most, kv_tokens, rate=None)
        self._rest(resting=not counts.any())
        return counts

    def _rest(self, *, resting: bool) -> None:
        if resting and not self._resting:
            self._next_probe = self._num_planned + self._wait
        if not resting:
            self._wait = _PROBE_AFTER
        self._resting = resting

    def _probe(self, most: Counts) -> Counts:
        """Let every eighth slot, another one each time, draft a little; then think again."""
        self._probes += 1
        self._wait = min(2 * self._wait, _PROBE_AT_MOST)
        self._resting = False
        share = min(_PROBE_SHARE, len(most))
        chosen = (np.arange(len(most)) + self._probes) % share == 0
        return np.where(chosen, np.minimum(most, _PROBE_DRAFTS), 0)

    # ---- the allocation ------------------------------------------------------------------------------------------

    def _best(self, slots_B: Tensor, most: Counts, kv_tokens: int, *, rate: float | None) -> Counts:
        """The allocation with the best rate; with `rate` given, the one that wins most beyond what its time is worth."""
        cost = self.target.cost()
        drafting = None if self.drafter is None else self.drafter.cost()
        if cost is None or (self.drafter is not None and drafting is None):
            return np.minimum(most, _PROBE_DRAFTS)
        gain_BE = np.concatenate([np.ones((len(most), 1)), self.survival.probabilities(slots_B)], 1).cumsum(1)
        gain_BE = np.where(np.arange(self.most + 1) <= most[:, None], gain_BE, -np.inf) / self._forwards_E
        depths_D = np.array([self.most]) if drafting is None else _DEPTHS[self.most >= _DEPTHS]
        fixed_D, row_DE = self._costs(cost, drafting, depths_D, kv_tokens)
        if rate is None:
            return self._most_per_second(gain_BE, fixed_D, row_DE)
        choice_DB = self._choose(gain_BE, row_DE, np.full(len(depths_D), rate))
        value_D = _sums(gain_BE, choice_DB) - rate * (fixed_D + _sums(row_DE[:, None], choice_DB))
        return choice_DB[int(value_D.argmax())]

    def _costs(self, cost: Cost, drafting: Cost | None, depths_D: Counts, kv_tokens: int) -> tuple[Numbers, Numbers]:
        """Seconds of a forward whatever the drafts, for each depth [D], and of one slot's share with e drafts [D, E]."""
        fixed_D = np.full(len(depths_D), cost.fixed(kv_tokens))
        row_E, choices_E = cost.per_token * self._rows_E, np.arange(self.most + 1)
        if drafting is not None:
            fixed_D += drafting.fixed(kv_tokens) * depths_D
            row_E += drafting.per_token * choices_E
        return fixed_D, np.where(choices_E <= depths_D[:, None], row_E / self._forwards_E, np.inf)

    def _most_per_second(self, gain_BE: Numbers, fixed_D: Numbers, row_DE: Numbers) -> Counts:
        """Dinkelbach's iteration for every depth at once; nothing is drafted unless that is clearly the best."""
        num_slots = len(gain_BE)
        plain = num_slots / float(fixed_D[0] + num_slots * row_DE[0, 0])
        rate_D = np.full(len(fixed_D), plain)
        choice_DB = self._choose(gain_BE, row_DE, rate_D)
        for _ in range(_ROUNDS):
            rate_D = _sums(gain_BE, choice_DB) / (fixed_D + _sums(row_DE[:, None], choice_DB))
            before_DB, choice_DB = choice_DB, self._choose(gain_BE, row_DE, rate_D)
            if (before_DB == choice_DB).all():
                break
        best = int(rate_D.argmax())
        self._rate = max(float(rate_D[best]), plain)
        return choice_DB[best] if rate_D[best] > _MARGIN * plain else np.zeros(num_slots, dtype=np.int64)

    def _choose(self, gain_BE: Numbers, row_DE: Numbers, rate_D: Numbers) -> Counts:
        """What each slot takes at each depth's rate, [D, B]."""
        return (gain_BE - (rate_D[:, None] * row_DE)[:, None]).argmax(2)


def _sums(values_E: Numbers, choice_DB: Counts) -> Numbers:
    """The chosen values [.., E] of all slots, added up, [D]."""
    each = np.broadcast_to(values_E, (*choice_DB.shape, values_E.shape[-1]))
    sums_D: Numbers = np.take_along_axis(each, choice_DB[:, :, None], 2).sum((1, 2))
    return sums_D
