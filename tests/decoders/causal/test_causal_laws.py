"""Exact output laws of the causal decoders under the rejection rule: every branch of every random choice, summed.

What runs is the decoder's own generator on the real engine (tests/decoders/enumeration.py): packing, cached columns, refill and
stops are those of production.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import ModelDrafterSettings, NgramDrafterSettings
from draftmill.decoders.common_settings import RunDrafterSettings, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.enumeration import CoupledChooser, decoded, engine_of, fills, law_of, total_variation
from tests.decoders.references.causal import PlainCausal
from tests.decoders.references.choosers import NoiseChooser
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, token_info, toy_prompts

VOCAB, LENGTH = 3, 5
PROMPTS = {"one token": [1], "a repetition": [0, 1, 0]}
AR = decoder_settings("autoregressive")
NGRAM = NgramDrafterSettings(kind="ngram", max_n=2, min_n=1)
MODEL = ModelDrafterSettings(kind="model", path="drafter")
DRAFTERS: dict = {"model": MODEL, "ngram": NGRAM}


def spec(k, drafter):
    return decoder_settings("speculative", k=k, drafter=DRAFTERS[drafter])


def table(seed):
    return TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=seed)


def setup(sampling=None, *, suppressed=(), rows=1, stops=None, acceptance="rejection"):
    info = token_info(VOCAB, suppressed)
    warp = (sampling or Sampling()).model_copy(update={"acceptance": acceptance})
    models: dict = {"backbone": table(5), "drafter": table(6), "drafter_info": info}
    return Setup(**models, info=info, sampling=warp, max_rows=rows, max_tokens=99, stops=stops)


def request(prompt, index=0):
    canvas = np.array([*prompt, *[-1] * (LENGTH - len(prompt))], dtype=np.int32)
    return Request(index, sample_key(0, str(index)), canvas)


def chain_rule(prompt, sampling=None, suppressed=(), end=None):
    """The sequential law as a plain product of conditionals, without any decoder; texts end with the token `end`."""
    model = PlainCausal(table(5), length=LENGTH, sampling=sampling or Sampling(), suppressed=suppressed)
    law = {}
    for fill in fills(VOCAB, LENGTH - len(prompt)):
        text = fill[: fill.index(end) + 1] if end in fill else fill
        law[text] = math.exp(model.logprob(prompt, text))
    return law


def test_the_baseline_follows_the_product_of_conditionals():
    for prompt in PROMPTS.values():
        assert total_variation(law_of(setup(), AR, [request(prompt)], 0), chain_rule(prompt)) < 1e-12


# Three drafts after one token would be tens of thousands of branches.
CASES = [
    (drafter, prompt, k)
    for drafter, prompt, k in itertools.product(DRAFTERS, PROMPTS, (1, 2, 3))
    if not (drafter == "model" and prompt == "one token" and k > 1)
]


@pytest.mark.one_in(11)
@pytest.mark.parametrize(("drafter", "prompt", "k"), CASES)
def test_speculation_has_the_autoregressive_law_to_1e_12(drafter, prompt, k):
    law = law_of(setup(), spec(k, drafter), [request(PROMPTS[prompt])], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(PROMPTS[prompt])) < 1e-12


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("earlier", [[1, 2, 0, 1], [1], []])
def test_with_texts_of_earlier_runs_the_law_is_the_same(earlier, prompt):
    drafter = RunDrafterSettings(kind="run", path=("earlier",), k=3)
    given = replace(request(PROMPTS[prompt]), earlier=(np.array(earlier, dtype=np.int32),))
    law = law_of(setup(), decoder_settings("speculative", drafter=drafter), [given], 0)
    assert total_variation(law, chain_rule(PROMPTS[prompt])) < 1e-12


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2), Sampling(top_k=2, top_p=0.6)],
    ids=str,
)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(drafter, sampling):
    prompt = PROMPTS["a repetition"]
    law = law_of(setup(sampling, suppressed=[1]), spec(2, drafter), [request(prompt)], 0)
    assert all(1 not in fill for fill in law)
    assert total_variation(law, chain_rule(prompt, sampling, [1])) < 1e-12


COUPLED = {
    "autoregressive": AR,
    "look-up": spec(2, "ngram"),
    "model": spec(2, "model"),
    "jacobi": decoder_settings("jacobi", block_size=2),
}
CUTS = [Sampling(top_p=0.7), Sampling(top_k=2), Sampling(temperature=0.7, top_k=2, top_p=0.6)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_coupled_draws_have_the_law_of_the_cut_distributions(name, sampling):
    prompts = [[2, 2, 1, 0], PROMPTS["a repetition"], [1, 1, 0]]
    requests = [request(prompt, index) for index, prompt in enumerate(prompts)]
    law = law_of(setup(sampling, rows=2, acceptance="coupled"), COUPLED[name], requests, 1)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(prompts[1], sampling)) < 1e-12
    assert total_variation(law, chain_rule(prompts[1])) > 0.01, "the cuts change nothing"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_sample_that_refills_a_slot_beside_another_has_the_law_of_one_alone(drafter):
    prompts = [[0, 1, 0], [2, 2, 1, 0], [1, 1, 0], [0, 0, 2]]
    requests = [request(prompt, index) for index, prompt in enumerate(prompts)]
    law = law_of(setup(rows=2), spec(2, drafter), requests, 2)
    assert total_variation(law, chain_rule(prompts[2])) < 1e-12


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_that_ends_at_a_stop_has_the_law_of_the_texts_up_to_there(drafter):
    prompt = PROMPTS["a repetition"]
    law = law_of(setup(stops=Stops((2,))), spec(2, drafter), [request(prompt)], 0)
    assert total_variation(law, chain_rule(prompt, end=2)) < 1e-12


@pytest.mark.one_in(7)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.8)], ids=str
)
@pytest.mark.parametrize(("acceptance", "rows"), [("rejection", 1), ("rejection", 7), ("coupled", 7)])
def test_batched_draws_are_those_of_a_chooser_that_reads_the_same_noise(drafter, sampling, acceptance, rows):
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=3)
    one, batch = (setup(sampling, rows=count, acceptance=acceptance) for count in (1, rows))
    rule = NoiseChooser if acceptance == "rejection" else partial(CoupledChooser, sampling=one.sampling)
    choosers = {each.index: rule(each.key) for each in requests}
    expected = decoded(engine_of(one, spec(2, drafter), choosers), requests)
    found = decoded(build_decoder(batch, spec(2, drafter)), requests)
    for index, one in expected.items():
        other = found[index]
        assert (other.tokens.tolist(), other.nfe, other.accept_hist) == (one.tokens.tolist(), one.nfe, one.accept_hist)
