"""Exact output laws of decoders that judge drafts, under both rules: every branch of every random choice, summed.

What runs is the decoder's own generator on the real engine (enumeration.py): packing, cached columns, heads, refill and stops are
those of production. A baseline has the law of its model, written as a plain product of conditionals; all others have the law of
their baseline.
"""

import itertools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.any_subset import assd
from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine import sampler, samples
from draftmill.decoders.engine.asks import Span
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders import enumeration
from tests.decoders.any_subset.test_any_subset import VARIANTS
from tests.decoders.enumeration import CoupledChooser, decoded, engine_of, fills, law_of, total_variation
from tests.decoders.masked import diffusion_tables
from tests.decoders.references.any_subset import PlainModel
from tests.decoders.references.causal import PlainCausal
from tests.decoders.references.choosers import NoiseChooser
from tests.decoders.references.table import TableBackbone
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, table_info, token_info, toy_heads, toy_prompts, toy_requests

VOCAB = 3
AR = decoder_settings("autoregressive")


@dataclass(frozen=True)
class Kind:
    """A kind of models with its baseline, decoders by their numbers of drafts, and canvases; `headless` ones use no head."""

    info: ModelInfo
    baseline: DecoderChoice
    decoders: dict[str, Callable[[int], DecoderChoice]]
    canvases: dict[str, list[int]]
    models: Callable[[], dict[str, Any]]
    headless: tuple[str, ...] = ()

    def setup(self, name="", sampling=None, *, suppressed=(), rows=1, stops=None, acceptance="rejection") -> Setup:
        warp = (sampling or Sampling()).model_copy(update={"acceptance": acceptance})
        models = self.models() | ({"heads": None} if name in self.headless else {})
        info = replace(self.info, suppressed=(*self.info.suppressed, *suppressed))
        return Setup(**models, info=info, sampling=warp, max_rows=rows, max_tokens=99, stops=stops)


@cache
def tables(kind) -> Any:
    if kind == "any_subset":
        return TableBackbone(vocab_size=VOCAB, num_positions=4, seed=5)
    return TokenTable(vocab_size=VOCAB + (kind == "masks"), num_positions=7, seed=6 if kind == "drafter" else 5)


def by_lookup(drafter):
    return lambda k: decoder_settings("speculative", k=k, drafter=drafter)


def ours(**settings):
    return lambda k: decoder_settings("assd", k=k, **settings)


def diffusing(**settings):
    return lambda k: diffusion_tables.specdiff(k, min(k, 2), **settings)


REPEATED = {"one token": [1, *[HOLE] * 4], "a repetition": [0, 1, 0, HOLE, HOLE]}
TWO = {"two tokens": [1, 0, HOLE, HOLE, HOLE], "a repetition": REPEATED["a repetition"]}
KINDS: dict[str, Kind] = {
    "any_subset": Kind(
        table_info(VOCAB),
        decoder_settings("any_subset"),
        {name: ours(**more) for name, more in VARIANTS.items()}
        | {f"{name}, bare": ours(**VARIANTS[name]) for name in ("self", "rows", "ends")},
        {"two prompts": [2, HOLE, HOLE, 0], "middle prompt": [HOLE, HOLE, 1, HOLE], "empty prompt": [HOLE] * 4},
        lambda: {"backbone": copy(tables("any_subset")), "heads": toy_heads(VOCAB)},
        ("self, bare", "rows, bare", "ends, bare"),
    ),
    "causal": Kind(
        token_info(VOCAB),
        AR,
        {
            "model": by_lookup({"kind": "model", "path": "drafter"}),
            "ngram": by_lookup({"kind": "ngram", "max_n": 2, "min_n": 1}),
            "jacobi": lambda k: decoder_settings("jacobi", block_size=k),
        },
        REPEATED,
        lambda: {
            "backbone": copy(tables("causal")), "drafter": copy(tables("drafter")), "drafter_info": token_info(VOCAB)
        },
    ),
    "masks": Kind(
        ModelInfo("table", VOCAB + 1, VOCAB, None, "causal", 0, (VOCAB,)),
        AR,
        {"masks": by_lookup({"kind": "masks"})},
        TWO,
        lambda: {"backbone": copy(tables("masks"))},
    ),
    "specdiff": Kind(
        diffusion_tables.TARGET_INFO,
        AR,
        {
            "short": diffusing(), "full": diffusing(window="full"), "headed": diffusing(),
            "full, headed": diffusing(window="full"),
        },
        TWO,
        lambda: {
            "backbone": diffusion_tables.target(), "drafter": diffusion_tables.drafter(),
            "drafter_info": diffusion_tables.mask_info(max_length=5), "heads": toy_heads(VOCAB + 1),
        },
        ("short", "full"),
    ),
}  # fmt: skip
EVERY = [(kind, name) for kind, one in KINDS.items() for name in one.decoders]
JUDGING = [(kind, name) for kind, name in EVERY if name != "jacobi"]
USUAL = [(kind, name) for kind, name in JUDGING if kind != "specdiff" and "bare" not in name]
CUTS = [Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=2), Sampling(top_k=2, top_p=0.6)]


def request(canvas, index=0, hole_order=None):
    return Request(index, sample_key(0, str(index)), np.array(canvas, dtype=np.int32), hole_order=hole_order)


def law(kind, name, canvas, k=2, *, requests=None, index=0, **more):
    """The exact law of a canvas, or of one of several `requests`; `name` is a decoder of the kind, or empty for the baseline."""
    one = KINDS[kind]
    settings = one.decoders[name](k) if name else one.baseline
    return law_of(one.setup(name, **more), settings, requests or [request(one.canvases[canvas])], index)


def chain_rule(kind, canvas, sampling=None, suppressed=(), hole_order=None):
    """The sequential law as a plain product of conditionals, without any decoder; texts by position of their holes."""
    prompt = [position for position, token in enumerate(canvas) if token != HOLE]
    holes = [position for position, token in enumerate(canvas) if token == HOLE]
    order, warp = [*prompt, *(holes if hole_order is None else hole_order.tolist())], sampling or Sampling()
    more: dict = {"sampling": warp, "suppressed": [*KINDS[kind].info.suppressed, *suppressed]}
    if kind == "any_subset":
        model = PlainModel(copy(tables(kind)), order=order, num_prompt=len(prompt), **more)
        after = lambda tokens: model.law(model.hidden(tokens, [(len(tokens), len(tokens))])[0])  # noqa: E731
    else:
        after = PlainCausal(KINDS[kind].models()["backbone"], length=7, **more).law
    found = {}
    for fill in fills(VOCAB, len(holes)):
        placed, mass = dict(zip(holes, fill, strict=True)), 1.0
        tokens = [canvas[position] for position in prompt]
        for position in order[len(prompt) :]:
            mass *= float(after(tokens)[placed[position]].exp())
            tokens.append(placed[position])
        found[fill] = mass
    return found


def far_off(found, kind, canvas):
    return total_variation(found, chain_rule(kind, KINDS[kind].canvases[canvas])) > 0.01


@pytest.mark.parametrize(("kind", "canvas"), [(kind, name) for kind, one in KINDS.items() for name in one.canvases])
def test_a_baseline_follows_the_product_of_conditionals(kind, canvas):
    tokens = KINDS[kind].canvases[canvas]
    for sampling, suppressed in ((None, ()), (CUTS[3], (1,))):
        found = law(kind, "", canvas, sampling=sampling, suppressed=suppressed)
        assert total_variation(found, chain_rule(kind, tokens, sampling, suppressed)) < 1e-12
        assert bool(suppressed) != any(1 in fill for fill in found)


# Four holes are tens of thousands of branches where every token is drafted and judged.
CASES = [
    (kind, name, canvas, k)
    for (kind, name), k in itertools.product(JUDGING, (1, 2, 3))
    for canvas, tokens in KINDS[kind].canvases.items()
    if tokens.count(HOLE) < 4 or k == 1 or (kind, name) == ("causal", "ngram")
]


@pytest.mark.one_in(31, soak=3)
@pytest.mark.parametrize(("kind", "name", "canvas", "k"), CASES)
def test_every_decoder_has_the_law_of_its_baseline_to_1e_12(kind, name, canvas, k):
    found = law(kind, name, canvas, k)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(found, law(kind, "", canvas)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "name", "sampling"),
    [
        *((kind, name, sampling) for (kind, name), sampling in itertools.product(USUAL, CUTS)),
        *(
            pytest.param("specdiff", name, sampling, marks=pytest.mark.slow)
            for name, sampling in itertools.product(("short", "headed"), CUTS[:3])
        ),
    ],
    ids=str,
)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(kind, name, sampling):
    canvas = [*KINDS[kind].canvases][0 if kind == "any_subset" else -1]
    found, expected = (law(kind, one, canvas, sampling=sampling, suppressed=[1]) for one in (name, ""))
    assert all(1 not in fill for fill in found)
    assert total_variation(found, expected) < 1e-12


BESIDE = {
    "any_subset": [[HOLE, 2, HOLE], [HOLE] * 4, [2, HOLE, HOLE, 0], [0, HOLE, 1, HOLE]],
    "causal": [[0, 1, 0, HOLE, HOLE], [2, 2, 1, 0, HOLE], [1, 1, 0, HOLE, HOLE], [0, 0, 2, HOLE, HOLE]],
}
BESIDE |= dict.fromkeys(("masks", "specdiff"), BESIDE["causal"])


def beside(kind):
    return [request(canvas, index) for index, canvas in enumerate(BESIDE[kind])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [Sampling(top_p=0.7), Sampling(temperature=0.7, top_k=2, top_p=0.6)], ids=str)
@pytest.mark.parametrize(("kind", "name"), [*((kind, "") for kind in KINDS), *EVERY])
def test_coupled_draws_have_the_law_of_the_cut_distributions(kind, name, sampling):
    found = law(kind, name, "", requests=beside(kind), index=2, sampling=sampling, rows=2, acceptance="coupled")
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(found, chain_rule(kind, BESIDE[kind][2], sampling)) < 1e-12
    assert total_variation(found, chain_rule(kind, BESIDE[kind][2])) > 0.01, "the cuts change nothing"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "name"), JUDGING)
def test_a_sample_that_refills_a_slot_beside_another_has_the_law_of_one_alone(kind, name):
    found = law(kind, name, "", requests=beside(kind), index=2, rows=2)
    assert total_variation(found, chain_rule(kind, BESIDE[kind][2])) < 1e-12


@pytest.mark.parametrize(("kind", "name"), [case for case in USUAL if case[0] != "any_subset"])
def test_a_text_that_ends_at_a_stop_has_the_law_of_the_texts_up_to_there(kind, name):
    canvas, ended = [*KINDS[kind].canvases][-1 if kind == "causal" else 0], dict[tuple[int, ...], float]()
    for fill, mass in chain_rule(kind, KINDS[kind].canvases[canvas]).items():
        text = fill[: fill.index(2) + 1] if 2 in fill else fill
        ended[text] = ended.get(text, 0.0) + mass
    assert total_variation(law(kind, name, canvas, stops=Stops((2,))), ended) < 1e-12


@pytest.mark.parametrize("earlier", [[1, 2, 0, 1], [1], []])
@pytest.mark.parametrize("canvas", REPEATED)
def test_with_texts_of_earlier_runs_the_law_is_the_same(earlier, canvas):
    settings = decoder_settings("speculative", drafter={"kind": "run", "path": ("earlier",), "k": 3})
    given = replace(request(REPEATED[canvas]), earlier=(np.array(earlier, dtype=np.int32),))
    found = law_of(KINDS["causal"].setup(), settings, [given], 0)
    assert total_variation(found, chain_rule("causal", REPEATED[canvas])) < 1e-12


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["", *VARIANTS])
def test_an_order_of_the_holes_has_its_own_law(name):
    canvas, order = [HOLE, HOLE, 1, HOLE], np.array([3, 0, 1])
    found = law("any_subset", name, "", requests=[request(canvas, hole_order=order)])
    assert total_variation(found, chain_rule("any_subset", canvas, hole_order=order)) < 1e-12
    assert far_off(found, "any_subset", "middle prompt"), "the orders have the same law, so this proves nothing"


def test_the_native_order_of_specdiff_has_another_law():
    one = KINDS["specdiff"]
    backwards = replace(request(one.canvases["two tokens"]), key=55)
    native = law_of(one.setup("short"), diffusing(order="native")(2), [backwards], 0)
    assert total_variation(native, law("specdiff", "", "two tokens")) > 1e-4


@pytest.mark.one_in(11)
@pytest.mark.parametrize(("kind", "name"), [case for case in USUAL if case[0] != "masks"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("k", "sampling"),
    [(1, Sampling()), (2, Sampling(temperature=0.8, top_p=0.8)), (3, Sampling(temperature=0.0)), (5, Sampling())],
    ids=str,
)
def test_batched_draws_and_counts_are_those_of_a_chooser_that_reads_the_same_noise(kind, name, acceptance, k, sampling):
    made, longest = (toy_requests, 4) if kind == "any_subset" else (toy_prompts, 5)
    requests, settings = made(40, vocab_size=VOCAB, longest=longest, seed=3), KINDS[kind].decoders[name](k)
    one, batch = (KINDS[kind].setup(name, sampling, rows=rows, acceptance=acceptance) for rows in (1, 7))
    rule = NoiseChooser if acceptance == "rejection" else partial(CoupledChooser, sampling=one.sampling)
    expected = decoded(engine_of(one, settings, {each.index: rule(each.key) for each in requests}), requests)
    for index, outcome in decoded(build_decoder(batch, settings), requests).items():
        other = expected[index]
        assert outcome.tokens.tolist() == other.tokens.tolist()
        assert (outcome.nfe, outcome.nfe_draft, outcome.iterations) == (other.nfe, other.nfe_draft, other.iterations)
        counts = (outcome.proposed, outcome.accepted, outcome.accept_hist)
        assert counts == (other.proposed, other.accepted, other.accept_hist)


# ---- controls: mistakes that the enumeration must find -----------------------------------------------------------------

SELF = pytest.mark.parametrize("name", VARIANTS)


@SELF
def test_a_wrong_residual_is_found_out(name, monkeypatch):
    wrong = lambda p, q: q.exp()  # noqa: E731
    monkeypatch.setattr(sampler, "residual", wrong)
    with pytest.raises(AssertionError, match="gives another token"):
        law("any_subset", name, "two prompts")
    # If the enumeration makes the same mistake, the law shows it.
    monkeypatch.setattr(enumeration, "left_over", wrong)
    assert far_off(law("any_subset", name, "two prompts"), "any_subset", "two prompts")


@SELF
@pytest.mark.parametrize(("states", "log_q", "found"), [(1.0, 0.3, "drafts hold"), (0.5, 0.0, "another token")])
def test_a_drafter_that_hides_its_distribution_is_found_out(name, states, log_q, found, monkeypatch):
    keep = Sampler._keep
    monkeypatch.setattr(Sampler, "_keep", lambda self, cell, h, q: keep(self, cell, h * states, q + log_q))
    with pytest.raises(AssertionError, match=found):
        law("any_subset", name, "middle prompt")


@pytest.mark.one_in(5)
@SELF
def test_looking_at_the_draft_that_a_row_judges_is_found_out(name, monkeypatch):
    monkeypatch.setattr(assd, "fresh_queries", lambda rank, count: Span(count, rank, rank, lag=0))
    if name in ("rows", "ends"):
        assert far_off(law("any_subset", name, "middle prompt"), "any_subset", "middle prompt")
        return
    # Here the last draft's content is not written: the row sees what an earlier sample has left there.
    with pytest.raises(AssertionError, match="makes other drafts hold"):
        law("any_subset", name, "middle prompt")


@pytest.mark.one_in(4)
@SELF
def test_content_of_refused_drafts_that_counts_as_cached_is_found_out(name, monkeypatch):
    def careless(self, end, *asked):
        # An any-subset sample has no other use for `cached_draft`.
        self.cached, self.cached_draft = max(self.cached, min(self.cached_draft, end)), end
        return honest(self, end, *asked)

    honest = samples.Sample.two_stream
    monkeypatch.setattr(samples.Sample, "two_stream", careless)
    # Of two self-drafts only the first one's content is written, which always holds; an n-gram needs a left neighbour.
    canvas = [2, HOLE, HOLE, HOLE]
    found = law("any_subset", name, "", 3, requests=[request(canvas)])
    assert total_variation(found, chain_rule("any_subset", canvas)) > 0.01
