"""Chooses how many tokens to draft, by their expected gain and the measured cost of a forward (`k: auto`).

Each slot may take e = 0 .. most drafts in its next iteration. An iteration wins 1 + S_1 + .. + S_e tokens, where S_j is the
probability that the first j drafts are all accepted, and takes `forwards[e]` forwards of the target with `rows[e]` rows in all.
All slots share each forward, so the choice is made for all of them at once. A price per row, in tokens, gives one allocation:
every slot takes the e with the largest gain minus the price of its rows. Of the allocations for a range of prices, the budget
takes the one with the most tokens per second by the cost table. A drafting model costs one more forward for each draft position
that any slot wants.

With coupled acceptance no choice can change a text, only its cost; under the rejection rule it would, so `auto` is an error
(common_settings.py, `DecoderChoice.check_sampling`). Costs (cost.py) and probabilities are measured during the run. Since
nothing is known beforehand, some of the first steps try a few drafts, and no choice is more than twice as large as the largest
measured one. Drafting that does not pay is tried again now and then, by few slots and ever more rarely. Trials stop while they
have cost more than a small share of the time, whatever the estimates say (`Ledger`).

Each sample that may draft first yields SEARCH (is drafting worth looking for at all?), then an Offer of up to so many drafts;
both are answered before the forward.

Source of the idea: the cost model of Leviathan et al. (2023), section 3.3, for one sequence; here for a batch.
Legend: E = K + 1 choices, D depths, L prices, C allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import SEARCH, Offer
from draftmill.decoders.engine.cost import Cost, CostTable, Counts, Numbers, Offers, lines_a_slot
from draftmill.decoders.engine.samples import Sample

# The first steps: (drafts per slot, one in how many slots gets them), with steps without drafts between, for comparison.
_TRIALS: Final = ((0, 1), (0, 1), (2, 8), (0, 1), (4, 4), (0, 1))
# While drafting: the interval of steps without drafts, which keep the cost of such a step known.
_PAUSE_EVERY: Final = 128
# While not drafting: steps until some slots try again; doubled each time that drafting does not pay.
_PROBE_AFTER, _PROBE_AT_MOST = 16, 1024
_PROBE_DRAFTS: Final = 2
# How many slots try, and how many tries give a reliable answer.
_EVIDENCE: Final = 8
# The factor by which drafting must beat not drafting before the estimates are trusted.
_MARGIN: Final = 1.1
# After a pause, drafts whose estimated rate is at least this multiple of the plain rate are tried in full.
_NEARLY: Final = 0.9
# At this interval, and before drafting stops, try an unmeasured size if it might gain this much.
_TRY_EVERY: Final = 8
# Prices of a row, in tokens: from almost zero to more than any draft is worth.
_PRICES: Final = np.array([*np.geomspace(0.02, 1.0, 15), 2.0])
# Where allocations are cut: each depth costs a forward of the drafter.
_DEPTHS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
# Acceptances before any is known, how fast they are forgotten, and how many drafts a guess is worth.
_FIRST_GUESS: Final = 0.7
_POSITION_MEMORY, _POSITION_PRIOR = 0.99, 4.0
_SLOT_MEMORY, _SLOT_PRIOR = 0.95, 16.0
# The loss allowed for trials: the time of this many steps without drafts, plus this share of all time spent since.
_AT_FIRST, _SHARE = 2.0, 0.015
# Gains are remembered up to this share of the time spent: when drafts stop being accepted, that much may be lost.
_MOST_WON: Final = 0.05
# A busy machine makes any step long: the loss of one step counts as at most this many steps without drafts.
_HELD_UP: Final = 2.0


class DraftBudget:
    """Chooses how many drafts each slot gets; see the module's docstring.

    `rows` and `forwards` give the target's rows and forwards in an iteration with e = 0 .. K drafts; by default 1 + e and one.
    `drafter` times the forwards of a drafting model; None if drafts cost no forward. Its `draft_forwards` for e = 0 .. K drafts
    are one for each draft position, each with a row a slot, unless given: then each runs all positions. `drawing` times what
    drafts take besides forwards, where they are drawn one after the other: by their number in the longest draft, and by all of
    them in place of keys.

    The engine calls `settle` before each step, then `note_drafting`, `note_drawing` and `spend` for what drafting takes, and
    `end_step` after the step. These `plan` the drafts, record the step's time (`note_step`), and `learn` from the iterations that
    ended.
    """

    def __init__(
        self,
        num_slots: int,
        most: int,
        *,
        rows: Sequence[int] | None = None,
        forwards: Sequence[int] | None = None,
        drafter: CostTable | None = None,
        draft_forwards: Sequence[int] | None = None,
    ) -> None:
        self.most, self.target, self.drafter = most, CostTable(), drafter
        self._draft_forwards_E = None if draft_forwards is None else np.array(draft_forwards, dtype=np.float64)
        self.drawing, self.survival = CostTable(), Survival(num_slots, most)
        # Where a slot's rows are its drafts and one more, a forward's attention is as wide as they are ragged.
        self._ragged, self._lines = rows is None, 1.0
        self._rows_E: Numbers = np.array(rows if rows is not None else range(1, most + 2), dtype=np.float64)
        self._forwards_E: Numbers = np.array(forwards if forwards is not None else [1] * (most + 1), dtype=np.float64)
        assert len(self._rows_E) == len(self._forwards_E) == most + 1, "one entry for each choice"
        self._num_planned = 0
        self._rate = 0.0
        self._resting, self._wait, self._next_probe = False, _PROBE_AFTER, 0
        self._num_probes, self._num_tries = 0, 0
        self._ledger, self._plain_s, self._num_slots = Ledger(), 0.0, 1
        self._fresh, self._joined, self._drafting = False, False, False
        self._is_open = True

    @classmethod
    def of(cls, algorithm: Algorithm, num_slots: int, *, has_drafter: bool) -> DraftBudget:
        """The budget of an algorithm; `has_drafter`: each draft costs a forward of a drafting model."""
        return cls(
            num_slots,
            algorithm.most_auto,
            rows=algorithm.auto_rows,
            forwards=algorithm.auto_forwards,
            drafter=CostTable() if has_drafter else None,
            draft_forwards=algorithm.draft_forwards,
        )

    # ---- what the engine calls -----------------------------------------------------------------------------------

    def settle(self, samples: list[Sample], *, fresh: bool, joined: bool) -> None:
        """Answer the samples' questions until each of them asks for a forward."""
        is_open = self._is_open = self.open(fresh=fresh)
        if not is_open:
            # Drafts don't pay: the step is then exactly that of the baseline.
            self._begin_step(fresh=False, joined=False)
            self._num_planned += self._resting
        for sample in samples:
            if sample.ask is SEARCH:
                sample.ask = sample.decoding.send(int(is_open))  # type: ignore[union-attr]
        if not is_open or not any(isinstance(sample.ask, Offer) for sample in samples):
            # All are in the second forward of an iteration: what they draft is settled.
            return
        most = np.array([sample.ask.most if isinstance(sample.ask, Offer) else 0 for sample in samples])
        slots, kv = np.array([sample.slot for sample in samples]), sum(sample.decided for sample in samples)
        counts = self.plan(slots, most, kv_tokens=kv, fresh=fresh, joined=joined).tolist()
        for sample, count in zip(samples, counts, strict=True):
            if isinstance(sample.ask, Offer):
                sample.ask = sample.decoding.send(count)  # type: ignore[union-attr]
            assert not isinstance(sample.ask, Offer), "an offer is followed by an ask"

    def note_drafting(self, rows: int, kv_tokens: int, seconds: float) -> None:
        """A forward of the drafting model ran, with its draws: its rows, and the columns that they read."""
        if self.drafter is not None:
            self.drafter.observe(rows, kv_tokens, seconds)

    def note_drawing(self, num_samples: int, num_ranks: int, seconds: float) -> None:
        """Drafts were drawn without a forward, for so many samples and ranks of the one with the most."""
        self.drawing.observe(num_ranks, num_ranks * num_samples, seconds)

    def spend(self, seconds: float) -> None:
        """All drafting before the target's forward took this long."""
        if self._is_open:
            self._ledger.spend(seconds)

    def end_step(self, samples: list[Sample], rows: int, kv_tokens: int, seconds: float, *, is_usual: bool) -> None:
        """The target's forward of the step is done; `just` of a sample says what an iteration brought that ended with it."""
        if is_usual:
            self.note_step(rows, kv_tokens, seconds)
        ended = [(sample.slot, *sample.just) for sample in samples if sample.just is not None]
        for sample in samples:
            sample.just = None
        if self._is_open and ended:
            self.learn(*np.array(ended).T)

    def learn(self, slots_B: Counts, tried_B: Counts, gained_B: Counts) -> None:
        """An iteration ended in each of these slots: of `tried_B` drafts, the first `gained_B` were accepted."""
        self._num_tries += int((tried_B > 0).sum())
        # The first token of a prompt's forward is no gain of drafts; that forward is never timed.
        self._ledger.win(int(gained_B.sum()) + (0 if self._fresh else len(slots_B)))
        self.survival.learn(slots_B, tried_B, gained_B)

    def note_step(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Record the seconds of a step with one target forward."""
        self._ledger.spend(seconds)
        self.target.observe(tokens, round(kv_tokens * self._lines), seconds)

    def open(self, *, fresh: bool) -> bool:
        """Whether `plan` might allow any drafts; if not, callers need not search for drafts."""
        return not self._resting or (
            not fresh and self._num_planned >= self._next_probe and self._ledger.allows(self._plain_s)
        )

    def _begin_step(self, *, fresh: bool, joined: bool) -> None:
        """Close the accounts of the previous step."""
        if self._joined:
            self._ledger.drop()
        else:
            self._ledger.close(drafting=self._drafting, plain_step_s=self._plain_s, num_slots=self._num_slots)
        self._fresh, self._joined, self._drafting, self._lines = fresh, joined, False, 1.0

    def plan(self, slots_B: Counts, most_B: Counts, *, kv_tokens: int, fresh: bool, joined: bool = False) -> Counts:
        """Return how many drafts each slot gets, at most `most_B`, int64 [B]. `kv_tokens` is the number of columns that the
        slots' rows read. With `fresh` the slots' prompts are in this step: it is judged by the rate of the other steps,
        since the prompts must run anyway. `joined` says that some slots' prompts are in the step, so that its time says
        nothing about its drafts."""
        self._begin_step(fresh=fresh, joined=joined)
        most = np.minimum(most_B, self.most)
        cost = self.target.cost()
        if not fresh and cost is not None and most.any():
            num_rows = len(most) * self._rows_E[:1] / self._forwards_E[0]
            self._plain_s, self._num_slots = float(cost.seconds(num_rows, kv_tokens)[0]), len(most)
        counts = (self._plan_fresh if fresh else self._plan_regular)(slots_B, most, kv_tokens)
        self._drafting = bool(counts.any())
        if self._ragged and self._drafting:
            self._lines = float(lines_a_slot(1 + counts[None])[0])
        return counts

    def _plan_fresh(self, slots_B: Counts, most: Counts, kv_tokens: int) -> Counts:
        offers = self._offers(slots_B, most, kv_tokens) if self._rate and not self._resting else None
        return np.zeros_like(most) if offers is None else offers.worth(self._rate)

    def _plan_regular(self, slots_B: Counts, most: Counts, kv_tokens: int) -> Counts:
        if not most.any():
            # No drafts are possible: nothing to decide or to learn.
            self._num_planned += self._resting
            return np.zeros_like(most)
        number = self._num_planned
        self._num_planned += 1
        if self._resting and number < self._next_probe:
            return np.zeros_like(most)
        if not self._ledger.allows(self._plain_s):
            return self._rest(most)
        if number < len(_TRIALS):
            return self._some(most, *_TRIALS[number])
        offers = self._offers(slots_B, most, kv_tokens)
        if offers is None:
            return self._try_few(most)
        if self._resting:
            return self._probe(most, offers)
        if number % _PAUSE_EVERY == 0 and number - self._next_probe >= _PAUSE_EVERY:
            self._wait = _PROBE_AFTER
            return np.zeros_like(most)
        counts, self._rate = offers.fastest(_MARGIN)
        if not counts.any() or number % _TRY_EVERY == 0:
            counts = offers.hopeful(self._rate, counts)
        if counts.any():
            return counts
        # Stop drafting for a while, unless too little was tried to judge it.
        return self._rest(most) if self._num_tries >= _EVIDENCE else self._try_few(most)

    def _rest(self, most: Counts) -> Counts:
        self._resting, self._next_probe = True, self._num_planned + self._wait
        return np.zeros_like(most)

    def _probe(self, most: Counts, offers: Offers) -> Counts:
        """After a pause: try in full what almost pays; else let some slots draft a little."""
        self._wait = min(2 * self._wait, _PROBE_AT_MOST)
        self._resting, self._num_tries = False, 0
        counts, _ = offers.fastest(_NEARLY)
        return counts if counts.any() else self._try_few(most)

    def _try_few(self, most: Counts) -> Counts:
        return self._some(most, _PROBE_DRAFTS, len(most) // _EVIDENCE)

    def _some(self, most: Counts, drafts: int, one_in: int) -> Counts:
        """Give drafts to one in several of the slots that can take any, to other slots each time."""
        self._num_probes += 1
        turn = (np.cumsum(most > 0) + self._num_probes) % max(min(one_in, int((most > 0).sum())), 1)
        return np.where(turn == 0, np.minimum(most, drafts), 0)

    # ---- the allocation ------------------------------------------------------------------------------------------

    def _offers(self, slots_B: Counts, most: Counts, kv_tokens: int) -> Offers | None:
        """The allocations to choose from; None while a cost is unknown."""
        cost = self.target.cost()
        drafting = None if self.drafter is None else self.drafter.cost()
        if cost is None or (self.drafter is not None and drafting is None):
            return None
        gain_BE = np.concatenate([np.ones((len(most), 1)), self.survival.probabilities(slots_B)], 1).cumsum(1)
        gain_BE = np.where(np.arange(self.most + 1) <= most[:, None], gain_BE, -np.inf)
        choices_CB = self._ladder(gain_BE)
        forwards_CB = self._forwards_E[choices_CB]
        return Offers(
            counts_CB=choices_CB,
            gain_C=(gain_BE[np.arange(len(most)), choices_CB] / forwards_CB).sum(1),
            rows_C=(self._rows_E[choices_CB] / forwards_CB).sum(1),
            drafting_C=self._drafting_seconds(choices_CB, drafting, kv_tokens) + self._drawing_seconds(choices_CB),
            cost=cost,
            kv_C=kv_tokens * (lines_a_slot(1 + choices_CB) if self._ragged else np.ones(len(choices_CB))),
        )

    def _drafting_seconds(self, counts_CB: Counts, drafting: Cost | None, kv_tokens: int) -> Numbers:
        """Seconds of drafting for each allocation, [C]: one draft position after the other, or all in each forward."""
        if drafting is None:
            return np.zeros(len(counts_CB))
        fixed = drafting.base + drafting.per_kv_token * kv_tokens
        if self._draft_forwards_E is not None:
            whole_C: Numbers = fixed + drafting.per_token * counts_CB.sum(1)
            return self._draft_forwards_E[counts_CB].max(1) * whole_C
        seconds_C: Numbers = fixed * counts_CB.max(1) + drafting.per_token * counts_CB.sum(1)
        return seconds_C

    def _drawing_seconds(self, counts_CB: Counts) -> Numbers:
        """Seconds of drawing for each allocation, [C], shared among the forwards of an iteration."""
        drawing, depth_C = self.drawing.cost(), counts_CB.max(1)
        if drawing is None:
            return np.zeros(len(counts_CB))
        seconds_C = drawing.seconds(depth_C.astype(np.float64), counts_CB.sum(1))
        return np.where(depth_C > 0, seconds_C / self._forwards_E[counts_CB].max(1), 0.0)

    def _ladder(self, gain_BE: Numbers) -> Counts:
        """The allocations to compare, [C, B]: one per price, each cut at every depth; the last has no drafts."""
        value_LBE = (gain_BE - _PRICES[:, None, None] * self._rows_E) / self._forwards_E
        depths_D = _DEPTHS[self.most >= _DEPTHS]
        choices_LDB = np.minimum(value_LBE.argmax(2)[:, None], depths_D[::-1, None])
        return choices_LDB.reshape(-1, len(gain_BE))


class Survival:
    """How likely drafts are accepted: rates of each draft position over all slots, and how far each slot deviates from them."""

    def __init__(self, num_slots: int, most: int) -> None:
        self._reached_K, self._passed_K = np.zeros(most), np.zeros(most)
        self._tried_S, self._gained_S = np.zeros(num_slots), np.zeros(num_slots)

    def start(self, slot: int) -> None:
        """Forget what the slot held."""
        self._tried_S[slot] = self._gained_S[slot] = 0.0

    def learn(self, slots_B: Counts, tried_B: Counts, gained_B: Counts) -> None:
        """Record how many of the tried drafts were accepted; slots that tried none do not count."""
        some_B = tried_B > 0
        slots_B, tried_B, gained_B = slots_B[some_B], tried_B[some_B], gained_B[some_B]
        if not len(slots_B):
            return
        for column_S, num_B in ((self._tried_S, np.minimum(gained_B + 1, tried_B)), (self._gained_S, gained_B)):
            column_S[slots_B] = _SLOT_MEMORY * column_S[slots_B] + num_B
        places_K = np.arange(1, len(self._reached_K) + 1)
        tried_B1, gained_B1 = tried_B[:, None], gained_B[:, None]
        reached_K = ((places_K <= tried_B1) & (places_K <= gained_B1 + 1)).sum(0)
        self._reached_K = _POSITION_MEMORY * self._reached_K + reached_K
        self._passed_K = _POSITION_MEMORY * self._passed_K + (places_K <= gained_B1).sum(0)

    def probabilities(self, slots_B: Counts) -> Numbers:
        """The probability that the first j drafts are accepted, j = 1 .. K, [B, K]."""
        rates_K, guess = np.empty_like(self._reached_K), _FIRST_GUESS
        for place in range(len(rates_K)):
            guess = (self._passed_K[place] + _POSITION_PRIOR * guess) / (self._reached_K[place] + _POSITION_PRIOR)
            rates_K[place] = guess
        tried_B1, gained_B1 = (column_S[slots_B, None] for column_S in (self._tried_S, self._gained_S))
        survival_BK: Numbers = ((gained_B1 + _SLOT_PRIOR * rates_K) / (tried_B1 + _SLOT_PRIOR)).cumprod(1)
        return survival_BK


class Ledger:
    """Accounts of what drafting has gained or lost in seconds, which bound the cost of trials. Estimates say what to try. The
    ledger measures whether it paid, all costs included: a drafter that catches up with texts, the search for drafts, a busy
    machine. Each step: `spend` its seconds as they become known and `win` its tokens, then `close` it."""

    def __init__(self) -> None:
        self._total_s, self._balance_s = 0.0, 0.0
        self._step_s, self._step_tokens = 0.0, 0
        self._was_drafting = False

    def spend(self, seconds: float) -> None:
        """Add seconds to this step."""
        self._step_s += seconds

    def win(self, tokens: int) -> None:
        """Add committed tokens to this step."""
        self._step_tokens += tokens

    def close(self, *, drafting: bool, plain_step_s: float, num_slots: int) -> None:
        """End the step; without drafts it would have taken `plain_step_s`, 0 if unknown. A step that followed one with drafts
        belongs to them: an iteration may take two forwards."""
        self._total_s += self._step_s
        if plain_step_s and (drafting or self._was_drafting):
            won_s = self._step_tokens * plain_step_s / num_slots - self._step_s
            self._balance_s += max(won_s, -_HELD_UP * plain_step_s)
            self._balance_s = min(self._balance_s, _MOST_WON * self._total_s)
        self._was_drafting = drafting
        self._step_s, self._step_tokens = 0.0, 0

    def drop(self) -> None:
        """End a step whose time without drafts is unknown."""
        self._was_drafting = False
        self._step_s, self._step_tokens = 0.0, 0

    def allows(self, plain_step_s: float) -> bool:
        """Whether the accounts allow another trial, if a step without drafts takes `plain_step_s`."""
        return self._balance_s + _SHARE * self._total_s + _AT_FIRST * plain_step_s >= 0.0
