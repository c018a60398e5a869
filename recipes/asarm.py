"""Trains a small any-subset model on the interpreter's own standard library and writes its model folder.

    python -m recipes.asarm --out DIR [--size tiny|base] [--steps N] [--checkpoint-dir CK]

Corpus, tokenizer, two-stream training with the any-subset joint loss, draft heads on the frozen model, evaluation on
held-out files; DIR then holds config.json, model.safetensors, the tokenizer, the draft heads and a README. The same
seed, flags, thread count and Python give the same model; with --checkpoint-dir an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from decoders.heads import DraftHeads, load_heads
from recipes import corpus, draft_heads, evaluation, folder, training
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


@dataclass(frozen=True)
class Prepared:
    """What both training and evaluation need."""

    tokenizer: PreTrainedTokenizerFast
    train: corpus.TokenStream
    held_out: corpus.TokenStream
    held_out_paths: list[str]


def prepare(vocab_size: int) -> Prepared:
    """Read the standard library, split it, train the tokenizer on the training files only and encode both parts."""
    train, held_out = corpus.split(corpus.standard_library())
    tokenizer = corpus.train_tokenizer(train, vocab_size)
    return Prepared(
        tokenizer,
        corpus.tokenise(tokenizer, train),
        corpus.tokenise(tokenizer, held_out),
        [file.path for file in held_out],
    )


def train_model(
    prepared: Prepared, shape: Shape, plan: training.Plan, checkpoints: Path | None, pace: training.Pace
) -> training.Trainer | None:
    """The trainer with its trained model; None where the minutes ran out first (the checkpoint has the rest)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TwoStream(shape, torch.Generator().manual_seed(plan.seed))
    trainer = training.Trainer(model, plan, prepared.train, device)
    if checkpoints is not None and trainer.restore(checkpoints):
        Console().print(f"continuing after step {trainer.step}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console()) as progress:
        task = progress.add_task("training", total=plan.steps, completed=trainer.step)

        def report(step: int, loss: float, rate: float) -> None:
            progress.update(task, completed=step)
            progress.console.print(f"step {step}  loss {loss:.4f} nats  {rate:,.0f} tokens/s")

        done = training.run(trainer, checkpoints, pace, report)
    return trainer if done else None


def train_draft_heads(model: TwoStream, prepared: Prepared, plan: draft_heads.HeadPlan) -> DraftHeads:
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


def evaluate(model: TwoStream, heads: DraftHeads, prepared: Prepared, settings: dict[str, str]) -> folder.Report:
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


def describe(flags: argparse.Namespace, shape: Shape, prepared: Prepared, minutes: dict[str, float]) -> dict[str, str]:
    """The README's list of training settings."""
    plan = plan_from(flags)
    lengths = ", ".join(f"{n} ({p:.0%})" for n, p in zip(plan.lengths, plan.length_shares, strict=True))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {flags.threads} cores"
    return {
        "corpus": f"CPython {platform.python_version()} standard library without tests, `encodings` and `pydoc_data`; "
        f"{len(prepared.train.ids):,} tokens, {len(prepared.held_out.ids):,} held out",
        "tokenizer": f"byte-level BPE, {shape.vocab_size} ids, trained on the training files",
        "shape": ", ".join(f"{key} {value}" for key, value in shape.config().items()),
        "model": f"{plan.steps} steps of {plan.batch_tokens} tokens, windows of {lengths} tokens, "
        f"AdamW at {plan.learning_rate} (linear decay over the last {plan.decay_share:.0%}), bfloat16 products, "
        f"seed {plan.seed}",
        "masks": f"prompt share up to {plan.masks.high:.0%}; random positions, spans, line ends; "
        f"{plan.masks.stale_share:.0%} of the query rows 1 to {MAX_STALE} ranks stale",
        "draft heads": f"{flags.head_steps} steps on the frozen float16 weights",
        "stored as": "float16",
        "time": ", ".join(f"{name} {value:.0f} min" for name, value in minutes.items()),
        "hardware": where,
        "versions": f"torch {torch.__version__}",
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
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, help="optimiser steps of the model")
    parser.add_argument("--head-steps", type=int, default=1400, help="optimiser steps of the draft heads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--decay-share", type=float, default=0.3, help="share of the steps over which the rate falls")
    parser.add_argument("--checkpoint-dir", type=Path, help="keep the training's state here, and go on from it")
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0)
    parser.add_argument("--minutes", type=float, help="stop (resumably) after this many minutes of training")
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 where the minutes ran out (run it again to go on)."""
    flags = parse(arguments)
    torch.set_num_threads(flags.threads)
    training.reuse_freed_memory()
    shape = SIZES[flags.size].shape
    prepared = prepare(shape.vocab_size)
    pace = training.Pace(flags.log_every, flags.checkpoint_minutes, flags.minutes)
    trainer = train_model(prepared, shape, plan_from(flags), flags.checkpoint_dir, pace)
    if trainer is None:
        Console().print("stopped before the last step; run again with the same --checkpoint-dir to go on")
        return 3
    folder.save_model(flags.out, trainer.model, prepared.tokenizer)
    finish(flags, prepared, trainer)
    return 0


def finish(flags: argparse.Namespace, prepared: Prepared, trainer: training.Trainer) -> None:
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
