"""Distils a causal model so that Jacobi decoding needs fewer forwards, and writes its model folder.

    python -m recipes.consistency --out DIR [--checkpoint-dir WORK] [--model MODEL] [--rounds 8:8,16:8,16:live]

Every round decodes prompts from the training files with the model so far, in a batch job of its own, greedily, and trains it:
progressive consistency distillation (pcLLM, section 3.1). A round `n:w` has blocks of n tokens and noise schedules of w
blocks, and takes its noise from the traces of that job (decoder `jacobi`, `output.trace: steps`). A round `n:live` takes from
the job the texts alone; its noise is the drafts of the model as it trains (live_drafts.py). It starts from a mean of the
round before and MODEL, which takes back a part of what the rounds cost in quality. Then the model before and after are
measured on held-out prompts of every length, again by jobs. WORK (by default DIR-work) keeps jobs, checkpoints and the
rounds' models: run the same command again to continue.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.log import shown
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.stores.store import Store, open_store
from recipes import (
    causal,
    causal_folder,
    corpus,
    distillation,
    folder,
    jacobi_report,
    live_drafts,
    loop,
    masking,
    trajectories,
)
from recipes.packing import IDS, Trajectory

NEW_TOKENS = 64
"""New tokens of every text that is measured."""
BUILTIN = Path(__file__).parent.parent / "decoders" / "builtin"


@dataclass(frozen=True)
class Round:
    """One round of distillation: the blocks' size in tokens and the number of noise ratios; None: live drafts."""

    block_size: int
    ratios: int | None

    @property
    def is_live(self) -> bool:
        """Whether the noise comes from the model as it trains."""
        return self.ratios is None


@dataclass(frozen=True)
class Prompts:
    """Prompts by sample id, token ids [P] each, and the file of them that a job reads."""

    ids: dict[str, IDS]
    path: Path


def rounds(text: str) -> list[Round]:
    """`n:w` or `n:live` for every round, separated by commas."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return [Round(int(size), None if ratios == "live" else int(ratios)) for size, ratios in pairs]


def length_range(text: str) -> tuple[int, int]:
    """`n`, or `low:high`."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def draw_prompts(
    prepared: corpus.Prepared, path: Path, *, training: bool, count: int, lengths: tuple[int, int], seed: int
) -> Prompts:
    """`count` pieces of training or held-out files, written to `path` as JSON lines.

    The logarithm of their length in tokens is uniform: there are as many short ones as long ones.
    """
    stream = prepared.train if training else prepared.held_out
    rng = np.random.default_rng([seed, 3])
    drawn = np.exp(rng.uniform(np.log(lengths[0]), np.log(lengths[1] + 1), count)).astype(int).clip(*lengths)
    prompts = {
        f"{row:06d}": stream.ids[masking.draw_windows(stream, rng, count=1, length=int(length))[0]]
        for row, length in enumerate(drawn)
    }
    text = "".join(json.dumps({"id": name, "tokens": ids.tolist()}) + "\n" for name, ids in prompts.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:  # a job refuses an input with a new date
        path.write_text(text)
    return Prompts(prompts, path)


def decode(model: Path, prompts: Prompts, decoder: dict[str, Any], run: Path, *, new_tokens: int, trace: bool) -> Store:
    """Complete every prompt greedily in a batch job, unless done; returns the run directory. RuntimeError if it fails."""
    spec = JobSpec.model_validate(
        {
            "name": run.name,
            "task": {"kind": "complete", "max_new_tokens": new_tokens, "ignore_eos": True},
            "input": {"path": str(prompts.path), "columns": {"id": "id", "tokens": "tokens"}},
            "model": {"path": str(model)},
            "decoder": decoder,
            "sampling": {"temperature": 0.0},
            "output": {"path": str(run), "trace": "steps" if trace else "none"},
        }
    )
    with shown():
        code = run_job(spec, RunOptions())
    if code != OK:
        raise RuntimeError(f"the job of {run} ended with exit code {code}")
    return open_store(spec.output.path)


def distil(
    flags: argparse.Namespace,
    source: Path,
    trajectories: list[Trajectory],
    prepared: corpus.Prepared,
    work: Path,
    settings: Round,
) -> distillation.Trainer | None:
    """One round of training from the model in `source`; None if time ran out."""
    device, pace = loop.set_up(flags)
    plan = plan_from(flags, settings)
    model = causal.load_model(source, device).train()
    text, anchor = causal.pack(prepared.train, plan.seed), causal.load_model(flags.model, device)
    if settings.is_live:
        drafts = live_drafts.LiveDrafts(trajectories, settings.block_size, plan.versions, plan.seed)
        rows = flags.most_rows
        trainer: distillation.Trainer = distillation.LiveTrainer(
            model, plan, drafts, text, anchor, device=device, most_rows=rows
        )
    else:
        trainer = distillation.Trainer(model, plan, trajectories, text, anchor, device=device)
    return trainer if loop.run_visibly(trainer, work / "state", pace) else None


def plan_from(flags: argparse.Namespace, settings: Round) -> distillation.Plan:
    common = distillation.Plan(
        steps=flags.steps or 4000,
        seed=flags.seed,
        batch_tokens=flags.batch_tokens or 1024,
        lengths=(256, 512),
        length_shares=(0.75, 0.25),
        learning_rate=flags.learning_rate or 1.5e-3,
        warmup=100,
        decay_share=flags.decay_share,
        samples=flags.samples,
        versions=flags.versions,
        window=flags.window,
        clean_weight=flags.clean_weight,
        text_weight=flags.text_weight,
    )
    if settings.ratios is not None:
        return replace(common, ratios=settings.ratios)
    # Decoding drafts a block after the finished ones before it, so its copies see those alone.
    rate, tokens = flags.learning_rate or 1e-3, flags.batch_tokens or 512
    return replace(
        common, learning_rate=rate, batch_tokens=tokens, warmup=50, window=1, fade=0.9, sharp=0.5, soft_clean=True
    )


def read_traces(flags: argparse.Namespace, source: Path, prompts: Prompts, work: Path, n: int) -> list[Trajectory]:
    """The Jacobi trajectories of the prompts, from the traces of a job."""
    # One token more than whole blocks: the last position is never fed, and every block's states are complete.
    new_tokens = flags.new_tokens // n * n + 1
    decoder = {"kind": "jacobi", "block_size": n, "window": "fixed"}
    run = decode(source, prompts, decoder, work / "trajectories", new_tokens=new_tokens, trace=True)
    return trajectories.read(run, prompts.ids)


def decoded_texts(flags: argparse.Namespace, source: Path, prompts: Prompts, work: Path, n: int) -> list[Trajectory]:
    """The greedy completions of the prompts as fixed points of whole blocks."""
    new_tokens = flags.new_tokens // n * n
    run = decode(source, prompts, {"kind": "autoregressive"}, work / "texts", new_tokens=new_tokens, trace=False)
    tokens_of = jacobi_report.read_decoded(run).tokens
    return live_drafts.texts(list(prompts.ids.values()), [np.array(tokens_of[name]) for name in prompts.ids], n)


def blend(source: Path, other: Path, share: float, out: Path) -> Path:
    """Write the folder `out`: the weights of `source` moved `share` of the way to those of `other`."""
    causal_folder.copy_with_weights(other, out, between(source, other, share))
    return out


def between(source: Path, other: Path, share: float) -> Qwen2ForCausalLM:
    """The model in `source` with its weights moved `share` of the way to those of `other`."""
    model, towards = (causal.load_model(path, torch.device("cpu")) for path in (source, other))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), towards.parameters(), strict=True):
            mine.lerp_(theirs, share)
    return model


def run_round(
    flags: argparse.Namespace, source: Path, prepared: corpus.Prepared, number: int, settings: Round
) -> Path | None:
    """Trajectories of the model in `source`, training on them; the folder of the model made, None where time ran out."""
    work, n = flags.work / f"round-{number}", settings.block_size
    out: Path = work / "model"
    if (out / "model.safetensors").exists():
        return out
    if settings.is_live:
        source = blend(flags.model, source, flags.kept, work / "start")
    prompts = draw_prompts(
        prepared,
        work / "prompts.jsonl",
        training=True,
        count=flags.prompts,
        lengths=flags.prompt_tokens,
        seed=flags.seed + number,
    )
    trajectories = (
        decoded_texts(flags, source, prompts, work, n)
        if settings.is_live
        else read_traces(flags, source, prompts, work, n)
    )
    # A later command may continue with other flags: the README states the settings of each round.
    loop.write_json(work / "plan.json", describe_round(flags, settings))
    trainer = distil(flags, source, trajectories, prepared, work, settings)
    if trainer is None:
        return None
    causal_folder.copy_with_weights(source, out, trainer.model)
    return out


def keep_share(flags: argparse.Namespace, before: Path, trained: Path, number: int) -> Path:
    """Keep a share of what the last round changed; the mean of two rounds' weights is often better than both."""
    share, plan = flags.last_share, flags.work / f"round-{number}" / "plan.json"
    if number + 1 < len(flags.rounds) or share == 1.0:
        return trained
    facts, kept = json.loads(plan.read_text()), f"; {share:.0%} of its change of the weights is kept"
    if facts.endswith(kept):
        return trained
    folder.save_half(between(before, trained, share), trained / "model.safetensors")
    loop.write_json(plan, facts + kept)
    return trained


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.consistency", description="Distil a model for Jacobi decoding.")
    loop.add_flags(parser)
    parser.add_argument("--model", type=Path, default=BUILTIN / "ar-tiny", help="the model folder to start from")
    parser.add_argument(
        "--rounds", type=rounds, default=rounds("8:8,16:8,16:live"), help="block size and noise ratios of each"
    )
    parser.add_argument("--prompts", type=int, default=4096, help="samples decoded in each round")
    parser.add_argument("--prompt-tokens", type=length_range, default=(8, 400), help="n, or low:high")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="trajectories in a step")
    parser.add_argument("--versions", type=int, default=3, help="noisy versions of each")
    parser.add_argument("--window", type=int, help="blocks that share noisy context; all of them by default")
    parser.add_argument(
        "--clean-weight", type=float, default=1.0, help="weight of the AR loss on the trajectories' fixed points"
    )
    parser.add_argument(
        "--text-weight", type=float, default=1.0, help="weight of the corpus loss against the source model"
    )
    parser.add_argument("--most-rows", type=int, default=2500, help="rows of a step's texts, in a live round")
    parser.add_argument(
        "--kept", type=float, default=0.75, help="share of the rounds so far that a live round starts from"
    )
    parser.add_argument("--last-share", type=float, default=1.0, help="share of the last round's change that is kept")
    parser.add_argument(
        "--measured", type=int, default=64, help="held-out prompts to measure with, of each class of lengths"
    )
    flags = parser.parse_args(arguments)
    flags.work = flags.checkpoint_dir or flags.out.with_name(flags.out.name + "-work")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the folder is complete, 3 if time ran out (run it again to continue)."""
    flags = parse(arguments)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.model)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    source: Path = flags.model
    with ray_session(None, num_cpus=flags.threads):
        for number, settings in enumerate(flags.rounds):
            trained = run_round(flags, source, prepared, number, settings)
            if trained is None:
                return 3
            source = keep_share(flags, source, trained, number)
        shutil.copytree(source, flags.out, dirs_exist_ok=True)
        finish(flags, prepared)
    return 0


def finish(flags: argparse.Namespace, prepared: corpus.Prepared) -> None:
    """Measure both models with finished jobs and write the folder's README."""
    device = torch.device("cpu")
    before, after = causal.load_model(flags.model, device), causal.load_model(flags.out, device)
    decoded = measure(flags, prepared)
    scores = causal_folder.qualities(before, prepared), causal_folder.qualities(after, prepared)
    comparison = jacobi_report.Comparison(
        decoded,
        {length: (scores[0][length], scores[1][length]) for length in scores[0]},
        jacobi_report.same_top1(before, after, prepared),
        jacobi_report.same_text(decoded),
    )
    text = jacobi_report.readme(
        flags.out.name, flags.model.name, comparison, describe(flags, prepared), prepared.held_out_paths
    )
    (flags.out / "README.md").write_text(text)
    Console().print(f"wrote {flags.out}")


def measure(flags: argparse.Namespace, prepared: corpus.Prepared) -> jacobi_report.ByLength:
    """Every decoder's completions of held-out prompts of each class of lengths, of the model before and after."""
    work = flags.work / "measured"
    by_length: jacobi_report.ByLength = {}
    for low, high in jacobi_report.LENGTHS:
        path = work / f"prompts-{low}-{high}.jsonl"
        prompts = draw_prompts(
            prepared, path, training=False, count=flags.measured, lengths=(low, high), seed=flags.seed
        )
        for name, decoder in jacobi_report.decoders(flags.rounds[-1].block_size).items():
            runs = [
                decode(
                    model, prompts, decoder, work / f"{part} {name} {low}-{high}", new_tokens=NEW_TOKENS, trace=False
                )
                for part, model in (("before", flags.model), ("after", flags.out))
            ]
            before, after = (jacobi_report.read_decoded(run) for run in runs)
            by_length.setdefault(name, {})[low, high] = (before, after)
    return by_length


def describe_round(flags: argparse.Namespace, settings: Round) -> str:
    """A round's settings in words."""
    plan = plan_from(flags, settings)
    low, high = flags.prompt_tokens
    if settings.is_live:
        noise = f"live drafts, from {flags.kept:.0%} of the rounds before"
        noise += f", rows fade by {plan.fade}, teacher {plan.sharp:.0%} greedy"
        batch = f"{flags.most_rows} rows of texts"
    else:
        noise, batch = f"{settings.ratios} noise ratios", f"{flags.samples} trajectories"
    return (
        f"blocks of {settings.block_size} tokens, {noise}; "
        f"{flags.prompts} prompts of {low} to {high} tokens, {flags.new_tokens} new ones; "
        f"{batch} in {flags.versions} noisy versions and {plan.batch_tokens} tokens of the corpus a step; "
        f"loss weights: consistency 1, its fixed points {plan.clean_weight}, corpus {plan.text_weight}; {plan.describe()}"
    )


def describe(flags: argparse.Namespace, prepared: corpus.Prepared) -> dict[str, str]:
    """The README's list of training settings."""
    plans = {
        f"round {number + 1}": json.loads((flags.work / f"round-{number}" / "plan.json").read_text())
        for number in range(len(flags.rounds))
    }
    return {**prepared.describe(), **plans, **loop.describe_machine(flags.threads)}


if __name__ == "__main__":
    sys.exit(main())
