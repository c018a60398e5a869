"""Errors cross process borders whole, and say where the user should look."""

import copy

import pytest

from draftmill.storage.errors import RowError, UserError, brief, list_names
from draftmill.storage.runs.lease import LeaseHeld
from draftmill.storage.stores.store import AlreadyExists, Stat


def test_a_user_error_leads_with_its_field():
    assert str(UserError("nothing is at 'x'", field="input.path")) == "input.path: nothing is at 'x'"
    assert str(UserError("plain")) == "plain"
    assert isinstance(UserError("plain"), ValueError)


def test_a_row_error_has_kind_stage_and_message():
    error = RowError("bad_json", "read", "line 3")
    assert (error.kind, error.stage, error.message) == ("bad_json", "read", "line 3")


@pytest.mark.parametrize(
    "error",
    [
        UserError("message", field="a.b"),
        RowError("bad_row", "read", "message"),
        LeaseHeld("owner", 5.0),
        AlreadyExists(Stat("a", 1, "e", {"unit": "1"})),
    ],
)
def test_an_error_survives_the_way_between_processes(error):
    again = copy.copy(error)  # by the same protocol that messages between workers use
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_messages_quote_little_of_what_is_long():
    assert brief("short") == "'short'" and brief("x" * 10**6) == f"'{'x' * 80}'... (1,000,000 characters)"
    assert list_names([]) == "nothing" and list_names({"a": 1, "b": 2}) == "'a', 'b'"
    many = list_names("y" * 1000 for _ in range(5000))
    assert many.endswith(" and 4,988 more") and len(many) < 2000
