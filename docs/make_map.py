"""Prints a map of the project: its rooms, and for the product each Python file with the first sentence of its docstring.

python -m docs.make_map
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jobs", "actors", "decoders", "storage", "infra")
FOLDERS = (*PRODUCT, "recipes", "benchmarks", "examples", "docs")


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


def print_map() -> None:
    """Print the rooms and the files of the product."""
    for room in rooms():
        name, init = room.relative_to(ROOT), room / "__init__.py"
        if init.exists():
            print(f"\n{name.as_posix()}/: {first_line(init)}")
        if name.parts[0] in PRODUCT:
            for path in sorted(room.glob("*.py")):
                if path != init:
                    print(f"  {path.name}: {first_line(path)}")


if __name__ == "__main__":
    print_map()
