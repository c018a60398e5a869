"""Reads the token ids that a row gives, and checks ids and lengths against the model. Pure; problems raise RowError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rows import missing
from decoders.base import HOLE, ModelInfo
from storage.errors import RowError

STAGE = "tokenize"


def is_id(value: Any) -> bool:
    """Whether a value is an integer of Python or numpy; bool does not count."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def given_ids(values: Mapping[str, Any], column: str, info: ModelInfo, *, nulls: bool) -> NDArray[np.int32]:
    """Return the row's own ids, int32; with `nulls`, each null becomes HOLE."""
    given = values.get(column)
    if given is None:
        raise missing(values, column)
    if not isinstance(given, list | tuple | np.ndarray):
        raise RowError("bad_tokens", STAGE, f"{column!r} is {type(given).__name__}, not a list of ids")
    for token in given:
        if not is_id(token) and not (nulls and token is None):
            hint = "" if nulls else " (null is allowed only for task infill with mask kind given)"
            raise RowError("bad_tokens", STAGE, f"{token!r} is not a token id{hint}")
    check_ids(np.asarray([0 if token is None else min(int(token), 2**62) for token in given], dtype=np.int64), info)
    return np.asarray([HOLE if token is None else int(token) for token in given], dtype=np.int32)


def check_ids(ids: NDArray[np.int64], info: ModelInfo) -> NDArray[np.int32]:
    """Return the ids as int32; RowError if the model lacks one of them."""
    wrong = ids[(ids < 0) | (ids >= info.vocab_size)]
    if len(wrong):
        raise RowError("bad_tokens", STAGE, f"id {wrong[0]}; the model's ids are 0 to {info.vocab_size - 1}")
    return ids.astype(np.int32)


def check_length(length: int, info: ModelInfo) -> None:
    """Raise RowError if a canvas is longer than the model allows."""
    if info.max_length is not None and length > info.max_length:
        raise RowError("too_long", STAGE, f"{length} tokens; the model's limit is {info.max_length}")
