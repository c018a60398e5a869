"""Exit codes: every one of them is in the one table that orders them, and what is over is not started again."""

from types import SimpleNamespace

import pytest

from draftmill.jobs import exit_codes
from draftmill.jobs.exit_codes import FINAL, INTERRUPTED, OK, SEVEREST, TOO_MANY_FAILED, UNEXPECTED, UNUSABLE, severest
from draftmill.jobs.remote.submit import end_of

CODES = {name: value for name, value in vars(exit_codes).items() if type(value) is int and name[0] != "_"}


def test_every_code_has_its_place_in_the_order_of_severity():
    assert sorted(CODES.values()) == sorted(SEVEREST) and len(set(SEVEREST)) == len(SEVEREST)
    assert set(FINAL) < set(SEVEREST)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ([], OK),
        ([OK, OK], OK),
        ([OK, TOO_MANY_FAILED, OK], TOO_MANY_FAILED),
        ([TOO_MANY_FAILED, UNUSABLE], UNUSABLE),
        ([UNUSABLE, UNEXPECTED, TOO_MANY_FAILED], UNEXPECTED),
        ([UNEXPECTED, INTERRUPTED, UNUSABLE], INTERRUPTED),
    ],
)
def test_a_command_that_does_several_things_ends_with_the_severest_code(several, one):
    assert severest(several) == severest(reversed(several)) == one


@pytest.mark.parametrize("code", sorted(set(SEVEREST) - {OK}))
def test_the_code_of_a_submitted_driver_is_handed_on_whatever_it_is(code):
    assert end_of(SimpleNamespace(status="FAILED", driver_exit_code=code, message=""))[0] == code
