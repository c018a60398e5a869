"""`verify --invariance N`: decode N samples again, each alone in its batch, and compare with what the run stored.

Results must not depend on what a sample was batched with, beyond floating-point effects; this measures the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from actors.messages import WorkUnit
from actors.worker import build_parts
from decoders.base import Decoder, Request
from jobs.handout import make_job
from jobs.plan import Plan
from storage.commit import CommittedUnit, Manifest
from storage.records import read_parquet
from storage.verbs import Store


def check_invariance(store: Store, plan: Plan, manifest: Manifest, *, samples: int) -> float:
    """Decode `samples` stored samples alone and print the share that came out equal; returns it."""
    job = replace(make_job(plan.spec, plan, conditional=True), store_url=store.url, max_rows=1, trace=False)
    decoder, clerk = build_parts(job, name="verify", node="", threads=1)
    equal = compared = 0
    for unit, index, tokens in pick(store, manifest, samples):
        (sample,) = clerk.open_unit(alone(unit, index))
        if sample.canvas is None:
            continue
        compared += 1
        equal += decode_alone(decoder, Request(0, sample.key, sample.canvas)) == tokens
    share = equal / compared if compared else 1.0
    print(f"  decoded {compared} samples again, each alone: {equal} equal ({share:.1%})")
    return share


def pick(store: Store, manifest: Manifest, samples: int) -> Iterator[tuple[CommittedUnit, int, list[int]]]:
    """Evenly spread over the run: (unit, row in it, its tokens) of samples that are ok."""
    total = manifest.total("rows")
    wanted = sorted({(2 * n + 1) * total // (2 * samples) for n in range(samples)})
    first = 0
    for unit in manifest.units:
        rows = [row - first for row in wanted if first <= row < first + unit.rows]
        first += unit.rows
        table = read_parquet(store.get(unit.object), columns=["status", "tokens"]) if rows else None
        for row in rows:
            assert table is not None
            if table.column("status")[row].as_py() == "ok":
                yield unit, row, table.column("tokens")[row].as_py()


def alone(unit: CommittedUnit, index: int) -> WorkUnit:
    """A unit of which only one row is wanted."""
    return WorkUnit(
        lease=0,
        unit=unit.unit,
        rows=unit.rows,
        tokens=0,
        attempt=1,
        pass_=1,
        start=index,
        stop=index + 1,
        probe=True,
    )


def decode_alone(decoder: Decoder, request: Request) -> list[int]:
    """The tokens of one request in an empty decoder."""
    decoder.admit([request])
    while True:
        for outcome in decoder.step():
            return [int(token) for token in outcome.tokens]
