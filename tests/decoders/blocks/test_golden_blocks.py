"""Block diffusion held to the public code's tokens, reveal orders and forwards: SDAR, Fast-dLLM v2, LLaDA2.0 and 2.1.

Differs on purpose in the last store pass, after which nothing comes: ours spends none. Where more differs, a test says how. Not
offered: Fast-dLLM v2's cache of sub-blocks, whose keys are stale.
"""

import collections

import pytest

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
