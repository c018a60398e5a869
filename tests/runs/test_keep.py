"""`input.keep`: columns of the inputs in every result row, in every pass, file and export."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import run_with

COUNT = 8


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory):
    """A finished run over a jsonl and a parquet file, with a line that is torn, a sick row that a second pass mends, and columns
    whose types differ between the files.
    """
    folder = tmp_path_factory.mktemp("kept")
    (folder / "in").mkdir()
    plain = [json.loads(line) for line in write_rows(folder / "plain.jsonl", COUNT).read_text().splitlines()]
    rows = [row | {"lang": "en", "n": number, "meta": {"src": f"s{number}"}} for number, row in enumerate(plain)]
    (folder / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"torn')
    other = [row | {"id": f"p-{row['id']}", "n": "words", "lang": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(other), folder / "in" / "b.parquet")
    spec = write_spec(
        folder,
        rows=folder / "in",
        input={
            "path": [str(folder / "in" / "a.jsonl"), str(folder / "in" / "b.parquet")],
            "columns": {"id": "id", "tokens": "tokens"},
            "keep": ["lang", "n", "meta.src"],
        },
        errors={"max_rate": 1.0},
    )
    assert run_with({"row-3"}, "run", str(spec)) == 0
    assert run_with(set(), "rerun", str(folder / "run"), "--failed") == 0
    return folder


def expected(name: str) -> dict | None:
    if name == "a.jsonl:8":
        return None
    number = int(name.rpartition("-")[2])
    from_parquet = name.startswith("p-")
    return {"lang": None if from_parquet else "en", "n": "words" if from_parquet else number, "meta.src": f"s{number}"}


def exported(folder, kind: str, *more: str):
    out = folder / f"{len(list(folder.iterdir()))}.{kind}"
    assert main(["export", str(folder / "run"), "--format", kind, "--out", str(out), *more]) == 0
    return out


def test_kept_columns_are_in_every_row_of_an_export(kept):
    rows = [json.loads(line) for line in exported(kept, "jsonl", "--order", "input").read_text().splitlines()]
    assert len(rows) == 2 * COUNT + 1
    assert {row["id"]: row["keep"] for row in rows} == {row["id"]: expected(row["id"]) for row in rows}
    assert {row["id"] for row in rows if row["pass"] == 2} == {"row-3", "a.jsonl:8"}


def test_kept_columns_are_columns_of_a_csv_and_a_struct_of_parquet(kept):
    with exported(kept, "csv", "--columns", "id,keep").open() as file:
        records = {record["id"]: record for record in csv.DictReader(file)}
    assert records["row-2"] == {"id": "row-2", "keep.lang": "en", "keep.n": "2", "keep.meta.src": "s2"}
    assert records["p-row-2"] == {"id": "p-row-2", "keep.lang": "", "keep.n": "words", "keep.meta.src": "s2"}
    assert records["a.jsonl:8"] == {"id": "a.jsonl:8", "keep.lang": "", "keep.n": "", "keep.meta.src": ""}
    table = pq.read_table(exported(kept, "parquet"))
    found = {row["id"]: row["keep"] for row in table.select(["id", "keep"]).to_pylist()}
    assert found["row-2"] == {"lang": "en", "n": "2", "meta.src": "s2"} and found["p-row-2"]["n"] == '"words"'
    assert table.schema.field("keep").type.field("n").metadata == {b"draftmill.json": b"1"}


@pytest.mark.parametrize(
    ("keep", "message"),
    [("[absent]", "input.keep: no row has a column 'absent'"), ("[id, id]", "input.keep: a column is named twice")],
)
def test_a_column_that_can_not_be_kept_is_refused(tmp_path, capsys, keep, message):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 2))
    assert run_with(set(), "run", str(spec), "--set", f"input.keep={keep}") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "_plan.json").exists()
