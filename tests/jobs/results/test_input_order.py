"""Exports in the order of the inputs: every row once, in its place, a window of the plan in memory."""

import json
import random

import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.results.export import in_input_order
from draftmill.storage.stores.store import open_store
from tests.jobs.plan.test_plan import plan, spec_for
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import run_with


@pytest.mark.parametrize("window", [8, 40, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_of_a_plan_come_in_the_order_of_the_input(tmp_path, window, seed):
    rng = random.Random(seed)
    expected: list[str] = []
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        rows = [{"id": f"{name}{number}", "text": "7" * rng.randrange(90)} for number in range(rng.randrange(60))]
        (tmp_path / "in" / f"{name}.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
        expected += [str(row["id"]) for row in rows]
    made = plan(
        spec_for(tmp_path / "in", batching__window=window, output__unit_rows=4), open_store(str(tmp_path / "run"))
    )
    tables = [pa.table({"id": table["id"], "n": range(table.num_rows)}) for table in made.tables(["id"])]
    taken = iter(tables)
    in_order = in_input_order(made, taken)
    first = next(in_order)
    assert len(tables) - len([*taken]) <= -(-window // 4) + 1, "no more than a window is held, and a look at the next"
    assert first["id"].to_pylist() == expected[: first.num_rows]
    assert [name for table in in_input_order(made, tables) for name in table["id"].to_pylist()] == expected


def test_an_export_in_the_order_of_the_input_has_every_row_once_and_what_a_rerun_mended(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    spec = write_spec(tmp_path, rows=rows, batching={"window": 12}, errors={"max_rate": 1.0})
    assert run_with({"row-3", "row-17"}, "run", str(spec)) == 0
    assert run_with(set(), "rerun", str(tmp_path / "run"), "--failed") == 0
    found = {}
    for order in ("input", "plan"):
        out = tmp_path / f"{order}.jsonl"
        assert main(["export", str(tmp_path / "run"), "--format", "jsonl", "--out", str(out), "--order", order]) == 0
        found[order] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found["input"]] == [f"row-{number}" for number in range(24)]
    assert [row["id"] for row in found["plan"]] != [row["id"] for row in found["input"]]
    assert {row["id"]: row for row in found["plan"]} == {row["id"]: row for row in found["input"]}
    assert {row["id"] for row in found["input"] if row["pass"] == 2} == {"row-3", "row-17"}
