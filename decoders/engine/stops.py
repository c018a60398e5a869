"""When a completion ends before its last token: stop ids and stop strings. Imports no torch, knows no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StopText(Protocol):
    """Looks for stop strings in generated tokens; whoever knows the vocabulary implements it."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """How many of the generated `tokens` to keep so that their text just contains a stop string; None where it has none.

        The token that completes the string is kept. The first `num_checked` tokens were looked at before, without a find.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion: any of `ids` (kept as the last token), or a stop string. The first event wins."""

    ids: tuple[int, ...] = ()
    text: StopText | None = None


class NeverStops:
    """Finds nothing: the stop text of a request that has no stop strings where the job has some."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """See StopText."""
        return None
