"""Measures a block-diffusion model on held-out files: likelihood bound, next-token quality, tokens per forward.

Legend: W = windows, L = tokens of a window, B = tokens of a block, N = blocks of a window, R = masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from recipes import absorbing_quality, causal_folder, corpus, evaluation
from recipes.absorbing_quality import windows
from recipes.block_layout import BLOCKS, Layout, spread_over, visibility
from recipes.block_training import masked_logits, noisy_states
from recipes.causal_folder import perplexity
from recipes.corpus import MASK_ID
from recipes.evaluation import Quality

LENGTHS = (128, 256, 512)
WINDOW = 256
LAYOUTS = (Layout(1, causal=True), *(Layout(block, causal) for block in BLOCKS[1:] for causal in (False, True)))
DRAWS = 2
TAUS = (0.1, 0.3, 0.5, 0.9)
PACED = tuple(Layout(block, causal=False) for block in BLOCKS[1:])
PACE_WINDOWS = 32


@dataclass(frozen=True)
class Pace:
    """Greedy decoding of blocks after true text: tokens per forward, and the share of them that equals the true token."""

    per_forward: float
    right: float


@dataclass(frozen=True)
class Report:
    """The README's figures: `bound[layout]`, `next[length]` beside the causal model's, `pace[layout, tau]`."""

    bound: dict[Layout, Quality]
    next: dict[int, Quality]
    causal: dict[int, Quality]
    pace: dict[tuple[Layout, float], Pace]


@torch.no_grad()
def bound(
    model: Qwen3ForCausalLM, prepared: corpus.Prepared, layout: Layout, *, limit: int | None = None, seed: int = 0
) -> Quality:
    """The bound on the nats of windows of WINDOW, from DRAWS masks of each: exact where blocks have one token.

    A block's nats, given the text before it, are at most the mean over n = 1 .. B of B / n times the nats of n random
    tokens of it given its others.
    """
    rng, block = np.random.default_rng([seed, layout.block]), layout.block
    ids = np.tile(windows(prepared, WINDOW, limit), (1 if block == 1 else DRAWS, 1))
    num = ids.size // block
    counts = np.clip(np.ceil(spread_over(rng, num) * block), 1, block)[:, None]
    masked = (rng.random((num, block)).argsort(1) < counts).reshape(ids.shape)
    weights = torch.from_numpy(np.repeat(block / counts, block, axis=1).reshape(ids.shape))
    visible = visibility(WINDOW, layout).unsqueeze(0).to(model.device)
    nats, hits, done = 0.0, 0.0, 0
    for part, hidden in absorbing_quality.batches(ids, masked, model.device):
        law, token = masked_logits(model, part, hidden, visible).log_softmax(-1), part[hidden]
        weight = weights[done : done + len(part)].to(model.device)[hidden]
        nats -= float((law.gather(1, token[:, None])[:, 0].double() * weight).sum())
        hits += float(((law.argmax(-1) == token) * weight).sum())
        done += len(part)
    num_bytes = int(corpus.token_bytes(prepared.tokenizer)[ids].sum())
    tokens = ids.size if block == 1 else ids.size // DRAWS
    return Quality(nats / math.log(2) / num_bytes, nats / ids.size, hits / ids.size, tokens)


@torch.no_grad()
def next_token(model: Qwen3ForCausalLM, prepared: corpus.Prepared, *, length: int, limit: int | None = None) -> Quality:
    """Score every token but the first of the windows in blocks of one, as `causal_folder.quality` does a causal model."""
    tally, sizes = evaluation.Tally(), corpus.token_bytes(prepared.tokenizer)
    visible = visibility(length, Layout(1, True)).unsqueeze(0).to(model.device)
    ids = windows(prepared, length, limit)
    masked = np.ones(ids.shape, dtype=np.bool_)
    masked[:, 0] = False
    for part, hidden in absorbing_quality.batches(ids, masked, model.device):
        tally.add(masked_logits(model, part, hidden, visible).log_softmax(-1), part[hidden], sizes)
    return tally.quality(length)


@torch.no_grad()
def reveal(model: Qwen3ForCausalLM, ids: Tensor, visible: Tensor, *, block: int, tau: float) -> tuple[Tensor, int]:
    """Decode every block of `ids` [W, L] after the true text before it; the tokens [W, L] and how many forwards blocks took.

    Greedy: each forward reveals the modes with a probability above `tau`, in each block at least the
    most likely one; never the mask.
    """
    canvas, forwards = torch.full_like(ids, MASK_ID), 0
    while (hidden := canvas == MASK_ID).any():
        law = model.lm_head(noisy_states(model, canvas, ids, visible)).softmax(-1)
        law[..., MASK_ID] = 0.0
        sure, token = law.max(-1)
        sure = sure.masked_fill(~hidden, -1.0).unflatten(1, (-1, block))
        best = torch.zeros_like(sure, dtype=torch.bool).scatter(-1, sure.argmax(-1, keepdim=True), value=True)
        chosen = ((sure > tau) | best).flatten(1) & hidden
        forwards += int(hidden.unflatten(1, (-1, block)).any(-1).sum())
        canvas = torch.where(chosen, token, canvas)
    return canvas, forwards


def pace(
    model: Qwen3ForCausalLM, prepared: corpus.Prepared, layout: Layout, tau: float, *, limit: int | None = None
) -> Pace:
    """`reveal` on held-out windows, the forwards that keep finished blocks not counted."""
    ids = windows(prepared, WINDOW, limit)
    visible = visibility(WINDOW, layout).unsqueeze(0).to(model.device)
    forwards, right = 0, 0
    for part, _ in absorbing_quality.batches(ids, ids == MASK_ID, model.device):
        tokens, count = reveal(model, part, visible, block=layout.block, tau=tau)
        forwards, right = forwards + count, right + int((tokens == part).sum())
    return Pace(ids.size / forwards, right / ids.size)


def measure(model: Qwen3ForCausalLM, beside: Qwen2ForCausalLM, prepared: corpus.Prepared) -> Report:
    """All figures of the README, `beside` the causal model's."""
    return Report(
        bound={layout: bound(model, prepared, layout) for layout in LAYOUTS},
        next={length: next_token(model, prepared, length=length) for length in LENGTHS},
        causal={length: causal_folder.quality(beside, prepared, length=length) for length in LENGTHS},
        pace={
            (layout, tau): pace(model, prepared, layout, tau, limit=PACE_WINDOWS) for layout in PACED for tau in TAUS
        },
    )


# ---- in Markdown -----------------------------------------------------------------------------------------------------


def tables(report: Report) -> list[str]:
    """The figures in Markdown."""
    return [
        f"Consecutive windows of {WINDOW} tokens of every held-out file, in blocks from the window's start. The bound: the",
        "mean over all numbers n of masks of B / n times the nats of n random tokens of a block of B, given its others and",
        f"the true text before it, from {DRAWS} masks of every window; with B = 1 it is the nats. The text before a block was",
        "read block by block, or token by token (causal).",
        "",
        *_bounds(report),
        "",
        "Blocks of one token: every token but a window's first, given those before it. Beside it the causal model that",
        "training started from.",
        "",
        *_next(report),
        "",
        f"Greedy decoding of {PACE_WINDOWS} windows, every block after the true text before it, read block by block: a forward",
        "reveals all tokens more likely than tau, at least one. The forward that caches a finished block is not counted.",
        "Right: the share of the tokens that are those of the file.",
        "",
        *_paces(report),
    ]


def _text(layout: Layout) -> str:
    return "token by token" if layout.causal else "block by block"


def _bounds(report: Report) -> Iterable[str]:
    yield "| block | text before it | perplexity per token, at most | bits per byte | nats per token | tokens |"
    yield "|---|---|---|---|---|---|"
    for layout, q in report.bound.items():
        figures = f"{perplexity(q):.2f} | {q.bits_per_byte:.3f} | {q.nats_per_token:.3f} | {q.tokens:,}"
        yield f"| {layout.block} | {_text(layout)} | {figures} |"


def _next(report: Report) -> Iterable[str]:
    yield "| window | perplexity per token | bits per byte | top-1 | tokens | perplexity of the causal model |"
    yield "|---|---|---|---|---|---|"
    for length, q in report.next.items():
        yield (
            f"| {length} | {perplexity(q):.2f} | {q.bits_per_byte:.3f} | {q.top1:.3f} | {q.tokens:,} | "
            f"{perplexity(report.causal[length]):.2f} |"
        )


def _paces(report: Report) -> Iterable[str]:
    yield "| block | tau | tokens for each forward | share of the block | right |"
    yield "|---|---|---|---|---|"
    for (layout, tau), p in report.pace.items():
        yield f"| {layout.block} | {tau} | {p.per_forward:.2f} | {p.per_forward / layout.block:.2f} | {p.right:.3f} |"
