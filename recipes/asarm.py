"""Trains a small any-subset model on the interpreter's own standard library and writes its model folder.

    python -m recipes.asarm --out DIR [--size tiny|base] [--steps N] [--checkpoint-dir CK]

Corpus, tokenizer, two-stream training with the any-subset joint loss, draft heads on the frozen model, evaluation on
held-out files; DIR then holds config.json, model.safetensors, the tokenizer, the draft heads and a README. The same
seed, flags, thread count and Python give the same model; with --checkpoint-dir an interrupted run continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from recipes import corpus, draft_heads, evaluation, folder, loop, training
from recipes.masking import MAX_STALE
from recipes.two_stream import Shape, TwoStream


@dataclass(frozen=True)
class Size:
    """A model's shape and the settings that go with it; the flags of the same names override them."""

    shape: Shape
    steps: int
    batch_tokens: int = 4096
    learning_rate: float = 2e-3


SIZES = {
    "micro": Size(Shape(d_model=32, n_layer=2, n_head=2, d_inner=64, vocab_size=512), steps=200),
    "tiny": Size(Shape(), steps=3000),
    # For a GPU. Post-norm layers want a smaller rate the deeper they are stacked.
    "base": Size(Shape(d_model=512, n_layer=8, d_inner=2048), steps=12_000, batch_tokens=32_768, learning_rate=6e-4),
}


def new_trainer(prepared: corpus.Prepared, shape: Shape, plan: training.Plan, device: torch.device) -> training.Trainer:
    """A trainer with a fresh model."""
    model = TwoStream(shape, torch.Generator().manual_seed(plan.seed))
    return training.Trainer(model, plan, prepared.train, device)


def train_draft_heads(model: TwoStream, prepared: corpus.Prepared, plan: draft_heads.HeadPlan) -> DraftHeads:
    """The draft heads of the frozen `model`."""
    columns = (TextColumn("draft heads"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    with Progress(*columns, console=Console()) as progress:
        task = progress.add_task("draft heads", total=plan.steps)

        def report(step: int, loss: float) -> None:
            progress.update(task, completed=step)
            losses.append(loss)
            if step % 50 == 0:
                progress.console.print(f"heads, step {step}  loss {sum(losses[-50:]) / 50:.4f}")

        return draft_heads.train_heads(model, prepared.train, plan, report)


def evaluate(model: TwoStream, heads: DraftHeads, prepared: corpus.Prepared, settings: dict[str, str]) -> folder.Report:
    """Bits per byte and acceptance on the held-out files."""
    sizes = corpus.token_bytes(prepared.tokenizer)
    scores = {
        length: {
            share: evaluation.quality(model, prepared.held_out, sizes, length=length, revealed=share)
            for share in evaluation.REVEALED
        }
        for length in (128, 256)
    }
    acceptance = {
        share: evaluation.draft_acceptance(model, heads, prepared.held_out, length=128, revealed=share)
        for share in evaluation.REVEALED[:2]
    }
    return folder.Report(settings, prepared.held_out_paths, scores, acceptance)


def describe(
    flags: argparse.Namespace, shape: Shape, prepared: corpus.Prepared, minutes: dict[str, float]
) -> dict[str, str]:
    """The README's list of training settings."""
    plan = plan_from(flags)
    return {
        **prepared.describe(),
        "shape": ", ".join(f"{key} {value}" for key, value in shape.config().items()),
        "model": plan.describe(),
        "masks": f"prompt share up to {plan.masks.high:.0%}; random positions, spans, line ends; "
        f"{plan.masks.stale_share:.0%} of the query rows 1 to {MAX_STALE} ranks stale",
        "draft heads": f"{flags.head_steps} steps on the frozen float16 weights",
        "stored as": "float16",
        "time": ", ".join(f"{name} {value:.0f} min" for name, value in minutes.items()),
        **loop.describe_machine(flags.threads),
    }


def plan_from(flags: argparse.Namespace) -> training.Plan:
    size = SIZES[flags.size]
    return training.Plan(
        steps=flags.steps or size.steps,
        seed=flags.seed,
        batch_tokens=flags.batch_tokens or size.batch_tokens,
        learning_rate=flags.learning_rate or size.learning_rate,
        decay_share=flags.decay_share,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.asarm", description="Train an any-subset model and its draft heads.")
    loop.add_flags(parser)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--head-steps", type=int, default=1400, help="optimiser steps of the draft heads")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    device, pace = loop.set_up(flags)
    shape = SIZES[flags.size].shape
    train, held_out = corpus.split(corpus.standard_library())
    prepared = corpus.prepare(train, held_out, corpus.train_tokenizer(train, shape.vocab_size))
    trainer = new_trainer(prepared, shape, plan_from(flags), device)
    if not loop.run_visibly(trainer, flags.checkpoint_dir, pace):
        return 3
    folder.save_model(flags.out, trainer.model, prepared.tokenizer)
    finish(flags, prepared, trainer)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: training.Trainer) -> None:
    """Draft heads and evaluation, both on the weights as stored; fills in the rest of the folder."""
    model = folder.load_model(flags.out, trainer.device)
    started = time.monotonic()
    heads = train_draft_heads(model, prepared, draft_heads.HeadPlan(steps=flags.head_steps, seed=flags.seed))
    minutes = {"model": trainer.seconds / 60, "draft heads": (time.monotonic() - started) / 60}
    folder.save_draft_heads(flags.out, heads)
    stored = load_heads(flags.out)
    if stored is None:
        raise FileNotFoundError(f"{flags.out} has no draft heads")
    settings = describe(flags, trainer.model.shape, prepared, minutes)
    report = evaluate(model, stored.to(trainer.device), prepared, settings)
    (flags.out / "README.md").write_text(folder.readme(flags.out.name, report))
    Console().print(f"wrote {flags.out}")


if __name__ == "__main__":
    sys.exit(main())
