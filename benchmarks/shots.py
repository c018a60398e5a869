"""A five-shot evaluation with and without common beginnings of prompts: rows computed, seconds, whether answers are equal.

    python -m benchmarks.shots                              choices and generated answers over source code, builtin:ar-tiny
    python -m benchmarks.shots --documents 8 --slots 4      a small part, as a check

Both sides are `draftmill eval --local` in this process on the same tasks, run in turns. Without: no sample finds that another
one's prompt begins like its own. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from draftmill.decoders.base import EngineStats
from draftmill.decoders.engine.engine import Engine
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.eval.evaluate import evaluate
from draftmill.jobs.eval.options import EvalOptions
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.stores.store import open_store
from recipes.corpus import split, standard_library
from tests.real.lm_eval_on_it import newest, offline

TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{code}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{code}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
SHOTS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One evaluation: from the call to the scores, what the engine did, and the answers as lm_eval got them."""

    seconds: float
    engine: EngineStats
    answers: list[Any]


def documents(count: int) -> list[dict[str, Any]]:
    """Three lines of a held-out file, and four lines of which one comes next."""
    _, files = split(standard_library())
    rows: list[dict[str, Any]] = []
    for file in files:
        lines = [line for line in file.text.splitlines() if len(line.strip()) >= 12 and len(line) <= 60]
        for start in range(0, len(lines) - 12, 12):
            code, choices, gold = "\n".join(lines[start : start + 3]), lines[start + 3 : start + 7], len(rows) % 4
            choices = [*choices[1 : gold + 1], choices[0], *choices[gold + 1 :]]
            rows.append({"code": code, "choices": choices, "gold": gold})
            if len(rows) == count:
                return rows
    raise SystemExit(f"the held-out files have {len(rows)} documents, not {count}")


def write_tasks(folder: Path, count: int) -> Path:
    """The tasks as lm_eval reads them; the examples are the first documents."""
    data = folder / "code.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents(count + SHOTS)))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | source | shots | task))
    return folder


@contextlib.contextmanager
def without() -> Iterator[None]:
    """No sample takes over what another one's prompt left in the cache."""
    init = Engine.__init__

    def alone(engine: Any, *given: Any, **more: Any) -> None:
        init(engine, *given, **more)
        for name in ("find", "find_pending"):
            setattr(engine.scheduler.prefixes, name, lambda *_: (0, -1))
        engine.scheduler.prefixes.insert = lambda *_: 0

    with mock.patch.object(Engine, "__init__", alone):
        yield


def run(tasks: Path, task: str, slots: int) -> Measured:
    """`draftmill eval --local` of one task into a new directory."""
    with tempfile.TemporaryDirectory(prefix="shots-") as folder:
        out, path = Path(folder) / "eval", Path(folder) / "spec.yaml"
        spec = {
            "model": {"path": "builtin:ar-tiny", "device": "cpu"},
            "decoder": {"kind": "autoregressive"},
            "batching": {"max_rows": slots},
            "output": {"path": str(out)},
        }
        path.write_text(yaml.safe_dump(spec))
        options = EvalOptions((task,), include_path=str(tasks), num_fewshot=SHOTS, bootstrap_iters=0)
        started, output = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = evaluate(str(path), [], options, RunOptions(local=True))
        seconds = time.perf_counter() - started
        if code:
            raise SystemExit(f"eval ended with {code}: {output.getvalue()}")
        runs = [place.parent for place in out.rglob("_plan.json")]
        efforts = [read_sessions(open_store(str(place))).effort.engine for place in runs]
        assert len(efforts) == 1, "one run for one kind of requests"
        return Measured(seconds, efforts[0], [sample["resps"] for sample in newest(out, task)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    offline()
    import lm_eval.evaluator

    lm_eval.evaluator.add_env_info = lambda storage: None
    print(f"{flags.documents} documents, {SHOTS} shots, {flags.slots} slots\n")
    names = (
        "task",
        "prompt rows",
        "computed",
        "ratio",
        "all rows, without / with",
        "s without",
        "s with",
        "same answers",
    )
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    with tempfile.TemporaryDirectory(prefix="shots-tasks-") as folder:
        tasks = write_tasks(Path(folder), flags.documents)
        for task in TASKS:
            pairs = []
            for _ in range(flags.repeats):
                with without():
                    alone = run(tasks, task, flags.slots)
                pairs.append((alone, run(tasks, task, flags.slots)))
            alone, shared = pairs[-1]
            rows, computed = shared.engine.prompt_rows, shared.engine.prompt_rows - shared.engine.prompt_rows_shared
            cells = [
                task,
                f"{rows:,}",
                f"{computed:,}",
                f"{rows / computed:.1f}x",
                f"{alone.engine.useful_rows / shared.engine.useful_rows:.1f}x",
                *(f"{statistics.median(pair[side].seconds for pair in pairs):.1f}" for side in (0, 1)),
                "all" if alone.answers == shared.answers else "not all",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
