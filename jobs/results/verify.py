"""`draftmill verify`: checks a run's promises (docs/guarantees.md) from its files alone. It reads and hashes every file.

It checks the plan against the data files, the data files against the manifest, and `_SUCCESS` against both. It checks each
later pass in the same way, and that the pass has exactly the rows that failed in the one before. It checks files of metrics
against the results. With --invariance N, it decodes N samples again, each alone in its batch, and compares them token for token:
results must not depend on the other samples of a batch, beyond floating-point effects, which this measures.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.actors.loop.worker import build_parts
from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.samples import Sample
from draftmill.actors.task import Score
from draftmill.decoders.base import Decoder, Outcome
from draftmill.jobs.exit_codes import OK, UNEXPECTED
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import Plan, SampleName, names_of
from draftmill.jobs.plan.resolve import Resolved, make_job, resolve
from draftmill.jobs.results.passes import Pass, failed_rows, finished_passes, passes_of
from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.json_text import parse_json
from draftmill.storage.parquet import parquet_metadata, read_parquet
from draftmill.storage.runs.commit import SUCCESS, Manifest, trace_name, unit_number
from draftmill.storage.runs.metric_files import KEYS, MetricSet, measured_units, metric_sets, metrics_name
from draftmill.storage.runs.records import REMEDY, SCHEMA_VERSION, Sums, read_results, sum_up
from draftmill.storage.runs.unit_facts import CommittedUnit, unit_name
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import NotFound, Place, Store, open_store

SHOWN = 20
"""Number of problems printed in full; the rest are only counted."""

ReadUnit = tuple[bytes, str | None, str | None]
"""A unit's file: its bytes, its etag, and the SHA-256 of its trace if there is one."""


@dataclass(slots=True)
class Findings:
    """What was checked, and the problems found.

    `same`: number of unit files whose bytes match the manifest; `moved`: problems of those whose etag differs.
    """

    units: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    sums: Sums = field(default_factory=Sums)
    problems: list[str] = field(default_factory=list)
    same: int = 0
    moved: list[str] = field(default_factory=list)

    @property
    def is_copy(self) -> bool:
        """Whether the run was copied: then every file has the same bytes, but a new etag."""
        return bool(self.moved) and len(self.moved) == self.same


def verify(place: Place, *, invariance: int = 0) -> int:
    """Check the run and print what was checked; returns 0 if every promise holds, else 1.

    Failed samples are not a problem: the promise is that each is returned with its reason. `invariance` is the number of
    ok samples to decode again; if the run is `exact: true`, each must be equal.
    """
    store = open_store(place)
    try:
        passes = passes_of(store)
    except DamagedRun as error:  # for this command, damage is a finding
        print(f"{store.url}\n  BROKEN: {error}")
        return UNEXPECTED
    done = finished_passes(passes)
    plan, manifest = passes[0].plan, passes[0].manifest
    assert manifest is not None
    findings = check_run(store, plan, manifest)
    lines = [check_later_pass(before, after, findings) for before, after in pairwise(done)]
    if not findings.problems:
        line, problems = check_metrics(store, done)
        lines += [line] if line else []
        findings.problems += problems
    _print_findings(store, plan, findings, lines)
    if invariance and not findings.problems:
        resolved = resolve(plan.spec.with_s3(store.place.s3), store)  # refuses a model or inputs that were not decoded
        share = check_invariance(resolved, plan, manifest, samples=invariance)
        if share < 1 and manifest.exact:  # else the batch may change last bits, and only the share is reported
            findings.problems.append("the run is `exact: true`, but samples decoded alone differ from its results")
    _print_verdict(findings)
    return UNEXPECTED if findings.problems else OK


def check_later_pass(before: Pass, after: Pass, findings: Findings) -> str:
    """Check a finished pass like a run, and its rows against the failed rows of the pass before; returns a line about it."""
    assert after.manifest is not None
    own = check_run(after.store, after.plan, after.manifest)
    if after.plan.fingerprint != before.plan.fingerprint:
        own.problems.append("its fingerprint differs from the run's")
    if not own.problems and not findings.problems:
        planned = chain.from_iterable(names for _, names in after.plan.unit_samples())
        try:
            failed = chain.from_iterable(map(names_of, failed_rows(before)))
            if any(name != other for name, other in zip_longest(planned, failed)):
                own.problems.append("its rows are not the failed rows of the pass before it")
        except StoreError as error:
            own.problems.append(str(error))
    findings.problems += [f"pass {after.number}: {problem}" for problem in own.problems]
    return f"pass {after.number}: {counted(after.plan.rows, 'sample')} again, {_format_counts(own.statuses)}"


def check_run(store: Store, plan: Plan, manifest: Manifest) -> Findings:
    """Check every unit of the plan against its file and the manifest, and the run as a whole."""
    findings = Findings()
    planned, listed = np.arange(plan.units), manifest.units.numbers()
    if len(np.unique(listed)) != len(listed):
        findings.problems.append("the manifest lists a unit twice")
    if manifest.fingerprint != plan.fingerprint:
        findings.problems.append("the manifest belongs to another job: its fingerprint differs from the plan's")
    if sum(part["units"] for part in plan.parts) != plan.units:
        findings.problems.append("the plan's parts do not have the plan's units")
    missing, surplus = np.setdiff1d(planned, listed).tolist(), np.setdiff1d(listed, planned).tolist()
    findings.problems += [f"unit {unit} is planned, but the manifest does not list it" for unit in missing]
    findings.problems += [f"unit {unit} is in the manifest, but not in the plan" for unit in surplus]
    order = np.argsort(listed)
    units = (
        (manifest.units[int(order[np.searchsorted(listed, unit, sorter=order)])], names)
        for unit, names in plan.unit_samples()
        if unit in manifest.units.listed
    )
    traced = plan.spec.output.trace != "none"
    for (committed, names), file in parallel_map(units, lambda unit: _read(store, unit[0], traced=traced)):
        findings.problems += check_unit(plan, committed, names, file, findings)
    if not findings.is_copy:
        findings.problems += findings.moved
    if not findings.problems and manifest.sums is not None:
        own, noted = (replace(sums, examples={}) for sums in (findings.sums, manifest.sums))
        findings.problems += [] if own == noted else ["the manifest's sums differ from those of its rows"]
    findings.problems += check_whole(store, plan, manifest)
    return findings


def _read(store: Store, unit: CommittedUnit, *, traced: bool) -> ReadUnit:
    data, stat, trace_sha256 = store.get(unit.object), store.stat(unit.object), None
    if traced:
        with suppress(NotFound):  # it may have been deleted: no result needs it
            trace_sha256 = hashlib.sha256(store.get(trace_name(unit.unit))).hexdigest()
    return data, stat.etag if stat is not None else None, trace_sha256


def check_unit(
    plan: Plan,
    committed: CommittedUnit,
    names: list[SampleName],
    file: Future[ReadUnit],
    findings: Findings,
) -> list[str]:
    """Check one unit's file: its hash, metadata, schema, rows and trace."""
    name = committed.object
    try:
        data, etag, trace_sha256 = file.result()
        table = read_parquet(data)
    except (StoreError, pa.ArrowInvalid, OSError) as error:
        return [f"{name}: can't be read: {' '.join(str(error).split())}"]
    findings.units += 1
    findings.bytes += len(data)
    if "status" in table.column_names:
        findings.statuses.update(table.column("status").to_pylist())
    is_same = hashlib.sha256(data).hexdigest() == committed.sha256
    if is_same:
        findings.same += 1
        if etag is not None and etag != committed.etag:
            findings.moved.append(f"{name}: its etag is {etag}, the manifest has {committed.etag}")
    problems = [] if is_same else ["its SHA-256 differs from the manifest's"]
    own_sha256 = parquet_metadata(table.schema).get("trace_sha256")
    if trace_sha256 and own_sha256 and trace_sha256 != own_sha256:
        problems.append("its trace is damaged, or that of another attempt")
    if len(data) != committed.bytes:
        problems.append(f"it has {len(data)} bytes, the manifest has {committed.bytes}")
    if table.schema.remove_metadata().equals(plan.schema):
        expected = {"fingerprint": plan.fingerprint, "unit": str(committed.unit), "pass": str(plan.pass_)}
        problems += _metadata_problems(table, expected | {"schema_version": str(SCHEMA_VERSION)})
        problems += _row_problems(committed, names, table, plan.pass_)
    else:
        problems.append("its schema differs from that of the result table")
    if not problems:
        findings.sums.add(sum_up([table]))
    return [f"{name}: {problem}" for problem in problems]


def _metadata_problems(table: pa.Table, expected: Mapping[str, str]) -> Iterator[str]:
    metadata = parquet_metadata(table.schema)
    for key, value in expected.items():
        if metadata.get(key) != value:
            yield f"its {key} is {metadata.get(key)!r}, not {value!r}"


def _row_problems(committed: CommittedUnit, names: list[SampleName], table: pa.Table, pass_: int) -> Iterator[str]:
    own = names_of(table)
    if own != names:
        missing, surplus = Counter(names) - Counter(own), Counter(own) - Counter(names)
        if missing:
            yield f"{missing.total()} planned rows are missing, first {_format_name(next(iter(missing)))}"
        if surplus:
            first = _format_name(next(iter(surplus)))
            yield f"{surplus.total()} rows are duplicates or were never planned, first {first}"
        if not missing and not surplus:
            yield "its rows are not in the order of the plan"
    statuses = Counter(table.column("status").to_pylist())
    for status in ("ok", "failed", "skipped"):
        if statuses[status] != getattr(committed, status):
            yield f"{statuses[status]} rows are {status}, the manifest has {getattr(committed, status)}"
    if set(table.column("unit").to_pylist()) - {committed.unit}:
        yield "rows name another unit"
    if set(table.column("pass").to_pylist()) - {pass_}:
        yield "rows name another pass"


def _format_name(name: SampleName) -> str:
    return f"{name[0]!r}" if name[1] == 0 else f"{name[0]!r}, sample {name[1]}"


def check_whole(store: Store, plan: Plan, manifest: Manifest) -> list[str]:
    """Check the totals and `_SUCCESS`, and find data files that the manifest does not list."""
    problems = []
    units, rows = len(manifest.units), manifest.total("rows")
    if (units, rows) != (plan.units, plan.rows):
        problems.append(f"the manifest holds {units} units and {rows} rows, the plan {plan.units} and {plan.rows}")
    sums = {"units": units} | {fact: manifest.total(fact) for fact in ("rows", "ok", "failed", "skipped", "bytes")}
    if manifest.totals != sums:
        problems.append("the manifest's totals differ from the sums over its units")
    success = None
    if not store.exists(SUCCESS):
        problems.append("there is no _SUCCESS")
    else:
        with suppress(ValueError):
            success = parse_json(store.get(SUCCESS))
        if success != {"fingerprint": plan.fingerprint, "units": plan.units, "rows": plan.rows}:
            problems.append("_SUCCESS is damaged or belongs to another job")
    names = (stat.name for stat in store.list("data/") if stat.name.endswith(".parquet"))
    strangers = sorted(name for name in names if unit_number(name) not in manifest.units.listed)
    if strangers:
        problems.append(f"{len(strangers)} data files are not in the manifest, first {strangers[0]}")
    return problems


def _format_counts(statuses: Counter[str]) -> str:
    return ", ".join(f"{statuses[status]:,} {status}" for status in ("ok", "failed", "skipped"))


def _print_findings(store: Store, plan: Plan, findings: Findings, more: Sequence[str]) -> None:
    print(f"{store.url}: {counted(plan.rows, 'planned sample')} in {counted(plan.units, 'unit')}")
    print(
        f"  read {counted(findings.units, 'unit file')}, {findings.bytes:,} bytes: {_format_counts(findings.statuses)}"
    )
    for line in more:
        print(f"  {line}")
    print("  checked: every planned sample exactly once and in order, SHA-256 and etag against the manifest,")
    print("           schema, fingerprint and unit of every file, page checksums, totals, _SUCCESS")
    if findings.is_copy:
        print("  the run was copied: its files have the manifest's bytes, but other etags")


def _print_verdict(findings: Findings) -> None:
    for problem in findings.problems[:SHOWN]:
        print(f"  BROKEN: {problem}")
    if len(findings.problems) > SHOWN:
        print(f"  and {len(findings.problems) - SHOWN} more")
    if any("can't be read" in problem for problem in findings.problems):
        print(f"  remedy for a file that can't be read: {REMEDY}")
    print("  " + (counted(len(findings.problems), "problem") if findings.problems else "all promises hold"))


# ---- files of metrics


def check_metrics(store: Store, passes: Sequence[Pass]) -> tuple[str | None, list[str]]:
    """A line about the measured units, None if there are none, and the problems found."""
    try:
        sets, measured = metric_sets(store), measured_units(store)
    except StoreError as error:
        return None, [str(error)]
    if not measured:
        return None, []
    fingerprint, places = passes[0].plan.fingerprint, {part.number: part for part in passes}
    problems: list[str] = []
    for (number, unit), names in measured.items():
        results, part = None, places.get(number)
        if part is not None and part.manifest is not None and unit in part.manifest.units.listed:
            [table] = read_results(part.store, objects=[unit_name(unit)], columns=KEYS.names)
            results = table.to_pylist()
        for name in names:
            file = metrics_name(number, unit, name)
            expected = {"fingerprint": fingerprint, "metrics": name, "unit": str(unit), "pass": str(number)}
            own = _metric_problems(store, file, expected, sets.get(name), results)
            problems += [f"{file}: {problem}" for problem in own]
    files = sum(map(len, measured.values()))
    return f"metrics: {counted(files, 'file')} of {counted(len(measured), 'unit')}", problems


def _metric_problems(
    store: Store, file: str, expected: Mapping[str, str], metric_set: MetricSet | None, results: Sequence[Any] | None
) -> Iterator[str]:
    if results is None:
        yield "there is no such unit"
        return
    try:
        table = read_parquet(store.get(file))
    except (StoreError, pa.ArrowInvalid, OSError) as error:
        yield f"can't be read: {' '.join(str(error).split())}"
        return
    yield from _metadata_problems(table, expected)
    if metric_set is None:
        yield f"metrics/set-{expected['metrics']}.json is missing"
    elif sorted(table.column_names) != sorted([*KEYS.names, *metric_set.columns]):  # a set has no order
        yield "its columns differ from those of its set"
    if table.select(KEYS.names).to_pylist() != results:
        yield "its rows differ from those of the unit's results"


Result = tuple[list[int], list[float] | None, float | None]
"""The tokens of a sample; if they were scored also the log-probability of each, where it is known, and of all together."""


def check_invariance(resolved: Resolved, plan: Plan, manifest: Manifest, *, samples: int) -> float:
    """Decode `samples` stored samples alone; prints and returns the share with equal results."""
    job = make_job(resolved, plan)
    job = replace(job, bounds=(1, job.bounds[1]), trace=False)
    decoder, unit_io = build_parts(job, name="verify", node="", threads=1)
    equal = compared = 0
    scores = isinstance(plan.spec.task, Score)
    for unit, index, stored in pick(plan.store, manifest, samples, scores=scores):
        row = WorkUnit(0, unit.unit, unit.rows, 0, attempt=1, pass_=1, start=index, stop=index + 1, probe=True)
        (sample,) = unit_io.open_unit(row)
        if sample.canvas is not None:
            compared += 1
            equal += result_of(decode_alone(decoder, sample), scores=scores) == stored
    share = equal / compared if compared else 1.0
    print(f"  decoded {compared} samples again, each alone: {equal} equal ({share:.1%})")
    return share


def result_of(outcome: Outcome, *, scores: bool = False) -> Result:
    """An outcome in the form that `pick` yields for a stored row; `scores` says that the job's task is to score."""
    each = outcome.token_logprobs
    return outcome.tokens.tolist(), None if each is None else each.tolist(), outcome.logprob if scores else None


def pick(
    store: Store, manifest: Manifest, samples: int, *, scores: bool = False
) -> Iterator[tuple[CommittedUnit, int, Result]]:
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
            each = table.column("token_logprobs")[row].as_py()
            together = table.column("logprob")[row].as_py() if scores else None
            yield unit, row, (table.column("tokens")[row].as_py(), each, together)


def decode_alone(decoder: Decoder, sample: Sample) -> Outcome:
    """The outcome of one sample in an empty decoder; if its holes need several requests, of all of them."""
    has_next = True
    while has_next:
        decoder.admit([sample.request(0)])
        while not (outcomes := decoder.step()):
            pass
        has_next = sample.take(outcomes[0])
    assert sample.outcome is not None
    return sample.outcome
