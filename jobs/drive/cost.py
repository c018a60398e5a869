"""What a run costs: the seconds for which workers held their devices, by purpose. All of it is measured.

A worker's device is held from the start of loading to the worker's end. The worker measures how long it loaded and decoded, and
how much of that each unit took; the driver measures the rest. A start that never came up is not counted: waiting for a machine
and loading can't be told apart there.
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0

PURPOSES = ("decoding", "loading", "idle", "wasted")
"""What worker seconds go to; in a session that still runs, also to units in progress."""


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """Sums of worker seconds, of one session or of several.

    `up_s` is all of it, including `loading_s`. In `busy_s` workers held units; `counted_s` of these went to units that they
    committed. `lost_s` lies between the last report of workers that died with units and their deaths. `unended` counts sessions
    without a final record: but for one that still runs, their drivers were lost, with the last seconds of their workers.
    """

    up_s: float = 0.0
    loading_s: float = 0.0
    busy_s: float = 0.0
    counted_s: float = 0.0
    lost_s: float = 0.0
    unended: float = 0.0

    def __add__(self, other: DeviceSums) -> DeviceSums:
        return DeviceSums(*(getattr(self, name) + getattr(other, name) for name in DeviceSums.__slots__))

    @property
    def idle_s(self) -> float:
        """Seconds in which workers were up and held no unit."""
        return max(0.0, self.up_s - self.loading_s - self.busy_s - self.lost_s)

    @property
    def open_s(self) -> float:
        """Busy seconds that went to no committed unit: in progress while the session runs, wasted afterwards."""
        return max(0.0, self.busy_s - self.counted_s)


def device_time_rows(sums: DeviceSums, *, open_s: float = 0.0) -> list[tuple[str, str]]:
    """The label and the text of this device time, as a row of a table; no row if there is none.

    `open_s` are seconds of a session that still runs, on units that it has not committed yet.
    """
    least = "at least " if sums.unended else ""
    return [("device time", f"{least}{hours_text(sums.up_s)}  ({purposes_text(sums, open_s)})")] if sums.up_s else []


def purposes_text(sums: DeviceSums, open_s: float = 0.0) -> str:
    """Device time by purpose: `1.42 h decoding, 180 s loading, 36 s idle, 0 s wasted`; with `open_s` also what is in progress."""
    seconds = purposes_of(sums, open_s) | ({"in progress": open_s} if open_s else {})
    return ", ".join(f"{hours_text(amount_s)} {purpose}" for purpose, amount_s in seconds.items())


def purposes_of(sums: DeviceSums, open_s: float = 0.0) -> dict[str, float]:
    """Seconds for each of PURPOSES; together they are all of `up_s`, but for the `open_s` that are in progress."""
    wasted_s = max(0.0, sums.busy_s - sums.counted_s - open_s) + sums.lost_s
    return dict(zip(PURPOSES, (sums.counted_s, sums.loading_s, sums.idle_s, wasted_s), strict=True))


def hours_text(seconds: float) -> str:
    """Device time in hours, below an hour in seconds, with three significant digits."""
    if seconds < HOUR_S:
        return f"{seconds:.2f} s" if 0 < seconds < 0.1 else f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds / HOUR_S)} h"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
