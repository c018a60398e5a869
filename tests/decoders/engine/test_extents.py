"""Slots as wide as their canvases in one pool of cells: who gets which, what stays there, and the same texts as ever."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.engine.cuda_graphs import drop_all
from draftmill.decoders.engine.memory import Capacity, Extents, MemoryPlan, Shape
from tests.decoders.engine.test_graphs import eager, growing, same
from tests.decoders.engine.test_prefix_cache import shots
from tests.decoders.replaying import use_graphs, use_references
from tests.decoders.support import run_all, texts
from tests.device.steps import SLOTS, made


def capacity_of(**more: Any) -> Capacity:
    return Capacity(multiple=1, columns_of=lambda n: n, slot_bytes=lambda n: 2 * n + 5, pooled=True, **more)


def test_cells_belong_to_one_slot_and_lost_ones_are_told():
    rng, extents, owner_C = np.random.default_rng(0), Extents(200), np.full(200, -1)
    held, inside = dict[int, tuple[int, int]](), set[int]()  # what each slot holds, also after it became free
    for _ in range(3000):
        columns, slot = int(rng.integers(1, 60)), int(rng.integers(8))
        free_C = np.ones(200, dtype=bool)
        for one in inside:
            free_C[slice(*held[one])] = False
        runs = "".join(".x"[int(free)] for free in free_C).split(".")
        assert extents.room(columns) == sum(len(run) // columns for run in runs)
        if slot in inside:
            inside.remove(slot)
            extents.give_back(slot)
        elif extents.room(columns):
            start, lost = extents.take(slot, columns)
            assert free_C[start : start + columns].all() and start + columns <= 200
            taken = {other for other in set(owner_C[start : start + columns].tolist()) if other >= 0}
            moved = slot not in held or held[slot][0] != start
            assert set(lost) == (taken - {slot}) | ({slot} if moved else set())
            for other in lost:
                owner_C[owner_C == other] = -1
            owner_C[owner_C == slot] = -1
            owner_C[start : start + columns] = slot
            held[slot] = start, start + columns
            inside.add(slot)
        held = {one: place for one, place in held.items() if one in inside or (owner_C == one).any()}


def test_a_pool_is_allocated_once_and_its_columns_grow_by_an_eighth():
    plan = MemoryPlan(logits=0, noise=0, slots=1000, prompt_rows=None)
    capacity = capacity_of(max_rows=20, max_tokens=400, plan=plan)
    assert capacity.cells == 400, "what max_tokens allows is less than (1000 - 20 * 5) / 2"
    shape = capacity.spread(Shape(), needed=1, longest=30)
    assert shape == (20, 64, 1) and capacity.spread(shape, needed=9, longest=60) == (20, 64, 9)
    with pytest.raises(MemoryError, match="a canvas of 600 tokens does not fit"):
        capacity.spread(shape, needed=1, longest=600)
    long = capacity_of(max_rows=20, max_tokens=10**5, plan=MemoryPlan(0, 0, slots=10**6))
    assert [long.spread(Shape(), needed=1, longest=n).columns for n in (300, 1000, 4000)] == [320, 1024, 4096]


def most_inside(engine: Any, cells: int, requests: Any) -> tuple[int, Any]:
    """How many samples are inside at most, and what all say."""
    engine.max_tokens = engine._capacity.max_tokens = cells
    waiting, found, most = list(requests), dict[int, Any](), 0
    while waiting or engine.active:
        while waiting and engine.room(len(waiting[0].canvas)):
            engine.admit([waiting.pop(0)])
        most = max(most, engine.active)
        found |= {outcome.index: outcome for outcome in engine.step()}
    return most, found


@pytest.mark.parametrize("name", ["autoregressive", "any_subset", "speculative, model", "assd", "s2d2", "ssd, cached"])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.one_in(3)
def test_slots_of_other_widths_change_no_text(name, hides, monkeypatch):
    """The longest canvas has 140 columns, three others 30 each: a rectangle holds one of them at a time."""
    requests, expected = growing(name), eager(name)
    drop_all()
    use_graphs(monkeypatch)
    monkeypatch.setattr("draftmill.decoders.engine.engine.hides_host", lambda backbone: hides)
    engine = made(name, {}, "cpu", dtype="float64")
    columns = engine._capacity.columns
    most, found = most_inside(engine, columns(140) + 2 * columns(30), requests)
    drop_all()
    same(found, expected)
    assert engine._spreads and most >= 3


def test_a_canvas_that_is_longer_than_the_pool_runs_alone(monkeypatch):
    use_references(monkeypatch)
    engine = made("autoregressive", {}, "cpu", dtype="float64")
    most, found = most_inside(engine, 70, growing("autoregressive"))
    same(found, eager("autoregressive"))
    assert most == 2


def test_a_beginning_is_taken_over_from_cells_that_nobody_else_took(monkeypatch):
    use_references(monkeypatch)
    requests = shots(14, new=5, long=30)
    plain = made("autoregressive", {}, "cpu", dtype="float64")
    plain.algorithm = plain.scheduler.algorithm = replace(plain.algorithm, reusable=lambda sample: 0)
    expected = run_all(plain, requests)
    assert plain.stats.prompt_rows_shared == 0
    for cells in (120, 170, SLOTS * 80):
        engine = made("autoregressive", {}, "cpu", dtype="float64")
        _, found = most_inside(engine, cells, requests)
        assert texts(found) == texts(expected)
        assert engine.stats.prompt_rows_shared > 0
