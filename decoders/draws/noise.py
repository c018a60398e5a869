"""The noise field: every random number of a sample is a pure function of the sample's key and the number's purpose.

Philox4x32-10 (keys.py) in int64 gives the same integers on every device. The counter is (token // 4, position, purpose, draw);
one block of four 32-bit words serves four neighbouring token ids. Knows nothing of models or slots.

Legend: Q = V / 4 blocks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.draws.keys import TARGET, philox, split_key

_BLOCK: Final = 4
# Rows x blocks worked on at once: on a CPU small enough that the ten rounds stay in the second-level cache, on a GPU few
# enough that their words, 64 bits each and several times over, take half a GiB.
_CHUNK_BLOCKS: Final = 1 << 16
_GPU_CHUNK_BLOCKS: Final = 1 << 22


def key_words(keys: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Split 64-bit keys into int64 [R, 2] of (low, high) 32-bit words."""
    return torch.tensor([split_key(key) for key in keys], dtype=torch.int64, device=device).reshape(-1, 2)


def _words(keys_R2: Tensor, positions_R: Tensor, blocks_RQ: Tensor, draws_R: Tensor) -> Tensor:
    position, draw = positions_R.to(torch.int64).unsqueeze(1), draws_R.to(torch.int64).unsqueeze(1)
    counter = (blocks_RQ, position, torch.full_like(position, TARGET), draw)
    words = philox(counter, (keys_R2[:, :1], keys_R2[:, 1:]))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def gumbel_rows(keys_R2: Tensor, positions_R: Tensor, vocab_size: int, *, draws_R: Tensor | None = None) -> Tensor:
    """Return the Gumbel noise of every token at each row's position, float32 [R, V]; `draws_R` are by default all 0."""
    num_rows, num_blocks = keys_R2.shape[0], -(-vocab_size // _BLOCK)
    noise = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=keys_R2.device)
    blocks = torch.arange(num_blocks, dtype=torch.int64, device=keys_R2.device).unsqueeze(0)
    chunk = _CHUNK_BLOCKS if keys_R2.device.type == "cpu" else _GPU_CHUNK_BLOCKS
    rows_at_once = max(1, chunk // num_blocks)
    for start in range(0, num_rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        draws = torch.zeros_like(positions_R[part]) if draws_R is None else draws_R[part]
        words = _words(keys_R2[part], positions_R[part], blocks, draws).flatten(1)[:, :vocab_size]
        noise[part] = _gumbel(words)
    return noise


def gumbel_at(keys_R2: Tensor, positions_R: Tensor, tokens_RT: Tensor) -> Tensor:
    """Return what `gumbel_rows` has at some tokens of each row, float32 [R, T]."""
    words = _words(keys_R2, positions_R, tokens_RT // _BLOCK, torch.zeros_like(positions_R))
    return _gumbel(words.gather(-1, (tokens_RT % _BLOCK).unsqueeze(-1)).squeeze(-1))


def _gumbel(words: Tensor) -> Tensor:
    # Half a step away from both ends: in float64 this is never 0 or 1.
    uniforms = (words.to(torch.float64) + 0.5) * 2.0**-32
    # Close to one the inner logarithm needs float64; its result is at least 1e-10 and needs no more than float32.
    return uniforms.log_().neg_().to(torch.float32).log_().neg_()
