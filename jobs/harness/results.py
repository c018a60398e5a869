"""The results of an evaluation: what each answer cost joins lm-evaluation-harness's samples, and its own code writes the files.

    EVAL/MODEL/results_2026-11-22T14-00-00.json
    EVAL/MODEL/samples_TASK_2026-11-22T14-00-00.jsonl

Importing this module imports lm_eval (extra `lm-eval`).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lm_eval.api.task import Task
from lm_eval.loggers import EvaluationTracker

from draftmill.jobs.harness.model import Notes
from draftmill.jobs.harness.rows import document
from draftmill.storage.errors import StoreError
from draftmill.storage.stores.interface import Store

KEY: Final = "draftmill"
"""The key of a sample, and of the results, that holds what lm_eval does not know."""

TOTALS: Final = ("new_tokens", "nfe", "nfe_draft", "proposed", "accepted", "device_s")


def join(tasks: Mapping[str, Task], samples: Mapping[str, list[dict[str, Any]]], notes: Notes, chosen: Any) -> None:
    """Give each sample the facts of its answers: `draftmill[i][k]` belongs to `resps[i][k]`."""
    for name, of_task in samples.items():
        facts = facts_of(tasks[name], notes, chosen)
        for sample in of_task:
            sample[KEY] = facts[sample["doc_id"]]


def facts_of(task: Task, notes: Notes, chosen: Any) -> dict[int, list[list[dict[str, Any]]]]:
    """The facts of a task's answers by document: for each request of it, in lm_eval's order, those of each repeat."""
    by_document = defaultdict(list)
    for one in task.instances:
        by_document[document(one, chosen)].append(one)
    return {
        number: [notes.of(one) for one in sorted(found, key=lambda one: one.idx)]
        for number, found in by_document.items()
    }


def totals(tasks: Mapping[str, Task], notes: Notes, chosen: Any) -> dict[str, dict[str, Any]]:
    """Sums of each task's rows; a row that answers several requests counts once."""
    found = {}
    for name, task in tasks.items():
        answers = [one for of_doc in facts_of(task, notes, chosen).values() for of in of_doc for one in of]
        rows = list({(one["run_dir"], one["id"]): one for one in answers}.values())
        sums = {key: sum(row[key] for row in rows if key in row) for key in TOTALS if any(key in row for row in rows)}
        found[name] = {
            "answers": len(answers),
            "rows": len(rows),
            "failed": sum(one["status"] != "ok" for one in answers),
            "run_dirs": sorted({row["run_dir"] for row in rows}),
            **sums,
        }
    return found


def line_of(name: str, sums: Mapping[str, Any]) -> str:
    """A task's sums in one line."""
    tokens, nfe = sums.get("new_tokens", 0), sums.get("nfe", 0)
    parts = [f"{sums['answers']:,} answers from {sums['rows']:,} rows", f"{tokens:,} tokens", f"{nfe:,} forwards"]
    if tokens:
        parts.append(f"{nfe / tokens:.2f} per token")
    if sums.get("proposed"):
        parts.append(f"{sums['accepted'] / sums['proposed']:.0%} of {sums['proposed']:,} drafts accepted")
    if "device_s" in sums:
        parts.append(f"{sums['device_s']:,.1f} s of forwards")
    if sums["failed"]:
        parts.append(f"{sums['failed']:,} answers failed and count as empty")
    return f"{name}: {', '.join(parts)}"


def save(
    tracker: EvaluationTracker, results: dict[str, Any], samples: Mapping[str, list[dict[str, Any]]], store: Store
) -> list[str]:
    """Write the files with lm_eval's own code and put them into the evaluation's directory; returns their names."""
    with tempfile.TemporaryDirectory(prefix="draftmill-eval-") as folder:
        tracker.output_path = folder
        tracker.save_results_aggregated(results=results, samples=dict(samples))
        for name, of_task in samples.items():
            tracker.save_results_samples(task_name=name, samples=of_task)
        # The results come last, so that samples without results are those of an interrupted evaluation.
        files = sorted((path for path in Path(folder).rglob("*") if path.is_file()), reverse=True)
        if len(files) != 1 + len(samples):  # lm_eval only logs what it could not write
            raise StoreError(f"lm_eval wrote {len(files)} of {1 + len(samples)} files of results; see its warnings")
        return [_stored(store, path.relative_to(folder).as_posix(), path) for path in files]


def _stored(store: Store, name: str, path: Path) -> str:
    store.put(name, path.read_bytes())
    return name


def printed(table: Callable[..., str], results: Mapping[str, Any]) -> str:
    """lm_eval's tables of tasks and of groups."""
    return "\n".join([table(results), *([table(results, "groups")] if "groups" in results else [])])


def failed_first(tasks: Mapping[str, Task], notes: Notes, chosen: Any, most: int = 3) -> Sequence[str]:
    """The first few failed answers, with their reasons."""
    found: list[str] = []
    for task in tasks.values():
        for of_doc in facts_of(task, notes, chosen).values():
            found += [f"{one['id']}: {one.get('error')}" for of in of_doc for one in of if one["status"] != "ok"]
    return found[:most]
