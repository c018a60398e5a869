"""Finished runs whose texts a test chooses: planned like any job, with unit files that no model decoded."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.packing import PlanWriter, discard_parts
from draftmill.jobs.plan.plan import Plan, create_plan
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.runs.commit import commit_unit, write_manifest
from draftmill.storage.runs.records import schema_of, table_from_rows
from draftmill.storage.stores.store import Store, open_store
from tests.storage.inputs.tables import result_row

Row = dict
Written = Sequence[dict]


def spec_for(folder: Path, rows: Sequence[Row], **sections) -> JobSpec:
    """A job over these rows; `sections` replace whole sections of its spec."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "name": "written",
        "task": {"kind": "complete", "max_new_tokens": 8},
        "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt"}},
        "model": {"path": "builtin:ar-micro", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run"), "unit_rows": 2},
    } | sections
    return check_spec(data)


def write_run(spec: JobSpec, texts: Callable[[str], Written]) -> Store:
    """Plan the job and write its units: `texts` gives the result rows of an input row (by id) as their differing columns."""
    store = open_store(spec.place(spec.output.path))
    write_units(make_plan(resolve(spec, store), store, Display()), texts)
    return store


def write_units(plan: Plan, texts: Callable[[str], Written]) -> None:
    kept = None if plan.keep is None else plan.keep.names
    rows_of = {row["id"]: row for row in map(json.loads, Path(plan.files[0].uri).read_text().splitlines())}
    committed = []
    has_samples = getattr(plan.spec.sampling, "n", 1) > 1
    for unit, planned in enumerate(plan.tables()):
        rows = [
            result_row(0, unit=unit, metrics=None)
            | {"id": row["id"], "pass": plan.pass_, "sample": row["sample"]}
            | ({} if kept is None else {KEEP: {name: rows_of[row["id"]].get(name) for name in kept}})
            | changes
            for row in planned.to_pylist()
            for changes in ([texts(row["id"])[row["sample"]]] if has_samples else texts(row["id"]))
        ]
        table = table_from_rows(rows, schema=schema_of(plan.keep))
        committed.append(
            commit_unit(
                plan.store, unit=unit, table=table, fingerprint=plan.fingerprint, code_version="1", pass_=plan.pass_
            )
        )
    total = sum(one.rows for one in committed)
    write_manifest(plan.store, committed, fingerprint=plan.fingerprint, units=plan.units, rows=total)


def failed() -> dict:
    return {
        "status": "failed",
        "error_kind": "decode_error",
        "error_stage": "decode",
        "error": "x",
        "text": None,
        "tokens": None,
    }


def second_pass(store: Store, plan: Plan, ids: Sequence[str]) -> Plan:
    """A plan of another pass over some rows, in the plan's order, as `draftmill rerun` makes it."""
    place = open_store(f"{store.url}/passes/0002")
    writer = PlanWriter(place, window=100, unit_rows=2, keep_order=True, epoch=1)
    discard_parts(place, 1)
    for table in plan.tables():
        rows = table.select([name for name in table.column_names if name != "unit"])
        writer.add(rows.filter(pa.compute.is_in(rows["id"], value_set=pa.array(ids))))
    writer.finish()
    return create_plan(place, plan.spec, plan.results, plan.files, writer.totals, writer.parts, pass_=2, keep=plan.keep)
