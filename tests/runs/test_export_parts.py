"""`draftmill export --file-mb`: Parquet files of a chosen size that hold each row once, as the last pass has it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.results.export import AT_ONCE, BYTES_AT_ONCE, columns_of, export_parts, parquet_format, tables_of
from draftmill.jobs.results.formats import PartsSink, plain_rows
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.records import SCHEMA, table_from_rows
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.store import Place, open_store
from tests.jobs.compare.made_runs import row, write_run
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import COUNT, SICK, STILL_SICK, run_with
from tests.storage.inputs.tables import result_row

PARQUET = ("--format", "parquet", "--file-mb", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """A run of two passes."""
    folder = tmp_path_factory.mktemp("parts")
    rows = write_rows(folder / "rows.jsonl", COUNT)
    assert run_with(SICK, "run", str(write_spec(folder, rows=rows))) == 3
    assert run_with(set(STILL_SICK), "rerun", str(folder / "run"), "--failed") == 3
    return folder / "run"


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_files_have_every_row_once_as_the_last_pass_has_it(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run), *PARQUET, "--out", f"{out}/"]) == 0
    assert f"{out}: {COUNT} samples in 1 file\n" in capsys.readouterr().out
    assert names_in(out) == ["_SUCCESS", "part-00000.parquet"]
    table = pq.read_table(out)
    assert table.schema.remove_metadata().equals(SCHEMA)
    rows = [row["id"] for part in latest_rows(passes_of(open_store(str(run)))) for row in part.to_pylist()]
    assert table["id"].to_pylist() == rows and len(set(rows)) == COUNT
    assert table["status"].to_pylist().count("failed") == len(STILL_SICK)
    assert (
        main(["export", str(run), *PARQUET, "--out", str(tmp_path / "ids"), "--columns", "id", "--order", "input"]) == 0
    )
    assert pq.read_table(tmp_path / "ids").column_names == ["id"]


def test_files_are_as_large_as_asked_for_and_lose_nothing(tmp_path):
    rng, wanted, tables = np.random.default_rng(0), 256 * 1024, []
    for unit in range(40):
        rows = [
            result_row(unit * 50 + row, unit=unit, tokens=rng.integers(0, 2**30, 300).tolist(), worker=f"w{unit % 3}")
            for row in range(50)
        ]
        tables.append(table_from_rows(rows))
    tables = [pa.concat_tables(tables[:20]), *tables[20:]]  # the first is as large as several files
    sink = PartsSink(LocalStore(str(tmp_path)).put, SCHEMA, {"fingerprint": "f"}, wanted)
    for table in tables:
        sink.add(table)
    sink.close()
    parts = [tmp_path / name for name in names_in(tmp_path)]
    sizes = [part.stat().st_size for part in parts]
    assert len(parts) == sink.count > 5 and max(sizes) <= wanted and min(sizes[:-1]) > wanted / 3
    found = [name for part in parts for name in pq.read_table(part)["id"].to_pylist()]
    assert found == [row["id"] for table in tables for row in table.to_pylist()]


def test_a_run_without_rows_has_one_file_with_the_columns(tmp_path):
    sink = PartsSink(LocalStore(str(tmp_path)).put, SCHEMA, {}, 2**20)
    sink.close()
    assert names_in(tmp_path) == ["part-00000.parquet"] and pq.read_table(tmp_path).schema.equals(SCHEMA)


def test_an_earlier_export_is_replaced_only_if_asked_and_none_of_it_stays(run, tmp_path, capsys):
    plan = passes_of(open_store(str(run)))[0].plan
    schema, metadata = parquet_format(plan, columns_of(plan, "parquet", []))
    store = LocalStore(str(tmp_path / "out"))
    for number in range(3):
        sink = PartsSink(store.put, schema, metadata, 2**20)
        sink.count = number
        sink.close()
    for name in ("notes.txt", "part-of-mine.parquet"):
        (tmp_path / "out" / name).write_text("the user's")
    arguments = ["export", str(run), *PARQUET, "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "has part-00000.parquet already; --overwrite replaces it" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert names_in(tmp_path / "out") == ["_SUCCESS", "notes.txt", "part-00000.parquet", "part-of-mine.parquet"]


def test_an_export_that_breaks_off_has_no_mark(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ["export", str(run), *PARQUET, "--out", str(out), "--overwrite"]
    assert main(arguments) == 0

    def full(*_: object) -> None:
        raise StoreError("full")

    with monkeypatch.context() as patch:
        patch.setattr(PartsSink, "close", full)
        assert main(arguments) == 1
    assert "_SUCCESS" not in names_in(out)
    assert main(arguments) == 0 and names_in(out) == ["_SUCCESS", "part-00000.parquet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "csv", "--file-mb", "1"], "--file-mb: does not apply to --format csv"),
        ([*PARQUET, "--errors", "e.parquet"], "--errors: does not apply with --file-mb"),
    ],
)
def test_what_several_files_can_not_be_is_refused(run, tmp_path, words, message, capsys):
    assert main(["export", str(run), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["0", "5000", "-1", "many"])
def test_a_size_that_no_file_may_have_is_refused(run, size, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["export", str(run), "--format", "parquet", "--out", "x", "--file-mb", size])
    assert caught.value.code == 2 and "allowed: 1 to 4096" in capsys.readouterr().err


@pytest.mark.s3
def test_on_s3_they_are_those_of_a_disk(run, tmp_path, s3_url, s3_options):
    passes = passes_of(open_store(str(run)))
    columns = columns_of(passes[0].plan, "parquet", [])
    place = Place(f"{s3_url}/out", s3_options)
    for out in (Place(str(tmp_path / "out")), place):
        assert export_parts(passes, columns, out, file_bytes=2**20, overwrite=False, order="plan") == 0
    store = open_store(place)
    assert {stat.name: store.get(stat.name) for stat in store.list()} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }


def test_small_units_are_exported_together(tmp_path):
    place = write_run(tmp_path / "run", [row(number) for number in range(AT_ONCE + 300)], units=50)
    passes = passes_of(open_store(str(place)))
    names = passes[0].plan.schema.names
    tables = list(tables_of(passes, names))
    assert 2 <= len(tables) < 25, "of 50 units"
    assert all(table.nbytes < 2 * BYTES_AT_ONCE for table in tables)
    assert plain_rows(pa.concat_tables(tables).select(["id", "nfe", "started_at"])) == [
        {"id": one["id"], "nfe": one["nfe"], "started_at": one["started_at"].isoformat()}
        for one in (row(number) for number in range(AT_ONCE + 300))
    ]
