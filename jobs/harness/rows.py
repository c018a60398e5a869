"""The rows of one job: requests of lm-evaluation-harness with stable ids, those that must have the same answer only once."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Instance(Protocol):
    """What is used of lm_eval's Instance. Repeats of a request are the same object several times in a row."""

    arguments: Any
    idx: int
    task_name: str | None
    doc_id: int | None

    @property
    def args(self) -> tuple[Any, ...]:
        """The texts, and for generation the generation_kwargs."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that is asked for: a request and which of its repeats it is, counted from 0."""

    instance: Instance
    repeat: int
    doc: int

    @property
    def task(self) -> str:
        """The task's name."""
        return self.instance.task_name or "task"

    @property
    def id(self) -> str:
        """The same in every run of the evaluation: task, document, which request of the document, which repeat."""
        return f"{self.task}:{self.doc}:{self.instance.idx}:{self.repeat}"


def numbered(requests: Sequence[Instance], chosen: dict[str, list[int]]) -> list[Asked]:
    """The requests with their repeats numbered. `chosen` has the documents of tasks of which only some are asked."""
    counts: dict[int, int] = {}
    asked = []
    for one in requests:
        repeat = counts.get(id(one), 0)
        counts[id(one)] = repeat + 1
        asked.append(Asked(one, repeat, document(one, chosen)))
    return asked


def document(one: Instance, chosen: dict[str, list[int]]) -> int:
    """The index of a request's document in its task; with chosen documents, lm_eval numbers these from 0."""
    number = one.doc_id or 0
    documents = chosen.get(one.task_name or "")
    return documents[number] if documents else number


class Rows:
    """The input rows of one job. `add` returns the id of the row that has the answer."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._same: dict[Hashable, str] = {}

    def add(self, name: str, row: dict[str, Any], same: Hashable = None) -> str:
        """Add a row under this id; rows with the same `same` (other than None) have one answer, that of the first."""
        if same is not None and same in self._same:
            return self._same[same]
        free, count = name, 1
        while free in self._rows:  # a task that numbers its requests twice
            count += 1
            free = f"{name}:{count}"
        self._rows[free] = {"id": free, **row}
        if same is not None:
            self._same[same] = free
        return free

    def __len__(self) -> int:
        return len(self._rows)

    def lines(self) -> bytes:
        """The rows as JSON lines."""
        return _lines(self._rows.values())


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
