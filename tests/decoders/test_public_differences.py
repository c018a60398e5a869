"""Where the masked-diffusion decoders differ from the public code on purpose: its own numbers, and ours beside them.

A plain loop with the public code's rule first gives its recorded tokens, reveal orders and forwards on our models, so that
nothing but the rule differs.
"""

import numpy as np
import pytest
import torch

from tests.decoders.backbones.masked_models import load, look
from tests.decoders.masked.golden_masked import CACHES, built, canvas_of, cases_of, check_reveals, decoded
from tests.decoders.support import decoder_settings

LLADA_MASK, DREAM_MASK = 90, 91


class Loop:
    """One canvas that is filled in place, one forward after the other; what is not run is read as it was left."""

    def __init__(self, backbone, case, mask_id, *, shift):
        backbone.forget()
        backbone.allocate(1, 64)
        self.backbone, self.mask_id, self.shift = backbone, mask_id, shift
        canvas = canvas_of(case, mask_id)
        self.tokens = np.where(canvas < 0, mask_id, canvas)
        self.first, self.num_calls = len(case["prompt"]), 0
        self.call_of: dict[int, int] = {}

    def masks(self, start=0, end=None):
        return [int(p) + start for p in np.flatnonzero(self.tokens[start:end] == self.mask_id)]

    def forward(self, positions, run=None):
        """Run the whole canvas, or `run`; the laws at these positions, [R, V]."""
        run = range(len(self.tokens)) if run is None else run
        hidden = look(self.backbone, {0: self.tokens.tolist()}, run={0: run})[0]
        self.num_calls += 1
        rows = [run.index(max(p - self.shift, 0)) for p in positions]
        return self.backbone.logits(hidden[rows]).double().softmax(1)

    def reveal(self, position, law_V):
        self.tokens[position] = int(law_V.argmax())
        self.call_of[position] = self.num_calls

    def check(self, case):
        assert self.tokens.tolist() == case["output"]
        calls = [self.call_of.get(p, -1) for p in range(self.first, len(self.tokens))]
        assert calls == case["reveal_call"]
        assert self.num_calls == case["nfe"]


def ours(backbone, folder, settings, case, mask_id):
    return decoded(built(backbone, folder, settings), case, mask_id)


# ---- LLaDA ---------------------------------------------------------------------------------------------------------------


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
    loop = Loop(backbone, case, LLADA_MASK, shift=0)
    size, steps = options["block_length"], options["steps"] // (options["gen_length"] // options["block_length"])
    for start in range(loop.first, len(loop.tokens), size):
        quota, rest = divmod(len(loop.masks(start, start + size)), steps)
        for step in range(steps):
            masks = loop.masks(0, start + size)
            law = loop.forward(masks)
            for index in law.max(1).values.argsort(descending=True)[: quota + (step < rest)].tolist():
                loop.reveal(masks[index], law[index])
    loop.check(case)
    assert len(loop.masks()) == case["masks_left"] == 2

    settings = decoder_settings("stepwise", block_length=size, steps=options["steps"])
    outcome = ours(backbone, folder, settings, case, LLADA_MASK)
    assert len(outcome.tokens) == options["gen_length"] + 2
    assert LLADA_MASK not in outcome.tokens
    assert outcome.trace[0].positions[0] < loop.first


@pytest.mark.parametrize(("masks", "steps", "shares"), [(8, 3, [3, 3, 2]), (6, 4, [2, 2, 1, 1]), (4, 1, [4])])
def test_what_does_not_come_out_even_goes_to_the_first_steps_as_in_llada(golden, masks, steps, shares):
    """No difference: the remainder rule. Cases with blocks of so many masks, and so many steps for each block."""
    folder, backbone = golden / "llada", load(golden / "llada")
    found = 0
    for case in cases_of(folder, "gsai_generate"):
        options, num_blocks = case["settings"], case["settings"]["gen_length"] // case["settings"]["block_length"]
        if (options["block_length"], options["steps"] // num_blocks) != (masks, steps) or case["masks_left"]:
            continue
        settings = decoder_settings("stepwise", block_length=masks, steps=options["steps"])
        outcome = ours(backbone, folder, settings, case, LLADA_MASK)
        check_reveals(outcome, case, canvas_of(case, LLADA_MASK))
        assert [len(step.positions) for step in outcome.trace] == shares * num_blocks
        found += 1
    assert found


# ---- Dream ---------------------------------------------------------------------------------------------------------------


def test_dreams_origin_leaves_to_chance_how_many_are_revealed_and_random_does_not(golden):
    """Its `origin` reveals each mask with the schedule's share as its chance. Ours has `confidence: random`, an order drawn
    beforehand, of which each step takes as many as of any other confidence."""
    folder, backbone = golden / "dream", load(golden / "dream")
    cases = {case["id"]: case for case in cases_of(folder, "diffusion_generate")}
    origins = [case for case in cases.values() if case["settings"]["alg"] == "origin"]
    assert len(origins) == 4
    for case in origins:
        loop, steps = Loop(backbone, case, DREAM_MASK, shift=1), case["settings"]["steps"]
        times = torch.linspace(1.0, 1e-3, steps + 1)
        for step, uniforms in enumerate(case["uniforms_per_step"]):
            share = 1.0 if step == steps - 1 else float(1 - times[step + 1] / times[step])
            masks = loop.masks()
            law = loop.forward(masks)
            for index, (position, uniform) in enumerate(zip(masks, uniforms, strict=True)):
                if uniform < share:
                    loop.reveal(position, law[index])
        loop.check(case)

        settings = decoder_settings("stepwise", block_length=None, steps=steps, schedule="dream", confidence="random")
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
        loop, left = Loop(backbone, case, DREAM_MASK, shift=1), 0
        share = options["gen_length"] // options["steps"]
        while loop.masks():
            masks = loop.masks()
            law = loop.forward(masks)
            order = law.max(1).values.argsort(descending=True)[: share + left].tolist()
            left = 0
            for rank, index in enumerate(order):
                if rank == 0 or float(law[index].max()) >= options["threshold"]:
                    loop.reveal(masks[index], law[index])
                else:
                    left += 1
        loop.check(case)
        settings = decoder_settings("threshold", block_length=None, tau=options["threshold"])
        outcome = ours(backbone, folder, settings, case, DREAM_MASK)
        found.append((case["nfe"], outcome.nfe))
    assert found == [(12, 5), (8, 4)]


def public_block(loop, start, end, case):
    """A block as Fast-dLLM's code for Dream fills it: the first token at once, the others by a quota of negative entropy or by a
    threshold, each read from the row before it within the window."""
    options = case["settings"]
    law = loop.forward([start])
    loop.reveal(start, law[0])
    run = range(start, end if options["dual_cache"] else len(loop.tokens))
    steps = options["steps"] // (options["gen_length"] // options["block_length"])
    times = torch.linspace(1.0, 1e-3, steps + 1)
    for step in range(1, 10**6):
        masks = loop.masks(start, end)
        if not masks or ("threshold" not in options and step == steps):
            return
        law = loop.forward(masks, run)
        if "threshold" in options:
            sure = law.max(1).values
            chosen = [i for i in range(len(masks)) if i == int(sure.argmax()) or sure[i] >= options["threshold"]]
        else:
            sure = (law * (law + 1e-10).log()).sum(1)
            share = 1 - times[step + 1] / times[step]
            count = int(len(masks) * share) if step < steps - 1 else len(masks)
            chosen = sure.argsort(descending=True)[:count].tolist()
        for index in chosen:
            loop.reveal(masks[index], law[index])


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
        loop = Loop(backbone, case, DREAM_MASK, shift=1)
        starts = range(loop.first, len(loop.tokens), size)
        for start in starts:
            public_block(loop, start, start + size, case)
        loop.check(case)
        assert all(loop.call_of[start] == min(loop.call_of[p] for p in range(start, start + size)) for start in starts)

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
