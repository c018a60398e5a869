"""What is kept of the inputs: columns with their types, where files and rows differ, too, and rows as `input.where` says."""

import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from draftmill.storage.errors import RowError
from draftmill.storage.inputs.kept import KeptTypes, is_json, kept_values, schema_from_json, schema_to_json, to_json
from draftmill.storage.inputs.where import parse_where
from draftmill.storage.parquet import read_parquet, write_parquet


def fields_of(rows: list[dict], *names: str) -> pa.Schema:
    types = KeptTypes(names)
    for row in rows:
        types.see(row)
    return types.schema()


def round_trip(rows: list[dict], schema: pa.Schema) -> list:
    """What an export says of rows that were kept and written."""
    table = pa.table({"keep": pa.array([kept_values(row, schema) for row in rows], pa.struct(list(schema)))})
    return [to_json(row, schema) for row in read_parquet(write_parquet(table, {}))["keep"].to_pylist()]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", None], "string"),
        ([1, 2], "int64"),
        ([1, 2.5], "double"),
        ([True, None], "bool"),
        ([None, None], "string"),
        ([["x"], []], "list<item: string>"),
        ([{"n": 1}, {"n": None}], "struct<n: int64>"),
        ([1, "a"], "json"),
        ([True, 1], "json"),
        ([2**53 + 1, 0.5], "json"),
        ([[2**60], [0.5]], "json"),
        ([2**53 + 1, 1], "int64"),
        ([2**70, 1], "json"),
        ([{}, {}], "json"),
        ([[1, "a"]], "json"),
        ([{"n": 1}, {"n": "x"}], "json"),
        ([{str(number): number} for number in range(300)], "json"),
        ([[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]], "json"),
    ],
)
def test_a_kept_column_has_the_type_of_its_values_or_is_json(values, expected):
    rows = [{"x": value} for value in values]
    schema = fields_of(rows, "x")
    found = "json" if is_json(schema.field("x")) else str(schema.field("x").type)
    assert found == expected
    assert round_trip(rows, schema) == rows, "an export has the values that the input has"
    assert json.dumps(round_trip(rows, schema))


TYPES: dict[str, tuple] = {
    "int8": (pa.int8(), 7),
    "uint64": (pa.uint64(), 2**64 - 1),
    "float32": (pa.float32(), 0.5),
    "a dictionary": (pa.dictionary(pa.int8(), pa.string()), "word"),
    "seconds": (pa.timestamp("s"), datetime.datetime(2026, 1, 2, 3)),
    "nanoseconds": (pa.timestamp("ns", tz="UTC"), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)),
    "a date": (pa.date64(), datetime.date(2026, 1, 2)),
    "a time": (pa.time32("s"), datetime.time(3, 4)),
    "a decimal": (pa.decimal128(9, 2), Decimal("1.25")),
    "bytes": (pa.large_binary(), b"x"),
    "a map": (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    "structs": (pa.list_(pa.struct([pa.field("a", pa.int16(), nullable=False)]), 2), [{"a": 1}, {"a": 2}]),
    "a duration": (pa.duration("s"), datetime.timedelta(seconds=3)),
    "half": (pa.float16(), 0.5),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_column_of_any_type_is_kept(name):
    kind, value = TYPES[name]
    types = KeptTypes(["x"])
    types.see_types({"x": kind})
    schema = types.schema()
    (kept,) = round_trip([{"x": value}], schema)
    assert json.dumps(kept) and kept["x"] is not None
    if name in {"int8", "uint64", "float32", "nanoseconds", "a decimal"}:
        assert schema.field("x").type == kind
    assert is_json(schema.field("x")) == (name in {"a duration", "half", "a map"})


def test_types_of_files_that_differ_are_joined_or_json():
    for first, second, expected in (
        (pa.int32(), pa.int64(), "int64"),
        (pa.string(), pa.large_string(), "large_string"),
        (pa.string(), pa.int64(), "json"),
        (pa.timestamp("us"), pa.string(), "json"),
    ):
        types = KeptTypes(["x"])
        types.see_types({"x": first})
        types.see_types({"x": second})
        field = types.schema().field("x")
        assert ("json" if is_json(field) else str(field.type)) == expected


def test_a_column_that_is_nowhere_is_named_and_a_null_one_is_not():
    types = KeptTypes(["a", "b", "c.d"])
    types.see({"a": None, "c": {"d": 1}})
    assert types.absent() == ["b"]


def test_a_value_of_another_type_than_planned_fails_its_row():
    with pytest.raises(RowError, match="the kept column 'x' is not of type int64"):
        kept_values({"x": "a"}, pa.schema([("x", pa.int64())]))


def test_a_plan_has_the_fields_in_words_and_exactly():
    schema = fields_of([{"a": 1, "b": 1, "m": {"x": "y"}}, {"b": "t"}], "a", "b", "m.x")
    content = json.loads(json.dumps(schema_to_json(schema)))
    assert content["columns"] == {"a": "int64", "b": "json", "m.x": "string"}
    again = schema_from_json(content)
    assert again is not None and again.equals(schema, check_metadata=True) and schema_from_json(None) is None


ROWS = pa.table(
    {
        "n": [1, 2, 3, None],
        "score": [0.5, -1.0, 1.0, 0.0],
        "text": ["a", "b", "it's", "d"],
        "fine": [True, False, True, None],
        "word": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
        "keep": [{"lang": "de", "a b": 1}, {"lang": "en", "a b": 2}, {"lang": None, "a b": 3}, None],
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("score >= 0.5", [0, 2]),
        ("score > -1", [0, 2, 3]),
        ("n == 2 or text == 'a'", [0, 1]),
        ("n != 2", [0, 2]),
        ("not n == 2", [0, 2]),
        ('0 < n < 3 and not (text == "b")', [0]),
        ('text == "it\'s"', [2]),
        ("text in ['a', 'd']", [0, 3]),
        ("n not in (1, 2)", [2, 3]),
        ("n is None", [3]),
        ("n is not None and fine", [0, 2]),
        ("fine == False", [1]),
        ("word == 'x'", [0, 2]),
        ("keep.lang == 'de'", [0]),
        ("keep['a b'] >= 2", [1, 2]),
        ("keep.lang is None", [2, 3]),
        ("n <= score", []),
    ],
)
def test_a_filter_keeps_the_rows_that_it_says(where, rows):
    kept = ROWS.append_column("row", pa.array(range(4))).filter(parse_where(where))
    assert kept["row"].to_pylist() == rows


@pytest.mark.parametrize(
    "where",
    [
        "n = 1", "n >= 1 AND fine", "", "f(n)", "n + 1 > 2", "__import__('os').system('x')", "text.upper() == 'A'",
        "[n for n in text]", "n in text", "n is fine", "lambda: 1", "(" * 300 + "n" + ")" * 300, "n == None == 1 if fine else n",
        "n\0", "x" * 5000, "keep[0] == 1", "n := 1", "b'a' == text", "f'{n}' == text",
    ],
)  # fmt: skip
def test_what_is_no_filter_is_refused(where):
    with pytest.raises(ValueError, match=r"allowed|brackets"):
        parse_where(where)
