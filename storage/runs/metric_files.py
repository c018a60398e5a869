"""Files of metrics beside the results of a finished run: written once per unit and set of metrics, merged when read.

    metrics/set-1f3a9c2e4b5d.json                       which metrics a set has: settings, columns
    metrics/unit-00000017.1f3a9c2e4b5d.parquet          the set's metrics of unit 17, a row per result row, in its order
    passes/0002/metrics/unit-00000003.1f3a9c2e4b5d.parquet      the same for a unit of pass 2

A file's appearance is its commit; no file is ever changed. Metrics that are measured later are another set, with files of
their own. Readers join all files of a unit by position and the passes by (id, sample): the last pass that has a sample counts.
Knows nothing of how a metric is computed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.json_text import parse_as
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.commit import require_identity
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import AlreadyExists, Store

KEYS: Final = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("sample", pa.int32(), nullable=False)])
"""The first columns of every file; all others are float64, null where a row has no value."""

MOST_ERRORS: Final = 1024
MOST_ERROR_CHARS: Final = 300

_FILE = re.compile(r"(?:passes/(\d{4,})/)?metrics/unit-(\d{8,})\.([0-9a-f]{12})\.parquet")
_SET = re.compile(r"metrics/set-([0-9a-f]{12})\.json")
_REMEDY = "delete it, and `draftmill measure` writes it again"


@dataclass(frozen=True, slots=True)
class MeasuredMetric:
    """One metric as it was measured: its settings in JSON form, with the hashes of what else decides its values.

    `estimates` names columns that are computed over all samples of a row: pass@k of the 0/1 column `of`, by column.
    """

    settings: Mapping[str, Any]
    columns: tuple[str, ...]
    estimates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A hash of everything that decides the values."""
        return _digest({"settings": self.settings, "columns": self.columns, "estimates": self.estimates})


@dataclass(frozen=True, slots=True)
class MetricSet:
    """The metrics that are written into one file per unit."""

    metrics: tuple[MeasuredMetric, ...]

    @property
    def name(self) -> str:
        """Twelve hexadecimal digits, the same for the same metrics in any order."""
        return _digest(sorted(metric.identity for metric in self.metrics))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its files after id and sample."""
        return tuple(column for metric in self.metrics for column in metric.columns)


@dataclass(frozen=True, slots=True)
class MetricError:
    """A metric that failed on one row: the row has no value, and this message."""

    id: str
    sample: int
    metric: str
    message: str


def metrics_name(pass_: int, unit: int, metric_set: str) -> str:
    """The name of the file of a unit and a set, in the run's own directory."""
    folder = "" if pass_ == 1 else f"passes/{pass_:04d}/"
    return f"{folder}metrics/unit-{unit:08d}.{metric_set}.parquet"


# ---- writing


def record_set(store: Store, metric_set: MetricSet) -> None:
    """Write the description of a set, unless it is there; the driver does so before any file of the set."""
    metrics = [
        {"settings": dict(metric.settings), "columns": list(metric.columns), "estimates": dict(metric.estimates)}
        for metric in sorted(metric_set.metrics, key=lambda metric: metric.identity)
    ]
    data = (json.dumps({"metrics": metrics}, sort_keys=True) + "\n").encode()
    failpoint("metrics.before_set")
    with suppress(AlreadyExists):
        store.create(f"metrics/set-{metric_set.name}.json", data)


def commit_metrics(
    store: Store,
    *,
    unit: int,
    metric_set: MetricSet,
    table: pa.Table,
    fingerprint: str,
    code_version: str,
    pass_: int = 1,
    errors: Sequence[MetricError] = (),
) -> str:
    """Write the metrics of one unit once; returns the file's name. An existing file of the same job stays as it is.

    `table` has the columns of KEYS and of the set, and the unit's rows in the order of its results. Raises StoreError if
    another job holds the name.
    """
    schema = pa.schema([*KEYS, *(pa.field(name, pa.float64()) for name in metric_set.columns)])
    assert table.schema.remove_metadata().equals(schema), "a table of metrics has its set's columns"
    name = metrics_name(pass_, unit, metric_set.name)
    identity = {"fingerprint": fingerprint, "metrics": metric_set.name, "unit": str(unit), "pass": str(pass_)}
    # The first errors, each cut to a length that fits metadata; `count` says how many there are.
    first = [[error.id, error.sample, error.metric, error.message[:MOST_ERROR_CHARS]] for error in errors[:MOST_ERRORS]]
    errors_text = json.dumps({"count": len(errors), "rows": first})
    metadata = identity | {"code_version": code_version, "rows": str(table.num_rows), "errors": errors_text}
    data = write_parquet(table, metadata)
    assert read_parquet(data).num_rows == table.num_rows, "rows were lost in writing"
    failpoint("metrics.before_commit")
    with suppress(AlreadyExists):
        store.create(name, data, metadata=identity)
        failpoint("metrics.after_commit")
        return name
    require_identity(store, name, parquet_metadata(_read(store, name, store.get(name)).schema), identity)
    return name


# ---- what is there


def metric_sets(store: Store) -> dict[str, MetricSet]:
    """The sets that were measured, by name."""
    names = [(match[1], stat.name) for stat in store.list("metrics/set-") if (match := _SET.fullmatch(stat.name))]
    return {name: _read_set(store, place) for name, place in names}


def _read_set(store: Store, name: str) -> MetricSet:
    try:
        return parse_as(MetricSet, store.get(name))
    except ValueError as error:
        raise DamagedRun(f"{store.url}/{name}", error, _REMEDY) from None


def measured_units(store: Store) -> dict[tuple[int, int], tuple[str, ...]]:
    """The sets that each unit has a file of, by (pass, unit), from a listing of the metrics alone."""
    folders = (f"passes/{pass_:04d}/" for pass_ in count(2))
    passes = takewhile(lambda folder: store.exists(f"{folder}_plan.json"), folders)
    sets: dict[tuple[int, int], tuple[str, ...]] = {}
    for stat in (stat for folder in ("", *passes) for stat in store.list(f"{folder}metrics/unit-")):
        if match := _FILE.fullmatch(stat.name):
            unit = int(match[1] or 1), int(match[2])
            sets[unit] = (*sets.get(unit, ()), match[3])
    return dict(sorted(sets.items()))


# ---- reading


def read_metric_errors(store: Store) -> Iterator[tuple[int, list[MetricError]]]:
    """Yield, for each file with errors, how many it counts and the ones that it names."""
    for _, tables in _by_unit(store):
        for table in tables:
            errors = json.loads(parquet_metadata(table.schema).get("errors", '{"count": 0, "rows": []}'))
            if errors["count"]:
                yield errors["count"], [MetricError(*row) for row in errors["rows"]]


def read_metrics(store: Store) -> pa.Table | None:
    """Every measured sample once: id, sample, then one float64 column per metric, by name; None if nothing is measured.

    Rows are in the plan's order; a sample of several passes has the values of the last measured one, and a column of two sets
    those of the first. Estimates (pass@k) are computed over all samples of a row. Raises DamagedRun if a file is damaged,
    StoreError if the files of a unit differ in their rows.
    """
    tables = [(pass_, _side_by_side(store, of_unit)) for (pass_, _), of_unit in _by_unit(store)]
    if not tables:
        return None
    merged = _last_passes([(pass_, table.replace_schema_metadata(None)) for pass_, table in tables])
    metrics = [metric for metric_set in metric_sets(store).values() for metric in metric_set.metrics]
    rules = {column: rule for metric in metrics for column, rule in metric.estimates.items()}
    for column, rule in sorted(rules.items()):
        if {rule["of"], column} <= set(merged.column_names):
            place = merged.schema.get_field_index(column)
            merged = merged.set_column(place, column, estimates(merged["id"], merged[rule["of"]], rule["k"]))
    return merged.select([*KEYS.names, *sorted(set(merged.column_names) - set(KEYS.names))])


def estimates(ids: pa.ChunkedArray, passed: pa.ChunkedArray, k: int) -> pa.Array:
    """pass@k of each sample's row: 1 - prod(1 - k / (n-c+1 .. n)) of its n samples with a value, c of them 1.

    Null for samples without a value and for rows with fewer than k of them. (Chen et al. 2021, equation 1.)
    """
    groups = pa.table({"id": ids, "passed": passed}).group_by("id").aggregate([("passed", "count"), ("passed", "sum")])
    values = [
        None if count < k else pass_at_k(count, int(correct or 0), k)
        for count, correct in zip(groups["passed_count"].to_pylist(), groups["passed_sum"].to_pylist(), strict=True)
    ]
    of_samples = pa.array(values, pa.float64()).take(pc.index_in(ids, value_set=groups["id"].combine_chunks()))
    arrays = (pc.is_valid(passed), of_samples)
    valid, estimated = (array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array for array in arrays)
    return pc.if_else(valid, estimated, None)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples is correct, from `correct` of `samples`."""
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def _by_unit(store: Store) -> Iterator[tuple[tuple[int, int], list[pa.Table]]]:
    units = measured_units(store)
    names = [metrics_name(*unit, metric_set) for unit, sets in units.items() for metric_set in sets]
    answers = parallel_map(names, store.get)
    for unit, sets in units.items():
        yield unit, [_read(store, name, data.result()) for name, data in (next(answers) for _ in sets)]


def _read(store: Store, name: str, data: bytes) -> pa.Table:
    try:
        return read_parquet(data)
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedRun(f"{store.url}/{name}", error, _REMEDY) from None


def _side_by_side(store: Store, tables: Sequence[pa.Table]) -> pa.Table:
    joined = tables[0]
    for table in tables[1:]:
        if not table.select(KEYS.names).equals(tables[0].select(KEYS.names)):
            reason = "the files of a unit differ in their rows; delete them and measure again"
            raise StoreError(f"{store.url}/metrics: {reason}")
        for name in table.column_names:
            if name not in joined.column_names:
                joined = joined.append_column(table.schema.field(name), table[name])
    return joined


def _last_passes(tables: Sequence[tuple[int, pa.Table]]) -> pa.Table:
    """All rows in one table; a sample that a later pass has takes the later row, in its first place."""
    merged = pa.concat_tables([table for _, table in tables], promote_options="default").combine_chunks()
    if all(pass_ == 1 for pass_, _ in tables):
        return merged
    names = pc.binary_join_element_wise(pc.cast(merged["sample"], pa.string()), merged["id"], ":").combine_chunks()
    from_the_end = pc.index_in(pc.unique(names), value_set=names[::-1]).to_numpy()
    return merged.take(merged.num_rows - 1 - from_the_end)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
