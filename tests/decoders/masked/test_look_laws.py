"""The laws of the decoders of masked diffusion, enumerated on their generators in the real engine, beside other samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from decoders.base import ModelInfo, Request
from decoders.common_settings import DecoderChoice, Sampling
from decoders.draws import noise
from decoders.draws.sampling import coupled_draw
from decoders.engine.ends import Stops
from decoders.engine.setup import Setup
from decoders.masked import ssd, stepwise
from decoders.masked.cached_windows import Windows
from decoders.masked.settings import FactorSettings, SelfSpeculativeSettings, StepwiseSettings, ThresholdSettings
from decoders.references.token_table import TokenTable
from tests.decoders.enumeration import Law, total_variation
from tests.decoders.look_enumeration import Triangle, law_of

SAMPLED = Sampling(temperature=0.8)
CANVASES = {"tail": [0, -1, -1, -1], "middle": [-1, 1, -1, -1], "whole": [-1, -1, -1, -1]}


@cache
def model(vocab_size: int, length: int) -> TokenTable:
    """A table whose last token is the mask."""
    return TokenTable(vocab_size=vocab_size + 1, num_positions=length, seed=5)


def setup_of(vocab_size: int = 2, *, rows: int = 1, stops: Stops | None = None) -> Setup:
    info = ModelInfo("table", vocab_size + 1, vocab_size, None, "masked", 0, (vocab_size,))
    backbone = model(vocab_size, 4)
    return Setup(backbone=backbone, info=info, sampling=SAMPLED, max_rows=rows, max_tokens=1 << 20, stops=stops)


def request(canvas: list[int], index: int = 0) -> Request:
    return Request(index, 100 + index, np.array(canvas, dtype=np.int32))


def law_alone(settings: DecoderChoice, canvas: list[int], *, vocab_size: int = 2, stops: Stops | None = None) -> Law:
    law = law_of(setup_of(vocab_size, stops=stops), settings, [request(canvas)], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


def step(**more: Any) -> StepwiseSettings:
    return StepwiseSettings(kind="stepwise", **more)


def drafting(**more: Any) -> SelfSpeculativeSettings:
    return SelfSpeculativeSettings(kind="ssd", **more)


# ---- the chooser's regions -------------------------------------------------------------------------------------------


def test_the_regions_of_a_distribution_are_as_large_as_its_probabilities_and_hold_the_points_that_are_drawn_there():
    rng, inside = np.random.default_rng(0), 0
    for key in range(60):
        laws = [rng.dirichlet([0.7] * 3) for _ in range(3)]
        whole = Triangle()
        for token in range(3):
            assert whole.where(token, laws[0]).area / whole.area == pytest.approx(laws[0][token], abs=1e-12)
        # The noise of one position, read under three distributions one after the other.
        gumbel = noise.gumbel_rows(noise.key_words([key]), torch.tensor([3]), 3)
        known = whole
        for law in laws:
            parts = [known.where(token, law).area / known.area for token in range(3)]
            assert sum(parts) == pytest.approx(1.0, abs=1e-9)
            token = int(coupled_draw(torch.from_numpy(law).log().unsqueeze(0), gumbel))
            assert parts[token] > 0
            known = known.where(token, law)
            inside += 1
        point = torch.softmax(-gumbel[0].double(), 0).numpy()
        sides = [
            np.linalg.det(np.stack([(end - start)[:2], (point - start)[:2]]))
            for start, end in zip(np.roll(known.corners, 1, 0), known.corners, strict=True)
        ]
        assert min(sides) > -1e-9 or max(sides) < 1e-9, "the point of the noise lies in what is known of it"
    assert inside == 180


# ---- stepwise --------------------------------------------------------------------------------------------------------


def table_law(vocab_size: int, canvas: list[int]) -> torch.Tensor:
    """The distributions of all positions that see this canvas, [P, V], at the temperature of these tests."""
    held = [vocab_size if token < 0 else token for token in canvas]
    base = vocab_size + 2
    code = base**4 - 1 + sum((token - vocab_size - 1) * base**place for place, token in enumerate(held))
    return (model(vocab_size, 4).table_PXV[:, code, :vocab_size] / SAMPLED.temperature).softmax(-1)


def chain_law(vocab_size: int, canvas: list[int], place_of: Callable[[list[int]], int]) -> Law:
    """The law of filling one place after the other, each by its distribution at that time."""
    found: Law = {}

    def fill(held: list[int], mass: float) -> None:
        if -1 not in held:
            text = tuple(held[place] for place, token in enumerate(canvas) if token < 0)
            found[text] = found.get(text, 0.0) + mass
            return
        place = place_of(held)
        for token, p in enumerate(table_law(vocab_size, held)[place].tolist()):
            fill([*held[:place], token, *held[place + 1 :]], mass * p)

    fill(canvas, 1.0)
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
def test_the_law_of_stepwise_is_that_of_its_order_where_this_depends_on_no_draw(kind: str, vocab_size: int):
    canvas = [-1, 1, -1, -1] if vocab_size == 2 else [-1, 1, 0, -1]
    if kind == "left to right":
        law = law_alone(step(block_length=1), canvas, vocab_size=vocab_size)
        expected = chain_law(vocab_size, canvas, lambda held: held.index(-1))
    else:
        law = law_alone(step(block_length=None, confidence=kind), canvas, vocab_size=vocab_size)
        expected = chain_law(vocab_size, canvas, lambda held: surest(held, vocab_size=vocab_size, kind=kind))
    assert total_variation(law, expected) < 1e-12


# ---- ssd -------------------------------------------------------------------------------------------------------------

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"block_length": None}, {"draft_length": 2}),
    ({"block_length": 2}, {"draft_length": 3}),
    ({"block_length": 2, "confidence": "margin"}, {"draft_length": 1}),
    ({"block_length": None}, {"draft_length": 2, "tree": "mixed"}),
    ({"block_length": 2, "cache": "prefix"}, {"draft_length": 2}),
    ({"block_length": 2, "cache": "dual_strict", "refresh": 3}, {"draft_length": 2, "tree": "mixed"}),
    ({"block_length": 2, "cache": "dual_strict", "refresh": 2}, {"draft_length": 3}),
]


@cache
def baseline(number: int, name: str) -> Law:
    return law_alone(step(**CASES[number][0]), CANVASES[name])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_ssd_has_the_law_of_stepwise(number: int):
    shared, own = CASES[number]
    # The swap of two drafts needs two drafts in the second forward.
    for name in {1: list(CANVASES), 3: ["whole"]}.get(number, ["middle"]):
        law = law_alone(drafting(**shared, **own), CANVASES[name])
        assert total_variation(law, baseline(number, name)) < 1e-12


@pytest.mark.parametrize("number", [0, 5])
def test_ssd_has_the_law_of_stepwise_beside_other_samples_and_in_slots_that_are_refilled(number: int):
    shared, own = CASES[number]
    before, after = [request([-1, 0, -1], 1), request([1, -1], 2)], [request([-1] * 4, 3)]
    # Without the last one, the sample moves to the slot that becomes free.
    for requests in ([*before, request(CANVASES["middle"]), *after], [before[1], request(CANVASES["middle"])]):
        law = law_of(setup_of(rows=2), drafting(**shared, **own), requests, 0)
        assert total_variation(law, baseline(number, "middle")) < 1e-12


def test_ssd_has_the_law_of_stepwise_where_a_token_ends_the_text():
    canvas, stops = [0, -1, -1, -1], Stops(ids=(1,))
    laws = [law_alone(one, canvas, stops=stops) for one in (step(block_length=2), drafting(block_length=2))]
    assert {len(text) for text in laws[0]} == {1, 2, 3}
    assert total_variation(*laws) < 1e-12


def test_three_tokens_have_the_law_of_stepwise_too():
    laws = [law_alone(one, [-1, 1, -1, 0], vocab_size=3) for one in (step(), drafting(draft_length=1))]
    assert total_variation(*laws) < 1e-12


def test_a_walk_that_takes_a_draft_for_right_because_of_its_position_alone_is_found(monkeypatch: pytest.MonkeyPatch):
    walk, expected = ssd.walk, baseline(0, "middle")

    def careless(nodes: Any, said: Any, drafts: Any, *, mixed: bool) -> Any:
        forged = [[[*node] for node in each] for each in said]
        for number, draft in enumerate(drafts):
            if number < len(forged) and forged[number][0][0][1] == draft[0]:
                worth, position, _, log_p = forged[number][0][0]
                forged[number][0][0] = (worth, position, draft[1], log_p)
        return walk(nodes, forged, drafts, mixed=mixed)

    monkeypatch.setattr(ssd, "walk", careless)
    law = law_alone(drafting(block_length=None, draft_length=2), CANVASES["middle"])
    assert total_variation(law, expected) > 1e-3


def test_a_cache_that_keeps_the_masks_of_a_finished_block_is_found(monkeypatch: pytest.MonkeyPatch):
    shared, own = CASES[5]
    expected = baseline(5, "middle")
    monkeypatch.setattr(Windows, "between", lambda windows, last, block: [windows.window(block)])
    assert total_variation(law_alone(drafting(**shared, **own), CANVASES["middle"]), expected) > 1e-3


# ---- threshold and factor --------------------------------------------------------------------------------------------


def all_at_once(canvas: list[int]) -> Law:
    """The law of independent draws for all masks."""
    law = table_law(2, canvas)
    found: Law = {(): 1.0}
    for place, token in enumerate(canvas):
        if token < 0:
            found = {(*text, one): mass * float(law[place, one]) for text, mass in found.items() for one in range(2)}
    return found


def threshold(tau: float) -> ThresholdSettings:
    return ThresholdSettings(kind="threshold", tau=tau, block_length=None)


def factor(number: float) -> FactorSettings:
    return FactorSettings(kind="factor", factor=number, block_length=None)


@pytest.mark.parametrize(("one", "all_"), [(threshold(1.0), threshold(0.0)), (factor(1e-9), factor(1e9))])
def test_a_threshold_reveals_one_at_a_time_or_all_at_once_at_its_limits(one: DecoderChoice, all_: DecoderChoice):
    canvas = CANVASES["middle"]
    assert total_variation(law_alone(one, canvas), baseline(0, "middle")) < 1e-12
    assert total_variation(law_alone(all_, canvas), all_at_once(canvas)) < 1e-12
    assert total_variation(all_at_once(canvas), baseline(0, "middle")) > 1e-2


def test_a_threshold_that_leaves_out_the_least_sure_token_is_found(monkeypatch: pytest.MonkeyPatch):
    above, expected = stepwise.above, all_at_once(CANVASES["middle"])
    monkeypatch.setattr(stepwise, "above", lambda tau, sure: max(above(tau, sure) - 1, 1))
    assert total_variation(law_alone(threshold(0.0), CANVASES["middle"]), expected) > 1e-3
