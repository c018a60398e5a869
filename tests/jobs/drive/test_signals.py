"""SIGTERM before, while and after Ray starts: an interruption like Ctrl-C, never an end of its own kind."""

import os
import signal
import sys

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.drive.driver import StopFlag, interruptible
from draftmill.jobs.drive.ray_session import _own_sigterm


def test_sigterm_interrupts_as_ctrl_c_does_and_only_inside():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_ray_does_with_the_signal_is_undone_and_its_own_exit_is_an_interruption():
    with interruptible():
        ours = signal.getsignal(signal.SIGTERM)
        with _own_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray takes it while it starts
        assert signal.getsignal(signal.SIGTERM) is ours
        with pytest.raises(KeyboardInterrupt), _own_sigterm():
            sys.exit(15)


def test_in_the_drivers_loop_a_signal_is_a_flag_and_a_second_one_is_urgent():
    stop = StopFlag()
    with interruptible(), stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reason, stop.urgent) == ("SIGTERM", False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.reason, stop.urgent) == ("SIGTERM", True)


class Signalling:
    """A finder of modules that, asked for one, sends this process a SIGTERM first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.name:
            os.kill(os.getpid(), signal.SIGTERM)


def not_ours(number: int, frame) -> None:
    raise AssertionError("SIGTERM would have ended the process")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("draftmill.jobs.run.job", ["run", "none.yaml"]),
        ("draftmill.jobs.run.job", ["rerun", "none", "--failed"]),
    ],
)
def test_sigterm_while_the_command_is_still_being_imported_ends_with_4(name, arguments, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Signalling(name), *sys.meta_path])
    before = signal.signal(signal.SIGTERM, not_ours)
    try:
        assert main(arguments) == 4
    finally:
        signal.signal(signal.SIGTERM, before)
