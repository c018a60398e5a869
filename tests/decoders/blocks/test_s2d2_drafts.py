"""`s2d2` with a drafting model, and `fused`: the text and the law of block size 1, whatever is drafted."""

import itertools
from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.blocks.settings import S2d2Settings
from draftmill.decoders.common_settings import DrafterPlace, Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, check, ours, refer, table, table_info
from tests.decoders.blocks.golden_blocks import loaded
from tests.decoders.references.blocks import PlainBlocks, law_at_size_one
from tests.decoders.references.fused_blocks import decode_fused
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode, decoder_settings, engine, prompts, run_all, texts, toy_heads

ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)
LENGTHS = [(p, n) for n in (1, 4, 6) for p in range(n)] * 3


def settings_of(size: int) -> S2d2Settings:
    return decoder_settings("s2d2", block_size=size, causal_cache=True, drafter=DrafterPlace(path="drafter"))


@cache
def _other(seed: int) -> TokenTable:
    return TokenTable(vocab_size=4, num_positions=6, seed=seed)


def drafted(
    requests,
    info: ModelInfo,
    size: int,
    sampling: Sampling,
    *,
    seed: int = 5,
    drafter=None,
    rows: int = 3,
    trace: bool = False,
    prompt_rows: int | None = None,
) -> dict:
    """Our outcomes where a table drafts that knows nothing of the target's."""
    more = {"drafter": copy(_other(seed)), "drafter_info": drafter or table_info()}
    more |= {"trace": trace, "prompt_rows": prompt_rows}
    return run_all(engine(table(3), info, settings_of(size), sampling, rows=rows, **more), requests)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.5, top_k=2, top_p=0.8)])
@pytest.mark.parametrize(("shift", "other_shift", "size"), [(0, 0, 1), (0, 0, 3), (1, 0, 2), (0, 1, 8), (1, 1, 3)])
def test_its_text_is_that_of_block_size_one(shift, other_shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
    one = ours(requests, info, ONE, sampling, rows=16)
    for rows, length in ((1, None), (3, 4), (16, None)):
        other = table_info(shift=other_shift, max_length=length)
        found = drafted(requests, info, size, sampling, drafter=other, rows=rows)
        assert texts(found) == texts(one)
        for index, outcome in found.items():
            assert outcome.nfe == outcome.iterations <= len(outcome.tokens)
            assert outcome.nfe_draft <= outcome.nfe
            assert outcome.logprob == pytest.approx(one[index].logprob, rel=1e-6)
            if length is not None and len(requests[index].canvas) - len(outcome.tokens) >= length:
                assert outcome.nfe_draft == 0


@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_are_what_masks_after_the_text_say_in_one_forward(shift):
    """From scratch: the text is causal, and each mask sees all of it and every other mask."""
    info, requests, size, count = table_info(), prompts([(1, 6), (3, 6), (2, 5)]), 3, 0
    outcomes = drafted(requests, info, size, GREEDY, drafter=table_info(shift=shift), trace=True)
    plain = PlainBlocks(copy(_other(5)), table_info(), settings_of(size), GREEDY)
    for request in requests:
        text = [token for token in request.canvas.tolist() if token >= 0]
        for step in outcomes[request.index].trace or ():
            n, end = len(text), min(len(text) + size, len(request.canvas))
            rows = [(token, at, at, frozenset(range(at + 1))) for at, token in enumerate(text)]
            rows += [(3, at, at, frozenset(range(end))) for at in range(n, end)]
            laws = [plain.law(rows, at - shift) for at in range(n, end)]
            assert step.proposed == [int(law.argmax()) for law in laws]
            text, count = text + step.committed, count + 1
    assert count > 6


def test_a_prompt_in_chunks_is_drafted_for_as_a_whole_one():
    info, requests = table_info(), prompts([(4, 6), (5, 6), (1, 4)])
    whole, cut = (drafted(requests, info, 2, SAMPLED, prompt_rows=rows) for rows in (None, 2))
    assert texts(cut) == texts(whole)
    assert [cut[index].accepted for index in cut] == [whole[index].accepted for index in cut]


def test_under_rejection_texts_have_the_law_of_block_size_one():
    """By a chi-square test over 8 texts, of which each has its chance; a false alarm has probability 1e-6 (7 degrees: 40.5)."""
    info, count = table_info(2), 4000
    requests = prompts([(1, 4)] * count, vocab_size=2, seed=3)
    for request in requests:
        request.canvas[0] = 1
    outcomes = run_all(
        engine(
            table(2),
            info,
            settings_of(2),
            REJECTING,
            rows=500,
            drafter=copy(TokenTable(vocab_size=3, num_positions=6, seed=5)),
            drafter_info=info,
        ),
        requests,
    )
    wanted = law_at_size_one(PlainBlocks(table(2), info, ONE, REJECTING), [1], 4)
    found = [tuple(outcome.tokens.tolist()) for outcome in outcomes.values()]
    chi = 0.0
    for text in itertools.product(range(2), repeat=3):
        expected = count * wanted(text)
        chi += (found.count(text) - expected) ** 2 / expected
    assert chi < 40.5
    assert (
        0.1 < np.mean([outcome.accepted / outcome.proposed for outcome in outcomes.values() if outcome.proposed]) < 0.95
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"fused": True},
        {"causal_cache": False},
        {"sub_block": 2},
        {"router": {"kind": "min_span", "span": 2}},
        {"tau_edit": 0.9},
    ],
)
def test_a_drafter_drafts_only_where_every_token_is_verified(changes):
    given = {"kind": "s2d2", "block_size": 4, "causal_cache": True, "drafter": {"path": "there"}} | changes
    with pytest.raises(
        ValueError, match=r"decoder.drafter: 'there' drafts where every token is verified over a causal cache"
    ):
        S2d2Settings.model_validate(given)


def test_a_model_that_is_causal_too_is_drafted_for():
    info, requests = replace(table_info(), prompt_block=True, left_shift=1), prompts(LENGTHS)
    assert texts(drafted(requests, info, 3, SAMPLED)) == texts(ours(requests, info, ONE, SAMPLED))


FUSED_LENGTHS = [(p, n) for n in (1, 4, 5, 6) for p in range(n)] * 3


HEADS = toy_heads(4)


def fused(size):
    return decoder_settings("s2d2", block_size=size, causal_cache=True, fused=True)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.5, top_k=2, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 1), (0, 2), (0, 8), (1, 1), (1, 3)])
def test_text_of_fused_rounds_is_that_of_block_size_one(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(FUSED_LENGTHS)
    one = ours(requests, info, ONE, sampling, rows=16)
    for rows in (1, 3, 16):
        found = ours(requests, info, fused(size), sampling, rows=rows)
        assert texts(found) == texts(one)
        for index, outcome in found.items():
            assert outcome.nfe <= len(outcome.tokens) and outcome.nfe_kinds["draft"] <= 1
            assert outcome.nfe_kinds["commit"] == 0 and outcome.nfe == outcome.iterations
            assert sum(count * number for number, count in enumerate(outcome.accept_hist)) == len(outcome.tokens)
            assert outcome.logprob == pytest.approx(one[index].logprob, rel=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, REJECTING])
@pytest.mark.parametrize(("shift", "size"), [(0, 1), (0, 3), (1, 2), (0, 8)])
def test_tokens_and_counts_are_those_of_the_plain_reference(shift, size, sampling, heads):
    info, requests = table_info(shift=shift), prompts(FUSED_LENGTHS)
    trails = refer(requests, info, fused(size), sampling, plain=decode_fused, heads=heads)
    check(ours(requests, info, fused(size), sampling, rows=5, heads=heads), trails, requests)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.5, top_k=2, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 3), (1, 2), (0, 8)])
def test_what_a_head_drafts_changes_no_text(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(FUSED_LENGTHS)
    one, accepted = ours(requests, info, ONE, sampling, rows=16), 0
    for rows, prompt_rows in ((1, None), (3, 2), (16, None)):
        found = ours(requests, info, fused(size), sampling, rows=rows, heads=HEADS, prompt_rows=prompt_rows)
        accepted += sum(outcome.accepted for outcome in found.values())
        assert texts(found) == texts(one)
        assert all(outcome.nfe == outcome.iterations <= len(outcome.tokens) for outcome in found.values())
        assert [found[i].logprob for i in one] == pytest.approx([o.logprob for o in one.values()], rel=1e-6)
    assert accepted > 0


@pytest.mark.parametrize(
    "changes",
    [{"fused": False}, {"causal_cache": False}, {"sub_block": 2}, {"router": {"kind": "min_span", "span": 2}}],
)
def test_a_head_drafts_only_in_verifications(changes):
    given = {"block_size": 4, "causal_cache": True, "fused": True, "head": "there"} | changes
    with pytest.raises(ValueError, match=r"decoder.head: 'there' drafts in verifications; allowed with it: fused true"):
        decoder_settings("s2d2", **given)
    assert decoder_settings("s2d2", **(given | {"head": "auto"})).draft_head == "none"


def test_the_first_end_token_ends_it():
    info, requests = table_info(), prompts([(p, 6) for p in (0, 1, 2, 3)] * 8)
    one, found = (ours(requests, info, s, SAMPLED, stops=Stops((1,))) for s in (ONE, fused(3)))
    assert texts(found) == texts(one)
    assert {outcome.finish for outcome in found.values()} == {"eos", "length"}
    assert {index: o.finish for index, o in sorted(found.items())} == {i: o.finish for i, o in sorted(one.items())}


@pytest.mark.slow
def test_on_a_network_all_three_say_the_same_and_another_cache_something_else(golden):
    """Here a cache can tell: keys and values of finished blocks, of accepted drafts, of half-accepted windows."""
    info, backbone = loaded(golden / "sdar")
    requests = prompts([(1, 20), (4, 24), (7, 24), (0, 9), (11, 32)], vocab_size=90)

    def said(settings):
        backbone.forget()
        return decode(backbone, info, settings, SAMPLED, requests, rows=3)

    one, found = said(ONE), said(fused(4))
    unfused = said(decoder_settings("s2d2", block_size=4, causal_cache=True, causal_draft=True))
    assert texts(one) == texts(found) == texts(unfused)
    assert texts(said(decoder_settings("s2d2", block_size=4))) != texts(one)
    forwards = [sum(outcome.nfe for outcome in of.values()) for of in (found, unfused, one)]
    assert forwards[0] < forwards[1] and forwards[0] < forwards[2]
