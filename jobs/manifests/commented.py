"""YAML text of plain data, with comments at chosen places. What a YAML reader could mistake for something else is quoted.

A comment belongs to a path into the data, ("spec", "workerGroupSpecs", 0, "replicas"), and stands above its line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import yaml

Path: TypeAlias = tuple[str | int, ...]
Comments: TypeAlias = Mapping[Path, str]

WIDTH = 110

PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")
"""Strings that need no quotes, except WORDS. Numbers, dates and 1e3, which YAML 1.1 and 1.2 read differently, are quoted."""

WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    """Lists are indented under their key; the same object twice is written twice."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text:  # the emitter falls back to double quotes if a block can't hold the text
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    plain = PLAIN.fullmatch(text) and text.lower() not in WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def documents(head: str, parts: Sequence[tuple[Mapping[str, Any], Comments]]) -> str:
    """The text of one file: `head` as a comment, then one YAML document for each part, each with its comments."""
    text = "---\n".join(document(data, comments) for data, comments in parts)
    written = f"{comment(head)}{text}"
    assert list(yaml.safe_load_all(written)) == [data for data, _ in parts]
    return written


def document(data: Mapping[str, Any], comments: Comments) -> str:
    """The text of one document; a comment whose path is not in the data is left out."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    lines = text.split("\n")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    places = dict(_places(node, ()))
    found = [(places[path], said) for path, said in comments.items() if path in places]
    for line, said in sorted(found, key=lambda one: one[0], reverse=True):
        # As far in as its line: a comment further in than that would belong to a text in a block that ends above it.
        lines[line:line] = comment(said, indent=len(lines[line]) - len(lines[line].lstrip(" "))).splitlines()
    return "\n".join(lines)


def _places(node: yaml.Node | None, path: Path) -> Iterator[tuple[Path, int]]:
    """The path and line of everything in a document."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line
            yield from _places(value, (*path, key.value))
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line
            yield from _places(value, (*path, index))


def comment(text: str, indent: int = 0) -> str:
    """The text as comment lines of at most WIDTH characters. Paragraphs are wrapped; lines that begin with a space stay whole."""
    lines: list[str] = []
    for whole, paragraph in groupby(text.splitlines(), key=lambda line: not line or line.startswith(" ")):
        if whole:
            lines += paragraph
        else:
            width = WIDTH - indent - 2
            lines += textwrap.wrap(" ".join(paragraph), width, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{' ' * indent}#{f' {line}' if line else ''}\n" for line in lines)
