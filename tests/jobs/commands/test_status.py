"""What `draftmill status` says of the driver."""

from __future__ import annotations

import secrets
import subprocess
import sys

from jobs.commands.status import driver_of, state_of
from storage.runs.lease import acquire, this_process
from storage.stores.memory import MemoryStore


def test_a_driver_that_was_killed_is_not_said_to_run():
    store = MemoryStore(secrets.token_hex(8))
    alive = acquire(store, this_process(), 60)
    assert driver_of(store) == this_process() and "running, driver" in state_of(store, driver_of(store))
    alive.release()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    acquire(store, f"{this_process().rpartition(':')[0]}:{process.pid}", 60)
    assert driver_of(store) is None and state_of(store, driver_of(store)).startswith("not running")
