"""Runs one Python program in a sandbox: no network, no files but its own folder, bounded time, memory and output.

Two kinds: `kernel` (Landlock, seccomp, limits; no package and no privilege needed) and `bwrap` (user namespaces by bubblewrap,
with the same seccomp filter and limits). Not a virtual machine: the program runs on the same kernel. `find_sandbox` first tries
to break out of a kind, and no code runs where neither holds.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import platform
import secrets
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args

from draftmill.storage.errors import UserError

_SYSCALLS: Final = """
    read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -,
    sched_yield 24 124, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -,
    nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71, clone 56 220,
    fork 57 -, vfork 58 -, execve 59 221, exit 60 93, wait4 61 260, uname 63 160, fcntl 72 25, flock 73 32,
    fsync 74 82, fdatasync 75 83, ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -,
    mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166,
    gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
    getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
    getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156, capget 125 90, rt_sigpending 127 136,
    rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43, fstatfs 138 44,
    getpriority 140 141, sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, prctl 157 167, arch_prctl 158 -, setrlimit 160 164, gettid 186 178, getxattr 191 8,
    lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, time 201 -,
    futex 202 98, sched_getaffinity 204 123, epoll_create 213 -, getdents64 217 61, set_tid_address 218 96,
    restart_syscall 219 128, fadvise64 221 223, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
    exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95, openat 257 56, mkdirat 258 34,
    newfstatat 262 79, unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
    faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, get_robust_list 274 100,
    epoll_pwait 281 22, fallocate 285 47, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
    preadv 295 69, pwritev 296 70, prlimit64 302 261, getcpu 309 168, renameat2 316 276, getrandom 318 278,
    membarrier 324 283, copy_file_range 326 285, statx 332 291, rseq 334 293
"""  # name, number on x86_64, number on aarch64


def _numbers(column: int) -> dict[str, int]:
    entries = [entry.split() for entry in _SYSCALLS.split(",")]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


X86_64: Final = _numbers(1)
AARCH64: Final = _numbers(2)
SINCE_5_1: Final = {
    "close_range": 436, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449,
}  # fmt: skip
"""Numbers that are the same on both machines."""

MACHINES: Final = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
"""By `platform.machine()`: the AUDIT_ARCH value of <linux/audit.h> and the syscall numbers."""

_BY_ARGUMENT: Final = ("clone", "prctl", "prlimit64")
_FORKS: Final = ("fork", "vfork")

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_X32 = 0x40000000
_SHARED = 424  # the first number that all machines share
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_PR_SET_PDEATHSIG = 1


def filter_for(machine: str, *, forks: bool) -> bytes:
    """The filter as an array of `struct sock_filter`; `forks` allows new processes. KeyError for other machines."""
    arch, numbers = MACHINES[machine]
    numbers = numbers | SINCE_5_1
    kill, allow = (_RETURN, 0, 0, _KILL), (_RETURN, 0, 0, _ALLOW)
    denied, unknown = (_RETURN, 0, 0, _refusal(errno.EPERM)), (_RETURN, 0, 0, _refusal(errno.ENOSYS))
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        kill,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        unknown,
    ]
    for name, number in sorted(numbers.items()):
        if name not in _BY_ARGUMENT and (forks or name not in _FORKS):
            program += [(_EQUAL, 0, 1, number), allow]
    program += _on_argument(numbers["prlimit64"], [(_EQUAL, 1, 0, 0), denied])
    program += _on_argument(numbers["prctl"], [(_EQUAL, 0, 1, _PR_SET_PDEATHSIG), denied])
    new_threads_only = [] if forks else [(_ANY_BIT, 1, 0, _CLONE_THREAD), denied]
    program += _on_argument(numbers["clone"], [(_ANY_BIT, 0, 1, _CLONE_NAMESPACES), denied, *new_threads_only])
    program += [(_AT_LEAST, 0, 1, _SHARED), unknown, denied]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


Line = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, value."""


def _refusal(number: int) -> int:
    return 0x00050000 | number


def _on_argument(number: int, checks: list[Line]) -> list[Line]:
    """Checks of the first argument's low half (both machines are little-endian); what they let through is allowed."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


Kind = Literal["kernel", "bwrap"]

NOBODY: Final = 65534
"""The user that programs run as where we are root: limits of processes do not hold for root."""

READABLE: Final = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
DEVICES: Final = ("/dev/null", "/dev/urandom")
PROGRAM: Final = "program.py"
RUNNER: Final = """
import os, sys
def run(report, secret, read=os.read, write=os.write):
    with open("program.py", "rb") as file:
        code = compile(file.read(), "program.py", "exec", dont_inherit=True)
    module = type(sys)("__main__")
    module.__file__, sys.argv[:], sys.modules["__main__"] = "program.py", ["program.py"], module
    exec(code, module.__dict__)
    write(report, read(secret, 64))
run(*map(int, sys.argv[1:]))
"""
"""Runs the program, and only after its last line reads the token that says so; neither source nor memory has it before."""

LOOK_S: Final = 0.25
"""Seconds between two looks at how much the program has written."""

MOST_FILES: Final = 4096
OUTPUT_SHOWN: Final = 2000
SPARE_TASKS: Final = 32
"""Threads that a program may have, and processes of the same user that may start at the same time."""


_BREAKOUT = """
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


class SandboxError(RuntimeError):
    """The sandbox itself failed: the program did not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one program may use; `processes` beyond its own (0: it can't fork). MB are 2^20 bytes."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16
    disk_mb: int = 64
    processes: int = 0


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended: `passed` if it ran to its last line. `output` is the end of what it printed."""

    passed: bool
    ending: Literal["ended", "timeout", "disk"]
    returncode: int
    output: str


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs programs, one call each; several threads may call it."""

    kind: Kind = "kernel"

    def run(
        self, program: str, limits: Limits = Limits(), *, stopping: Callable[[], bool] = lambda: False
    ) -> ProgramResult:
        """Run a program to its end or its limits, and kill all that is left of it.

        `stopping` is asked while it runs; if it is true, the program counts as out of time. Raises SandboxError if the sandbox
        can't be set up.
        """
        folder = Path(tempfile.mkdtemp(prefix="draftmill-sandbox-"))
        try:
            return self._run(program, limits, folder, stopping)
        finally:
            shutil.rmtree(folder, onerror=_open_and_retry)

    def _run(self, program: str, limits: Limits, folder: Path, stopping: Callable[[], bool]) -> ProgramResult:
        token = secrets.token_hex(16).encode()
        reader, writer = os.pipe()
        secret, teller = os.pipe()
        os.write(teller, token)
        os.close(teller)
        try:
            (folder / PROGRAM).write_text(program, encoding="utf-8", errors="backslashreplace")
            if os.getuid() == 0 and self.kind == "kernel":
                os.chown(folder, NOBODY, NOBODY)
            with tempfile.TemporaryFile() as output:
                process = subprocess.Popen(
                    self.command(folder, limits, (writer, secret)),
                    cwd=folder,
                    env=environment(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writer, secret),
                    start_new_session=True,
                )
                os.close(writer)
                writer = -1
                ending = _watch(process, folder, limits, stopping)
                text, report = _tail(output), os.read(reader, 4096)
        finally:
            os.close(reader)
            os.close(secret)
            if writer >= 0:
                os.close(writer)
        if not report.startswith(b".") and ending == "ended":
            raise SandboxError(text.strip().splitlines()[-1] if text.strip() else "the sandbox did not start")
        passed = ending == "ended" and process.returncode == 0 and report == b"." + token
        return ProgramResult(passed, ending, process.returncode, text)

    def command(self, folder: Path, limits: Limits, pipes: tuple[int, int]) -> list[str]:
        """The command line of one program: the launcher, behind bubblewrap or alone. `pipes`: the report's, and the token's."""
        launcher = [interpreter(), "-I", "-S", "-B", "-c", launcher_source()]
        launcher.append(json.dumps(self.policy(folder, limits, pipes)))
        if self.kind == "kernel":
            return launcher
        return [
            *f"bwrap --unshare-all --die-with-parent --new-session --uid {NOBODY} --gid {NOBODY}".split(),
            *(part for path in readable() for part in ("--ro-bind-try", path, path)),
            *("--dev", "/dev", "--proc", "/proc", "--bind", str(folder), str(folder), "--chdir", str(folder), "--"),
            *launcher,
        ]

    def policy(self, folder: Path, limits: Limits, pipes: tuple[int, int]) -> dict[str, Any]:
        """The launcher's input, as JSON data."""
        machine, is_root = platform.machine(), os.getuid() == 0
        bare = self.kind == "kernel"
        return {
            "workdir": str(folder),
            "landlock": bare,
            "readable": readable(),
            "devices": list(DEVICES),
            "uid": NOBODY if bare and is_root else None,
            "reads_any": bare and is_root and not is_open_to_all(interpreter(), sys.base_prefix),
            "machine": machine,
            "limits": {
                **{"AS": limits.memory_mb * 2**20, "FSIZE": limits.file_mb * 2**20, "CPU": int(limits.timeout_s) + 2},
                **{"NOFILE": 64, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0},
            },
            "tasks": limits.processes + SPARE_TASKS,
            "parent": os.getpid() if bare else None,
            "report": pipes[0],
            "filter": base64.b64encode(filter_for(machine, forks=limits.processes > 0)).decode(),
            "argv": [interpreter(), "-s", "-P", "-S", "-B", "-c", RUNNER, *map(str, pipes)],
            "environment": environment(folder),
        }


def is_supported() -> bool:
    """Whether the tables of system calls have this machine."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def interpreter() -> str:
    """The Python that runs this process, without its environment's packages."""
    base: str = getattr(sys, "_base_executable", "") or sys.executable
    return os.path.realpath(base)


def readable() -> list[str]:
    """The folders that programs may read: the system's libraries and Python's own."""
    return list(dict.fromkeys([*READABLE, sys.base_prefix, str(Path(interpreter()).parent)]))


def is_open_to_all(*paths: str) -> bool:
    """Whether every user may read these paths."""
    folders = {folder for path in map(Path, paths) for folder in (path, *path.parents)}
    is_reachable = all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)
    return is_reachable and all(os.stat(path).st_mode & stat.S_IROTH for path in paths)


def environment(folder: Path) -> dict[str, str]:
    """The whole environment of a program. Hashes are fixed, so that it runs alike each time."""
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return fixed | {"HOME": str(folder), "TMPDIR": str(folder)}


@lru_cache(maxsize=1)
def launcher_source() -> str:
    return Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")


def _watch(
    process: subprocess.Popen[bytes], folder: Path, limits: Limits, stopping: Callable[[], bool]
) -> Literal["ended", "timeout", "disk"]:
    """Wait for the program's end or its limits; afterwards none of its processes is left."""
    until_s = time.monotonic() + limits.timeout_s
    try:
        while (left_s := until_s - time.monotonic()) > 0 and not stopping():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(LOOK_S, left_s))
                return "ended"
            if _is_full(folder, limits.disk_mb * 2**20):
                return "disk"
        return "timeout"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's whole group, also after its main process has ended: what it started may continue."""
    for _ in range(100):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS and empty groups
            break
        process.poll()
        if not _group_lives(process.pid):
            break
        time.sleep(0.01)
    process.wait()


def _group_lives(group: int) -> bool:
    """Whether a process of the group is there that is no zombie."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError, ValueError):
            state, _, its_group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _is_full(folder: Path, most_bytes: int) -> bool:
    total = count = 0
    for place, _, names in os.walk(folder, onerror=None):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            count += 1
            if total > most_bytes or count > MOST_FILES:
                return True
        count += 1
    return False


def _tail(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - OUTPUT_SHOWN))
    return output.read().decode("utf-8", "backslashreplace")


def _open_and_retry(remove: Callable[..., Any], path: str, _: Any) -> None:
    """A program may make folders that their owner can't read: open them and retry."""
    with suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        if remove in {os.open, os.scandir, os.rmdir} or os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)


# ---- the self-test


def find_sandbox(*, field: str = "sandbox") -> Sandbox:
    """The sandbox to use: `kernel` where it holds, else `bwrap`; UserError with the reasons where neither does."""
    reasons = []
    for kind in get_args(Kind):
        reason = problem(kind)
        if reason is None:
            return Sandbox(kind)
        reasons.append(f"{kind}: {reason}")
    raise UserError(f"no sandbox holds on this machine, so no code is run ({'; '.join(reasons)})", field=field)


@lru_cache(maxsize=4)
def problem(kind: Kind) -> str | None:
    """Why this kind of sandbox does not hold here; None if it does. Tried once per process."""
    if not is_supported():
        return "only Linux on x86_64 and aarch64 is supported"
    if kind == "bwrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o777)
        secret = place / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        program = _BREAKOUT.format(outside=str(place / "made"), secret=str(secret))
        try:
            ran = Sandbox(kind).run(program, Limits(timeout_s=60))
        except (SandboxError, OSError) as error:
            return str(error)
        if ran.passed and not (place / "made").exists() and secret.read_text() == "secret":
            return None
        return (ran.output.strip().splitlines() or ["the self-test did not end"])[-1]
