"""Chooses how many tokens each slot drafts (`k: auto`), and where a decoder has several ways to draft (`fastest`) by which one:
the same for all slots, by the measured tokens per second.

    step      1 .. 7      8 .. 14     15 .. 21    22 .. 24        then
    drafts    0           2           4           8               4, with a trial of 8, 2 or 0 now and then
    tokens/s  100         130         150         110

The lengths are 0 (plain decoding), 1, 2, 4, .. up to the most that the decoder allows. After each change the first steps do not
count: they verify drafts of the length before. A trial runs another length for a few steps: twice the drafts, half of them, or
none; or the first length of another way. If that was faster than the steps just before, it is used from then on. Neighbouring
steps are compared, since all rates change as texts grow and samples come and go. With few slots a trial tells little, so what
it says is weighed with all trials before it (`Evidence`). Trials stop while they have cost more than a
small share of the run's time, so a run in which drafts never pay is about as fast as plain decoding.

With coupled acceptance a length changes the cost of a text and never the text. Under the rejection rule it would, so `auto` is an
error there (common_settings.py, `DecoderChoice.check_sampling`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import median
from typing import Final

# How many drafts are tried first, and where they share a cost.
_FIRST, _SEVERAL = 2, 4
# Iterations that give a rate, and the fewest and most steps for them. A trial that is neither clearly faster nor slower takes
# twice as many.
_ITERATIONS, _FEWEST, _MOST = 64, 6, 32
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
# Steps are not comparable if more than this share of the batch, more samples than usual and more than a few have come meanwhile.
_RENEWED, _SOME = 0.25, 3
# The variance of the logarithm of an unknown rate, and what each iteration adds to that of a known one.
_UNKNOWN, _DRIFT = 0.25, 3e-7
# The share of the run's time that trials may lose; with one slot, where most of what they lose is chance, twice as much.
_SHARE: Final = 0.01
# A busy machine makes any step long: a step counts as at most this many median ones, and one in which a drafting model catches up
# as more.
_HELD_UP: Final = 2.0
_CATCH_UP: Final = 8.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft, by `name`, with `most` tokens at most. If it `shares_cost`, several drafts cost little more than one, so
    several are tried first. `least` drafts are none: an iteration of the decoder's baseline."""

    most: int
    least: int = 0
    shares_cost: bool = False
    name: str = "drafts"

    @property
    def lengths(self) -> list[int]:
        """The numbers of drafts that are tried, ascending: powers of two, and the most."""
        doubled = {1 << power for power in range(self.most.bit_length())}
        return sorted(length for length in doubled | {self.most} if length > self.least)


class Evidence:
    """What all trials so far tell of the choices' rates beside each other: a Kalman filter over the logarithms of `count` rates,
    which drift apart with the iterations."""

    def __init__(self, count: int) -> None:
        self._log_rates, self._variances = [0.0] * count, [_UNKNOWN] * count

    def age(self, iterations: int) -> None:
        self._variances = [min(one + _DRIFT * iterations, _UNKNOWN) for one in self._variances]

    def forget(self) -> None:
        """Let new trials decide: the batch or the texts are others."""
        self._variances = [_UNKNOWN] * len(self._variances)

    def learn(self, tried: int, best: int, ratio: float, variance: float) -> float:
        """Weigh a trial's ratio of two rates, and the variance of its logarithm, with what is known; returns the ratio by both.
        A trial that contradicts all before it by four standard deviations shows that the texts have changed."""
        if self._variances[tried] >= _UNKNOWN:
            self._log_rates[tried] = self._log_rates[best]
        error = log(max(ratio, 1e-3)) - self._log_rates[tried] + self._log_rates[best]
        if error**2 > 16.0 * (self._variances[tried] + self._variances[best] + variance):
            self.forget()
        total = self._variances[tried] + self._variances[best] + variance
        for index, sign in ((tried, 1.0), (best, -1.0)):
            self._log_rates[index] += sign * self._variances[index] / total * error
            self._variances[index] *= 1.0 - self._variances[index] / total
        return exp(self._log_rates[tried] - self._log_rates[best])

    def may_win(self, index: int, best: int) -> bool:
        """Whether a choice may be as fast as the best one, by three standard deviations."""
        gap, variance = self._log_rates[index] - self._log_rates[best], self._variances[index]
        return variance >= _UNKNOWN or gap + 3.0 * sqrt(variance + self._variances[best]) > 0.0


class AutoLength:
    """How many drafts an iteration may have, and by which `way`: decoders call it, and the engine tells it what steps took.

    An iteration with `least` drafts must be that of the decoder's baseline; the first ones have `start`. The first `settling`
    steps after a change do not count: one that verifies drafts of the length before, and one in which a drafting model catches
    up. The number and the way change in `note_step` alone.
    """

    def __init__(self, *ways: Way, start: int = 0, settling: int = 1) -> None:
        # A choice is an index into these: 0 drafts nothing, then come the lengths of the first way, of the second ..
        self.lengths, self._way_of, self._ladders = [min(way.least for way in ways)], [0], list[list[int]]()
        self._names = [way.name for way in ways]
        for number, way in enumerate(ways):
            self._ladders.append([0, *range(len(self.lengths), len(self.lengths) + len(way.lengths))])
            self.lengths += way.lengths
            self._way_of += [number] * len(way.lengths)
        # Of each way the choice with which it is tried, and a smaller one.
        self._firsts = [self._first_of(ladder, way) for ladder, way in zip(self._ladders, ways, strict=True)]
        self._best = self._now = self._next = self.lengths.index(max(start, self.lengths[0]))
        self._is_held = False
        # A first length that no trial has chosen is compared with none before anything else, if few drafts hold.
        self._is_unproved = self._best > 0
        self._evidence = Evidence(len(self.lengths))
        # The rate of the best length just before a trial, and the step in which each length was tried last beside it.
        self._rate, self._rate_doubt, self._tried_at = 0.0, 0.0, dict[int, int]()
        self._step, self._next_trial, self._batch = 0, 0, 1
        self._settling = self._settling_steps = settling
        self._window = deque[tuple[int, float]](maxlen=2 * _MOST)
        self._trial_tokens, self._lost_s, self._total_s = 0, 0.0, 0.0
        self._settling_s = self._usual_s = 0.0
        # The samples that came since the steps that are compared, and in all; and when these steps began.
        self._num_new = self._all_new = self._since = 0

    @property
    def shown(self) -> str:
        """What may be chosen, for people."""
        ways = (
            f"{name} up to {self.lengths[ladder[-1]]}" for name, ladder in zip(self._names, self._ladders, strict=True)
        )
        return f"{', '.join(ways)}, or none"

    def _first_of(self, ladder: list[int], way: Way) -> list[int]:
        least = _SEVERAL if way.shares_cost else _FIRST
        return [
            next((index for index in ladder if self.lengths[index] >= least), ladder[-1]),
            ladder[min(1, len(ladder) - 1)],
        ]

    def __call__(self) -> int:
        """The number of drafts for an iteration that begins now."""
        return self.lengths[self._now]

    @property
    def way(self) -> int:
        """The number of the way to draft for such an iteration, if it drafts at all."""
        return self._way_of[self._now]

    @property
    def name(self) -> str:
        """What such an iteration is called in the figures of a run. Earlier runs' drafts are as long as they foretell well."""
        name = self._names[self.way] if self._now else "none"
        return name if name in {"none", "run"} else f"{name} {self()}"

    def hold(self, *, held: bool) -> None:
        """Whether a change has to wait: while a forward runs unread, asks that follow it were formed by the present choice."""
        self._is_held = held
        self._now = self._now if held else self._next

    @property
    def stays_plain(self) -> bool:
        """Whether nothing drafts, and nothing is to be tried next."""
        return self._now == self._next == 0

    @property
    def is_measuring(self) -> bool:
        """Whether the rate of the length in use is not known yet: only steps without prompts tell it."""
        return self._now != self._best or len(self._window) < _FEWEST

    def note_step(self, tokens: int, seconds: float, num_samples: int, num_prompts: int = 0) -> None:
        """A step has taken these seconds and committed `tokens` of `num_samples` samples. Steps with prompts say nothing; where
        many short texts have come at once, the steps before say nothing, either."""
        self._step += 1
        self._total_s += seconds
        self._evidence.age(num_samples)
        if num_prompts:
            self._settling = max(self._settling - 1, 0)
            self._num_new, self._all_new = self._num_new + num_prompts, self._all_new + num_prompts
            usual = self._all_new / self._step * (self._step - self._since)
            if self._num_new > max(_RENEWED * num_samples, _OTHER_BATCH * usual, _SOME):
                self._use(self._best)
            return
        self._trial_tokens += tokens
        if self._settling:
            self._settling -= 1
            self._settling_s += min(seconds, _CATCH_UP * self._usual_s)
            return
        if not 1.0 / _OTHER_BATCH <= num_samples / self._batch <= _OTHER_BATCH:
            self._tried_at, self._batch, self._lost_s, self._total_s = {}, num_samples, 0.0, 0.0
            self._evidence.forget()
            self._use(self._best)
            return
        self._window.append((tokens, seconds))
        enough = max(_FEWEST, min(_MOST, ceil(_ITERATIONS / num_samples)))
        if self._now == self._best:
            if len(self._window) >= enough:
                self._rate, self._rate_doubt = self._measured(2 * enough)
                self._usual_s = median(taken for _, taken in self._window)
                self._try()
            return
        rate, variance = self._measured(2 * enough)
        steps, ratio = len(self._window), rate / self._rate
        # Few steps show too little of how their tokens vary: at least as much as their mean.
        variance = max(variance + self._rate_doubt, 1.0 / (steps * num_samples))
        doubt = 2.0 * sqrt(variance)
        # Where an iteration takes two forwards, tokens come in every other step.
        is_clear = steps % 2 == 0 and (ratio < 1.0 - doubt or (ratio > _MARGIN + doubt and steps >= _FEWEST))
        if steps >= 2 * enough or is_clear:
            # Neighbouring steps differ by other things than drafts, too.
            variance += (_MARGIN - 1.0) ** 2
            self._judge(self._evidence.learn(self._now, self._best, ratio, variance))

    def _measured(self, count: int) -> tuple[float, float]:
        """The tokens per second of the last `count` steps, and the variance of the tokens' mean, over its square."""
        steps = list(self._window)[-count:]
        longest = _HELD_UP * median(seconds for _, seconds in steps)
        tokens = max(sum(tokens for tokens, _ in steps), 1e-9)
        spread = sum((len(steps) * one / tokens - 1.0) ** 2 for one, _ in steps) / (len(steps) * max(len(steps) - 1, 1))
        return tokens / max(sum(min(taken, longest) for _, taken in steps), 1e-9), spread

    def _try(self) -> None:
        """Try another choice if it is time: one that was not tried lately at once, else the one that waits longest."""
        best = self._best
        others = [index for index in self._others() if self._evidence.may_win(index, best)]
        if self._is_unproved:
            self._is_unproved = False
            if sum(tokens for tokens, _ in self._window) < _PLENTY * len(self._window) * self._batch:
                others.reverse()
        may_lose = self._lost_s <= _SHARE * (1.0 + 1.0 / self._batch) * self._total_s
        # A shorter length is tried once in any case: a longer one may have won by chance.
        new = [
            index
            for index in others
            if self._step - self._tried_at.get(index, -_FORGET_AFTER) >= _FORGET_AFTER
            and (may_lose or self.lengths[index] < self.lengths[best])
        ]
        if new:
            self._use(new[0])
        elif may_lose and self._step >= self._next_trial and others:
            self._use(min(others, key=lambda index: self._tried_at[index]))

    def _others(self) -> list[int]:
        """The choices that may be tried beside the best one, the most promising first."""
        firsts = [first for firsts in zip(*self._firsts, strict=True) for first in firsts]
        if self._best == 0:
            return [index for index in firsts if index]
        ladder, way = self._ladders[self._way_of[self._best]], self._way_of[self._best]
        at = ladder.index(self._best)
        near = [ladder[min(at + 1, len(ladder) - 1)], ladder[at - 1], 0]
        others = [firsts[0] for number, firsts in enumerate(self._firsts) if number != way]
        return [index for index in [*near, *others] if index != self._best]

    def _judge(self, ratio: float) -> None:
        """End a trial with this ratio of rates: use its choice if it was faster, else go back."""
        ladder = self._ladders[self._way_of[self._now]]
        if ratio > (1.0 / _MARGIN if self._now == 0 else _MARGIN):
            self._tried_at[self._best], self._best = self._step, self._now
            if self._now:
                self._firsts[self._way_of[self._now]][0] = self._now
            return
        # Where drafts lose by far, fewer of them do not win.
        is_hopeless = self._best == 0 and ratio < _HOPELESS
        tried = ladder[1 : ladder.index(self._now) + 1] if is_hopeless else (self._now,)
        self._tried_at |= dict.fromkeys(tried, self._step)
        self._lost_s += max(self._trial_tokens / self._rate * (1.0 / ratio - 1.0), 0.0)
        self._lost_s += max(self._settling_s - self._settling_steps * self._usual_s, 0.0)
        self._next_trial = self._step + _TRY_EVERY
        self._use(self._best)

    def _use(self, index: int) -> None:
        self._next, self._settling = index, self._settling_steps
        self._now = self._now if self._is_held else index
        self._num_new, self._since = 0, self._step
        self._window.clear()
        self._trial_tokens, self._settling_s = 0, 0.0
