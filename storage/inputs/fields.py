"""Reads nested columns by dotted names, such as `meta.lang`.

`meta.lang` is the field `lang` of the struct (or JSON object) `meta`. A column whose name is exactly `meta.lang` takes
precedence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_ABSENT: Final = object()


def field_of(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column or of a field inside of one; None if it does not exist."""
    value = _find(values, name)
    return None if value is _ABSENT else value


def _find(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    for outer, inner in _splits(name):
        if isinstance(values.get(outer), Mapping):
            value = _find(values[outer], inner)
            if value is not _ABSENT:
                return value
    return _ABSENT


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """(`a.b`, `c`), (`a`, `b.c`): the ways to split a dotted name into a column and a field inside of it."""
    parts = name.split(".")
    return ((".".join(parts[:end]), ".".join(parts[end:])) for end in range(len(parts) - 1, 0, -1))


def lift(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The row with each of these nested names as a separate column."""
    more = {name: value for name in names if name not in values and (value := _find(values, name)) is not _ABSENT}
    return values | more if more else values


def outer_columns(names: Sequence[str], columns: Iterable[str]) -> list[str]:
    """The table's columns, out of `names`, that must be read for these columns; in the table's order."""
    outer = {_outer(names, column) for column in columns}
    return [name for name in names if name in outer]


def _outer(names: Sequence[str], column: str) -> str | None:
    """The column of a table that holds this one: itself, or the struct around it."""
    return column if column in names else next((outer for outer, _ in _splits(column) if outer in names), None)


def lift_batch(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """The batch with exactly these columns, if it has them; fields of a struct become separate columns."""
    if set(batch.schema.names) <= set(columns):
        return batch
    arrays = {column: array for column in columns if (array := _array(batch, column)) is not None}
    if not arrays:  # a batch without columns would have no rows
        return batch
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _array(batch: pa.RecordBatch, column: str) -> pa.Array | None:
    outer = _outer(batch.schema.names, column)
    if outer is None:
        return None
    array = batch.column(batch.schema.get_field_index(outer))
    return array if outer == column else _inside(array, column[len(outer) + 1 :])


def types_in(schema: pa.Schema, columns: Iterable[str]) -> dict[str, pa.DataType]:
    """The types of these columns, if a table of this schema has them."""
    empty = pa.RecordBatch.from_pylist([], schema=schema)
    return {column: array.type for column in columns if (array := _array(empty, column)) is not None}


def _inside(array: pa.Array, name: str) -> pa.Array | None:
    """The field of a struct, null where the struct is."""
    if not pa.types.is_struct(array.type):
        return None
    fields = [field.name for field in array.type]
    outer = _outer(fields, name)
    if outer is None:
        return None
    inner = pc.struct_field(array, [fields.index(outer)])
    return inner if outer == name else _inside(inner, name[len(outer) + 1 :])
