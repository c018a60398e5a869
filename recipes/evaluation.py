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

from draftmill.decoders.backbones.heads.markov import DraftHeads
from recipes.corpus import TokenStream
from recipes.draft_heads import (
    log_law,
    markov_hidden,
    read_frozen,
    rows_of,
    stale_limit,
)
from recipes.head_training import acceptance
from recipes.masking import Windows, decoding_ranks, random_mask
from recipes.two_stream import TwoStream

REVEALED = (0.05, 0.50, 0.85)
BATCH = 16
AGES = 5


@dataclass(frozen=True)
class Quality:
    """Over some held-out windows: bits per byte, nats per token, share of tokens that are the distribution's mode, tokens."""

    bits_per_byte: float
    nats_per_token: float
    top1: float
    tokens: int


@dataclass
class Tally:
    """Sums over scored tokens."""

    nats: float = 0.0
    hits: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def add(self, law: torch.Tensor, token: torch.Tensor, token_bytes: NDArray[np.int64]) -> None:
        """Count true tokens [N] under their log-probabilities [N, V]; `token_bytes` [V] as `corpus.token_bytes`."""
        self.nats -= float(law.gather(1, token[:, None]).double().sum())
        self.hits += int((law.argmax(-1) == token).sum())
        self.tokens += len(token)
        self.num_bytes += int(token_bytes[token.cpu().numpy()].sum())

    def quality(self, length: int) -> Quality:
        """The means; ValueError where nothing was counted because no file has a window of `length` tokens."""
        if not self.tokens:
            raise ValueError(f"no held-out file has {length} tokens")
        return Quality(
            self.nats / math.log(2) / self.num_bytes, self.nats / self.tokens, self.hits / self.tokens, self.tokens
        )


def window_indices(stream: TokenStream, *, length: int, limit: int | None = None) -> Iterator[NDArray[np.int64]]:
    """Consecutive windows of every file as indices [B, L] into `stream`; the last piece of a file is left out.

    `limit` windows only, where given, taken evenly over the files.
    """
    starts = [
        start
        for first, last in zip(stream.bounds[:-1], stream.bounds[1:], strict=True)
        for start in range(int(first), int(last) - length + 1, length)
    ]
    if limit is not None and limit < len(starts):
        starts = [starts[i * len(starts) // limit] for i in range(limit)]
    for begin in range(0, len(starts), BATCH):
        yield np.array(starts[begin : begin + BATCH])[:, None] + np.arange(length)


def held_out_windows(
    stream: TokenStream, *, length: int, revealed: float, seed: int, limit: int | None = None
) -> Iterator[Windows]:
    """The windows of `window_indices`, masked at random positions."""
    rng = np.random.default_rng([seed, length, round(revealed * 1000)])
    num_masked = length - max(1, round(revealed * length))
    for index in window_indices(stream, length=length, limit=limit):
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
    tally = Tally()
    for windows in held_out_windows(stream, length=length, revealed=revealed, seed=seed, limit=limit):
        rows = rows_of(windows, device)
        (hidden,) = read_frozen(model, rows, [rows.canvas.rank], bfloat16=False)
        law = log_law(model, hidden)
        tally.add(law, rows.token, token_bytes)
    return tally.quality(length)


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
    """Mean acceptance after 1 to AGES unseen tokens: of the bare stale row, and of the head."""
    device = model.lm_loss.bias.device
    total: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def count(name: str, step: int, values: torch.Tensor) -> None:
        total[name, step][0] += float(values.double().sum())
        total[name, step][1] += len(values)

    for windows in held_out_windows(stream, length=length, revealed=revealed, seed=seed, limit=limit):
        rows = rows_of(windows, device)
        limits = [stale_limit(rows.canvas, age) for age in range(AGES + 1)]
        fresh, *stale = read_frozen(model, rows, limits, bfloat16=False)
        law = log_law(model, fresh)
        for step in range(AGES):
            aged = rows.offset >= step + 1  # rows at smaller offsets cannot be that old
            corrected, chosen = markov_hidden(model, heads, rows, stale[step], limits[step + 1])
            keep = aged[chosen]
            count("markov", step, acceptance(law[chosen], log_law(model, corrected))[keep])
            count("stale", step, acceptance(law[chosen], log_law(model, stale[step][chosen]))[keep])
    return {
        name: [total[name, step][0] / max(1.0, total[name, step][1]) for step in range(AGES)]
        for name in ("stale", "markov")
    }
