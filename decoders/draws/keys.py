"""A sample's key, and the noise that planners draw with it: decoders/draws/noise.py in numpy, without torch.

The numbers are the same ones (tests/decoders/draws/test_noise.py): Philox4x32-10 in wrapping uint64 arithmetic of numpy.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Purposes keep the streams of one sample apart; their numbers are part of every result and never change.
TARGET: Final = 0
DRAFT: Final = 1
ACCEPT: Final = 2
RESIDUAL: Final = 3
BONUS: Final = 4
ORDER: Final = 5
JACOBI: Final = 6
MASK: Final = 7
SCORE_SHARE: Final = 8
SCORE_MASK: Final = 9
LENGTH: Final = 10

MASK32: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
ROUNDS: Final = 10


def sample_key(job_seed: int, sample_id: str) -> int:
    """Return the 64-bit key of a sample: blake2b of the seed (8 bytes, little endian) followed by the id in UTF-8. Raises
    ValueError where the seed does not fit a signed 64-bit integer."""
    if not -(2**63) <= job_seed < 2**63:
        raise ValueError(f"seed: {job_seed} does not fit 64 bits; allowed: -2**63 .. 2**63 - 1")
    payload = job_seed.to_bytes(8, "little", signed=True) + sample_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")


def hole_key(key: int, hole: int) -> int:
    """Return the key of one hole of a sample whose holes are decoded one after the other: the first has the sample's own.
    For the others it is blake2b of the key and the hole's number (8 bytes each, little endian)."""
    return _derive(key, hole, b"")


def nth_key(key: int, number: int) -> int:
    """Return the key of one of several samples of a row: the first has the row's own. For the others it is as in
    `hole_key`, personalised so that it never equals the key of a hole."""
    return _derive(key, number, b"sample")


def _derive(key: int, number: int, person: bytes) -> int:
    payload = key.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8, person=person).digest(), "little") if number else key


def uniforms(key: int, positions: NDArray[np.int64], purpose: int, draw: int = 0) -> NDArray[np.float64]:
    """Return one uniform in (0, 1) for each position of one sample, float64 [len(positions)]; for planners."""
    where = np.ascontiguousarray(positions, dtype=np.int64)
    keys = np.broadcast_to(np.array(split_key(key), dtype=np.int64), (len(where), 2))
    return uniform_rows(keys, where, purpose, np.full_like(where, draw))


def split_key(key: int) -> tuple[int, int]:
    """The low and the high 32 bits of a key."""
    return key & MASK32, key >> 32


def uniform_rows(
    keys_R2: NDArray[np.int64],
    positions_R: NDArray[np.int64],
    purpose: int | NDArray[np.int64],
    draws_R: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return one uniform in (0, 1) a row, float64 [R]; keys are (low, high) words. `purpose`
    is one for all rows, or one a row."""
    word_1 = positions_R.astype(np.uint64) & np.uint64(MASK32)
    word_0, word_2, word_3 = np.zeros_like(word_1), np.full_like(word_1, purpose), draws_R.astype(np.uint64)
    low, high = keys_R2[:, 0].astype(np.uint64), keys_R2[:, 1].astype(np.uint64)
    for _ in range(ROUNDS):
        product_0, product_1 = word_0 * np.uint64(MULTIPLIERS[0]), word_2 * np.uint64(MULTIPLIERS[1])
        word_0, word_2 = _high(product_1) ^ word_1 ^ low, _high(product_0) ^ word_3 ^ high
        word_1, word_3 = product_1 & np.uint64(MASK32), product_0 & np.uint64(MASK32)
        low, high = (low + np.uint64(WEYL[0])) & np.uint64(MASK32), (high + np.uint64(WEYL[1])) & np.uint64(MASK32)
    return (word_0.astype(np.float64) + 0.5) * 2.0**-32


def _high(product: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return product >> np.uint64(32)
