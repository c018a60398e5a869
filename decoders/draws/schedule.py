"""The log-linear noise schedule of MDLM and SEDD on the host: at time t a share (1 - eps) t of the tokens is masked.

Pure: imports no torch. decoders/draws/absorbing.py has what follows from it for rows.
"""

from __future__ import annotations

from typing import Final

NOISE_EPS: Final = 1e-3
"""At time 1 this share of the tokens is not masked."""

LAST_TIME: Final = 1e-5
"""The time at which the steps of `ancestral` end; the remaining masks are then revealed at once."""


def time_at(share: float) -> float:
    """The time at which a share of the tokens is masked, at most 1."""
    return min(share / (1 - NOISE_EPS), 1.0)
