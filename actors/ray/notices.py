"""Reads Ray's notices that a node will be removed, from an autoscaler, a watcher of spot machines or `ray drain-node`.

Ray's own libraries (ray.data, ray.train) read them in the same way; there is no public API yet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from draftmill.actors.messages import HomeLeaving, NodeLeaving, PoolEvent
from draftmill.actors.ray.ray_inside import ACTORS, DRAINING, inside

# Errors of another Ray version, or of a Ray that does not answer: a job must not end because notices are unavailable.
_NO_NOTICES = (AttributeError, KeyError, TypeError, RuntimeError, RayError)

EVERY_S = 2.0
"""Seconds between two checks; a check takes a millisecond. Notices come minutes ahead, or at worst half a minute."""


class Notices:
    """Reports once for each worker, and for the driver, that its node will be removed."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._told: set[str | None] = set()

    def of(self, actors: Mapping[str, Any]) -> list[PoolEvent]:
        """Events of the nodes of the workers (actors by name) and of the driver; nothing between two checks."""
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + EVERY_S
        left_s = draining()
        if not left_s:
            return []
        events: list[PoolEvent] = []
        home = ray.get_runtime_context().get_node_id()
        if home in left_s and None not in self._told:
            self._told.add(None)
            events.append(HomeLeaving(left_s[home]))
        for name in sorted(actors.keys() - self._told):
            node = node_of(actors[name])
            if node in left_s:
                self._told.add(name)
                events.append(NodeLeaving(name, left_s[node]))
        return events


def draining() -> dict[str, float | None]:
    """Ids of the nodes that will be removed, with their remaining seconds, None if unknown."""
    ends: dict[str, int] = {}
    with suppress(*_NO_NOTICES):
        ends = (inside(DRAINING) or dict)()
    now_s = time.time()
    return {node: max(0.0, end_ms / 1000 - now_s) if end_ms else None for node, end_ms in ends.items()}


def node_of(actor: Any) -> str | None:
    """Id of the node on which an actor runs; None if Ray does not know it."""
    with suppress(*_NO_NOTICES):  # a TypeError where this version has no such name
        return str(inside(ACTORS)(actor._actor_id.hex())["Address"]["NodeID"])  # type: ignore[misc]
    return None
