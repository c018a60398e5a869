"""Golden cases of block diffusion and S2D2 (SDAR, Fast-dLLM v2, LLaDA2): read, decoded by ours, compared.

The public code doesn't suppress the mask, so neither is it suppressed here. Where a case says how often something was stored,
prefills of Fast-dLLM v2 are among it.
"""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.sampling import inverse_cdf_draw
from draftmill.decoders.engine.asks import NO_DRAFT
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import algorithm_of
from tests.decoders.support import decoder_settings, run_all
from tests.golden_data import read_json

MASK = 95
SCHEDULES = {
    "low_confidence_static": "static",
    "low_confidence_dynamic": "dynamic",
    "sequential": "sequential",
}
ESTIMATORS = {
    "soft_entropy_negexp": lambda options: {"kind": "entropy"},
    "hard_margin_threshold": lambda options: {"kind": "margin", "tau": options["ssd_confidence_margin_threshold"]},
}
ROUTERS = {
    "mask_span_length": lambda o: {"kind": "min_span", "span": o["min_ssd_span_length"]},
    "score_threshold": lambda o: {"kind": "score", "tau": o["do_verify_score_threshold"]},
    "score_hysteresis": lambda o: {
        "kind": "hysteresis",
        "on": o["hysteresis_threshold_on"],
        "off": o["hysteresis_threshold_off"],
    },
    "contextual_bandit_ucb": lambda o: {
        "kind": "bandit",
        "beta": o["ucb_beta"],
        "entropy_of": o["ucb_entropy_source"],
    },
}


def cases_of(folder, *kinds, file="cases.json"):
    return [case for case in read_json(folder / file)["cases"] if case["kind"] in kinds]


@cache
def loaded(folder):
    """(what is known of the model, its backbone)."""
    info = replace(inspect_model(folder, mask_id=MASK), suppressed=())
    return info, load_backbone(folder, dtype="float32", device="cpu")


def common(options):
    """The settings that plain block diffusion and S2D2 share, from any of the three families' names."""
    size = options.get("block_length") or options["block_size"]
    found = {"block_size": size, "tau": options.get("confidence_threshold", options.get("threshold"))}
    found["schedule"] = SCHEDULES[options.get("remasking_strategy", "low_confidence_dynamic")]
    if "small_block_size" in options:
        found["sub_block"] = options["small_block_size"]
    if "editing_threshold" in options:
        found |= {"tau_edit": options["editing_threshold"], "post_steps": options.get("max_post_steps", 16)}
    steps = options.get("denoising_steps", options.get("steps"))
    return found | {"steps": steps or -(-size // options.get("num_to_transfer", 1))}


def s2d2_settings(case):
    options = case["settings"]
    more: dict[str, Any] = {"router": ROUTERS[options["do_verify_policy"]](options)}
    if "token_acceptance_estimator" in options:
        more["estimator"] = ESTIMATORS[options["token_acceptance_estimator"]](options)
    if "score_penalty_coef" in options:
        kind = options.get("do_verify_score_type", "difference_dynamic").removeprefix("difference_")
        more["cost"] = {"kind": kind, "c": options["score_penalty_coef"]}
    if case["verifier_randomness"] == "stochastic":
        more |= {"paper_compat": True, "temper": options.get("ssd_ratio_tempering_factor", 1.0)}
    return decoder_settings(
        "s2d2",
        causal_cache=options.get("cache_ver", False),
        causal_draft=options.get("draft_ver", False),
        **common(options),
        **more,
    )


def canvas_of(case):
    """The prompt and as many holes as the public code fills; Fast-dLLM v2 adds the first token of one block more."""
    options, prompt = case["settings"], case["prompt"]
    if "max_new_tokens" in options:
        size = options["block_size"]
        length = (len(prompt) // size + options["max_new_tokens"] // size) * size + 1
    else:
        length = -(-(len(prompt) + options["gen_length"]) // options["block_length"]) * options["block_length"]
    return np.array(prompt + [-1] * (length - len(prompt)), dtype=np.int32)


def stops_of(options):
    early = options.get("eos_early_stop", "editing_threshold" not in options) and "eos_id" in options
    ids = [
        options.get("stop_token"),
        options["eos_id"] if early else None,
        *(options.get("stopping_criteria_idx") or ()),
    ]
    return Stops(tuple(token for token in ids if token is not None))


class Recorded(Sampler):
    """Notes the probabilities of every verified draft, (in the draft's distribution, in the verification's), in `seen`.

    With the `steps` of a recorded run it judges by the numbers of that run, in their order, and draws the tokens that it drew.
    """

    steps: list[dict[str, Any]] | None = None

    def note(self, draws, token_R):
        if (draws.judges_R & (draws.asked_R != NO_DRAFT)).any() and draws.judging is None:
            seen.append(([], []))
        super().note(draws, token_R)

    def _judge_chains(self, logits, hidden_RD, draws, told_FR, log_p_R, held):
        judging = draws.by_rejection
        rows_R, token = judging.judged_R > 0, None
        if rows_R.any():
            seen.append((self._log_q_C[judging.cell_R[rows_R]].exp().tolist(), log_p_R[rows_R].exp().tolist()))
            if self.steps is not None:
                step = self.steps[len(seen) - 1]
                token, judging.accept_R[rows_R] = step.get("resampled"), torch.tensor(step["u"], dtype=torch.float64)

        def recover(mass_BV, uniform_B):
            if token is None:
                return inverse_cdf_draw(mass_BV, uniform_B)
            assert mass_BV[0, token] > 0, "drawn from where the residual has no mass"
            return torch.tensor([token])

        with patch("draftmill.decoders.engine.sampler.inverse_cdf_draw", recover):
            return super()._judge_chains(logits, hidden_RD, draws, told_FR, log_p_R, held)


seen: list[tuple[list[float], list[float]]] = []


def replayed(folder, case, *, suppressed=(), settings=None):
    """(outcome, what the verifications saw) of a recorded run, decoded by ours."""
    info, backbone = loaded(folder)
    info = replace(info, suppressed=suppressed)
    options = case["settings"]
    if settings is None and case["kind"] == "s2d2":
        settings = s2d2_settings(case)
    elif settings is None:
        settings = decoder_settings("block_diffusion", **common(options))
    sampling = Sampling(temperature=0.0, top_p=options.get("top_p") if case["kind"] == "s2d2" else None)
    if options.get("top_k"):
        sampling = Sampling(temperature=options["temperature"], top_k=options["top_k"])
    sizes: dict[str, Any] = {"max_rows": 2, "max_tokens": 1 << 20, "trace": True, "stops": stops_of(options)}
    setup = Setup(backbone=backbone, info=info, sampling=sampling, **sizes)
    algorithm = algorithm_of(setup, settings)
    decoder: Any = Engine(setup, algorithm, make_sampler=Recorded)
    if case["kind"] == "s2d2" and case["verifier_randomness"] == "stochastic":
        decoder.sampler.steps = [step for step in case["steps"] if step.get("u")]
    seen.clear()
    (outcome,) = run_all(decoder, [Request(0, 1, canvas_of(case))]).values()
    return outcome, list(seen)


def text_of(outcome, case):
    excludes = case.get("output_excludes_prompt", False)
    return ([] if excludes else case["prompt"]) + outcome.tokens.tolist()


def kinds_of(case):
    """(prefills and stores, drafts, verifications) of the public code."""
    nfe = case.get("cached_nfe", case["nfe"])
    return nfe.get("prefill", 0) + nfe["store"], nfe["draft"], nfe["verify"]


def check(outcome, case, *, last_store=0):
    """Tokens, reveals and forwards are the case's, but for a store after the last block, after which nothing comes."""
    assert same(outcome, case), case["name"]
    ours, theirs = orders(outcome, case)
    assert ours == theirs
    stored, *others = kinds_of(case)
    assert our_kinds(outcome) == (stored - last_store, *others)


def our_kinds(outcome):
    kinds = outcome.nfe_kinds
    return kinds["prefill"] + kinds["commit"], kinds["draft"], kinds["verify"]


def same(outcome, case):
    found = text_of(outcome, case)
    return found[: len(case["output"])] == case["output"]


def orders(outcome, case):
    """(our order of reveals, the case's), step by step; within a step in no order."""
    theirs = [sorted(int(abs(place)) for place in step) for step in case["reveal_order"]]
    return [sorted(step.positions) for step in outcome.trace], theirs
