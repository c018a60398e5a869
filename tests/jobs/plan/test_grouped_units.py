"""Rows that begin alike come into one unit where workers compute what they have in common once; other plans stay as they were."""

import dataclasses
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest

from draftmill.actors.planning.beginnings import BEGINNING, beginnings
from draftmill.jobs.plan.packing import PlanWriter
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.planning import plan_groups
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.runs.unit_table import ROW_SCHEMA, TABLE_SCHEMA, PlanTable
from draftmill.storage.stores.store import open_store
from tests.jobs.plan.grouped_jobs import CHOICES, decoded_apart, planned, spec_for, write_questions

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
    return [store.get(part.name) for part in writer.parts]


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
    found = list(PlanTable(store, writer.parts).tables())
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
