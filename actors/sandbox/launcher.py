"""Runs inside the new process: gives up rights one by one, then becomes the program. `python -c THIS POLICY`.

POLICY is JSON (actors/sandbox/sandbox.py writes it). Only the standard library is used, since this file is passed as text to
a bare interpreter: the process that runs it may not be able to read the project's files. Every call's return value is
checked; where a step fails, the program does not run, and the report stays empty.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _KEEPCAPS, _SECCOMP, _NO_NEW_PRIVS, _AMBIENT = 1, 8, 22, 38, 47
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
_READ_ANY = 2  # CAP_DAC_READ_SEARCH
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check_result(_LIBC.prctl(option, *padded), f"prctl {option}")


def ruleset(readable: list[str], devices: list[str], writable: str) -> int:
    """A Landlock ruleset: programs read and execute `readable`, read and write `devices`, and do anything in `writable`."""
    version = _check_result(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "landlock")
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << bit) if version >= since else 0
    networks, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", rights, networks, scopes)[:size]
    rules = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    _check_result(rules, "landlock_create_ruleset")
    read = _EXECUTE | _READ_FILE | _READ_FOLDER
    for paths, access in ((readable, read), (devices, _READ_FILE | _WRITE_FILE), ([writable], rights)):
        for path in paths:
            _allow(rules, path, access & rights)
    return rules


def _allow(rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # not every system has every one of these folders
    if not os.path.isdir(path):
        access &= _FILE_RIGHTS
    rule = struct.pack("=Qi", access, place)
    _check_result(_LIBC.syscall(_ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule {path}")
    os.close(place)


def become(uid: int, *, reads_any: bool, machine: str) -> None:
    """Give up root for `uid`. `reads_any` keeps the right to read and search any file, which Landlock confines again."""
    if reads_any:
        _prctl(_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if reads_any:
        bit = 1 << _READ_ANY
        header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", bit, bit, bit, 0, 0, 0)
        _check_result(_LIBC.syscall(_CAPSET[machine], header, data), "capset")
        _prctl(_AMBIENT, 2, _READ_ANY)


def limit(policy: dict[str, Any]) -> None:
    """Set the limits of memory, time, files and processes, which nothing can raise again."""
    for name, most in policy["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (most, most))


def count_tasks(uid: int) -> int:
    """The processes and threads of a user; RLIMIT_NPROC counts them all."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def apply_filter(filter_bytes: bytes) -> None:
    """Apply a seccomp filter to this process and all that follow it."""
    held = ctypes.create_string_buffer(filter_bytes, len(filter_bytes))
    program = struct.pack("=HxxxxxxQ", len(filter_bytes) // 8, ctypes.addressof(held))
    kept = ctypes.create_string_buffer(program, len(program))
    _prctl(_SECCOMP, 2, ctypes.addressof(kept))


def main() -> None:
    """Give up every right that the program doesn't need, and become the program."""
    policy = json.loads(sys.argv[1])
    os.chdir(policy["workdir"])
    rules = None
    if policy["landlock"]:
        rules = ruleset(policy["readable"], policy["devices"], policy["workdir"])
    uid = os.getuid() if policy["uid"] is None else policy["uid"]
    policy["limits"]["NPROC"] = count_tasks(uid) + policy["tasks"]
    if policy["uid"] is not None:
        become(uid, reads_any=policy["reads_any"], machine=policy["machine"])
    limit(policy)
    _prctl(_PDEATHSIG, 9)
    if policy["parent"] is not None and os.getppid() != policy["parent"]:
        raise OSError("the process that started this one has ended")
    _prctl(_NO_NEW_PRIVS, 1)
    if rules is not None:
        _check_result(_LIBC.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
        os.close(rules)
    os.write(policy["report"], b".")
    apply_filter(base64.b64decode(policy["filter"]))
    os.execve(policy["argv"][0], policy["argv"], policy["environment"])


if __name__ == "__main__":
    main()
