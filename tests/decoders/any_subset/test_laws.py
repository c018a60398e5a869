"""Exact output laws of the any-subset decoders under the rejection rule: every branch of every random choice, summed.

What runs is the decoder's own generator on the real engine (tests/decoders/enumeration.py): content and query rows, cached
columns, heads and refill are those of production.
"""

import itertools
from copy import copy
from functools import cache, partial

import numpy as np
import pytest

from draftmill.decoders.any_subset import assd
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine import sampler, samples
from draftmill.decoders.engine.asks import Span
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders import enumeration
from tests.decoders.any_subset.test_any_subset import SEQUENTIAL, VARIANTS
from tests.decoders.enumeration import CoupledChooser, decoded, engine_of, fills, law_of, total_variation
from tests.decoders.references.any_subset import PlainModel
from tests.decoders.references.choosers import NoiseChooser
from tests.decoders.references.table import TableBackbone
from tests.decoders.support import decoder_settings, table_info, toy_heads, toy_requests

VOCAB, LENGTH = 3, 4
CANVASES = {"middle prompt": [HOLE, HOLE, 1, HOLE], "two prompts": [2, HOLE, HOLE, 0], "empty prompt": [HOLE] * 4}
BARE = ["self", "rows", "ends"]


@cache
def _made():
    return TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=5)


def variant(name, k):
    return decoder_settings("assd", k=k, **VARIANTS[name])


def setup(sampling=None, *, suppressed=(), rows=1, headed=True, acceptance="rejection"):
    warp = (sampling or Sampling()).model_copy(update={"acceptance": acceptance})
    heads = toy_heads(VOCAB) if headed else None
    info = table_info(VOCAB, suppressed)
    return Setup(backbone=copy(_made()), info=info, sampling=warp, max_rows=rows, max_tokens=99, heads=heads)


def request(canvas, index=0, hole_order=None):
    return Request(index, sample_key(0, str(index)), np.array(canvas, dtype=np.int32), hole_order=hole_order)


def chain_rule(canvas, sampling=None, suppressed=(), hole_order=None):
    """The sequential law as a plain product of conditionals, without any decoder; texts by position of their holes."""
    prompt = [position for position, token in enumerate(canvas) if token != HOLE]
    holes = [position for position, token in enumerate(canvas) if token == HOLE]
    order = [*prompt, *(holes if hole_order is None else hole_order.tolist())]
    warp = sampling or Sampling()
    model = PlainModel(copy(_made()), order=order, num_prompt=len(prompt), sampling=warp, suppressed=suppressed)
    law = {}
    for fill in fills(VOCAB, len(holes)):
        placed = dict(zip(holes, fill, strict=True))
        tokens, mass = [*(canvas[position] for position in prompt)], 1.0
        for rank in range(len(prompt), len(order)):
            token = placed[order[rank]]
            mass *= float(model.law(model.hidden(tokens, [(rank, rank)])[0])[token].exp())
            tokens.append(token)
        law[fill] = mass
    return law


def far_off(law, canvas):
    return total_variation(law, chain_rule(canvas)) > 0.01


@pytest.mark.parametrize("canvas", CANVASES)
def test_the_baseline_follows_the_product_of_conditionals(canvas):
    law = law_of(setup(), SEQUENTIAL, [request(CANVASES[canvas])], 0)
    assert total_variation(law, chain_rule(CANVASES[canvas])) < 1e-12


# Four holes are tens of thousands of branches where every token is drafted and judged.
CASES = [
    (name, canvas, k)
    for name, canvas, k in itertools.product(VARIANTS, CANVASES, (1, 2, 3))
    if canvas != "empty prompt" or k == 1
]


@pytest.mark.one_in(17, soak=3)
@pytest.mark.parametrize(("name", "canvas", "k"), CASES)
def test_every_variant_has_the_sequential_law_to_1e_12(name, canvas, k):
    law = law_of(setup(), variant(name, k), [request(CANVASES[canvas])], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(CANVASES[canvas])) < 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BARE)
def test_without_a_head_the_law_is_the_same(name):
    canvas = CANVASES["middle prompt"]
    law = law_of(setup(headed=False), variant(name, 2), [request(canvas)], 0)
    assert total_variation(law, chain_rule(canvas)) < 1e-12


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2), Sampling(top_k=2, top_p=0.6)],
    ids=str,
)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(name, sampling):
    canvas = CANVASES["two prompts"]
    law = law_of(setup(sampling, suppressed=[1]), variant(name, 2), [request(canvas)], 0)
    assert all(1 not in fill for fill in law)
    assert total_variation(law, chain_rule(canvas, sampling, [1])) < 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [None, *VARIANTS])
@pytest.mark.parametrize("sampling", [Sampling(top_p=0.7), Sampling(temperature=0.7, top_k=2, top_p=0.6)], ids=str)
def test_coupled_draws_have_the_law_of_the_cut_distributions(name, sampling):
    canvases = [[HOLE, 2, HOLE], CANVASES["middle prompt"], [0, HOLE, 1, HOLE]]
    requests = [request(canvas, index) for index, canvas in enumerate(canvases)]
    settings = variant(name, 2) if name else SEQUENTIAL
    law = law_of(setup(sampling, rows=2, acceptance="coupled"), settings, requests, 1)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, chain_rule(canvases[1], sampling)) < 1e-12
    assert far_off(law, canvases[1]), "the cuts change nothing"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_order_of_the_holes_has_its_own_law(name):
    canvas, order = CANVASES["middle prompt"], np.array([3, 0, 1])
    law = law_of(setup(), variant(name, 2), [request(canvas, hole_order=order)], 0)
    assert total_variation(law, chain_rule(canvas, hole_order=order)) < 1e-12
    assert far_off(law, canvas), "the orders have the same law, so this proves nothing"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sample_that_refills_a_slot_beside_another_has_the_law_of_one_alone(name):
    canvases = [[HOLE, 2, HOLE], [HOLE] * 4, CANVASES["two prompts"], [0, HOLE, 1, HOLE]]
    requests = [request(canvas, index) for index, canvas in enumerate(canvases)]
    law = law_of(setup(rows=2), variant(name, 2), requests, 2)
    assert total_variation(law, chain_rule(canvases[2])) < 1e-12


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("k", "sampling"),
    [(1, Sampling()), (2, Sampling(temperature=0.8, top_p=0.8)), (3, Sampling(temperature=0.0)), (5, Sampling())],
    ids=str,
)
def test_batched_draws_and_counts_are_those_of_a_chooser_that_reads_the_same_noise(name, acceptance, k, sampling):
    requests = toy_requests(40, vocab_size=VOCAB, longest=LENGTH, seed=3)
    one, batch = (setup(sampling, rows=rows, acceptance=acceptance) for rows in (1, 7))
    rule = NoiseChooser if acceptance == "rejection" else partial(CoupledChooser, sampling=one.sampling)
    choosers = {each.index: rule(each.key) for each in requests}
    expected = decoded(engine_of(one, variant(name, k), choosers), requests)
    found = decoded(build_decoder(batch, variant(name, k)), requests)
    for index, outcome in found.items():
        other = expected[index]
        assert outcome.tokens.tolist() == other.tokens.tolist()
        assert (outcome.nfe, outcome.nfe_draft, outcome.iterations) == (other.nfe, other.nfe_draft, other.iterations)
        counts = (outcome.proposed, outcome.accepted, outcome.accept_hist)
        assert counts == (other.proposed, other.accepted, other.accept_hist)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_wrong_residual_is_found_out(name, monkeypatch):
    canvas, wrong = CANVASES["two prompts"], lambda p, q: q.exp()
    monkeypatch.setattr(sampler, "residual", wrong)
    with pytest.raises(AssertionError, match="gives another token"):
        law_of(setup(), variant(name, 2), [request(canvas)], 0)
    # If the enumeration makes the same mistake, the law shows it.
    monkeypatch.setattr(enumeration, "left_over", wrong)
    assert far_off(law_of(setup(), variant(name, 2), [request(canvas)], 0), canvas)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("states", "log_q", "found"), [(1.0, 0.3, "drafts hold"), (0.5, 0.0, "another token")])
def test_a_drafter_that_hides_its_distribution_is_found_out(name, states, log_q, found, monkeypatch):
    keep = Sampler._keep
    monkeypatch.setattr(Sampler, "_keep", lambda self, cell, h, q: keep(self, cell, h * states, q + log_q))
    with pytest.raises(AssertionError, match=found):
        law_of(setup(), variant(name, 2), [request(CANVASES["middle prompt"])], 0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_looking_at_the_draft_that_a_row_judges_is_found_out(name, monkeypatch):
    wrong = lambda rank, count: Span(count, rank, rank, lag=0)  # noqa: E731
    monkeypatch.setattr(assd, "fresh_queries", wrong)
    canvas = CANVASES["middle prompt"]
    if name in ("rows", "ends"):
        assert far_off(law_of(setup(), variant(name, 2), [request(canvas)], 0), canvas)
        return
    # Here the last draft's content is not written: the row sees what an earlier sample has left there.
    with pytest.raises(AssertionError, match="makes other drafts hold"):
        law_of(setup(), variant(name, 2), [request(canvas)], 0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_content_of_refused_drafts_that_counts_as_cached_is_found_out(name, monkeypatch):
    def careless(self, end, *asked):
        # An any-subset sample has no other use for `cached_draft`.
        self.cached, self.cached_draft = max(self.cached, min(self.cached_draft, end)), end
        return honest(self, end, *asked)

    honest = samples.Sample.two_stream
    monkeypatch.setattr(samples.Sample, "two_stream", careless)
    # Of two self-drafts only the first one's content is written, which always holds; an n-gram needs a left neighbour.
    canvas = [2, HOLE, HOLE, HOLE]
    assert far_off(law_of(setup(), variant(name, 3), [request(canvas)], 0), canvas)
