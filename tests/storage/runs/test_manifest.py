"""The manifest in a stream: the same bytes and facts as from one piece, in every store, and damage is found in any line."""

import dataclasses
import json
import random

import pytest

from draftmill.storage.errors import DamagedRun
from draftmill.storage.runs import commit
from draftmill.storage.runs.commit import MANIFEST, SUCCESS, read_manifest, write_manifest
from draftmill.storage.runs.done_units import BLOCK
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.stores.store import MOST_ETAG


def drawn(count: int, seed: int = 0) -> list[CommittedUnit]:
    """Units in any order."""
    rng = random.Random(seed)
    units = []
    for unit in rng.sample(range(count), count):
        name, etag = unit_name(unit), f"{rng.getrandbits(128):032x}"
        if rng.random() < 0.2:
            etag = rng.choice(["", "a" * 40, "b" * MOST_ETAG, "no-hex-77"])
        sha256 = f"{rng.getrandbits(256):064x}"
        counts = (5, rng.randint(0, 5), 0, 0, rng.getrandbits(40))
        ok = dataclasses.replace(
            CommittedUnit(unit, name, etag, *counts, sha256, rng.choice([True, False, None])), failed=5 - counts[1]
        )
        units.append(ok)
    return units


def test_facts_come_back_as_they_were_added():
    units = drawn(BLOCK + 300)
    facts = UnitFacts(units)
    assert len(facts) == len(units) and list(facts) == units and facts[3] == units[3]
    assert facts == UnitFacts(units) != UnitFacts(units[:-1]) and facts != UnitFacts([*units[:-1], units[0]])
    assert list(facts.in_order()) == sorted(units, key=lambda unit: unit.unit)
    assert facts.numbers().tolist() == [unit.unit for unit in units]
    assert list(facts.listed) == sorted(unit.unit for unit in units)
    for fact in ("rows", "ok", "failed", "skipped", "bytes"):
        assert facts.total(fact) == sum(getattr(unit, fact) for unit in units)
    assert facts.exacts() == {True, False, None} and UnitFacts([units[0]]).exacts() == {units[0].exact}
    with pytest.raises(IndexError):
        facts[len(units)]


@pytest.mark.parametrize(
    "odd",
    [{"object": "data/unit-00000001.0a.parquet"}, *({"etag": etag} for etag in ("é", "b" * 49, "nul\0"))]
    + [{"sha256": sha256} for sha256 in ("", "zz", "00")],
    ids=str,
)
def test_facts_of_another_form_are_refused(odd):
    with pytest.raises(ValueError):
        UnitFacts([dataclasses.replace(drawn(2)[0], **odd)])


def test_a_manifest_written_by_way_of_a_file_has_the_same_bytes(store, monkeypatch):
    units = drawn(300)
    facts = {"fingerprint": "f00", "units": 300, "rows": 1500}
    made = write_manifest(store, units, **facts)  # type: ignore[arg-type]
    whole = store.get(MANIFEST)
    rows = [dataclasses.asdict(unit) for unit in sorted(units, key=lambda unit: unit.unit)]
    lines = ",\n".join(json.dumps({name: row[name] for name in row if name != "sums"}) for row in rows)
    assert whole.decode().partition("[\n")[2] == f"{lines}\n]}}\n"
    monkeypatch.setattr(commit, "MOST_BYTES_HELD", 100)
    monkeypatch.setattr(commit, "READ_BYTES", 1000)
    assert write_manifest(store, units, **facts) == made, "it is there already"  # type: ignore[arg-type]
    store.put(MANIFEST, whole.replace(b"f00", b"f01"))
    write_manifest(store, units, **facts)  # type: ignore[arg-type]
    assert store.get(MANIFEST) == whole, "replaced"
    store.delete(MANIFEST)
    store.delete(SUCCESS)
    write_manifest(store, units, **facts)  # type: ignore[arg-type]
    assert store.get(MANIFEST) == whole, "created"
    assert read_manifest(store) == made


def test_a_manifest_with_other_line_ends_is_read(store):
    units = drawn(20)
    made = write_manifest(store, units, fingerprint="f00", units=20, rows=100)
    for text in (json.dumps(json.loads(store.get(MANIFEST))), json.dumps(json.loads(store.get(MANIFEST)), indent=2)):
        store.put(MANIFEST, text.encode())
        found = read_manifest(store)
        assert found is not None and found == made and found.totals == json.loads(text)["totals"]


def test_damage_in_any_line_is_named(store):
    write_manifest(store, drawn(9), fingerprint="f00", units=9, rows=45)
    lines = store.get(MANIFEST).split(b"\n")
    rng = random.Random(1)
    damaged = [b"\n".join(lines[:end]) for end in range(len(lines) - 2)] + [b"\n".join([*lines, b"{}"])]
    for place in range(len(lines) - 1):
        middle = rng.randrange(1, max(2, len(lines[place]) - 1))
        damaged.append(b"\n".join([*lines[:place], lines[place][:middle], *lines[place + 1 :]]))
    damaged.append(b"\n".join(lines).replace(b'"rows"', b'"rowz"', 2))
    for data in damaged:
        store.put(MANIFEST, data)
        with pytest.raises(DamagedRun, match=r"_manifest\.json"):
            read_manifest(store)
