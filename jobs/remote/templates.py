"""Fills the templates of infra/manifests, each of which reads like the file that it becomes. Quoting is done by filters.

A word is written so that a shell, a crontab and YAML read it back: the same word, whatever characters it has.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from draftmill.storage.errors import UserError


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
    return " ".join(
        "$'" + re.sub(r"[%\\']", lambda special: f"\\x{ord(special[0]):02x}", word) + "'"
        if re.search(r"[%\\]", word)
        else shlex.quote(word)
        for word in words
    )


# ---- YAML ------------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Puts also into quotes what our reader of specs takes for a number, and ends of lines that would be lost."""


def _scalar(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if re.search(r"^[-+]?[\d.]+[eE]|[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _scalar)


def yaml_document(data: Mapping[str, Any]) -> str:
    """A YAML document of plain data, in which nothing can be read as something else."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def yaml_text(text: str, indent: int = 0) -> str:
    """A text as a value in YAML: in double quotes, or as a block whose key is indented by so many characters."""
    # The emitter falls back to double quotes if a block can't hold the text. Empty lines at its end would be lost here.
    is_block = "\n" in text and not re.search(r"(^|\n)\n\Z|[\x85\u2028\u2029]", text)
    written = yaml.safe_dump(text, default_style="|" if is_block else '"', allow_unicode=True, width=10**6)
    return str(written).rstrip("\n").replace("\n  ", f"\n{' ' * (indent + 2)}")


WIDTH = 110
"""Characters of a comment line, as far as words allow."""


def fill_template(template: str, **facts: Any) -> str:
    """The text of a file, from a template and what it names."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("draftmill.infra", "manifests"),
        undefined=StrictUndefined,
        autoescape=False,  # no web pages: each format has a filter of its own
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(yaml=yaml_text, shell=shell, indent=_indent, comment=comment)
    return environment


def _indent(text: str, width: int) -> str:
    """Further lines indented, but for empty ones. jinja's own filter also breaks lines where YAML does not."""
    lines = text.strip("\n").split("\n")
    return "\n".join([lines[0], *(f"{' ' * width}{line}" if line else "" for line in lines[1:])])


def comment(text: str, indent: int) -> str:
    """The text as comment lines, the first of which stands behind the indent already."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(f"# {line}" for line in lines)
