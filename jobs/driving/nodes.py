"""The nodes that workers may run on: their resources and labels, as they are now and as an autoscaler may bring them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """The resources of a node, whether free or not, and its labels; None if they are not known, then any selector may match."""

    cpus: float
    gpus: int
    labels: Mapping[str, str] | None = field(default_factory=dict)

    def has(self, selector: Iterable[tuple[str, str]]) -> bool:
        """Whether the node is one that a label selector selects, as Ray reads it."""
        labels = self.labels
        return labels is None or all(_selects(rule, labels.get(key)) for key, rule in selector)

    @property
    def shown(self) -> str:
        """The node in messages; labels that Ray gives to every node are left out."""
        labels = [
            f"{key}={value}" for key, value in sorted((self.labels or {}).items()) if not key.startswith("ray.io/")
        ]
        gpus = f", {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"({self.cpus:g} CPU{'s' * (self.cpus != 1)}{gpus}{''.join(f', {label}' for label in labels)})"


def num_cpus(nodes: Iterable[NodeRoom]) -> int:
    """Whole CPUs of all nodes."""
    return int(sum(node.cpus for node in nodes))


def _selects(rule: str, value: str | None) -> bool:
    if rule.startswith("!"):
        return not _selects(rule[1:], value)
    if rule.startswith("in("):
        return value in [one.strip() for one in rule[3:-1].split(",")]
    return value == rule


MOST_SHOWN = 6


def shown(nodes: Iterable[NodeRoom]) -> str:
    """Nodes in messages, equal ones together: `2 x (4 CPUs, 1 GPU), (8 CPUs)`."""
    kinds = Counter(node.shown for node in nodes).most_common()
    parts = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds[:MOST_SHOWN]]
    more = f" and {len(kinds) - MOST_SHOWN} more kinds" if len(kinds) > MOST_SHOWN else ""
    return ", ".join(parts) + more if parts else "no nodes"
