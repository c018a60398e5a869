"""Measures a trained any-subset model and its draft heads on held-out files.

Bits per byte: the joint probability of the masked tokens in decoding order, each given the prompt and the true tokens
before it, over the bytes those tokens stand for. Acceptance: how likely a draft is to be accepted, at temperature 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoders.heads import DraftHeads
from recipes.corpus import TokenStream
from recipes.draft_heads import (
    CHAIN_STEPS,
    acceptance,
    chain_hidden,
    log_law,
    markov_hidden,
    read_frozen,
    rows_of,
    stale_limit,
)
from recipes.masking import Windows, decoding_ranks, random_mask
from recipes.two_stream import TwoStream

REVEALED = (0.05, 0.50, 0.85)
BATCH = 16


@dataclass(frozen=True)
class Quality:
    """At one revealed share: bits per byte, nats per token, share of tokens that are the law's mode, tokens scored."""

    bits_per_byte: float
    nats_per_token: float
    top1: float
    tokens: int


def held_out_windows(
    stream: TokenStream, *, length: int, revealed: float, seed: int, limit: int | None = None
) -> Iterator[Windows]:
    """Consecutive windows of every file, masked at random positions; the last piece of a file is left out.

    The first `limit` windows only, where given, taken evenly over the files.
    """
    rng = np.random.default_rng([seed, length, round(revealed * 1000)])
    starts = [
        start
        for first, last in zip(stream.bounds[:-1], stream.bounds[1:], strict=True)
        for start in range(int(first), int(last) - length + 1, length)
    ]
    if limit is not None and limit < len(starts):
        starts = [starts[i * len(starts) // limit] for i in range(limit)]
    num_masked = length - max(1, round(revealed * length))
    for begin in range(0, len(starts), BATCH):
        index = np.array(starts[begin : begin + BATCH])[:, None] + np.arange(length)
        masked = np.stack([random_mask(rng, length, num_masked) for _ in index])
        yield Windows(stream.ids[index], masked, decoding_ranks(masked))


@torch.no_grad()
def quality(
    model: TwoStream,
    stream: TokenStream,
    token_bytes: NDArray[np.int64],
    *,
    length: int,
    revealed: float,
    seed: int = 0,
    limit: int | None = None,
) -> Quality:
    """Score the held-out windows in float32; ValueError where no file is as long as a window."""
    device = model.lm_loss.bias.device
    nats, hits, tokens, num_bytes = 0.0, 0, 0, 0
    for windows in held_out_windows(stream, length=length, revealed=revealed, seed=seed, limit=limit):
        rows = rows_of(windows, device)
        (hidden,) = read_frozen(model, rows, [rows.canvas.rank], bfloat16=False)
        law = log_law(model, hidden)
        nats -= float(law.gather(1, rows.token[:, None]).double().sum())
        hits += int((law.argmax(-1) == rows.token).sum())
        tokens += len(rows.token)
        num_bytes += int(token_bytes[rows.token.cpu().numpy()].sum())
    if not tokens:
        raise ValueError(f"no held-out file has {length} tokens")
    return Quality(nats / math.log(2) / num_bytes, nats / tokens, hits / tokens, tokens)


@torch.no_grad()
def draft_acceptance(
    model: TwoStream,
    heads: DraftHeads,
    stream: TokenStream,
    *,
    length: int,
    revealed: float,
    seed: int = 0,
    limit: int | None = 64,
) -> dict[str, list[float]]:
    """Mean acceptance after 1 to CHAIN_STEPS unseen tokens: of the bare stale row, the Markov head, the chain head."""
    device = model.lm_loss.bias.device
    total: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def count(name: str, step: int, values: torch.Tensor) -> None:
        total[name, step][0] += float(values.double().sum())
        total[name, step][1] += len(values)

    for windows in held_out_windows(stream, length=length, revealed=revealed, seed=seed, limit=limit):
        rows = rows_of(windows, device)
        limits = [stale_limit(rows.canvas, age) for age in range(CHAIN_STEPS + 1)]
        fresh, *stale = read_frozen(model, rows, limits, bfloat16=False)
        law = log_law(model, fresh)
        starts = torch.arange(len(fresh), device=device)
        for step, (reached, state) in enumerate(chain_hidden(model, heads, rows, fresh, starts)):
            count("chain", step, acceptance(law[reached], log_law(model, state)))
            aged = rows.offset >= step + 1  # younger rows cannot be that old
            corrected, chosen = markov_hidden(model, heads, rows, stale[step], limits[step + 1])
            keep = aged[chosen]
            count("markov", step, acceptance(law[chosen], log_law(model, corrected))[keep])
            count("stale", step, acceptance(law[chosen], log_law(model, stale[step][chosen]))[keep])
    return {
        name: [total[name, step][0] / max(1.0, total[name, step][1]) for step in range(CHAIN_STEPS)]
        for name in ("stale", "markov", "chain")
    }
