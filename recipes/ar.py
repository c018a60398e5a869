"""Trains a small causal model on the interpreter's own standard library and writes its model folder.

    python -m recipes.ar --out DIR [--size tiny|micro|base] [--steps N] [--checkpoint-dir CK]
    python -m recipes.ar --out DIR --start FOLDER --steps 1000 --learning-rate 5e-4      a later checkpoint of FOLDER

The corpus, its held-out files and the tokenizer are those of the builtin any-subset model, so that the two can be
compared and the smaller of these models can draft for the larger. DIR then holds config.json, generation_config.json,
model.safetensors, the tokenizer and a README with the measured quality. The same seed, flags, thread count and Python
give the same model; with --checkpoint-dir an interrupted run continues.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from recipes import absorbing, causal, causal_folder, corpus, loop
from recipes.causal import Shape

TOKENIZER = Path(__file__).parent.parent / "decoders" / "builtin" / "asarm-tiny"


@dataclass(frozen=True)
class Size:
    """A model's shape and the settings that go with it; the flags of the same names override them."""

    shape: Shape
    steps: int
    batch_tokens: int = 2048
    learning_rate: float = 2e-3


SIZES = {
    "micro-test": Size(Shape(32, 1, 2, 1, 64), steps=100),
    "micro": Size(Shape(128, 2, 4, 2, 352), steps=5000, learning_rate=4e-3),
    "tiny": Size(Shape(256, 4, 8, 8, 704), steps=4900),
    # For a GPU.
    "base": Size(Shape(768, 12, 12, 12, 2048), steps=8000, batch_tokens=65_536, learning_rate=6e-4),
}


def plan_from(flags: argparse.Namespace) -> loop.Schedule:
    size = SIZES[flags.size]
    return loop.Schedule(
        steps=flags.steps or size.steps,
        seed=flags.seed,
        batch_tokens=flags.batch_tokens or size.batch_tokens,
        lengths=(256, 512),
        length_shares=(0.75, 0.25),
        learning_rate=flags.learning_rate or size.learning_rate,
        decay_share=flags.decay_share,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.ar", description="Train a causal language model.")
    loop.add_flags(parser)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--start", type=Path, help="the causal model to go on from, in place of random weights")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="the model folder whose tokenizer to use")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    device, pace = loop.set_up(flags)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.tokenizer)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    plan = plan_from(flags)
    if flags.start is None:
        shape = SIZES[flags.size].shape
        model = causal.new_model(shape, plan.seed)
    else:
        shape = absorbing.shape_of(flags.start)
        model = causal.load_model(flags.start, device).train()
    trainer = causal.Trainer(model, plan, prepared.train, device)
    if not loop.run_visibly(trainer, flags.checkpoint_dir, pace):
        return 3
    causal_folder.save_model(flags.out, trainer.model, shape, flags.tokenizer)
    finish(flags, prepared, trainer, shape)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: causal.Trainer, shape: Shape) -> None:
    """Measure the model as stored and write the folder's README."""
    scores = causal_folder.qualities(causal.load_model(flags.out, trainer.device), prepared)
    settings = describe(flags, prepared, trainer, shape)
    (flags.out / "README.md").write_text(causal_folder.readme(flags.out.name, settings, prepared, scores))
    Console().print(f"wrote {flags.out}")


def describe(
    flags: argparse.Namespace, prepared: corpus.Prepared, trainer: causal.Trainer, shape: Shape
) -> dict[str, str]:
    """The README's list of training settings."""
    started = {} if flags.start is None else {"start": f"the weights of `{flags.start.resolve().name}`"}
    return {
        **prepared.describe(),
        "shape": ", ".join(f"{key} {value}" for key, value in asdict(shape).items())
        + f"; {trainer.model.num_parameters():,} parameters",
        **started,
        "model": trainer.schedule.describe(),
        "windows": "anywhere in the packed files (begin token, file, end token), across files where they fall so",
        "stored as": "float16",
        "time": f"{trainer.seconds / 60:.0f} min",
        **loop.describe_machine(flags.threads),
    }


if __name__ == "__main__":
    sys.exit(main())
