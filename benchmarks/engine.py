"""The overhead of a job beyond decoding: tokens/s of a whole job against the bare decode loop on the same samples.

    python -m benchmarks.engine [--limit N] [--shape tiny|base] [--set decoder.fused=rows ...]

The bare loop runs in this process: the same decoder, slots and canvases, read and tokenized beforehand, nothing written. The
job then runs with one worker and the same threads, and with the workers that `auto` chooses. `--shape base` runs random weights
in the recipe's base shape (8 layers of 512, 28 million parameters) instead of the shipped model. The table also has the job's
efficiency figures; docs/engine.md has their goals.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.job import Job
from draftmill.actors.loop.worker import build_parts
from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.samples import Sample
from draftmill.decoders.base import Request
from draftmill.jobs.config.spec import JobSpec, load_spec
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.drive.totals import efficiency
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.plan.resolve import make_job, resolved_of
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.stores.store import open_store

SPEC = Path(__file__).parents[1] / "examples" / "infill_stdlib.yaml"
GOALS = {"token_padding_eff": ">= 0.98", "lane_eff": ">= 0.98", "engine_eff": ">= 0.92", "tail_frac": "<= 0.05"}


@dataclass(frozen=True, slots=True)
class JobRun:
    """One finished job: tokens per second of decoding time, and its efficiency figures."""

    rate: float
    figures: dict[str, float]


def run(spec: JobSpec) -> JobRun:
    """Run a job to its end and read its figures from its run directory."""
    if run_job(spec, RunOptions()) != OK:
        raise SystemExit("the job did not end well")
    sessions = read_sessions(open_store(spec.place(spec.output.path)))
    return JobRun(sessions.committed.new_tokens / sessions.wall_s, efficiency(sessions.effort))


def canvases(job: Job, plan: Plan, threads: int) -> tuple[list[Sample], object]:
    """Load the worker's parts and make every sample of the plan, in the order in which workers take them."""
    decoder, unit_io = build_parts(job, name="bare", node="here", threads=threads)
    samples: list[Sample] = []
    for size in plan.sizes():
        unit = WorkUnit(0, size.unit, size.rows, size.tokens, 1, 0, 0, size.rows)
        samples += sorted(unit_io.open_unit(unit), key=lambda sample: -_length(sample))
    return samples, decoder


def _length(sample: Sample) -> int:
    return 0 if sample.canvas is None else len(sample.canvas)


def bare_loop(spec: JobSpec, threads: int) -> float:
    """Tokens/s of the decode loop alone, on the samples of a finished job's plan."""
    from draftmill.decoders.base import CachedDecoder

    plan = load_plan(open_store(spec.place(spec.output.path)))
    assert plan is not None, "the job has run, so it has a plan"
    samples, decoder = canvases(make_job(resolved_of(plan), plan), plan, threads)
    assert isinstance(decoder, CachedDecoder)
    queue = [
        Request(number, sample.key, sample.canvas) for number, sample in enumerate(samples) if sample.canvas is not None
    ][::-1]
    tokens, started = 0, time.perf_counter()
    while queue or decoder.active:
        room = decoder.room(len(queue[-1].canvas)) if queue else 0
        decoder.admit([queue.pop() for _ in range(min(room, len(queue)))])
        tokens += sum(len(outcome.tokens) for outcome in decoder.step())
    return tokens / (time.perf_counter() - started)


def random_model(folder: Path) -> str:
    """Write a model of the recipe's base shape with random weights, and the builtin one's tokenizer; returns its path."""
    from transformers import PreTrainedTokenizerFast

    from recipes.asarm import SIZES
    from recipes.folder import save_model
    from recipes.two_stream import TwoStream

    model = TwoStream(SIZES["base"].shape, torch.Generator().manual_seed(0))
    save_model(folder, model, PreTrainedTokenizerFast.from_pretrained(BUILTIN / "asarm-tiny"))
    return str(folder)


def main() -> None:
    """Run the job both ways and the bare loop, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--shape", choices=("tiny", "base"), default="tiny")
    flags = parser.parse_args()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, ray_session(None):
        if flags.shape == "base":
            flags.overrides.append(f"model.path={random_model(Path(folder) / 'model')}")
        specs = {
            name: load_spec(
                SPEC,
                [
                    *flags.overrides,
                    f"input.limit={flags.limit}",
                    f"workers.count={count}",
                    f"output.path={folder}/{count}",
                ],
            )
            for name, count in (("job, 1 worker", "1"), ("job, auto", "auto"))
        }
        runs = {name: run(spec) for name, spec in specs.items()}
        bare = bare_loop(specs["job, auto"], threads)
    print(f"bare loop, {threads} threads: {bare:.0f} tokens/s")
    print(
        "| | tokens/s | of bare loop (goal >= 0.95) | "
        + " | ".join(f"{key} ({goal})" for key, goal in GOALS.items())
        + " |"
    )
    print("|---" * (3 + len(GOALS)) + "|")
    for name, result in runs.items():
        cells = " | ".join(f"{result.figures[key]:.3f}" for key in GOALS)
        print(f"| {name} | {result.rate:.0f} | {result.rate / bare:.3f} | {cells} |")


if __name__ == "__main__":
    main()
