"""Trains the draft head of a block-diffusion model for `s2d2`, and writes it into the model's folder.

    python -m recipes.block_head --model DIR [--rows N] [--steps N]

The model is frozen, and drafts for itself: the head learns to map the row of a mask that sees a text and other masks, and the
true tokens before it, to what the model predicts there at block size 1. Both rows come from one forward, as `s2d2` runs them
(decoders/blocks/s2d2.py). DIR then holds draft_head.json and draft_head.safetensors, and its README a section with acceptances
on held-out files. The same seed, flags, thread count and Python give the same head.

Legend: B windows, L tokens of a window, G texts of a window that masks follow, M masks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.blocks.settings import S2d2Settings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from recipes import causal, corpus, draft_report, folder, frozen_pair, loop
from recipes.corpus import TokenStream
from recipes.frozen_pair import Pair, PairRows, load_frozen
from recipes.specdiff_head import HeadPlan, train_visibly

WINDOWS, LENGTH, TEXTS, MASKS = 16, 96, 6, 9
SHORTEST = 8
"""The tokens of the shortest text."""
SIZES = (2, 4, 8)
Rule = Literal["coupled", "rejection"]
CASES: tuple[tuple[float, Rule], ...] = ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection"))


def load_model(path: Path, dtype: str = "float32") -> Pair:
    """The model as its own drafter; ValueError if it is none of block diffusion."""
    info = inspect_model(path)
    if info.kind != "blocks" or info.mask_id is None:
        raise ValueError(f"a block-diffusion model is needed, not {info.family}")
    model = load_frozen(path, info, dtype)
    return Pair(model, model)


def read_rows(pair: Pair, ids_BL: NDArray[np.int64], known_BG: NDArray[np.int64], num_masks: int) -> PairRows:
    """The rows of `num_masks` masks after the first `known` tokens of a window, but the first, which has seen all before it.

    Three parts of a window's columns: the text, causal; a mask that sees all tokens before its position, for each; and the masks
    of each text, which see it and each other."""
    ids, known = torch.from_numpy(ids_BL), torch.from_numpy(known_BG)
    count, length = ids.shape
    position = (known[:, :, None] + torch.arange(num_masks)).flatten(1)
    masks = position.shape[1]
    text, copies = torch.arange(length).expand(count, -1), (length + torch.arange(masks)).expand(count, -1)
    group = (copies + masks)[:, ::num_masks].repeat_interleave(num_masks, 1)
    # What a row sees: the columns [0, high) and [own, till).
    high = torch.cat([text + 1, position, known.repeat_interleave(num_masks, 1)], 1)
    own = torch.cat([text, copies, group], 1)
    till = torch.cat([text + 1, copies + 1, group + num_masks], 1)
    tokens = torch.cat([ids, torch.full((count, 2 * masks), pair.mask_id)], 1)
    column = torch.arange(tokens.shape[1]).repeat(count)
    sight = (
        torch.stack([torch.zeros_like(column), own.flatten()]),
        torch.stack([high.flatten(), till.flatten()]),
    )
    model, shift = pair.target.model, pair.target.info.shift
    model.allocate(count, tokens.shape[1])
    positions = torch.cat([text, position, position], 1).flatten()
    rows = token_rows(range(count), [tokens.shape[1]] * count, tokens.flatten(), positions, column, sight)
    hidden = model.forward(rows).unflatten(0, (count, -1))
    fresh, stale = hidden[:, length:].unflatten(1, (2, -1, num_masks)).unbind(1)
    if shift:
        fresh = hidden.gather(1, (position - 1)[:, :, None].expand(-1, -1, hidden.shape[2])).unflatten(
            1, (-1, num_masks)
        )
    place = torch.arange(1, num_masks)
    at = position.unflatten(1, (-1, num_masks))[:, :, 1:].flatten(1)
    return PairRows(
        drafter=stale[:, :, 1 - shift : num_masks - shift].flatten(0, 2),
        target=fresh[:, :, 1:].flatten(0, 2),
        prev=ids.gather(1, at - 1).flatten(),
        before=ids.gather(1, at - 2).flatten(),
        place=place.expand(count, known.shape[1], -1).flatten(),
    )


def read_step(pair: Pair, ids_T: NDArray[np.int64], seed: int, step: int) -> PairRows:
    """The rows of a batch of windows from anywhere in `ids_T`."""
    rng = np.random.default_rng([seed, step, 3])
    starts = rng.integers(0, len(ids_T) - LENGTH + 1, size=WINDOWS)
    known_BG = rng.integers(SHORTEST, LENGTH - MASKS + 1, size=(WINDOWS, TEXTS))
    return read_rows(pair, ids_T[starts[:, None] + np.arange(LENGTH)], known_BG, MASKS)


# ---- the README ------------------------------------------------------------------------------------------------------


def forwards(pair: Pair, stream: TokenStream, heads: DraftHeads | None, *, limit: int | None) -> list[list[float]]:
    """Forwards for each token of held-out texts, by case and block size."""
    table = []
    for temperature, rule in CASES:
        row = []
        for size in SIZES:
            settings = S2d2Settings(kind="s2d2", block_size=size, causal_cache=True, fused=True)
            setup = Setup(
                backbone=pair.target.model,
                info=pair.target.info,
                sampling=Sampling(temperature=temperature, acceptance=rule),
                max_rows=16,
                max_tokens=1 << 20,
                heads=heads,
            )
            outcomes = draft_report.continued(build_decoder(setup, settings), stream, limit=limit)
            row.append(sum(o.nfe for o in outcomes) / sum(len(o.tokens) for o in outcomes))
        table.append(row)
    return table


def section(pair: Pair, heads: DraftHeads, stream: TokenStream, settings: dict[str, str], limit: int) -> list[str]:
    """The lines of the README's section."""
    rows = frozen_pair.join([read_step(pair, causal.pack(stream, 0), 1, step) for step in range(4)])
    bare, headed = (draft_report.acceptance_by_place(pair, rows, which) for which in (None, heads))
    cells = zip(CASES, *(forwards(pair, stream, which, limit=limit) for which in (None, heads)), strict=True)
    return [
        draft_report.HEADING,
        "",
        "For `s2d2` with `fused: true`: it corrects each draft for the tokens before it that its mask has not seen. Trained by",
        "`python -m recipes.block_head` on rows of the frozen model. It never changes a text.",
        "",
        "Mean of sum_v min(p, q) at temperature 1 of masks after held-out texts, by how many tokens they have not seen, true",
        "tokens before each:",
        "",
        *draft_report.place_table((bare, headed)),
        "",
        f"Forwards for each token without the head and with it, over the last {draft_report.LENGTH - draft_report.NUM_PROMPT}",
        f"of {draft_report.LENGTH} tokens of held-out windows, by block size:",
        "",
        "| temperature | acceptance | " + " | ".join(map(str, SIZES)) + " |",
        "|---|---|" + "---|" * len(SIZES),
        *(
            f"| {temperature:g} | {rule if temperature else 'either'} | "
            + " | ".join(f"{before:.2f}, {after:.2f}" for before, after in zip(without, with_it, strict=True))
            + " |"
            for (temperature, rule), without, with_it in cells
        ),
        "",
        *(f"- {key}: {value}" for key, value in settings.items()),
    ]


def describe(flags: argparse.Namespace, plan: HeadPlan, minutes: float) -> dict[str, str]:
    """The section's list of training settings."""
    return {
        "head": f"hidden width {plan.markov_hidden}, stored as float16",
        "rows": f"{plan.rows:,}, of the last {MASKS - 1} of {MASKS} masks after {TEXTS} beginnings of each window of {LENGTH} "
        "tokens of the training files",
        **plan.describe(),
        "time": f"{minutes:.0f} min",
        **loop.describe_machine(flags.threads),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; 0 when the head and the README's section are written."""
    parser = argparse.ArgumentParser(
        prog="recipes.block_head", description="Train a block-diffusion model's draft head."
    )
    parser.add_argument("--model", type=Path, required=True, help="the model's folder, which the head is written into")
    parser.add_argument("--rows", type=int, default=400_000, help="masks to learn from")
    parser.add_argument("--steps", type=int, default=2400, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48, help="held-out texts to decode for the README")
    flags = parser.parse_args(arguments)
    torch.set_num_threads(flags.threads)
    loop.reuse_freed_memory()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.model)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    plan, started = HeadPlan(steps=flags.steps, rows=flags.rows, seed=flags.seed), time.monotonic()
    pair, ids_T = load_model(flags.model, "bfloat16"), causal.pack(prepared.train, plan.seed)
    heads = train_visibly(pair, lambda step: read_step(pair, ids_T, plan.seed, step), plan)
    minutes = (time.monotonic() - started) / 60
    folder.save_draft_heads(flags.model, heads, "s2d2")
    stored = load_heads(flags.model, "s2d2")
    assert stored is not None, "no head was written"
    settings = describe(flags, plan, minutes)
    lines = section(load_model(flags.model), stored, prepared.held_out, settings, flags.samples)
    draft_report.put_section(flags.model / "README.md", lines)
    Console().print(f"wrote the draft head of {flags.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
