"""Trains a small block-diffusion model on the interpreter's own standard library and writes its model folder.

    python -m recipes.block --out DIR [--start FOLDER] [--steps N] [--checkpoint-dir CK]

It starts from the weights of a causal model that `recipes.ar` wrote, and has its shape and its tokenizer; the corpus and its
held-out files are those of the other builtin models. DIR then holds config.json and model.safetensors in SDAR's layout,
generation_config.json, the tokenizer and a README with the measured quality. The same seed, flags, thread count and Python
give the same model; with --checkpoint-dir an interrupted run continues.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from recipes import absorbing, block_folder, block_layout, block_quality, block_training, causal, corpus, loop

START = Path(__file__).parent.parent / "decoders" / "builtin" / "ar-tiny"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.block", description="Train a block-diffusion language model.")
    loop.add_flags(parser)
    parser.add_argument("--start", type=Path, default=START, help="the causal model to start from")
    parser.add_argument("--teach-from", type=int, default=1250, help="the step from which on that model teaches, too")
    parser.set_defaults(decay_share=0.58)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    device, pace = loop.set_up(flags)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.start)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    trainer = block_training.Trainer(
        flags.start,
        loop.schedule_of(flags, steps=2900, batch_tokens=1024, learning_rate=1.5e-3),
        prepared.train,
        device,
        flags.teach_from,
    )
    if not loop.run_visibly(trainer, flags.checkpoint_dir, pace):
        return 3
    block_folder.save_model(flags.out, trainer.model, absorbing.shape_of(flags.start), flags.start)
    finish(flags, prepared, trainer)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: block_training.Trainer) -> None:
    """Measure the model as stored and write the folder's README."""
    stored = block_folder.load_model(flags.out, trainer.device)
    report = block_quality.measure(stored, causal.load_model(flags.start, trainer.device), prepared)
    settings, paths = describe(flags, prepared, trainer), prepared.held_out_paths
    (flags.out / "README.md").write_text(block_folder.readme(flags.out.name, settings, paths, report))
    Console().print(f"wrote {flags.out}")


def describe(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: block_training.Trainer) -> dict[str, str]:
    """The README's list of training settings."""
    shape = ", ".join(f"{key} {value}" for key, value in asdict(absorbing.shape_of(flags.start)).items())
    shares = zip(block_layout.BLOCKS, block_layout.BLOCK_SHARES, strict=True)
    return {
        **prepared.describe(),
        "shape": f"{shape}; {trainer.model.num_parameters():,} parameters",
        "start": f"the weights of `{flags.start.resolve().name}`, without what it adds to queries, keys and values, which "
        "are scaled to their mean size there",
        "model": trainer.schedule.describe(),
        "teacher": f"the same causal model, from step {flags.teach_from} on: {block_training.TAUGHT:.0%} of the loss of blocks "
        "of one token are the cross-entropy with its distribution of the next token",
        "blocks": "of "
        + ", ".join(f"{block} ({share:.0%} of the windows)" for block, share in shares)
        + f" tokens; the clean copy causal in {block_layout.CAUSAL_SHARE:.0%} of the windows, and where blocks have one token",
        "masks": f"a uniform number n of each block's B tokens at random, in {block_layout.SUFFIX_SHARE:.0%} of the blocks "
        "the last n; a token counts B / n",
        "windows": "anywhere in the packed files (begin token, file, end token), across files where they fall so; blocks "
        "are counted from the window's start",
        "stored as": "float16",
        "time": f"{trainer.seconds / 60:.0f} min",
        **loop.describe_machine(flags.threads),
    }


if __name__ == "__main__":
    sys.exit(main())
