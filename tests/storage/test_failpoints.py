"""Failpoints: off by default, exact to the hit, and deadly when asked."""

import os
import signal
import subprocess
import sys

import pytest

from draftmill.storage.failpoints import VARIABLE, FailpointError, failpoint


def test_a_failpoint_does_nothing_unless_named(monkeypatch, failpoints):
    monkeypatch.delenv(VARIABLE, raising=False)
    failpoint("a")
    monkeypatch.setenv(VARIABLE, "b=raise")
    failpoint("a")


def test_a_failpoint_acts_at_the_named_hit_only(monkeypatch, failpoints):
    monkeypatch.setenv(VARIABLE, "a=raise:3, b=sleep:1:0")
    failpoint("a")
    failpoint("b")
    failpoint("a")
    with pytest.raises(FailpointError, match="a"):
        failpoint("a")
    failpoint("a")


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("abort", signal.SIGABRT)])
def test_a_deadly_failpoint_ends_the_process_at_once(action, number):
    code = "from draftmill.storage.failpoints import failpoint\n"
    code += "failpoint('x'); print('alive', flush=True); failpoint('x'); print('not here')"
    environment = os.environ | {VARIABLE: f"x={action}:2"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -number
    assert ended.stdout == "alive\n"


@pytest.mark.parametrize("text", ["a", "a=explode", "a=kill:1:2:3", "a=kill:x"])
def test_a_misspelt_failpoint_is_an_error(text, monkeypatch, failpoints):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError):
        failpoint("a")
