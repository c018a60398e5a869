"""Chooses how many tokens each slot drafts (`k: auto`): one number for all slots, by the measured tokens per second.

    step      1 .. 7      8 .. 14     15 .. 21    22 .. 24        then
    drafts    0           2           4           8               4, with a trial of 8, 2 or 0 now and then
    tokens/s  100         130         150         110

The lengths are 0 (plain decoding), 1, 2, 4, .. up to the most that the decoder allows. After each change the first steps do not
count: they verify drafts of the length before. A trial runs another length for a few steps: twice the drafts, half of them, or
none. If that was faster than the steps just before, it is used from then on. Neighbouring steps are compared, since all rates
change as texts grow and samples come and go. Trials stop while they have cost more than a small share of the run's time, so a run
in which drafts never pay is about as fast as plain decoding.

With coupled acceptance a length changes the cost of a text and never the text. Under the rejection rule it would, so `auto` is an
error there (common_settings.py, `DecoderChoice.check_sampling`).
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt
from statistics import median
from typing import Final

# How many drafts are tried first, and where they share a cost.
_FIRST, _SEVERAL = 2, 4
# Iterations that give a rate, and the fewest and most steps for them. A trial that is neither clearly faster nor slower takes
# twice as many.
_ITERATIONS, _FEWEST, _MOST = 64, 6, 8
# Another length must be this much faster to be used, since rates are noisy; no drafts at all may be as much slower.
_MARGIN: Final = 1.03
# Below this ratio of rates a trial of fewer drafts is not worth its time.
_HOPELESS: Final = 0.8
# An iteration with this many tokens needs no proof that drafts pay.
_PLENTY: Final = 4
# The steps from a trial that lost to the next one, and to a trial of the same length that needs not wait.
_TRY_EVERY, _FORGET_AFTER = 32, 512
# A change of the batch, as a factor, after which no trial counts and none has lost time.
_OTHER_BATCH: Final = 2.0
# The share of the run's time that trials may lose.
_SHARE: Final = 0.01
# A busy machine makes any step long: a step counts as at most this many median ones, and one in which a drafting model catches up
# as more.
_HELD_UP: Final = 2.0
_CATCH_UP: Final = 8.0


class AutoLength:
    """How many drafts an iteration may have, `least` .. `most`: decoders call it, and the engine tells it what steps took.

    An iteration with `least` drafts must be that of the decoder's baseline; the first ones have `start`. With `shares_cost`
    several drafts cost little more than one, so several are tried first. The first `settling` steps after a change do not count:
    one that verifies drafts of the length before, and one in which a drafting model catches up. The number changes in `note_step`
    alone.
    """

    def __init__(
        self, most: int, *, least: int = 0, start: int = 0, shares_cost: bool = False, settling: int = 1
    ) -> None:
        doubled = {1 << power for power in range(most.bit_length())}
        self.lengths = sorted({least, most} | {length for length in doubled if length > least})
        last = len(self.lengths) - 1
        first = _SEVERAL if shares_cost else _FIRST
        self._firsts = [
            next((index for index, length in enumerate(self.lengths) if length >= first), last),
            min(1, last),
        ]
        self._best = self._now = self.lengths.index(max(start, least))
        # A first length that no trial has chosen is compared with none before anything else, if few drafts hold.
        self._is_unproved = self._best > 0
        # The rate of the best length just before a trial, and the step in which each length was tried last beside it.
        self._rate, self._tried_at = 0.0, dict[int, int]()
        self._step, self._next_trial, self._batch = 0, 0, 1
        self._settling = self._settling_steps = settling
        self._window = deque[tuple[int, float]](maxlen=2 * _MOST)
        self._trial_tokens, self._lost_s, self._total_s = 0, 0.0, 0.0
        self._settling_s = self._usual_s = 0.0

    def __call__(self) -> int:
        """The number of drafts for an iteration that begins now."""
        return self.lengths[self._now]

    @property
    def is_measuring(self) -> bool:
        """Whether the rate of the length in use is not known yet: only steps without prompts tell it."""
        return self._now != self._best or len(self._window) < _FEWEST

    def note_step(self, tokens: int, seconds: float, num_samples: int, *, has_prompts: bool) -> None:
        """A step has taken these seconds and committed `tokens` of `num_samples` samples. Steps with prompts say nothing."""
        self._step += 1
        self._total_s += seconds
        if has_prompts:
            self._settling = max(self._settling - 1, 0)
            return
        self._trial_tokens += tokens
        if self._settling:
            self._settling -= 1
            self._settling_s += min(seconds, _CATCH_UP * self._usual_s)
            return
        if not 1.0 / _OTHER_BATCH <= num_samples / self._batch <= _OTHER_BATCH:
            self._tried_at, self._batch, self._lost_s, self._total_s = {}, num_samples, 0.0, 0.0
            self._use(self._best)
            return
        self._window.append((tokens, seconds))
        enough = max(_FEWEST, min(_MOST, ceil(_ITERATIONS / num_samples)))
        if self._now == self._best:
            if len(self._window) >= enough:
                self._rate = self._measured(2 * enough)
                self._usual_s = median(taken for _, taken in self._window)
                self._try()
            return
        steps, ratio = len(self._window), self._measured(2 * enough) / self._rate
        doubt = 2.0 / sqrt(steps * num_samples)
        # Where an iteration takes two forwards, tokens come in every other step.
        is_slower = steps % 2 == 0 and ratio < 1.0 - doubt
        if steps >= 2 * enough or is_slower or (steps >= enough and ratio > _MARGIN + doubt):
            self._judge(ratio)

    def _measured(self, count: int) -> float:
        """The tokens per second of the last `count` steps."""
        steps = list(self._window)[-count:]
        longest = _HELD_UP * median(seconds for _, seconds in steps)
        return max(sum(tokens for tokens, _ in steps), 1e-9) / max(sum(min(taken, longest) for _, taken in steps), 1e-9)

    def _try(self) -> None:
        """Try another length if it is time: one that was not tried lately at once, else the one that waits longest."""
        best, last = self._best, len(self.lengths) - 1
        others = self._firsts if best == 0 else [min(best + 1, last), best - 1, 0]
        if self._is_unproved:
            self._is_unproved = False
            if sum(tokens for tokens, _ in self._window) < _PLENTY * len(self._window) * self._batch:
                others.reverse()
        may_lose = self._lost_s <= _SHARE * self._total_s
        # A shorter length is tried once in any case: a longer one may have won by chance.
        new = [
            index
            for index in others
            if index != best
            and self._step - self._tried_at.get(index, -_FORGET_AFTER) >= _FORGET_AFTER
            and (may_lose or index < best)
        ]
        if new:
            self._use(new[0])
        elif may_lose and self._step >= self._next_trial and last:
            self._use(min((index for index in others if index != best), key=lambda index: self._tried_at[index]))

    def _judge(self, ratio: float) -> None:
        """End a trial with this ratio of rates: use its length if it was faster, else go back."""
        if ratio > (1.0 / _MARGIN if self._now == 0 else _MARGIN):
            self._tried_at[self._best], self._best = self._step, self._now
            return
        # Where drafts lose by far, fewer of them do not win.
        tried = range(1, self._now + 1) if self._best == 0 and ratio < _HOPELESS else (self._now,)
        self._tried_at |= dict.fromkeys(tried, self._step)
        self._lost_s += max(self._trial_tokens / self._rate * (1.0 / ratio - 1.0), 0.0)
        self._lost_s += max(self._settling_s - self._settling_steps * self._usual_s, 0.0)
        self._next_trial = self._step + _TRY_EVERY
        self._use(self._best)

    def _use(self, index: int) -> None:
        self._now, self._settling = index, self._settling_steps
        self._window.clear()
        self._trial_tokens, self._settling_s = 0, 0.0
