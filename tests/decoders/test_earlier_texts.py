"""`drafter: {kind: run}`: texts of earlier runs draft, and a row's text and law are those without them, whatever they say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.earlier_texts import Pointer
from draftmill.decoders.settings import DECODERS
from tests.decoders import results
from tests.decoders.support import random_lengths, run_all, texts

BASELINES: dict[str, dict] = {
    "speculative": {"kind": "autoregressive"},
    "assd": {"kind": "any_subset"},
    "s2d2": {"kind": "block_diffusion", "block_size": 1, "causal_cache": True},
}
MORE: dict[str, dict] = {"s2d2": {"block_size": 3, "causal_cache": True}}
KINDS = pytest.mark.parametrize("kind", BASELINES)


def case_of(kind: str, **drafter) -> results.Case:
    return results.Case({"kind": kind, "drafter": results.RUN | drafter} | MORE.get(kind, {}))


def decoded(case: results.Case, requests: list[Request], sampling: Sampling, rows: int = 4, ends=None):
    return run_all(results.engine_of(case, sampling, rows, ends), requests)


def baseline(kind: str, requests: list[Request], sampling: Sampling, ends=None, rows: int = 4):
    return decoded(results.Case(BASELINES[kind]), requests, sampling, rows, ends)


def requests_of(kind: str) -> list[Request]:
    return results.requests_of(results.Case(BASELINES[kind]))


def garbled(text: list[int], rng: np.random.Generator) -> list[int]:
    place, change = int(rng.integers(0, len(text) + 1)), int(rng.integers(0, 3))
    other = [] if change == 2 else [int(rng.integers(0, results.VOCAB))]
    return text[:place] + other + text[place + (change != 1) :]


def with_texts(requests: list[Request], *found: dict[int, list[int]]) -> list[Request]:
    return [
        replace(one, earlier=tuple(np.array(texts[one.index], dtype=np.int32) for texts in found)) for one in requests
    ]


@KINDS
@pytest.mark.parametrize("sampling", results.COUPLED)
def test_the_text_is_the_baselines_whatever_earlier_texts_say(kind, sampling):
    requests, rng = requests_of(kind), np.random.default_rng(5)
    for ends in results.ENDS if kind != "assd" else (None,):
        plain = baseline(kind, requests, sampling, ends)
        same = texts(plain)
        changed = {index: garbled(text, rng) for index, text in same.items()}
        junk = {index: rng.integers(0, results.VOCAB, 9).tolist() for index in same}
        for found in ((same,), (changed,), (junk,), (junk, changed), ()):
            for k, rows in ((1, 1), (3, 4), (64, 2)):
                new = decoded(case_of(kind, k=k), with_texts(requests, *found), sampling, rows, ends)
                assert texts(new) == same
                for index, one in new.items():
                    assert one.logprob == pytest.approx(plain[index].logprob, rel=1e-6)
                    assert one.reused <= one.accepted <= one.proposed
                    assert one.nfe == one.iterations <= max(len(one.tokens), 1)
                    assert found or one.reused == 0


@KINDS
def test_the_text_is_the_same_for_any_length_that_auto_may_choose(kind, monkeypatch):
    monkeypatch.setattr("draftmill.decoders.engine.auto.AutoLength.__call__", random_lengths)
    requests, sampling = requests_of(kind), Sampling()
    same = texts(baseline(kind, requests, sampling))
    given = with_texts(requests, {index: text[::-1] for index, text in same.items()}, same)
    assert texts(decoded(case_of(kind, k="auto"), given, sampling)) == same


@KINDS
@pytest.mark.parametrize("k", [64, "auto"])
def test_an_unchanged_text_takes_few_forwards_and_says_what_it_reused(kind, k):
    requests, sampling = requests_of(kind), Sampling()
    same = texts(baseline(kind, requests, sampling))
    new = decoded(case_of(kind, k=k), with_texts(requests, same), sampling)
    for one in new.values():
        # Every draft holds; each forward gives one token that was not drafted.
        assert one.accepted == one.proposed and len(one.tokens) == one.accepted + one.nfe
        assert one.nfe <= 2 and (one.reused > 0 or len(one.tokens) < 3)


@pytest.mark.parametrize(
    ("kind", "field", "more"),
    [
        *((kind, "drafter.k", {"drafter": {"kind": "run", "path": ["a"]}} | MORE.get(kind, {})) for kind in BASELINES),
        ("assd", "k", {"k": "auto"}),
        ("speculative", "k", {"k": "auto"}),
        ("specdiff", "gamma", {"gamma": "auto", "drafter": {"path": "a"}}),
    ],
)
def test_under_rejection_a_length_is_a_number(kind, field, more):
    with pytest.raises(ValueError, match=rf"decoder\.{field}: 'auto'.*allowed with 'rejection': a number"):
        results.engine_of(results.Case({"kind": kind} | more), results.REJECTION[0], 1)


@pytest.mark.parametrize("kind", ["speculative", "assd"])
def test_a_k_beside_a_run_is_refused(kind):
    with pytest.raises(ValueError, match=r"decoder\.k: 4"):
        DECODERS[kind].model_validate({"kind": kind, "k": 4, "drafter": results.RUN})


@pytest.mark.parametrize("tree", ["chain", "mixed"])
@pytest.mark.parametrize("sampling", results.COUPLED[:3])
def test_ssd_reveals_what_stepwise_does_whatever_earlier_texts_say(tree, sampling):
    rng, step = np.random.default_rng(3), results.Case({"kind": "stepwise"})
    requests = results.requests_of(step)
    plain = decoded(step, requests, sampling)
    same, forwards = texts(plain), dict[str, int]()
    junk = {index: rng.integers(0, results.VOCAB, 9).tolist() for index in same}
    for name, found in {"none": (), "same": (same,), "junk": (junk,), "both": (junk, same)}.items():
        settings = {"kind": "ssd", "draft_length": 3, "tree": tree, "drafter": {"kind": "run", "path": ["earlier"]}}
        new = decoded(results.Case(settings), with_texts(requests, *found), sampling)
        assert texts(new) == same
        for index, one in new.items():
            assert one.logprob == pytest.approx(plain[index].logprob, rel=1e-6)
            assert one.reused <= one.accepted and (found or one.reused == 0)
        forwards[name] = sum(one.nfe for one in new.values())
        assert name != "same" or any(one.reused for one in new.values())
    assert forwards["same"] <= forwards["none"]


def foretold(source: list[int], text: list[int], least: float = 0.5) -> list[list[int]]:
    """What is drafted before each token of a text."""
    pointer, drafts = Pointer(source), list[list[int]]()
    for decided in range(len(text)):
        pointer.read(text, decided)
        drafts.append(pointer.drafts(3, decided, least))
    return drafts


OLD = list(range(10, 60))


def test_a_pointer_goes_on_behind_a_replaced_token():
    drafts = foretold(OLD, [*OLD[:20], 99, *OLD[21:40]])
    assert drafts[19][0] == OLD[19] and drafts[20][0] == OLD[20]
    assert drafts[21][0] == OLD[21] and drafts[39] == OLD[39:42]


@pytest.mark.parametrize(("text", "back"), [([*OLD[:20], 99, *OLD[20:40]], 23), ([*OLD[:20], *OLD[24:40]], 23)])
def test_a_pointer_finds_its_place_after_an_inserted_or_a_missing_token(text, back):
    drafts = foretold(OLD, text)
    for place in range(back, len(text) - 1):
        assert not drafts[place] or drafts[place][0] == text[place], place
    assert drafts[-1][0] == text[-1]


def test_a_text_that_foretells_nothing_drafts_once():
    drafts = foretold(OLD, [100 + n % 7 for n in range(40)])
    assert drafts[0] == OLD[:3] and not any(drafts[2:])


def test_a_long_text_that_holds_is_drafted_to_its_end():
    source = [n % 97 for n in range(3000)]
    pointer = Pointer(source)
    pointer.read(source, 2990)
    assert pointer.rate == 1.0 and pointer.drafts(64, 2990, 0.5) == source[2990:]


def test_the_own_text_drafts_what_it_repeats():
    text = [1, 2, 3, 4, 5] * 4
    pointer = Pointer(text, grows=True)
    pointer.read(text, 5)
    assert pointer.drafts(9, 5, 0.5) == []
    pointer.read(text, 8)
    assert pointer.drafts(9, 8, 0.5)[:1] == [4]
    pointer.read(text, 19)
    assert pointer.drafts(7, 19, 0.1) == [5, 1, 2, 3, 4, 5, 1]


@pytest.mark.parametrize("kind", ["assd", "s2d2"])
def test_under_rejection_texts_have_the_law_of_the_baseline(kind):
    """By a chi-square test over the texts of two new tokens; a false alarm has probability 1e-6 (8 degrees: 42.7)."""
    count, sampling = 6000, results.REJECTION[0]
    canvas = np.array([1, -1, -1], dtype=np.int32)
    requests = [Request(n, sample_key(3, str(n)), canvas) for n in range(count)]
    expected = Counter(map(tuple, texts(baseline(kind, requests, sampling, rows=500)).values()))
    earlier = np.array(expected.most_common(3)[2][0], dtype=np.int32)
    given = [replace(one, key=one.key ^ 1, earlier=(earlier,)) for one in requests]
    found = decoded(case_of(kind), given, sampling, 500)
    seen = Counter(map(tuple, texts(found).values()))
    # Both are samples, so the statistic has the variance of two.
    cells = expected.keys() | seen.keys()
    assert sum((expected[text] - seen[text]) ** 2 / (expected[text] + seen[text]) for text in cells) < 42.7
    assert 0.02 < np.mean([one.accepted / one.proposed for one in found.values()]) < 0.98
