"""Tasks that ask for a hole between two texts: their rows, and the functions that the files in `tasks` name.

    metadata: {infill: {prefix: prompt, suffix: suffix, hidden: canonical_solution}}      columns of a task's documents

A task with this entry is infilled, whatever its `doc_to_text`; the answer is the hole's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from draftmill.actors.sandbox.sandbox import find_sandbox
from draftmill.storage.errors import UserError
from draftmill.storage.runs.metric_files import pass_at_k as estimate

FIELD: Final = "--tasks"

TASKS: Final = Path(__file__).resolve().parent / "tasks"
"""The tasks that draftmill adds to lm-evaluation-harness's, or has in place of them."""

COLUMNS: Final = ("prefix", "suffix", "hidden")


def hole_of(name: str, task: Any) -> dict[str, str] | None:
    """The columns of a task that is infilled, by what they are; None for another task. UserError for wrong ones."""
    given = (task.config.metadata or {}).get("infill")
    if given is None:
        return None
    if not isinstance(given, dict) or sorted(given) != sorted(COLUMNS):
        raise UserError(
            f"{given!r}; allowed: a column for each of {', '.join(COLUMNS)}", field=f"{name}: metadata.infill"
        )
    present = sorted(next(iter(task.eval_docs), dict.fromkeys(given.values(), "")))
    for key, column in given.items():
        if column not in present:
            raise UserError(
                f"{column!r} is no column of the documents; allowed: {', '.join(present)}",
                field=f"{name}: metadata.infill.{key}",
            )
    return given


def hole_row(doc: Mapping[str, Any], columns: Mapping[str, str], *, spans: bool) -> dict[str, Any]:
    """The row of a document's hole; with `spans` the hole has as many tokens as the hidden text, which it says for that."""
    prefix, suffix, hidden = (doc[columns[key]] for key in COLUMNS)
    if spans:
        return {"text": prefix + hidden + suffix, "spans": [[len(prefix), len(prefix) + len(hidden)]]}
    return {"prefix": prefix, "suffix": suffix}


# ---- functions of the tasks, with the arguments that lm_eval gives


def build_predictions(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The whole programs of each document's answers."""
    return [[doc["prompt"] + text + doc["suffix"] for text in of] for of, doc in zip(resps, docs, strict=True)]


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """The estimates for one document: its programs run in the sandbox, each with the tests behind it."""
    (tests,), (programs,), sandbox = references, predictions, find_sandbox(field=FIELD)
    passed = sum(sandbox.run(f"{program}\n{tests}").passed for program in programs)
    return {f"pass@{most}": estimate(len(programs), passed, most) for most in k}


def exact_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer is the hidden text, among all documents and among those of its language."""
    same = float(results[0] == doc["canonical_solution"])
    return {"exact_match": same, f"{doc['language']} Exact Match": same}
