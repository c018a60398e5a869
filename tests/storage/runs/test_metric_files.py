"""Files of metrics: written once, merged by sample over sets and passes, and estimates over all samples of a row."""

import pyarrow as pa
import pytest

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.parquet import parquet_metadata, read_parquet
from draftmill.storage.runs.metric_files import (
    KEYS,
    MeasuredMetric,
    MetricError,
    MetricSet,
    commit_metrics,
    measured_units,
    metric_sets,
    metrics_name,
    pass_at_k,
    read_metric_errors,
    read_metrics,
    record_set,
)
from draftmill.storage.stores.store import Store, open_store


def one_set(*columns: str, **estimates: dict) -> MetricSet:
    return MetricSet((MeasuredMetric({"kind": columns[0]}, (*columns, *estimates), estimates),))


def rows(keys: list[tuple[str, int]], **columns: list[float | None]) -> pa.Table:
    schema = pa.schema([*KEYS, *(pa.field(name, pa.float64()) for name in columns)])
    return pa.table({"id": [key[0] for key in keys], "sample": [key[1] for key in keys], **columns}, schema=schema)


def commit(store: Store, metric_set: MetricSet, table: pa.Table, **changes) -> str:
    record_set(store, metric_set)
    arguments: dict = {"unit": 3, "fingerprint": "f00", "code_version": "1"} | changes
    return commit_metrics(store, metric_set=metric_set, table=table, **arguments)


def test_metrics_of_a_unit_are_one_file_with_its_identity(store):
    length = one_set("words")
    name = commit(store, length, rows([("a", 0), ("b", 0)], words=[3.0, None]))
    assert name == metrics_name(1, 3, length.name) == f"metrics/unit-00000003.{length.name}.parquet"
    found = read_parquet(store.get(name))
    assert found.column_names == ["id", "sample", "words"]
    described = parquet_metadata(found.schema)
    assert (described["fingerprint"], described["unit"], described["pass"]) == ("f00", "3", "1")
    assert measured_units(store) == {(1, 3): (length.name,)}
    assert metric_sets(store)[length.name].columns == ("words",)


def test_a_second_write_changes_no_byte(store):
    length = one_set("words")
    name = commit(store, length, rows([("a", 0)], words=[3.0]))
    before = store.get(name)
    commit(store, length, rows([("a", 0)], words=[4.0]))
    assert store.get(name) == before


def test_the_file_of_another_job_is_not_taken_for_ours(store):
    length = one_set("words")
    commit(store, length, rows([("a", 0)], words=[3.0]))
    with pytest.raises(StoreError, match="fingerprint is 'f00', not 'b4d'"):
        commit(store, length, rows([("a", 0)], words=[3.0]), fingerprint="b4d")


def test_nothing_measured_is_none(store):
    assert read_metrics(store) is None


def test_sets_of_one_unit_join_and_units_without_a_set_are_null():
    store = open_store("memory://metrics-join")
    first, second = one_set("words"), one_set("bleu")
    commit(store, first, rows([("a", 0)], words=[1.0]), unit=0)
    commit(store, first, rows([("b", 0)], words=[2.0]), unit=1)
    commit(store, second, rows([("b", 0)], bleu=[50.0]), unit=1)
    found = read_metrics(store)
    assert found is not None
    assert found.to_pydict() == {"id": ["a", "b"], "sample": [0, 0], "bleu": [None, 50.0], "words": [1.0, 2.0]}


def test_the_last_pass_of_a_sample_counts_in_its_first_place():
    store = open_store("memory://metrics-passes")
    words = one_set("words")
    store.create("passes/0002/_plan.json", b"{}")
    store.create("passes/0003/_plan.json", b"{}")
    commit(store, words, rows([("a", 0), ("a", 1), ("b", 0)], words=[1.0, None, None]), unit=0)
    commit(store, words, rows([("a", 1), ("b", 0)], words=[2.0, None]), unit=0, pass_=2)
    commit(store, words, rows([("b", 0)], words=[3.0]), unit=0, pass_=3)
    assert set(measured_units(store)) == {(1, 0), (2, 0), (3, 0)}
    found = read_metrics(store)
    assert found is not None
    assert found.to_pydict() == {"id": ["a", "a", "b"], "sample": [0, 1, 0], "words": [1.0, 2.0, 3.0]}


def test_pass_at_k_is_the_unbiased_estimate():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.91667, abs=1e-5)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 5, 1) == pass_at_k(5, 1, 5) == 1.0


def test_estimates_count_all_samples_of_a_row_in_whatever_unit_and_pass():
    store = open_store("memory://metrics-estimates")
    passed = one_set("passed", **{"pass@1": {"of": "passed", "k": 1}, "pass@2": {"of": "passed", "k": 2}})
    store.create("passes/0002/_plan.json", b"{}")
    commit(store, passed, _passed([("a", 0), ("a", 1), ("b", 0)], [1.0, 0.0, 0.0]), unit=0)
    commit(store, passed, _passed([("a", 2), ("b", 1)], [0.0, None]), unit=1)
    commit(store, passed, _passed([("b", 1)], [1.0]), unit=0, pass_=2)
    found = read_metrics(store)
    assert found is not None
    assert found["id"].to_pylist() == ["a", "a", "b", "a", "b"]
    assert found["pass@1"].to_pylist() == pytest.approx([1 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 2])
    assert found["pass@2"].to_pylist() == pytest.approx([2 / 3, 2 / 3, 1.0, 2 / 3, 1.0])


def _passed(keys: list[tuple[str, int]], values: list[float | None]) -> pa.Table:
    empty: list[float | None] = [None] * len(keys)
    return rows(keys, passed=values, **{"pass@1": empty, "pass@2": empty})


def test_errors_of_rows_are_in_the_file_and_no_column():
    store = open_store("memory://metrics-errors")
    own = one_set("own")
    errors = [MetricError("a", 0, "own", "ValueError: no digits"), MetricError("b", 0, "own", "x" * 5000)]
    name = commit(store, own, rows([("a", 0), ("b", 0)], own=[None, None]), errors=errors)
    assert read_parquet(store.get(name)).column_names == ["id", "sample", "own"]
    [(count, found)] = read_metric_errors(store)
    assert count == 2 and found[0] == errors[0] and len(found[1].message) == 300


def test_a_damaged_file_is_named_with_a_remedy():
    store = open_store("memory://metrics-damaged")
    name = commit(store, one_set("words"), rows([("a", 0)], words=[1.0]))
    store.put(name, store.get(name)[:-30])
    with pytest.raises(DamagedRun, match=name):
        read_metrics(store)
