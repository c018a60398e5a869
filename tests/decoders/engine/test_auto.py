"""The number of drafts for all slots (`k: auto`), in worlds whose costs and acceptances are known: no clock, no model."""

import numpy as np
import pytest

from draftmill.decoders.engine.auto import AutoLength, Way

MOST = 16
LENGTHS = (0, 1, 2, 4, 8, 16)


class World:
    """Slots whose drafts are accepted at given rates; a step takes `base`, and `per_row` seconds for each row after `free`.

    A `drafter` takes the first number of seconds for each draft position, the second for each draft; a `shared` one takes the
    first number for each step with drafts. A step verifies what was drafted by the length before its predecessor ended.
    """

    def __init__(
        self,
        rates: list[float],
        *,
        base: float = 1.0,
        per_row: float = 0.05,
        free: int = 0,
        drafter: tuple[float, float] = (0.0, 0.0),
        shared: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        self.rates, self.base, self.per_row, self.free = np.array(rates), base, per_row, free
        self.drafter, self.shared, self.rng = drafter, shared, np.random.default_rng(seed)
        self.auto = AutoLength(Way(MOST, shares_cost=shared != (0.0, 0.0)), settling=2 if drafter != (0.0, 0.0) else 1)
        self.drafted = 0

    def noisy(self, seconds: float) -> float:
        """Seconds as a clock measures them: up to some tenths more, and now and then five times as much."""
        return seconds * (1 + 0.1 * abs(self.rng.standard_normal())) * (5 if self.rng.random() < 0.01 else 1)

    def step(self, length: int | None = None, *, held_up: float = 1.0) -> tuple[int, float]:
        """The tokens and the seconds of a step with this length, or the chosen one."""
        num, count = len(self.rates), self.drafted if length is None else length
        seconds = self.base + self.per_row * max(num * (1 + count) - self.free, 0)
        seconds += count * (self.drafter[0] + self.drafter[1] * num)
        seconds += bool(count) * self.shared[0] + self.shared[1] * count * num
        accepted = (self.rng.random((num, MOST)) < self.rates[:, None]).cumprod(1).sum(1)
        tokens = int(num + np.minimum(accepted, count).sum())
        self.drafted = self.auto()
        self.auto.note_step(tokens, held_up * self.noisy(seconds), num)
        return tokens, seconds

    def run(self, num_steps: int, length: int | None = None) -> float:
        """Tokens per second."""
        return float(np.divide(*np.sum([self.step(length) for _ in range(num_steps)], axis=0)))

    def mean_length(self, num_steps: int) -> float:
        """The average number of drafts over some steps."""
        lengths = []
        for _ in range(num_steps):
            self.step()
            lengths.append(self.drafted)
        return float(np.mean(lengths))


HOPELESS: dict[str, dict] = {
    "dear rows": {"rates": [0.3] * 64, "per_row": 0.1},
    "dear drafter": {"rates": [0.8] * 16, "drafter": (0.8, 0.03)},
    "wrong drafts": {"rates": [0.02] * 4, "per_row": 0.02},
    "wrong drafter": {"rates": [0.1] * 16, "drafter": (0.2, 0.01)},
    "dear windows": {"rates": [0.8] * 16, "shared": (3.0, 0.01)},
}


@pytest.mark.parametrize("case", HOPELESS)
def test_where_drafting_does_not_pay_little_is_lost_on_it(case):
    plain, auto = World(**HOPELESS[case]).run(1000, 0), World(**HOPELESS[case]).run(1000)
    assert auto > 0.975 * plain


WORTHWHILE: dict[str, dict] = {
    "one slot": {"rates": [0.8]},
    "cheap rows": {"rates": [0.8] * 16, "per_row": 0.01},
    "rows that are free at first": {"rates": [0.8] * 64, "per_row": 0.02, "free": 200},
    "a small drafter": {"rates": [0.8], "drafter": (0.1, 0.01)},
    "a small drafter in a batch": {"rates": [0.9] * 16, "per_row": 0.01, "drafter": (0.1, 0.002)},
    "windows that pay by their length": {"rates": [0.85] * 4, "per_row": 0.01, "shared": (1.3, 0.002)},
}


@pytest.mark.parametrize("case", WORTHWHILE)
def test_where_drafting_pays_it_is_nearly_as_fast_as_the_best_length(case):
    fixed = [World(**WORTHWHILE[case]).run(200, length) for length in LENGTHS]
    auto = np.mean([World(**WORTHWHILE[case], seed=seed).run(800) for seed in range(3)])
    assert auto > 1.15 * fixed[0]
    assert auto > 0.86 * max(fixed)


COPIES = {"cheap rows": (0.02, 12, 0.3), "some copies": (0.04, 12, 0.15), "few copies": (0.06, 6, 0.1)}
"""Seconds a row, the mean length of a copied run in tokens, and the share of iterations in which one begins."""


@pytest.mark.parametrize("case", COPIES)
def test_one_slot_whose_text_copies_now_and_then_ends_near_the_best_length(case):
    # An iteration has one token or many, so that no single trial tells neighbouring lengths apart.
    auto = [copies(*COPIES[case], seed=seed, auto=AutoLength(Way(MOST))) for seed in range(3)]
    assert np.mean(auto) > 0.93 * max(copies(*COPIES[case], seed=0, length=length) for length in LENGTHS)


def copies(
    per_row: float, mean: int, share: float, *, seed: int, length: int = 0, auto: AutoLength | None = None
) -> float:
    """Tokens per second of 20,000 iterations in one slot, with a length or the chosen one."""
    rng, tokens, seconds, left = np.random.default_rng(seed), 0, 0.0, 0
    for begins, run, chance, jitter in zip(
        rng.random(20_000) < share,
        1 + rng.exponential(mean, 20_000).astype(int),
        rng.geometric(0.8, 20_000) - 1,
        rng.normal(0.0, 0.06, 20_000),
        strict=True,
    ):
        drafts = length if auto is None else auto()
        left = int(run) if left <= 0 and begins else left
        new = 1 + min(drafts, left if left > 0 else int(chance))
        left -= new if left > 0 else 0
        took = (1.0 + per_row * drafts) * float(np.exp(jitter))
        tokens, seconds = tokens + new, seconds + took
        if auto is not None:
            auto.note_step(new, took, 1)
    return tokens / seconds


def test_drafting_begins_and_ends_when_its_drafts_change():
    world = World([0.02] * 8, per_row=0.02)
    world.run(300)
    assert world.mean_length(64) < 0.5
    world.rates[:] = 0.9
    world.run(400)
    assert world.mean_length(64) > 2
    world.rates[:] = 0.02
    world.run(600)
    assert world.mean_length(64) < 0.5


def test_a_smaller_batch_is_measured_anew():
    world = World([0.6] * 64, base=5.0, per_row=0.2)
    world.run(1000)
    assert world.mean_length(64) < 0.5
    world.rates = world.rates[:4]
    world.run(200)
    assert world.mean_length(32) > 1.5


def test_a_step_that_was_held_up_changes_no_choice():
    calm, shaken = World([0.8] * 16, per_row=0.01), World([0.8] * 16, per_row=0.01)
    for number in range(300):
        calm.step()
        shaken.step(held_up=1000.0 if number % 20 == 5 else 1.0)
    assert shaken.mean_length(32) > 0.4 * calm.mean_length(32) > 1


def test_steps_with_prompts_change_nothing():
    auto = AutoLength(Way(MOST))
    for _ in range(200):
        auto.note_step(100, 1e-6, 4, num_prompts=1)
    assert auto() == 0 and auto.is_measuring


@pytest.mark.parametrize(
    ("most", "least", "lengths"),
    [(16, 0, [0, 1, 2, 4, 8, 16]), (16, 1, [1, 2, 4, 8, 16]), (7, 0, [0, 1, 2, 4, 7]), (1, 0, [0, 1]), (1, 1, [1])],
)
def test_lengths_double_up_to_the_most_that_is_allowed(most, least, lengths):
    auto, used = AutoLength(Way(most, least)), set[int]()
    for _ in range(500):
        used.add(auto())
        auto.note_step(1 + auto(), 1.0, 1)
    assert auto.lengths == lengths and used >= {least, most}


def test_drafts_that_share_a_cost_are_first_tried_together():
    auto, lengths = AutoLength(Way(MOST, shares_cost=True)), list[int]()
    for _ in range(100):
        auto.note_step(1, 1.0, 1)
        lengths.append(auto())
    assert next(filter(None, lengths)) == 4


def test_iterations_of_two_forwards_are_measured_as_wholes():
    # Every other step commits nothing, and the second one all tokens of the window.
    auto, drafted, drafts = AutoLength(Way(MOST, 1, shares_cost=True)), 1, False
    for _ in range(400):
        drafts = drafted > 1 and not drafts
        auto.note_step(0 if drafts else 16 * drafted, 1.0, 16)
        drafted = drafted if drafts else auto()
    assert auto() == MOST


@pytest.mark.parametrize(("held", "ends"), [(0.1, True), (9.0, False)], ids=["few drafts hold", "many drafts hold"])
def test_a_first_length_is_compared_with_none_unless_it_pays(held, ends):
    auto = AutoLength(Way(16), start=2)
    used = list[int]()
    for _ in range(20):
        used.append(auto())
        drafts = used[-1]
        auto.note_step(round(64 * (1 + (held if drafts else 0))), 1.0 + 0.2 * bool(drafts), 64)
    assert (0 in used) == ends
