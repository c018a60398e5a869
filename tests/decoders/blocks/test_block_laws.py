"""Laws of block decoders, on the generator itself in the real engine: S2D2's is that of block size 1, in any company."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.base import Request
from draftmill.decoders.blocks.settings import BlockDiffusionSettings, S2d2Settings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, ours, prompts, table, table_info
from tests.decoders.enumeration import CoupledChooser, Law, decoded, engine_of, law_of, total_variation
from tests.decoders.references.blocks import PlainBlocks, decode_blocks, law_at_size_one
from tests.decoders.references.choosers import NoiseChooser, RejectionRule, enumerate_law
from tests.decoders.references.sampling import log_law
from tests.decoders.support import decoder_settings, texts, toy_heads

ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)
CANVASES = {"tail": [0, -1, -1], "whole": [-1, -1, -1], "long": [1, -1, -1, -1], "block": [0, 1, -1, -1]}


def always(size: int, **more) -> S2d2Settings:
    """Verifies every span, over a causal cache."""
    return decoder_settings("s2d2", block_size=size, causal_cache=True, **more)


def setup_of(*, shift: int = 0, rows: int = 1, stops: Stops | None = None, sampling: Sampling = REJECTING) -> Setup:
    info, model = table_info(2, shift=shift), table(2)
    return Setup(backbone=model, info=info, sampling=sampling, max_rows=rows, max_tokens=1 << 20, stops=stops)


def request(canvas: list[int], index: int = 0) -> Request:
    return Request(index, sample_key(7, str(index)), np.array(canvas, dtype=np.int32))


def block_size_one(canvas: list[int], *, shift: int = 0) -> Law:
    prompt, length = [token for token in canvas if token >= 0], len(canvas)
    plain = PlainBlocks(table(2), table_info(2, shift=shift), ONE, REJECTING)
    wanted = law_at_size_one(plain, prompt, length)
    return {text: wanted(text) for text in itertools.product(range(2), repeat=length - len(prompt))}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("size", "canvas"), [(1, "tail"), (2, "tail"), (2, "whole"), (2, "long"), (2, "block"), (3, "whole")]
)
@pytest.mark.slow
def test_the_law_is_that_of_block_size_one(canvas, shift, size, fused):
    tokens = CANVASES[canvas]
    law = law_of(setup_of(shift=shift), always(size, fused=fused), [request(tokens)], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, block_size_one(tokens, shift=shift)) < 1e-12


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("size", "canvas"), [(1, "tail"), (2, "whole"), (2, "long"), (3, "whole")])
def test_a_heads_drafts_leave_the_law_as_it_is(canvas, shift, size):
    tokens, setup = CANVASES[canvas], replace(setup_of(shift=shift), heads=toy_heads(3))
    law = law_of(setup, always(size, fused=True), [request(tokens)], 0)
    assert total_variation(law, block_size_one(tokens, shift=shift)) < 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [2, 3])
def test_it_is_the_same_beside_others_and_after_refills(rows, fused):
    """The sample comes into a slot that held another one, and moves when a neighbour ends."""
    others = [request(canvas, 1 + index) for index, canvas in enumerate(([1, -1], [0, 0, -1, -1], [-1, -1]))]
    tokens = CANVASES["tail"]
    law = law_of(setup_of(rows=rows), always(2, fused=fused), [*others, request(tokens)], 0)
    assert total_variation(law, block_size_one(tokens)) < 1e-12


@pytest.mark.parametrize("fused", [False, True])
def test_a_stop_cuts_the_law_of_the_whole_text(fused):
    tokens, cut = CANVASES["long"], Law()
    for text, mass in block_size_one(tokens).items():
        kept = text[: text.index(1) + 1] if 1 in text else text
        cut[kept] = cut.get(kept, 0.0) + mass
    law = law_of(setup_of(stops=Stops((1,))), always(2, fused=fused), [request(tokens)], 0)
    assert total_variation(law, cut) < 1e-12


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_block_diffusion_has_the_law_of_the_plain_reference(schedule):
    settings = decoder_settings("block_diffusion", block_size=2, schedule=schedule, tau=0.5)
    tokens = CANVASES["long"]
    plain = PlainBlocks(table(2), table_info(2), settings, REJECTING)
    wanted = enumerate_law(lambda chooser: tuple(decode_blocks(plain, tokens, RejectionRule(chooser)).canvas[1:4]))
    assert total_variation(law_of(setup_of(), settings, [request(tokens)], 0), wanted) < 1e-12


HOT = Sampling(temperature=2.0)


def public_law(settings: BlockDiffusionSettings, canvas: list[int], sampling: Sampling) -> Law:
    """The law of the loops of SDAR and LLaDA2: every step draws a token for each place of the block, independently of all other
    steps, edits, and reveals the masks whose tokens are the most probable, by the distribution that they are drawn from.
    """
    plain = PlainBlocks(table(2), table_info(2), settings, sampling)
    size, found, length = plain.size, Law(), len(canvas)
    prompt, full = sum(token >= 0 for token in canvas), -(-length // size) * size

    def loop(held: list[int], start: int, step: int, post: int, mass: float) -> None:
        masks = [place for place in range(start, start + size) if held[place] < 0]
        if start >= length or (not masks and post == settings.post_steps) or (not masks and settings.tau_edit is None):
            if start + size < length:
                return loop(held, start + size, 0, 0, mass)
            text = tuple(held[prompt:length])
            found[text] = found.get(text, 0.0) + mass
            return None
        rows = plain.drafting(held, start, start + size)
        editable = [place for place in range(max(start, prompt), start + size) if held[place] >= 0]
        places = masks + (editable if settings.tau_edit is not None else [])
        laws = {place: plain.law(rows, place)[:2].exp().tolist() for place in places}
        for drawn in itertools.product(range(2), repeat=len(places)):
            token_of = dict(zip(places, drawn, strict=True))
            p_of = {place: laws[place][token] for place, token in token_of.items()}
            p = math.prod(p_of.values())
            new = list(held)
            edits = [
                x for x in places if held[x] >= 0 and held[x] != token_of[x] and p_of[x] > (settings.tau_edit or 0)
            ]
            steps = min(settings.steps or size, size)
            count = min(size // steps + (step < size % steps), len(masks))
            if settings.schedule == "dynamic":
                count = max(count, sum(p_of[place] > settings.tau for place in masks))
            for place in edits + sorted(masks, key=lambda place: (-p_of[place], place))[:count]:
                new[place] = token_of[place]
            ends = not masks and not edits
            loop(new, start, step + 1, settings.post_steps if ends else post + (not masks), mass * p)
        return None

    loop([*canvas, *[-1] * (full - length)], prompt // size * size, 0, 0, 1.0)
    return found


PUBLIC: dict[str, dict] = {
    "static": {"block_size": 3, "schedule": "static"},
    "static, two steps": {"block_size": 3, "schedule": "static", "steps": 2},
    "dynamic": {"block_size": 3, "tau": 0.7},
    "two blocks": {"block_size": 2, "schedule": "static"},
    "editing": {"block_size": 2, "schedule": "static", "tau_edit": 0.6, "post_steps": 1},
}


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.slow
def test_what_is_drawn_has_the_law_of_the_public_loops(name):
    canvas = [0, -1, -1] if name == "editing" else [0, 1, -1, -1] if name == "two blocks" else [-1, -1, -1]
    settings = decoder_settings("block_diffusion", **PUBLIC[name])
    setup, wanted = setup_of(sampling=HOT), public_law(settings, canvas, HOT)
    assert sum(wanted.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law_of(setup, settings, [request(canvas)], 0), wanted) < 1e-12
    # A position that keeps its random numbers over all steps gives another law, so the test can tell.
    kept = law_of(setup, settings.model_copy(update={"draws": "kept"}), [request(canvas)], 0)
    assert total_variation(kept, wanted) > 0.01


@pytest.mark.parametrize("fused", [False, True])
def test_under_coupled_acceptance_the_law_is_that_of_block_size_one_too(fused):
    tokens = CANVASES["long"]
    setup = setup_of(sampling=REJECTING.model_copy(update={"acceptance": "coupled"}))
    law = law_of(setup, always(2, fused=fused), [request(tokens)], 0)
    assert total_variation(law, block_size_one(tokens)) < 1e-12


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, REJECTING], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize(("shift", "fused"), [(0, False), (1, False), (0, True), (1, True)])
@pytest.mark.slow
def test_batched_draws_are_those_of_a_chooser_that_reads_the_samples_noise(shift, fused, sampling):
    info = table_info(shift=shift)
    requests = prompts([(p, n) for n in (2, 4, 6) for p in range(n)] * 2)
    settings: DecoderChoice = always(3, fused=fused)
    found = ours(requests, info, settings, sampling, rows=3)
    coupled = sampling.acceptance == "coupled"
    choosers = {one.index: CoupledChooser(one.key, sampling) if coupled else NoiseChooser(one.key) for one in requests}
    setup = Setup(backbone=table(), info=info, sampling=sampling, max_rows=3, max_tokens=1 << 20)
    chosen = decoded(engine_of(setup, settings, choosers), requests)
    for index, outcome in found.items():
        other = chosen[index]
        assert (outcome.tokens.tolist(), outcome.nfe_kinds) == (other.tokens.tolist(), other.nfe_kinds)
        assert (outcome.proposed, outcome.accepted) == (other.proposed, other.accepted)


LENGTHS = [(p, n) for n in (4, 5, 6) for p in range(n)] * 3


@pytest.mark.one_in(7)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(top_k=2), Sampling(temperature=1.5, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 2), (0, 4), (1, 3)])
def test_coupled_and_at_temperature_zero_its_text_is_that_of_block_size_one(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
    one = texts(ours(requests, info, ONE, sampling, rows=16, length=8))
    always = decoder_settings("s2d2", block_size=size, causal_cache=True, causal_draft=True)
    assert texts(ours(requests, info, always, sampling, rows=16, length=8)) == one
    assert texts(ours(requests, info, decoder_settings("block_diffusion", block_size=size), sampling, length=8)) != one


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_block_size_one_is_autoregressive_decoding_of_the_same_model(shift, sampling):
    """The token at each position is drawn given all to its left: by a mask there, or by the row before it."""
    info = table_info(shift=shift)
    requests = prompts([(p, 6) for p in (1, 2, 5)] * 4)
    found = texts(ours(requests, info, ONE.model_copy(update={"causal_cache": False}), sampling))
    model = table()
    model.allocate(1, 8)
    suppressed = torch.tensor(info.suppressed)
    for request in requests:
        tokens = [int(token) for token in request.canvas if token >= 0]
        while len(tokens) < 6:
            fed = tokens if shift else [*tokens, info.mask_id]
            columns = torch.arange(len(fed))
            sight = torch.zeros(1, len(fed), dtype=torch.int64), (columns + 1).unsqueeze(0)
            rows = token_rows([0], [len(fed)], torch.tensor(fed), columns, columns, sight)
            logits = model.logits(model.forward(rows)[-1:]).index_fill(-1, suppressed, -torch.inf)
            tokens.append(drawn(logits, request.key, len(tokens), sampling))
        assert found[request.index] == tokens[int((request.canvas >= 0).sum()) :]


def drawn(logits, key, position, sampling):
    from draftmill.decoders.draws import noise

    if sampling.temperature == 0.0:
        return int(logits.argmax())
    gumbel = noise.gumbel_rows(noise.key_words([key]), torch.tensor([position]), logits.shape[1])
    return int((log_law(logits, sampling) + gumbel).argmax())
