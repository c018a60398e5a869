"""Laws of block decoders, on the generator in the real engine and in any company, and the scores that they give to texts."""

import itertools
import math
from dataclasses import replace
from math import comb

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
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, ours, table, table_info
from tests.decoders.enumeration import CoupledChooser, Law, decoded, engine_of, law_of, total_variation
from tests.decoders.masked.test_masked_scoring import check_estimates, of_many_keys
from tests.decoders.references.blocks import PlainBlocks, law_at_size_one
from tests.decoders.references.choosers import NoiseChooser
from tests.decoders.references.sampling import log_law
from tests.decoders.support import decoder_settings, prompts, score, scorer_for, texts, toy_heads

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


VOCAB, LENGTH = 3, 6
MASK = VOCAB


def settings(size, **more):
    return decoder_settings("block_diffusion", block_size=size, **more)


def law(model, held, row):
    """The log-probabilities that a row predicts which sees these tokens (position -> id), straight from the table."""
    code = (VOCAB + 2) ** LENGTH - 1 + sum((token - VOCAB - 1) * (VOCAB + 2) ** place for place, token in held.items())
    logits = model.table_PXV[row, code].clone()
    logits[MASK] = -torch.inf
    return logits.log_softmax(0)


def block_sum(model, tokens, block, masked, size, shift):
    """The sum of a block's masked tokens' log-probabilities, given its other tokens and the blocks before it."""
    end = min((block + 1) * size, len(tokens))
    held = {place: MASK if place in masked else tokens[place] for place in range(end)}
    return sum(float(law(model, held, max(place - shift, 0))[tokens[place]]) for place in masked)


def bound(model, tokens, first, size, *, shift=0, causal_cache=False):
    """The sum over blocks of the mean over masks; the first token of a block is predicted by the row before it (shift)."""
    total = 0.0
    for block in range(first // size, -(-len(tokens) // size)):
        places = list(range(max(first, block * size), min((block + 1) * size, len(tokens))))
        if shift and places[0] == block * size and places[0] > 0:
            row = places.pop(0) - 1
            end = row + 1 if causal_cache else (row // size + 1) * size  # of what a clean row sees
            total += float(law(model, dict(enumerate(tokens[:end])), row)[tokens[row + 1]])
        for count in range(1, len(places) + 1):
            for masked in itertools.combinations(places, count):
                weight = 1 / count / comb(len(places), count)
                total += weight * block_sum(model, tokens, block, masked, size, shift)
    return total


def text(length, first, *, index=0, seed=0):
    canvas = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
    return Request(index, sample_key(seed, str(index)), canvas, score_from=first)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("causal_cache", [False, True])
@pytest.mark.parametrize(
    ("size", "first", "length"), [(2, 1, 6), (3, 0, 6), (4, 3, 6), (3, 4, 5), (2, 4, 6), (6, 0, 6)]
)
def test_blocks_with_few_masks_have_the_exact_bound(size, first, length, shift, causal_cache):
    request = text(length, first)
    choice = settings(size, causal_cache=causal_cache)
    (outcome,) = score(table(), table_info(shift=shift), choice, [request], samples=64).values()
    expected = bound(table(), request.canvas.tolist(), first, size, shift=shift, causal_cache=causal_cache)
    assert outcome.logprob == pytest.approx(expected, abs=1e-9)
    assert outcome.tokens.tolist() == request.canvas[first:].tolist() and outcome.logprob_stderr in {None, 0.0}


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_block_size_1_is_exact_token_by_token(shift, first):
    request, model = text(LENGTH, first), table()
    (outcome,) = score(table(), table_info(shift=shift), settings(1), [request]).values()
    tokens, expected, chosen = request.canvas.tolist(), [], []
    for place in range(first, LENGTH):
        held, row = dict(enumerate(tokens[:place])), place - 1
        if not shift or not place:
            held, row = held | {place: MASK}, place
        expected.append(float(law(model, held, row)[tokens[place]]))
        chosen.append(int(law(model, held, row).argmax()) == tokens[place])
    np.testing.assert_allclose(outcome.token_logprobs, expected, rtol=1e-6)
    assert outcome.logprob == pytest.approx(sum(expected), abs=1e-12)
    assert (outcome.nfe, outcome.is_greedy, outcome.logprob_stderr) == (1, all(chosen), None)


@pytest.mark.slow
def test_the_estimate_has_the_bound_as_its_mean_and_its_standard_error():
    base = text(LENGTH, 1)
    outcomes = score(table(), table_info(), settings(6), of_many_keys(base, seed=9), rows=64, samples=6)
    check_estimates(outcomes, bound(table(), base.canvas.tolist(), 1, 6))


def test_draws_share_the_clean_text_that_is_longer_than_their_copies():
    request = text(LENGTH, 4)
    scorer = scorer_for(table(), table_info(), settings(2), samples=64)
    scorer.admit([request])
    (outcome,) = (outcome for _ in range(2) for outcome in scorer.step())
    # Three masks of the last block, two a canvas: 4 clean rows and 2 or 1 copies of 2.
    assert outcome.nfe == 2 and scorer.stats.useful_rows == 2 * 4 + 3 * 2


def test_what_is_not_the_end_of_a_text_is_refused():
    scorer = scorer_for(table(), table_info(), settings(2))
    with pytest.raises(ValueError, match="block diffusion scores the end of a text"):
        scorer.admit([Request(0, 0, np.zeros(4, dtype=np.int32), scored=np.asarray([0, 2]))])
