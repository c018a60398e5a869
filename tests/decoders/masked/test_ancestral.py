"""Ancestral sampling: the law of whole runs by enumeration, beside others, and counts."""

import itertools
import math
from copy import copy
from functools import cache

import numpy as np
import pytest
import torch

from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.schedule import LAST_TIME, NOISE_EPS
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked import ancestral as ancestral_module
from tests.decoders.enumeration import decoded, engine_of, total_variation
from tests.decoders.references.causal import PlainMasked
from tests.decoders.references.choosers import enumerate_law
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, engine, run_all, toy_requests

VOCAB, MASK, LENGTH = 3, 3, 6
INFO = ModelInfo("token_table", VOCAB + 1, MASK, None, "ancestral", 0, (MASK,))
PREDICTORS = ("ddpm", "analytic", "euler")


@cache
def _made(length, seed):
    made = TokenTable(vocab_size=VOCAB + 1, num_positions=length, seed=seed)
    # As large as the scores of a trained model: their sum is about 1 / (e^sigma - 1) once the scale is taken out.
    made.table_PXV -= 0.5
    return made


def table(length=LENGTH, seed=1):
    return copy(_made(length, seed))


def decoder(settings, sampling=Sampling(), *, info=INFO, rows=4, backbone=None, **more):  # noqa: B008
    backbone = backbone or table()
    return engine(backbone, info, settings, sampling, rows=rows, **more)


def settings_of(steps, predictor="ddpm"):
    return decoder_settings("ancestral", steps=steps, predictor=predictor)


def requests_of(count, *, seed=0, **more):
    return [r for r in toy_requests(count, vocab_size=VOCAB, longest=LENGTH, seed=seed, **more) if (r.canvas < 0).any()]


def by_hand(model, canvas, steps, predictor):
    """The law of a run, canvas by canvas: in every step each mask is revealed or not, by chances written down here."""
    length, holes = len(canvas), sum(token == HOLE for token in canvas)
    first = min(1.0, holes / length / (1 - NOISE_EPS))
    times = [first + (LAST_TIME - first) * step / steps for step in range(steps + 1)]
    sigma = lambda time: -math.log(1 - (1 - NOISE_EPS) * time)  # noqa: E731
    law = {tuple(canvas): 1.0}
    for step in range(steps + 1):
        after: dict = {}
        for held, mass in law.items():
            seen = [MASK if token == HOLE else token for token in held]
            tokens_LV, logits_LV = model.laws(seen).exp(), model.logits(seen)
            rows = []
            for place, token in enumerate(held):
                if token != HOLE:
                    rows.append({token: 1.0})
                    continue
                chance = 1.0
                if step < steps:
                    time, later = times[step], times[step + 1]
                    scores = float(logits_LV[place, :VOCAB].exp().sum()) / VOCAB / math.expm1(sigma(time))
                    chance = {
                        "ddpm": (time - later) / time,
                        "analytic": math.expm1(sigma(time) - sigma(later)) * scores,
                        "euler": (time - later) * (1 - NOISE_EPS) / (1 - (1 - NOISE_EPS) * time) * scores,
                    }[predictor]
                    chance = min(chance, 1.0)
                row = {one: chance * float(tokens_LV[place, one]) for one in range(VOCAB)}
                rows.append(row | ({HOLE: 1.0 - chance} if chance < 1.0 else {}))
            for choice in itertools.product(*(row.items() for row in rows)):
                key = tuple(token for token, _ in choice)
                after[key] = after.get(key, 0.0) + mass * math.prod(chance for _, chance in choice)
        law = after
    return law


def by_steps(monkeypatch, key, holes, length, steps):
    """Let a chooser decide in which step each mask of the sample with this key is revealed (`ddpm`).

    The sample's uniform numbers are cut where the steps' times lie, and each part once more, so that a wrong cut is found.
    """
    whole = keys.uniforms
    first = min(1.0, holes / length / (1 - NOISE_EPS))
    ends = [1.0 - (first + (LAST_TIME - first) * step / steps) / first for step in range(steps + 1)] + [1.0]
    cuts = [0.0] + [low + (high - low) * part for low, high in itertools.pairwise(ends) for part in (0.3, 1.0)]

    def use(chooser):
        def uniforms(of, positions, purpose, draw=0):
            if of != key or purpose != keys.ORDER:
                return whole(of, positions, purpose, draw)
            masses = torch.tensor([high - low for low, high in itertools.pairwise(cuts)], dtype=torch.float64)
            chosen = [chooser.choose(masses.log(), purpose, int(position), 0) for position in positions]
            # The later a mask is revealed, the smaller is its number.
            return np.array([1.0 - (cuts[part] + cuts[part + 1]) / 2 for part in chosen])

        monkeypatch.setattr(keys, "uniforms", uniforms)

    return use


def by_chances(monkeypatch, key):
    """Let a chooser decide which masks of the sample with this key are revealed in each step (predictors that read scores).

    The uniform numbers are close to the chances, so that any other limit is found.
    """
    strikes = ancestral_module.strikes

    def use(chooser):
        def struck(s, masks, chance_R, step):
            if s.key != key:
                return strikes(s, masks, chance_R, step)
            chosen = [chooser.accept(float(chance), at, step) for at, chance in zip(masks, chance_R, strict=True)]
            uniform_R = np.where(chosen, chance_R * 0.999, chance_R + 0.001 * (1.0 - chance_R))

            def uniforms(key, positions, purpose, draw):
                assert (key, positions.tolist(), purpose, draw) == (s.key, masks, keys.ORDER, step)
                return uniform_R

            with monkeypatch.context() as during:
                during.setattr(keys, "uniforms", uniforms)
                found = strikes(s, masks, chance_R, step)
            assert found.tolist() == chosen
            return found

        monkeypatch.setattr(ancestral_module, "strikes", struck)

    return use


@pytest.mark.one_in(29, soak=5)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize(
    ("steps", "sampling"), [(2, Sampling()), (1, Sampling()), (2, Sampling(top_p=0.7)), (1, Sampling(top_k=2))], ids=str
)
def test_beside_others_the_generator_has_the_law_of_its_steps(predictor, steps, sampling, rows, monkeypatch):
    canvas, others = [HOLE, 1, HOLE], [[HOLE, 2], [HOLE] * 3][: 2 * (rows - 1)]
    requests = [
        Request(index, 900 + index, np.array(one, dtype=np.int32)) for index, one in enumerate([*others, canvas])
    ]
    number = len(others)
    by_time = by_steps(monkeypatch, 900 + number, 2, 3, steps)
    use = by_time if predictor == "ddpm" else by_chances(monkeypatch, 900 + number)
    setup = Setup(backbone=table(3), info=INFO, sampling=sampling, max_rows=rows, max_tokens=1 << 20)

    def run(chooser):
        use(chooser)
        engine = engine_of(setup, settings_of(steps, predictor), {number: chooser})
        return tuple(decoded(engine, requests)[number].tokens.tolist())

    expected = by_hand(PlainMasked(table(3), mask_id=MASK, sampling=sampling), canvas, steps, predictor)
    law = enumerate_law(run)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, {(text[0], text[2]): mass for text, mass in expected.items()}) < 1e-12


def test_a_run_of_many_steps_reveals_one_mask_a_forward_and_traces_it():
    request = Request(0, sample_key(0, "a"), np.array([1, -1, -1, 0, -1, -1], dtype=np.int32))
    outcome = run_all(decoder(settings_of(100_000), trace=True), [request])[0]
    assert outcome.nfe == outcome.iterations == 4 and outcome.accept_hist == [0, 4]
    assert sorted(step.positions for step in outcome.trace) == [[1], [2], [4], [5]]
    assert [step.positions[0] for step in outcome.trace] != [1, 2, 4, 5], "in an order of chance"


def test_the_noise_that_a_network_is_told_begins_at_the_canvas_own_share():
    class Watched(TokenTable):
        def forward(self, rows):
            told.append(float(-torch.expm1(-rows.sigma_G[0])))
            return super().forward(rows)

    told: list[float] = []
    backbone = Watched(vocab_size=VOCAB + 1, num_positions=4)
    backbone.table_PXV -= 40.0  # scores so low that the mask stays to the end
    request = Request(0, sample_key(0, "a"), np.array([1, -1, 2, 0], dtype=np.int32))
    run_all(decoder(settings_of(4, "euler"), backbone=backbone), [request])
    expected = [0.25 + (LAST_TIME - 0.25) * step / 4 for step in range(5)]
    assert told == pytest.approx(expected, abs=1e-4)


def test_a_completion_ends_at_an_end_token():
    requests = [r for r in requests_of(200, seed=5, share=1.0) if len(r.canvas) == LENGTH]
    for request in requests:
        request.canvas[0] = 1
    whole = run_all(decoder(settings_of(6)), requests)
    ended = run_all(decoder(settings_of(6), stops=Stops(ids=(2,))), requests)
    for index, outcome in ended.items():
        tokens = whole[index].tokens.tolist()
        cut = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
        assert (outcome.tokens.tolist(), outcome.finish) == (cut, "eos" if 2 in tokens else "length")
    assert {outcome.finish for outcome in ended.values()} == {"eos", "length"}


@pytest.mark.parametrize(("family", "asked", "found"), [
    ("mdlm", "auto", "ddpm"), ("sedd", "auto", "analytic"), ("sedd", "euler", "euler"), ("mdlm", "ddpm", "ddpm"),
])  # fmt: skip
def test_each_family_has_its_predictors(family, asked, found):
    info = ModelInfo(family, VOCAB + 1, MASK, None, "ancestral", 0, (MASK,))
    assert settings_of(3, asked).predictor_for(info.family) == found


@pytest.mark.parametrize(
    ("family", "asked", "allowed"), [("mdlm", "euler", "ddpm"), ("sedd", "ddpm", "analytic, euler")]
)
def test_a_predictor_of_the_other_family_is_refused(family, asked, allowed):
    info = ModelInfo(family, VOCAB + 1, MASK, None, "ancestral", 0, (MASK,))
    with pytest.raises(ValueError, match=rf"decoder\.predictor: '{asked}'.*'{family}'; allowed: auto, {allowed}"):
        decoder(settings_of(3, asked), info=info)
