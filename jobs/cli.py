"""The commands of draftmill: arguments in, exit code out (exit_codes.py). The options of each are in arguments.py."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from draftmill.jobs.arguments import COMMANDS
from draftmill.jobs.drive.log import shown, silence
from draftmill.jobs.exit_codes import INTERRUPTED, OK, UNEXPECTED, Ended, code_of
from draftmill.storage.errors import UNUSABLE_ERRORS, AnotherDriver, StoreError, StoreFull, UserError
from draftmill.storage.secrets import presentable

_log = logging.getLogger("draftmill.jobs.cli")  # as a program, this module is __main__

_LONG_WORD = re.compile(r"\S{1000,}")
"""A value that a message quotes, and that would fill the screen."""

COLLECT_AFTER = 100_000
"""Objects allocated between two garbage collections: with Python's default, 700, these take a tenth of the import time."""


def main(argv: Sequence[str] | None = None, *, is_program: bool = False) -> int:
    """Run one command; errors go to stderr as one line, with a traceback only under --debug.

    `is_program`: the process is this command's alone, and signals may end it by force.
    """
    top = parser()
    try:
        arguments, unknown = top.parse_known_args(argv)
    except BrokenPipeError:
        return UNEXPECTED  # as in _run: the reader of --help has exited
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}{arguments.hint}")
    arguments.is_program = is_program
    gc.set_threshold(COLLECT_AFTER)
    as_json = getattr(arguments, "log", "text") == "json"
    with shown(as_json=as_json, quiet=getattr(arguments, "quiet", False)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        code = int(arguments.command(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error still counts
        return code
    except (AnotherDriver, Ended) as error:
        _log.error(presentable(str(error)))
        return code_of(error)
    except (UserError, StoreError) as error:
        return _complain(arguments, error, code_of(error))
    except KeyboardInterrupt:
        resume = "; run it again to resume" if arguments.resumes else ""  # the other commands leave nothing to resume
        _log.warning(f"interrupted{resume}")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the user gets one line for any error
        if isinstance(error, BrokenPipeError) and not (arguments.resumes or arguments.follows):
            return UNEXPECTED  # the reader of what the command is for has exited, as `| head` does
        return _complain(arguments, error, UNEXPECTED)


def _complain(arguments: argparse.Namespace, error: Exception, code: int) -> int:
    if arguments.debug:
        raise error
    kind = "" if isinstance(error, UserError | StoreError) else f"unexpected {type(error).__name__}: "
    hint = "" if isinstance(error, (*UNUSABLE_ERRORS, StoreFull)) else " (--debug shows where)"
    if isinstance(error, StoreError) and _asks_amazon(arguments):
        hint = f"; another S3 service than Amazon's is --s3-endpoint URL, or AWS_ENDPOINT_URL{hint}"
    text = presentable(f"{kind}{error}{hint}")
    _log.error(_LONG_WORD.sub(lambda word: f"{word[0][:200]}... ({len(word[0]):,} characters)", text))
    return code


def _asks_amazon(arguments: argparse.Namespace) -> bool:
    """Whether a command without a spec, which could say otherwise, looks for what it was given on Amazon's S3."""
    has_endpoint = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys()
    if getattr(arguments, "s3_endpoint", "") is not None or has_endpoint:
        return False
    values = [word for value in vars(arguments).values() for word in (value if isinstance(value, list) else [value])]
    return any(str(word).startswith("s3://") for word in values)


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="draftmill", description="Batch generation, lossless, resumable, exactly once.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command(commands, common)
    return top


def program() -> NoReturn:
    """The program `draftmill`: run a command and end the process with its exit code.

    Python would wait for every thread at its end. After an error or a signal, a thread may still work on what was interrupted, or
    wait for an answer, for ever: then the process ends without it.
    """
    code = main(is_program=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that was closed from the start is None
        try:
            stream.flush()
        except OSError:
            silence(stream)  # else Python would try again, and end with a code of its own
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if code != OK and not all(thread.daemon for thread in others):
        atexit._run_exitfuncs()  # temporary files
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    program()
