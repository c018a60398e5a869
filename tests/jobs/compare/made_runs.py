"""Run directories with rows that a test makes up, without a model: a plan, unit files, a manifest, metrics, a sweep of them."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.plan.plan import FORMATS
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.commit import commit_unit, write_manifest
from draftmill.storage.runs.metric_files import KEYS, MeasuredMetric, MetricSet, commit_metrics, record_set
from draftmill.storage.runs.records import SCHEMA_VERSION, read_results, table_from_rows
from draftmill.storage.runs.unit_facts import unit_name
from draftmill.storage.stores.store import Store, open_store
from tests.jobs.specs import completion

START = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)
FILE = InputFile(uri="/in/rows.jsonl", name="rows.jsonl", size=10, etag=None, mtime_s=1.0, format="jsonl", sha256="aa")

Row = dict


def row(number: int, **values) -> Row:
    """One ok row: four tokens in four forwards, unless `values` say otherwise."""
    usual = {
        "id": f"row {number}",
        "unit": 0,
        "pass": 1,
        "attempt": 1,
        "status": "ok",
        "text": f"text {number}",
        "tokens": [number, 1, 2, 3],
        "prompt_tokens": 8,
        "new_tokens": 4,
        "finish": "length",
        "decoder": "autoregressive",
        "model": "m",
        "key": number,
        "nfe": 4,
        "nfe_draft": 0,
        "iterations": 4,
        "proposed": 0,
        "accepted": 0,
        "accept_hist": [0, 4],
        "wait_s": 0.5,
        "prefill_s": 0.1,
        "decode_s": 0.9,
        "total_s": 1.5,
        "device_s": 0.4,
        "worker": "w0",
        "node": "n",
        "started_at": START + datetime.timedelta(seconds=number % 50),
        "sample": 0,
    }
    return usual | values


def failed(number: int, kind: str = "too_long", **values) -> Row:
    kept = {name: row(number)[name] for name in ("id", "unit", "pass", "attempt", "decoder", "model", "sample")}
    reason = {"status": "failed", "error_kind": kind, "error_stage": "plan", "error": f"row {number} is {kind}"}
    return kept | reason | {"new_tokens": 0} | values


def write_run(place: Path, rows: Sequence[Row], *, units: int = 2, **changes) -> Path:
    """A finished run of these rows; `changes` are sections of its spec."""
    fill_store(open_store(str(place)), rows, units=units, **changes)
    return place


def fill_store(store: Store, rows: Sequence[Row], *, units: int = 2, **changes) -> None:
    """The same in any store."""
    spec = check_spec(completion(name=store.url.rpartition("/")[2]) | changes)
    results = spec.results_key() | {"schema_version": SCHEMA_VERSION}
    results["input"] |= {"files": "aa"}
    results["model"] |= {"tokenizer": "t", "checkpoint": "w" * 64, "family": "llama"}
    fingerprint = digest(results)
    parts = [rows[len(rows) * unit // units : len(rows) * (unit + 1) // units] for unit in range(units)]
    sizes = [len(some) for some in parts]
    part = {
        "name": "_plan-0.parquet",
        "first": 0,
        "units": units,
        "rows": len(rows),
        "unit_rows": sizes,
        "unit_tokens": sizes,
        "windows": [0],
    }
    plan = {
        **FORMATS,
        "fingerprint": fingerprint,
        "code_version": "0.1.0",
        "totals": {"rows": len(rows), "units": units, "tokens": 0, "holes": 0, "errors": {}},
        "results": results,
        "spec": spec.model_dump(mode="json"),
        "inputs": [asdict(FILE)],
        "parts": [part],
        "keep": None,
    }
    store.create("_plan.json", json.dumps(plan).encode())
    done = [
        commit_unit(store, unit=unit, table=table_from_rows(part), fingerprint=fingerprint, code_version="0.1.0")
        for unit, part in enumerate([one | {"unit": unit} for one in part] for unit, part in enumerate(parts))
    ]
    write_manifest(store, done, fingerprint=fingerprint, units=units, rows=len(rows))


def write_metrics(place: Path, values: Mapping, *, units: int = 2, kind: str = "made up") -> None:
    """Metrics files of such a run: for each metric of this kind a value per row."""
    store = open_store(str(place))
    fingerprint = json.loads(store.get("_plan.json"))["fingerprint"]
    found = MetricSet((MeasuredMetric({"kind": kind}, tuple(values)),))
    record_set(store, found)
    start = 0
    for unit in range(units):
        rows = next(read_results(store, objects=[unit_name(unit)]))
        samples = pc.fill_null(rows["sample"], 0)
        rows = rows.set_column(rows.schema.get_field_index("sample"), KEYS.field("sample"), samples)
        columns = [pa.array(list(values[name])[start : start + rows.num_rows], pa.float64()) for name in values]
        fields = [*KEYS, *(pa.field(name, pa.float64()) for name in values)]
        table = pa.Table.from_arrays([*(rows[name] for name in KEYS.names), *columns], schema=pa.schema(fields))
        commit_metrics(store, unit=unit, metric_set=found, table=table, fingerprint=fingerprint, code_version="0.1.0")
        start += rows.num_rows


def write_sweep(place: Path, cases: Mapping[str, Sequence[Row]], **changes: Mapping) -> Path:
    """A sweep's directory with a finished run for each case; `changes` are the sections of a case's spec."""
    for name, rows in cases.items():
        write_run(place / "cases" / name, rows, **changes.get(name, {}))
    (place / "sweep.json").write_text(json.dumps({"cases": [{"name": name, "changes": {}} for name in cases]}))
    return place
