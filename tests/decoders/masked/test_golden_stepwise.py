"""`stepwise`, `threshold` and `factor` held to the public code's reveals, run by run, and what they do otherwise on purpose.

Where ours differs on purpose, the test says how. The public code doesn't suppress the mask: its probability is part of every
confidence there, so these tests do not suppress it either, but for one that shows what that changes.
"""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.masked import stepwise
from draftmill.decoders.masked.stepwise import dream_quota, dream_times, within
from tests.decoders.backbones.masked_models import load, look
from tests.decoders.masked.golden_masked import CACHES, built, canvas_of, cases_of, check, decoded
from tests.decoders.support import decoder_settings, run_all

CONFIDENCES: dict[str, Any] = {"maskgit_plus": "top1", "topk_margin": "margin", "entropy": "entropy"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CACHES)
def test_stepwise_is_the_public_llada_by_its_steps(golden, kind):
    folder, cache = golden / "llada", CACHES[kind]
    groups = {"generate": ("gsai_generate", "fastdllm_generate")}.get(kind, (f"fastdllm_{kind}",))
    cases = [
        case
        for case in cases_of(folder, *groups, f"newer_{kind}")
        if not {"threshold", "factor"}.intersection(case["settings"]) and case["masks_left"] == 0
    ]
    assert len(cases) >= 6
    backbone = load(folder)
    for case in cases:
        options = case["settings"]
        settings = decoder_settings(
            "stepwise", block_length=options["block_length"], steps=options["steps"], cache=cache
        )
        check(built(backbone, folder, settings), case, 90)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CACHES)
def test_threshold_is_the_public_fast_dllm(golden, kind):
    """Forwards as in its newer loop: the older one spends one more where a block's first forward reveals it all."""
    folder, backbone = golden / "llada", load(golden / "llada")
    cases = [case for case in cases_of(folder, f"newer_{kind}") if "threshold" in case["settings"]]
    assert len(cases) >= 4
    for case in cases:
        options = case["settings"]
        common = {"block_length": options["block_length"], "cache": CACHES[kind]}
        settings = decoder_settings("threshold", tau=options["threshold"], **common)
        check(built(backbone, folder, settings), case, 90)


def public_within(factor, sure):
    """Fast-dLLM reveals everything where all but the last candidate pass; so two masks are always revealed together."""
    count = within(factor, sure)
    return len(sure) if count >= len(sure) - 1 else count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CACHES)
def test_factor_is_the_public_fast_dllm_but_for_the_last_candidate(golden, kind, monkeypatch):
    """Differs on purpose: the last candidate has to pass like the others, so ours takes no fewer forwards, and here more."""
    folder, backbone = golden / "llada", load(golden / "llada")
    cases = [case for case in cases_of(folder, f"newer_{kind}") if "factor" in case["settings"]]
    assert len(cases) >= 4
    more = 0
    for case in cases:
        options = case["settings"]
        settings = decoder_settings(
            "factor", block_length=options["block_length"], factor=options["factor"], cache=CACHES[kind]
        )
        with monkeypatch.context() as public:
            public.setattr(stepwise, "within", public_within)
            decoder = built(backbone, folder, settings)
        check(decoder, case, 90)
        more += decoded(built(backbone, folder, settings), case, 90).nfe > case["nfe"]
    assert more


def test_factor_reveals_the_largest_number_of_which_each_is_sure_enough():
    # 2 x 0.1, 3 x 0.2 < 1, 4 x 0.26 > 1; never fewer than one; never more than there are.
    assert within(1.0, [0.9, 0.8, 0.74, 0.7]) == 2
    assert within(1.0, [0.1, 0.1, 0.1, 0.1, 0.1]) == 1
    assert within(1.0, [1.0, 1.0]) == 2


def test_stepwise_is_the_public_dream_by_its_schedule(golden):
    """Differs on purpose: rows that the public code decodes in one batch share the mean of their masks, ours have their own (here
    the same). Its `origin` is below."""
    folder, backbone = golden / "dream", load(golden / "dream")
    cases = [case for case in cases_of(folder, "diffusion_generate") if case["settings"]["alg"] in CONFIDENCES]
    assert len(cases) >= 14
    for case in cases:
        steps, confidence = case["settings"]["steps"], CONFIDENCES[case["settings"]["alg"]]
        settings = decoder_settings("stepwise", block_length=None, schedule="dream", steps=steps, confidence=confidence)
        check(built(backbone, folder, settings), case, 91)


def test_dreams_schedule_reveals_as_many_as_the_public_code(golden):
    schedules = json.loads((golden / "dream" / "cases.json").read_text())["reveal_schedule_no_origin"]
    assert len(schedules) > 10
    for schedule in schedules:
        left, reveals = schedule["masks"], []
        for step in range(schedule["steps"]):
            at_step: Any = SimpleNamespace(iterations=step)
            reveals.append(dream_quota(at_step, schedule["steps"])(left))
            left -= reveals[-1]
        assert reveals == schedule["reveals"]


def test_the_times_of_dreams_schedule_are_those_of_torch_to_the_bit():
    for steps in (1, 2, 3, 7, 64, 255, 256, 511, 1000):
        assert torch.equal(torch.from_numpy(dream_times(steps)), torch.linspace(1.0, 1e-3, steps + 1))


def test_a_mask_that_can_not_be_drawn_takes_no_part_in_confidences(golden):
    """Differs on purpose: the public code leaves the mask its share of every probability, so a close choice of a position can
    come out otherwise; most do not."""
    folder, backbone = golden / "llada", load(golden / "llada")
    cases = [case for case in cases_of(folder, "gsai_generate") if case["masks_left"] == 0]
    same = 0
    for case in cases:
        options = case["settings"]
        settings = decoder_settings("stepwise", block_length=options["block_length"], steps=options["steps"])
        decoder = built(backbone, folder, settings, suppressed=(90,))
        holes = np.flatnonzero(canvas_of(case, 90) < 0)
        same += decoded(decoder, case, 90).tokens.tolist() == [case["output"][hole] for hole in holes]
    assert len(cases) / 2 < same <= len(cases)


def plain_loop(backbone, canvas, *, mask_id, shift, block_length, cache, refresh=None):
    """One canvas, one forward a token, as one would write it down: positions in the order in which they are revealed."""
    tokens, origin = np.where(canvas < 0, mask_id, canvas), int(np.flatnonzero(canvas < 0)[0])
    masked, before, made_at = canvas < 0, None, 0
    order: list[tuple[int, int]] = []
    backbone.forget()
    backbone.allocate(1, 64)
    while masked.any():
        start = origin + (np.flatnonzero(masked)[0] - origin) // block_length * block_length
        due = before != start if refresh is None else before is None or len(order) - made_at >= refresh
        made_at = len(order) if due else made_at
        whole = cache == "none" or due
        # A block that ended unrefreshed is run with the next one.
        size, beyond = block_length, len(canvas) if cache == "prefix" else 0
        windows = [
            p for s in {before, start} if not whole for p in range(s - shift, max(min(s + size, len(canvas)), beyond))
        ]
        run = range(len(canvas)) if whole else sorted({p for p in windows if p >= 0})
        before = start
        hidden = look(backbone, {0: tokens.tolist()}, run={0: run})[0]
        choices = [p for p in np.flatnonzero(masked) if p < start + block_length]
        logits = backbone.logits(torch.stack([hidden[run.index(max(p - shift, 0))] for p in choices]))
        logits[:, mask_id] = -torch.inf
        best = logits.double().softmax(1).max(1)
        pick = int(best.values.argmax())
        tokens[choices[pick]], masked[choices[pick]] = int(best.indices[pick]), False
        order.append((int(choices[pick]), int(best.indices[pick])))
    return order


LIFETIMES: list[tuple[Any, int | None]] = [
    *(("none", None), ("prefix", None), ("prefix", 3), ("prefix", 6)),
    *(("dual_strict", None), ("dual_strict", 1), ("dual_strict", 3), ("dual_strict", 6), ("dual_relaxed", 6)),
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("cache", "refresh"), LIFETIMES)
@pytest.mark.parametrize(("family", "mask_id", "shift"), [("llada", 90, 0), ("dream", 91, 1)])
def test_blocks_with_holes_anywhere_are_those_of_a_plain_loop(golden, family, mask_id, shift, cache, refresh):
    """Differs on purpose from Fast-dLLM on Dream: the row in front of a block is run with it, so that its first position is
    read like any other; the public code reveals it unasked, and ranks the rest by entropy whatever it was told."""
    folder, backbone = golden / family, load(golden / family)
    requests = []
    for index, length in enumerate((13, 9, 16, 5, 12)):
        rng = np.random.default_rng(index)
        canvas = rng.integers(0, 80, length).astype(np.int32)
        canvas[rng.random(length) < 0.7] = -1
        if index % 2:
            canvas[0] = -1
        requests.append(Request(index, index, canvas))
    settings = decoder_settings("stepwise", block_length=4, cache=cache, refresh=refresh)
    outcomes = run_all(built(backbone, folder, settings, suppressed=(mask_id,)), requests)
    named = {"mask_id": mask_id, "shift": shift, "block_length": 4, "cache": cache, "refresh": refresh}
    for request in requests:
        steps = outcomes[request.index].trace
        order = [pair for step in steps for pair in zip(step.positions, step.committed, strict=True)]
        assert order == plain_loop(backbone, request.canvas, **named)


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
