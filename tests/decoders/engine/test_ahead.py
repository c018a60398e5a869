"""Forwards that start before the record of the last one is read: the same bits, counts and laws; what ends is dropped, uncounted.

The device here is a CPU, where nothing runs meanwhile; what is planned and what is read is as on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import HOLE, Request, RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.noise import sample_key
from draftmill.decoders.engine import drawn
from draftmill.decoders.engine.asks import FIRST_PROMISE, promise
from draftmill.decoders.engine.drawn import Drawn, plans_ahead
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.lanes import Lane
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.any_subset import test_laws as any_subset_laws
from tests.decoders.causal import test_causal_laws as causal_laws
from tests.decoders.causal import test_specdiff_laws as specdiff_laws
from tests.decoders.engine import test_graphs
from tests.decoders.engine.test_broken_numbers import ANY, BROKEN, CAUSAL, LENGTH, broken_model, request
from tests.decoders.engine.test_pieces import CASES, given, made, prompts
from tests.decoders.engine.test_prefixes import model, said
from tests.decoders.enumeration import law_of, total_variation
from tests.decoders.masked.diffusion_tables import specdiff
from tests.decoders.replaying import use_graphs, use_references
from tests.decoders.support import decode, run_all, texts

AHEAD = ["autoregressive", "any_subset", "speculative, model", "specdiff"]
"""Decoders of which forwards start before others were read: the target's in the first two, the drafting model's in the others."""
OWN = [RowSettings(), RowSettings(temperature=0.0), RowSettings(temperature=1.3, top_p=0.7, token_logprobs=True)]


def plan_ahead(monkeypatch: Any) -> None:
    """As on a GPU."""
    monkeypatch.setattr("draftmill.decoders.engine.engine.plans_ahead", lambda device: True)


def with_own(name: str) -> list[Request]:
    return [replace(one, settings=OWN[one.index % len(OWN)]) for one in given(name)]


# ---- the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("budget", [None, 7, 64])
@pytest.mark.parametrize("name", AHEAD)
def test_texts_log_probabilities_traces_and_counts_are_the_same_bits(
    name: str, budget: int | None, acceptance: str, monkeypatch: Any
) -> None:
    plain = made(name, 4, budget, acceptance=acceptance)
    expected = said(run_all(plain, with_own(name)))
    plan_ahead(monkeypatch)
    decoder = made(name, 4, budget, acceptance=acceptance)
    found = run_all(decoder, with_own(name))
    assert said(found) == expected
    assert sum(len(one.trace or []) for one in found.values()) > 0
    for field in ("committed", "verified", "active_slot_steps"):
        assert getattr(decoder.stats, field) == getattr(plain.stats, field), field
    assert sum(one.device_s for one in found.values()) <= decoder.stats.forward_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["autoregressive", "speculative, model"])
def test_samples_that_end_where_nobody_knew_are_dropped_from_what_runs_already(name: str, monkeypatch: Any) -> None:
    folder, settings, drafter = CASES[name]
    backbone, info = model(folder)
    setup = Setup(
        backbone=backbone,
        info=info,
        sampling=Sampling(temperature=1.2),
        max_rows=3,
        max_tokens=1 << 16,
        stops=Stops(tuple(range(10, 200))),
        drafter=model(drafter)[0] if drafter else None,
        trace=True,
    )
    some = prompts(9, 12, 7, 15, 8, 11, new=40)
    plain = build_decoder(setup, settings)
    expected = said(run_all(plain, some))
    assert {len(tokens) for tokens, *_ in expected.values()} != {40}, "none ends before its last hole"
    plan_ahead(monkeypatch)
    ahead = build_decoder(setup, settings)
    assert said(run_all(ahead, some)) == expected
    assert (ahead.stats.verified, ahead.stats.active_slot_steps) == (
        plain.stats.verified,
        plain.stats.active_slot_steps,
    )


@pytest.mark.parametrize("name", AHEAD[:3])
def test_captured_forwards_take_tokens_from_the_device_too(name: str, monkeypatch: Any) -> None:
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = test_graphs.decoded(name, test_graphs.many(name))
    use_graphs(monkeypatch)
    plan_ahead(monkeypatch)
    found, engine = test_graphs.decoded(name, test_graphs.many(name))
    # How many slots were busy is not compared: a new sample comes a forward later.
    test_graphs.same(
        *({index: replace(one, batch_rows=0.0) for index, one in some.items()} for some in (found, expected))
    )
    assert all(lane.graphs.num_replayed for lane in engine.lanes)


def test_lengths_by_time_learn_from_windows_that_are_fetched_as_a_whole(monkeypatch: Any) -> None:
    name = "speculative, model"
    expected = {index: texts for index, (texts, *_) in said(run_all(made(name, 4, 64), given(name))).items()}
    folder, settings, drafter = CASES[name]
    monkeypatch.setitem(CASES, name, (folder, settings.model_copy(update={"k": "auto"}), drafter))
    plan_ahead(monkeypatch)
    decoder, seen = made(name, 4, 64), list[tuple[int, int, float]]()
    drafted = decoder.lengths.drafted

    def noted(*told: Any) -> None:
        seen.append(told)
        drafted(*told)

    decoder.lengths.drafted = noted
    assert {index: texts for index, (texts, *_) in said(run_all(decoder, given(name))).items()} == expected
    assert seen and all(rows > 0 and kv > 0 and seconds > 0 for rows, kv, seconds in seen)


# ---- laws ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("drafter", [None, "model"])
def test_laws_are_those_of_the_causal_model(drafter: str | None, acceptance: str, monkeypatch: Any) -> None:
    """Of a sample that comes into another one's slot, beside others, and ends at a stop."""
    plan_ahead(monkeypatch)
    some = [causal_laws.request(prompt, index) for index, prompt in enumerate([[2, 2, 1, 0], [0, 1, 0], [1, 1, 0]])]
    settings = causal_laws.spec(2, drafter) if drafter else causal_laws.AR
    setup = causal_laws.setup(rows=2, stops=Stops((2,)), acceptance=acceptance)
    law = law_of(setup, settings, some, 2)
    assert total_variation(law, causal_laws.chain_rule([1, 1, 0], end=2)) < 1e-12


@pytest.mark.parametrize(("gamma", "steps"), [(2, 2), (3, 2)])
def test_windows_that_a_diffusion_model_drafts_have_the_target_s_law(gamma: int, steps: int, monkeypatch: Any) -> None:
    expected = specdiff_laws.on_the_engine(specdiff_laws.AR)
    plan_ahead(monkeypatch)
    found = specdiff_laws.on_the_engine(specdiff(gamma, steps, window="short"))
    assert total_variation(found, expected) < 1e-12


def test_an_any_subset_model_has_its_law(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    canvases = [[HOLE, 2, HOLE], any_subset_laws.CANVASES["middle prompt"], [0, HOLE, 1, HOLE]]
    some = [any_subset_laws.request(canvas, index) for index, canvas in enumerate(canvases)]
    setup = any_subset_laws.setup(rows=2, acceptance="coupled")
    law = law_of(setup, any_subset_laws.SEQUENTIAL, some, 1)
    assert total_variation(law, any_subset_laws.chain_rule(canvases[1])) < 1e-12


def test_a_token_of_another_rank_gives_another_law(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    monkeypatch.setattr(Drawn, "cells", lambda self, slot_R, rank_R: slot_R * 0)
    some = [causal_laws.request(prompt, index) for index, prompt in enumerate([[0, 1], [1, 1]])]
    law = law_of(causal_laws.setup(rows=2), causal_laws.AR, some, 0)
    assert total_variation(law, causal_laws.chain_rule([0, 1])) > 0.01


# ---- the order of things -------------------------------------------------------------------------------------------------


def watched(monkeypatch: Any) -> list[str]:
    """Notes when forwards start and when they are read."""
    seen, start, finish = list[str](), Lane.start_run, Lane.finish

    def started(self: Lane, *given: Any) -> Any:
        seen.append("start" if self.is_target else "draft")
        return start(self, *given)

    def finished(self: Lane, *given: Any) -> Any:
        seen.append("read" if self.is_target else "fetch")
        return finish(self, *given)

    monkeypatch.setattr(Lane, "start_run", started)
    monkeypatch.setattr(Lane, "finish", finished)
    return seen


def test_the_next_forward_starts_before_the_last_one_is_read(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    decoder, seen = made("autoregressive", 4, 16), watched(monkeypatch)
    run_all(decoder, prompts(9, new=5))
    assert seen == ["start", "start", "read", "start", "read", "start", "read", "start", "read", "read"]


def test_a_new_sample_comes_in_after_the_forward_that_runs_already(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    decoder, seen = made("autoregressive", 4, 16), watched(monkeypatch)
    old, new = prompts(9, new=9), [replace(prompts(12, new=4)[0], index=1)]
    decoder.admit(old)
    decoder.step()
    decoder.admit(new)
    decoder.step()
    assert seen == ["start", "start", "read", "read"], (
        "nothing starts behind it: the next forward has the new prompt, too"
    )
    decoder.step()
    assert seen[4:] == ["start", "start", "read"]


def test_a_window_is_drafted_with_one_wait(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    decoder, seen = made("speculative, model", 4, 64), watched(monkeypatch)
    decoder.admit(prompts(9, 12, new=12))
    decoder.step()
    assert seen == ["draft"] * 3 + ["fetch"] * 3 + ["start", "read"]


def test_a_forward_that_nobody_asks_for_is_stopped(monkeypatch: Any) -> None:
    plan_ahead(monkeypatch)
    decoder = made("autoregressive", 2, 16)
    right = decoder.algorithm.following

    def wrong(sample: Sample) -> Any:
        ask = right(sample)
        return ask._replace(tokens=[7]) if ask else None

    decoder.algorithm = replace(decoder.algorithm, following=wrong)
    decoder.admit(prompts(9, new=9))
    decoder.step()
    with pytest.raises(AssertionError, match="`following` is wrong"):
        decoder.step()


def test_a_batch_that_is_dropped_takes_what_runs_with_it(monkeypatch: Any) -> None:
    expected = said(run_all(made("autoregressive", 4, 16), prompts(9, 12)))
    plan_ahead(monkeypatch)
    decoder = made("autoregressive", 4, 16)
    decoder.admit(prompts(20, 15))
    decoder.step()
    assert sorted(decoder.clear()) == [0, 1]
    assert said(run_all(decoder, prompts(9, 12))) == expected


def test_longer_canvases_make_room_while_a_forward_runs(monkeypatch: Any) -> None:
    """The cache is reallocated; what was on its way is read before."""
    some = [*prompts(5, 6, new=8), *(replace(one, index=one.index + 2) for one in prompts(90, 80, new=8, seed=3))]
    expected = said(run_all(made("autoregressive", 4, 16), some))
    plan_ahead(monkeypatch)
    decoder = made("autoregressive", 4, 16)
    decoder.admit(some[:2])
    decoder.step()
    decoder.admit(some[2:])
    found: dict[int, Any] = {}
    while decoder.active:
        found |= {one.index: one for one in decoder.step()}
    assert said(found) == expected


# ---- broken numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), [("ar-tiny", CAUSAL), ("asarm-tiny", ANY)])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_nan_that_is_read_late_ends_with_its_sample(name: str, settings: Any, rows: int, monkeypatch: Any) -> None:
    """Samples beside it stay as they are."""
    plan_ahead(monkeypatch)
    bad = [request(0, BROKEN - 3, LENGTH - 8, 12), request(1, BROKEN - 2, LENGTH, 12)]
    good = [request(2 + index, 200 + 20 * index, LENGTH - 4, 6) for index in range(3)]
    backbone, info = broken_model(name)
    found = decode(backbone, info, settings, Sampling(temperature=0.0), [*bad, *good], rows=rows)
    assert [found[one.index].error_kind for one in bad] == ["nan_logits"] * 2
    assert [found[one.index].error_kind for one in good] == [None] * 3
    fresh, _ = broken_model(name)
    alone = decode(fresh, info, settings, Sampling(temperature=0.0), good, rows=rows)
    assert texts(alone) == {one.index: texts(found)[one.index] for one in good}


# ---- the table of drawn tokens -------------------------------------------------------------------------------------------


def test_rows_take_the_tokens_that_were_drawn_at_their_ranks() -> None:
    table = Drawn(3, 4, torch.device("cpu"))
    slot_R, rank_R = np.array([0, 0, 2]), np.array([5, 6, 9])
    table._token_C[torch.from_numpy(table.cells(slot_R, rank_R))] = torch.tensor([70, 71, 72])
    for tokens, expected in (
        ([promise(6), promise(9)], [71, 72]),
        ([promise(6), 33], [71, 33]),
        ([32, 33], [32, 33]),
    ):
        sent, read = table.located(np.array(tokens), np.array([0, 2]))
        assert read(torch.from_numpy(sent)).tolist() == expected


def test_a_promise_is_no_hole_and_no_token() -> None:
    assert [promise(rank) for rank in range(3)] == [FIRST_PROMISE, FIRST_PROMISE - 1, FIRST_PROMISE - 2]
    assert promise(0) not in (HOLE, 0) and sample_key(0, "") >= 0


@pytest.mark.parametrize(
    ("device", "value", "expected"), [("cuda", None, True), ("cuda", "0", False), ("cpu", "1", False)]
)
def test_a_switch_has_every_record_read_before_the_next_plan(
    device: str, value: str | None, expected: bool, monkeypatch: Any
) -> None:
    monkeypatch.delenv(drawn.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(drawn.VARIABLE, value)
    assert plans_ahead(torch.device(device)) == expected
