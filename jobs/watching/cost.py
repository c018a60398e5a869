"""What a run's workers cost, in words: device time by purpose, and money where the spec has a price. Pure.

Money has no currency here: it is in whatever unit `workers.price_per_hour` is.
"""

from __future__ import annotations

from draftmill.jobs.driving.device_time import HOUR_S, DeviceSums

MILLION = 1_000_000

UNPRICED_S = 1.0
"""Seconds without a price that are no reason to leave out the price of the rest: sums are rounded."""

PURPOSES = ("decoding", "loading", "idle", "wasted")
"""What worker seconds go to; in a session that still runs, also to units in progress."""


def cost_rows(sums: DeviceSums, tokens: int, *, open_s: float = 0.0) -> list[tuple[str, str]]:
    """Labels and figures of what these worker seconds were and what they cost; `tokens` are the tokens of ok samples.

    `open_s` are seconds of a session that still runs, on units that it has not committed yet.
    """
    if not sums.up_s:
        return []
    least = "at least " if sums.unended else ""
    rows = [("device time", f"{least}{hours_text(sums.up_s)}  ({purposes_text(sums, open_s)})")]
    if not sums.priced_s:
        return rows
    money = f"{least}{money_text(sums.cost)}"
    unpriced_s = sums.up_s - sums.priced_s
    if unpriced_s > UNPRICED_S:
        money += f" for {hours_text(sums.priced_s)}; {hours_text(unpriced_s)} had no price"
    elif tokens:
        money += f"  ({money_text(sums.cost * MILLION / tokens)} per million tokens of ok samples)"
    return [*rows, ("cost", money)]


def money_cells(sums: DeviceSums, tokens: int) -> tuple[str, str]:
    """What these seconds cost, and a million of the tokens that they made; "-" where there is no price for all of them."""
    if not sums.priced_s or sums.up_s - sums.priced_s > UNPRICED_S:
        return "-", "-"
    return money_text(sums.cost), money_text(sums.cost * MILLION / tokens) if tokens else "-"


def mean_price(sums: DeviceSums) -> float | None:
    """The price of an hour, as the sessions had it on average; None if they had none."""
    return sums.cost / sums.priced_s * HOUR_S if sums.priced_s else None


def purposes_text(sums: DeviceSums, open_s: float = 0.0) -> str:
    """Device time by purpose: `1.42 h decoding, 180 s loading, 36 s idle, 0 s wasted`."""
    purposes = purposes_of(sums, open_s)
    return ", ".join(
        f"{hours_text(seconds)} {name.replace('_', ' ')}" for name, seconds in purposes.items() if name != "in_progress"
    ) + (f", {hours_text(purposes['in_progress'])} in progress" if open_s else "")


def purposes_of(sums: DeviceSums, open_s: float = 0.0) -> dict[str, float]:
    """Seconds by purpose; together they are all of `up_s`."""
    wasted_s = max(0.0, sums.busy_s - sums.counted_s - open_s) + sums.lost_s
    return {
        "decoding": sums.counted_s,
        "loading": sums.loading_s,
        "idle": sums.idle_s,
        "wasted": wasted_s,
        "in_progress": open_s,
    }


def hours_text(seconds: float) -> str:
    """Device time in hours, below an hour in seconds, with three significant digits."""
    if seconds < HOUR_S:
        return f"{seconds:.2f} s" if 0 < seconds < 0.1 else f"{_rounded(seconds)} s"
    return f"{_rounded(seconds / HOUR_S)} h"


def money_text(amount: float) -> str:
    """An amount, with two decimals, and three significant digits below one."""
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else _rounded(amount)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
