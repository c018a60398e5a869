"""`block_diffusion` and `s2d2` on exact tables: the plain reference's tokens and counts, whatever they are batched with."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from draftmill.decoders.blocks.block_diffusion import Drafted, choose, share
from draftmill.decoders.blocks.settings import BlockDiffusionSettings, S2d2Settings, ScoreRouter
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.settings import check_model
from tests.decoders.blocks.block_tables import GREEDY, REJECTING, SAMPLED, check, ours, refer, table, table_info
from tests.decoders.support import Pair, decoder_settings, engine, pairwise, prompts

# (prompt, canvas) lengths: no prompt, one token, below, at and above a block of 2, 3 or 4; canvases that cut blocks short.
LENGTHS = [
    (0, 3),
    (1, 6),
    (2, 6),
    (3, 6),
    (4, 5),
    (0, 6),
    (1, 2),
    (5, 6),
    (3, 5),
    (2, 3),
    (4, 6),
    (0, 1),
    (1, 5),
    (2, 5),
]
SAMPLINGS = {"greedy": GREEDY, "coupled": SAMPLED, "rejection": REJECTING, "cut": Sampling(top_k=2, top_p=0.7)}


def settings_of(kind, case):
    more = {"causal_draft": case["causal_draft"], "router": {"kind": "min_span", "span": case["span"]}}
    common = {name: case[name] for name in ("block_size", "schedule", "steps", "tau", "causal_cache")}
    if kind == "s2d2" and case["span"] == 1:
        common["steps"] = None
    if case["sub_block"] and case["block_size"] % case["sub_block"] == 0:
        common["sub_block"] = case["sub_block"]
    if SAMPLINGS[case["sampling"]].acceptance == "coupled":
        common["draws"] = case["draws"]
    return decoder_settings("s2d2", **common, **more) if kind == "s2d2" else BlockDiffusionSettings(kind=kind, **common)


CASES = list(
    pairwise(
        {
            "kind": ("block_diffusion", "s2d2"),
            "shift": (0, 1),
            "block_size": (1, 2, 3, 4),
            "schedule": ("static", "dynamic", "sequential", "entropy"),
            "steps": (None, 2),
            "tau": (0.4, 0.9),
            "sub_block": (None, 2),
            "causal_cache": (False, True),
            "causal_draft": (False, True),
            "span": (1, 2),
            "draws": ("fresh", "kept"),
            "sampling": tuple(SAMPLINGS),
            "rows": (1, 3, 16),
            "max_length": (None, 7),
        }
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
@pytest.mark.slow
def test_tokens_and_counts_are_those_of_the_plain_reference(case):
    info = table_info(shift=case["shift"], max_length=case["max_length"])
    settings, sampling = settings_of(case["kind"], case), SAMPLINGS[case["sampling"]]
    requests = prompts(LENGTHS)
    trails = refer(requests, info, settings, sampling, length=8)
    check(ours(requests, info, settings, sampling, rows=case["rows"], length=8), trails, requests)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", ["block_diffusion", "s2d2"])
@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_the_first_end_token_ends_a_completion_wherever_it_stands(kind, sampling, shift):
    """What is left of it does not change; nothing behind it is waited for. With `shift` a block's first token may be one."""
    info, ends, sooner = table_info(shift=shift), set(), 0
    settings = {"block_diffusion": BlockDiffusionSettings, "s2d2": S2d2Settings}[kind](kind=kind, block_size=3)
    requests = prompts([(p, 6) for p in (0, 1, 2, 3, 4)] * 8)
    whole = ours(requests, info, settings, SAMPLINGS[sampling])
    stopped = ours(requests, info, settings, SAMPLINGS[sampling], stops=Stops((1,)))
    for index, outcome in stopped.items():
        text = whole[index].tokens.tolist()
        ends.add(end := text.index(1) + 1 if 1 in text else None)
        assert outcome.tokens.tolist() == text[:end]
        assert outcome.finish == ("length" if end is None else "eos")
        assert outcome.nfe <= whole[index].nfe
        sooner += outcome.nfe < whole[index].nfe
    assert {1, 2, 3, None} <= ends and sooner > 5


def test_a_stop_string_that_crosses_blocks_ends_a_completion():
    info, settings = table_info(), decoder_settings("block_diffusion", block_size=2)
    requests = prompts([(1, 6)] * 24)
    whole, stopped = (ours(requests, info, settings, SAMPLED, stops=stops) for stops in (None, Stops((), Pair(2, 2))))
    for index, outcome in stopped.items():
        text = whole[index].tokens.tolist()
        keep = Pair(2, 2).find(text, 0)
        assert (outcome.tokens.tolist(), outcome.finish) == (text[:keep], "length" if keep is None else "stop")
    assert {outcome.finish for outcome in stopped.values()} == {"length", "stop"}


FUSED: dict = {
    "one": decoder_settings("block_diffusion", block_size=1, causal_cache=True),
    "blocks": decoder_settings("block_diffusion", block_size=2, tau=0.5),
    "parts": decoder_settings("block_diffusion", block_size=4, sub_block=2),
    "routed": decoder_settings("s2d2", block_size=2, router=ScoreRouter(kind="score", tau=0.4)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("sampling", ["greedy", "rejection"])
def test_fused_spends_no_forward_on_what_is_decided(name, sampling):
    """The same tokens; prompts and finished blocks go with drafts. At block size 1 this is one forward a token."""
    info, requests, settings = table_info(), prompts(LENGTHS), FUSED[name]
    apart = ours(requests, info, settings, SAMPLINGS[sampling], length=8)
    for rows in (1, 5):
        along = settings.model_copy(update={"fused": True})
        fused = ours(requests, info, along, SAMPLINGS[sampling], rows=rows, length=8)
        for index, outcome in fused.items():
            kinds = dict(apart[index].nfe_kinds)
            kinds["draft"] -= kinds["prefill"]
            assert outcome.tokens.tolist() == apart[index].tokens.tolist()
            assert outcome.nfe_kinds == kinds | {"commit": 0}
            assert name != "one" or outcome.nfe == len(outcome.tokens)


def test_a_log_probability_is_told_where_tokens_come_one_by_one():
    info, requests = table_info(), prompts([(1, 6), (3, 6)])
    known = {
        "one": decoder_settings("block_diffusion", block_size=1),
        "static": decoder_settings("block_diffusion", block_size=3, schedule="static"),
        "verified": decoder_settings("s2d2", block_size=3, causal_cache=True),
        "many": decoder_settings("block_diffusion", block_size=3),
    }
    logprobs = {name: [ours(requests, info, s, SAMPLED)[i].logprob for i in (0, 1)] for name, s in known.items()}
    assert logprobs.pop("many") == [None, None]
    assert all(value is not None and value < 0 for values in logprobs.values() for value in values)
    causal = decoder_settings("block_diffusion", block_size=1, causal_cache=True)
    assert logprobs["verified"] == pytest.approx([ours(requests, info, causal, SAMPLED)[i].logprob for i in (0, 1)])


def test_every_step_has_its_share():
    assert [share(step, 8, None) for step in range(4)] == [share(step, 8, 9) for step in range(4)] == [1, 1, 1, 1]
    assert [share(step, 8, 3) for step in range(4)] == [3, 3, 2, 2]


def test_schedules_choose_what_they_say():
    sure, entropy = (0.2, 0.95, 0.5, 0.91), (1.0, 0.25, 0.75, 0.5)
    draft = {place: Drafted(0, 0.0, *each) for place, each in enumerate(zip(sure, entropy, strict=True))}

    def chosen(schedule, count, tau=0.9):
        return choose(schedule, [0, 1, 2, 3], count, draft, tau)

    assert chosen("static", 1) == [1] and chosen("static", 3) == [1, 3, 2]
    assert chosen("dynamic", 1) == [1, 3] and chosen("dynamic", 3) == [1, 3, 2] and chosen("dynamic", 0) == []
    assert chosen("dynamic", 1, tau=0.95) == [1], "surer than tau, strictly; at least the share"
    assert chosen("sequential", 2) == [0, 1] and chosen("static", 9) == [1, 3, 2, 0]
    # 0.25 | 0.5 | 0.75 | 1.0: the last one's entropy is not counted.
    assert [len(chosen("entropy", 1, tau)) for tau in (0.0, 0.2, 0.25, 0.7, 0.75, 1.4, 1.5)] == [1, 1, 2, 2, 3, 3, 4]
    assert chosen("entropy", 1, 0.25) == [1, 3] and chosen("entropy", 0, 9.0) == []


@pytest.mark.parametrize("schedule", ["static", "dynamic", "sequential", "entropy"])
def test_a_draft_without_numbers_reveals_something_all_the_same(schedule):
    draft = {place: Drafted(0, math.nan, math.nan, math.nan) for place in range(3)}
    assert choose(schedule, [0, 1, 2], 1, draft, 0.5) == [0]


@pytest.mark.parametrize(
    ("settings", "sampling", "message"),
    [
        (decoder_settings("block_diffusion"), GREEDY, "decoder.block_size"),
        (decoder_settings("s2d2", block_size=2, temper=0.5), SAMPLED, "decoder.temper"),
        (
            decoder_settings("s2d2", block_size=2, temper=0.5),
            Sampling(temperature=0.0, acceptance="rejection"),
            "decoder.temper",
        ),
        (
            decoder_settings("block_diffusion", block_size=2, draws="kept"),
            REJECTING,
            "decoder.draws: 'kept', but sampling.acceptance 'rejection'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, sampling, message):
    with pytest.raises(ValueError, match=message):
        engine(table(), table_info(), settings, sampling, rows=1, max_tokens=64)


def test_what_predicts_the_next_token_can_not_draft_a_block_before_the_last_is_committed():
    """Known before a model is loaded."""
    for settings in (
        decoder_settings("block_diffusion", block_size=2, fused=True),
        decoder_settings("s2d2", block_size=2, fused=True),
    ):
        check_model(settings, table_info())
        with pytest.raises(ValueError, match=r"decoder\.fused: true does not work with family"):
            check_model(settings, table_info(shift=1))
    check_model(decoder_settings("s2d2", block_size=2, causal_cache=True, fused=True), table_info(shift=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 4, "sub_block": 3}, "decoder.sub_block: 3"),
        ({"router": {"kind": "hysteresis", "on": 0, "off": 0}}, "decoder.router.off"),
        ({"block_size": 8, "causal_cache": True, "steps": 2}, "decoder.steps: 2 for 8 positions makes a step reveal 4"),
        ({"block_size": 8, "sub_block": 4, "steps": 3}, "decoder.steps: 3 for 4 positions makes a step reveal 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        decoder_settings("s2d2", **settings)


def test_fewer_steps_than_positions_never_reveal_drafts_beside_verifications_of_every_token():
    """Also where the model knows the block's size; routers that leave drafts unverified may."""
    always = decoder_settings("s2d2", steps=2)
    with pytest.raises(ValueError, match=r"decoder\.steps: 2 for 8 .* allowed: null or at least 8"):
        check_model(always, replace(table_info(), block_size=8))
    check_model(always, replace(table_info(), block_size=2))
    for more in ({"router": {"kind": "min_span", "span": 2}}, {"steps": 8}):
        check_model(decoder_settings("s2d2", block_size=8, **{"steps": 2} | more), table_info())


def test_holes_in_the_middle_are_refused():
    decoder = engine(
        table(),
        table_info(),
        decoder_settings("block_diffusion", block_size=2),
        GREEDY,
        rows=1,
        max_tokens=64,
    )
    (request,) = prompts([(1, 4)])
    request.canvas[:] = np.array([0, -1, 1, -1])
    with pytest.raises(ValueError, match="holes must come after the prompt"):
        decoder.admit([request])


def test_tempering_and_a_residual_without_mass():
    """Drafts judged by (p/q)^temper: the accepted share of what a coin decides is the ratio itself."""
    info, settings = table_info(), decoder_settings("s2d2", block_size=1, causal_cache=True, temper=2.0)
    requests = prompts(list(itertools.repeat((1, 5), 120)))
    plain = decoder_settings("s2d2", block_size=1, causal_cache=True)
    shares = [
        sum(o.accepted for o in found.values()) / sum(o.proposed for o in found.values())
        for found in (ours(requests, info, s, REJECTING, rows=16) for s in (plain, settings))
    ]
    # At block size 1 the draft's law is the verification's: every ratio is 1 whatever its power, and nothing is left over.
    assert shares == [1.0, 1.0]
    wide = [s.model_copy(update={"block_size": 3}) for s in (plain, settings)]
    shares = [
        sum(o.accepted for o in found.values()) / sum(o.proposed for o in found.values())
        for found in (ours(requests, info, s, REJECTING, rows=16) for s in wide)
    ]
    assert 0.2 < shares[1] < shares[0] - 0.02
