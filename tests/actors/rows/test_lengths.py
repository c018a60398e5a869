"""Finding the lengths of holes, against a model that is a table: the posterior is exact, whatever fills are drawn."""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from draftmill.actors.rows.lengths import CAL_BIAS, LengthSearch, OpenLengths, bias_at
from draftmill.decoders.base import HOLE, JOB_SETTINGS, Outcome, Request
from draftmill.decoders.draws.keys import sample_key

VOCAB = 2
BEFORE, AFTER = [0, 1], [1]


def pieces(*texts: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(text, dtype=np.int32) for text in texts)


def joint(tokens: list[int]) -> float:
    """A probability of any text: each token depends on the two before it and on its place."""
    mass = 1.0
    for place, token in enumerate(tokens):
        known = sum(tokens[max(place - 2, 0) : place]) + place
        one = (1 + known % 4) / 6
        mass *= one if token else 1 - one
    return mass


def outcome(tokens: list[int], logprob: float, nfe: int = 1) -> Outcome:
    counts: dict = {"nfe_draft": 0, "proposed": 0, "accepted": 0, "accept_hist": [0, len(tokens)]}
    times: dict = dict.fromkeys(("wait_s", "prefill_s", "decode_s", "total_s", "device_s", "batch_rows"), 0.0)
    ids, rest = np.array(tokens, dtype=np.int32), counts | times
    return Outcome(0, ids, "filled", logprob, nfe, iterations=len(tokens), pad_fraction=0.0, started_at_s=0.0, **rest)


def answer(request: Request, rng: np.random.Generator) -> Outcome:
    """What an exact model of `joint` answers: a fill drawn from its law, or the log-probability that a probe asks for."""
    canvas = request.canvas.tolist()
    if request.probe:
        start = request.score_from or 0
        return outcome([], math.log(joint(canvas)) - math.log(joint(canvas[:start])))
    holes = [place for place, token in enumerate(canvas) if token == HOLE]
    fills = list(itertools.product(range(VOCAB), repeat=len(holes)))
    masses = []
    for fill in fills:
        filled = list(canvas)
        for place, token in zip(holes, fill, strict=True):
            filled[place] = token
        masses.append(joint(filled))
    law = np.array(masses) / sum(masses)
    drawn = int(rng.choice(len(fills), p=law))
    return outcome(list(fills[drawn]), math.log(law[drawn]), nfe=len(holes))


def run(search: LengthSearch, answered: Callable[[Request], Outcome]) -> Outcome:
    """Answer all requests of a search; returns the outcome of its sample."""
    requests = search.requests()
    request = next(requests)
    try:
        while True:
            request = requests.send(answered(request))
    except StopIteration as end:
        last: Outcome = end.value
        return last


def found(row: OpenLengths, key: int, rng: np.random.Generator) -> tuple[LengthSearch, Outcome]:
    search = LengthSearch(row, key, JOB_SETTINGS)
    return search, run(search, lambda request: answer(request, rng))


def masses(length: int) -> float:
    """p(visible | length): the sum over all fills."""
    return sum(joint([*BEFORE, *fill, *AFTER]) for fill in itertools.product(range(VOCAB), repeat=length))


def test_lengths_have_their_exact_posterior_whatever_is_filled_in():
    row = OpenLengths(pieces(BEFORE, AFTER), ((1, 2, 3),))
    total = sum(map(masses, (1, 2, 3)))
    rng = np.random.default_rng(0)
    for seed in range(20):
        search, _ = found(row, sample_key(seed, "a"), rng)
        assert search.num_tried == 3
        assert search.logprob == pytest.approx(math.log(masses(search.taken[0]) / total), abs=1e-12)


@pytest.mark.slow
def test_lengths_and_fills_are_drawn_together_from_their_posterior():
    """A chi-square over all 14 pairs of length and fill; it fails by chance once in 10,000 runs of other seeds."""
    row = OpenLengths(pieces(BEFORE, AFTER), ((1, 2, 3),))
    rng, counts, times = np.random.default_rng(1), Counter[tuple[int, ...]](), 1500
    for seed in range(times):
        _, result = found(row, sample_key(seed, "b"), rng)
        counts[tuple(result.tokens.tolist())] += 1
    fills = [fill for length in (1, 2, 3) for fill in itertools.product(range(VOCAB), repeat=length)]
    law = np.array([joint([*BEFORE, *fill, *AFTER]) for fill in fills])
    assert chisquare([counts[fill] for fill in fills], times * law / law.sum()).pvalue > 1e-4


def test_at_temperature_0_the_likeliest_length_is_taken_and_nothing_depends_on_the_key():
    row = OpenLengths(pieces(BEFORE, AFTER), ((1, 2, 3, 4),), temperature=0.0)
    best = max((1, 2, 3, 4), key=masses)
    assert {found(row, seed, np.random.default_rng(seed))[0].taken for seed in range(5)} == {(best,)}


def test_a_length_is_drawn_by_its_own_noise_whichever_others_are_tried():
    """Without text after the hole all lengths are alike: the greatest noise wins, also among fewer."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        key = sample_key(seed, "c")
        best = found(OpenLengths(pieces(BEFORE, []), (tuple(range(1, 7)),)), key, rng)[0].taken
        fewer = tuple(length for length in range(1, 7) if length % 2 == best[0] % 2)
        assert found(OpenLengths(pieces(BEFORE, []), (fewer,)), key, rng)[0].taken == best


def test_holes_find_their_lengths_one_after_the_other():
    row = OpenLengths(pieces([0], [1], [0]), ((1, 2, 3), (2, 3, 4)))
    search, rng, seen = LengthSearch(row, 7, JOB_SETTINGS), np.random.default_rng(0), list[tuple[int, ...]]()

    def answered(request: Request) -> Outcome:
        if not request.probe:
            holes = "".join("_" if token == HOLE else "x" for token in request.canvas.tolist()).strip("x").split("x")
            seen.append(tuple(map(len, holes)))
        return answer(request, rng)

    result = run(search, answered)
    first, second = search.taken
    assert seen[:3] == [(1, 3), (2, 3), (3, 3)] and seen[3:] == [(first, 2), (first, 4)]
    assert search.num_tried == 5 and len(result.tokens) == first + second


def test_the_forwards_of_all_that_was_tried_count_and_drafts_are_those_of_the_fill():
    search, result = found(OpenLengths(pieces(BEFORE, AFTER), ((1, 2, 3),)), 5, np.random.default_rng(0))
    assert result.nfe == 1 + 2 + 3 + 3
    assert result.iterations == len(result.tokens) == search.taken[0]


def test_a_masked_hole_is_weighed_by_its_own_confidence_alone():
    """Both holes may have 1 or 2 tokens. The first is surer with 1, the second with 2, beside whatever the other has."""
    row = OpenLengths(pieces([0], [1], [0]), ((1, 2), (1, 2)), bias=(0.0, 0.0, 0.0, 0.0, 1.0))
    search, asked = LengthSearch(row, 0, JOB_SETTINGS), list[tuple[int, int]]()

    def answered(request: Request) -> Outcome:
        if request.scored is None:
            return outcome([1] * int((request.canvas == HOLE).sum()), -1.0)
        hole, size = int(request.scored[0] > 1), len(request.scored)
        asked.append((hole, size))
        return outcome([], math.log(0.9 if size == 1 + hole else 0.3))

    run(search, answered)
    assert asked == [(0, 1), (0, 2), (1, 1), (1, 2)] and search.taken == (1, 2)


def test_lengths_that_do_not_fit_are_not_tried():
    row = OpenLengths(pieces([0], [1], [0]), ((1, 2, 3), (1, 2, 3)), room=4)
    assert row.options(()) == [(1, 1), (2, 1), (3, 1)] and row.longest == (3, 1)
    assert row.options((3,)) == [(3, 1)] and row.options((2,)) == [(2, 1), (2, 2)]


def test_masked_canvases_are_probed_alone_and_the_least_biased_confidence_wins():
    confidence = {1: 0.7, 2: 0.5, 3: 0.6, 4: 0.3}
    row = OpenLengths(pieces(BEFORE, AFTER), ((1, 2, 3, 4),), bias=CAL_BIAS)
    search, asked = LengthSearch(row, 0, JOB_SETTINGS), list[Request]()

    def answered(request: Request) -> Outcome:
        if not request.probe:
            return outcome([1, 1, 1], -1.0, nfe=3)
        asked.append(request)
        return outcome([], math.log(confidence[int((request.canvas == HOLE).sum())]))

    last = run(search, answered)
    best = max(confidence, key=lambda length: confidence[length] / bias_at(CAL_BIAS, length))
    assert search.taken == (best,) and best == 3, "the bias hides it: the first length has the greatest confidence"
    assert all(request.probe and request.settings.temperature == 0.0 for request in asked)
    assert [request.scored.tolist() for request in asked if request.scored is not None][1] == [2, 3]
    assert (last.nfe, search.logprob, search.num_tried) == (7, None, 4)
