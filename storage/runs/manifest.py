"""`_manifest.json`: every unit of a finished run, one a line, written and read in a stream.

A manifest of a million units has 300 MB; neither its text nor its objects are ever in memory as a whole.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from draftmill.storage.errors import DamagedRun
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts
from draftmill.storage.stores.interface import Body, FileBody, Store

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"

FACTS: Final = ("rows", "ok", "failed", "skipped", "bytes")
READ_BYTES: Final = 4 * 2**20
MOST_BYTES_HELD: Final = 8 * 2**20
"""A larger manifest is written by way of a temporary file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished job holds: every unit once, in order. `said` are the totals as the file has them, if it was read."""

    fingerprint: str
    schema_version: int
    units: Sequence[CommittedUnit]
    said: Mapping[str, int] | None = field(default=None, compare=False)

    def total(self, fact: str) -> int:
        """Sum of rows, ok, failed, skipped or bytes over all units."""
        if isinstance(self.units, UnitFacts):
            return self.units.total(fact)
        return sum(getattr(unit, fact) for unit in self.units)

    @property
    def exact(self) -> bool | None:
        """Whether every unit's results have the same bits in any batch; None if that is unknown for a unit."""
        if isinstance(self.units, UnitFacts):
            return all_exact(self.units.exacts())
        return all_exact(unit.exact for unit in self.units)


def all_exact(parts: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is not, else None (unknown)."""
    found = set(parts)
    return False if False in found else None if None in found or not found else True


def unit_numbers(manifest: Manifest) -> NDArray[np.int64]:
    """The numbers of a manifest's units, in its order; int64 [units]."""
    units = manifest.units
    return (units if isinstance(units, UnitFacts) else UnitFacts(units)).numbers()


def read_manifest(store: Store) -> Manifest | None:
    """Return the manifest, None if the job has not finished; DamagedRun if it is damaged."""
    if not store.exists(MANIFEST):
        return None
    units = UnitFacts()
    try:
        head = _read(store, units)
        return Manifest(head["fingerprint"], head["schema_version"], units, head.get("totals"))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        remedy = f"delete it and {SUCCESS}, and `draftmill run` writes them again"
        raise DamagedRun(f"{store.url}/{MANIFEST}", error, remedy) from None


def _read(store: Store, units: UnitFacts) -> dict[str, Any]:
    """Read the units into `units`, and return what stands before them. Raises ValueError, KeyError or TypeError if damaged."""
    lines = _lines(store)
    first = next(lines, b"")
    if not first.endswith(_OPENS):  # written by another program, with other line ends
        found: dict[str, Any] = json.loads(store.get(MANIFEST))
        for facts in found["units"]:
            units.add(CommittedUnit(**facts))
        return found
    for line in lines:
        if line == _CLOSES:
            break
        units.add(CommittedUnit(**json.loads(line.removesuffix(b","))))
    else:
        raise ValueError("it ends early")
    if any(line.strip() for line in lines):
        raise ValueError("something follows its end")
    return json.loads(first.removesuffix(_OPENS) + b"}")


def _lines(store: Store) -> Iterator[bytes]:
    """The lines without their ends, with a few megabytes in memory."""
    rest, at = b"", 0
    while data := store.get_range(MANIFEST, at, READ_BYTES):
        at += len(data)
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
    if rest:
        yield rest


_OPENS: Final = b', "units": ['
_CLOSES: Final = b"]}"


@contextmanager
def manifest_body(manifest: Manifest) -> Iterator[Body]:
    """The manifest as a store writes it: one unit per line, so that it can be searched and compared with plain tools."""
    with tempfile.SpooledTemporaryFile(max_size=MOST_BYTES_HELD, prefix="draftmill-manifest-") as file:
        for line in _written(manifest):
            file.write(line)
        size = file.tell()
        file.seek(0)
        yield file.read() if size < MOST_BYTES_HELD else FileBody(file, size)


def _written(manifest: Manifest) -> Iterator[bytes]:
    totals = {"units": len(manifest.units)} | {fact: manifest.total(fact) for fact in FACTS}
    head = {"schema_version": manifest.schema_version, "fingerprint": manifest.fingerprint, "exact": manifest.exact}
    head |= {"totals": totals}
    yield json.dumps(head)[:-1].encode() + _OPENS
    for number, unit in enumerate(manifest.units):
        facts = {name: getattr(unit, name) for name in CommittedUnit.__slots__}  # asdict takes three times as long
        yield f"{',' if number else ''}\n{json.dumps(facts)}".encode()
    yield b"\n]}\n"
