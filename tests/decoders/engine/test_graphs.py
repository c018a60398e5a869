"""Captured forwards give what forwards give that run operation by operation: texts, counters, log-probabilities."""

from __future__ import annotations  # `Sent` reads which of its fields are arrays from their annotations as text

import contextlib
import itertools
import logging
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.rows import A, Sent
from draftmill.decoders.base import Outcome, Request, RowSettings
from draftmill.decoders.engine import cuda_graphs
from draftmill.decoders.engine.cuda_graphs import Graphs, Recorder, Work, drop_all, rows_of_launches
from tests.decoders.replaying import Replaying, use_graphs, use_references
from tests.decoders.support import run_all
from tests.device.steps import CASES, made, toy_canvases
from tests.runs.jobs_of_tests import soak

CPU = torch.device("cpu")
EAGER = ["stepwise", "stepwise, random", "stepwise, score", "threshold", "factor", "ssd", "ancestral, analytic"]
EAGER += ["block_diffusion, score"]
"""Where nothing is kept forwards run whole canvases, which keep a device busy: those of these decoders are not captured."""
CAPTURED = [name for name in CASES if name not in EAGER]
# Of these each shape comes rarely.
MANY = {"parallel": 24, "assd": 16, "assd, fused": 24, "s2d2, head": 24}


@pytest.fixture(autouse=True)
def _no_graphs_of_others():
    drop_all()
    yield
    drop_all()


def engine_of(name: str, **sampling: Any) -> Any:
    return made(name, sampling, "cpu", dtype="float64")


def same(found: dict[int, Outcome], expected: dict[int, Outcome]) -> None:
    """Tokens and counters are equal, log-probabilities but for rounding; times and rows may differ."""
    others = {field.name for field in fields(Outcome) if field.name.endswith("_s")}
    others |= {"pad_fraction", "tokens", "logprob", "logprob_stderr", "batch_rows"}
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


def growing(name: str, times: int = 1) -> list[Request]:
    """Two canvases more, which need a wider cache; they come while others run."""
    some = many(name, times * MANY.get(name, 9))
    longer = []
    for request in some[:2]:
        holes = request.canvas < 0
        canvas = np.concatenate([np.resize(request.canvas[~holes], 110), request.canvas])
        longer.append(Request(len(some) + request.index, request.key + 1, canvas.astype(np.int32)))
    return [*some[:-3], *longer, *some[-3:]]


@cache
def eager(name: str, times: int = 1) -> dict[int, Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        use_references(patch)
        engine = engine_of(name)
        assert all(one.graphs is None for one in engine.models)
        return run_all(engine, growing(name, times))


def replayed(engine: Any) -> list[int]:
    """How many forwards each model replayed that can be captured."""
    return [one.graphs.num_replayed for one in engine.models if one.graphs is not None]


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_captured_forwards_give_what_others_give_and_use_memory_that_stays_where_it_is(name, monkeypatch):
    """The cache grows while samples run, and slots are refilled. Its pool is allocated once, and graphs stay, but for models
    whose forwards depend on how many columns there are."""
    expected, recorder = eager(name), use_graphs(monkeypatch, watches=True)
    engine = engine_of(name)
    engine.fit(1 << 30)
    same(run_all(engine, growing(name)), expected)
    assert engine.graphs == "on" or name == "specdiff"
    # Most forwards of `parallel` are those of prompts.
    assert len(replayed(engine)) == 1 + (name == "speculative, model") and (
        min(replayed(engine)) > 0 or name == "parallel"
    ), "shapes come again"
    assert bool(recorder.num_dropped) == (engine.algorithm.kind == "any_subset" and name != "parallel")
    assert 0 < recorder.num_captured <= 60 or name == "parallel"


# One decoder of each kind of model; `make soak` has the others. What an index of suffixes proposes depends on the other samples
# of its engine.
TWO_ENGINES = ["speculative, model", "assd", "stepwise, cached", "block_diffusion"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO_ENGINES, *soak({*CAPTURED} - {*TWO_ENGINES, "speculative, suffix"})])
def test_graphs_of_two_engines_that_make_room_for_each_other_give_what_others_give(name, monkeypatch):
    """All graphs of a process share their memory: what one engine drops or moves, the other one must not use."""
    expected, recorder = eager(name, 2), use_graphs(monkeypatch, watches=True)
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 2)
    monkeypatch.setattr(cuda_graphs, "_LEAST_USES", 0)
    engines, requests = [engine_of(name) for _ in range(2)], growing(name, 2)
    waiting = [requests[0::2], requests[1::2]]
    found = dict[int, Outcome]()
    while any(waiting) or any(engine.active for engine in engines):
        for engine, queue in zip(engines, waiting, strict=True):
            while queue and engine.room(len(queue[0].canvas)):
                engine.admit([queue.pop(0)])
            found |= {one.index: one for one in engine.step()}
            assert len(cuda_graphs._LIVING) <= 2
    same(found, expected)
    assert all(engine.graphs == "on" or name == "specdiff" for engine in engines)
    assert recorder.num_dropped or name == "parallel"


@pytest.mark.slow
def test_all_other_decoders_run_as_they_did(monkeypatch):
    name = "ancestral, analytic"
    expected, recorder = eager(name), use_graphs(monkeypatch)
    assert all(one.graphs is None for name in EAGER for one in engine_of(name).models)
    same(run_all(engine_of(name), growing(name)), expected)
    assert recorder.num_captured == 0


RATIO = ["speculative", "speculative, model", "assd, n-gram", "assd", "assd, fused", "s2d2, head"]
CUTS: list[dict[str, Any]] = [{"top_p": 0.8}, {"temperature": 0.0}]


# Drafts that wait in cells, or made by a head from rows of the same graph, under every setting.
@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in RATIO), *itertools.product(("speculative, model", "assd"), CUTS)],
    ids=str,
)
def test_captured_forwards_judge_by_ratio_as_others_do(name, more, monkeypatch):
    check(name, many(name, 24 if name.startswith(("assd", "s2d2")) else 9), monkeypatch, acceptance="rejection", **more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [{"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}])
def test_captured_draws_follow_the_sampling_settings(more, monkeypatch):
    check("autoregressive", many("autoregressive"), monkeypatch, **more)


@pytest.mark.slow
def test_rows_positions_and_masks_that_mean_nothing_change_nothing(monkeypatch):
    """Blocks of five positions: no forward over them has the size of a captured one."""
    name = "stepwise, cached"
    model, settings = CASES[name]
    monkeypatch.setitem(CASES, name, (model, settings | {"block_length": 5}))
    check(name, many(name, 14), monkeypatch)


def check(name: str, requests: list[Request], monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> None:
    with monkeypatch.context() as plain:
        use_references(plain)
        expected = run_all(engine_of(name, **sampling), requests)
    use_graphs(monkeypatch, watches=True)
    engine = engine_of(name, **sampling)
    same(run_all(engine, requests), expected)
    assert all(replayed(engine))


@pytest.mark.slow
def test_forwards_that_are_too_large_run_as_they_did(monkeypatch):
    """Prompts are, and forwards with many drafts; their sampled rows are few enough to be filled up all the same."""
    name = "speculative"
    expected, recorder = eager(name), use_graphs(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "rows_of_launches", lambda backbone: 8)
    engine = engine_of(name)
    same(run_all(engine, growing(name)), expected)
    assert recorder.num_captured <= 16 and 0 < engine.target.graphs.num_replayed < engine.stats.steps


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["autoregressive", "any_subset", "block_diffusion"])
def test_one_sample_with_nan_fails_at_once_in_a_captured_forward_too(name, monkeypatch):
    requests = toy_canvases(2, name)
    with monkeypatch.context() as plain:
        use_references(plain)
        expected = run_all(engine_of(name), requests)
    use_graphs(monkeypatch)
    engine = engine_of(name)
    for _ in range(3):
        run_all(engine, requests)  # now every shape has come
    engine.admit(requests)
    assert not engine.step() and not engine.step()
    before, bad = engine.target.graphs.num_replayed, engine.samples[1]
    start, count = engine.backbone.cache._places[bad.slot]
    for pool in engine.backbone.cache.pools_2CKd:
        pool[:, start : start + count] = torch.nan
    (found,) = engine.step()
    assert engine.target.graphs.num_replayed == before + 1
    assert (found.index, found.error_kind) == (bad.request.index, "nan_logits")
    (other,) = [outcome for _ in range(20) for outcome in engine.step()]
    same({0: other}, {0: expected[0]})


@dataclass(slots=True, kw_only=True, eq=False)
class Numbers(Sent[A]):
    token_N: A
    is_sure: bool = False
    num_sums: int = 0


def doubled(sent: Numbers) -> Work:
    numbers = sent.token_N.to(torch.float64)
    return Work(numbers.unsqueeze(1), numbers * 2, len(numbers))


def run(made: Graphs, *numbers: int, work: Any = doubled, key: str = "key") -> list[float]:
    found: list[float] = made.run(key, Numbers(token_N=np.array(numbers)), work).record.tolist()
    return found


def test_a_shape_is_captured_when_it_first_comes_and_replayed_from_then_on():
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    seen = []
    for value in range(5):
        assert run(made, value, 1) == [2.0 * value, 2.0]
        seen.append((recorder.num_captured, made.num_replayed))
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    run(made, 1, 2, 3)
    assert recorder.num_captured == 2, "another shape is another graph"
    run(made, 1, 2, key="other")
    assert recorder.num_captured == 3
    drop_all()
    run(made, 4, 5)
    assert (recorder.num_captured, made.num_replayed) == (4, 4)


def test_a_batch_with_another_fact_is_another_graph():
    """What the work looks at besides arrays is part of what forwards have in common."""
    recorder = Replaying()
    made = Graphs(recorder, CPU)

    def work(sent: Numbers) -> Work:
        return Work(sent.token_N, sent.token_N * (3.0 if sent.is_sure else 2.0), 1)

    for is_sure in (False, True) * 3:
        found = made.run("key", Numbers(token_N=np.array([5]), is_sure=is_sure), work).record.tolist()
        assert found == [15.0 if is_sure else 10.0]
    assert recorder.num_captured == 2 and made.num_replayed == 4


def test_a_graph_that_differs_is_never_used(caplog):
    class Wrong(Replaying):
        def capture(self, work: Any) -> Any:
            replay, found = super().capture(work)
            return (lambda: (replay(), found.record.add_(1))[0]), found

    made = Graphs(Wrong(), CPU)
    with caplog.at_level(logging.WARNING):
        assert [run(made, value) for value in range(5)] == [[2.0 * value] for value in range(5)]
    (line,) = (one.message for one in caplog.records)
    said = "a captured step gave another result: 1 of 1 numbers; number 0 is 1.0, not 0.0; graph ("
    assert made.num_replayed == 0 and line.startswith(f"CUDA graphs are not used from now on: {said}")


@pytest.mark.parametrize(("sums", "is_used"), [([270.0, 0.0], True), ([float("inf"), 0.0], False)])
def test_sums_of_states_are_compared_for_whether_they_are_finite(sums, is_used):
    """They may be in the hundreds, where half precision rounds by more than log-probabilities do."""
    expected = torch.tensor([3.0, 271.0, 0.0], dtype=torch.float64)
    found = torch.tensor([3.0, *sums], dtype=torch.float64)
    batch = Numbers(token_N=np.zeros(2, np.int64), num_sums=2)
    made, records = Graphs(Replaying(), CPU), iter([expected, found, found])
    made.run("key", batch, lambda sent: Work(sent.token_N, next(records), 1))
    assert (made.stopped is None) == is_used


def test_records_with_nan_and_infinities_are_compared_too():
    recorder = Replaying()
    made = Graphs(recorder, CPU)

    def work(sent: Numbers) -> Work:
        record = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], dtype=torch.float64)
        record[3] = sent.token_N.sum()
        return Work(sent.token_N, record, 1)

    assert [run(made, value, work=work)[3] for value in range(4)] == [0, 1, 2, 3]
    assert recorder.num_captured == 1 and made.num_replayed == 3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.1])
def test_a_record_with_another_number_differs(wrong):
    expected, found = torch.tensor([3.0, 3.0]), torch.tensor([3.01, wrong])
    assert cuda_graphs._differing(found, expected, num_sums=0).tolist() == [1]


class Failing(Replaying):
    """Its first captures fail."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__()
        self.errors = list(errors)

    def capture(self, work: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return super().capture(work)


def test_work_that_cannot_be_captured_runs_on_and_says_why(caplog):
    made = Graphs(Failing(RuntimeError("operation not permitted when stream is capturing\nmore")), CPU)
    with caplog.at_level(logging.WARNING):
        assert [run(made, value) for value in range(4)] == [[2.0 * value] for value in range(4)]
    assert len(caplog.records) == 1 and "not permitted when stream is capturing." in caplog.records[0].message
    assert (made.stopped or "").startswith("a step could not be captured: RuntimeError: operation not permitted")
    assert made.num_replayed == 0


def test_memory_that_runs_out_in_a_capture_drops_what_lives_and_graphs_come_again():
    recorder, other = Failing(torch.OutOfMemoryError("CUDA out of memory")), Graphs(Replaying(), CPU)
    assert [run(other, value) for value in range(3)] == [[0.0], [2.0], [4.0]] and other.num_replayed == 2
    made = Graphs(recorder, CPU)
    seen = list[tuple[int, int]]()
    for value in range(5):
        assert run(made, value) == [2.0 * value]
        seen.append((recorder.num_captured, made.num_replayed))
    # The first forward fails to be captured, the second one is captured as if it were the first.
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)] and made.stopped is None
    assert run(other, 7) == [14.0] and other.num_replayed == 2, "the others' graphs were dropped, too"


def test_all_graphs_of_the_process_and_their_pools_are_dropped_together():
    """Destroying one alone may take memory from those that live: cuBLAS has one workspace for all of them."""
    recorders = [Replaying(), Replaying()]
    graphs = [Graphs(recorder, CPU) for recorder in recorders]
    for one in graphs:
        assert [run(one, value) for value in range(3)] == [[0.0], [2.0], [4.0]]
    assert len(cuda_graphs._LIVING) == 2
    graphs[0]._stop("a captured step gave another result")
    assert not cuda_graphs._LIVING
    assert [recorder.num_dropped for recorder in recorders] == [1, 1]
    assert [run(one, 5) for one in graphs for _ in range(3)] == [[10.0]] * 6
    # The one that was stopped captures nothing any more, the other one has begun again.
    assert [(recorder.num_captured, one.num_replayed) for recorder, one in zip(recorders, graphs, strict=True)] == [
        (1, 2),
        (2, 4),
    ]
    drop_all()
    assert [recorder.num_dropped for recorder in recorders] == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_stream_as_it_was_also_where_it_fails(fails, monkeypatch):
    """The device is a stand-in; torch.cuda.graph makes its own stream current, and leaves it so where a capture fails."""
    current, pools, cleared = ["usual"], list[Any](), list[str]()

    @contextlib.contextmanager
    def graph(made: Any, *, pool: Any, capture_error_mode: str):
        pools.append(pool)
        assert capture_error_mode == "thread_local", "other threads use the device meanwhile"
        current[0] = "capturing"
        yield
        current[0] = "usual"

    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"replay": lambda self: None}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: cleared.append("synchronized"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ended = list[tuple[int, Any]]()

    def end(device: int, pool: Any) -> None:
        ended.append((device, pool))
        raise RuntimeError("not currently recording to this pool")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    recorder, calls = Recorder(), itertools.count()
    made = Graphs(recorder, CPU)

    def work(sent: Numbers) -> Work:
        if fails and next(calls) == 1:
            raise RuntimeError("capture failed")
        return doubled(sent)

    assert [run(made, 4, work=work) for _ in range(3)] == [[8.0]] * 3
    assert current == ["usual"] and ended == ([(0, 1)] if fails else [])
    assert made.stopped == ("a step could not be captured: RuntimeError: capture failed" if fails else None)
    assert made.num_replayed == (0 if fails else 2)
    drop_all()
    # A pool whose graphs are gone is not captured into again.
    assert cleared == ["synchronized", "cleared"] and recorder._pool is None
    recorder.capture(lambda: doubled(Numbers(token_N=torch.ones(1))))
    assert pools == [1, 2]
    recorder.drop_pool()


def test_shapes_that_rarely_come_again_are_not_captured_for_ever(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 2)
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    for key in "abcdef" * 3:
        for _ in range(2):
            assert run(made, 3, key=key) == [6.0]
    assert (recorder.num_captured, made.num_replayed) == (4, 12), "the first two made room, the next two stay"
    for _ in range(40):
        assert run(made, 3, key="f") == [6.0]
    assert recorder.num_captured == 4
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 8)
    for _ in range(40):
        assert run(made, 3, key="g") == [6.0]
    assert recorder.num_captured == 5 and made.num_replayed == 12 + 39


def test_where_there_are_too_many_all_make_room_for_new_ones(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 2)
    recorder = Replaying()
    made = Graphs(recorder, CPU)
    seen = list[int]()
    for key in ("a", "b", "a", "b", "a", "c", "c", "c", "b", "b", "b"):
        assert run(made, 3, key=key) == [6.0]
        seen.append(len(cuda_graphs._LIVING))
    assert seen == [1, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2]
    assert recorder.num_captured == 4 and recorder.num_dropped == 1


@pytest.mark.parametrize(
    ("count", "size"), [(1, 4), (4, 4), (5, 16), (17, 32), (65, 128), (256, 256), (257, 384), (385, 512), (513, None)]
)
def test_forwards_are_filled_up_to_a_few_sizes(count, size):
    assert Graphs(Replaying(), CPU).size(count) == size


def test_the_smaller_the_model_the_larger_the_forwards_that_are_captured():
    rows = [rows_of_launches(int(count)) for count in (8e9, 1e9, 5e8, 1e8)]
    assert rows == [512, 1000, 2000, 2048]
    assert [Graphs(Replaying(), CPU, count).is_launch_bound for count in rows] == [False, True, True, True]
    sizes = {Graphs(Replaying(), CPU, 2048).size(count) for count in range(1, 2049)}
    assert len(sizes) == 12 and Graphs(Replaying(), CPU, 1000).size(1001) is None


def test_where_launches_cost_more_than_rows_a_forward_takes_a_size_that_is_there():
    large, small = Graphs(Replaying(), CPU, 512), Graphs(Replaying(), CPU, 2048)
    first, fewer, far, other = ({"N": n, "Q": q} for n, q in ((64, 0), (32, 0), (4, 0), (32, 16)))
    assert [large.choose(sizes) for sizes in (first, fewer)] == [first, fewer]
    assert [small.choose(sizes) for sizes in (first, fewer, far, other, far)] == [first, first, far, other, far]


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), (None, True)])
def test_a_switch_turns_graphs_off(value, is_on, monkeypatch):
    monkeypatch.delenv(cuda_graphs.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(cuda_graphs.VARIABLE, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert (cuda_graphs.find_recorder(torch.device("cuda")) is not None) == is_on
    assert cuda_graphs.find_recorder(CPU) is None


def test_a_switch_with_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(cuda_graphs.VARIABLE, "yes")
    with pytest.raises(ValueError, match="DRAFTMILL_GRAPHS: 'yes' is not allowed; allowed: 0, 1"):
        cuda_graphs.find_recorder(CPU)
