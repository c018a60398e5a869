"""A word as a shell, a crontab and a systemd unit read it back: the same word, whatever characters it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from draftmill.storage.errors import UserError

PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
"""Words that all of these programs read as they are."""


BY_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')
"""Before a command: a shell that becomes the command's program."""


def check_printable(text: str, field: str) -> str:
    """Return the text; UserError if it is empty or has characters that no one-line setting can hold."""
    if not text or not text.isprintable():
        raise UserError(f"{text[:80]!r} is not allowed; allowed: printable characters on one line", field=field)
    return text


def shell(words: Iterable[str]) -> str:
    """A command for sh and bash."""
    return " ".join(map(shlex.quote, words))


def crontab(words: Iterable[str]) -> str:
    """A command for a crontab whose SHELL is bash.

    In a crontab `%` means a line end. Cron programs disagree on backslashes before `%` and before other backslashes, so neither
    character appears: bash's $'..' spells both as numbers.
    """
    return " ".join(_for_cron(word) for word in words)


def _for_cron(word: str) -> str:
    if not re.search(r"[%\\]", word):
        return shlex.quote(word)
    return "$'" + re.sub(r"[%\\']", lambda found: f"\\x{ord(found[0]):02x}", word) + "'"


def systemd(words: Sequence[str]) -> str:
    """A command for ExecStart=: `%` and `$` are doubled, and what is not plain is in double quotes.

    systemd refuses a program with quotes or backslashes in its path, and does not read `$$` there as `$`. A shell starts
    such a program.
    """
    if re.search(r"""["'\\$]""", words[0]):
        words = [*BY_SHELL, *words]
    return " ".join(_for_systemd(word) for word in words)


def _for_systemd(word: str) -> str:
    if PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def systemd_path(path: str, field: str) -> str:
    """A path as the whole value of a setting, where `%` is special and nothing is quoted."""
    if path != path.strip() or path.endswith("\\") or re.search(r"""["'\\]""", path):
        raise UserError(
            f"{path!r} is not allowed in a systemd unit; allowed: a path without quotes, backslashes and outer spaces",
            field=field,
        )
    return path.replace("%", "%%")
