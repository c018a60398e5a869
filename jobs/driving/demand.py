"""What a job asks of a cluster's autoscaler: nodes for the workers that its queue needs, and fewer once the queue is short.

Ray keeps the last request until another one replaces it, for the whole cluster. So it is made only if it has changed, only where
there is an autoscaler, and it is taken back at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draftmill.actors.job import Crew, Seat

Bundles = list[dict[str, float]]
Selectors = list[dict[str, str]]
Request = Callable[[Bundles, Selectors], None]


@dataclass(slots=True)
class Demand:
    """Asks for room. `crew_for` gives the workers that so many units need on all nodes that the autoscaler may bring."""

    crew_for: Callable[[int], Crew]
    request: Request
    _asked: tuple[Bundles, Selectors] | None = None

    def need(self, units: int) -> None:
        """So many units are left."""
        crew = self.crew_for(units) if units else None
        self._ask(*bundles_of(crew) if crew else ([], []))

    def close(self) -> None:
        """The job needs nothing any more."""
        self._ask([], [])

    def _ask(self, bundles: Bundles, selectors: Selectors) -> None:
        if (bundles, selectors) != (self._asked or ([], [])):
            with suppress(Exception):  # the cluster may not answer now: the next call asks again, and the run goes on
                self.request(bundles, selectors)
                self._asked = bundles, selectors


def bundles_of(crew: Crew) -> tuple[Bundles, Selectors]:
    """The resources of all workers of a crew, whether they run already or not, and the labels of their nodes."""
    bundles: Bundles = []
    selectors: Selectors = []
    for seat, count in zip(crew.seats, crew.counts, strict=True):
        bundles += [_bundle(seat) for _ in range(count)]
        selectors += [dict(seat.labels) for _ in range(count)]
    return bundles, selectors


def _bundle(seat: Seat) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", seat.cpus), ("GPU", seat.gpus)) if amount}


def request_of_ray(bundles: Bundles, selectors: Selectors) -> None:
    """Ask the autoscaler of the Ray that we are connected to."""
    from ray.autoscaler.sdk import request_resources

    rest: dict[str, Any] = {"bundle_label_selectors": selectors} if any(selectors) else {}
    request_resources(bundles=bundles, **rest)
