"""`verify --invariance N`: decodes N samples again, each alone in its batch, and compares them with the stored results.

Results must not depend on the other samples of a batch, beyond floating-point effects; this measures those effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from draftmill.actors.loop.worker import build_parts
from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.samples import Sample
from draftmill.actors.task import Score
from draftmill.decoders.base import Decoder, Outcome, Request
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.worker_job import make_job
from draftmill.storage.parquet import read_parquet
from draftmill.storage.runs.commit import Manifest
from draftmill.storage.runs.unit_facts import CommittedUnit
from draftmill.storage.stores.interface import Store

Said = tuple[list[int], list[float] | None, float | None]
"""The tokens of a sample; if they were scored also the log-probability of each, where it is known, and of all together."""


def check_invariance(store: Store, plan: Plan, manifest: Manifest, *, samples: int) -> float:
    """Decode `samples` stored samples alone; prints and returns the share with equal results."""
    job = replace(make_job(plan.spec, plan, conditional=True), store_url=store.url, max_rows=1, trace=False)
    decoder, unit_io = build_parts(job, name="verify", node="", threads=1)
    equal = compared = 0
    for unit, index, stored in pick(store, manifest, samples, scores=isinstance(plan.spec.task, Score)):
        (sample,) = unit_io.open_unit(alone(unit, index))
        if sample.canvas is None:
            continue
        compared += 1
        equal += said(decode_alone(decoder, sample), scores=isinstance(plan.spec.task, Score)) == stored
    share = equal / compared if compared else 1.0
    print(f"  decoded {compared} samples again, each alone: {equal} equal ({share:.1%})")
    return share


def said(outcome: Outcome, *, scores: bool = False) -> Said:
    """An outcome in the form that `pick` yields for a stored row; `scores` says that the job's task is to score."""
    each = outcome.token_logprobs
    return outcome.tokens.tolist(), None if each is None else each.tolist(), outcome.logprob if scores else None


def pick(
    store: Store, manifest: Manifest, samples: int, *, scores: bool = False
) -> Iterator[tuple[CommittedUnit, int, Said]]:
    """Yield (unit, row in it, stored result) of `samples` evenly spread ok samples, or of all if there are fewer."""
    total = manifest.total("ok")
    wanted = sorted({(2 * n + 1) * total // (2 * samples) for n in range(samples)}) if total else []
    first = 0  # of the samples that are ok, counted over all units
    for unit in manifest.units:
        inside = [number - first for number in wanted if first <= number < first + unit.ok]
        first += unit.ok
        if not inside:
            continue
        table = read_parquet(store.get(unit.object))
        good = np.flatnonzero(pc.equal(table.column("status"), "ok").to_numpy())
        for row in good[inside].tolist():
            each = table.column("token_logprobs")[row].as_py() if "token_logprobs" in table.column_names else None
            together = table.column("logprob")[row].as_py() if scores else None
            yield unit, row, (table.column("tokens")[row].as_py(), each, together)


def alone(unit: CommittedUnit, index: int) -> WorkUnit:
    """A work unit for a single row of a unit."""
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


def decode_alone(decoder: Decoder, sample: Sample) -> Outcome:
    """The outcome of one sample in an empty decoder; if its holes need several requests, of all of them."""
    while sample.take(_decoded(decoder, sample.request(0))):
        pass
    assert sample.outcome is not None
    return sample.outcome


def _decoded(decoder: Decoder, request: Request) -> Outcome:
    decoder.admit([request])
    while True:
        for outcome in decoder.step():
            return outcome
