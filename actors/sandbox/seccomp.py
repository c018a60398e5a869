"""The system call filter of the sandbox, as a BPF program for x86_64 and aarch64. Pure.

It denies by number, with EPERM: networks, signals to other processes, new namespaces and sessions, mounts, changes of modes and
owners (which Landlock does not cover), shared memory that outlives a process, and kernel interfaces that programs don't need.
`clone3`, whose flags a filter can't read, gets ENOSYS; the C library then uses `clone`.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

X86_64: Final = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "recvfrom": 45,
    "sendmsg": 46, "recvmsg": 47, "bind": 49, "listen": 50, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "kill": 62,
    "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "truncate": 76, "chmod": 90,
    "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "syslog": 103, "setpgid": 109, "setsid": 112,
    "rt_sigqueueinfo": 129, "utime": 132, "personality": 135, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "pivot_root": 155, "prctl": 157, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
    "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203,
    "semtimedop": 220, "clock_settime": 227, "tgkill": 234, "utimes": 235, "mbind": 237, "set_mempolicy": 238, "mq_open": 240,
    "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "migrate_pages": 256, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272, "move_pages": 279,
    "utimensat": 280, "accept4": 288, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "recvmmsg": 299, "fanotify_init": 300,
    "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "sendmmsg": 307, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314,
    "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
AARCH64: Final = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "ioprio_set": 30,
    "umount2": 39, "mount": 40, "pivot_root": 41, "truncate": 45, "chroot": 51, "fchmod": 52, "fchmodat": 53, "fchownat": 54,
    "fchown": 55, "quotactl": 60, "utimensat": 88, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
    "setpriority": 140, "reboot": 142, "setpgid": 154, "setsid": 157, "sethostname": 161, "setdomainname": 162, "prctl": 167,
    "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188,
    "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196,
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "sendto": 206, "recvfrom": 207,
    "sendmsg": 211, "recvmsg": 212, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "swapon": 224,
    "swapoff": 225, "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240,
    "perf_event_open": 241, "accept4": 242, "recvmmsg": 243, "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "sendmmsg": 269, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "sched_setattr": 274, "memfd_create": 279, "bpf": 280,
    "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
SINCE_5_1: Final = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "process_mrelease": 448, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467,
    "file_setattr": 469,
}  # fmt: skip
"""Numbers that are the same on both machines."""

MACHINES: Final = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
"""By `platform.machine()`: the AUDIT_ARCH value of <linux/audit.h> and the syscall numbers."""

_BY_ARGUMENT: Final = ("clone", "clone3", "prctl", "prlimit64")
_FORKS: Final = ("fork", "vfork")

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_X32 = 0x40000000
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
        *_refused(numbers["clone3"], errno.ENOSYS),
    ]
    for name, number in sorted(numbers.items()):
        if name not in _BY_ARGUMENT and not (forks and name in _FORKS):
            program += _refused(number, errno.EPERM)
    program += _on_argument(numbers["prlimit64"], [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _refusal(errno.EPERM))])
    program += _on_argument(
        numbers["prctl"], [(_EQUAL, 0, 1, _PR_SET_PDEATHSIG), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    )
    clone = [(_ANY_BIT, 0, 1, _CLONE_NAMESPACES), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    if not forks:
        clone += [(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _refusal(errno.EPERM))]
    program += _on_argument(numbers["clone"], clone)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in program)


Line = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, value."""


def _refusal(number: int) -> int:
    return 0x00050000 | number


def _refused(number: int, error: int) -> list[Line]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _refusal(error))]


def _on_argument(number: int, checks: list[Line]) -> list[Line]:
    """Checks of the first argument's low half (both machines are little-endian); what they let through is allowed."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
