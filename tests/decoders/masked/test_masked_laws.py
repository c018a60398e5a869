"""The laws of the decoders of masked diffusion, enumerated on their generators in the real engine, beside other samples."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from draftmill.decoders.base import ModelInfo, Request, RowSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.sampling import Warp
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import (
    FactorSettings,
    SelfSpeculativeSettings,
    StepwiseSettings,
    ThresholdSettings,
)
from draftmill.decoders.registry import build_decoder
from tests.decoders.enumeration import Law, decoded, law_of, total_variation
from tests.decoders.references.sampling import coupled_draw
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings

SAMPLED = Sampling(temperature=0.8)
CANVASES = {"tail": [0, -1, -1, -1], "middle": [-1, 1, -1, -1], "whole": [-1, -1, -1, -1]}


@cache
def model(vocab_size: int, length: int) -> TokenTable:
    """A table whose last token is the mask."""
    return TokenTable(vocab_size=vocab_size + 1, num_positions=length, seed=5)


def setup_of(
    vocab_size: int = 2,
    *,
    rows: int = 1,
    stops: Stops | None = None,
    sampling: Sampling = SAMPLED,
    family: str = "table",
) -> Setup:
    info = ModelInfo(family, vocab_size + 1, vocab_size, None, "masked", 0, (vocab_size,))
    backbone = model(vocab_size, 4)
    return Setup(backbone=backbone, info=info, sampling=sampling, max_rows=rows, max_tokens=1 << 20, stops=stops)


def request(canvas: list[int], index: int = 0) -> Request:
    return Request(index, 100 + index, np.array(canvas, dtype=np.int32))


def law_alone(settings: DecoderChoice, canvas: list[int], *, vocab_size: int = 2, **more) -> Law:
    law = law_of(setup_of(vocab_size, **more), settings, [request(canvas)], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


def step(**more) -> StepwiseSettings:
    return decoder_settings("stepwise", **more)


def drafting(**more) -> SelfSpeculativeSettings:
    return decoder_settings("ssd", **more)


def table_law(vocab_size: int, canvas: list[int], sampling: Sampling = SAMPLED) -> torch.Tensor:
    """The distributions of all positions that see this canvas, [P, V], under these settings."""
    held = [vocab_size if token < 0 else token for token in canvas]
    base = vocab_size + 2
    code = base**4 - 1 + sum((token - vocab_size - 1) * base**place for place, token in enumerate(held))
    law = (model(vocab_size, 4).table_PXV[:, code, :vocab_size] / sampling.temperature).softmax(-1)
    for row in law if sampling.top_k or sampling.top_p else ():
        # Of the most probable tokens as many as top-k and top-p leave; no two are equal here.
        best = row.sort(descending=True).indices[: sampling.top_k]
        mass = row[best] / row[best].sum()
        kept = best[mass.cumsum(0) - mass < (sampling.top_p or 1.0)]
        row.copy_(torch.zeros_like(row).index_put((kept,), row[kept] / row[kept].sum()))
    return law


def chain_law(
    vocab_size: int, canvas: list[int], place_of: Callable[[list[int]], int], sampling: Sampling = SAMPLED
) -> Law:
    """The law of filling one place after the other, each by its distribution at that time."""
    found: Law = {}

    def fill(held: list[int], mass: float) -> None:
        if -1 not in held:
            text = tuple(held[place] for place, token in enumerate(canvas) if token < 0)
            found[text] = found.get(text, 0.0) + mass
            return
        place = place_of(held)
        for token, p in enumerate(table_law(vocab_size, held, sampling)[place].tolist()):
            if p:
                fill([*held[:place], token, *held[place + 1 :]], mass * p)

    fill(canvas, 1.0)
    return found


def random_orders(canvas: list[int], sampling: Sampling = SAMPLED) -> Law:
    """The law of filling the holes in an order that is drawn first; every one is as likely as the others."""
    holes, found = [place for place, token in enumerate(canvas) if token < 0], Law()
    orders = list(itertools.permutations(holes))

    def next_of(order: tuple[int, ...], held: list[int]) -> int:
        return next(at for at in order if held[at] < 0)

    for order in orders:
        law = chain_law(2, canvas, partial(next_of, order), sampling)
        for text, mass in law.items():
            found[text] = found.get(text, 0.0) + mass / len(orders)
    return found


def surest(held: list[int], *, vocab_size: int, kind: str) -> int:
    """The mask that an untempered distribution is surest of, whatever token is drawn."""

    def sure(place: int) -> float:
        law = table_law(vocab_size, held)[place] ** SAMPLED.temperature
        best = (law / law.sum()).sort(descending=True).values
        return float(best[0] - best[1]) if kind == "margin" else float((best * best.log()).sum())

    return max((place for place, token in enumerate(held) if token < 0), key=lambda place: (sure(place), -place))


@pytest.mark.parametrize("vocab_size", [2, 3])
@pytest.mark.parametrize("kind", ["left to right", "margin", "entropy"])
def test_the_law_of_stepwise_is_that_of_its_order_where_this_depends_on_no_draw(kind, vocab_size):
    canvas = [-1, 1, -1, -1] if vocab_size == 2 else [-1, 1, 0, -1]
    if kind == "left to right":
        law = law_alone(step(block_length=1), canvas, vocab_size=vocab_size)
        expected = chain_law(vocab_size, canvas, lambda held: held.index(-1))
    else:
        law = law_alone(step(block_length=None, confidence=kind), canvas, vocab_size=vocab_size)
        expected = chain_law(vocab_size, canvas, lambda held: surest(held, vocab_size=vocab_size, kind=kind))
    assert total_variation(law, expected) < 1e-12


Reveal = Callable[[list[float]], int]
"""How many masks are revealed, given how sure the loop is of them, the highest first."""


def public_law(
    vocab_size: int,
    canvas: list[int],
    reveal: Reveal,
    *,
    block_length: int | None = None,
    sampling: Sampling = SAMPLED,
    dream: bool = False,
) -> Law:
    """The law of the loops of LLaDA, Fast-dLLM and Dream: every step draws a token for each mask of the block, independently of
    all other steps, and reveals the most probable of these tokens, by the model's own distribution (Dream: the one drawn from).
    """
    size, found = block_length or len(canvas), Law()
    origin = canvas.index(-1)

    def loop(held: list[int], mass: float) -> None:
        masks = [place for place, token in enumerate(held) if token < 0]
        if not masks:
            text = tuple(held[place] for place, token in enumerate(canvas) if token < 0)
            found[text] = found.get(text, 0.0) + mass
            return
        masks = [place for place in masks if (place - origin) // size == (masks[0] - origin) // size]
        law, plain = table_law(vocab_size, held, sampling), table_law(vocab_size, held, Sampling(temperature=1.0))
        sure = law if dream else plain
        for drawn in itertools.product(range(vocab_size), repeat=len(masks)):
            p = math.prod(float(law[place, token]) for place, token in zip(masks, drawn, strict=True))
            if not p:
                continue
            ranked = sorted(
                (-float(sure[place, token]), place, token) for place, token in zip(masks, drawn, strict=True)
            )
            new = list(held)
            for _, place, token in ranked[: reveal([-worth for worth, *_ in ranked])]:
                new[place] = token
            loop(new, mass * p)

    loop(list(canvas), 1.0)
    return found


PUBLIC: dict[str, tuple[dict, Reveal]] = {
    "one a step": ({}, lambda sure: 1),
    "in blocks": ({"block_length": 2}, lambda sure: 1),
    "two a step": ({"tokens_per_step": 2}, lambda sure: 2),
    "threshold": ({"kind": "threshold", "tau": 0.6}, lambda sure: max(sum(one >= 0.6 for one in sure), 1)),
    "factor": (
        {"kind": "factor", "factor": 1.0},
        lambda sure: max((n for n, one in enumerate(sure, 1) if (n + 1) * (1 - one) < 1.0), default=1),
    ),
}


def decoder_of(settings: dict) -> DecoderChoice:
    made = {"threshold": ThresholdSettings, "factor": FactorSettings, "stepwise": StepwiseSettings}
    whole: dict = {"kind": "stepwise", "block_length": None} | settings
    return made[whole["kind"]](**whole)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_drawn_has_the_law_of_the_public_loops(name):
    (more, reveal), hot = PUBLIC[name], Sampling(temperature=2.0)
    canvas = CANVASES["tail"]
    expected = public_law(2, canvas, reveal, block_length=more.get("block_length"), sampling=hot)
    assert total_variation(law_alone(decoder_of(more), canvas, sampling=hot), expected) < 1e-12
    # A position that keeps its random numbers over all steps gives another law, so the test can tell.
    kept = law_alone(decoder_of(more | {"draws": "kept"}), canvas, sampling=hot)
    assert total_variation(kept, expected) > 0.05


@pytest.mark.parametrize("cut", [None, "top-k", "top-p", "both"])
@pytest.mark.parametrize("family", ["table", "dream"])
def test_cut_distributions_have_the_law_of_the_public_loops_too(family, cut):
    """Dream's confidences are those of the distribution that it draws from, LLaDA's those of the model's own."""
    canvas, sampling = [-1, 1, 0, -1], CUTS[cut] if cut else SAMPLED
    law = law_alone(step(), canvas, vocab_size=3, sampling=sampling, family=family)
    dream = family == "dream"
    expected, other = (
        public_law(3, canvas, lambda sure: 1, sampling=sampling, dream=kind) for kind in (dream, not dream)
    )
    assert total_variation(law, expected) < 1e-12
    if cut:
        assert total_variation(law, other) > 1e-3


def test_a_step_that_reveals_nothing_leaves_no_trace():
    """Dream's schedule with as many steps as masks: none in the first step, two in the last. The first step's draws are gone."""
    canvas, shares = CANVASES["middle"], {3: 1, 2: 2}
    law = law_alone(step(block_length=None, steps=3, schedule="dream"), canvas)
    assert total_variation(law, public_law(2, canvas, lambda sure: shares[len(sure)])) < 1e-12


def test_a_sample_of_its_own_temperature_in_a_greedy_job_draws_anew_too():
    own, found = RowSettings(temperature=SAMPLED.temperature), dict[str, list[list[int]]]()
    requests = [replace(request(CANVASES["whole"], index), settings=own) for index in range(40)]
    for name, sampling, settings in (
        ("own", Sampling(temperature=0.0), step()),
        ("job", SAMPLED, step()),
        ("ssd", Sampling(temperature=0.0), drafting(draft_length=3)),
        ("kept", SAMPLED, step(draws="kept")),
    ):
        outcomes = decoded(build_decoder(setup_of(rows=3, sampling=sampling), settings), requests)
        found[name] = [outcomes[index].tokens.tolist() for index in range(40)]
    assert found["own"] == found["job"] == found["ssd"] != found["kept"]


CUTS = {
    "top-p": Sampling(temperature=0.8, top_p=0.7),
    "top-k": Sampling(temperature=1.3, top_k=2),
    "both": Sampling(top_k=2, top_p=0.6),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_law_of_stepwise_is_that_of_the_cut_distributions(cut):
    canvas, sampling = [-1, 1, 0, -1], CUTS[cut]
    law = law_alone(step(block_length=1), canvas, vocab_size=3, sampling=sampling)
    assert total_variation(law, chain_law(3, canvas, lambda held: held.index(-1), sampling)) < 1e-12
    # Confidences are those of the distribution that is not cut.
    law = law_alone(step(block_length=None, confidence="margin"), canvas, vocab_size=3, sampling=sampling)
    place_of = partial(surest, vocab_size=3, kind="margin")
    assert total_variation(law, chain_law(3, canvas, place_of, sampling)) < 1e-12
    assert total_variation(law, law_alone(step(block_length=None, confidence="margin"), canvas, vocab_size=3)) > 0.01


@pytest.mark.one_in(5)
@pytest.mark.parametrize("cut", [None, "top-p"])
@pytest.mark.parametrize("name", ["tail", "middle"])
def test_a_random_order_is_one_of_all_and_each_is_as_likely(name, cut):
    sampling = CUTS[cut] if cut else SAMPLED
    law = law_alone(step(block_length=None, confidence="random"), CANVASES[name], sampling=sampling)
    assert total_variation(law, random_orders(CANVASES[name], sampling)) < 1e-12


def test_a_random_order_is_that_of_the_samples_own_numbers():
    orders = []
    for index in range(30):
        canvas = [-1, 1, -1, -1]
        setup = setup_of(sampling=Sampling(temperature=0.0))
        engine = build_decoder(replace(setup, trace=True), step(block_length=None, confidence="random"))
        (outcome,) = decoded(engine, [request(canvas, index)]).values()
        assert outcome.trace is not None
        orders.append([at for one in outcome.trace for at in one.positions])
        numbers = keys.uniforms(100 + index, np.array([0, 2, 3]), keys.ORDER)
        assert orders[-1] == [[0, 2, 3][at] for at in np.argsort(-numbers)]
    assert len({tuple(order) for order in orders}) == 6


def test_a_nucleus_that_is_not_cut_is_found(monkeypatch):
    monkeypatch.setattr(Warp, "draw", lambda self, law, gumbel: coupled_draw(law, gumbel))
    with pytest.raises(AssertionError, match="noise of the chosen branch gives another token"):
        law_alone(step(), [-1, 1, 0, -1], vocab_size=3, sampling=Sampling(top_p=0.4))


SSD: list[tuple[str, dict, dict, dict]] = [
    *(("middle", {"block_length": None}, {"draft_length": 2}, more) for more in ({}, {"sampling": CUTS["top-p"]})),
    ("middle", {"block_length": 2, "confidence": "margin"}, {"draft_length": 1}, {}),
    ("middle", {"block_length": 2, "cache": "prefix"}, {"draft_length": 2}, {}),
    ("middle", {"block_length": 2, "cache": "dual_strict", "refresh": 2}, {"draft_length": 3}, {}),
    *(
        (
            "middle",
            {"block_length": 2, "cache": "dual_strict", "refresh": 3},
            {"draft_length": 2, "tree": "mixed"},
            more,
        )
        for more in ({}, {"sampling": CUTS["top-p"]})
    ),
    ("middle", {"block_length": 2, "confidence": "random"}, {"draft_length": 2}, {}),
    ("middle", {"block_length": None, "confidence": "random"}, {"draft_length": 1}, {"sampling": CUTS["top-p"]}),
    # Where a position keeps its noise there are fewer branches, and canvases may be larger.
    *((name, {"block_length": 2, "draws": "kept"}, {"draft_length": 3}, {}) for name in CANVASES),
    # The swap of two drafts needs two drafts in the second forward.
    ("whole", {"block_length": None, "draws": "kept"}, {"draft_length": 2, "tree": "mixed"}, {}),
    ("three", {}, {"draft_length": 1}, {"vocab_size": 3, "sampling": CUTS["top-k"]}),
    ("tail", {"block_length": 2}, {}, {"stops": Stops(ids=(1,))}),
]


@pytest.mark.one_in(13)
@pytest.mark.parametrize(("name", "shared", "own", "more"), SSD, ids=str)
def test_ssd_has_the_law_of_stepwise(name, shared, own, more):
    canvas = CANVASES.get(name, [-1, 1, -1, 0])
    laws = [law_alone(one, canvas, **more) for one in (step(**shared), drafting(**shared, **own))]
    assert "stops" not in more or {len(text) for text in laws[0]} == {1, 2, 3}
    assert total_variation(*laws) < 1e-12


@pytest.mark.one_in(99, soak=3)
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 5])
def test_ssd_has_the_law_of_stepwise_beside_other_samples_and_in_slots_that_are_refilled(number):
    _, shared, own, _ = SSD[number]
    before, after = [request([-1, 0, -1], 1), request([1, -1], 2)], [request([-1] * 4, 3)]
    # Without the last one, the sample moves to the slot that becomes free.
    for requests in ([*before, request(CANVASES["middle"]), *after], [before[1], request(CANVASES["middle"])]):
        law = law_of(setup_of(rows=2), drafting(**shared, **own), requests, 0)
        assert total_variation(law, law_alone(step(**shared), CANVASES["middle"])) < 1e-12
