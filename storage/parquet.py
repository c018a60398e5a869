"""Writes and reads our Parquet files, with a checksum check of every page. Knows no schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.storage.arrow_validation import THREADS

KEY_PREFIX = "draftmill."
"""Prefix of our Parquet metadata keys: schema_version, fingerprint, unit, pass, code_version, counts."""

_DICTIONARY_COLUMNS = (
    *("unit", "pass", "status", "error_kind", "error_stage", "finish", "decoder", "model", "drafter", "worker", "node"),
    *("endpoint", "request_model"),
)


def write_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """Return the table as one closed Parquet file: zstd, page index, page checksums, statistics, and the metadata.

    Keys get KEY_PREFIX. Equal tables and metadata give equal bytes.
    """
    sink = pa.BufferOutputStream()
    with parquet_writer(sink, table.schema, metadata) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
    return bytes(sink.getvalue().to_pybytes())


def parquet_writer(sink: Any, schema: pa.Schema, metadata: Mapping[str, str]) -> pq.ParquetWriter:
    """A writer of one such file, which takes tables of `schema` one after the other, each as a row group.

    As a context manager it completes the file even on an exception, so `sink` must not be a store.
    """
    own = {f"{KEY_PREFIX}{key}": value for key, value in metadata.items()}
    return pq.ParquetWriter(
        sink,
        schema.with_metadata(own),
        compression="zstd",
        use_dictionary=[name for name in _DICTIONARY_COLUMNS if name in schema.names],
        write_statistics=True,
        write_page_index=True,
        write_page_checksum=True,
    )


def read_parquet(data: bytes, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of a file that `write_parquet` made, every page checked against its checksum.

    Raises pa.ArrowInvalid or OSError if it is damaged.
    """
    source = pa.BufferReader(data)
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=THREADS)


def parquet_metadata(schema: pa.Schema) -> dict[str, str]:
    """Return our own key-value metadata of a table's schema, without KEY_PREFIX."""
    pairs = ((key.decode(), value.decode()) for key, value in (schema.metadata or {}).items())
    return {key.removeprefix(KEY_PREFIX): value for key, value in pairs if key.startswith(KEY_PREFIX)}
