"""The colour and marker of each decoder in plots: fixed, so that the same decoder looks the same in every report.

The baseline of each model family is grey. Within a family the others differ in hue and lightness, also for readers who do
not see red and green as different, and each has a contrast of at least 3:1 on white.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COLOURS: Final = {
    "autoregressive": "#4d4d4d",
    "any_subset": "#5c5c5c",
    "stepwise": "#6b6b6b",
    "block_diffusion": "#565f6b",
    "speculative": "#0072b2",
    "assd": "#1f5fbf",
    "ssd": "#0a6ea4",
    "s2d2": "#3457d5",
    "specdiff": "#c44e00",
    "parallel": "#b8480f",
    "threshold": "#a84300",
    "jacobi": "#00775a",
    "factor": "#8a5a00",
    "multiblock_jacobi": "#7b3294",
    "ancestral": "#8c2d72",
}
MARKERS: Final = {
    "autoregressive": "o",
    "any_subset": "o",
    "stepwise": "o",
    "block_diffusion": "o",
    "speculative": "s",
    "assd": "s",
    "ssd": "s",
    "s2d2": "s",
    "specdiff": "^",
    "parallel": "^",
    "threshold": "^",
    "jacobi": "D",
    "factor": "v",
    "multiblock_jacobi": "P",
    "ancestral": "X",
}
OTHER_COLOUR: Final = "#333333"
LINES: Final = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))

FILLED: Final = ("full", "none", "left", "bottom", "right", "top")


@dataclass(frozen=True, slots=True)
class Style:
    """How a case is drawn; `line` and the filled side of the marker tell apart cases of the same decoder."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    filled: str = "full"


def styles_of(decoders: Sequence[str]) -> list[Style]:
    """A style for each case, given its decoder."""
    seen: Counter[str] = Counter()
    found = []
    for decoder in decoders:
        number = seen[decoder] % len(LINES)
        look = COLOURS.get(decoder, OTHER_COLOUR), MARKERS.get(decoder, "o"), LINES[number], FILLED[number]
        found.append(Style(*look))
        seen[decoder] += 1
    return found
