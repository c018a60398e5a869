"""Results as other programs read them: Hugging Face's datasets, pandas, DuckDB and polars."""

import datetime
from typing import Any

import pyarrow as pa
import pytest

from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.parquet import write_parquet
from draftmill.storage.runs.records import SCHEMA, schema_of, table_from_rows
from tests.storage.inputs.tables import failed_row, result_row
from tests.storage.inputs.test_kept import TYPES

STARTED = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)


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
