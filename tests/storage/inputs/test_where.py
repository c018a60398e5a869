"""`input.where` keeps the rows that it says, and runs nothing."""

import pyarrow as pa
import pytest

from draftmill.storage.inputs.where import parse_where

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
