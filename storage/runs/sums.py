"""Sums over result rows: a unit's metadata and a run's manifest have them, so that nobody reads the rows for them again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.storage.errors import printable

COUNTED = ("prompt_tokens", "new_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted")
TRUNCATED = "truncated_tokens"
SUMMED = ("id", "unit", "status", "error_kind", "error", "decode_s", TRUNCATED, *COUNTED)
"""The columns that sums need."""

EXAMPLES = 3
"""Failed samples of each kind that are named."""

SHOWN_CHARS = 100
MOST_CHARS = 1200
"""Characters of a unit's sums as JSON: S3 takes 2 KB of metadata."""


@dataclass(slots=True)
class Sums:
    """Sums over rows. `longest_s` is the decoding time of the slowest sample, `cut_rows` counts those that were truncated.

    `errors` counts failed samples by kind. `examples` has the first few of each kind: unit, id and message.
    """

    rows: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    nfe: int = 0
    nfe_draft: int = 0
    iterations: int = 0
    proposed: int = 0
    accepted: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    longest_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        """Add the sums of other rows."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_s = max(self.longest_s, other.longest_s)
        for kind, count in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count
        for kind, named in other.examples.items():
            known = self.examples.get(kind, [])
            self.examples[kind] = sorted([*known, *named], key=lambda example: example[0])[:EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        """As data, without what is zero."""
        return {name: value for name, value in asdict(self).items() if value}

    def to_text(self) -> str:
        """As ASCII text of at most MOST_CHARS, with fewer examples if need be; "" if even that is too long."""
        data = self.to_json()
        while len(text := json.dumps(data, separators=(",", ":"))) > MOST_CHARS:
            if not data.get("examples"):
                return ""
            kind = max(data["examples"], key=lambda kind: len(data["examples"][kind]))
            data["examples"][kind].pop()
            if not data["examples"][kind]:
                del data["examples"][kind]
        return text


_NUMBERS = tuple(item.name for item in fields(Sums) if item.type == "int")


def sums_of_text(text: str) -> Sums:
    """The sums that `to_text` wrote; ValueError or TypeError for any other text."""
    return Sums(**json.loads(text))


def sum_up(tables: Iterable[pa.Table]) -> Sums:
    """Sum up tables with the columns SUMMED."""
    sums = Sums()
    for table in tables:
        statuses = Counter(table.column("status").to_pylist())
        own = Sums(table.num_rows, statuses["ok"], statuses["failed"], statuses["skipped"])
        for name in COUNTED:
            setattr(own, name, pc.sum(table.column(name)).as_py() or 0)
        own.cut_rows = pc.sum(pc.greater(table[TRUNCATED], 0)).as_py() or 0
        own.cut_tokens = pc.sum(table[TRUNCATED]).as_py() or 0
        own.longest_s = pc.max(table.column("decode_s")).as_py() or 0.0
        failed = table.filter(pc.equal(table["status"], "failed")).select(["unit", "id", "error_kind", "error"])
        for row in failed.to_pylist():
            kind = row["error_kind"] or "unknown"
            own.errors[kind] = own.errors.get(kind, 0) + 1
            examples = own.examples.setdefault(kind, [])
            if len(examples) < EXAMPLES:
                examples.append((row["unit"], brief_line(row["id"]), brief_line(row["error"] or "")))
        sums.add(own)
    return sums


def brief_line(text: str, most: int = SHOWN_CHARS) -> str:
    """The text in one line of at most so many characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."
