"""Block diffusion held to the public code's tokens, reveal orders and forwards: SDAR, Fast-dLLM v2, LLaDA2, D2F, Nemotron.

Differs on purpose in the last store pass, after which nothing comes: ours spends none. Where more differs, a test says how. Not
offered: Fast-dLLM v2's cache of sub-blocks, whose keys are stale.
"""

import collections
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.backbones.causal_models import in_a_row, play
from tests.decoders.backbones.masked_models import load
from tests.decoders.blocks.golden_blocks import (
    MASK,
    cases_of,
    check,
    kinds_of,
    orders,
    our_kinds,
    replayed,
    same,
    text_of,
)
from tests.decoders.support import decode, decoder_settings, texts


def test_sdar_is_the_public_code(golden):
    folder = golden / "sdar"
    cases = [c for c in cases_of(folder, "generate", file="generate.json") if not c["position_revealed_twice"]]
    assert len(cases) > 50
    for case in cases[::4]:
        check(replayed(folder, case)[0], case, last_store=1)


def test_no_position_is_revealed_twice(golden):
    """Differs on purpose: where a step's share exceeds the masks that are left, the public code overwrites what was revealed."""
    folder = golden / "sdar"
    cases = [c for c in cases_of(folder, "generate", file="generate.json") if c["position_revealed_twice"]]
    assert len(cases) == 13
    agreeing = 0
    for case in cases[::3]:
        outcome, _ = replayed(folder, case)
        ours, theirs = orders(outcome, case)
        assert max(collections.Counter(place for step in ours for place in step).values()) == 1
        assert max(collections.Counter(place for step in theirs for place in step).values()) == 2
        agreeing += same(outcome, case)
    assert agreeing < len(cases[::3])


def test_sdars_own_script_is_the_same_at_top_k_one_but_for_the_order_of_equals(golden):
    """Differs on purpose: there every confidence is 1, so that `static` has nothing but ties, which ours takes from left to right
    and the public code as torch.topk happens to."""
    cases = cases_of(golden / "sdar", "generate_original_topk1", file="generate.json")
    found = {case["settings"]["remasking_strategy"]: (replayed(golden / "sdar", case)[0], case) for case in cases}
    assert {name: same(*of) for name, of in found.items()} == {
        "sequential": True,
        "low_confidence_dynamic": True,
        "low_confidence_static": False,
    }
    places = [place for step in found["low_confidence_static"][0].trace for place in step.positions]
    assert places == sorted(places)


def test_a_mask_that_can_not_be_drawn_takes_no_part_in_confidences(golden):
    """Differs on purpose: the public code leaves the mask its share of every probability, so a close choice can come out
    otherwise; most do not."""
    folder = golden / "sdar"
    cases = [c for c in cases_of(folder, "generate", file="generate.json") if not c["position_revealed_twice"]][1::8]
    agreeing = sum(same(replayed(folder, case, suppressed=(MASK,))[0], case) for case in cases)
    assert len(cases) / 2 < agreeing <= len(cases)


def test_fast_dllm_v2_is_the_public_code(golden):
    """One canvas position more than whole blocks: the public code appends the token that its last store pass predicts."""
    folder = golden / "fast_dllm_v2"
    cases = [
        case
        for case in cases_of(folder, "generate")
        if not case["settings"]["use_block_cache"] and not case["prompt_equals_block_size"]
    ]
    assert len(cases) > 40
    for case in cases[::3]:
        outcome, _ = replayed(folder, case)
        assert text_of(outcome, case) == case["output"], case["name"]
        check(outcome, case)


def test_a_prompt_of_exactly_one_block_is_read(golden):
    """Differs on purpose: the public code never runs such a prompt, so that its text does not depend on it."""
    folder = golden / "fast_dllm_v2"
    (case,) = [
        case
        for case in cases_of(folder, "generate")
        if case["prompt_equals_block_size"] and not case["settings"]["use_block_cache"]
    ]
    outcome, _ = replayed(folder, case)
    assert (outcome.nfe_kinds["prefill"], kinds_of(case)[0] - outcome.nfe_kinds["commit"]) == (1, 0)
    assert text_of(outcome, case) != case["output"]


def changes(outcome):
    """What each forward wrote: (position, token), as it was seen afterwards."""
    found: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for step in outcome.trace:
        found[step.nfe] += zip(step.positions, step.committed, strict=True)
    return [sorted(writes) for writes in found.values() if writes]


def recorded_changes(case):
    return [
        sorted([(place, new) for place, new in change["unmask"]] + [(place, new) for place, _, new in change["edit"]])
        for change in case["changes"]
    ]


@pytest.mark.slow
def test_llada2_is_the_public_code(golden):
    """The record is cut where the output is, so that it does not show all that the last forwards changed."""
    folder = golden / "llada2"
    cases = cases_of(folder, "generate_llada20")
    assert len(cases) == 36
    for case in cases[::6]:
        outcome, _ = replayed(folder, case)
        assert same(outcome, case), case["name"]
        assert outcome.nfe_kinds["draft"] == case["nfe"]["draft"]
        seen = recorded_changes(case)
        assert changes(outcome)[: len(seen) - 1] == seen[:-1]


@pytest.mark.slow
def test_llada21_edits_as_the_public_code(golden):
    folder = golden / "llada2"
    cases = cases_of(folder, "generate_llada21")
    assert len(cases) == 62 and sum(case.get("n_edits", 0) for case in cases) > 100
    for case in [*cases[::12], cases[-1]]:
        outcome, _ = replayed(folder, case)
        assert same(outcome, case), case["name"]
        if "cached_nfe" in case:
            assert our_kinds(outcome) == kinds_of(case)
        seen = recorded_changes(case)
        assert changes(outcome)[: len(seen) - 1] == seen[:-1]


GREEDY = Sampling(temperature=0.0)
load = cache(load)


def rows_of(tokens: list[int], prompt: int, size: int) -> list:
    """Rows of a prompt that see all of it, then blocks, as far as the text goes."""
    last = len(tokens)
    ends = [prompt if at < prompt else min(at + size - (at - prompt) % size, last) for at in range(last)]
    return [(token, at, at, range(end)) for at, (token, end) in enumerate(zip(tokens, ends, strict=True))]


def completed(folder, info: ModelInfo, settings, prompt: list[int], count: int):
    """Our outcome of a completion by so many tokens."""
    canvas = np.array(prompt + [-1] * count, dtype=np.int32)
    return decode(load(folder), info, settings, GREEDY, [Request(0, 0, canvas)], rows=1)[0]


@pytest.mark.parametrize(("family", "kind"), [("llada", "logits"), ("dream", "dream")])
def test_logits_under_the_mask_of_d2f_are_those_of_its_code(golden, family, kind):
    backbone, arrays = load(golden / family), load_file(golden / "d2f" / "arrays.safetensors")
    cases = cases_of(golden / "d2f", kind)
    assert len(cases) >= 3
    for index, case in enumerate(cases):
        backbone.forget()
        backbone.allocate(1, 64)
        hidden = play(backbone, {0: rows_of(case["input_ids"], case["prompt"], case["block_size"])})[0]
        torch.testing.assert_close(backbone.logits(hidden), arrays[f"{kind}.{index}"][0], atol=1e-4, rtol=1e-5)


def test_d2f_on_llada_is_the_public_code_where_blocks_come_one_after_the_other(golden):
    info = inspect_model(golden / "llada", family="d2f_llada")
    assert (info.kind, info.block_size, info.prompt_block, info.shift) == ("blocks", 16, True, 0)
    cases = cases_of(golden / "d2f", "generate")
    assert len({case["settings"]["block_size"] for case in cases}) == 4
    for case in cases:
        size, tau = case["settings"]["block_size"], case["settings"]["skip_threshold"]
        settings = decoder_settings("block_diffusion", block_size=size, tau=tau, fused=True)
        outcome = completed(golden / "llada", info, settings, case["prompt"], len(case["output"]))
        assert outcome.tokens.tolist() == case["output"]
        assert outcome.nfe == case["nfe"]


def test_d2f_on_dream_predicts_a_blocks_first_token_from_the_row_before_it(golden):
    """Differs on purpose in the order only: the public code reveals that token when it is sure of it, ours at once."""
    info = inspect_model(golden / "dream", family="d2f_dream")
    assert (info.kind, info.shift, info.left_shift, info.prompt_block) == ("blocks", 1, None, True)
    assert info.mask_id is not None
    prompt = [5, 17, 3, 60, 1]
    settings = decoder_settings("block_diffusion", block_size=4, schedule="sequential")
    tokens = list(prompt)
    backbone = load(golden / "dream")
    for at in range(len(prompt), 13):
        start = at - (at - len(prompt)) % 4
        seen = tokens if at == start else [*tokens, *[info.mask_id] * (start + 4 - at)]
        backbone.forget()
        backbone.allocate(1, 32)
        hidden = play(backbone, {0: rows_of(seen, len(prompt), 4)})[0]
        law = backbone.logits(hidden[at - 1 : at])[0].index_fill(0, torch.tensor(info.suppressed), -torch.inf)
        tokens.append(int(law.argmax()))
    outcome = completed(golden / "dream", info, settings, prompt, 8)
    assert outcome.tokens.tolist() == tokens[5:]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["d2f_llada", "d2f_dream", "nemotron_labs_diffusion"])
def test_prompts_share_and_are_cut_only_where_they_are_causal(golden, family, causal):
    """Twelve prompts that begin alike, in two slots and in chunks of 4 rows, give the texts that each gives alone."""
    folder = golden / family.removeprefix("d2f_").removesuffix("_labs_diffusion")
    info = inspect_model(folder, family=family)
    settings = decoder_settings("block_diffusion", block_size=4, causal_cache=causal)
    heads = np.random.default_rng(3).integers(0, 88, (2, 9))
    canvases = [np.concatenate([heads[at % 2, : 6 + at % 4], [at, *[-1] * 6]]).astype(np.int32) for at in range(12)]
    requests = [Request(at, at, canvas) for at, canvas in enumerate(canvases)]
    alone = {
        request.index: decode(load(folder), info, settings, GREEDY, [request])[request.index] for request in requests
    }
    assert texts(decode(load(folder), info, settings, GREEDY, requests, rows=2, prompt_rows=4)) == texts(alone)


def test_logits_of_nemotron_are_those_of_ministral_3_in_both_modes(golden):
    backbone, arrays = load(golden / "nemotron"), load_file(golden / "nemotron" / "arrays.safetensors")
    for index, case in enumerate(cases_of(golden / "nemotron", "logits")):
        prefix, block = case["prefix"], case["block"]
        backbone.forget()
        backbone.allocate(1, 128)
        if prefix:
            hidden = play(backbone, {0: in_a_row(prefix)})[0]
            torch.testing.assert_close(backbone.logits(hidden), arrays[f"prefix.{index}"][0], atol=1e-4, rtol=1e-5)
        first, end = len(prefix), len(prefix) + len(block)
        both_ways = [(token, first + at, first + at, range(end)) for at, token in enumerate(block)]
        for name, rows in (("verify", in_a_row(block, first)), ("draft", both_ways)):
            hidden = play(backbone, {0: rows})[0]
            torch.testing.assert_close(backbone.logits(hidden), arrays[f"{name}.{index}"][0], atol=1e-4, rtol=1e-5)


def test_nemotron_decodes_blocks_as_the_public_code_with_either_context(golden):
    """The public code stores the last block, after which nothing comes, and counts no prefill."""
    info, cases = inspect_model(golden / "nemotron"), cases_of(golden / "nemotron", "generate")
    assert {(case["causal_context"], case["threshold"]) for case in cases} >= {(True, 0.3), (False, 0.9), (True, None)}
    for case in cases:
        tau = case["threshold"]
        settings = decoder_settings(
            "block_diffusion",
            block_size=case["block_length"],
            schedule="static" if tau is None else "dynamic",
            tau=tau or 0.0,
            causal_cache=case["causal_context"],
        )
        outcome = completed(golden / "nemotron", info, settings, case["prompt"], len(case["output"]))
        assert outcome.tokens.tolist() == case["output"]
        assert outcome.nfe == case["nfe"]


def test_nemotrons_self_speculation_is_its_causal_mode(golden):
    info = inspect_model(golden / "nemotron")
    one = decoder_settings("block_diffusion", block_size=1, causal_cache=True)
    for case in cases_of(golden / "nemotron", "ar_generate", "linear_spec"):
        size = case.get("block_length", 8)
        verified = decoder_settings("s2d2", block_size=size, causal_cache=True)
        for settings in (one, verified, verified.model_copy(update={"fused": True})):
            outcome = completed(golden / "nemotron", info, settings, case["prompt"], 16)
            assert outcome.tokens.tolist() == case["output"][:16]
