"""`s2d2` with `fused`: the text and the law of block size 1, in one forward a round."""

import pytest

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.blocks.block_tables import (
    GREEDY,
    REJECTING,
    SAMPLED,
    check,
    ours,
    prompts,
    refer,
    table_info,
)
from tests.decoders.blocks.golden_blocks import loaded
from tests.decoders.references.fused_blocks import decode_fused
from tests.decoders.support import decode, decoder_settings, texts, toy_heads

ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)
LENGTHS = [(p, n) for n in (1, 4, 5, 6) for p in range(n)] * 3


HEADS = toy_heads(4)


def fused(size):
    return decoder_settings("s2d2", block_size=size, causal_cache=True, fused=True)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.5, top_k=2, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 1), (0, 2), (0, 8), (1, 1), (1, 3)])
def test_its_text_is_that_of_block_size_one(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
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
    info, requests = table_info(shift=shift), prompts(LENGTHS)
    trails = refer(requests, info, fused(size), sampling, plain=decode_fused, heads=heads)
    check(ours(requests, info, fused(size), sampling, rows=5, heads=heads), trails, requests)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.5, top_k=2, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 3), (1, 2), (0, 8)])
def test_what_a_head_drafts_changes_no_text(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
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
