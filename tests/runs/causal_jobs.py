"""A small causal model with the builtin tokenizer, and jobs over it that run in this process, without Ray."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from draftmill.actors.loop.worker import build_runner
from draftmill.actors.messages import Failure, WorkUnit
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import make_job, resolve
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import open_store
from tests.decoders.backbones.causal_models import save_random

TOKENIZER = Path(__file__).parents[2] / "decoders" / "builtin" / "asarm-tiny"
LONGEST, ROOM = 64, 16


@dataclasses.dataclass(frozen=True)
class World:
    """A folder with a model, transformers' own copy of it, its tokenizer, and its end tokens."""

    folder: Path
    model: Any
    tokenizer: Tokenizer
    ends: list[int]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) or [1]

    def expected(self, text: str, *, room: int = ROOM, ends: list[int] | None = None) -> list[int]:
        """What transformers generates greedily behind a prompt, at most as far as the model's end."""
        ids = torch.tensor([self.ids(text)])
        room = min(room, LONGEST - ids.shape[1])
        found = self.model.generate(
            ids, do_sample=False, max_new_tokens=room, eos_token_id=self.ends if ends is None else ends, pad_token_id=5
        )
        return found[0, ids.shape[1] :].tolist()

    def spec(self, folder: Path, rows: list[dict[str, Any]], **sections: Any) -> JobSpec:
        """A job over these rows, in another folder, with the model of this one."""
        return job_spec(folder, rows, **{"model": {"path": str(self.folder / "model"), "device": "cpu"}} | sections)


def make_world(folder: Path, **config: Any) -> World:
    """A model in `folder / model` and what a test needs to know of it."""
    model = save_model(folder / "model", ends=[2], **config)
    tokenizer = load_tokenizer(TOKENIZER)
    assert tokenizer is not None
    return World(folder, model, tokenizer, [2])


def save_model(folder: Path, *, ends: list[int], **config: Any) -> Any:
    """Save random Qwen2 weights beside the builtin tokenizer; returns transformers' own model with them.

    With this seed and spread the model does not say the same tokens over and over.
    """
    config = {"vocab_size": 2048, "max_position_embeddings": LONGEST, "tie_word_embeddings": False} | config
    model = save_random(folder, seed=2, std=0.5, **config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return model


def job_spec(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> JobSpec:
    """A spec for these rows and the model in `folder / model`; `sections` replace whole sections."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "task": {"kind": "complete", "max_new_tokens": ROOM},
        "input": {"path": str(folder / "rows.jsonl")},
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": 0.0},
        "output": {"path": str(folder / "run"), "unit_rows": 8},
    } | sections
    return check_spec(data)


def results_of(spec: JobSpec) -> dict[str, dict[str, Any]]:
    tables = read_results(open_store(spec.output.path))
    return {row["id"]: row for table in tables for row in table.to_pylist()}


def run_here(spec: JobSpec, *, only: int | None = None) -> dict[str, dict[str, Any]]:
    """Plan the job and decode all of its units, or one, by one worker in this process; returns the result rows by id."""
    store = open_store(spec.output.path)
    resolved = resolve(spec, store)
    plan = make_plan(resolved, store, Display())
    runner = build_runner(make_job(resolved, plan), name="w", node="n", threads=1)
    for size in (size for size in plan.sizes() if only in {None, size.unit}):
        runner.add(WorkUnit(size.unit, size.unit, size.rows, size.tokens, 1, 1, 0, size.rows))
        while runner.held:
            for news in runner.step():
                assert not isinstance(news, Failure), news
    runner.close()
    return results_of(spec)


def next_job(folder: Path, rows: list[dict[str, Any]], *, unit_rows: int = 8, **sections: Any) -> Any:
    """The result rows by id of one more job in the folder; the rows of a job over token ids have them as `ids`."""
    output = {"path": str(folder / f"run-{len(list(folder.glob('run-*')))}"), "unit_rows": unit_rows}
    if "ids" in rows[0]:
        sections = {
            "input": {"path": str(folder / "rows.jsonl"), "columns": {"tokens": "ids"}},
            "model": {"path": str(folder / "model"), "device": "cpu", "tokenizer": "none"},
        } | sections
    return run_here(job_spec(folder, rows, **{"output": output} | sections))
