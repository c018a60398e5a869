"""Sampling settings of rows as columns of an array, and what decoders may ask of each row. Imports no torch."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.common_settings import Sampling

TEMPERATURE, TOP_P, MIN_P, TOP_K = range(4)
"""The rows of `settings_4R`, float64. Temperature 0 takes the maximum; top-p infinity, min-p 0 and top-k 0 cut nothing."""

Note = Literal["top1", "margin", "entropy", "squares", "scores"]
"""What decoders may ask of each row (sampling.py)."""
NOTES: Final[tuple[Note, ...]] = ("top1", "margin", "entropy", "squares", "scores")


def column_of(job: Sampling, own: tuple[float | None, ...] = (None,) * 4) -> tuple[float, ...]:
    """The settings of a sample: its own (temperature, top-p, min-p, top-k) where it has some, else the job's."""
    pairs = zip(own, (job.temperature, job.top_p, job.min_p, job.top_k), strict=True)
    temperature, top_p, min_p, top_k = (theirs if mine is None else mine for mine, theirs in pairs)
    assert temperature is not None, "a job has a temperature"
    return temperature, np.inf if top_p is None or top_p >= 1.0 else top_p, min_p or 0.0, top_k or 0


class Uses(NamedTuple):
    """Which settings matter in any of some rows; operations for the others are skipped, which changes no bit.

    `scales`: a temperature is neither 0 nor 1. `top_k` is the largest one; 0 if no row has one.
    """

    scales: bool = False
    some_greedy: bool = False
    all_greedy: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, settings_4R: NDArray[np.float64]) -> Uses:
        temperature_R, top_p_R, min_p_R, top_k_R = settings_4R
        greedy_R = temperature_R == 0.0
        return cls(
            scales=bool((~greedy_R & (temperature_R != 1.0)).any()),
            some_greedy=bool(greedy_R.any()),
            all_greedy=bool(greedy_R.all()),
            top_k=int(top_k_R.max(initial=0)),
            top_p=bool((top_p_R < 1.0).any()),
            min_p=bool(min_p_R.any()),
        )
