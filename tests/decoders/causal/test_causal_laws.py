"""Exact output laws of speculative decoding: every branch of every random choice of the reference, summed."""

import itertools
from typing import Any

import pytest

from decoders.common_settings import Sampling
from decoders.references import causal as causal_reference
from decoders.references import choosers
from decoders.references.causal import PlainCausal, by_lookup, by_model
from decoders.references.choosers import RejectionRule, enumerate_law
from decoders.references.token_table import TokenTable

VOCAB, LENGTH = 3, 5
PROMPTS = {"one token": [1], "a repetition": [0, 1, 0]}


def plain(seed, sampling, suppressed=()):
    backbone = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=seed)
    return PlainCausal(backbone, length=LENGTH, sampling=sampling, suppressed=suppressed)


def drafting(drafter, sampling, suppressed=()):
    if drafter == "ngram":
        return by_lookup(VOCAB, max_n=2, min_n=1)
    return by_model(plain(6, sampling, suppressed))


def law_of(model, prompt, **settings: Any):
    return enumerate_law(
        lambda chooser: tuple(
            causal_reference.speculative(model, prompt, RejectionRule(chooser), **settings).tokens[len(prompt) :]
        )
    )


def chain_rule(model, prompt):
    """The sequential law as a plain product of conditionals, without any decoder."""
    law = {}
    for fill in itertools.product(range(VOCAB), repeat=LENGTH - len(prompt)):
        tokens, mass = list(prompt), 1.0
        for token in fill:
            mass *= float(model.law(tokens)[token].exp())
            tokens.append(token)
        law[fill] = mass
    return law


def total_variation(one, other):
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_autoregressive_reference_follows_the_product_of_conditionals(prompt):
    model, tokens = plain(5, Sampling()), PROMPTS[prompt]
    law = enumerate_law(
        lambda chooser: tuple(
            causal_reference.autoregressive(model, tokens, RejectionRule(chooser)).tokens[len(tokens) :]
        )
    )
    assert total_variation(law, chain_rule(model, tokens)) < 1e-12


# Three drafts after one token would be tens of thousands of branches.
CASES = [
    (drafter, prompt, k)
    for drafter, prompt, k in itertools.product(("model", "ngram"), PROMPTS, (1, 2, 3))
    if not (drafter == "model" and prompt == "one token" and k == 3)
]


@pytest.mark.parametrize(("drafter", "prompt", "k"), CASES)
def test_speculation_has_the_autoregressive_law_to_1e_12(drafter, prompt, k):
    model, tokens = plain(5, Sampling()), PROMPTS[prompt]
    law = law_of(model, tokens, k=k, draft=drafting(drafter, Sampling()))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(model, tokens)) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2)], ids=str)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(drafter, sampling):
    model, tokens = plain(5, sampling, suppressed=[1]), PROMPTS["a repetition"]
    law = law_of(model, tokens, k=2, draft=drafting(drafter, sampling, suppressed=[1]))
    assert all(1 not in fill for fill in law)
    assert total_variation(law, chain_rule(model, tokens)) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_wrong_residual_is_found_out(drafter, monkeypatch):
    monkeypatch.setattr(choosers, "residual", lambda p, q: p.exp())
    model, tokens = plain(5, Sampling()), PROMPTS["a repetition"]
    law = law_of(model, tokens, k=2, draft=drafting(drafter, Sampling()))
    assert total_variation(law, chain_rule(model, tokens)) > 0.01


def test_a_drafter_that_hides_its_warp_is_found_out():
    model, tokens = plain(5, Sampling()), PROMPTS["a repetition"]
    honest = by_model(plain(6, Sampling()))

    def liar(*args):
        laws, drafts = honest(*args)
        return [law / 2 for law in laws], drafts

    assert total_variation(law_of(model, tokens, k=2, draft=liar), chain_rule(model, tokens)) > 0.01


def test_a_bonus_from_the_wrong_row_is_found_out(monkeypatch):
    model, tokens = plain(5, Sampling()), PROMPTS["a repetition"]
    monkeypatch.setattr(
        RejectionRule,
        "direct",
        lambda self, p_V, position, when, direct=RejectionRule.direct: direct(self, model.law(tokens), position, when),
    )
    law = law_of(model, tokens, k=1, draft=drafting("model", Sampling()))
    assert total_variation(law, chain_rule(model, tokens)) > 0.01
