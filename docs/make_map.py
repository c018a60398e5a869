"""Writes docs/map.md, a line for every Python file but tests: the first line of its docstring.

python -m docs.make_map
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jobs", "actors", "decoders", "storage", "infra", "recipes", "benchmarks", "examples", "docs")
HEAD = """# Map

A line for every Python file, generated from the docstrings by `python -m docs.make_map`. Tests are left out: `tests/` mirrors the
folders.
"""


def first_line(path: Path) -> str:
    """The first paragraph of a file's docstring up to its first full stop; empty where there is no docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    return line.partition(". ")[0].removesuffix(".")


def rooms(root: Path = ROOT) -> Iterator[Path]:
    """The folders with Python files that are no tests, each before those inside of it."""
    for top in FOLDERS:
        found = {path.parent for path in (root / top).rglob("*.py") if "__pycache__" not in path.parts}
        yield from sorted(found)


def make_map(root: Path = ROOT) -> str:
    """The text of docs/map.md."""
    parts = [HEAD]
    for room in rooms(root):
        files = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
        init = room / "__init__.py"
        about = first_line(init) if init.exists() else ""
        lines = [f"\n## {room.relative_to(root).as_posix()}/\n"]
        lines += [f"{about}.\n"] if about else []
        lines += ["| file | what it holds |", "|---|---|"] if files else []
        lines += [f"| {path.name} | {first_line(path).replace('|', chr(92) + '|')} |" for path in files]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "map.md").write_text(make_map(), encoding="utf-8")
