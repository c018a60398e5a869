"""Measures a masked-diffusion model on held-out files: likelihood bound, accuracy on masked tokens and suffixes.

Legend: B = windows, L = tokens of a window, R = masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from recipes import causal_folder, corpus, evaluation
from recipes.absorbing import mask_counts, masked_logits
from recipes.causal_folder import perplexity
from recipes.evaluation import Quality, Tally
from recipes.masking import random_mask

LENGTHS = (128, 256, 512)
MASKED = (0.15, 0.50, 0.95)
WINDOW = 256
SUFFIX = 16
SUFFIX_SHOWN = (1, 2, 4, 8, 16)
DRAWS = 4


@dataclass(frozen=True)
class Report:
    """The README's figures: `bound[length]`, `causal[length]` beside it, `guesses[share masked]`, `suffix[place]`."""

    bound: dict[int, Quality]
    causal: dict[int, Quality]
    guesses: dict[float, Quality]
    suffix: list[Quality]


def windows(prepared: corpus.Prepared, length: int, limit: int | None) -> NDArray[np.int64]:
    """Consecutive windows of the held-out files, [B, L]; ValueError where no file is as long."""
    indices = list(evaluation.window_indices(prepared.held_out, length=length, limit=limit))
    if not indices:
        raise ValueError(f"no held-out file has {length} tokens")
    ids: NDArray[np.int64] = prepared.held_out.ids[np.concatenate(indices)]
    return ids


def batches(ids: NDArray[np.int64], masked: NDArray[np.bool_], device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Both [B, L] in pieces."""
    for first in range(0, len(ids), evaluation.BATCH):
        part = slice(first, first + evaluation.BATCH)
        yield torch.from_numpy(ids[part]).to(device), torch.from_numpy(masked[part]).to(device)


@torch.no_grad()
def bound(
    model: LlamaForCausalLM, prepared: corpus.Prepared, *, length: int, limit: int | None = None, seed: int = 0
) -> Quality:
    """The bound on the windows' nats, from DRAWS masks of each, and what share of the masked tokens is the distribution's mode.

    A window's nats are at most the mean over n = 1 .. L of L / n times the nats of n random tokens given the others.
    """
    rng = np.random.default_rng([seed, length])
    ids = np.tile(windows(prepared, length, limit), (DRAWS, 1))
    masked = np.stack([random_mask(rng, length, size) for size in mask_counts(rng, len(ids), length)])
    nats, hits = 0.0, 0.0
    for part, hidden in batches(ids, masked, model.device):
        law, token = masked_logits(model, part, hidden).log_softmax(-1), part[hidden]
        weight = (length / hidden.sum(1, keepdim=True)).expand(-1, length)[hidden]
        nats -= float((law.gather(1, token[:, None])[:, 0].double() * weight).sum())
        hits += float(((law.argmax(-1) == token) * weight).sum())
    num_bytes = int(corpus.token_bytes(prepared.tokenizer)[ids].sum())
    return Quality(nats / math.log(2) / num_bytes, nats / ids.size, hits / ids.size, ids.size // DRAWS)


@torch.no_grad()
def guesses(
    model: LlamaForCausalLM, prepared: corpus.Prepared, *, share: float, limit: int | None = None, seed: int = 0
) -> Quality:
    """Score masked tokens, drawn at random, each by itself: this many of a window's tokens are masked."""
    rng, ids = np.random.default_rng([seed, round(1000 * share)]), windows(prepared, WINDOW, limit)
    masked = np.stack([random_mask(rng, WINDOW, round(share * WINDOW)) for _ in ids])
    tally, sizes = Tally(), corpus.token_bytes(prepared.tokenizer)
    for part, hidden in batches(ids, masked, model.device):
        tally.add(masked_logits(model, part, hidden).log_softmax(-1), part[hidden], sizes)
    return tally.quality(WINDOW)


@torch.no_grad()
def suffix(model: LlamaForCausalLM, prepared: corpus.Prepared, limit: int | None = None) -> list[Quality]:
    """Score the last SUFFIX tokens of a window given those before, each by itself, by their place."""
    ids = windows(prepared, WINDOW, limit)
    masked = np.zeros(ids.shape, dtype=np.bool_)
    masked[:, -SUFFIX:] = True
    tallies, sizes = [Tally() for _ in range(SUFFIX)], corpus.token_bytes(prepared.tokenizer)
    for part, hidden in batches(ids, masked, model.device):
        law = masked_logits(model, part, hidden).log_softmax(-1).unflatten(0, (len(part), SUFFIX))
        for place, tally in enumerate(tallies):
            tally.add(law[:, place], part[:, place - SUFFIX], sizes)
    return [tally.quality(WINDOW) for tally in tallies]


def measure(model: LlamaForCausalLM, beside: Qwen2ForCausalLM, prepared: corpus.Prepared) -> Report:
    """All figures of the README, `beside` the causal model's."""
    return Report(
        bound={length: bound(model, prepared, length=length) for length in LENGTHS},
        causal={length: causal_folder.quality(beside, prepared, length=length) for length in LENGTHS},
        guesses={share: guesses(model, prepared, share=share) for share in MASKED},
        suffix=suffix(model, prepared),
    )


def tables(report: Report) -> list[str]:
    """The figures in Markdown."""
    return [
        "Consecutive windows of every held-out file. The bound: the mean over all numbers n of masks of L / n times the",
        f"nats of n random tokens given the others, from {DRAWS} masks of every window of L; beside it the causal model",
        "that training started from, which scores every token but a window's first.",
        "",
        *_bounds(report),
        "",
        f"Masked tokens of windows of {WINDOW}, each by itself: at random, and the last {SUFFIX}, by their place after",
        "the text.",
        "",
        *_guesses(report),
    ]


def _bounds(report: Report) -> Iterable[str]:
    yield "| window | perplexity per token, at most | bits per byte | nats per token | tokens | perplexity of the causal model |"
    yield "|---|---|---|---|---|---|"
    for length, q in report.bound.items():
        yield (
            f"| {length} | {perplexity(q):.2f} | {q.bits_per_byte:.3f} | {q.nats_per_token:.3f} | {q.tokens:,} | "
            f"{perplexity(report.causal[length]):.2f} |"
        )


def _guesses(report: Report) -> Iterable[str]:
    yield "| masked | nats per token | top-1 | tokens |"
    yield "|---|---|---|---|"
    rows = {f"{share:.0%} at random": quality for share, quality in report.guesses.items()}
    rows |= {f"suffix, mask {place}": report.suffix[place - 1] for place in SUFFIX_SHOWN}
    for name, q in rows.items():
        yield f"| {name} | {q.nats_per_token:.3f} | {q.top1:.3f} | {q.tokens:,} |"
