"""The estimate of a run's device hours: made once, kept in the run directory, and compared with what the run really took.

    RUN/log/estimate.json    device seconds, what they were estimated from, and when

An estimate has a source: an earlier run of the same job, or the first units of this run. Without a source there is none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from draftmill.actors.messages import Receipt
from draftmill.jobs.driving.device_time import HOUR_S, DeviceSums
from draftmill.jobs.driving.events import now_text
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.driving.watchers import Watcher
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.watching.cost import MILLION, hours_text, money_text
from draftmill.storage.errors import StoreError
from draftmill.storage.stores.interface import Store

NAME = "log/estimate.json"

WORTH_S = 60.0
SHARE = 0.05
"""The share of a run, in planned tokens, from which the rest is estimated."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of the worker seconds of a whole run: `source` says in words what it was made from.

    `tokens` are the tokens of ok samples that it expects, None if unknown. `sums` are the seconds by purpose, where the source
    has them; they are not kept.
    """

    device_s: float
    source: str
    made_at: str
    tokens: float | None = None
    sums: DeviceSums | None = field(default=None, compare=False)

    def cost(self, price_per_hour: float) -> float:
        """What these seconds cost."""
        return self.device_s / HOUR_S * price_per_hour

    def error(self, actual_s: float) -> float:
        """How far it was above (or, negative, below) the seconds that were really taken, as a share of these."""
        return self.device_s / actual_s - 1.0


def estimate_from(rate: DeviceSums, size: int, wanted: int, source: str, *, tokens: int = 0) -> Estimate | None:
    """The estimate for `wanted` planned tokens, where `size` of them took these sums; None if nothing is known.

    Planned samples may stand in the place of planned tokens. `tokens` are the tokens of ok samples that were made of `size`.
    """
    if not size or not rate.up_s:
        return None
    scale = wanted / size
    return Estimate(rate.up_s * scale, source, now_text(), tokens * scale or None, rate * scale)


def read_estimate(store: Store) -> Estimate | None:
    """The estimate of a run, None if it has none that can be read."""
    try:
        content = json.loads(store.get(NAME))
        tokens = content.get("tokens")
        return Estimate(
            float(content["device_s"]),
            str(content["source"]),
            str(content["made_at"]),
            None if tokens is None else float(tokens),
        )
    except (StoreError, ValueError, KeyError, TypeError, AttributeError):
        return None


def estimate_rows(estimate: Estimate | None, actual_s: float, price: float | None = None) -> list[tuple[str, str]]:
    """The label and the figures of an estimate, for a table; with `actual_s` above 0, how far it was off.

    Nothing of a finished run that took less than WORTH_S: such an estimate helps nobody.
    """
    if estimate is None or (actual_s and max(actual_s, estimate.device_s) < WORTH_S):
        return []
    money = "" if price is None else f", cost {money_text(estimate.cost(price))}{per_million_text(estimate, price)}"
    text = f"{hours_text(estimate.device_s)} of device time{money}, from {estimate.source}"
    if actual_s:
        error = estimate.error(actual_s)
        text += f"; {abs(error):.0%} too {'high' if error >= 0 else 'low'}"
    return [("estimate", text)]


def per_million_text(estimate: Estimate, *prices: float) -> str:
    """What a million tokens are estimated to cost, at one price or from one to another; "" if the tokens are unknown."""
    if not estimate.tokens:
        return ""
    amounts = (money_text(estimate.cost(price) * MILLION / estimate.tokens) for price in prices)
    return f" ({' to '.join(amounts)} per million tokens of ok samples)"


class EstimateWatcher(Watcher):
    """Makes the estimate of a run that has none yet: at once if there is an earlier run, else from the first units.

    `total` are the planned tokens of the whole run.
    """

    name = "estimates"

    def __init__(self, store: Store, total: int, *, earlier: Estimate | None = None) -> None:
        self._store, self._total = store, total
        self._estimate = earlier
        self._is_done = read_estimate(store) is not None
        self._new: list[int] = []
        self._tokens = self._units = self._made = 0
        self._spent_s = 0.0

    def committed(self, receipt: Receipt) -> None:
        """See Watcher."""
        if not self._is_done:
            self._new.append(receipt.unit)
            self._spent_s += receipt.spent_s
            self._made += receipt.tally.new_tokens

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        """See Watcher."""
        if self._is_done:
            return
        self._units += len(self._new)
        self._tokens += sum(scheduler.state.sizes[unit].tokens for unit in self._new)
        self._new.clear()
        if self._estimate is None and self._total and self._tokens >= SHARE * self._total:
            self._estimate = self._measured(totals)
        if self._estimate is not None:
            self._is_done = True
            self._write(self._estimate)

    def _measured(self, totals: Totals) -> Estimate:
        """From the units so far: the time of each planned token, and the loading that has been."""
        loading_s = totals.devices.sums.loading_s
        source = f"this run's first {self._units:,} of {totals.units - totals.units_before:,} units"
        scale = self._total / self._tokens
        return Estimate(loading_s + self._spent_s * scale, source, now_text(), self._made * scale or None)

    def _write(self, estimate: Estimate) -> None:
        kept = {name: getattr(estimate, name) for name in ("device_s", "source", "made_at", "tokens")}
        try:
            self._store.put(NAME, (json.dumps(kept) + "\n").encode())
        except StoreError:
            return  # best effort, like all of the log


def to_json(estimate: Estimate | None, actual_s: float, price: float | None) -> dict[str, Any] | None:
    """The estimate as data, with its error in per cent once the run has ended (`actual_s` above 0)."""
    if estimate is None:
        return None
    error = round(100 * estimate.error(actual_s), 1) if actual_s else None
    return {
        "device_hours": round(estimate.device_s / HOUR_S, 6),
        "cost": None if price is None else round(estimate.cost(price), 6),
        "source": estimate.source,
        "error_percent": error,
    }
