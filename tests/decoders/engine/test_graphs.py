"""Captured forwards give what forwards give that run operation by operation: texts, counters, log-probabilities."""

from __future__ import annotations

import itertools
import logging
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Outcome, Request, RowSettings
from draftmill.decoders.engine import graphs
from draftmill.decoders.engine.graphs import Graphs, Work
from draftmill.decoders.engine.parcels import Parcel
from tests.decoders.replaying import Replaying, use_graphs, use_references
from tests.device.steps import CASES, made, toy_canvases

CAPTURED = [
    "autoregressive",
    "speculative",
    "speculative, model",
    "multiblock_jacobi",
    "any_subset",
    "assd",
    "assd, fused",
]
"""Decoders whose target forwards are captured, and the windows that heads draft from these."""
CPU = torch.device("cpu")


def decoded(name: str, requests: list[Request], **sampling: Any) -> tuple[dict[int, Outcome], Any]:
    """Outcomes by index, and the engine."""
    engine, waiting = made(name, sampling, "cpu", dtype="float64"), list(requests)
    found: dict[int, Outcome] = {}
    while waiting or engine.active:
        while waiting and engine.room(len(waiting[0].canvas)):
            engine.admit([waiting.pop(0)])
        found |= {one.index: one for one in engine.step()}
    return found, engine


def same(found: dict[int, Outcome], expected: dict[int, Outcome]) -> None:
    """Tokens and counters are equal, log-probabilities but for rounding; times and rows may differ."""
    others = {field.name for field in fields(Outcome) if field.name.endswith("_s")}
    others |= {"pad_fraction", "tokens", "logprob", "logprob_stderr"}
    assert found.keys() == expected.keys()
    for index, one in found.items():
        other = expected[index]
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        for field in fields(Outcome):
            if field.name not in others:
                assert getattr(one, field.name) == getattr(other, field.name), field.name


def many(name: str, count: int = 9) -> list[Request]:
    """Enough samples that slots are refilled, some with settings of their own."""
    requests = toy_canvases(count, name)
    return [
        replace(one, settings=RowSettings(temperature=0.5 * index)) if index in (2, 5) else one
        for index, one in enumerate(requests)
    ]


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_forwards_give_what_others_give(name: str, monkeypatch: Any) -> None:
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, engine = decoded(name, many(name))
        assert all(lane.graphs is None for lane in engine.lanes)
    recorder = use_graphs(monkeypatch)
    found, engine = decoded(name, many(name))
    same(found, expected)
    replayed = [lane.graphs.num_replayed for lane in engine.lanes]
    assert min(replayed) > 0, "shapes come again"
    assert 0 < recorder.num_captured <= 40


RATIO = ["speculative", "speculative, model", "assd, n-gram", "assd", "assd, fused"]
CUTS: list[dict[str, Any]] = [{"top_p": 0.8}, {"temperature": 0.0}]


# Drafts that are in a ring, or made by a head from rows of the same graph, under every setting.
@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in RATIO), *itertools.product(("speculative, model", "assd"), CUTS)],
    ids=str,
)
def test_captured_forwards_judge_by_ratio_as_others_do(name: str, more: dict[str, Any], monkeypatch: Any) -> None:
    more, some = more | {"acceptance": "rejection"}, many(name, 24 if name.startswith("assd") else 9)
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded(name, some, **more)
    use_graphs(monkeypatch)
    found, engine = decoded(name, some, **more)
    same(found, expected)
    assert all(lane.graphs.num_replayed for lane in engine.lanes)


@pytest.mark.parametrize("more", [{"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}])
def test_captured_draws_follow_the_sampling_settings(more: dict[str, Any], monkeypatch: Any) -> None:
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded("autoregressive", many("autoregressive"), **more)
    use_graphs(monkeypatch)
    found, engine = decoded("autoregressive", many("autoregressive"), **more)
    same(found, expected)
    assert engine.lanes[0].graphs.num_replayed


def test_rows_positions_and_masks_that_mean_nothing_change_nothing(monkeypatch: Any) -> None:
    """Blocks of five positions: no forward over them has the size of a captured one."""
    name = "stepwise, cached"
    model, settings = CASES[name]
    monkeypatch.setitem(CASES, name, (model, settings | {"block_length": 5}))
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded(name, many(name, 14))
    use_graphs(monkeypatch)
    found, engine = decoded(name, many(name, 14))
    same(found, expected)
    assert engine.lanes[0].graphs.num_replayed


@pytest.mark.parametrize("name", ["assd, n-gram", "specdiff", "stepwise"])
def test_other_forwards_run_as_they_did(name: str, monkeypatch: Any) -> None:
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded(name, toy_canvases(3, name))
    use_graphs(monkeypatch)
    found, _ = decoded(name, toy_canvases(3, name))
    same(found, expected)


def test_forwards_that_are_too_large_run_as_they_did(monkeypatch: Any) -> None:
    """Prompts are, and forwards with many drafts; their answered rows are few enough to be filled up all the same."""
    name = "speculative"
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded(name, many(name))
    recorder = use_graphs(monkeypatch)
    monkeypatch.setattr(graphs, "MOST_ROWS", 8)
    found, engine = decoded(name, many(name))
    same(found, expected)
    assert recorder.num_captured <= 16 and engine.lanes[0].graphs.num_replayed < engine.stats.steps


def test_a_cache_that_grows_takes_its_graphs_along(monkeypatch: Any) -> None:
    """Longer canvases arrive while others run: the cache is reallocated, and the captured graphs read the old memory."""
    short = toy_canvases(3, "autoregressive")
    rng = np.random.default_rng(1)
    long = []
    for index in range(3, 6):
        canvas = rng.integers(10, 50, 90).astype(np.int32)
        canvas[70:] = -1
        long.append(Request(index, 7 * index, canvas))
    with monkeypatch.context() as plain:
        use_references(plain)
        expected, _ = decoded("autoregressive", short + long)
    use_graphs(monkeypatch)
    found, engine = decoded("autoregressive", short + long)
    same(found, expected)
    assert engine.lanes[0].graphs.num_replayed


def test_a_sample_with_nan_is_found_in_a_captured_forward_too(monkeypatch: Any) -> None:
    use_graphs(monkeypatch)
    engine = made("autoregressive", {}, "cpu", dtype="float64")
    engine.admit(toy_canvases(2, "autoregressive"))
    for _ in range(4):
        engine.step()
    assert engine.lanes[0].graphs.num_replayed
    engine.backbone.base.norm.weight.data[0] = torch.nan
    engine.step()
    assert set(engine.backbone.tainted) == {0, 1}


# ---- the graphs themselves -----------------------------------------------------------------------------------------------------


def doubled(sent: Any) -> Work:
    numbers = sent["0"].to(torch.float64)
    return Work(numbers.unsqueeze(1), numbers * 2, len(numbers))


def run(made: Graphs, *numbers: int, work: Any = doubled, key: str = "key") -> list[float]:
    parcel = Parcel()
    parcel.enclose(np.array(numbers))
    found: list[float] = made.run(key, parcel, work).record.tolist()
    return found


def test_a_shape_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    seen = []
    for value in range(5):
        assert run(made, value, 1) == [2.0 * value, 2.0]
        seen.append((recorder.num_captured, made.num_replayed))
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    run(made, 1, 2, 3)
    assert recorder.num_captured == 1, "another shape is another graph"
    run(made, 1, 2, key="other")
    assert recorder.num_captured == 1
    made.forget()
    run(made, 4, 5)
    assert (recorder.num_captured, made.num_replayed) == (1, 3)


def test_a_graph_that_knows_a_number_of_its_first_forward_gives_another_result() -> None:
    """This is what Replaying is for: numbers must be sent, not kept."""
    made, bias = Graphs(Replaying(), CPU), []

    def work(value: int) -> Any:
        return lambda sent: Work(sent["0"], sent["0"] * 1.0 + value, 1)

    for value in (5, 5, 6):
        bias.append(run(made, 1, work=work(value)))
    assert bias == [[6.0], [6.0], [6.0]], "the last one should have been 7"


def test_a_graph_that_differs_is_never_used(caplog: Any) -> None:
    class Wrong(Replaying):
        def capture(self, work: Any) -> Any:
            replay, found = super().capture(work)
            return (lambda: (replay(), found.record.add_(1))[0]), found

    made = Graphs(Wrong(), CPU)
    with caplog.at_level(logging.WARNING):
        assert [run(made, value) for value in range(5)] == [[2.0 * value] for value in range(5)]
    assert made.num_replayed == 0 and [one.message for one in caplog.records] == [
        "CUDA graphs are not used from now on: a captured step gave another result. "
        "Steps run operation by operation, which is slower."
    ]


def test_records_with_nan_and_infinities_are_compared_too() -> None:
    recorder = Replaying()
    made = Graphs(recorder, CPU)

    def work(sent: Any) -> Work:
        record = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], dtype=torch.float64)
        record[3] = sent["0"].sum()
        return Work(sent["0"], record, 1)

    assert [run(made, value, work=work)[3] for value in range(4)] == [0, 1, 2, 3]
    assert recorder.num_captured == 1 and made.num_replayed == 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.1])
def test_a_record_with_another_number_differs(wrong: float) -> None:
    expected, found = torch.tensor([3.0, 3.0]), torch.tensor([3.01, wrong])
    assert graphs._close(found, expected).tolist() == [True, False]


def test_work_that_cannot_be_captured_runs_on(caplog: Any) -> None:
    class Refusing:
        def capture(self, work: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = Graphs(Refusing(), CPU)
    with caplog.at_level(logging.WARNING):
        assert [run(made, value) for value in range(4)] == [[2.0 * value] for value in range(4)]
    assert len(caplog.records) == 1 and "not permitted when stream is capturing." in caplog.records[0].message


def test_shapes_that_rarely_come_again_are_not_captured_for_ever(monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    for key in "abcdef" * 4:
        for _ in range(2):
            assert run(made, 3, key=key) == [6.0]
    assert (recorder.num_captured, made.num_replayed) == (4, 0), "each one made room before it came again"
    for _ in range(40):
        assert run(made, 3, key="f") == [6.0]
    assert recorder.num_captured == 4
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 8)
    for _ in range(40):
        assert run(made, 3, key="g") == [6.0]
    assert recorder.num_captured == 5 and made.num_replayed == 38


def test_old_graphs_make_room_for_new_ones(monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    for key in ("a", "b", "a", "b", "a", "c", "a", "c", "b"):
        assert run(made, 3, key=key) == [6.0]
    assert recorder.num_captured == 3 and made.num_replayed == 2


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 12), (12, 12), (13, 16), (17, 24), (25, 32), (385, 512)]
)
def test_forwards_are_filled_up_to_a_few_sizes(count: int, size: int) -> None:
    assert Graphs.size(count) == size


def test_large_forwards_are_not_captured() -> None:
    assert Graphs.size(512) == 512 and Graphs.size(513) is None
    sizes = {Graphs.size(count) for count in range(1, 513)}
    assert len(sizes) == 16
    assert all((Graphs.size(count) or 0) < 2 * count for count in range(1, 513))


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), (None, True)])
def test_a_switch_turns_graphs_off(value: str | None, is_on: bool, monkeypatch: Any) -> None:
    monkeypatch.delenv(graphs.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(graphs.VARIABLE, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert (graphs.find_recorder(torch.device("cuda")) is not None) == is_on
    assert graphs.find_recorder(CPU) is None


def test_a_switch_with_another_value_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv(graphs.VARIABLE, "yes")
    with pytest.raises(ValueError, match="DRAFTMILL_GRAPHS: 'yes' is not allowed; allowed: 0, 1"):
        graphs.find_recorder(CPU)
