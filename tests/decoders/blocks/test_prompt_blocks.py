"""Models whose blocks begin at the prompt's end (D2F), and those of them that are causal, too (Nemotron), on exact tables."""

from dataclasses import replace

import pytest

from draftmill.decoders.settings import check_model
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, check, ours, refer, table_info
from tests.decoders.references.fused_blocks import decode_fused
from tests.decoders.support import decoder_settings, pairwise, prompts, texts

LENGTHS = [(0, 3), (1, 6), (2, 6), (3, 6), (4, 5), (5, 6), (1, 2), (2, 3), (0, 1)]
SAMPLINGS = {"greedy": GREEDY, "coupled": SAMPLED, "rejection": REJECTING}
# (shift, left_shift): as D2F on LLaDA, D2F on Dream, Nemotron-Labs-Diffusion.
MODELS: dict[str, tuple[int, int | None]] = {"masks": (0, None), "next": (1, None), "both": (0, 1)}
ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)


def info_of(name: str, max_length: int | None = None):
    shift, left_shift = MODELS[name]
    return replace(table_info(shift=shift, max_length=max_length), prompt_block=True, left_shift=left_shift)


CASES = list(
    pairwise(
        {
            "model": tuple(MODELS),
            "kind": ("block_diffusion", "s2d2"),
            "block_size": (1, 2, 4),
            "schedule": ("static", "dynamic", "sequential"),
            "causal_cache": (False, True),
            "span": (1, 2),
            "sampling": tuple(SAMPLINGS),
            "rows": (1, 3, 16),
            "max_length": (None, 7),
        }
    )
)


def settings_of(case: dict):
    common = {name: case[name] for name in ("block_size", "schedule", "causal_cache")} | {"tau": 0.4}
    if case["kind"] == "block_diffusion":
        return decoder_settings("block_diffusion", **common)
    common["causal_cache"] |= case["model"] == "both"
    return decoder_settings("s2d2", router={"kind": "min_span", "span": case["span"]}, **common)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_tokens_and_counts_are_those_of_the_plain_reference(case):
    info = info_of(case["model"], case["max_length"])
    settings = settings_of(case)
    sampling = SAMPLINGS[case["sampling"]]
    requests = prompts(LENGTHS)
    trails = refer(requests, info, settings, sampling, length=9)
    check(ours(requests, info, settings, sampling, rows=case["rows"], length=9), trails, requests)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_verifying_always_over_a_causal_cache_gives_the_text_of_block_size_one(model, sampling):
    info, requests = info_of(model), prompts(LENGTHS * 3)
    one = ours(requests, info, ONE, sampling, length=9)
    for fused in (False, True):
        settings = decoder_settings("s2d2", block_size=3, causal_cache=True, fused=fused)
        found = ours(requests, info, settings, sampling, rows=4, length=9)
        assert texts(found) == texts(one)
        assert sum(outcome.accepted for outcome in found.values()) > 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sampling", [SAMPLED, REJECTING])
def test_fused_rounds_are_those_of_the_plain_reference(model, sampling):
    info, requests = info_of(model), prompts(LENGTHS)
    settings = decoder_settings("s2d2", block_size=2, causal_cache=True, fused=True)
    trails = refer(requests, info, settings, sampling, plain=decode_fused)
    check(ours(requests, info, settings, sampling, rows=3), trails, requests)


def test_drafting_with_what_was_decided_changes_no_token():
    """The prompt sees all of itself, wherever it runs."""
    info, requests = info_of("masks"), prompts(LENGTHS)
    settings = decoder_settings("block_diffusion", block_size=2, tau=0.5)
    apart, along = (
        ours(requests, info, settings.model_copy(update={"fused": on}), SAMPLED, length=9) for on in (False, True)
    )
    assert texts(along) == texts(apart)
    assert sum(outcome.nfe for outcome in along.values()) < sum(outcome.nfe for outcome in apart.values())


def test_what_such_a_model_does_not_do_is_refused():
    with pytest.raises(ValueError, match=r"^task.kind: 'score', but the blocks of family 'token_table' begin at"):
        check_model(ONE, info_of("masks"), "score")
    with pytest.raises(ValueError, match=r"^decoder.causal_cache: false, but models of family .*; allowed: true$"):
        check_model(decoder_settings("s2d2", block_size=2), info_of("both"))
    fused = decoder_settings("block_diffusion", block_size=2, fused=True)
    check_model(fused, info_of("both"))
    with pytest.raises(ValueError, match=r"^decoder.fused: true does not work with family"):
        check_model(fused.model_copy(update={"causal_cache": True}), info_of("both"))
