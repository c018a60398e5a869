"""Trains a small masked-diffusion model on the interpreter's own standard library and writes its model folder.

    python -m recipes.mdm --out DIR [--start FOLDER] [--steps N] [--checkpoint-dir CK]

It starts from the weights of a causal model that `recipes.ar` wrote, and has its shape and its tokenizer: so it can draft for
that model, and needs far fewer steps than from nothing. The corpus and its held-out files are those of the other builtin
models. DIR then holds config.json and model.safetensors in LLaDA's layout, generation_config.json, the tokenizer and a README
with the measured quality. The same seed, flags, thread count and Python give the same model; with --checkpoint-dir an
interrupted run continues.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from recipes import absorbing, absorbing_folder, absorbing_quality, causal, corpus, loop
from recipes.masking import MAX_SPANS

START = Path(__file__).parent.parent / "decoders" / "builtin" / "ar-tiny"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.mdm", description="Train a masked-diffusion language model.")
    loop.add_flags(parser)
    parser.add_argument("--start", type=Path, default=START, help="the causal model to start from")
    parser.set_defaults(decay_share=0.5)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    device, pace = loop.set_up(flags)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.start)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    trainer = absorbing.Trainer(
        absorbing.model_from(flags.start),
        loop.schedule_of(flags, steps=4100, batch_tokens=2048, learning_rate=2e-3),
        prepared.train,
        device,
    )
    if not loop.run_visibly(trainer, flags.checkpoint_dir, pace):
        return 3
    absorbing_folder.save_model(flags.out, trainer.model, absorbing.shape_of(flags.start), flags.start)
    finish(flags, prepared, trainer)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: absorbing.Trainer) -> None:
    """Measure the model as stored and write the folder's README."""
    stored = absorbing_folder.load_model(flags.out, trainer.device)
    report = absorbing_quality.measure(stored, causal.load_model(flags.start, trainer.device), prepared)
    settings, paths = describe(flags, prepared, trainer), prepared.held_out_paths
    (flags.out / "README.md").write_text(absorbing_folder.readme(flags.out.name, settings, paths, report))
    Console().print(f"wrote {flags.out}")


def describe(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: absorbing.Trainer) -> dict[str, str]:
    """The README's list of training settings."""
    shape = ", ".join(f"{key} {value}" for key, value in asdict(absorbing.shape_of(flags.start)).items())
    patterns = dict(zip(absorbing.PATTERNS, absorbing.PATTERN_SHARES, strict=True))
    return {
        **prepared.describe(),
        "shape": f"{shape}; {trainer.model.num_parameters():,} parameters",
        "start": f"the weights of `{flags.start.resolve().name}`, without what it adds to queries, keys and values",
        "model": trainer.schedule.describe(),
        "masks": f"{patterns['random']:.0%} of the windows a uniform number of tokens at random, {patterns['spans']:.0%} "
        f"the same in up to {MAX_SPANS} spans, {patterns['suffix']:.0%} the last 1 to {absorbing.LONGEST_SUFFIX}; a token "
        f"counts 1 / (the masked share of its window), at most {absorbing.HEAVIEST:g}",
        "windows": "anywhere in the packed files (begin token, file, end token), across files where they fall so",
        "stored as": "float16",
        "time": f"{trainer.seconds / 60:.0f} min",
        **loop.describe_machine(flags.threads),
    }


if __name__ == "__main__":
    sys.exit(main())
