"""Writes docs/map.md: the rooms of the project, and for the product a short phrase for every file, from the docstrings.

python -m docs.make_map
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jobs", "actors", "decoders", "storage", "infra")
FOLDERS = (*PRODUCT, "recipes", "benchmarks", "examples", "docs")
HEAD = """# Map

The rooms of the project, and a phrase for each Python file of the product. `python -m docs.make_map` generates this page from
docstrings; the whole docstring says more. `tests/` mirrors the folders.
"""
FEWEST_WORDS, MOST_WORDS = 3, 9
"""A phrase ends at the first comma, colon or bracket after so many words, and at the latest after so many."""
LOOSE_ENDS = ("a", "an", "and", "as", "by", "for", "in", "of", "on", "or", "that", "the", "their", "to", "with")


def first_line(path: Path) -> str:
    """The first paragraph of a file's docstring up to its first full stop; empty where there is no docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    return line.partition(". ")[0].removesuffix(".")


def phrase(line: str) -> str:
    """The beginning of a line: up to its first comma, colon or bracket, or its first words and ".."."""
    words = re.sub(r"^`[^`]*`: ", "", line).split()
    for count, word in enumerate(words[:MOST_WORDS], start=1):
        in_code = " ".join(words[:count]).count("`") % 2
        if count >= FEWEST_WORDS and word[-1] in ",:;" and not in_code:
            return " ".join(words[:count]).rstrip(",:;")
        if count > FEWEST_WORDS and word.startswith("("):
            return " ".join(words[: count - 1])
    if len(words) <= MOST_WORDS:
        return " ".join(words)
    kept = words[: MOST_WORDS - 1]
    while kept[-1] in LOOSE_ENDS:
        kept.pop()
    return " ".join(kept) + " .."


def rooms(root: Path = ROOT) -> Iterator[Path]:
    """The folders with Python files that are no tests, each before those inside of it."""
    for top in FOLDERS:
        found = {path.parent for path in (root / top).rglob("*.py") if "__pycache__" not in path.parts}
        yield from sorted(found)


def product_files(root: Path = ROOT) -> Iterator[Path]:
    """The files that the map names."""
    for room in rooms(root):
        if room.relative_to(root).parts[0] in PRODUCT:
            yield from sorted(path for path in room.glob("*.py") if path.name != "__init__.py")


def make_map(root: Path = ROOT) -> str:
    """The text of docs/map.md."""
    parts, files = [HEAD], list(product_files(root))
    for room in rooms(root):
        init = room / "__init__.py"
        about = first_line(init) if init.exists() else ""
        lines = [f"\n## {room.relative_to(root).as_posix()}/\n"]
        lines += [f"{about}.\n"] if about else []
        lines += [f"- {path.name}: {phrase(first_line(path))}" for path in files if path.parent == room]
        if len(lines) > 1:
            parts.append("\n".join(lines).rstrip("\n") + "\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "map.md").write_text(make_map(), encoding="utf-8")
