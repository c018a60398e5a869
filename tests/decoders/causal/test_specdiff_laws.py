"""Exact output laws of speculative diffusion decoding under rejection: every branch of every random choice, summed."""

import itertools
import math

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.setup import Setup
from tests.decoders import enumeration
from tests.decoders.masked.diffusion_tables import MASK, TARGET_INFO, VOCAB, drafter, mask_info, specdiff, target
from tests.decoders.references import causal as causal_reference
from tests.decoders.references.causal import PlainCausal, PlainMasked, by_diffusion
from tests.decoders.references.choosers import RejectionRule, enumerate_law
from tests.decoders.support import decoder_settings, toy_heads

LENGTH = 4
PROMPT = [1]
AR = decoder_settings("autoregressive")


def plain(sampling, suppressed=()):
    return (
        PlainCausal(target(seed=5, length=LENGTH), length=LENGTH, sampling=sampling, suppressed=suppressed),
        PlainMasked(drafter(seed=6, length=LENGTH), mask_id=MASK, sampling=sampling, suppressed=suppressed),
    )


def chain_rule(model):
    """The sequential law as a plain product of conditionals, without any decoder."""
    law = {}
    for fill in itertools.product(range(VOCAB), repeat=LENGTH - len(PROMPT)):
        tokens, mass = list(PROMPT), 1.0
        for token in fill:
            mass *= float(model.law(tokens)[token].exp())
            tokens.append(token)
        law[fill] = mass
    return law


def law_of(model, masked, *, gamma, steps, orders=None, head=None, told=lambda tokens, laws: laws):
    """The law of the text; `orders` are the orders of revealing by number of drafts, drawn with equal chances.

    `told` is what the judge is told instead of the laws that the drafts were drawn from.
    """

    def decoded(chooser):
        def arrange(decided, count):
            choices = orders(count)
            uniform = torch.full((len(choices),), -math.log(len(choices)), dtype=torch.float64)
            return choices[chooser.choose(uniform, keys.ORDER, decided, decided)]

        propose = by_diffusion(masked, gamma=gamma, steps=steps, arrange=None if orders is None else arrange, head=head)

        def draft(tokens, rule, count):
            laws, drafts = propose(tokens, rule, count)
            return told([*tokens, *drafts], laws), drafts

        trail = causal_reference.speculative(model, PROMPT, RejectionRule(chooser), k=gamma, draft=draft)
        return tuple(trail.tokens[len(PROMPT) :])

    law = enumerate_law(decoded)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


def total_variation(one, other):
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("gamma", "steps"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_left_to_right_drafts_have_the_autoregressive_law_to_1e_12(gamma, steps):
    model, masked = plain(Sampling())
    assert total_variation(law_of(model, masked, gamma=gamma, steps=steps), chain_rule(model)) < 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("gamma", "steps"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_a_draft_head_leaves_the_law_alone_to_1e_12(gamma, steps):
    model, masked = plain(Sampling())
    head = toy_heads(VOCAB + 1).markov
    assert total_variation(law_of(model, masked, gamma=gamma, steps=steps, head=head), chain_rule(model)) < 1e-12


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2)], ids=str)
def test_a_draft_head_leaves_warped_laws_alone_too(sampling):
    model, masked = plain(sampling, suppressed=[1])
    law = law_of(model, masked, gamma=3, steps=2, head=toy_heads(VOCAB + 1, seed=2).markov)
    assert total_variation(law, chain_rule(model)) < 1e-12


def test_a_judge_who_is_not_told_of_the_head_gets_another_law():
    model, masked = plain(Sampling())

    def bare(text, laws):
        n = len(text) - len(laws)
        return list(masked.laws([*text[:n], *[MASK] * len(laws)])[n:, :MASK])

    law = law_of(model, masked, gamma=2, steps=1, head=toy_heads(VOCAB + 1).markov, told=bare)
    assert total_variation(law, chain_rule(model)) > 0.01


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2)], ids=str)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(sampling):
    model, masked = plain(sampling, suppressed=[1])
    law = law_of(model, masked, gamma=2, steps=2)
    assert all(1 not in fill for fill in law)
    assert total_variation(law, chain_rule(model)) < 1e-12


@pytest.mark.slow
def test_the_native_order_deviates_once_a_token_depends_on_later_ones():
    model, masked = plain(Sampling())
    shuffles = lambda count: list(itertools.permutations(range(count)))  # noqa: E731
    backwards = lambda count: [tuple(range(count))[::-1]]  # noqa: E731
    exact = chain_rule(model)
    # All at once there is no order; one at a time, the law that a token was drawn from is not its law given those before.
    assert total_variation(law_of(model, masked, gamma=2, steps=1, orders=shuffles), exact) < 1e-12
    native = total_variation(law_of(model, masked, gamma=2, steps=2, orders=shuffles), exact)
    assert native > 0.005
    assert total_variation(law_of(model, masked, gamma=2, steps=2, orders=backwards), exact) > native


# ---- the production code -------------------------------------------------------------------------------------------


def on_the_engine(settings, *, rows=1, heads=None, requests=None, index=0, **sampling):
    setup = Setup(
        backbone=target(),
        info=TARGET_INFO,
        sampling=Sampling(acceptance="rejection", **sampling),
        max_rows=rows,
        max_tokens=99,
        drafter=None if settings is AR else drafter(),
        drafter_info=None if settings is AR else mask_info(max_length=5),
        heads=heads,
    )
    return enumeration.law_of(setup, settings, requests or [request_of(0)], index)


def request_of(index, prompt=2, holes=3):
    return Request(index, 55 + index, np.array([*range(prompt), *[-1] * holes], dtype=np.int32))


@pytest.mark.parametrize(("gamma", "steps"), [(1, 1), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("window", ["short", "full"])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.one_in(99, soak=3)
@pytest.mark.slow
def test_the_decoder_in_the_engine_has_the_autoregressive_law(gamma, steps, window, with_head):
    heads = toy_heads(VOCAB + 1) if with_head else None
    found = on_the_engine(specdiff(gamma, steps, window=window), heads=heads)
    assert enumeration.total_variation(found, on_the_engine(AR)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("with_head", [False, True])
def test_a_sample_that_refills_a_slot_beside_others_has_that_law_too(with_head):
    heads = toy_heads(VOCAB + 1) if with_head else None
    requests = [request_of(1, 1, 2), request_of(2, 2, 4), request_of(0)]
    found = on_the_engine(specdiff(2, 2), rows=2, heads=heads, requests=requests, index=0, temperature=0.7)
    assert enumeration.total_variation(found, on_the_engine(AR, temperature=0.7)) < 1e-12


@pytest.mark.slow
def test_the_native_order_has_another_law_in_the_engine():
    found = on_the_engine(specdiff(2, 2, order="native"))
    assert enumeration.total_variation(found, on_the_engine(AR)) > 1e-4
