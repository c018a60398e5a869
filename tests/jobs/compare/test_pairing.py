"""Pairs of samples: by (id, sample), with a count of all without a partner; their noise, and what they are worth, by hand."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from draftmill.jobs.compare.pairing import Pairing, SharedNoise, Sizes, pair, pairing_of, shared_noise, sizes_for
from draftmill.jobs.compare.rows import RunRows
from draftmill.jobs.compare.runs import FinishedRun
from draftmill.jobs.compare.statistics import Interval
from draftmill.jobs.results.passes import Pass
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
