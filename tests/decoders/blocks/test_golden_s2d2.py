"""S2D2 held to the public code's tokens, spans, verdicts and forwards, on SDAR, Fast-dLLM v2 and LLaDA2.1.

`stochastic` cases are the public code at temperature 0 (`paper_compat`), with its uniforms and recovered tokens as recorded;
`onehot` ones are our temperature 0. The draft's and the verification's probabilities of every draft are compared in the former.

Not offered, and left out: options that no paper describes (allow_resample: false, ratio thresholds, legacy spans, extra reveals
of confident tokens), and Fast-dLLM v2's stale cache of sub-blocks. Differs on purpose, as in test_golden_blocks.py: no store
pass after the last block.
"""

import math

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from draftmill.decoders.blocks.settings import Estimator, ScoreRouter
from draftmill.decoders.blocks.verifier import expected_tokens, measure_of
from draftmill.decoders.draws.sampling import measure
from tests.decoders.blocks.golden_blocks import cases_of, check, kinds_of, our_kinds, replayed, same, text_of

UNPUBLISHED = {"allow_resample", "ssd_ratio_threshold", "always_check_high_confidence", "legacy_ssd_span_strategy"}


def check_verdicts(outcome, saw, case):
    steps = [step for step in case["steps"] if step.get("do_verify", step.get("verified"))]
    assert [step.proposed for step in outcome.trace if step.proposed] == [step["draft_tokens"] for step in steps]
    # With tempering the record counts by ratios that were not tempered.
    if "ssd_ratio_tempering_factor" not in case["settings"]:
        assert outcome.accepted == sum(case["accepted_counts"])
    for (ours_q, ours_p), step in zip(saw, steps, strict=True):
        if case["verifier_randomness"] == "stochastic":
            assert ours_q == pytest.approx(step["p_draft"], rel=1e-3, abs=1e-5)
            assert ours_p == pytest.approx(step["q_draft"], rel=1e-3, abs=1e-5)


def sdar_cases(folder):
    cases = [c for c in cases_of(folder, "s2d2") if not UNPUBLISHED.intersection(c["settings"])]
    halves = [c for c in cases if c["settings"]["draft_ver"] and not c["settings"]["cache_ver"]]
    return [case for case in cases if case not in halves], halves


@pytest.mark.slow
def test_s2d2_on_sdar_is_the_public_code(golden):
    folder = golden / "s2d2"
    cases, _ = sdar_cases(folder)
    assert len(cases) > 100 and len({case["settings"]["do_verify_policy"] for case in cases[::7]}) == 4, "every router"
    for case in cases[::7]:
        outcome, saw = replayed(folder, case)
        check(outcome, case, last_store=1)
        check_verdicts(outcome, saw, case)


def test_always_verifying_over_a_causal_cache_is_block_size_one_and_nothing_else_is(golden):
    """At temperature 0; what the public code's run says of itself."""
    folder = golden / "s2d2"
    cases = [c for c in sdar_cases(folder)[0] if c["equals_block_size_1_greedy"] is not None]
    lossless = [c for c in cases if c["settings"]["cache_ver"] and c["settings"].get("min_ssd_span_length") == 1]
    lossless = [c for c in lossless if c["settings"]["do_verify_policy"] == "mask_span_length"]
    assert len(lossless) > 3 and all(case["equals_block_size_1_greedy"] for case in lossless)
    assert not all(case["equals_block_size_1_greedy"] for case in cases)


def test_what_is_stored_is_never_half_causal(golden):
    """Differs on purpose: with a causal drafting mask and none for the cache, the public code leaves the drafting mask in place
    when it stores the block."""
    folder = golden / "s2d2"
    _, cases = sdar_cases(folder)
    case = next(case for case in cases if case["verifier_randomness"] == "onehot")
    outcome, _ = replayed(folder, case)
    found, size = text_of(outcome, case), case["settings"]["block_length"]
    first = (len(case["prompt"]) // size + 1) * size
    assert found[:first] == case["output"][:first], "nothing was stored yet"
    assert found != case["output"]
    assert (outcome.nfe_kinds["draft"], case["nfe"]["draft"]) == (17, 19)


def fast_cases(folder):
    """(what is alike, what drafts causally in sub-blocks)."""
    cases = [
        case
        for case in cases_of(folder, "s2d2")
        if not case["settings"]["use_block_cache"] and len(case["prompt"]) != case["settings"]["block_size"]
    ]
    parts = [
        c
        for c in cases
        if c["settings"]["draft_ver"] and c["settings"]["small_block_size"] < c["settings"]["block_size"]
    ]
    return [case for case in cases if case not in parts], parts


@pytest.mark.slow
def test_s2d2_on_fast_dllm_v2_is_the_public_code(golden):
    folder = golden / "fast_dllm_v2"
    cases, _ = fast_cases(folder)
    assert len(cases) > 50
    for case in cases[::4]:
        outcome, saw = replayed(folder, case)
        assert text_of(outcome, case) == case["output"], case["name"]
        check(outcome, case)
        check_verdicts(outcome, saw, case)


def test_the_causal_front_of_a_draft_ends_at_the_blocks_first_mask(golden, monkeypatch):
    """Differs on purpose: the public code counts it from the sub-block's beginning, and lays it at the block's."""
    folder = golden / "fast_dllm_v2"
    cases = [case for case in fast_cases(folder)[1] if case["settings"]["block_size"] == 16]
    cases = [case for case in cases if case["verifier_randomness"] == "onehot"][::2]
    assert len(cases) > 2
    own = sum(same(replayed(folder, case)[0], case) for case in cases)
    front_of = "draftmill.decoders.blocks.block_diffusion.front_of"
    monkeypatch.setattr(front_of, lambda rules, masks, size: (masks[0] if masks else size) % rules.sub_block)
    public = sum(same(replayed(folder, case)[0], case) for case in cases)
    assert own < public <= len(cases)


@pytest.mark.slow
def test_s2d2_on_llada21_is_the_public_code(golden):
    """With editing, whose replacements nobody verifies."""
    folder = golden / "llada2"
    cases = cases_of(folder, "s2d2")
    assert len(cases) == 56
    for case in cases[::8]:
        outcome, saw = replayed(folder, case)
        assert same(outcome, case), case["name"]
        assert our_kinds(outcome) == kinds_of(case)
        check_verdicts(outcome, saw, case)


# The public code's name of an estimator -> ours, its parameter, and our parameter.
NAMES = {
    "soft_entropy_negexp": ("entropy", "ssd_entropy_temperature", "beta"),
    "hard_margin_threshold": ("margin", "ssd_confidence_margin_threshold", "tau"),
    "hard_entropy_threshold": ("hard_entropy", "ssd_entropy_threshold", "tau"),
    "soft_confidence_power": ("confidence", "ssd_confidence_power", "power"),
    "soft_clipped_linear_margin": ("linear_margin", "ssd_confidence_margin_coef", "coefficient"),
    "soft_renyi_2_entropy": ("renyi", "", ""),
}


def test_the_estimators_are_the_public_ones(golden):
    arrays, names = load_file(golden / "s2d2" / "arrays.safetensors"), set()
    for case in cases_of(golden / "s2d2", "estimators"):
        drafts, law = torch.tensor(case["draft_tokens"]), arrays[case["arrays"][0]].float().log_softmax(-1)
        for row in case["rows"]:
            ours, theirs, parameter = NAMES[row["estimator"]]
            names.add(row["estimator"])
            settings = {parameter: row["params"][theirs]} if theirs in row["params"] else {}
            estimator = TypeAdapter(Estimator).validate_python({"kind": ours} | settings)
            note = measure_of(ScoreRouter(kind="score"), estimator)
            assert note is not None
            measured = measure(note, law, drafts).tolist()
            alpha = [estimator.alpha(one, math.log(law.shape[1])) for one in measured]
            assert alpha == pytest.approx(row["alpha"], abs=1e-5)
            assert expected_tokens(alpha) == pytest.approx(row["expected_accepted"], abs=1e-5)
    assert names == set(NAMES)
