"""What each part of the budget of drafts (`k: auto`) is worth: tokens/s with the part replaced by something plainer.

    python -m benchmarks.budgets

The worlds are simulated (budget_worlds.py): costs and acceptances are known, clocks are noisy, and a table comes out the same on
any machine. Figures are tokens/s over those of the best fixed number of drafts, which no run knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.budget_worlds import HOPELESS, MIXED, WORTHWHILE, World
from benchmarks.causal import header, row
from draftmill.decoders.engine import cost
from draftmill.decoders.engine.budget import Survival
from draftmill.decoders.engine.cost import Cost, Offers

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
SEEDS, STEPS = 6, 400
_full_fit = cost._fit


def line(cells: list[Any]) -> Cost:
    """A straight line through all sizes instead of a table of the measured ones."""
    fit = _full_fit(cells)
    most = fit.tokens_P[-1]
    ends = np.array([0.0, most]), np.array([fit.base, fit.base + fit.per_token * most])
    return Cost(fit.base, fit.per_token, fit.per_kv_token, *ends)


def _mean(survival: Survival) -> float:
    return float((survival._passed_K.sum() + 2.8) / (survival._reached_K.sum() + 4.0))


def one_rate(survival: Survival, slots_B: Any) -> Any:
    """One acceptance rate for every slot and draft position."""
    rates_K = np.full(len(survival._reached_K), _mean(survival))
    return np.tile(rates_K.cumprod(), (len(slots_B), 1))


def slot_rates(survival: Survival, slots_B: Any) -> Any:
    """One acceptance rate for each slot, for every draft position."""
    tried_B, gained_B = survival._tried_S[slots_B], survival._gained_S[slots_B]
    rates_B = (gained_B + 16.0 * _mean(survival)) / (tried_B + 16.0)
    return np.repeat(rates_B[:, None], len(survival._reached_K), 1).cumprod(1)


PLAINER: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a line of cost": {"fit": line},
    "a rate for each slot": {"rates": slot_rates},
    "one rate": {"rates": one_rate},
    "a line and one rate": {"fit": line, "rates": one_rate},
}


@contextmanager
def replace_parts(fit: Any = None, rates: Any = None) -> Iterator[None]:
    """Run with these parts instead; a line promises nothing about sizes that were not measured."""
    with (
        patch.object(cost, "_fit", fit or _full_fit),
        patch.object(Survival, "probabilities", rates or Survival.probabilities),
        patch.object(Offers, "hopeful", (lambda _, rate, otherwise: otherwise) if fit else Offers.hopeful),
    ):
        yield


def main() -> None:
    """Print the table."""
    print(header("world", "no drafts", *PLAINER))
    for name, world in {**HOPELESS, **WORTHWHILE, **MIXED}.items():
        fixed = [np.mean([World(**world, seed=seed).run(STEPS, length) for seed in range(SEEDS)]) for length in LENGTHS]
        cells = [fixed[0] / max(fixed)]
        for parts in PLAINER.values():
            with replace_parts(**parts):
                cells.append(np.mean([World(**world, seed=seed).run(STEPS) for seed in range(SEEDS)]) / max(fixed))
        print(row(name, *(f"{cell:.2f}" for cell in cells)), flush=True)


if __name__ == "__main__":
    main()
