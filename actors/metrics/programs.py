"""pass@k: runs each sample's program in the sandbox (actors/sandbox) and notes whether it passed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from draftmill.actors.metrics.base import MeasuredRow, Stopping, Values, guarded
from draftmill.actors.metrics.settings import PLACE, PassAtK
from draftmill.actors.sandbox.sandbox import Limits, Sandbox
from draftmill.storage.runs.metric_files import pass_at_k

_FENCED: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs the programs of a unit, `threads` at a time. `samples` is the number of samples of each row, None if unknown."""

    settings: PassAtK
    sandbox: Sandbox
    threads: int = 1
    samples: int | None = None

    def measure(self, rows: Sequence[MeasuredRow], stopping: Callable[[], bool]) -> list[Values | Exception | None]:
        """A row's estimates have no value here if some of its samples are in another unit."""

        def one(row: MeasuredRow) -> Values | None:
            if stopping():
                raise Stopping
            return self._passed(row, stopping)

        with ThreadPoolExecutor(self.threads, thread_name_prefix="programs") as pool:
            found = list(pool.map(lambda row: guarded(one, row), rows))
        return self._with_estimates(rows, found)

    def _passed(self, row: MeasuredRow, stopping: Callable[[], bool]) -> Values | None:
        if row.text is None:
            return None
        settings = self.settings
        limits = Limits(timeout_s=settings.timeout_s, memory_mb=settings.memory_mb, processes=settings.processes)
        ran = self.sandbox.run(program_of(settings, row.text, row.values), limits, stopping=stopping)
        if ran.how == "timeout" and stopping():
            raise Stopping
        return (float(ran.passed),)

    def _with_estimates(
        self, rows: Sequence[MeasuredRow], found: list[Values | Exception | None]
    ) -> list[Values | Exception | None]:
        passed = [float(one[0] or 0.0) if isinstance(one, tuple) else None for one in found]
        counts = Counter(row.id for row, one in zip(rows, passed, strict=True) if one is not None)
        correct = Counter(row.id for row, one in zip(rows, passed, strict=True) if one)
        answers: list[Values | Exception | None] = []
        for row, one in zip(rows, found, strict=True):
            if not isinstance(one, tuple):
                answers.append(one)
                continue
            total = counts[row.id]
            is_whole = self.samples is None or total == self.samples
            estimates = (
                pass_at_k(total, correct[row.id], k) if is_whole and k <= total else None for k in self.settings.k
            )
            answers.append((*one, *estimates))
        return answers


def program_of(settings: PassAtK, text: str, values: Mapping[str, Any]) -> str:
    """The program of a sample: the template with its text and the kept columns of its row; lists are joined by line ends."""
    held = dict(values) | {"text": fenced(text) if settings.code == "fenced" else text}
    return PLACE.sub(lambda place: f"{{{place[1]}}}" if place[1] else _shown(held, place[2]), settings.program)


def fenced(text: str) -> str:
    """The content of the first fenced block of code, or the whole text if there is none."""
    found = _FENCED.search(text)
    return found[1] if found else text


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        raise ValueError(f"the row has no value in the kept column {name!r}")
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return str(value)
