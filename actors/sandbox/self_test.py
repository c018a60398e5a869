"""Finds a sandbox that holds on this machine, by trying to break out of it; refuses to run code where none does."""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

from draftmill.actors.sandbox.sandbox import Kind, Limits, Sandbox, SandboxError, supported
from draftmill.storage.errors import UserError

Wanted = Literal["auto", "kernel", "bwrap"]

_PROGRAM = """
import collections, json, math, os, random, re, socket, threading
def refused(call, what):
    try:
        call()
    except OSError:
        return
    raise SystemExit(what)
refused(lambda: socket.socket(), "a socket could be made")
refused(lambda: open({outside!r}, "w"), "a file outside could be made")
refused(lambda: open({secret!r}).read(), "a file outside could be read")
refused(lambda: open({secret!r}, "a"), "a file outside could be changed")
refused(lambda: os.chmod({secret!r}, 0), "the mode of a file outside could be changed")
refused(lambda: os.kill(os.getppid(), 0), "a signal could be sent")
refused(lambda: os.setsid(), "the program could leave its group")
refused(lambda: os.fork() or os._exit(0), "the program could fork")
if os.getuid() == 0:
    raise SystemExit("the program is root")
open("inside", "w").write("x")
thread = threading.Thread(target=print)
thread.start()
thread.join()
"""


def find_sandbox(wanted: Wanted = "auto", *, field: str = "sandbox") -> Sandbox:
    """The sandbox to use: `kernel` where it holds, else `bwrap`; UserError with the reasons where neither does."""
    kinds: tuple[Kind, ...] = ("kernel", "bwrap") if wanted == "auto" else (wanted,)
    reasons = []
    for kind in kinds:
        reason = problem(kind)
        if reason is None:
            return Sandbox(kind)
        reasons.append(f"{kind}: {reason}")
    raise UserError(f"no sandbox holds on this machine, so no code is run ({'; '.join(reasons)})", field=field)


@lru_cache(maxsize=4)
def problem(kind: Kind) -> str | None:
    """Why this kind of sandbox does not hold here; None if it does. Tried once per process."""
    if not supported():
        return "only Linux on x86_64 and aarch64 is supported"
    if kind == "bwrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o777)
        secret = place / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        program = _PROGRAM.format(outside=str(place / "made"), secret=str(secret))
        try:
            ran = Sandbox(kind).run(program, Limits(timeout_s=60))
        except (SandboxError, OSError) as error:
            return str(error)
        if ran.passed and not (place / "made").exists() and secret.read_text() == "secret":
            return None
        return (ran.output.strip().splitlines() or ["the self-test did not end"])[-1]
