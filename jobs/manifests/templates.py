"""Fills the templates of infra/manifests, each of which reads like the file that it becomes. Quoting is done by filters."""

from __future__ import annotations

import textwrap
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from draftmill.jobs.manifests.quoting import shell, yaml_text

WIDTH = 110
"""Characters of a comment line, as far as words allow."""


def fill_template(template: str, **facts: Any) -> str:
    """The text of a file, from a template and what it names."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("draftmill.infra", "manifests"),
        undefined=StrictUndefined,
        autoescape=False,  # no web pages: each format has a filter of its own
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(yaml=yaml_text, shell=shell, indent=_indented, comment=comment)
    return made


def _indented(text: str, width: int) -> str:
    """Further lines indented, but for empty ones. jinja's own filter also breaks lines where YAML does not."""
    lines = text.strip("\n").split("\n")
    return "\n".join([lines[0], *(f"{' ' * width}{line}" if line else "" for line in lines[1:])])


def comment(text: str, indent: int) -> str:
    """The text as comment lines, the first of which stands behind the indent already."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(f"# {line}" for line in lines)
