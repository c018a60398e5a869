"""Commands over damaged files, each case in a process of its own with a limit on its memory and time.

A world is a folder of sound files: models, inputs, specs, a finished run. A case is one damaged file in a copy of it, and
commands that read it. `serve` imports everything once and forks a process for each case.
"""

import contextlib
import dataclasses
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.faults.damage import Content, put

MOST_BYTES: Final = 2**30
MOST_CPU_S: Final = 10
MOST_CPU_S_CONVERTING: Final = 40
CONVERTED: Final = {"adapter", "gguf"}
"""Kinds for which a job starts another interpreter, which imports transformers and PEFT."""

MOST_WALL_S: Final = 180
ROOM: Final = 4 * 2**30
"""Address space of a case beyond that of the process which forks it: torch reserves much that it does not use."""

DOCUMENTED: Final = {0, 2, 3, 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """`file`, relative to the world's folder, is damaged; `commands` are run in turn, each in the copied folder.

    A `written` one is unlike all others: it belongs to every large share of the cases.
    """

    kind: str
    name: str
    file: str
    content: Content
    commands: tuple[tuple[str, ...], ...]
    named: bool = True
    written: bool = False

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"


@dataclasses.dataclass(slots=True)
class Ending:
    """How a command ended: the exit code, or minus a signal, what it printed, and what it took."""

    case: str
    command: str
    code: int
    out: str = ""
    err: str = ""
    cpu_s: float = 0.0
    grown_bytes: int = 0
    problem: str = ""


def serve(world: str, kind: str, result: str, part: str = "0/1") -> None:
    """Run the cases of a kind and write how they ended to a file, as JSON lines."""
    from tests.faults.damaged_files import cases

    number, count = map(int, part.split("/"))
    found = enumerate(cases(Path(world), kind))
    chosen = [case for place, case in found if place % count == number or (case.written and count < 10)]
    _warm(Path(world))
    with open(result, "w", encoding="utf-8") as out:
        for case in chosen:
            for ending in _tried(Path(world), case):
                out.write(json.dumps(dataclasses.asdict(ending)) + "\n")
            out.flush()


def _warm(world: Path) -> None:
    """Import what a job imports: what one in a child has imported, here."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _silenced(world / "warm", [("validate", "job.yaml"), ("run", "job.yaml", "--local", "--quiet")], world)
        with os.fdopen(writes, "w") as out:
            out.write("\n".join(sys.modules))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as text:
        names = text.read().split("\n")
    os.waitpid(child, 0)
    for name in names:
        if name.partition(".")[0] in {
            "draftmill",
            "torch",
            "transformers",
            "pyarrow",
            "tokenizers",
            "safetensors",
            "jinja2",
        }:
            with contextlib.suppress(Exception):
                __import__(name)


def _silenced(folder: Path, commands: Iterable[tuple[str, ...]], world: Path) -> None:
    from draftmill.jobs.cli import main

    copied(world, folder)
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for command in commands:
            main(command)
    shutil.rmtree(folder)


def copied(world: Path, folder: Path) -> None:
    """The world's files again, as links: only what is replaced takes room."""
    shutil.copytree(world / "sound", folder, copy_function=os.link, symlinks=True)


def _tried(world: Path, case: Case) -> Iterator[Ending]:
    folder = Path(tempfile.mkdtemp(dir=world))
    folder.rmdir()
    try:
        copied(world, folder)
        (folder / case.file).parent.mkdir(parents=True, exist_ok=True)
        if (folder / case.file).is_dir():
            shutil.rmtree(folder / case.file)
        put(folder / case.file, case.content)
        for command in case.commands:
            yield _one(folder, case, command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _one(folder: Path, case: Case, command: tuple[str, ...]) -> Ending:
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    before = _memory()[1]
    child = os.fork()
    if not child:
        _child(folder, case, command, out, err)
    _, status, used = os.wait4(child, 0)
    ending = Ending(
        case.title,
        " ".join(command),
        os.waitstatus_to_exitcode(status),
        out.read_text(errors="replace")[-4000:],
        err.read_text(errors="replace")[-4000:],
        round(used.ru_utime + used.ru_stime, 2),
        max(0, used.ru_maxrss * 1024 - before),
    )
    out.unlink()
    err.unlink()
    ending.problem = judge(case, command[0], ending)
    return ending


def _child(folder: Path, case: Case, command: tuple[str, ...], out: Path, err: Path) -> None:
    from draftmill.jobs.cli import main

    code = 1
    try:
        for stream, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.chdir(folder)
        os.environ["DRAFTMILL_CACHE"] = str(folder / "cache")
        signal.alarm(MOST_WALL_S)
        seconds = MOST_CPU_S_CONVERTING if case.kind in CONVERTED else MOST_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_memory()[0] + ROOM,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = main(command)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - this is what the test looks for
        traceback.print_exc()
        sys.stderr.flush()
        code = 99
    finally:
        os._exit(code)


def _memory() -> list[int]:
    """Bytes of this process's address space, and of those that are resident."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]


def judge(case: Case, verb: str, ending: Ending) -> str:
    """What is wrong with an ending, in words; nothing if it is as documented."""
    said = ending.out + ending.err
    if ending.code < 0:
        return f"ended by signal {-ending.code}"
    if "draftmill: unexpected " in ending.err or "Traceback" in said:
        return "unexpected"
    if ending.code not in DOCUMENTED | ({1} if verb == "verify" else set()):
        return f"exit code {ending.code}"
    if ending.grown_bytes > MOST_BYTES:
        return f"{ending.grown_bytes / 2**20:.0f} MB"
    if len(ending.err) > 3500:
        return "a message of several pages"
    place = Path(case.file)
    if ending.code == 2 and case.named and place.name not in said and f"/{place.parent}" not in said:
        return "the message does not name the file"
    return ""


def endings(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
