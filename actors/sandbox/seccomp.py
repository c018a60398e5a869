"""The system call filter of the sandbox, as a BPF program for x86_64 and aarch64. Pure.

It allows by number what Python and its standard library need: memory, files (which Landlock or bubblewrap confines), threads,
pipes and waiting. Everything else is refused, calls that later kernels bring too: with EPERM, or with ENOSYS from the first
number that all machines share on, since the C library then uses an older call. `clone3`, whose flags a filter can't read, is one
of these.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

X86_64: Final = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "clone": 56, "fork": 57, "vfork": 58,
    "execve": 59, "exit": 60, "wait4": 61, "uname": 63, "fcntl": 72, "flock": 73, "fsync": 74, "fdatasync": 75,
    "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84,
    "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97,
    "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124,
    "capget": 125, "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137,
    "fstatfs": 138, "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146,
    "sched_get_priority_min": 147, "prctl": 157, "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "getxattr": 191,
    "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219,
    "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "epoll_wait": 232, "epoll_ctl": 233, "waitid": 247, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "get_robust_list": 274, "epoll_pwait": 281, "fallocate": 285, "eventfd2": 290,
    "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "prlimit64": 302, "getcpu": 309,
    "renameat2": 316, "getrandom": 318, "membarrier": 324, "copy_file_range": 326, "statx": 332, "rseq": 334,
}  # fmt: skip
AARCH64: Final = {
    "getxattr": 8, "lgetxattr": 9, "fgetxattr": 10, "listxattr": 11, "llistxattr": 12, "flistxattr": 13, "getcwd": 17,
    "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24, "fcntl": 25, "ioctl": 29,
    "flock": 32, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "statfs": 43, "fstatfs": 44,
    "ftruncate": 46, "fallocate": 47, "faccessat": 48, "chdir": 49, "fchdir": 50, "openat": 56, "close": 57, "pipe2": 59,
    "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68,
    "preadv": 69, "pwritev": 70, "sendfile": 71, "pselect6": 72, "ppoll": 73, "readlinkat": 78, "newfstatat": 79,
    "fstat": 80, "fsync": 82, "fdatasync": 83, "capget": 90, "exit": 93, "exit_group": 94, "waitid": 95,
    "set_tid_address": 96, "futex": 98, "set_robust_list": 99, "get_robust_list": 100, "nanosleep": 101, "getitimer": 102,
    "setitimer": 103, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getscheduler": 120,
    "sched_getparam": 121, "sched_getaffinity": 123, "sched_yield": 124, "sched_get_priority_max": 125,
    "sched_get_priority_min": 126, "restart_syscall": 128, "sigaltstack": 132, "rt_sigsuspend": 133, "rt_sigaction": 134,
    "rt_sigprocmask": 135, "rt_sigpending": 136, "rt_sigtimedwait": 137, "rt_sigreturn": 139, "getpriority": 141,
    "getresuid": 148, "getresgid": 150, "times": 153, "getpgid": 155, "getsid": 156, "getgroups": 158, "uname": 160,
    "getrlimit": 163, "setrlimit": 164, "getrusage": 165, "umask": 166, "prctl": 167, "getcpu": 168, "gettimeofday": 169,
    "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
    "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "clone": 220, "execve": 221, "mmap": 222, "fadvise64": 223,
    "mprotect": 226, "msync": 227, "mincore": 232, "madvise": 233, "wait4": 260, "prlimit64": 261, "renameat2": 276,
    "getrandom": 278, "membarrier": 283, "copy_file_range": 285, "statx": 291, "rseq": 293,
}  # fmt: skip
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
    program = [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)),
        (_LOAD, 0, 0, _NUMBER),
        *((_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _refusal(errno.ENOSYS))),
    ]
    for name, number in sorted(numbers.items()):
        if name not in _BY_ARGUMENT and (forks or name not in _FORKS):
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program += _on_argument(numbers["prlimit64"], [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _refusal(errno.EPERM))])
    program += _on_argument(
        numbers["prctl"], [(_EQUAL, 0, 1, _PR_SET_PDEATHSIG), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    )
    clone = [(_ANY_BIT, 0, 1, _CLONE_NAMESPACES), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    if not forks:
        clone += [(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    program += _on_argument(numbers["clone"], clone)
    program += [
        (_AT_LEAST, 0, 1, _SHARED),
        (_RETURN, 0, 0, _refusal(errno.ENOSYS)),
        (_RETURN, 0, 0, _refusal(errno.EPERM)),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


Line = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, value."""


def _refusal(number: int) -> int:
    return 0x00050000 | number


def _on_argument(number: int, checks: list[Line]) -> list[Line]:
    """Checks of the first argument's low half (both machines are little-endian); what they let through is allowed."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
