"""S2D2's routers against decisions worked out by hand."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.blocks.block_diffusion import Drafted
from draftmill.decoders.blocks.settings import (
    Bandit,
    Estimator,
    MinSpan,
    Router,
    Rules,
    S2d2Settings,
    ScoreRouter,
    VerificationCost,
)
from draftmill.decoders.blocks.verifier import (
    SelfVerifier,
    Signals,
    expected_tokens,
    first_run,
    measure_of,
    route_of,
)
from draftmill.decoders.draws.sampling import measure

ROUTERS, ESTIMATORS = TypeAdapter(Router), TypeAdapter(Estimator)
STATIC = VerificationCost(kind="static", c=1.0)
# Probabilities 1/2, 1/4, 1/8, 1/8: 1.75 of 2 bits.
LAW = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
ONE_HOT = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64).log()
MOST = math.log(4)


def router_of(settings, *, cost=STATIC):
    return route_of(ROUTERS.validate_python(settings), cost)


def signals(*, span=1, expected=0.0, sure=0, progress=0.0, entropy=0.0, size=8):
    return Signals(span, expected, sure, progress, entropy, size)


def read(router, estimator, masks, measured):
    """What a router is told of a draft with these notes."""
    settings = S2d2Settings(kind="s2d2", router=router, estimator=estimator, block_size=4)
    info = ModelInfo("", vocab_size=4, mask_id=0, max_length=None, kind="blocks", num_parameters=0)
    verifier = SelfVerifier(Rules(settings, info), settings)
    verifier.route = Mock()
    draft = {place: Drafted(0, 0.0, 0.0, measured=one) for place, one in measured.items()}
    verifier.wants(masks, draft, num_sure=1, progress=0.5)
    return verifier.route.decide.call_args[0][0]


def decisions(route, **columns):
    """Whether each of these drafts is verified, by a new router each or by one that goes on."""
    number = max(len(values) for values in columns.values())
    each = [{name: values[index] for name, values in columns.items()} for index in range(number)]
    return [route().decide(signals(**one)) for one in each]


def test_the_span_is_the_first_run_of_masks():
    masks = [[1, 2, 4], [0, 1, 2, 3, 4], [4], [], [0, 2, 3, 4]]
    assert [first_run(places) for places in masks] == [[1, 2], [0, 1, 2, 3, 4], [4], [], [0]]


@pytest.mark.parametrize(
    ("settings", "alpha", "alpha_when_sure"),
    [
        ({"kind": "entropy"}, math.exp(-0.875), 1.0),
        ({"kind": "entropy", "beta": 2.0}, math.exp(-1.75), 1.0),
        ({"kind": "hard_entropy", "tau": 0.9}, 1.0, 1.0),
        ({"kind": "hard_entropy", "tau": 0.8}, 0.0, 1.0),
        ({"kind": "margin", "tau": 0.2}, 1.0, 1.0),
        ({"kind": "margin", "tau": 0.25}, 0.0, 1.0),
        ({"kind": "linear_margin"}, 0.25, 1.0),
        ({"kind": "linear_margin", "coefficient": 8.0}, 1.0, 1.0),
        ({"kind": "confidence"}, 0.25, 1.0),
        ({"kind": "confidence", "power": 0.5}, 0.5, 1.0),
        ({"kind": "renyi"}, 11 / 32, 1.0),
    ],
)
def test_estimators_give_what_their_formula_says(settings, alpha, alpha_when_sure):
    estimator = ESTIMATORS.validate_python(settings)
    note = measure_of(ScoreRouter(kind="score"), estimator)
    assert note is not None
    measured = measure(note, torch.cat([LAW, ONE_HOT]), torch.tensor([1, 1])).tolist()
    found = [estimator.alpha(one, MOST) for one in measured]
    assert found == pytest.approx([alpha, alpha_when_sure], abs=1e-12)


def test_entropy_is_a_share_of_the_vocabularys():
    flat = torch.full((1, 4), math.log(0.25), dtype=torch.float64)
    estimator, bandit = ESTIMATORS.validate_python({"kind": "entropy"}), ROUTERS.validate_python({"kind": "bandit"})
    measured = measure("entropy", torch.cat([LAW, ONE_HOT, flat]), torch.tensor([1, 1, 1])).tolist()
    found = [read(bandit, estimator, [0], {0: one}).entropy for one in measured]
    assert found == pytest.approx([0.875, 0.0, 1.0], abs=1e-12)


def test_expected_accepted_tokens_are_the_sum_of_products():
    assert [expected_tokens(alphas) for alphas in ((0.5, 0.5, 0.25), (0.5, 0.0, 1.0, 1.0), ())] == [0.8125, 0.5, 0.0]


def test_a_router_asks_for_what_it_reads():
    estimator = ESTIMATORS.validate_python({"kind": "margin", "tau": 0.25})
    assert measure_of(MinSpan(kind="min_span"), estimator) is None
    assert measure_of(Bandit(kind="bandit"), estimator) == "entropy"
    assert measure_of(ScoreRouter(kind="score"), estimator) == "margin"


def test_a_draft_is_read_place_by_place():
    masks, alpha, some = [[1, 3], [0, 1, 2], []], math.exp(-0.875), 0.875 * MOST
    entropies = [{1: 0.0, 3: some}, {0: some, 1: 0.0, 2: some}, {}]
    estimator = ESTIMATORS.validate_python({"kind": "entropy"})

    def read_all(settings):
        router = ROUTERS.validate_python(settings)
        return [read(router, estimator, places, one) for places, one in zip(masks, entropies, strict=True)]

    found = read_all({"kind": "score"})
    assert [one.span for one in found] == [1, 3, 0] and found[0].size == 4
    assert [one.expected for one in found] == pytest.approx([1.0, 2 * alpha + alpha**2, 0.0])
    for over, means in (("span", [0.0, 2 * 0.875 / 3, 0.0]), ("masks", [0.875 / 2, 2 * 0.875 / 3, 0.0])):
        assert [one.entropy for one in read_all({"kind": "bandit", "entropy_of": over})] == pytest.approx(means)


def test_a_span_is_verified_from_its_minimum_on():
    route = router_of({"kind": "min_span", "span": 3})
    assert decisions(lambda: route, span=(0, 2, 3, 4)) == [False, False, True, True]


@pytest.mark.parametrize(
    ("cost", "scores", "verified"),
    [
        (VerificationCost(kind="static", c=1.5), [0.5, 0.75, 0.0], [True, True, False]),
        (VerificationCost(kind="dynamic", c=0.5), [2.0, 0.25, 0.5], [True, False, True]),
        (VerificationCost(kind="static", c=0.0), [2.0, 2.25, 1.5], [True, True, True]),
    ],
)
def test_the_score_takes_its_cost_and_verifies_at_the_threshold(cost, scores, verified):
    route = router_of({"kind": "score", "tau": 0.5}, cost=cost)
    draft = {"span": (3, 3, 2), "expected": (2.0, 2.25, 1.5), "sure": (0, 4, 2)}
    assert [route.score(signals(span=s, expected=k, sure=n)) for s, k, n in zip(*draft.values(), strict=True)] == scores
    assert decisions(lambda: route, **draft) == verified


def test_hysteresis_begins_above_one_threshold_and_ends_below_the_other():
    route = router_of({"kind": "hysteresis", "on": 1.0, "off": 0.25}, cost=VerificationCost(kind="static", c=0.0))
    taken = [(1.0, False), (1.25, True), (0.25, True), (0.5, True), (0.125, False), (0.5, False), (1.5, True)]
    for score, verified in taken:
        assert route.decide(signals(expected=score)) == verified


def test_a_draft_without_masks_is_never_verified_and_ends_a_hysteresis():
    for settings in ({"kind": "score", "tau": -9.0}, {"kind": "min_span"}, {"kind": "bandit"}):
        assert not router_of(settings).decide(signals(span=0))
    route = router_of({"kind": "hysteresis", "on": 1.0, "off": -5.0})
    drafts = ((2, 4.0), (0, 0.0), (2, 1.5))
    assert [route.decide(signals(span=span, expected=score)) for span, score in drafts] == [True, False, False]


def bandit(beta=1.0, **bins):
    return router_of({"kind": "bandit", "beta": beta, **bins})


def play(route, decoded, **draft):
    """One step that decodes so many tokens; whether it verified."""
    verified = route.decide(signals(**draft))
    route.learn(decoded, verified=verified)
    return verified


def test_the_bandit_takes_the_higher_upper_bound():
    """One context. Unseen arms come first, verifying before revealing; a verification brings its tokens by two forwards.

    t = 3    2.00 + sqrt(ln 3 / 1)           >  1 + sqrt(ln 3 / 1)           verify: 1 token, mean (2 + 0.5) / 2
    t = 4    1.25 + sqrt(ln 4 / 2) = 2.08    <  1 + sqrt(ln 4 / 1) = 2.18    reveal: 1 token, mean 1
    t = 5    1.25 + sqrt(ln 5 / 2)           >  1 + sqrt(ln 5 / 2)           verify: 1 token, mean (2 + 0.5 + 0.5) / 3
    t = 6    1.00 + sqrt(ln 6 / 3) = 1.77    <  1 + sqrt(ln 6 / 2) = 1.95    reveal: 1 token, mean 1
    t = 7    1.00 + sqrt(ln 7 / 3)           =  1 + sqrt(ln 7 / 3)           verify, which wins where both are equal
    """
    routing = bandit(span_bins=1, progress_bins=1, entropy_bins=1)
    taken = [(4, True), (1, False), (1, True), (1, False), (1, True), (1, False), (1, True)]
    for decoded, verified in taken:
        assert play(routing, decoded) == verified


def test_the_bandit_without_a_bonus_takes_the_higher_mean():
    routing = bandit(0.0, span_bins=1, progress_bins=1, entropy_bins=1)
    assert [play(routing, decoded) for decoded in (1, 1, 1, 1, 1)] == [True, False, False, False, False]
    assert [play(bandit(0.0), 2)] == [True]


def drafts_of(*ends):
    return [dict(zip(("span", "progress", "entropy"), values, strict=True)) for values in itertools.product(*ends)]


def test_the_bandit_learns_apart_in_every_context():
    """A context's first visit verifies and its second reveals: what was learned in the others says nothing."""
    routing = bandit()
    drafts = drafts_of((4, 5), (0.4, 0.5), (0.49, 1.0))
    assert [play(routing, 1, **draft) for draft in drafts] == [True] * 8
    assert [play(routing, 1, **draft) for draft in drafts] == [False] * 8
    other_ends = drafts_of((1, 8), (0.0, 1.0), (0.0, 0.5))
    assert [play(routing, 1, **draft) for draft in other_ends] == [False] * 8


def test_drafts_without_masks_teach_a_bandit_nothing():
    one, other = bandit(span_bins=1), bandit(span_bins=1)
    for decoded in (4, 1, 1, 1, 1, 1, 1):
        assert play(one, 0, span=0) is False
        assert play(one, decoded) == play(other, decoded)


def test_what_is_written_is_checked():
    assert ROUTERS.validate_python({"kind": "min_span"}) == MinSpan(kind="min_span", span=1)
    assert ROUTERS.validate_python({"kind": "bandit"}) == Bandit(kind="bandit", beta=1.0, span_bins=2)
    with pytest.raises(ValidationError, match=r"decoder\.router\.off: 1 is not below on = 0"):
        ROUTERS.validate_python({"kind": "hysteresis", "off": 1.0})
    for wrong in (
        {"kind": "min_span", "tau": 1.0},
        {"kind": "min_span", "span": 0},
        {"kind": "score", "tau": math.inf},
    ):
        with pytest.raises(ValidationError):
            ROUTERS.validate_python(wrong)
