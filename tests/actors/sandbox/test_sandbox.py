"""The sandbox: eleven attacks that must fail, two controls that must not, and nothing left of any of them.

Where no sandbox holds (another system, an old kernel), the attacks are skipped and the refusal is tested alone.
"""

import http.server
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from draftmill.actors.sandbox import sandbox as code
from draftmill.actors.sandbox.sandbox import (
    AARCH64,
    MACHINES,
    SINCE_5_1,
    X86_64,
    Limits,
    Sandbox,
    SandboxError,
    filter_for,
    find_sandbox,
    problem,
)
from draftmill.storage.errors import UserError

SHORT = Limits(timeout_s=3.0, memory_mb=1024)
FORKING = Limits(timeout_s=3.0, processes=16)

BOMB = """
import os, time
for _ in range(200):
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
time.sleep(60)
"""

holds = pytest.mark.skipif(problem("kernel") is not None, reason=f"no kernel sandbox here: {problem('kernel')}")


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox("kernel")


@pytest.fixture
def outside(tmp_path: Path):
    """A folder that any user may write to, and a secret that any user may read."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/") and "pytest" in str(folder):
            folder.chmod(0o777)
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "secret").chmod(0o666)
    yield tmp_path


def leftovers(mark: str) -> list[int]:
    """Processes whose command line holds the mark."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@holds
def test_a_program_that_runs_to_its_end_passes(sandbox):
    ran = sandbox.run("import json, math\nprint(json.dumps(math.sqrt(4)))\nopen('notes', 'w').write('mine')\n")
    assert ran.passed and ran.output == "2.0\n"


@holds
@pytest.mark.parametrize(
    "program", ["assert 1 + 1 == 3", "import sys; sys.exit(0)", "import os; os._exit(0)", "def f(:\n", "x = '''"]
)
def test_a_program_that_does_not_reach_its_end_fails(sandbox, program):
    ran = sandbox.run(program, SHORT)
    assert not ran.passed and ran.ending == "ended"


FOUND = """
import gc, os, re, sys
def told(text):
    for found in re.findall(r"[0-9a-f]{32}", text):
        for number in range(3, 64):
            try:
                os.write(number, found.encode())
            except OSError:
                pass
"""


@holds
@pytest.mark.parametrize(
    "attack",
    [
        "told(open(__file__).read())",
        "told(' '.join(sys.orig_argv) + ' '.join(map(str, os.environ.items())))",
        "f = sys._getframe()\nwhile f:\n    told(repr((f.f_locals, f.f_code.co_consts)))\n    f = f.f_back",
        "for one in gc.get_objects():\n    if isinstance(one, (dict, list, tuple)):\n        told(repr([x for x in "
        "(one.values() if isinstance(one, dict) else one) if isinstance(x, (str, bytes))]))",
    ],
    ids=["source", "arguments", "frames", "memory"],
)
def test_a_program_finds_nowhere_what_would_say_that_it_passed(sandbox, attack):
    ran = sandbox.run(f"{FOUND}{attack}\nos._exit(0)\n", Limits(timeout_s=20.0))
    assert not ran.passed and ran.ending == "ended" and ran.returncode == 0, ran.output


@holds
def test_a_fork_bomb_is_refused(sandbox):
    ran = sandbox.run("import os\nwhile True:\n    os.fork()\n", SHORT)
    assert not ran.passed and "PermissionError" in ran.output


@pytest.mark.slow
@holds
def test_a_fork_bomb_ends_with_its_program_where_forks_are_allowed(sandbox):
    """RLIMIT_NPROC counts all processes of a user: what is left of one bomb would make later programs fail."""
    ran = sandbox.run(BOMB, FORKING)
    assert not ran.passed and ran.ending == "timeout"
    for _ in range(3):
        assert sandbox.run("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n", FORKING).passed


@holds
def test_what_a_program_leaves_behind_is_killed_after_its_end(sandbox):
    mark = f"left-{secrets.token_hex(8)}"
    program = (
        f"import os\nif os.fork() == 0:\n"
        f"    os.execv({code.interpreter()!r}, [{code.interpreter()!r}, '-S', '-c', 'import time; time.sleep(60)', {mark!r}])\n"
        "import time\ntime.sleep(0.5)\n"
    )
    ran = sandbox.run(program, Limits(timeout_s=20, processes=4))
    assert ran.passed, ran.output
    deadline_s = time.monotonic() + 10
    while leftovers(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert leftovers(mark) == []


@holds
def test_an_endless_loop_is_out_of_time(sandbox):
    ran = sandbox.run("while True:\n    pass\n", Limits(timeout_s=1.0))
    assert not ran.passed and ran.ending == "timeout"


@holds
def test_four_gigabytes_of_memory_are_refused(sandbox):
    ran = sandbox.run("held = bytearray(4 * 2**30)\n", SHORT)
    assert not ran.passed and "MemoryError" in ran.output


@holds
def test_endless_output_is_cut(sandbox):
    program = "import sys\nwhile True:\n    sys.stdout.write('x' * 65536)\n"
    ran = sandbox.run(program, Limits(timeout_s=30.0, file_mb=1))
    assert not ran.passed and ran.ending == "ended" and len(ran.output) <= code.OUTPUT_SHOWN


@holds
def test_no_tcp_connection_can_be_made(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))\n", SHORT)
        assert not ran.passed and "PermissionError" in ran.output
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@holds
def test_no_page_can_be_fetched(sandbox):
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        program = f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{server.server_port}/').read()\n"
        ran = sandbox.run(program, SHORT)
        server.shutdown()
        thread.join()
    assert not ran.passed and asked == []


@holds
def test_nothing_outside_its_folder_can_be_written(sandbox, outside):
    for attack in (
        f"open({str(outside / 'made')!r}, 'w')",
        f"open({str(outside / 'secret')!r}, 'a')",
        f"__import__('os').truncate({str(outside / 'secret')!r}, 0)",
        f"__import__('os').remove({str(outside / 'secret')!r})",
        f"__import__('os').chmod({str(outside / 'secret')!r}, 0)",
        f"__import__('os').utime({str(outside / 'secret')!r})",
        f"__import__('os').rename('program.py', {str(outside / 'made')!r})",
        f"__import__('os').link({str(outside / 'secret')!r}, 'linked')",
    ):
        ran = sandbox.run(attack, SHORT)
        assert not ran.passed and "Error" in ran.output, attack
    assert (outside / "secret").read_text() == "hunter2" and not (outside / "made").exists()


@holds
def test_no_secret_can_be_read(sandbox, outside, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    for attack in (
        f"print(open({str(outside / 'secret')!r}).read())",
        f"import os\nos.symlink({str(outside / 'secret')!r}, 'alias')\nprint(open('alias').read())",
        f"print(open('/proc/{os.getpid()}/environ').read())",
        "print(open('/etc/passwd').read())",
    ):
        ran = sandbox.run(attack, SHORT)
        assert not ran.passed and "Error" in ran.output and "hunter2" not in ran.output.rpartition("Error")[2], attack
    ran = sandbox.run("import os\nprint(sorted(os.environ))\nassert 'MY_SECRET_TOKEN' not in os.environ\n", SHORT)
    assert ran.passed, ran.output


@holds
def test_its_parent_can_be_neither_killed_nor_limited(sandbox):
    for attack in (
        "import os\nos.kill(os.getppid(), 9)\n",
        "import os\nos.kill(-1, 9)\n",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\n",
    ):
        ran = sandbox.run(attack, SHORT)
        assert not ran.passed and "PermissionError" in ran.output, attack


@holds
def test_a_program_can_not_leave_its_group(sandbox):
    mark = f"escaped-{secrets.token_hex(8)}"
    program = (
        "import os, sys\nos.setsid()\nif os.fork():\n    os._exit(0)\n"
        f"os.execv({code.interpreter()!r}, [{code.interpreter()!r}, '-c', 'import time; time.sleep(60)', {mark!r}])\n"
    )
    ran = sandbox.run(program, FORKING)
    assert not ran.passed and "PermissionError" in ran.output
    assert sandbox.run("import os\nos.setpgid(0, 0)\n", FORKING).passed is False
    assert leftovers(mark) == []


@holds
def test_a_huge_file_and_many_files_are_refused(sandbox):
    huge = "with open('huge', 'wb') as file:\n    while True:\n        file.write(bytes(2**20))\n"
    ran = sandbox.run(huge, Limits(timeout_s=30.0, file_mb=2))
    assert not ran.passed and ran.ending == "ended" and ("File too large" in ran.output or ran.returncode < 0)
    many = (
        "n = 0\nwhile True:\n    n += 1\n    with open(f'file{n}', 'wb') as file:\n        file.write(bytes(2**20))\n"
    )
    ran = sandbox.run(many, Limits(timeout_s=30.0, disk_mb=8))
    assert not ran.passed and ran.ending == "disk"


@holds
def test_a_program_is_not_root_and_has_no_capability_over_files(sandbox):
    ran = sandbox.run("import os\nassert os.getuid() != 0 and os.getgroups() in ([], [os.getgid()])\n")
    assert ran.passed or os.getuid() != 0, ran.output


@holds
def test_nothing_is_left_on_disk(sandbox, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if "pytest" in str(parent):
            parent.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox.run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.mkdir('closed', 0)\n", SHORT)
    assert list(tmp_path.iterdir()) == []


@holds
def test_a_program_that_is_stopped_counts_as_out_of_time(sandbox):
    ran = sandbox.run("import time\ntime.sleep(60)\n", Limits(timeout_s=60.0), stopping=lambda: True)
    assert ran.ending == "timeout"


@holds
def test_the_self_test_finds_the_kernel_sandbox():
    assert find_sandbox() == Sandbox("kernel")


@holds
@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/usr/bin/python3.11").exists(), reason="needs root and another Python"
)
def test_it_holds_for_an_ordinary_user_too(tmp_path):
    program = "import sys; sys.path.insert(0, {root!r})\n"
    program += "from draftmill.actors.sandbox.sandbox import problem\nprint(problem('kernel'))\n"
    root = str(Path(code.__file__).parents[3])
    done = subprocess.run(
        ["/usr/bin/python3.11", "-c", program.format(root=root)],
        check=False, user=1234, group=1234, extra_groups=[], capture_output=True,
        text=True, timeout=120, env={"PATH": "/usr/bin"}, cwd="/",
    )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("the checkout is not readable by other users")
    assert done.stdout.strip() == "None", done.stderr


def test_where_no_sandbox_holds_no_code_is_run_and_the_reasons_are_given(monkeypatch):
    problem.cache_clear()
    monkeypatch.setattr(
        "draftmill.actors.sandbox.sandbox.Sandbox.run",
        lambda *_, **__: (_ for _ in ()).throw(SandboxError("landlock: gone")),
    )
    monkeypatch.setattr("shutil.which", lambda name: None)
    try:
        with pytest.raises(UserError, match=r"metrics.0: no sandbox holds .*landlock: gone.*bwrap is not installed"):
            find_sandbox(field="metrics.0")
    finally:
        problem.cache_clear()


def test_a_self_test_that_breaks_out_refuses_the_sandbox(monkeypatch):
    problem.cache_clear()
    monkeypatch.setattr(
        "draftmill.actors.sandbox.sandbox.filter_for", lambda *_, **__: b"\x06\x00\x00\x00\x00\x00\xff\x7f"
    )
    try:
        if code.is_supported():
            assert problem("kernel") in {"a socket could be made", None} or "landlock" in str(problem("kernel"))
            assert problem("kernel") is not None
    finally:
        problem.cache_clear()


def test_other_machines_are_refused(monkeypatch):
    problem.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    try:
        with pytest.raises(UserError, match="only Linux on x86_64 and aarch64 is supported"):
            find_sandbox()
    finally:
        problem.cache_clear()


def test_bwrap_runs_the_same_launcher_with_its_own_namespaces():
    command = Sandbox("bwrap").command(Path("/tmp/work"), Limits(), (7, 8))
    assert command[0] == "bwrap" and {"--unshare-all", "--die-with-parent", "--new-session"} <= set(command)
    assert command[command.index("--bind") + 1] == "/tmp/work"
    assert "--bind" not in command[command.index("--bind") + 1 :]
    policy = Sandbox("bwrap").policy(Path("/tmp/work"), Limits(), (7, 8))
    assert policy["landlock"] is False and policy["uid"] is None and policy["filter"]


@pytest.mark.skipif(problem("bwrap") is not None, reason=f"no bwrap here: {problem('bwrap')}")
def test_bwrap_holds():
    assert Sandbox("bwrap").run("print(1)").passed


# In the generic table `newfstatat` is `fstatat`.
@pytest.mark.parametrize(
    ("header", "ours", "unnamed"),
    [("x86_64-linux-gnu/asm/unistd_64.h", X86_64, 0), ("asm-generic/unistd.h", AARCH64, 2)],
)
def test_syscall_numbers_are_those_of_the_kernel_headers(header, ours, unnamed):
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers")
    found = re.findall(r"^#define\s+__NR(?:3264)?_(\w+)\s+(\d+)(?:\s|$)", path.read_text(), re.MULTILINE)
    theirs = {name: int(number) for name, number in found}
    for name, number in (ours | SINCE_5_1).items():
        assert theirs.get(name, number) == number, name
    assert len(set(theirs) & set(ours)) >= len(ours) - unnamed


DENIED = {
    "x86_64": {
        "socket": 41, "connect": 42, "kill": 62, "ptrace": 101, "chmod": 90, "setsid": 112, "mount": 165, "keyctl": 250,
        "unshare": 272, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323, "tgkill": 234,
    },
    "aarch64": {
        "socket": 198, "connect": 203, "kill": 129, "ptrace": 117, "fchmodat": 53, "setsid": 157, "mount": 40, "keyctl": 219,
        "unshare": 97, "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "tgkill": 131,
    },
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("forks", [False, True])
def test_the_filter_allows_its_list_alone_and_no_call_that_a_later_kernel_brings(machine, forks):
    """The program is interpreted here, line by line, as the kernel does (Documentation/networking/filter)."""
    arch, numbers = MACHINES[machine]
    program = filter_for(machine, forks=forks)
    allow, denied, unknown = 0x7FFF0000, 0x00050001, 0x00050000 | 38
    by_argument = {"clone", "prctl", "prlimit64"}
    plain = {number for name, number in (numbers | SINCE_5_1).items() if forks or name not in {"fork", "vfork"}}
    plain -= {numbers[name] for name in by_argument}
    for number in set(range(1024)) - {numbers[name] for name in by_argument}:
        expected = allow if number in plain else unknown if number >= 424 else denied
        assert verdict(program, number, arch) == expected, number
    assert not set(DENIED[machine].values()) & plain
    assert verdict(program, 435, arch) == unknown  # clone3: the C library then uses clone
    assert verdict(program, numbers["clone"], arch, 0x00010000 | 0x100) == allow  # a thread
    assert verdict(program, numbers["clone"], arch, 17) == (allow if forks else denied)  # a fork: SIGCHLD
    assert verdict(program, numbers["clone"], arch, 0x10000000 | 17) == denied  # a user namespace
    assert verdict(program, numbers["prlimit64"], arch, 0) == allow
    assert verdict(program, numbers["prlimit64"], arch, 4711) == denied
    assert verdict(program, numbers["prctl"], arch, 1) == denied
    assert verdict(program, numbers["prctl"], arch, 15) == allow
    assert verdict(program, 0, arch ^ 1) == 0x80000000
    assert verdict(program, 0x40000000 | 1, arch) == unknown


def verdict(program: bytes, number: int, arch: int, argument: int = 0) -> int:
    data = {0: number, 4: arch, 16: argument}
    held = place = 0
    while True:
        code_ = int.from_bytes(program[place * 8 : place * 8 + 2], sys.byteorder)
        yes = program[place * 8 + 2]
        no = program[place * 8 + 3]
        value = int.from_bytes(program[place * 8 + 4 : place * 8 + 8], sys.byteorder)
        place += 1
        if code_ == 0x20:
            held = data[value]
        elif code_ == 0x06:
            return value
        else:
            met = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code_]
            place += yes if met else no
