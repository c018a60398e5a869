"""A sample's key, and the numbers that are drawn with it: by planners in numpy, by decoders/draws/noise.py in torch.

Source: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

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
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


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
    """Return one uniform in (0, 1) a row, float64 [R]; keys are (low, high) words, `purpose` is one for all rows or one a row."""
    counter = np.zeros_like(positions_R), positions_R & MASK32, np.zeros_like(positions_R) + purpose, draws_R
    return (philox(counter, (keys_R2[:, 0], keys_R2[:, 1]))[0].astype(np.float64) + 0.5) * 2.0**-32


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return the four 32-bit output words of Philox4x32-10, of int64 arrays or tensors; counters broadcast, and keys to them.
    Only the words that are multiplied next must be clean: of an int64 product, which wraps but has the 64 bits of the unsigned
    one, the high half is masked after the round's exclusive ors, and the low half not before the last round is over."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0, word_2 = _mix(product_1 >> 32, word_1, key_0), _mix(product_0 >> 32, word_3, key_1)
        word_1, word_3 = product_1, product_0
        key_0, key_1 = (key_0 + _WEYL[0]) & MASK32, (key_1 + _WEYL[1]) & MASK32
    return word_0, word_1 & MASK32, word_2, word_3 & MASK32


def _mix(high: Any, word: Any, key: Any) -> Any:
    """(high ^ word ^ key), masked; the last two steps work in place."""
    mixed = high ^ word
    mixed ^= key
    mixed &= MASK32
    return mixed
