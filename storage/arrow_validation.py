"""Checks Arrow data from outside before it is read: the IPC format has no checksums, and an invalid offset crashes the process.

Data that only has an invalid *value* (bytes that are not UTF-8, a time of day above 24 hours) is sound: its row fails, later.
"""

from __future__ import annotations

import pyarrow as pa

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
