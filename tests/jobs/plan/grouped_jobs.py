"""A job of multiple choice, planned by length or by beginnings, and what its units cost on workers of their own."""

import json
import random
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from draftmill.actors.loop.runner import in_order
from draftmill.actors.loop.worker import build_parts
from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows import makers
from draftmill.decoders.base import EngineStats
from draftmill.decoders.engine.engine import Engine
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import make_job, resolve, resolved_of
from draftmill.storage.stores.store import open_store

_FIRST = ["def", "return", "self", "import", "class", "for", "in", "range", "if"]
WORDS = [*_FIRST, *["else", "print", "value", "name", "index", "list", "dict", "open", "read"]]
CHOICES = 4


def write_questions(path: Path, count: int, tasks: int = 2) -> None:
    """Questions of several tasks in turn, each after its task's examples; four ends of different lengths each."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    shots = [text(40) for _ in range(tasks)]
    with path.open("w") as file:
        for number in range(count):
            prompt = f"{shots[number % tasks]}\n{text(rng.randint(12, 24))}"
            for choice in range(CHOICES):
                row = {"id": f"{number}-{choice}", "prompt": prompt, "completion": " " + text(1 + 3 * choice)}
                file.write(json.dumps(row) + "\n")


def spec_for(path: Path, out: str, **more) -> JobSpec:
    """Scores of the ends by builtin:ar-tiny, in units of up to 32 rows."""
    return check_spec(
        {
            "task": {"kind": "score"},
            "input": {"path": str(path), "columns": {"id": "id"}},
            "model": {"path": "builtin:ar-tiny", "device": "cpu"},
            "decoder": {"kind": "autoregressive"},
            "batching": {"max_rows": 8},
            "output": {"path": out, "unit_rows": 32},
            **more,
        }
    )


def planned(spec: JobSpec, *, by_length: bool = False) -> Plan:
    """The job's plan; `by_length` as if no decoder took beginnings over."""
    store = open_store(spec.output.path)
    with ExitStack() as stack:
        if by_length:
            stack.enter_context(mock.patch.object(makers, "shares_beginnings", lambda task, info: False))
        return make_plan(resolve(spec, store), store, Display())


def decoded_apart(plan: Plan) -> tuple[EngineStats, dict[str, float | None]]:
    """Decode all units, each by a worker that has seen nothing before: what they cost together, and the rows' scores."""
    decoder, unit_io = build_parts(make_job(resolved_of(plan), plan), name="alone", node="here", threads=1)
    assert isinstance(decoder, Engine)
    scores: dict[str, float | None] = {}
    for size in plan.sizes():
        samples = unit_io.open_unit(WorkUnit(0, size.unit, size.rows, size.tokens, 1, 0, 0, size.rows))
        waiting = in_order([sample for sample in samples if sample.canvas is not None])[::-1]
        while waiting or decoder.active:
            room = decoder.room(max((len(sample.canvas) for sample in waiting if sample.canvas is not None), default=0))
            admitted = [waiting.pop() for _ in range(min(room, len(waiting)))]
            decoder.admit([sample.request(sample.index) for sample in admitted])
            for outcome in decoder.step():
                scores[samples[outcome.index].note.planned.id] = outcome.logprob
        for slot in range(decoder.max_rows):
            decoder.scheduler.prefixes.forget(slot)
    return decoder.stats, scores
