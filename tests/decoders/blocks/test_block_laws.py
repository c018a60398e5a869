"""Laws of the block decoders: block size 1 is autoregressive decoding, and S2D2 that verifies always is block size 1."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.blocks.settings import ScoreRouter
from draftmill.decoders.common_settings import Sampling
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, ours, prompts, table, table_info
from tests.decoders.blocks.golden_blocks import loaded
from tests.decoders.references.blocks import PlainBlocks, decode_blocks, law_at_size_one
from tests.decoders.references.choosers import RejectionRule, enumerate_law
from tests.decoders.references.sampling import log_law
from tests.decoders.support import decode, decoder_settings, texts

ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)


def always(size, **more: Any):
    """S2D2 that verifies every span, over a causal cache."""
    return decoder_settings("s2d2", block_size=size, causal_cache=True, **more)


def enumerated(settings, canvas, info, sampling=REJECTING):
    model = PlainBlocks(table(info.mask_id, length=len(canvas) + 2), info, settings, sampling)
    length = len(canvas)
    return enumerate_law(lambda chooser: tuple(decode_blocks(model, canvas, RejectionRule(chooser)).canvas[:length]))


@pytest.mark.parametrize("causal_draft", [True, False])
@pytest.mark.parametrize(
    ("shift", "size", "canvas"), [(0, 2, [0, -1, -1, -1]), (0, 3, [-1, -1, -1]), (1, 3, [1, -1, -1, -1])]
)
def test_always_verifying_over_a_causal_cache_is_the_law_of_block_size_one(shift, size, canvas, causal_draft):
    """To rounding, by every branch of every choice; what the drafts see does not matter."""
    info, prompt = table_info(2, shift=shift), [token for token in canvas if token >= 0]
    law = enumerated(always(size, causal_draft=causal_draft), canvas, info)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    one = PlainBlocks(table(2, length=len(canvas) + 2), info, ONE, REJECTING)
    wanted = law_at_size_one(one, prompt, len(canvas))
    for completion in itertools.product(range(2), repeat=len(canvas) - len(prompt)):
        assert law.get((*prompt, *completion), 0.0) == pytest.approx(wanted(completion), abs=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        always(3, router={"kind": "min_span", "span": 3}),
        decoder_settings("block_diffusion", block_size=2, causal_cache=True),
    ],
    ids=["not always verified", "never verified"],
)
def test_anything_less_has_another_law(settings):
    """So the test above can tell. A table does not tell one cache from another; test_golden_s2d2.py does."""
    canvas, info = [0, -1, -1, -1, -1], table_info(2)
    law = enumerated(settings, canvas, info)
    wanted = law_at_size_one(PlainBlocks(table(2, length=7), info, ONE, REJECTING), [0], 5)
    away = sum(abs(law.get((0, *c), 0.0) - wanted(c)) for c in itertools.product(range(2), repeat=4)) / 2
    assert away > 0.01


LENGTHS = [(p, n) for n in (4, 5, 6) for p in range(n)] * 3


@pytest.mark.one_in(7)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(top_k=2), Sampling(temperature=1.5, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 2), (0, 4), (1, 3)])
def test_coupled_and_at_temperature_zero_its_text_is_that_of_block_size_one(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
    one = texts(ours(requests, info, ONE, sampling, rows=16, length=8))
    fewer = ours(requests, info, always(size, causal_draft=True), sampling, rows=16, length=8)
    assert texts(fewer) == one
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


def test_rejecting_samples_follow_the_law_of_block_size_one():
    """The batched decoder itself: chi-square over the texts of 800 keys."""
    info, num = table_info(2), 800
    requests = prompts([(1, 4)] * num, vocab_size=1)
    found = texts(ours(requests, info, always(3, causal_draft=True), REJECTING, rows=64))
    counts = np.array([sum(tuple(t) == c for t in found.values()) for c in itertools.product(range(2), repeat=3)])
    wanted = law_at_size_one(PlainBlocks(table(2), info, ONE, REJECTING), [0], 4)
    expected = np.array([num * wanted(c) for c in itertools.product(range(2), repeat=3)])
    assert expected.sum() == pytest.approx(num)
    # 7 degrees of freedom: above 29.9 once in ten thousand.
    assert (((counts - expected) ** 2) / expected).sum() < 29.9


@pytest.mark.parametrize(
    ("folder", "more"),
    [("sdar", {}), ("fast_dllm_v2", {"sub_block": 4}), ("llada2", {"tau_edit": 0.9, "post_steps": 2})],
    ids=["sdar", "fast_dllm_v2", "llada2"],
)
@pytest.mark.slow
def test_a_networks_samples_do_not_depend_on_their_batch(golden, folder, more):
    """To the bit: confidences, routes, edits and ratios included."""
    info, backbone = loaded(golden / folder)
    requests = prompts([(1, 14), (4, 20), (7, 18), (0, 9), (11, 26), (8, 17), (16, 21), (3, 4)] * 2, vocab_size=90)
    settings = decoder_settings("s2d2", block_size=8, router=ScoreRouter(kind="score", tau=-0.2), tau=0.6, **more)
    found = []
    for rows in (1, 3, 16):
        backbone.forget()
        outcomes = decode(backbone, info, settings, REJECTING, requests, rows=rows)
        found.append([(o.tokens.tolist(), o.nfe_kinds, o.proposed, o.accepted) for _, o in sorted(outcomes.items())])
    assert found[0] == found[1] == found[2]
    assert sum(kinds["verify"] for _, kinds, _, _ in found[0]) > 5
