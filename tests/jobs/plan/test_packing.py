"""Units hold every row once, in few bounds, rows that begin alike together; ids that occur twice are found."""

import dataclasses
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.makespans import makespan_bound, refill_makespan, static_makespan
from draftmill.actors.planning.beginnings import BEGINNING, beginnings
from draftmill.jobs.plan import id_sets
from draftmill.jobs.plan.id_sets import DuplicateFinder, hashes_of
from draftmill.jobs.plan.packing import PlanWriter, auto_unit_rows, cut, longest_first, padding_efficiency
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.planning import plan_groups
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.runs.unit_table import ROW_SCHEMA, TABLE_SCHEMA, PlanTable
from draftmill.storage.runs.unit_table import parts_of as listed_parts
from draftmill.storage.stores.store import open_store
from tests.jobs.plan.grouped_jobs import CHOICES, decoded_apart, planned, spec_for, write_questions


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=60), max_rows=st.integers(1, 20), max_tokens=st.integers(1, 120))
def test_units_cover_every_row_once_within_their_bounds(lengths, max_rows, max_tokens):
    ordered = np.sort(np.asarray(lengths, dtype=np.int32))[::-1]
    units = cut(ordered, max_rows=max_rows, max_tokens=max_tokens)
    assert [start for start, _ in units] + [len(lengths)] == [0] + [end for _, end in units] if lengths else units == []
    for start, end in units:
        assert end - start <= max_rows
        assert end - start == 1 or ordered[start:end].sum() <= max_tokens


def test_shares_are_even():
    assert cut(np.ones(10, dtype=np.int32), max_rows=4) == [(0, 4), (4, 8), (8, 10)]
    assert cut(np.ones(1025, dtype=np.int32), max_rows=1024) == [(0, 513), (513, 1025)]


def test_a_unit_has_as_many_tokens_as_its_limit_and_no_more():
    lengths = np.array([5, 5, 5, 5], dtype=np.int32)
    assert cut(lengths, max_rows=9, max_tokens=10) == [(0, 2), (2, 4)]
    assert cut(lengths, max_rows=9, max_tokens=9) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=60),
    max_rows=st.integers(1, 20),
    max_tokens=st.integers(1, 120),
)
def test_units_that_end_with_groups_keep_their_bounds(rows, max_rows, max_tokens):
    lengths, depth = (np.asarray([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
    units = cut(lengths.astype(np.int32), max_rows=max_rows, max_tokens=max_tokens, depth=depth)
    assert [number for start, end in units for number in range(start, end)] == list(range(len(rows)))
    for start, end in units:
        assert 0 < end - start <= max_rows
        assert end - start == 1 or lengths[start:end].sum() <= max_tokens


def test_a_unit_ends_with_a_group_if_one_ends_shortly_before_its_limit():
    ones = np.ones(96, dtype=np.int32)
    questions = np.tile([0, 1, 1], 32)
    # In even shares it would be 32, 64, 96; what is left after 30 is shared evenly again.
    assert cut(ones, max_rows=32, depth=questions) == [(0, 30), (30, 51), (51, 72), (72, 96)]
    # No question ends in the eighth before the limit: it is cut in two.
    assert cut(ones[:16], max_rows=8, depth=np.tile([0, 1, 1, 1, 1, 1], 3)[:16]) == [(0, 8), (8, 16)]
    # Of several ends, that of the outermost group; without groups, as ever.
    tasks = np.where(np.arange(96) % 29 == 0, 0, np.tile([1, 2], 48))
    assert cut(ones, max_rows=32, depth=tasks)[0] == (0, 29)
    assert cut(ones, max_rows=40, depth=np.zeros(96, dtype=np.int64)) == cut(ones, max_rows=40)


def test_longest_first_keeps_the_order_of_equals():
    assert longest_first(np.asarray([3, 5, 3, 5], dtype=np.int32)).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("rows", "unit_rows"), [(1, 32), (500, 32), (2048, 32), (6400, 100), (65536, 1024), (10**7, 1024)]
)
def test_automatic_unit_rows_are_clamped(rows, unit_rows):
    assert auto_unit_rows(rows) == unit_rows


def test_padding_is_computed_per_batch():
    lengths = np.asarray([4, 2, 1, 1], dtype=np.int32)
    assert padding_efficiency(lengths, batch_rows=2) == 8 / 10
    assert padding_efficiency(lengths, batch_rows=4) == 8 / 16
    assert padding_efficiency(np.zeros(0, dtype=np.int32), batch_rows=4) == 1.0


def test_sorting_and_refill_approach_the_bound():
    costs = np.random.default_rng(0).lognormal(4.0, 0.8, 2000).tolist()
    ordered = sorted(costs, reverse=True)
    bound = makespan_bound(costs, 16)
    assert bound <= refill_makespan(ordered, 16) <= refill_makespan(costs, 16) <= static_makespan(costs, 16)
    assert refill_makespan(ordered, 16) / bound < 1.01


@pytest.mark.parametrize("held_rows", [1, 7, 10_000])
def test_an_id_that_occurs_twice_is_found_with_both_places(held_rows, monkeypatch):
    monkeypatch.setattr(id_sets, "HELD_ROWS", held_rows)
    ids = [f"id-{number}" for number in range(1000)]
    with DuplicateFinder() as finder:
        for start in range(0, 1000, 50):
            finder.add(hashes_of(ids[start : start + 50]), np.zeros(50, dtype=np.int32), np.arange(start, start + 50))
        assert finder.first() is None
        finder.add(hashes_of(["new", "id-700", "id-3"]), np.ones(3, dtype=np.int32), np.asarray([0, 1, 2]))
        assert finder.first() == ((0, 700), (1, 1))


QUESTIONS = 24


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    write_questions(path, QUESTIONS)
    return path


def units_of(plan: Plan) -> dict[str, set[int]]:
    found = defaultdict(set)
    for unit, names in plan.unit_samples():
        for name, _ in names:
            found[name.partition("-")[0]].add(unit)
    return found


def test_the_ends_of_a_question_are_in_one_unit_and_every_row_in_one(questions):
    plan = planned(spec_for(questions, "memory://grouped"))
    names = [name for _, names in plan.unit_samples() for name, _ in names]
    assert plan.units >= 3
    assert sorted(names) == sorted(f"{number}-{end}" for number in range(QUESTIONS) for end in range(CHOICES))
    assert all(len(units) == 1 for units in units_of(plan).values())
    lengths = [row.length for unit in range(plan.units) for row in plan.unit_rows(unit)]
    assert lengths[0] == max(lengths)
    by_length = planned(spec_for(questions, "memory://lengths"), by_length=True)
    assert sum(len(units) for units in units_of(by_length).values()) > 2 * QUESTIONS


@pytest.mark.slow
def test_units_by_beginnings_run_fewer_rows_of_prompts_and_score_the_same(questions):
    ran = {}
    for by_length in (True, False):
        spec = spec_for(questions, f"memory://ran-{by_length}")
        stats, scores = decoded_apart(planned(spec, by_length=by_length))
        ran[by_length] = stats.prompt_rows, stats.prompt_rows - stats.prompt_rows_shared, scores
    assert ran[True][0] == ran[False][0] and ran[True][2] == ran[False][2]
    assert ran[False][1] < 0.7 * ran[True][1]


def test_samples_of_a_row_and_of_rows_that_begin_alike_come_together(questions):
    task = {"kind": "complete", "max_new_tokens": 8}
    plan = planned(spec_for(questions, "memory://samples", task=task, sampling={"n": 3}))
    assert plan.rows == 3 * CHOICES * QUESTIONS
    # A question's 12 samples have one prompt; a unit of up to 32 rows may end between two samples.
    assert sum(len(units) for units in units_of(plan).values()) <= QUESTIONS + plan.units
    first = [name for name, _ in next(plan.unit_samples())[1]]
    assert len({name.partition("-")[0] for name in first}) <= 4


def tables(lengths: list[int], prompts: list) -> tuple[pa.Table, pa.Table]:
    """A table of rows, and the same with the column BEGINNING."""
    count = len(lengths)
    numbers = list(range(count))
    columns = [[0] * count, numbers, [None] * count, [str(n) for n in numbers], lengths, lengths, [None] * count]
    table = pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip([*columns, [0] * count], ROW_SCHEMA, strict=True)],
        schema=ROW_SCHEMA,
    )
    return table, table.append_column(BEGINNING, beginnings(prompts))


def parts_of(table: pa.Table, name: str, **more) -> list[bytes]:
    store = open_store(f"memory://{name}")
    writer = PlanWriter(store, window=50, unit_rows=8, **more)
    for start in range(0, table.num_rows, 7):
        writer.add(table.slice(start, 7))
    writer.finish()
    return [store.get(part["name"]) for part in writer.parts]


def test_without_beginnings_and_in_input_order_the_plan_has_the_bytes_that_it_had():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 120).tolist()
    rows, noted = tables(lengths, [None] * 120)
    assert parts_of(noted, "none") == parts_of(rows, "rows")
    alike = [np.arange(20, dtype=np.int32) + number % 5 for number in range(120)]
    rows, noted = tables(lengths, alike)
    assert parts_of(noted, "alike") != parts_of(rows, "rows")
    assert parts_of(noted, "kept", keep_order=True) == parts_of(rows, "rows-kept", keep_order=True)


def test_hashes_are_not_stored_and_windows_stay_as_they_are():
    alike = [np.arange(20, dtype=np.int32) + number % 5 for number in range(120)]
    store = open_store("memory://stored")
    writer = PlanWriter(store, window=50, unit_rows=8)
    writer.add(tables([20] * 120, alike)[1])
    writer.finish()
    found = list(PlanTable(store, listed_parts(writer.parts)).tables())
    assert all(table.schema.equals(TABLE_SCHEMA) for table in found)
    rows = [table["row"].to_pylist() for table in found]
    assert sorted(row for unit in rows for row in unit) == list(range(120))
    assert all(len({row // 50 for row in unit}) == 1 for unit in rows)
    assert [row % 5 for unit in rows for row in unit][:10] == [0] * 10


def test_only_jobs_that_group_alike_share_a_unit_table(questions):
    task = {"kind": "complete", "max_new_tokens": 8}
    spec = spec_for(questions, "memory://sweep", task=task)
    causal = resolve(spec, open_store(spec.output.path))
    other = dataclasses.replace(causal, info=dataclasses.replace(causal.info, kind="masked"))
    blocks = dataclasses.replace(causal, info=dataclasses.replace(causal.info, kind="blocks"))
    assert plan_groups([causal, other, blocks]) == [[0, 2], [1]]
