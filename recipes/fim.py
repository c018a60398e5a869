"""Trains a causal model further to fill in the middle of a text, and writes its model folder.

    python -m recipes.fim --out DIR [--start FOLDER] [--steps N] [--checkpoint-dir CK]

It starts from the weights of a causal model that `recipes.ar` wrote. Its tokenizer gets three more special tokens, and its
embedding three more rows. A share of the rows stays plain text. The corpus and its held-out files are those of the other
builtin models. DIR then holds config.json, generation_config.json, model.safetensors, the tokenizer and a README with the
measured quality. The same seed, flags, thread count and Python give the same model; with --checkpoint-dir an interrupted
run continues.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from recipes import absorbing, causal, corpus, fim_folder, fim_quality, loop
from recipes.causal import Shape
from recipes.fim_windows import FIM_DRAWS, HOLE_SHARES, HOLES, MIDDLE_WEIGHT, PLAIN_SHARE, Rows, fim_rows

START = Path(__file__).parent.parent / "decoders" / "builtin" / "ar-tiny"


def model_from(start: Path, vocab_size: int) -> Qwen2ForCausalLM:
    """The model in `start` with more rows in its embedding: each new one is the mean of the old ones."""
    source = causal.load_model(start, torch.device("cpu"))
    model = causal.new_model(replace(absorbing.shape_of(start), vocab_size=vocab_size), seed=0)
    state = source.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = state[name]
        state[name] = torch.cat([old, old.mean(0, keepdim=True).expand(vocab_size - len(old), -1)])
    model.load_state_dict(state)
    return model


def weighted_loss(model: Qwen2ForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every token [B, L + 1] but the first, each counted by its weight."""
    with loop.autocast(ids.device):
        logits = model(input_ids=ids[:, :-1]).logits
    nats = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    share = weights[:, 1:].flatten()
    return (nats * share).sum() / share.sum()


class Trainer(loop.Trainer[Qwen2ForCausalLM]):
    """Draws windows of plain text and rows with a middle to fill in, and scores them by the weighted loss."""

    def __init__(
        self, model: Qwen2ForCausalLM, plan: loop.Schedule, prepared: corpus.Prepared, device: torch.device
    ) -> None:
        super().__init__(model, plan, device)
        self.tokenizer, self.stream = prepared.tokenizer, prepared.train
        self.plain = causal.pack(prepared.train, plan.seed)

    def batch(self, step: int) -> Rows:
        """The rows of a step: a function of (seed, step)."""
        plan, length = self.schedule, self.schedule.length(step)
        count = max(1, plan.batch_tokens // length)
        rng = np.random.default_rng([plan.seed, step, FIM_DRAWS])
        num_plain = int(rng.binomial(count, PLAIN_SHARE))
        text = causal.training_windows(self.plain, seed=plan.seed, step=step, count=num_plain, length=length)
        cut = fim_rows(self.tokenizer, self.stream, rng, count=count - num_plain, length=length)
        ones = np.ones(text.shape, dtype=np.float32)
        return Rows(np.concatenate([text, cut.ids]), np.concatenate([ones, cut.weights]))

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The loss of the step's batch, and its tokens."""
        rows = self.batch(step)
        ids, weights = (torch.from_numpy(part).to(self.device) for part in (rows.ids, rows.weights))
        return weighted_loss(self.model, ids, weights), ids[:, 1:].numel()


def plan_from(flags: argparse.Namespace) -> loop.Schedule:
    return loop.Schedule(
        steps=flags.steps or 2000,
        seed=flags.seed,
        batch_tokens=flags.batch_tokens or 2048,
        lengths=(128, 256, 512),
        length_shares=(0.3, 0.45, 0.25),
        learning_rate=flags.learning_rate or 1.5e-3,
        warmup=100,
        decay_share=flags.decay_share,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.fim", description="Train a causal model to fill in the middle.")
    loop.add_flags(parser)
    parser.add_argument("--start", type=Path, default=START, help="the causal model to start from")
    parser.add_argument("--lines", type=int, default=300, help="held-out lines to fill in when the model is measured")
    parser.set_defaults(decay_share=0.345)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    device, pace = loop.set_up(flags)
    tokenizer = fim_folder.extend_tokenizer(flags.start)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    model = model_from(flags.start, len(tokenizer)).train()
    trainer = Trainer(model, plan_from(flags), prepared, device)
    if not loop.run_visibly(trainer, flags.checkpoint_dir, pace):
        return 3
    shape = replace(absorbing.shape_of(flags.start), vocab_size=len(tokenizer))
    fim_folder.save_model(flags.out, trainer.model, shape, tokenizer)
    finish(flags, prepared, trainer, shape)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: Trainer, shape: Shape) -> None:
    """Measure the model as stored and write the folder's README."""
    stored, start = (causal.load_model(folder, trainer.device) for folder in (flags.out, flags.start))
    report = fim_quality.measure(stored, start, prepared, flags.lines)
    settings = describe(flags, prepared, trainer, shape)
    (flags.out / "README.md").write_text(fim_folder.readme(flags.out.name, settings, prepared.held_out_paths, report))
    Console().print(f"wrote {flags.out}")


def describe(flags: argparse.Namespace, prepared: corpus.Prepared, trainer: Trainer, shape: Shape) -> dict[str, str]:
    """The README's list of training settings."""
    sizes = ", ".join(f"{key} {value}" for key, value in asdict(shape).items())
    holes = zip(HOLES, HOLE_SHARES, strict=True)
    return {
        **prepared.describe(),
        "shape": f"{sizes}; {trainer.model.num_parameters():,} parameters",
        "start": f"the weights of `{flags.start.resolve().name}`; the new rows of the embedding begin as the mean of the others",
        "model": trainer.schedule.describe(),
        "rows": f"{PLAIN_SHARE:.0%} plain windows of packed files; the others are windows of one file with a hole: "
        + ", ".join(f"{kind.replace('_', ' ')} ({share:.0%})" for kind, share in holes)
        + f"; a token of the middle, and the end token after it, counts {MIDDLE_WEIGHT:g}, any other 1",
        "stored as": "int8 with a scale a row; the embedding and the norms in float16",
        "time": f"{trainer.seconds / 60:.0f} min",
        **loop.describe_machine(flags.threads),
    }


if __name__ == "__main__":
    sys.exit(main())
