"""Where the masked-diffusion decoders differ from the public code on purpose: its own recordings, and ours beside them."""

import numpy as np
import pytest

from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.golden_masked import CACHES, built, cases_of, decoded
from tests.decoders.support import decoder_settings

LLADA_MASK, DREAM_MASK = 90, 91


def ours(backbone, folder, settings, case, mask_id):
    return decoded(built(backbone, folder, settings), case, mask_id)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CACHES)
def test_the_older_fast_dllm_spends_a_forward_on_a_block_that_is_done(golden, kind):
    """Its loop asks whether a block is done after the forward; ours, as its newer one, before. Same tokens, same order."""
    folder, backbone = golden / "llada", load(golden / "llada")
    cases = [case for case in cases_of(folder, f"fastdllm_{kind}") if "threshold" in case["settings"]]
    assert len(cases) == 4
    assert sum(case["revealed_per_call"].count(0) for case in cases) == (1 if kind == "prefix_cache" else 0)
    for case in cases:
        options = case["settings"]
        settings = decoder_settings(
            "threshold", block_length=options["block_length"], tau=options["threshold"], cache=CACHES[kind]
        )
        outcome = ours(backbone, folder, settings, case, LLADA_MASK)
        wasted = case["revealed_per_call"].count(0)
        assert outcome.tokens.tolist() == case["output"][-len(outcome.tokens) :]
        assert outcome.nfe == case["nfe"] - wasted
        calls = np.array(case["reveal_call"])
        found = [position for step in outcome.trace for position in sorted(step.positions)]
        assert found == (len(case["prompt"]) + calls.argsort(kind="stable")).tolist()


def test_masks_in_a_prompt_are_holes_and_not_rivals(golden):
    """In the public LLaDA they take shares of the blocks' quotas, and two masks of the completion are left at the end. Ours
    begins its blocks at the first mask, wherever it stands, and leaves none."""
    folder, backbone = golden / "llada", load(golden / "llada")
    (case,) = (case for case in cases_of(folder, "gsai_generate") if case["masks_left"])
    options = case["settings"]
    assert case["masks_left"] == 2
    settings = decoder_settings("stepwise", block_length=options["block_length"], steps=options["steps"])
    outcome = ours(backbone, folder, settings, case, LLADA_MASK)
    assert len(outcome.tokens) == options["gen_length"] + 2
    assert LLADA_MASK not in outcome.tokens
    assert outcome.trace[0].positions[0] < len(case["prompt"])


def test_dreams_origin_leaves_to_chance_how_many_are_revealed_and_random_does_not(golden):
    """Its `origin` reveals each mask with the schedule's share as its chance. Ours has `confidence: random`, an order drawn
    beforehand, of which each step takes as many as of any other confidence."""
    folder, backbone = golden / "dream", load(golden / "dream")
    cases = {case["id"]: case for case in cases_of(folder, "diffusion_generate")}
    origins = [case for case in cases.values() if case["settings"]["alg"] == "origin"]
    assert len(origins) == 4
    for case in origins:
        settings = decoder_settings(
            "stepwise", block_length=None, steps=case["settings"]["steps"], schedule="dream", confidence="random"
        )
        outcome = ours(backbone, folder, settings, case, DREAM_MASK)
        counts = [len(step.positions) for step in outcome.trace]
        assert counts == cases[case["id"].replace("origin", "entropy")]["revealed_per_call"]
        assert counts != case["revealed_per_call"]
        assert sum(counts) == sum(case["revealed_per_call"])


def test_threshold_has_no_quota_of_tokens_for_a_step(golden):
    """Fast-dLLM's sampler for Dream without blocks reveals at most an equal share a step and what was left over of the shares
    before, however sure it is. Ours reveals all that passes: 5 and 4 forwards instead of 12 and 8."""
    folder, backbone = golden / "dream", load(golden / "dream")
    found = []
    for case in cases_of(folder, "confidence_threshold"):
        options = case["settings"]
        settings = decoder_settings("threshold", block_length=None, tau=options["threshold"])
        outcome = ours(backbone, folder, settings, case, DREAM_MASK)
        found.append((case["nfe"], outcome.nfe))
    assert found == [(12, 5), (8, 4)]


@pytest.mark.slow
def test_no_token_of_dream_is_revealed_unasked_and_no_confidence_is_swapped(golden):
    """Fast-dLLM's blocks of Dream begin with a forward that reveals the first token and nothing else, however unsure it is, since
    the row before it isn't run again; and without a threshold they rank by entropy whatever they were told, by a schedule whose
    first step after that often reveals nothing. Ours runs that row with the window, and starts with what it is surest of."""
    folder, backbone = golden / "dream", load(golden / "dream")
    cases, unforced, fewer = cases_of(folder, "block_generate"), 0, 0
    assert len(cases) == 10
    for case in cases:
        options = case["settings"]
        size, cache = options["block_length"], CACHES["dual_cache" if options["dual_cache"] else "prefix_cache"]
        first = len(case["prompt"])
        starts = range(first, first + options["gen_length"], size)
        if "threshold" in options:
            settings = decoder_settings("threshold", block_length=size, tau=options["threshold"], cache=cache)
            outcome = ours(backbone, folder, settings, case, DREAM_MASK)
            fewer += outcome.nfe < case["nfe"]
        else:
            base = decoder_settings(
                "stepwise", block_length=size, steps=options["steps"], confidence="entropy", cache=cache
            )
            outcome = ours(backbone, folder, base, case, DREAM_MASK)
            assert outcome.nfe == case["nfe"]
            assert 0 not in [len(step.positions) for step in outcome.trace]
        call_of = {p: step.nfe for step in outcome.trace for p in step.positions}
        unforced += sum(call_of[start] > min(call_of[p] for p in range(start, start + size)) for start in starts)
    assert unforced >= len(cases)
    assert fewer > 0
