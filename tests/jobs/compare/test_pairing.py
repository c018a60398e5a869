"""Pairs of samples: partners, noise, what they are worth by hand, and comparisons of made-up runs whose truth is known.

Row g of a run has a difficulty u, its samples have noise e: latent values u + e, both from the standard normal distribution.
Coupled runs have one u and noises with the correlation 0.8; the others have nothing in common.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from draftmill.jobs.compare import statistics
from draftmill.jobs.compare.comparison import MetricFigure, compare_rows
from draftmill.jobs.compare.pairing import Pairing, SharedNoise, Sizes, pair, pairing_of, shared_noise, sizes_for
from draftmill.jobs.compare.rows import COUNTS, RunRows
from draftmill.jobs.compare.runs import FinishedRun, open_run
from draftmill.jobs.compare.statistics import Interval
from draftmill.jobs.results.passes import Pass
from draftmill.storage.stores.store import Place
from tests.jobs.compare.made_runs import row, write_run
from tests.jobs.compare.test_same_work import COMPLETE, RANDOM, SCORE, plan


def rows(keys: list[tuple[str, int]], failed=()) -> RunRows:
    """A run with these (id, sample), whose digests number them by hash."""
    ids = [name for name, _ in keys]
    cut = len(ids) // 3  # several chunks, as from several unit files
    return RunRows(
        ids=pa.chunked_array([ids[:cut], ids[cut:]], type=pa.string()),
        sample_N=np.array([sample for _, sample in keys], np.int32),
        ok_N=np.array([key not in failed for key in keys], bool),
        key_N=np.arange(len(keys), dtype=np.uint64),
        digest_N=np.array([hash(key) % 2**64 for key in keys], np.uint64),
        counts={"prompt_tokens": np.full(len(keys), 5, np.int32)},
        device_s_N=np.zeros(len(keys)),
        metrics={},
    )


def expected(first: list, second: list, failed: set, other_failed: set) -> list:
    return [key for key in first if key in set(second) and key not in failed | other_failed]


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_those_of_a_plain_loop(seed):
    rng = random.Random(seed)
    every = [(f"row {number}", sample) for number in range(12) for sample in range(rng.randint(1, 3))]
    first, second = rng.sample(every, rng.randint(0, len(every))), rng.sample(every, rng.randint(0, len(every)))
    failed = set(rng.sample(first, len(first) // 4))
    other_failed = set(rng.sample(second, len(second) // 4))
    found = pair(one := rows(first, failed), other := rows(second, other_failed))
    kept = expected(first, second, failed, other_failed)
    assert [first[place] for place in found.first_P] == kept == [second[place] for place in found.second_P]
    assert (one.digest_N[found.first_P] == other.digest_N[found.second_P]).all()
    both = set(first) & set(second)
    assert found.both == len(both) and found.num_compared == len(kept)
    assert (found.only_first, found.only_second) == (len(set(first) - both), len(set(second) - both))
    assert found.failed_first == len(both & failed - other_failed)
    assert found.failed_second == len(both & other_failed - failed)
    assert found.failed_both == len(both & failed & other_failed)
    names = [name for name, _ in kept]
    assert found.num_rows == len(set(names)) and found.clustered == (len(set(names)) < len(names))
    assert len(set(zip(names, found.row_P, strict=True))) == found.num_rows


STEPWISE = {"model": {"path": "builtin:mdm-tiny"}, "decoder": {"kind": "stepwise"}}
REJECTION = {"sampling": {"temperature": 1.0, "acceptance": "rejection"}}
KEPT = {"kind": "stepwise", "draws": "kept"}
NOISE: dict[str, tuple[dict, dict, str | None]] = {
    "other temperatures": (COMPLETE, {"sampling": {"temperature": 0.5}}, None),
    "a lossless decoder": (COMPLETE, {"decoder": {"kind": "speculative"}}, None),
    "one rule for one decoder": (RANDOM | REJECTION, {"decoder": {"kind": "assd", "k": 3}}, None),
    "masks of estimated scores": (SCORE, {"sampling": {"temperature": 0.0}}, None),
    "no temperature": (COMPLETE, {"sampling": {"temperature": 0.0}}, "b draws nothing at temperature 0"),
    "rows have temperatures": (
        COMPLETE,
        {"sampling": {"temperature": 0.0}, "input": {"path": "r", "columns": {"temperature": "t"}}},
        None,
    ),
    "other tokenizers": (COMPLETE, {"tokenizer": "u"}, "the tokenizers differ, and noise belongs to token ids"),
    "another rule": (
        RANDOM,
        REJECTION,
        "with sampling.acceptance 'rejection' each decoder draws from noise of its own",
    ),
    "other draws": (COMPLETE | STEPWISE, {"decoder": KEPT}, "one of the decoders draws anew in each step"),
    "scores": (
        {"task": {"kind": "score"}, "model": COMPLETE["model"], "decoder": COMPLETE["decoder"]},
        {"model": {"path": "builtin:ar-micro"}},
        "scores are computed without noise",
    ),
}


@pytest.mark.parametrize("case", NOISE)
def test_settings_decide_whether_runs_share_their_noise(case):
    base, changes, lost = NOISE[case]
    columns = rows([("a", 0), ("b", 0), ("c", 0)])
    first, second = (
        FinishedRun(name, (Pass(1, one.store, one, None),))
        for name, one in {"a": plan(base), "b": plan(base, **changes)}.items()
    )
    found = shared_noise(first, columns, second, columns, pair(columns, columns))
    assert found == (SharedNoise(3) if lost is None else SharedNoise(0, lost))


def test_pairs_share_their_noise_by_equal_keys_and_lengths():
    first = rows([(name, 0) for name in "abcdef"])
    second = replace(
        first,
        key_N=np.array([0, 1, 12, 13, 4, 5], np.uint64),
        counts={"prompt_tokens": np.array([5, 5, 5, 9, 9, 5], np.int32)},
    )
    run = FinishedRun("a", (Pass(1, (one := plan(COMPLETE)).store, one, None),))
    assert shared_noise(run, first, run, second, pair(first, second)) == SharedNoise(
        3, "2 have other seeds and 1 have prompts of other lengths, and noise belongs to positions"
    )


def test_the_worth_of_four_pairs_is_that_of_the_formula():
    """Variances (of 3 degrees of freedom): 1/3 before, 1/4 now, 1/4 of the difference; so 7/3."""
    before, now = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    found = pairing_of(before, now, np.arange(4), Interval(0.25, 0.0, 0.75))
    assert (found.rows, found.samples) == (4, 1)
    assert found.worth == pytest.approx(7 / 3) and found.variance == pytest.approx(1 / 16)
    assert found.correlation == pytest.approx(0.5 / 0.75**0.5)
    assert found.unpaired is not None and found.unpaired.low is not None and found.unpaired.high is not None
    theirs = stats.ttest_ind(now, before, equal_var=False).confidence_interval(0.95)
    assert found.unpaired.low == pytest.approx(theirs.low)
    assert found.unpaired.high == pytest.approx(theirs.high)
    assert found.correlation_within is found.worth_of_noise is found.between is None, "a row has one sample"


def test_the_variances_of_three_rows_with_two_pairs_are_those_of_the_formula():
    """Differences 0 2, 1 1, 3 5: mean squares 4/3 in rows, 6 between rows. Deviations of both runs in rows: the product is 2."""
    before = np.array([1.0, 1.0, 0.0, 2.0, 1.0, 1.0])
    now = np.array([1.0, 3.0, 1.0, 3.0, 4.0, 6.0])
    found = pairing_of(before, now, np.array([4, 4, 7, 7, 9, 9]), Interval(2.0, 1.0, 3.0))
    assert (found.rows, found.samples) == (3, 2) and found.within == pytest.approx(4 / 3)
    assert found.between == pytest.approx((6 - 4 / 3) / 2)
    assert found.variance == pytest.approx(1.0), "of a mean of three rows' means 1, 1, 4"
    assert found.worth_of_noise == pytest.approx(1 + 2 * (2 / 3) / 6)
    assert found.correlation_within == pytest.approx(2 / (2 * 6) ** 0.5)


@pytest.mark.parametrize("interval", [Interval(0.5, 0.5, 0.5), Interval(0.5)])
def test_differences_that_do_not_vary_have_no_worth(interval):
    found = pairing_of(np.array([0.1, 0.3]), np.array([0.6, 0.8]), np.arange(2), interval)
    assert found == Pairing(rows=2, samples=1)


def test_one_value_a_row_says_nothing_of_the_noise():
    before, now = np.repeat([0.1, 0.7, 0.3], 3), np.repeat([0.2, 0.3, 0.9], 3)
    found = pairing_of(before, now, np.repeat(np.arange(3), 3), Interval(0.1, 0.0, 0.2))
    assert found.worth is not None and found.worth_of_noise is found.between is found.correlation_within is None


WIDTH = 2 * 1.959963984540054 * 0.1
"""Of a mean with the standard error 0.1."""


@pytest.mark.parametrize(
    ("pilot", "expected"),
    [
        (
            Pairing(100, 2, variance=0.03, between=2.5, within=1.0),
            Sizes(WIDTH, {1: 350, 2: 300}, None, WIDTH * 2.5**0.5),
        ),
        (Pairing(100, 2, variance=0.01, between=0.5, within=1.25), Sizes(WIDTH, {1: 175, 2: 113}, 3, WIDTH * 0.5**0.5)),
        (Pairing(100, 4, variance=0.0001, between=0.0, within=0.04), Sizes(WIDTH, {1: 20, 4: 20}, 1, 0.0)),
        (
            Pairing(100, 1, variance=0.0249),
            Sizes(WIDTH, {1: 249}, lacking="needs a pilot with several samples a row, which vary"),
        ),
        (Pairing(19, 1, variance=1.0), Sizes(WIDTH, lacking="19 rows with it in both runs; allowed: 20 or more")),
        (Pairing(100, 1), Sizes(WIDTH, lacking="the differences do not vary")),
    ],
)
def test_sizes_are_those_of_the_formula(pilot, expected):
    found = sizes_for(WIDTH, pilot)
    assert found == replace(expected, narrowest=found.narrowest)
    assert found.narrowest == (None if expected.narrowest is None else pytest.approx(expected.narrowest, abs=0.002))


SHIFT = 0.25
CUT = 0.3
Runs = tuple[np.ndarray, np.ndarray]
"""The values of both runs, [rows, samples] each."""


def latent(rng: np.random.Generator, rows: int, samples: int, *, coupled: bool, correlation: float = 0.8) -> Runs:
    difficulty, noise = rng.normal(size=(2, rows, 1)), rng.normal(size=(2, rows, samples))
    if coupled:
        difficulty[1] = difficulty[0]
        noise[1] = correlation * noise[0] + (1 - correlation**2) ** 0.5 * noise[1]
    return difficulty[0] + noise[0], difficulty[1] + noise[1] + SHIFT


def pass_at_2(values: np.ndarray) -> np.ndarray:
    """The unbiased estimate of each row, for each of its samples."""
    n, failed = values.shape[1], (values < CUT).sum(axis=1, keepdims=True)
    return np.repeat(1 - failed * (failed - 1) / (n * (n - 1)), n, axis=1)


def true_pass_at_2(shift: float) -> float:
    places, weights = np.polynomial.hermite_e.hermegauss(60)
    return float((weights * (1 - stats.norm.cdf(CUT - shift - places) ** 2)).sum() / weights.sum())


# Samples of a row, the metric of a latent value, and its mean for a latent mean.
METRICS: dict[str, tuple] = {
    "zeros and ones": (1, lambda x: (x > CUT).astype(float), lambda m: float(stats.norm.cdf((m - CUT) / 2**0.5))),
    "zeros and ones, 4 a row": (4, lambda x: (x > CUT).astype(float), lambda m: stats.norm.cdf((m - CUT) / 2**0.5)),
    "shares, 4 a row": (4, stats.norm.cdf, lambda m: float(stats.norm.cdf(m / 3**0.5))),
    "pass@2 of 4": (4, pass_at_2, true_pass_at_2),
    "log-probabilities": (1, lambda x: -np.exp(x / 2), lambda m: -float(np.exp(m / 2 + 0.25))),
}
CASES = [(name, coupled) for name in METRICS for coupled in (True, False)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return open_run(Place(str(write_run(tmp_path_factory.mktemp("simulated") / "run", [row(0)], units=1))))


def columns(values: np.ndarray, *, apart: bool = False) -> RunRows:
    """A run with these values; `apart`: a planted fault, each sample passes for a row of its own."""
    rows, samples = (values.size, 1) if apart else values.shape
    zeros = np.zeros(values.size, np.int32)
    return RunRows(
        ids=pa.chunked_array([pa.array(np.repeat(np.arange(rows), samples)).cast(pa.string())]),
        sample_N=np.tile(np.arange(samples, dtype=np.int32), rows),
        ok_N=np.ones(values.size, bool),
        key_N=np.arange(values.size, dtype=np.uint64),
        digest_N=np.zeros(values.size, np.uint64),
        counts=dict.fromkeys(COUNTS, zeros),
        device_s_N=np.zeros(values.size),
        metrics={"m": values.ravel()},
    )


def compared(run: FinishedRun, before: np.ndarray, now: np.ndarray, *, apart: bool = False) -> MetricFigure:
    return compare_rows(run, columns(before, apart=apart), run, columns(now, apart=apart), "tokens").metrics["m"]


def hits(run: FinishedRun, case: tuple[str, bool], times: int, *, rows: int = 200, fault: str = "") -> int:
    """In how many comparisons the interval with pairs holds the true difference."""
    (samples, metric, mean), coupled = METRICS[case[0]], case[1]
    truth, rng, held = mean(SHIFT) - mean(0.0), np.random.default_rng(7), 0
    for _ in range(times):
        before, now = (metric(values) for values in latent(rng, rows, samples, coupled=coupled))
        now = now[::-1] if fault == "pairs shuffled" else now
        held += compared(run, before, now, apart=fault == "clusters ignored").difference.holds(truth)
    return held


@pytest.fixture
def few_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 flips in place of 9,999: no test here reads p."""
    monkeypatch.setattr(statistics, "sign_flip_p", partial(statistics.sign_flip_p, flips=9))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("few_flips")
def test_paired_intervals_hold_the_truth_as_often_as_they_say(run, case):
    """10,000 comparisons: the share has a standard error of 0.22 %, so one of exactly 95 % is outside once in 200,000 times."""
    assert hits(run, case, 10_000) / 10_000 == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("few_flips")
def test_paired_intervals_hold_the_truth(run, case):
    """Of 150 comparisons fewer than 131 or all hold it with a probability of 7e-4 at 95 %."""
    assert 131 <= hits(run, case, 150) < 150


@pytest.mark.parametrize(
    ("fault", "metric"), [("pairs shuffled", "zeros and ones"), ("clusters ignored", "shares, 4 a row")]
)
@pytest.mark.usefixtures("few_flips")
def test_a_fault_in_the_pairs_shows_in_the_coverage(run, fault, metric):
    """The same bounds as above find both: shuffled pairs give wide intervals, samples that pass for rows narrow ones."""
    assert not 131 <= hits(run, (metric, fault == "pairs shuffled"), 150, fault=fault) < 150


@pytest.mark.parametrize(
    ("samples", "coupled", "worth", "alone"), [(1, True, 4, None), (4, True, 10, 2), (4, False, 1, 1)]
)
def test_pairs_are_worth_the_ratio_of_the_variances(samples, coupled, worth, alone):
    """Latent values with noises of the correlation r: the worth is (2 + 2 / n) / (2 (1 - r) / n), of noise alone 1 / (1 - r).

    The ratio from 20,000 rows has a standard error below 2 %.
    """
    before, now = latent(np.random.default_rng(3), 20_000, samples, coupled=coupled, correlation=0.5)
    row_P = np.repeat(np.arange(20_000), samples)
    found = pairing_of(before.ravel(), now.ravel(), row_P, Interval(SHIFT, 0.0, 0.5))
    assert found.worth == pytest.approx(worth, rel=0.08)
    assert found.worth_of_noise == (None if alone is None else pytest.approx(alone, rel=0.08))
    if coupled:
        assert found.correlation == pytest.approx(0.75, abs=0.02)
        shuffled = pairing_of(before.ravel(), now[::-1].ravel(), row_P, Interval(SHIFT, 0.0, 0.5))
        assert shuffled.worth == pytest.approx(1, rel=0.08), "a planted fault is found"
    if samples > 1:
        apart = pairing_of(before.ravel(), now.ravel(), np.arange(len(row_P)), Interval(SHIFT, 0.0, 0.5))
        assert coupled == (apart.worth != pytest.approx(worth, rel=0.08)), (
            "another one is found where rows have something in common"
        )


@pytest.mark.parametrize("metric", ["zeros and ones, 4 a row", "shares, 4 a row", "log-probabilities", "pass@2 of 4"])
@pytest.mark.usefixtures("few_flips")
def test_planned_sizes_give_the_planned_width(run, metric):
    """A pilot of 4,000 rows knows the variance within 4 %, so the width within 2 %; widths of 15 runs are averaged."""
    (samples, value, _), rng = METRICS[metric], np.random.default_rng(5)

    def made(rows: int, of_each: int) -> MetricFigure:
        before, now = (value(values) for values in latent(rng, rows, of_each, coupled=True))
        return compared(run, before, now)

    def width_of(figure: MetricFigure) -> float:
        return (figure.difference.high or 0.0) - (figure.difference.low or 0.0)

    pilot = made(4000, samples)
    width = 2 * 1.96 * (pilot.pairing.variance * 4000 / 250) ** 0.5
    sizes = sizes_for(width, pilot.pairing)
    assert sizes.rows[samples] in (250, 251)
    assert list(sizes.rows) == ([1, 4] if sizes.narrowest is not None else [samples])
    for of_each, rows in sizes.rows.items():
        assert np.mean([width_of(made(rows, of_each)) for _ in range(15)]) == pytest.approx(width, rel=0.06)


def test_planned_samples_give_the_planned_width_with_the_same_rows():
    """Variances of a difference: none between rows, 0.4 in a row. 100 rows need 0.4 / (100 * wanted variance) samples each."""
    before, now = latent(np.random.default_rng(6), 4000, 2, coupled=True)
    pilot = pairing_of(before.ravel(), now.ravel(), np.repeat(np.arange(4000), 2), Interval(SHIFT, 0.0, 0.5))
    sizes = sizes_for(0.04, replace(pilot, rows=100))
    assert sizes.samples == pytest.approx(0.4 / 100 / (0.02 / 1.96) ** 2, rel=0.1)
    before, now = latent(np.random.default_rng(7), 100, sizes.samples or 0, coupled=True)
    again = pairing_of(
        before.ravel(), now.ravel(), np.repeat(np.arange(100), sizes.samples or 0), Interval(SHIFT, 0.0, 0.5)
    )
    assert 2 * 1.96 * again.variance**0.5 == pytest.approx(0.04, rel=0.2)
