"""A row's id, key and text."""

from __future__ import annotations

from typing import Any

import pytest

from draftmill.actors.rows.row import row_id, row_key, text_of
from draftmill.actors.task import Columns
from draftmill.decoders.draws.keys import sample_key
from draftmill.storage.errors import RowError


def test_an_id_is_taken_where_there_is_one() -> None:
    assert row_id({"id": 7}, Columns()) == "7"
    assert row_id({"name": "a"}, Columns(id="name")) == "a"
    assert row_id({"text": "a"}, Columns()) is None
    assert row_id({"id": None}, Columns()) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "missing_column"),
        (1.5, "bad_row"),
        (True, "bad_row"),
        ("", "bad_row"),
        ([1], "bad_row"),
        ("x" * 5000, "bad_row"),
    ],
)
def test_a_named_id_must_be_usable(value: Any, kind: str) -> None:
    with pytest.raises(RowError) as caught:
        row_id({"name": value}, Columns(id="name"))
    assert caught.value.kind == kind and len(str(caught.value)) < 1200


def test_a_rows_own_seed_replaces_the_jobs() -> None:
    columns = Columns(seed="s")
    assert row_key({"s": 3}, columns, job_seed=1, sample_id="a") == sample_key(3, "a")
    assert row_key({"s": 3}, Columns(), job_seed=1, sample_id="a") == sample_key(1, "a")
    for seed in (2**63, "3", None, 1.0):
        with pytest.raises(RowError):
            row_key({"s": seed}, columns, job_seed=1, sample_id="a")


def test_text_falls_back_to_a_prompt() -> None:
    assert text_of({"prompt": "p"}, Columns()) == "p"
    assert text_of({"prompt": "p", "text": "t"}, Columns()) == "t"
    with pytest.raises(RowError, match=r"missing_column.*'text' is missing; the row has 'a'"):
        text_of({"a": 1}, Columns())


def test_text_that_is_stored_as_bytes_is_text() -> None:
    assert text_of({"text": "für".encode()}, Columns()) == "für"
    assert row_id({"id": b"a-7"}, Columns()) == "a-7"
    for read in (lambda row: text_of(row, Columns()), lambda row: row_id(row, Columns(id="text"))):
        with pytest.raises(RowError, match=r"bad_encoding.*'text' is not valid UTF-8"):
            read({"text": b"f\xfcr"})
