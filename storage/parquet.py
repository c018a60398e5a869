"""Writes and reads our Parquet files, with a checksum check of every page, and checks Arrow data. Knows no schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


# ---- checks of Arrow data from outside before it is read: the IPC format has no checksums, and an invalid offset crashes the
# process
#
# Data that only has an invalid *value* (bytes that are not UTF-8, a time of day above 24 hours) is sound: its row fails, later.

_types = pa.types

THREADS = False
"""Whether Arrow reads in its own threads. They release Python's bytes slightly after the reader gets its table; if the
interpreter exits at that moment it is aborted, and a finished job ends with a signal.
"""


def sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, if all of its values are in valid memory; else raises pa.ArrowInvalid."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for column in batch.columns:
            column.view(plain_form(column.type)).validate(full=True)
    return batch


def plain_form(kind: pa.DataType) -> pa.DataType:
    """The type of the same memory in which any value is allowed: text as bytes, times and dates as whole numbers."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if _types.is_decimal(kind):
        return pa.binary(kind.byte_width)
    if _types.is_time(kind) or _types.is_date(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if _types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if _types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if _types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if _types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if _types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if _types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, plain_form(kind.value_type), kind.ordered)
    return kind


_PLAIN = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_form(field.type))
