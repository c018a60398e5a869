"""Exact output laws: every branch of every random choice of the reference decoders, summed."""

import itertools
from typing import Any

import pytest
import torch

from decoders.common_settings import Sampling
from decoders.references import any_subset as reference
from decoders.references import choosers
from decoders.references.any_subset import PlainModel
from decoders.references.choosers import RejectionRule, enumerate_law
from decoders.references.table import TableBackbone
from tests.decoders.support import toy_heads

VOCAB, LENGTH = 3, 4
CANVASES = {"middle prompt": ([2], [1]), "two prompts": ([0, 3], [2, 0]), "empty prompt": ([], [])}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "assd": (reference.assd, {}),
    "ngram": (reference.assd, {"ngram": True}),
    "rows": (reference.one_pass, {}),
    "ends": (reference.one_pass, {"rows": "ends"}),
    "chain": (reference.one_pass, {"chain": True}),
}


def plain_model(canvas, sampling, suppressed=()):
    positions, prompt = CANVASES[canvas]
    order = positions + [position for position in range(LENGTH) if position not in positions]
    backbone = TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=5)
    model = PlainModel(backbone, order=order, num_prompt=len(prompt), sampling=sampling, suppressed=suppressed)
    return model, prompt


def law_of(decoder, model, prompt, **settings):
    return enumerate_law(lambda chooser: tuple(decoder(model, prompt, RejectionRule(chooser), **settings).tokens))


def total_variation(one, other):
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


def chain_rule(model, prompt):
    """The sequential law as a plain product of conditionals, without any decoder."""
    law = {}
    for fill in itertools.product(range(VOCAB), repeat=LENGTH - len(prompt)):
        tokens, mass = [*prompt, *fill], 1.0
        for rank in range(len(prompt), LENGTH):
            mass *= float(model.law(model.hidden(tokens[:rank], [(rank, rank)])[0])[tokens[rank]].exp())
        law[tuple(tokens)] = mass
    return law


@pytest.mark.parametrize("canvas", CANVASES)
def test_the_sequential_decoder_follows_the_product_of_conditionals(canvas):
    model, prompt = plain_model(canvas, Sampling())
    assert total_variation(law_of(reference.sequential, model, prompt), chain_rule(model, prompt)) < 1e-12


# Windows of three one-pass drafts on an empty prompt would be hundreds of thousands of branches.
CASES = [
    (variant, canvas, k)
    for variant, canvas, k in itertools.product(VARIANTS, CANVASES, (1, 2, 3))
    if not (k == 3 and canvas == "empty prompt" and variant in ("rows", "ends", "chain"))
]


@pytest.mark.parametrize(("variant", "canvas", "k"), CASES)
def test_every_variant_has_the_sequential_law_to_1e_12(variant, canvas, k):
    decoder, settings = VARIANTS[variant]
    model, prompt = plain_model(canvas, Sampling())
    heads = toy_heads(VOCAB) if variant != "ngram" else None
    law = law_of(decoder, model, prompt, k=k, heads=heads, **settings)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(model, prompt)) < 1e-12


@pytest.mark.parametrize("variant", ["assd", "rows", "ends"])
def test_without_a_head_the_law_is_the_same(variant):
    decoder, settings = VARIANTS[variant]
    model, prompt = plain_model("middle prompt", Sampling())
    assert total_variation(law_of(decoder, model, prompt, k=2, **settings), chain_rule(model, prompt)) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2)], ids=str)
def test_the_warps_leave_the_law_sequential(variant, sampling):
    decoder, settings = VARIANTS[variant]
    model, prompt = plain_model("two prompts", sampling)
    heads = toy_heads(VOCAB) if variant != "ngram" else None
    law = law_of(decoder, model, prompt, k=2, heads=heads, **settings)
    assert total_variation(law, chain_rule(model, prompt)) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_suppressed_token_is_renormalised_away_everywhere(variant):
    decoder, settings = VARIANTS[variant]
    model, prompt = plain_model("two prompts", Sampling(), suppressed=[1])
    heads = toy_heads(VOCAB) if variant != "ngram" else None
    law = law_of(decoder, model, prompt, k=2, heads=heads, **settings)
    assert all(1 not in tokens[len(prompt) :] for tokens in law)
    assert total_variation(law, chain_rule(model, prompt)) < 1e-12


def test_a_wrong_residual_is_found_out(monkeypatch):
    monkeypatch.setattr(choosers, "residual", lambda p, q: q.exp())
    model, prompt = plain_model("two prompts", Sampling())
    assert total_variation(law_of(reference.assd, model, prompt, k=2), chain_rule(model, prompt)) > 0.01


def test_looking_at_a_rejected_draft_is_found_out(monkeypatch):
    # A verification row that sees its own draft: limit one too high.
    original = PlainModel.hidden
    monkeypatch.setattr(
        PlainModel,
        "hidden",
        lambda self, tokens, queries: original(
            self, tokens, [(r, min(limit + 1, len(tokens))) for r, limit in queries]
        ),
    )
    model, prompt = plain_model("middle prompt", Sampling())
    wrong = law_of(reference.one_pass, model, prompt, k=2)
    monkeypatch.undo()
    assert total_variation(wrong, chain_rule(model, prompt)) > 0.01


def test_the_toy_conditionals_depend_on_order_and_context():
    model, prompt = plain_model("empty prompt", Sampling())
    reordered = PlainModel(model.backbone, order=[3, 1, 0, 2], num_prompt=0, sampling=Sampling())
    by_position = {tuple(t[order] for order in (2, 1, 3, 0)): mass for t, mass in chain_rule(reordered, []).items()}
    model.backbone.set_order(0, torch.arange(LENGTH))
    assert total_variation(chain_rule(model, prompt), by_position) > 0.05
