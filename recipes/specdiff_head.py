"""Trains the draft head of a masked-diffusion drafter for a causal target, and writes it into the drafter's folder.

    python -m recipes.specdiff_head --drafter DIR [--target DIR] [--rows N] [--steps N]

Both models are frozen. First both run on pieces of the corpus followed by masks (frozen_pair.py). Then the head learns to map
the drafter's row of a mask and the true tokens before it to the target's distribution. DIR then
holds draft_head.json and draft_head.safetensors, and its README a section with acceptances on held-out files. The tokenizer is
the drafter's. The same seed, flags, thread count and Python give the same head.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from recipes import causal, corpus, draft_report, folder, frozen_pair, loop
from recipes.frozen_pair import Pair, PairRows, Windows
from recipes.head_training import HeadSchedule, fit_heads, head_loss

TARGET = Path(__file__).parent.parent / "decoders" / "builtin" / "ar-tiny"


@dataclass(frozen=True)
class HeadPlan(HeadSchedule):
    """How to train the head: the number of rows, their windows, and the rows per step."""

    steps: int = 1200
    rows: int = 150_000
    batch_rows: int = 1024
    markov_hidden: int = 384
    windows: Windows = field(default_factory=Windows)

    def describe(self) -> dict[str, str]:
        """How it trains, for the README."""
        return {
            "training": f"{self.steps} steps of {self.batch_rows} rows, AdamW at {self.learning_rate}; KL(p, q), in the last "
            f"{self.acceptance_share:.0%} -log sum_v min(p, q); seed {self.seed}"
        }

    def batch(self, num_rows: int, step: int) -> Tensor:
        """The rows of a step: each pass over all rows has a new order."""
        at = step * self.batch_rows + np.arange(self.batch_rows)
        index = np.empty(self.batch_rows, dtype=np.int64)
        for epoch in np.unique(at // num_rows):
            here = at // num_rows == epoch
            index[here] = np.random.default_rng([self.seed, int(epoch), 4]).permutation(num_rows)[at[here] % num_rows]
        return torch.from_numpy(index)


def train_head(pair: Pair, rows: PairRows, plan: HeadPlan, report: Callable[[int, float], None]) -> DraftHeads:
    """The head for `pair`, from rows of it; `report(step, loss)` after every step."""
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        heads = DraftHeads(width=pair.drafter.model.width, markov_hidden=plan.markov_hidden).to(
            pair.drafter.model.device
        )

    def step_loss(step: int) -> Tensor:
        part = rows.take(plan.batch(len(rows), step).to(rows.place.device))
        log_p, log_q = frozen_pair.target_law(pair, part), frozen_pair.draft_law(pair, part, heads.markov)
        return head_loss(log_p, log_q, by_acceptance=plan.by_acceptance(step))

    fit_heads(heads, plan, step_loss, report)
    return heads


def train_visibly(pair: Pair, read: Callable[[int], PairRows], plan: HeadPlan) -> DraftHeads:
    """Train on rows, of which `read` gives those of a step, under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    with Progress(*columns, console=Console()) as progress:
        reading = progress.add_task("rows", total=plan.rows)
        training = progress.add_task("draft head", total=plan.steps)

        def report(step: int, loss: float) -> None:
            progress.update(training, completed=step)
            losses.append(loss)
            if step % 50 == 0:
                progress.console.print(f"step {step}  loss {np.mean(losses[-50:]):.4f}")

        rows = frozen_pair.collect_rows(
            read,
            count=plan.rows,
            report=lambda done: progress.update(reading, completed=done),
        )
        return train_head(pair, rows, plan, report)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="recipes.specdiff_head", description="Train a diffusion drafter's draft head."
    )
    parser.add_argument(
        "--drafter", type=Path, required=True, help="the drafter's folder, which the head is written into"
    )
    parser.add_argument("--target", type=Path, default=TARGET, help="the causal model's folder")
    parser.add_argument("--rows", type=int, default=HeadPlan.rows, help="masks to learn from")
    parser.add_argument("--steps", type=int, default=HeadPlan.steps, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48, help="held-out texts to decode for the README")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the head and the README's section are written."""
    flags = parse(arguments)
    torch.set_num_threads(flags.threads)
    loop.reuse_freed_memory()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.drafter)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    plan, started = HeadPlan(steps=flags.steps, rows=flags.rows, seed=flags.seed), time.monotonic()
    # Half the bits and twice the speed; the lost precision is far smaller than what the head corrects.
    pair = frozen_pair.load_pair(flags.target, flags.drafter, "bfloat16")
    ids_T = causal.pack(prepared.train, plan.seed)
    heads = train_visibly(pair, lambda step: frozen_pair.read_step(pair, ids_T, plan.windows, plan.seed, step), plan)
    minutes = (time.monotonic() - started) / 60
    folder.save_draft_heads(flags.drafter, heads, "specdiff")
    finish(flags, prepared, plan, minutes)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, plan: HeadPlan, minutes: float) -> None:
    """Measure the head as stored, on float32 models, and put the section into the README."""
    pair, stored = frozen_pair.load_pair(flags.target, flags.drafter), load_heads(flags.drafter, "specdiff")
    assert stored is not None, "no head was written"
    report = draft_report.measure(pair, stored.to(pair.drafter.model.device), prepared.held_out, limit=flags.samples)
    target = flags.target.resolve().name
    lines = draft_report.section(target, describe(flags, plan, minutes), report)
    draft_report.put_section(flags.drafter / "README.md", lines)
    Console().print(f"wrote the draft head of {flags.drafter} for {target}")


def describe(flags: argparse.Namespace, plan: HeadPlan, minutes: float) -> dict[str, str]:
    """The section's list of training settings."""
    windows = plan.windows
    lengths = ", ".join(f"{n} ({p:.0%})" for n, p in zip(windows.lengths, windows.length_shares, strict=True))
    return {
        "head": f"hidden width {plan.markov_hidden}, stored as float16",
        "rows": f"{plan.rows:,} masks, the last 1 to {windows.most_masks} of windows of {lengths} tokens of the training files",
        **plan.describe(),
        "time": f"{minutes:.0f} min",
        **loop.describe_machine(flags.threads),
    }


if __name__ == "__main__":
    sys.exit(main())
