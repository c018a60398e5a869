"""Every routing decision of the public S2D2's recorded runs, from the drafts that it had (SDAR, Fast-dLLM v2, LLaDA2.1).

Each step's canvas is put together from what the runs revealed, the model drafts it again, and our routers say whether it is
verified. Left out on purpose: the option legacy_ssd_span_strategy, which no
paper describes; drafts over a stale block cache; and where the public code loses the prompt (of exactly one block) or keeps its
half-causal drafting mask for what it stores.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.blocks.settings import Estimator, Router, ScoreRouter, VerificationCost
from draftmill.decoders.blocks.verifier import (
    Route,
    Threshold,
    acceptance,
    expected_tokens,
    measure_of,
    route_of,
    signals_of,
)
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.sampling import measure
from tests.decoders.references.rows import intervals_of
from tests.decoders.references.sampling import log_law
from tests.golden_data import read_json

ESTIMATORS, ROUTERS = TypeAdapter(Estimator), TypeAdapter(Router)
SCORE = ScoreRouter(kind="score")
# The public code's name of an estimator -> ours, its parameter, and our parameter.
NAMES = {
    "soft_entropy_negexp": ("entropy", "ssd_entropy_temperature", "beta"),
    "hard_margin_threshold": ("margin", "ssd_confidence_margin_threshold", "tau"),
    "hard_entropy_threshold": ("hard_entropy", "ssd_entropy_threshold", "tau"),
    "soft_confidence_power": ("confidence", "ssd_confidence_power", "power"),
    "soft_clipped_linear_margin": ("linear_margin", "ssd_confidence_margin_coef", "coefficient"),
    "soft_renyi_2_entropy": ("renyi", "", ""),
}


def cases_of(folder, kind="s2d2"):
    return [case for case in read_json(folder / "cases.json")["cases"] if case["kind"] == kind]


def estimator_of(name, options):
    ours, theirs, parameter = NAMES[name]
    return ESTIMATORS.validate_python({"kind": ours} | ({parameter: options[theirs]} if theirs in options else {}))


@dataclass(frozen=True, slots=True)
class Routing:
    """A router at work, and its settings."""

    router: Any
    estimator: Any
    route: Route


def routing_of(options):
    """Our router, with the public code's settings."""
    router = {
        "mask_span_length": lambda: {"kind": "min_span", "span": options["min_ssd_span_length"]},
        "score_threshold": lambda: {"kind": "score", "tau": options["do_verify_score_threshold"]},
        "score_hysteresis": lambda: {
            "kind": "hysteresis",
            "on": options["hysteresis_threshold_on"],
            "off": options["hysteresis_threshold_off"],
        },
        "contextual_bandit_ucb": lambda: {"kind": "bandit", "beta": options["ucb_beta"]},
    }[options["do_verify_policy"]]()
    estimator = estimator_of(options.get("token_acceptance_estimator", "soft_entropy_negexp"), options)
    kind = options.get("do_verify_score_type", "difference_static").removeprefix("difference_")
    cost = VerificationCost.model_validate({"kind": kind, "c": options.get("score_penalty_coef", 1.0)})
    settings = ROUTERS.validate_python(router)
    return Routing(settings, estimator, route_of(settings, cost))


# ---- drafts ----------------------------------------------------------------------------------------------------------


def canvases(case, length):
    """The canvas before each step, int64 [N, length], and how many tokens each step reveals.

    LLaDA2.1's text is cut at its length: what comes after a step that wrote behind that is not known.
    """
    canvas = torch.full((max(length, len(case["output"])),), case["settings"]["mask_id"])
    canvas[: len(case["prompt"])] = torch.tensor(case["prompt"])
    before, decoded = [], []
    for tokens, is_step in written(case):
        if is_step:
            before.append(canvas.clone())
            decoded.append(len(tokens))
        if None in tokens.values():
            break
        for place, token in tokens.items():
            canvas[place] = token
    assert len(before) == len(case["steps"]) or "order" in case
    return torch.stack(before)[:, :length], decoded


def written(case):
    """What was written, {place: token}, and whether by a step; from what is recorded of the order and the final text.

    A number below zero that ends in .5 is the token that Fast-dLLM v2 appends to a finished block, which is no step. LLaDA2.1
    edits: what stood at a place first is what its first edit replaced.
    """
    if "order" in case:
        first = {place: old for step in reversed(case["order"]) for place, old, _ in step["edit"]}
        final = dict(enumerate(case["output"])) | first
        return [
            (
                {int(abs(mark)): final.get(int(abs(mark))) for mark in step["unmask"]}
                | {place: new for place, _, new in step["edit"]},
                True,
            )
            for step in case["order"]
        ]
    return [
        (
            {int(abs(mark)): case["output"][int(abs(mark))] for mark in order},
            order[0] > 0 or order[0] % 1 != 0.5,
        )
        for order in case["reveal_order"]
    ]


def draft(backbone, case, *, size, window, shift):
    """What the model says in each step of the window's places: masks, bool [N, window], and logits [N, window, V]."""
    options, steps = case["settings"], case["steps"]
    spans = [step["span"][0] if step["span"] else step["block_start"] for step in steps]
    tokens, decoded = canvases(case, (max(spans) // size + 1) * size)
    spans = spans[: len(tokens)]
    starts, fronts = [span // size * size for span in spans], [span // window * window for span in spans]
    ranks, causal_fronts = torch.arange(tokens.shape[1]), _causal_fronts(spans, starts, fronts)
    causal, blocks = ranks <= ranks.unsqueeze(1), ranks // size <= ranks.unsqueeze(1) // size
    visible = torch.zeros(*tokens.shape, -(-tokens.shape[1] // 64) * 64, dtype=torch.bool)
    for number, start in enumerate(starts):
        seen = causal.clone() if options.get("cache_ver") else blocks.clone()
        seen[start:] = blocks[start:]
        if options.get("draft_ver"):
            seen[start : start + causal_fronts[number]] = causal[start : start + causal_fronts[number]]
        visible[number, :, : len(ranks)] = seen
    places = ranks.expand_as(tokens)
    backbone.allocate(len(tokens), visible.shape[2])
    flat = tokens.flatten(), places.flatten(), places.flatten(), intervals_of(visible.flatten(0, 1))
    hidden = backbone.forward(token_rows(range(len(tokens)), [tokens.shape[1]] * len(tokens), *flat))
    hidden = hidden.unflatten(0, tokens.shape)
    asked = torch.tensor(fronts).unsqueeze(1) + torch.arange(window)
    rows = hidden.gather(1, (asked - shift).clamp(min=0).unsqueeze(2).expand(-1, -1, hidden.shape[2]))
    logits = backbone.logits(rows.flatten(0, 1)).unflatten(0, asked.shape)
    return tokens.gather(1, asked) == options["mask_id"], logits, decoded


def _causal_fronts(spans, starts, fronts):
    """How many rows of a block are causal in a draft: up to the first mask, which the public code counts from the sub-block on
    and, as it writes into the mask that it goes on with, never takes back within a block."""
    found, widest = [], 0
    for number, (span, front) in enumerate(zip(spans, fronts, strict=True)):
        new_block = number == 0 or starts[number] != starts[number - 1]
        widest = max(0 if new_block else widest, span - front)
        found.append(widest)
    return found


def replay(case, routing, masks, logits, decoded, *, tau, top_p=1.0, progress_of_prompt):
    """Route every step by our own draft; returns the largest difference of a score."""
    verdict = "do_verify" if "do_verify" in case["steps"][0] else "verified"
    worst, done, own = 0.0, 0, torch.log_softmax(logits, -1)
    note = measure_of(routing.router, routing.estimator)
    cut = log_law(logits.flatten(0, 1), Sampling(temperature=1.0, top_p=top_p)).view_as(own)
    for number, step in enumerate(case["steps"][: len(masks)]):
        begins = step.get("block_start") != case["steps"][max(number - 1, 0)].get("block_start")
        done = 0 if begins else done
        mask = masks[number]
        places = mask.nonzero().flatten().tolist()
        sure = int((own[number][mask].amax(1).exp() > tau).sum())
        share = int((~mask).sum()) if progress_of_prompt else done
        measured = {}
        if note is not None:
            notes = measure(note, cut[number][mask], own[number][mask].argmax(1))
            measured = dict(zip(places, notes.tolist(), strict=True))
        found = signals_of(
            routing.router,
            routing.estimator,
            places,
            measured,
            num_sure=sure,
            progress=share / len(mask),
            size=len(mask),
            most_entropy=math.log(logits.shape[-1]),
        )
        verified = routing.route.decide(found)
        assert found.span == len(step["span"]) and verified == step[verdict], (case["name"], number)
        assert sure == step.get("num_high_confidence", sure)
        expected = step.get("expected_tokens", found.expected)
        worst = max(worst, abs(found.expected - expected))
        if "score" in step:
            assert isinstance(routing.route, Threshold)
            worst = max(worst, abs(routing.route.score(found) - step["score"]))
        routing.route.learn(decoded[number], verified=verified)
        done += decoded[number]
    return worst


def chosen(cases, *, spans, each=None):
    """All that read the draft's law, or `each` so many of each router's, and some of the minimum spans."""
    groups = defaultdict(list)
    for case in cases:
        options = case["settings"]
        groups[str(routing_of(options).router), options.get("token_acceptance_estimator")].append(case)
    return [
        case
        for group in groups.values()
        for case in group[: spans if "min_ssd_span_length" in group[0]["settings"] else each]
    ]


def policies(cases):
    return {case["settings"]["do_verify_policy"] for case in cases}


# ---- the estimators --------------------------------------------------------------------------------------------------


def test_the_estimators_are_the_public_ones(golden):
    cases, arrays = cases_of(golden / "s2d2", "estimators"), load_file(golden / "s2d2" / "arrays.safetensors")
    names = set()
    for case in cases:
        logits, drafts = arrays[case["arrays"][0]], torch.tensor(case["draft_tokens"])
        law = torch.log_softmax(logits.float(), -1)
        for row in case["rows"]:
            names.add(row["estimator"])
            estimator = estimator_of(row["estimator"], row["params"])
            note = measure_of(SCORE, estimator)
            assert note is not None
            measured = measure(note, law, drafts).tolist()
            alpha = [acceptance(estimator, one, math.log(law.shape[1])) for one in measured]
            assert alpha == pytest.approx(row["alpha"], abs=1e-5)
            assert expected_tokens(alpha) == pytest.approx(row["expected_accepted"], abs=1e-5)
    assert names == set(NAMES)


# ---- the decisions ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sdars_drafts_are_routed_as_in_the_public_runs(golden):
    folder = golden / "s2d2"
    backbone = load_backbone(folder, dtype="float32", device="cpu")
    cases = [
        case
        for case in chosen(cases_of(folder), spans=8)
        if "legacy_ssd_span_strategy" not in case["settings"]
        and case["settings"]["cache_ver"] >= case["settings"]["draft_ver"]
    ]
    assert len(policies(cases)) == 4
    for case in cases:
        size = case["settings"]["block_length"]
        drafted = draft(backbone, case, size=size, window=size, shift=0)
        tau = case["settings"]["confidence_threshold"]
        worst = replay(case, routing_of(case["settings"]), *drafted, tau=tau, progress_of_prompt=False)
        assert worst < 1e-4


def test_fast_dllms_drafts_are_routed_as_in_the_public_runs(golden):
    """The public code truncates by top-p what it estimates with, also at temperature 0."""
    folder = golden / "fast_dllm_v2"
    backbone = load_backbone(folder, dtype="float32", device="cpu")
    cases = [
        case
        for case in chosen(cases_of(folder), spans=8)
        if not case["settings"]["use_block_cache"] and len(case["prompt"]) != case["settings"]["block_size"]
    ]
    assert len(policies(cases)) == 3
    for case in cases:
        options = case["settings"]
        drafted = draft(backbone, case, size=options["block_size"], window=options["small_block_size"], shift=1)
        given = {"tau": options["threshold"], "top_p": options["top_p"], "progress_of_prompt": True}
        assert replay(case, routing_of(options), *drafted, **given) < 1e-4


@pytest.mark.slow
def test_lladas_drafts_are_routed_as_in_the_public_runs(golden):
    """A draft of a block without masks, in which tokens are only edited, has no score: it ends a hysteresis."""
    folder = golden / "llada2"
    backbone = load_backbone(folder, dtype="float32", device="cpu")
    cases, routed = chosen(cases_of(folder), spans=1, each=2), 0
    assert len(policies(cases)) == 3
    for case in cases:
        options = case["settings"]
        drafted = draft(backbone, case, size=options["block_length"], window=options["block_length"], shift=0)
        routed += len(drafted[0])
        worst = replay(case, routing_of(options), *drafted, tau=options["threshold"], progress_of_prompt=False)
        assert worst < 1e-4
    assert routed > 0.8 * sum(len(case["steps"]) for case in cases)
