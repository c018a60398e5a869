"""Of every decoder: a result's columns are the same bits in any batch, junk in slots changes nothing, and sums agree."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.rows import TokenRows, seen_columns
from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.model_runner import seconds_of
from draftmill.decoders.registry import build_decoder, build_scorer
from draftmill.decoders.settings import DECODERS
from tests.decoders import results
from tests.decoders.shipped import Case, facts, setup_of
from tests.decoders.support import random_lengths, random_way, run_all

# What happened when, and what describes the batch by definition (docs/formats.md).
TIMES = {"wait_s", "prefill_s", "decode_s", "total_s", "device_s", "started_at_s"}
BATCH = {"batch_rows", "pad_fraction"}
# What depends on time with lengths `auto` and in `fastest`, and on neighbours with drafts from their texts.
COUNTS = {"nfe", "nfe_draft", "iterations", "proposed", "accepted", "accept_hist", "nfe_kinds", "trace"}


def canvas_cases() -> list[Case]:
    """Every decoder of canvases with every cache, `ssd` also with every tree."""
    lives: list[dict[str, Any]] = [{"cache": "none"}, {"cache": "prefix"}, {"cache": "dual_strict"}]
    lives += [
        {"cache": "dual_strict", "refresh": 5},
        {"cache": "dual_relaxed"},
        {"cache": "dual_relaxed", "refresh": 5},
    ]
    found: list[Case] = []
    for life in lives:
        shared = {"block_length": 4, **life}
        if life["cache"] != "dual_relaxed":  # that of `ssd`
            found += [("mdm-tiny", {"kind": kind, **shared}) for kind in ("stepwise", "threshold", "factor")]
        found += [
            ("mdm-tiny", {"kind": "ssd", "tree": tree, "draft_length": 4, **shared}) for tree in ("chain", "mixed")
        ]
    found.append(("mdm-tiny", {"kind": "stepwise", "confidence": "random", "steps": 3}))
    found.append(("mdm-tiny", {"kind": "fastest", "like": "stepwise", "block_length": 4}))
    return found


def causal_cases() -> list[Case]:
    small = {"kind": "model", "path": "ar-micro"}
    diffuses = {"kind": "specdiff", "gamma": 4, "drafter": {"path": "mdm-tiny"}}
    settings: list[dict[str, Any]] = [
        {"kind": "autoregressive"},
        {"kind": "speculative", "k": 4},
        {"kind": "speculative", "k": 4, "drafter": {"kind": "suffix"}},
        {"kind": "speculative", "k": 4, "drafter": small},
        {"kind": "speculative", "k": "auto", "drafter": small},
        {"kind": "speculative", "k": 4, "drafter": {"kind": "masks"}},
        {"kind": "jacobi", "block_size": 8},
        {"kind": "jacobi", "block_size": 8, "window": "running"},
        {"kind": "multiblock_jacobi", "block_size": 4},
        {**diffuses, "head": "none"},
        {**diffuses, "head": "none", "order": "native"},
        {**diffuses, "gamma": "auto"},
        {"kind": "fastest", "like": "autoregressive", "drafter": small},
    ]
    return [("ar-tiny", one) for one in settings]


def other_cases() -> list[Case]:
    any_subset: list[dict[str, Any]] = [{"kind": "any_subset"}, {"kind": "parallel"}]
    for more in ({}, {"k": "auto"}, {"drafter": "ngram"}, {"head": "none"}):
        any_subset.append({"kind": "assd", **more})
    any_subset += [{"kind": "assd", "fused": "rows", "rows": "ends"}, {"kind": "assd", "fused": "rows"}]
    any_subset += [{"kind": "fastest", "like": "any_subset"}]
    blocks: list[dict[str, Any]] = [
        *({"kind": "block_diffusion", "schedule": one} for one in ("static", "dynamic", "sequential", "entropy")),
        *({"kind": "s2d2"}, {"kind": "s2d2", "block_size": 8, "causal_cache": True}),
        {"kind": "s2d2", "block_size": 8, "causal_cache": True, "fused": True},
        {"kind": "s2d2", "block_size": 8, "causal_cache": True, "drafter": {"path": "mdm-tiny"}},
        {"kind": "s2d2", "block_size": 8, "router": {"kind": "bandit", "progress_bins": 1, "entropy_bins": 1}},
        {"kind": "fastest", "like": "block_diffusion"},
    ]
    noisy: list[dict[str, Any]] = [{"kind": "ancestral", "steps": 6, "predictor": one} for one in ("analytic", "euler")]
    return [
        *(("asarm-tiny", one) for one in any_subset),
        *(("block-tiny", one) for one in blocks),
        *(("sedd", one) for one in noisy),
        ("mdlm", {"kind": "ancestral", "steps": 6}),
    ]


CASES = [*canvas_cases(), *causal_cases(), *other_cases()]
SCORED: list[Case] = [
    ("ar-tiny", {"kind": "autoregressive"}),
    ("asarm-tiny", {"kind": "any_subset"}),
    ("mdm-tiny", {"kind": "stepwise"}),
    ("sedd", {"kind": "ancestral"}),
    ("block-tiny", {"kind": "block_diffusion", "block_size": 8}),
]


def made(case: Case, rows: int, *, scores: bool = False) -> Any:
    """A decoder (or scorer) with an empty cache."""
    more = (
        {"info": replace(facts(case[0]), mask_id=6, suppressed=(6,))}
        if case[1].get("drafter") == {"kind": "masks"}
        else {}
    )
    setup, settings = setup_of(case, Sampling(temperature=0.9), rows, trace=True, **more)
    assert setup.backbone.exact
    for one in (setup.backbone, setup.drafter):
        if one is not None:
            one.forget()
    return build_scorer(setup, settings, Estimate(samples=8)) if scores else build_decoder(setup, settings)


def requests_of(case: Case, *, scores: bool = False) -> list[Request]:
    """Texts of many lengths, on both sides of the blocks of columns that are summed at once."""
    model, found = case[0], []
    info = facts(model)
    vocab_size, longest = info.vocab_size, info.max_length or 150
    rng = np.random.default_rng(0)
    for index, wanted in enumerate((17, 9, 28, 140, 12)):
        length = min(wanted, longest - index % 3)
        canvas = np.resize(rng.integers(10, vocab_size - 10, 7), length).astype(np.int32)
        if not scores:
            holes = 4 + index % 3
            ends = model in ("ar-tiny", "block-tiny")
            canvas[-holes:] = -1
            if not ends:
                canvas[rng.permutation(length)[:holes]] = -1
                canvas[0] = 11
        found.append(Request(index, sample_key(5, str(index)), canvas, score_from=length // 2))
    return found


def told(outcome: Outcome, case: Case) -> dict[str, Any]:
    """The columns that no batch may change."""
    settings = case[1]
    drafter = settings.get("drafter")
    by_company = drafter == {"kind": "suffix"} or "auto" in settings.values() or settings["kind"] == "fastest"
    left_out = {"index"} | TIMES | BATCH | (COUNTS if by_company else set())
    values = {one.name: getattr(outcome, one.name) for one in fields(outcome) if one.name not in left_out}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def compare(case: Case, requests: list[Request], *, scores: bool = False) -> None:
    """Alone; all together in another order and beside others; and a few short ones, two at a time."""

    def decoded(some: list[Request], rows: int) -> dict[int, dict[str, Any]]:
        outcomes = run_all(made(case, rows, scores=scores), some)
        assert all(outcome.error_kind is None for outcome in outcomes.values()), case
        return {index: told(outcome, case) for index, outcome in outcomes.items()}

    expected = decoded(requests, 1)
    others = [replace(one, index=100 + one.index, key=one.key + 1) for one in requests[:2]]
    short = [one for one in requests if len(one.canvas) < 30]
    for some, rows in (([*requests[::-1], *others], 8), (short, 2)):
        for index, columns in decoded(some, rows).items():
            if index < 100:
                assert columns == expected[index], (case, rows)


@pytest.mark.one_in(53, soak=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_batch_changes_a_bit_of_a_result(monkeypatch, case):
    monkeypatch.setattr(AutoLength, "__call__", random_lengths)
    monkeypatch.setattr(AutoLength, "way", property(random_way))
    torch.manual_seed(0)
    compare(case, requests_of(case))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", SCORED, ids=str)
def test_no_batch_changes_a_bit_of_a_score(case):
    compare(case, requests_of(case, scores=True), scores=True)


def test_every_decoder_is_held_to_it():
    assert {settings["kind"] for _, settings in CASES} == set(DECODERS)


# The counts of `fastest` depend on time; what it runs is in test_fastest.py.
EVERY = pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind != "fastest"])


def some_cases(kind, *, scores=False):
    """A few settings of a decoder, from the whole matrix of results, each with one of its samplings; and those of its scores."""
    cases = [case for case in results.cases() if case.settings["kind"] == kind]
    few = [case for case in cases if case.estimate is None]
    few = few[:: max(1, len(few) // 8)] + [case for case in cases if scores and case.estimate is not None]
    for number, case in enumerate(few):
        yield case, case.samplings[number % len(case.samplings)]


def said(outcomes):
    names = ["nfe", "nfe_draft", "iterations", "proposed", "accepted", "accept_hist", "trace", "logprob"]
    names += ["logprob_stderr", "is_greedy"]
    return {i: (one.tokens.tolist(), *(getattr(one, name) for name in names)) for i, one in outcomes.items()}


def seen_by(backbone, rows):
    """The cells that a row may see, [S, W]."""
    seen_SW = torch.zeros_like(backbone.tokens_SW, dtype=torch.bool)
    if isinstance(rows, TokenRows):
        row_N, column_N = seen_columns(rows.low_IN, rows.high_IN, rows.shape.num_columns).nonzero(as_tuple=True)
        seen_SW[rows.slot_N[row_N], column_N] = True
    else:
        for row, slot in enumerate(rows.slots_G.tolist()):
            seen_SW[slot, : int(rows.limit_Q[rows.owner_Q == row].max())] = True
    return seen_SW


def poison(backbone):
    """Fill every cell that no row may see with other junk before each forward; slots that don't take part stay as they are."""
    forward = backbone.forward

    def poisoned(rows):
        kept_SW = seen_by(backbone, rows)
        others = torch.ones(len(kept_SW), dtype=torch.bool)
        others[rows.slots_G] = False
        kept_SW[others] = True
        held_SW = backbone.tokens_SW
        backbone.tokens_SW = torch.where(kept_SW, held_SW, torch.randint_like(held_SW, backbone.vocab_size))
        return forward(rows)

    backbone.forward = poisoned


@pytest.mark.one_in(5)
@EVERY
def test_junk_in_dead_columns_and_freed_slots_changes_nothing(kind):
    for case, sampling in some_cases(kind):
        requests = results.requests_of(case)
        clean = run_all(results.engine_of(case, sampling, 4), requests)
        decoder = results.engine_of(case, sampling, 4)
        for model in decoder.models:
            poison(model.backbone)
        assert said(run_all(decoder, requests)) == said(clean), case.name


@pytest.mark.one_in(5)
@EVERY
def test_a_cleared_decoder_is_as_a_new_one(kind):
    for case, sampling in some_cases(kind, scores=True):
        decoder, requests = results.engine_of(case, sampling, 3), results.requests_of(case)
        decoder.admit(requests[:3])
        ended = {outcome.index for outcome in decoder.step()}
        assert sorted({*decoder.clear(), *ended}) == [0, 1, 2] and decoder.active == 0
        assert said(run_all(decoder, requests)) == said(run_all(results.engine_of(case, sampling, 3), requests)), (
            case.name
        )


@pytest.mark.one_in(5)
@EVERY
def test_no_sample_hears_of_its_neighbours_or_of_the_order_of_refills(kind):
    for case, sampling in some_cases(kind, scores=True):
        requests, found = results.requests_of(case), []
        for rows, order in ((1, 1), (3, -1), (16, 1)):
            found.append(said(run_all(results.engine_of(case, sampling, rows), requests[::order])))
        assert found[0] == found[1] == found[2], case.name


@pytest.mark.one_in(5)
@EVERY
def test_traces_counts_and_seconds_add_up(kind):
    for case, sampling in some_cases(kind):
        decoder, requests = results.engine_of(case, sampling, 4), results.requests_of(case)
        seconds = [list[float]() for _ in decoder.models]
        for model, spent in zip(decoder.models, seconds, strict=True):

            def cut(ask=model.clock.cut, spent=spent):
                spent += seconds_of(told := ask())
                return told

            model.clock.cut = cut
        outcomes, stats = run_all(decoder, requests), decoder.stats
        total_s = sum(one.device_s for one in outcomes.values())
        assert total_s == pytest.approx(stats.forward_s) == pytest.approx(sum(map(sum, seconds)))
        assert all(sum(spent) > 0 for spent in seconds)
        assert sum(one.nfe for one in outcomes.values()) == stats.active_slot_steps
        assert stats.committed == sum(len(one.tokens) for one in outcomes.values())
        assert 0 < stats.useful_rows <= stats.computed_rows
        for request in requests:
            one = outcomes[request.index]
            assert 1.0 <= one.batch_rows <= 4.0 and 0.0 <= one.pad_fraction < 1.0
            assert one.total_s == pytest.approx(one.wait_s + one.prefill_s + one.decode_s)
            assert one.wait_s >= 0 and one.prefill_s > 0 and one.decode_s >= 0
            placed = {p: t for step in one.trace for p, t in zip(step.positions, step.committed, strict=True)}
            assert [placed[place] for place in np.flatnonzero(request.canvas < 0).tolist()] == one.tokens.tolist()
            # A step of a block that reveals nothing leaves no trace.
            assert len(one.trace) == one.iterations or kind in ("block_diffusion", "s2d2")
            assert sum(len(step.proposed) for step in one.trace) == one.proposed
