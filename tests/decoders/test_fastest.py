"""`fastest`: whatever the clock chooses, and whenever, a row's text is that of the baseline; and the best choice is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.fastest import ROOMS, FastestSettings
from tests.decoders import results
from tests.decoders.support import random_lengths, random_way, run_all, texts

LIKES: dict[str, dict] = {
    "causal": {"kind": "autoregressive"},
    "any_subset": {"kind": "any_subset"},
    "masked": {"kind": "stepwise"},
    "masked in blocks": {"kind": "stepwise", "block_length": 3},
    "masked with kept noise": {"kind": "stepwise", "draws": "kept"},
    "masked with a cache": {"kind": "stepwise", "block_length": 3, "cache": "dual_strict"},
    "masked with a cache for some tokens": {"kind": "stepwise", "block_length": 3, "cache": "prefix", "refresh": 2},
    "blocks": {"kind": "block_diffusion", "block_size": 1, "causal_cache": True},
    "blocks with kept noise": {"kind": "block_diffusion", "block_size": 1, "causal_cache": True, "draws": "kept"},
}
EVERY = pytest.mark.parametrize("like", LIKES.values(), ids=list(LIKES))
MODEL = {"kind": "model", "path": "drafter"}


def choose_at_random(monkeypatch) -> None:
    monkeypatch.setattr(AutoLength, "__call__", random_lengths)
    monkeypatch.setattr(AutoLength, "way", property(random_way))
    torch.manual_seed(0)


def fastest(like: dict) -> dict:
    return (like if like["kind"] == "stepwise" else {}) | {"kind": "fastest", "like": like["kind"]}


def decoded(settings: dict, requests, sampling: Sampling, rows: int = 4, ends=None):
    head = "any_subset" in settings.values()
    return run_all(results.engine_of(results.Case(settings, head=head), sampling, rows, ends), requests)


@EVERY
@pytest.mark.parametrize("drafter", [None, results.RUN, MODEL, {"kind": "suffix"}], ids=["", "run", "model", "suffix"])
def test_the_text_is_the_baselines_whatever_is_chosen_and_whenever(monkeypatch, like, drafter):
    if like["kind"] != "autoregressive" and drafter not in (None, results.RUN):
        pytest.skip("drafts for causal models")
    choose_at_random(monkeypatch)
    requests = results.requests_of(results.Case(like))
    for number, sampling in enumerate(results.COUPLED):
        for ends in results.ENDS if like["kind"] != "any_subset" else (None,):
            plain = decoded(like, requests, sampling, ends=ends)
            same = texts(plain)
            earlier = {index: (text[::-1], text)[index % 2] for index, text in same.items()}
            given = [replace(one, earlier=(np.array(earlier[one.index], dtype=np.int32),)) for one in requests]
            settings = fastest(like) | ({} if drafter is None else {"drafter": drafter})
            new = decoded(settings, given, sampling, rows=(1, 4)[number % 2], ends=ends)
            assert texts(new) == same
            for index, one in new.items():
                assert one.finish == plain[index].finish
                assert one.logprob == pytest.approx(plain[index].logprob, rel=1e-6)
                assert one.reused <= one.accepted <= one.proposed and one.nfe <= 2 * max(plain[index].nfe, 1)


def test_a_draft_that_is_taken_unverified_would_be_found(monkeypatch):
    choose_at_random(monkeypatch)
    like = LIKES["causal"]
    requests = results.requests_of(results.Case(like))
    same = texts(decoded(like, requests, Sampling()))
    commit = Sample.commit

    def trusting(self, tokens, log_ps, count: int, drafts=(), accepted: int = 0, **more) -> int:
        return commit(self, [*drafts, *tokens[len(drafts) :]], log_ps, len(drafts) + 1, drafts, accepted, **more)

    monkeypatch.setattr(Sample, "commit", trusting)
    assert texts(decoded(fastest(like), requests, Sampling())) != same


@pytest.mark.parametrize("like", ["causal", "any_subset", "blocks"])
@pytest.mark.parametrize("k", [3, "auto"])
def test_earlier_runs_are_tried_first_and_a_number_is_one_choice(like, k):
    settings = fastest(LIKES[like]) | {"drafter": results.RUN | {"k": k}}
    auto = results.engine_of(results.Case(settings), Sampling(), 4).algorithm.auto
    assert auto.shown.startswith(f"run up to {3 if k == 3 else 16}, ") and auto() == 0
    while not auto():
        auto.note_step(4, 1.0, 4)
    assert auto.name == "run" and auto() == (3 if k == 3 else 2)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"like": "stepwise", "cache": "dual_relaxed"}, r"decoder\.cache: 'dual_relaxed' is lossy"),
        ({"like": "block_diffusion", "block_length": 4}, r"decoder\.block_length: 4 is for masked-diffusion models"),
        ({"like": "any_subset", "drafter": MODEL}, r"decoder\.drafter\.kind: 'model'.*allowed: run"),
    ],
)
def test_what_has_no_faster_decoder_of_the_same_text_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        FastestSettings.model_validate({"kind": "fastest"} | settings)


def test_under_rejection_texts_would_depend_on_time():
    with pytest.raises(ValueError, match=r"'fastest' chooses by time.*any other decoder"):
        FastestSettings(kind="fastest").check_sampling(results.REJECTION[0])


@pytest.mark.parametrize("kind", ROOMS)
def test_the_baseline_of_a_model_is_filled_in(kind):
    settings = FastestSettings(kind="fastest").for_model(results._info(kind, 0))
    assert settings.baseline.runs_on == kind and not settings.is_open


WAYS = (Way(16, name="cheap"), Way(16, shares_cost=True, name="dear"), Way(8, name="bad"))


def rate_of(way: int, drafts: int, world: dict) -> tuple[float, float]:
    """The tokens per slot and the seconds of a step."""
    rates, per_row, base = world["rates"], world["per_row"], world.get("base", 1.0)
    tokens = 1.0 + sum(rates[way] ** n for n in range(1, drafts + 1))
    return tokens, base + per_row * (1 + drafts) + world.get("cost", (0.0, 0.0, 0.0))[way] * bool(drafts)


WORLDS: dict[str, dict] = {
    "nothing pays": {"rates": (0.2, 0.3, 0.1), "per_row": 2.0},
    "the first way pays": {"rates": (0.8, 0.5, 0.1), "per_row": 0.1},
    "the second way pays": {"rates": (0.3, 0.9, 0.1), "per_row": 0.1, "cost": (0.0, 0.5, 0.0)},
    "the third way pays": {"rates": (0.1, 0.2, 0.9), "per_row": 0.1},
    "one draft pays": {"rates": (0.6, 0.6, 0.3), "per_row": 0.45},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))
def test_a_long_run_is_nearly_as_fast_as_the_best_choice(world):
    rng, slots, steps = np.random.default_rng(0), 64, 4000
    auto = AutoLength(*WAYS)
    fixed = [1.0 / (world.get("base", 1.0) + world["per_row"])]
    for way, one in enumerate(WAYS):
        fixed += [float(np.divide(*rate_of(way, drafts, world))) for drafts in one.lengths]
    tokens, seconds = 0.0, 0.0
    for _ in range(steps):
        each, took = rate_of(auto.way, auto(), world)
        new, now = rng.poisson(slots * each), took * (1 + 0.1 * abs(rng.standard_normal()))
        tokens, seconds = tokens + new, seconds + now
        auto.note_step(int(new), now, slots)
    noise = 1 + 0.1 * np.sqrt(2 / np.pi)
    assert tokens / slots / seconds * noise > 0.95 * max(fixed)


def test_steps_with_many_new_texts_are_not_compared_with_those_before():
    # Texts that are all renewed at once make every step faster, whatever is drafted.
    auto, seconds, chosen = AutoLength(Way(1)), 1.0, list[int]()
    for step in range(2000):
        seconds = 1.0 if step % 30 == 0 else seconds * 1.03
        chosen.append(auto())
        auto.note_step(64, seconds * (1.0 + 0.2 * auto()), 64, num_prompts=64 if step % 30 == 0 else 0)
    assert np.mean(chosen) < 0.1
