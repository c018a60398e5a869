"""Metrics of one's own: what the function gets and may return, and how errors of it look."""

import pytest

from draftmill.actors.metrics.base import MeasuredRow
from draftmill.actors.metrics.registry import load_function, own_metric
from draftmill.actors.metrics.settings import OwnMetric
from draftmill.storage.errors import UserError
from tests.actors.fakes import answers_of

ROW = MeasuredRow("a", 1, "text", [1, 2], ("first", "second"), {"label": 3}, {"id": "a", "nfe": 5})


def measured(source: str, **settings):
    meter = own_metric(OwnMetric(kind="file", path="mine.py", **settings), load_function(source, "mine.py", field="x"))
    return answers_of(meter.measure([ROW]))[0]


def test_a_function_gets_the_whole_row():
    source = """
def measure(row):
    assert row["id"] == "a" and row["sample"] == 1 and row["nfe"] == 5 and row["tokens"] == [1, 2]
    assert row["reference"] == "first" and row["references"] == ["first", "second"]
    return row["keep"]["label"]
"""
    assert measured(source) == (3.0,)


def test_it_may_return_several_values_or_none():
    both = "def measure(row):\n    return {'x': 1, 'y': None}\n"
    assert measured(both, values=("x", "y", "z")) == (1.0, None, None)
    assert measured("def measure(row):\n    return None\n") is None
    assert measured("def measure(row):\n    return True\n") == (1.0,)


@pytest.mark.parametrize(
    "body", ["raise KeyError('k')", "return {'x': 1}", "return 'word'", "return float('nan')", "raise SystemExit(1)"]
)
def test_what_it_does_wrong_is_the_rows_error(body):
    assert isinstance(measured(f"def measure(row):\n    {body}\n"), Exception)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "has no function measure"),
        ("import nothing_here\n", "ModuleNotFoundError"),
        ("def (\n", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_metric_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        load_function(source, "mine.py", field="metrics.0")
