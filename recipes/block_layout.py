"""The training sequence of a block-diffusion model: its rows, attention mask and masked tokens. Pure functions.

A window of L tokens occurs twice in one sequence of 2L rows, at the same positions: a noisy copy, in which some tokens are
the mask, and a clean one. Blocks of B = 4, L = 12; rows see columns; `causal` changes the clean copy alone:

              noisy          clean                            clean, causal
              1111 2222 3333 1111 2222 3333                   1111
    noisy 1   ####                                        1   #
    noisy 2        ####      ####                             ##
    noisy 3             #### #### ####                        ###
    clean 1                  ####                             ####
    clean 2                  #### ####
    clean 3                  #### #### ####

So every noisy block is scored given itself and the clean text before it, in one forward for all blocks (Arriola et al.,
2025, "Block diffusion: interpolating between autoregressive and diffusion language models", section 3.2 and figure 6). The
clean rows are what a decoder caches of finished blocks. With B = 1 both kinds of clean copy are equal.

Legend: W = windows, L = tokens of a window, B = tokens of a block, N = blocks of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 8  # what config.json says
BLOCKS = (1, 4, 8, 16)
BLOCK_SHARES = (0.30, 0.11, 0.48, 0.11)
CAUSAL_SHARE = 0.4
SUFFIX_SHARE = 0.25


@dataclass(frozen=True)
class Layout:
    """Tokens of a block, and whether clean rows see their own block up to themselves only."""

    block: int
    causal: bool


@cache
def visibility(length: int, layout: Layout) -> Tensor:
    """Which row sees which, bool [2L, 2L], noisy rows first; the last block may be short."""
    place = torch.arange(length)
    block = place // layout.block
    unit = place if layout.causal else block
    own, before = block.unsqueeze(1) == block, block.unsqueeze(1) > block
    seen = unit.unsqueeze(1) >= unit
    return torch.cat([torch.cat([own, before], 1), torch.cat([torch.zeros_like(seen), seen], 1)])


def spread_over(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """`count` numbers of [0, 1), each uniform, one to each of `count` equal parts, in random order."""
    return (rng.permutation(count) + rng.random()) / count


def draw_layouts(rng: np.random.Generator, count: int) -> list[Layout]:
    """A layout for each window of a step, in BLOCK_SHARES and CAUSAL_SHARE as evenly as possible."""
    index = np.searchsorted(np.cumsum(BLOCK_SHARES), spread_over(rng, count), side="right")
    causal = spread_over(rng, count) < CAUSAL_SHARE
    blocks = [BLOCKS[min(i, len(BLOCKS) - 1)] for i in index.tolist()]
    return [Layout(block, block == 1 or bool(flag)) for block, flag in zip(blocks, causal, strict=True)]


def draw_mask(rng: np.random.Generator, length: int, block: int) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """The mask of a window [L], and the weight of each token [L]: B / n for the n masked ones of a block, else 0.

    n is uniform over 1 .. B and spread over the window's blocks, so the mean of the weighted nats is the bound of the
    linear schedule, with its time on the grid n / B. Masked are n tokens at random; in SUFFIX_SHARE of the blocks the last
    n, as after a prompt that ends in the block. ValueError where `length` is not a multiple of `block`.
    """
    if length % block:
        raise ValueError(f"windows of {length} tokens have no whole blocks of {block}; allowed: multiples of {block}")
    num = length // block
    counts = np.clip(np.ceil(spread_over(rng, num) * block), 1, block)[:, None]
    rank = rng.random((num, block)).argsort(1)
    from_end = np.arange(block)[::-1][None, :]
    masked = np.where(rng.random((num, 1)) < SUFFIX_SHARE, from_end, rank) < counts
    return masked.reshape(length), (masked * (block / counts)).reshape(length).astype(np.float32)
