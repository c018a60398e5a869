"""The result schema, its Parquet form, and results as datasets, pandas, DuckDB and polars read them."""

import re
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.records import (
    SCHEMA,
    TIMING_COLUMNS,
    TRACE_SCHEMA,
    read_results,
    schema_of,
    table_from_rows,
)
from draftmill.storage.stores.store import open_store
from tests.storage.inputs.tables import failed_row, result_row, unit_table
from tests.storage.inputs.test_kept import TYPES

CONTRACT_ORDER = re.findall(
    r"\w+",
    "id unit pass attempt status error_kind error_stage error text fills tokens prompt_tokens new_tokens finish logprob "
    "decoder model drafter key nfe nfe_draft iterations proposed accepted accept_hist wait_s prefill_s decode_s total_s "
    "device_s batch_rows pad_fraction worker node started_at metrics token_logprobs nfe_kinds truncated_tokens endpoint "
    "token_texts sample is_greedy logprob_stderr request_model top_logprobs length_logprob constraint lengths_tried reused",
)


def test_the_schema_is_the_contracts_in_its_order():
    assert SCHEMA.names == CONTRACT_ORDER
    assert TIMING_COLUMNS.issubset(SCHEMA.names)
    assert {field.name for field in SCHEMA if not field.nullable} == {"id", "unit", "pass", "attempt", "status"}


def test_rows_come_back_as_they_were():
    started = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    rows = [result_row(0, started_at=started), failed_row(1)]
    again = read_parquet(write_parquet(table_from_rows(rows), {})).to_pylist()
    assert again[0]["key"] == 2**64 - 1
    assert again[0]["metrics"] == {"bits_per_byte": 1.0}
    assert again[0]["started_at"] == started
    assert again[0]["fills"] == [{"start": 1, "end": 3, "text": "ab"}]
    assert again[0]["text"] == "text 0 é\n"
    assert again[1]["text"] is None and again[1]["error_kind"] == "bad_json"


def test_an_empty_unit_is_a_file_too():
    again = read_parquet(write_parquet(table_from_rows([]), {"unit": "1"}))
    assert again.num_rows == 0 and again.schema.equals(SCHEMA)


def test_our_own_mistakes_are_caught():
    with pytest.raises(AssertionError, match="nfee"):
        table_from_rows([{**result_row(0), "nfee": 1}])
    with pytest.raises(AssertionError, match="metrics"):
        table_from_rows([{**result_row(0), "metrics": {"exact": 1.0}}])
    with pytest.raises(AssertionError, match="status"):
        table_from_rows([{**result_row(0), "status": None}])


def test_text_without_a_utf8_form_does_not_lose_the_row():
    table = table_from_rows([failed_row(0) | {"id": "bad\udce9name:0", "error": "x \ud800"}])
    assert read_parquet(write_parquet(table, {})).column("id").to_pylist() == ["bad?name:0"]


def test_the_file_says_what_it_is():
    data = write_parquet(unit_table(), {"unit": "17", "fingerprint": "f00"})
    assert parquet_metadata(read_parquet(data, columns=["id"]).schema) == {"unit": "17", "fingerprint": "f00"}
    footer = pq.ParquetFile(pa.BufferReader(data)).metadata
    assert footer.metadata[b"draftmill.fingerprint"] == b"f00"
    columns = [footer.row_group(0).column(index) for index in range(footer.num_columns)]
    by_name = {column.path_in_schema: column for column in columns}
    assert {column.compression for column in columns} == {"ZSTD"}
    assert by_name["id"].is_stats_set and by_name["id"].has_offset_index
    assert "RLE_DICTIONARY" in by_name["status"].encodings
    assert "RLE_DICTIONARY" not in by_name["text"].encodings


def test_equal_tables_give_equal_bytes():
    assert write_parquet(unit_table(), {"unit": "1"}) == write_parquet(unit_table(), {"unit": "1"})


def test_every_flipped_bit_in_the_pages_is_noticed():
    data = write_parquet(unit_table(rows=50), {})
    end = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(0).total_compressed_size
    for position in range(40, end, 17):
        broken = bytearray(data)
        broken[position] ^= 4
        with pytest.raises((OSError, pa.ArrowException)):
            read_parquet(bytes(broken))


def test_results_are_read_unit_by_unit(tmp_path):
    store = open_store(str(tmp_path))
    for unit in (2, 0, 1):
        store.create(f"data/unit-{unit:08d}.parquet", write_parquet(unit_table(unit=unit), {}))
    tables = list(read_results(store, columns=["id", "unit"]))
    assert [table.column("unit").to_pylist()[0] for table in tables] == [0, 1, 2]
    assert tables[0].column_names == ["id", "unit"]
    assert len(list(read_results(store, objects=["data/unit-00000001.parquet"]))) == 1


def test_a_trace_has_one_row_per_iteration():
    row = {
        "id": "a",
        "unit": 0,
        "pass": 1,
        "iteration": 2,
        "nfe": 1,
        "proposed": [5],
        "committed": [5, 6],
        "positions": [1, 2],
        "sample": 0,
    }
    assert table_from_rows([row], schema=TRACE_SCHEMA).to_pylist() == [row]


def test_every_column_of_the_contract_is_typed_as_it_says():
    types = {field.name: re.sub(r"\s", "", str(field.type)) for field in SCHEMA}
    assert types["key"] == "uint64" and types["started_at"] == "timestamp[us,tz=UTC]"
    assert types["batch_rows"] == types["pad_fraction"] == "float"
    assert types["metrics"] == "struct<bits_per_byte:double>"
    assert types["worker"].startswith("dictionary<values=string")


STARTED = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def kept_schema() -> pa.Schema:
    """A kept column of every type that an input may have, as the plan stores it, and two with a dot in their names."""
    types = KeptTypes([*TYPES, "a.b"])
    types.see_types({name: kind for name, (kind, _) in TYPES.items()} | {"a.b": pa.string()})
    return types.schema()


def rows() -> list[dict[str, Any]]:
    kept = {"int8": 7, "uint64": 2**53, "structs": [{"a": 1}], "a.b": "dotted", "a map": '[["a", 1]]'}
    score: dict[str, Any] = {
        "metrics": {"bits_per_byte": 1.25},
        "token_logprobs": [-0.5],
        "is_greedy": True,
        "nfe_kinds": None,
    }
    block: dict[str, Any] = {
        "metrics": None,
        "nfe_kinds": {"prefill": 1, "draft": 2, "verify": 3, "commit": 0},
        "keep": None,
    }
    told: dict[str, Any] = {"endpoint": "/v1/completions", "request_model": "tiny", "token_texts": ["a", "\n"]}
    return [
        result_row(0, started_at=STARTED, keep=kept, **score),
        result_row(1, **block, **told),
        failed_row(2) | {"key": 2},
    ]


@pytest.fixture
def files(tmp_path):
    """Two unit files: one with every kind of value, one whose rows failed before anything was decoded."""
    schema = schema_of(kept_schema())
    for unit, part in enumerate((rows(), [failed_row(3) | {"key": 3}, failed_row(4) | {"key": 4}])):
        data = write_parquet(table_from_rows(part, schema=schema), {"unit": str(unit)})
        (tmp_path / f"unit-{unit:08d}.parquet").write_bytes(data)
    return tmp_path


def check(read: list[dict[str, Any]]) -> None:
    """The rows have the values that were written, in the reader's own Python types."""
    expected = rows()
    assert [row["id"] for row in read] == [f"file.jsonl:{number}" for number in range(5)]
    assert list(read[0]) == [*SCHEMA.names, "keep"]
    for found, written in zip(read, expected, strict=False):
        for name in ("text", "status", "decoder", "model", "worker", "nfe", "logprob", "endpoint", "request_model"):
            assert found[name] == written.get(name), name
    assert read[0]["key"] == 2**64 - 1 and read[1]["key"] == 2**64 - 2
    assert list(read[0]["tokens"]) == expected[0]["tokens"] and list(read[1]["token_texts"]) == ["a", "\n"]
    assert [dict(fill) for fill in read[0]["fills"]] == expected[0]["fills"]
    assert dict(read[0]["metrics"]) == {"bits_per_byte": 1.25}
    assert dict(read[1]["nfe_kinds"]) == expected[1]["nfe_kinds"]
    keep = dict(read[0]["keep"])
    assert keep["uint64"] == 2**53 and keep["a.b"] == "dotted" and keep["a map"] == '[["a", 1]]'
    assert [dict(item) for item in keep["structs"]] == [{"a": 1}]
    assert read[0]["started_at"] == STARTED


def test_datasets_reads_results(files, tmp_path):
    import datasets

    found = datasets.load_dataset(
        "parquet", data_files=f"{files}/*.parquet", cache_dir=str(tmp_path / "c"), split="train"
    )
    check(list(found))


def test_pandas_reads_results(files):
    import pandas as pd

    found = pd.read_parquet(files)
    assert str(found["key"].dtype) == "uint64", "every row has a key, so pandas keeps all of its bits"
    read = found.astype(object).where(found.notna(), None).to_dict("records")
    check(read)


def test_duckdb_reads_results(files):
    import duckdb

    found: Any = duckdb.sql(f"SELECT * FROM read_parquet('{files}/*.parquet') ORDER BY id")
    check(found.to_arrow_table().to_pylist())
    query = f"SELECT metrics.bits_per_byte, nfe_kinds.verify, keep['a.b'] FROM read_parquet('{files}/*.parquet') ORDER BY id"
    shown: Any = duckdb.sql(query)
    assert shown.fetchall()[:2] == [(1.25, None, "dotted"), (None, 3, None)]


def test_polars_reads_results(files):
    import polars as pl

    found = pl.read_parquet(f"{files}/*.parquet").sort("id")
    check(found.to_dicts())
    shares = found.select(pl.col("metrics").struct.field("bits_per_byte"), pl.col("nfe_kinds").struct.field("verify"))
    assert shares.rows()[:2] == [(1.25, None), (None, 3)]
