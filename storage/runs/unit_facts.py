"""The committed units of a run, of which there may be millions: their facts in about a hundred bytes each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from draftmill.storage.runs.done_units import BLOCK, DoneUnits
from draftmill.storage.runs.records import Sums, sums_of_text
from draftmill.storage.stores.store import MOST_ETAG, is_short_etag

_COUNTS: Final = ("rows", "ok", "failed", "skipped", "bytes")
_COLUMNS: Final = np.dtype(
    [
        ("unit", "<i8"),
        *((name, "<i4") for name in _COUNTS[:-1]),
        ("bytes", "<i8"),
        ("exact", "i1"),
        ("etag", f"S{MOST_ETAG}"),
        ("sha256", "u1", 32),
    ]
)
_EXACT: Final[Mapping[bool | None, int]] = {None: -1, False: 0, True: 1}
_IS_EXACT: Final = {number: exact for exact, number in _EXACT.items()}


@dataclass(frozen=True, slots=True)
class CommittedUnit:
    """The facts of one committed unit, as a receipt carries them and the manifest lists them; `bytes` of the file."""

    unit: int
    object: str
    etag: str
    rows: int
    ok: int
    failed: int
    skipped: int
    bytes: int
    sha256: str
    exact: bool | None = None
    """Whether its worker's results have the same bits in any batch; None if unknown."""
    sums: str = field(default="", compare=False)
    """Sums over its rows (storage/runs/records.py); "" if unknown, as in facts from a manifest: it has those of all units."""


def unit_name(unit: int) -> str:
    """The name of a unit's results in its run directory."""
    return f"data/unit-{unit:08d}.parquet"


class UnitFacts(Collection[CommittedUnit]):
    """Committed units in the order in which they were added.

    The facts lie in columns; a CommittedUnit is made of them when it is asked for. `listed` are the numbers of all units, `sums`
    the sums over them; None if those of a unit are unknown.
    """

    def __init__(self, units: Iterable[CommittedUnit] = ()) -> None:
        self._rows: NDArray[np.void] = np.zeros(0, dtype=_COLUMNS)
        self._count = 0
        self.listed = DoneUnits()
        self.sums: Sums | None = Sums()
        for unit in units:
            self.add(unit)

    def add(self, unit: CommittedUnit) -> None:
        """Add a unit; ValueError if its name, its etag or its SHA-256 is not of the usual form."""
        sha256 = bytes.fromhex(unit.sha256)
        if unit.object != unit_name(unit.unit) or len(sha256) != 32 or not is_short_etag(unit.etag):
            raise ValueError(f"unit {unit.unit}: {unit.object!r}, {unit.etag!r}, {unit.sha256!r}")
        counts = (unit.rows, unit.ok, unit.failed, unit.skipped, unit.bytes)
        exact, digest = _EXACT[unit.exact], np.frombuffer(sha256, dtype=np.uint8)
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(max(BLOCK, self._count // 4), dtype=_COLUMNS)])
        self._rows[self._count] = (unit.unit, *counts, exact, unit.etag.encode(), digest)
        self._count += 1
        self.listed.add(unit.unit)
        try:
            if self.sums is not None:
                self.sums.add(sums_of_text(unit.sums))
        except (ValueError, TypeError):
            self.sums = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> CommittedUnit:
        row = self._known[index]
        unit, rows, ok, failed, skipped, size, exact = row.item()[:7]
        etag, sha256 = row["etag"].decode(), row["sha256"].tobytes().hex()
        return CommittedUnit(unit, unit_name(unit), etag, rows, ok, failed, skipped, size, sha256, _IS_EXACT[exact])

    def __iter__(self) -> Iterator[CommittedUnit]:
        return map(self.__getitem__, range(self._count))

    def __contains__(self, unit: object) -> bool:
        return any(unit == known for known in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitFacts) and np.array_equal(self._known, other._known)

    __hash__ = None  # type: ignore[assignment]

    def total(self, fact: str) -> int:
        """Sum of rows, ok, failed, skipped or bytes."""
        return int(self._known[fact].sum(dtype=np.int64))

    def exacts(self) -> set[bool | None]:
        """The different values of `exact`."""
        return {_IS_EXACT[int(value)] for value in np.unique(self._known["exact"])}

    def numbers(self) -> NDArray[np.int64]:
        """The units' numbers; int64 [units]."""
        return self._known["unit"]

    def sort(self) -> None:
        """Sort the units by number."""
        self._rows = self._known[np.argsort(self.numbers(), kind="stable")]

    @property
    def _known(self) -> NDArray[Any]:
        return self._rows[: self._count]
