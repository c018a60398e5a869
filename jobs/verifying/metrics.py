"""Checks files of metrics against the passes of a run, for `draftmill verify`: whose they are, and that their rows fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa

from draftmill.jobs.finished.passes import Pass
from draftmill.jobs.formatting import counted
from draftmill.storage.errors import StoreError
from draftmill.storage.parquet import parquet_metadata, read_parquet
from draftmill.storage.runs.metric_files import KEYS, MetricSet, measured_units, metric_sets, metrics_name
from draftmill.storage.runs.records import read_results
from draftmill.storage.runs.unit_facts import CommittedUnit
from draftmill.storage.stores.interface import Store


def check_metrics(store: Store, passes: Sequence[Pass]) -> tuple[str | None, list[str]]:
    """A line about the measured units, None if there are none, and the problems found."""
    try:
        sets, measured = metric_sets(store), measured_units(store)
    except StoreError as error:
        return None, [str(error)]
    if not measured:
        return None, []
    fingerprint = passes[0].plan.fingerprint
    objects = {(one.number, unit.unit): (one.store, unit.object) for one in passes for unit in _units(one)}
    problems = [
        problem
        for place, names in measured.items()
        for problem in _unit(store, fingerprint, place, names, sets, objects.get(place))
    ]
    files = sum(map(len, measured.values()))
    return f"metrics: {counted(files, 'file')} of {counted(len(measured), 'unit')}", problems


def _units(one: Pass) -> Collection[CommittedUnit]:
    return () if one.manifest is None else one.manifest.units


def _unit(
    store: Store,
    fingerprint: str,
    place: tuple[int, int],
    names: Sequence[str],
    sets: dict[str, MetricSet],
    results_at: tuple[Store, str] | None,
) -> Iterator[str]:
    number, unit = place
    results = None if results_at is None else _keys(*results_at)
    for name in names:
        file = metrics_name(number, unit, name)
        if results is None:
            yield f"{file}: there is no such unit"
            continue
        try:
            table = read_parquet(store.get(file))
        except (StoreError, pa.ArrowInvalid, OSError) as error:
            yield f"{file}: can't be read: {' '.join(str(error).split())}"
            continue
        found = parquet_metadata(table.schema)
        expected = {"fingerprint": fingerprint, "metrics": name, "unit": str(unit), "pass": str(number)}
        yield from (
            f"{file}: its {key} is {found.get(key)!r}, not {value!r}"
            for key, value in expected.items()
            if found.get(key) != value
        )
        if name not in sets:
            yield f"{file}: metrics/set-{name}.json is missing"
        elif table.column_names != [*KEYS.names, *sets[name].columns]:
            yield f"{file}: its columns differ from those of its set"
        if table.select(KEYS.names).to_pylist() != results:
            yield f"{file}: its rows differ from those of the unit's results"


def _keys(store: Store, name: str) -> list[dict[str, object]]:
    """The ids and samples of a unit's results."""
    [table] = read_results(store, objects=[name], columns=KEYS.names)
    samples = table["sample"].to_pylist() if "sample" in table.column_names else [0] * table.num_rows
    pairs = zip(table["id"].to_pylist(), samples, strict=True)
    return [{"id": name, "sample": sample or 0} for name, sample in pairs]
