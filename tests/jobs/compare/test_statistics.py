"""Intervals and tests of paired comparisons against scipy called directly, against known numbers, and by simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from draftmill.jobs.compare import statistics
from draftmill.jobs.compare.statistics import (
    Interval,
    grouped_sums,
    intervals_of,
    mcnemar_p,
    sign_flip_p,
    wilson,
)


def ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def width(interval: Interval) -> float:
    assert interval.low is not None and interval.high is not None
    return interval.high - interval.low


def data(rows: int = 80, seed: int = 5) -> np.ndarray:
    """Skewed numerators that depend on their denominators, [rows, 2]."""
    rng = np.random.default_rng(seed)
    below = rng.integers(1, 40, rows).astype(float)
    return np.stack([below * rng.lognormal(0, 0.8, rows), below], axis=1)


def test_intervals_of_means_are_those_of_scipys_t_test():
    values = data()[:, 0]
    (found,) = intervals_of(np.stack([values, np.ones(80)], axis=1), [ratio])
    theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


def test_intervals_are_the_same_every_time_and_for_each_statistic_alone():
    sums = data()
    both = intervals_of(sums, [ratio, lambda sums: sums[..., 0]])
    assert both == intervals_of(sums, [ratio, lambda sums: sums[..., 0]])
    assert both[0] == intervals_of(sums, [ratio])[0]


def test_many_rows_are_grouped_and_their_interval_stays_that_of_the_rows(monkeypatch):
    values = data(4000, seed=9)
    rows = np.arange(len(values))
    (alone,) = intervals_of(grouped_sums(values.T, rows), [ratio])
    monkeypatch.setattr(statistics, "GROUPS", 500)
    sums = grouped_sums(values.T, rows)
    (grouped,) = intervals_of(sums, [ratio])
    assert sums.shape == (500, 2) and sums.sum(axis=0) == pytest.approx(values.sum(axis=0))
    assert grouped.value == pytest.approx(alone.value)
    # 500 groups estimate the spread with a relative error of 1 / sqrt(1000), about 3 %; four times that is allowed.
    assert width(grouped) / width(alone) == pytest.approx(1, abs=0.13)


def test_samples_of_a_row_stay_together():
    """Copies of each row's value say nothing new: the interval is that of the rows alone."""
    values = data(50)
    rows = np.arange(50)
    once = intervals_of(grouped_sums(values.T, rows), [ratio])
    copied = intervals_of(grouped_sums(np.repeat(values, 4, axis=0).T, np.repeat(rows, 4)), [ratio])
    assert copied[0].low == pytest.approx(once[0].low) and copied[0].high == pytest.approx(once[0].high)
    apart = intervals_of(grouped_sums(np.repeat(values, 4, axis=0).T, np.arange(200)), [ratio])
    assert width(apart[0]) < 0.6 * width(once[0])


def test_intervals_contain_the_truth_as_often_as_they_say():
    """300 samples of 60 rows, level 0.95: fewer than 270 or all 300 hits have a probability below 1e-4 at 95 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        values = np.stack([rng.normal(0.2, 1.0, 60), np.ones(60)], axis=1)
        hits += intervals_of(values, [ratio])[0].holds(0.2)
    assert 270 <= hits < 300


def test_figures_that_are_not_defined_have_no_interval():
    (nothing,) = intervals_of(np.zeros((5, 2)), [ratio])
    assert np.isnan(nothing.value) and nothing.low is None and nothing.holds(3.0)
    assert intervals_of(np.array([[1.0, 2.0]]), [ratio]) == [Interval(0.5)]
    assert intervals_of(np.ones((7, 2)), [ratio]) == [Interval(1.0, 1.0, 1.0)]
    assert np.isnan(intervals_of(np.zeros((0, 2)), [ratio])[0].value)


def test_sign_flips_of_few_rows_are_exact():
    rng = np.random.default_rng(2)
    for size in (2, 5, 8):
        differences = rng.normal(0.6, 1.0, size)
        flips = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=size)]
        expected = np.mean([flip >= abs(differences.sum()) - 1e-12 for flip in flips])
        assert sign_flip_p(differences) == pytest.approx(expected)
        theirs = stats.permutation_test(
            (differences, np.zeros(size)), lambda x, y: (x - y).sum(), permutation_type="samples", n_resamples=np.inf
        )
        assert sign_flip_p(differences) == pytest.approx(theirs.pvalue)


def test_sign_flips_of_many_rows_agree_with_scipys_permutation_test():
    rng = np.random.default_rng(4)
    differences = rng.normal(0.04, 1.0, 300)
    theirs = stats.permutation_test(
        (differences, np.zeros(300)),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        n_resamples=9999,
        vectorized=True,
        rng=1,
        batch=500,
    ).pvalue
    assert 0.005 < theirs < 0.3
    # Two independent estimates from 9,999 resamples: their standard errors are below 0.004 here.
    assert sign_flip_p(differences) == pytest.approx(theirs, abs=0.02)
    assert sign_flip_p(differences) == sign_flip_p(differences)


def test_sign_flips_find_nothing_where_nothing_differs():
    assert sign_flip_p(np.zeros(10)) == 1.0
    assert sign_flip_p(np.array([])) == sign_flip_p(np.array([0.3])) == 1.0
    assert sign_flip_p(np.full(200, 0.5)) == pytest.approx(1 / 10_000)


def test_mcnemars_exact_test_has_the_known_value():
    assert mcnemar_p(12, 30) == pytest.approx(0.0079159, abs=5e-8)
    assert mcnemar_p(30, 12) == mcnemar_p(12, 30)
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 0) == pytest.approx(2 * 0.5**5)


def test_wilsons_interval_has_the_known_value():
    found = wilson(85, 100)
    assert (found.value, found.low, found.high) == pytest.approx((0.85, 0.76716, 0.90694), abs=5e-6)
    assert wilson(0, 10).low == 0.0 and np.isnan(wilson(0, 0).value)
