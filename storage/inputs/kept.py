"""Input columns that are copied into the results (`input.keep`): their types, and their values in the struct `keep`.

A column keeps its type from the inputs. If files or rows differ so that no Arrow type holds all values unchanged, the column is
JSON text, and its field's metadata says so. Knows no spec and no plan.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.storage.errors import RowError
from draftmill.storage.parquet import read_parquet, write_parquet

KEEP = "keep"
"""The last column of a run whose spec has `input.keep`: a struct of these columns of the inputs."""

_JSON_KEY: Final = b"draftmill.json"
EXACT: Final = 2**53
"""Whole numbers up to here are exact as float64."""

MOST_FIELDS = 256
MOST_DEPTH = 16
"""Objects with more fields (over all rows), or deeper ones, are mappings rather than records and become JSON."""

_types = pa.types
_SIMPLE: Final = (
    _types.is_boolean, _types.is_integer, _types.is_float32, _types.is_float64, _types.is_string, _types.is_large_string,
    _types.is_binary, _types.is_large_binary, _types.is_date, _types.is_time, _types.is_timestamp, _types.is_decimal128,
)  # fmt: skip
_SCALARS: Final[Mapping[type, pa.DataType]] = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


class KeptTypes:
    """Finds the type of each kept column from the inputs seen so far, in constant memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._columns = {name: _Column() for name in names}

    def see(self, values: Mapping[str, Any]) -> None:
        """Add a row's values."""
        for name, column in self._columns.items():
            value = field_of(values, name)
            column.is_there |= value is not None or name in values
            if value is not None:
                column.see(value)

    def see_types(self, types: Mapping[str, pa.DataType]) -> None:
        """Add a table's column types."""
        for name, kind in types.items():
            self._columns[name].see_type(kind)

    def add(self, other: KeptTypes) -> None:
        """Add what another process saw of rows; the same as if this object had seen them."""
        for name, column in self._columns.items():
            column.add(other._columns[name])

    def absent(self) -> list[str]:
        """The columns that no input has."""
        return [name for name, column in self._columns.items() if not column.is_there]

    def schema(self) -> pa.Schema:
        """The fields of the struct, all nullable, in the order of the names."""
        return pa.schema([column.field(name) for name, column in self._columns.items()])


class _Column:
    """The state of one column: `kind` is its type so far, None before the first value; `as_json` is final once set."""

    def __init__(self) -> None:
        self.is_there = False
        self.as_json = False
        self.is_wide = False  # a whole number that float64 does not hold
        self.kind: pa.DataType | None = None
        self._scalars: set[type] = set()

    def see(self, value: Any) -> None:
        kind = type(value)
        if kind is int and not -EXACT <= value <= EXACT:
            self.is_wide = True
            self.as_json |= not -(2**63) <= value < 2**63
        if kind in self._scalars or self.as_json:
            return
        if kind in _SCALARS:
            self._scalars.add(kind)
            self._join(_SCALARS[kind])
            return
        self.is_wide |= _has_wide(value)
        try:
            self._join(pa.array([value]).type)  # infer_type alone takes lists of mixed values
        except (pa.ArrowException, ValueError, OverflowError, TypeError, RecursionError):
            self.as_json = True

    def see_type(self, kind: pa.DataType) -> None:
        self.is_there = True
        if not _types.is_null(kind):
            self._join(_plain_type(kind))

    def add(self, other: _Column) -> None:
        if other.kind is not None and not self.as_json:
            self._join(other.kind)
        self.is_there |= other.is_there
        self.as_json |= other.as_json
        self.is_wide |= other.is_wide

    def _join(self, kind: pa.DataType) -> None:
        if self.kind is not None and self.kind != kind:
            if _family(self.kind) != _family(kind):
                self.as_json = True
                return
            try:
                both = [pa.schema([pa.field("x", part)]) for part in (self.kind, kind)]
                kind = pa.unify_schemas(both, promote_options="permissive").field("x").type
            except pa.ArrowException:
                self.as_json = True
                return
        self.kind = kind
        self.as_json |= _num_fields(kind) > MOST_FIELDS

    def field(self, name: str) -> pa.Field:
        kind = pa.string() if self.kind is None or _types.is_null(self.kind) else self.kind
        inexact = self.is_wide and _has_float(kind)
        if self.as_json or inexact or not (_is_kept_as_it_is(kind) and _comes_back(kind)):
            return pa.field(name, pa.string(), metadata={_JSON_KEY: b"1"})
        return pa.field(name, kind)


def _has_wide(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_wide, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_wide, value))
    return type(value) is int and not -EXACT <= value <= EXACT


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type as Parquet has it and nullable throughout, without dictionaries and extensions."""
    if _types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if _types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain_type(field.type)) for field in kind])
    if _types.is_list(kind) or _types.is_large_list(kind) or _types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if _types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", tz=kind.tz)
    if _types.is_date(kind):
        return pa.date32()
    return pa.time32("ms") if _types.is_time32(kind) else kind


def _family(kind: pa.DataType) -> str:
    """The family of a type; types of different families have no common type that keeps values unchanged."""
    if _types.is_string(kind) or _types.is_large_string(kind):
        return "text"
    if _types.is_binary(kind) or _types.is_large_binary(kind):
        return "bytes"
    if _types.is_integer(kind) or _types.is_floating(kind):
        return "number"
    return "nested" if _types.is_nested(kind) else str(kind)


def _inner(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(index).type for index in range(kind.num_fields)]


def _num_fields(kind: pa.DataType) -> int:
    return 1 + sum(map(_num_fields, _inner(kind)))


def _has_float(kind: pa.DataType) -> bool:
    return bool(_types.is_floating(kind)) or any(map(_has_float, _inner(kind)))


def _is_kept_as_it_is(kind: pa.DataType, depth: int = 0) -> bool:
    """Whether values of the type survive a round trip through Python, and Parquet supports them."""
    if _types.is_nested(kind):
        # Maps become JSON: Hugging Face's `datasets` can't read them.
        known = _types.is_list(kind) or _types.is_large_list(kind) or _types.is_struct(kind)
        inner = _inner(kind)
        is_known = bool(known and inner and depth < MOST_DEPTH)
        return is_known and all(_is_kept_as_it_is(part, depth + 1) for part in inner)
    return any(is_kind(kind) for is_kind in _SIMPLE)


def _comes_back(kind: pa.DataType) -> bool:
    schema = pa.schema([pa.field("x", kind)])
    return bool(read_parquet(write_parquet(schema.empty_table(), {})).schema.remove_metadata().equals(schema))


# ---- values


def names_read(names: Iterable[str]) -> dict[str, str]:
    """The kept columns as readers take them (draftmill.storage.inputs.reader.iterate)."""
    return {f"{KEEP}.{name}": name for name in names}


def kept_values(values: Mapping[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return the row's values for the struct; RowError if one does not have the type in the plan."""
    return {field.name: _kept_value(field_of(values, field.name), field) for field in schema}


def _kept_value(value: Any, field: pa.Field) -> Any:
    if is_json(field):
        return None if value is None else json.dumps(plain(value), ensure_ascii=False)
    if value is None or _SCALARS.get(type(value)) == field.type:
        return value
    try:
        pa.array([value], type=field.type)
    except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
        reason = f"the kept column {field.name!r} is not of type {field.type}, which the plan found: {error}"
        raise RowError("bad_row", "read", reason[:1000]) from None
    return value


def plain(value: Any) -> Any:
    """The value in JSON form: times as ISO 8601, bytes as text, and null for NaN and infinity."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def is_json(field: pa.Field) -> bool:
    """Whether a field of the struct holds its values as JSON text."""
    return _JSON_KEY in (field.metadata or {})


def to_json(values: Mapping[str, Any] | None, schema: pa.Schema) -> dict[str, Any] | None:
    """The struct of a result row in JSON form, with JSON fields parsed instead of as text."""
    if values is None:
        return None
    return {
        field.name: json.loads(value) if is_json(field) and value is not None else plain(value)
        for field in schema
        for value in [values[field.name]]
    }


# ---- in a plan


def schema_to_json(schema: pa.Schema | None) -> dict[str, Any] | None:
    """The fields in the form of `_plan.json`: each column's type in words, and the Arrow schema in base64."""
    if schema is None:
        return None
    words = {field.name: "json" if is_json(field) else str(field.type) for field in schema}
    return {"columns": words, "schema": base64.b64encode(schema.serialize().to_pybytes()).decode()}


def schema_from_json(content: Mapping[str, Any] | None) -> pa.Schema | None:
    """The inverse of `schema_to_json`. Raises ValueError (pa.ArrowInvalid is one) if it is damaged."""
    if content is None:
        return None
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(content["schema"], validate=True)))


# ---- nested columns by dotted names, such as `meta.lang`
#
# `meta.lang` is the field `lang` of the struct (or JSON object) `meta`. A column whose name is exactly `meta.lang` takes
# precedence.

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
    whole = batch.to_struct_array()
    arrays = {column: array for column in columns if (array := _inside(whole, column)) is not None}
    if not arrays:  # a batch without columns would have no rows
        return batch
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def types_in(schema: pa.Schema, columns: Iterable[str]) -> dict[str, pa.DataType]:
    """The types of these columns, if a table of this schema has them."""
    empty = pa.RecordBatch.from_pylist([], schema=schema).to_struct_array()
    return {column: array.type for column in columns if (array := _inside(empty, column)) is not None}


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
