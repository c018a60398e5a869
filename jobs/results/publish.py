"""`draftmill export --to`: publishes a finished run as a dataset whose rows others can decode again (`draftmill prove`).

    README.md                  the dataset card: which model and decoder, how many rows, how to prove them
    draftmill.json             the facts: spec, hashes, sums, devices
    data/part-00000.parquet    the rows, and in the column `input` what the job read of each, as JSON
    _SUCCESS                   in a folder or a bucket, the last object; on the hub all files appear in one commit

A text is a function of weights, settings, its row's input and key, so these are all that a proof needs. The same command resumes
an export that was interrupted, and sends only what the place lacks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import yaml

from draftmill.actors.recipe import RowRecipe
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.unit_io import read_planned
from draftmill.jobs.config.paths import path_problem
from draftmill.jobs.drive.run_log import Sessions, read_sessions
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.resolve import inputs_of
from draftmill.jobs.plan.worker_job import files_here
from draftmill.jobs.results.export import COLUMNS, ERRORS, in_order, inside_problem, parquet_format, write_rows
from draftmill.jobs.results.formats import SUCCESS, PartsSink
from draftmill.jobs.results.passes import Pass, finished_passes, latest_rows, passes_of
from draftmill.jobs.results.summary import sums_of
from draftmill.storage.errors import UserError, brief
from draftmill.storage.inputs.kept import plain
from draftmill.storage.inputs.lines import is_openai_request
from draftmill.storage.inputs.rows import Row
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.records import without_dictionaries
from draftmill.storage.secrets import redacted
from draftmill.storage.stores.hub import HubStore
from draftmill.storage.stores.interface import Place, ReadStore, Store
from draftmill.storage.stores.store import open_store

TO = "--to"
FACTS, CARD, DATA, INPUT = "draftmill.json", "README.md", "data/", "input"
FORMAT = 1
FILE_MB = 128
"""The most MiB of a file unless --file-mb says another number; memory holds one file."""

OURS = re.compile(rf"{DATA}part-\d{{5,}}\.parquet|{CARD}|{FACTS}|{SUCCESS}".replace(".md|", r"\.md|"))
REQUEST: Final = ("custom_id", "method", "url", "body")
SPEC: Final = {"name", "seed", "task", "model", "decoder", "sampling", "prompt", "chat"}
"""What of a spec a row depends on, beside two keys of `input`."""


def publish(
    place: Place,
    to: str,
    *,
    kind: str = "parquet",
    errors: str | None = None,
    columns: Sequence[str] = (),
    overwrite: bool = False,
    order: str = "plan",
    file_mb: int | None = None,
) -> int:
    """Publish the run at `to`; returns the exit code. UserError if its rows could not be proved, or if `to` has other files."""
    for field, given in (("--format", kind != "parquet"), (ERRORS, errors), (COLUMNS, columns)):
        if given:
            raise UserError("does not apply with --to: a dataset has all rows and columns, as Parquet", field=field)
    passes = finished_passes(passes_of(open_store(place)))
    plan = passes[0].plan
    check_provable(plan)
    if problem := inside_problem(to, plan.store.url):
        raise UserError(problem, field=TO)
    target, facts = open_dataset(place.at(to), TO), facts_of(passes)
    earlier = {stat.name for stat in files_of(target)}
    check_earlier(target, earlier, facts, overwrite=overwrite)
    inputs = files_here(plan, inputs_of(plan), place.s3)
    if isinstance(target, HubStore):
        target.create_dataset()
    elif SUCCESS in earlier:
        target.delete(SUCCESS)
    send(target, FACTS, json.dumps(facts, indent=1, ensure_ascii=False).encode())
    schema, metadata = parquet_format(plan, plan.schema.names)
    schema = without_dictionaries(schema).append(pa.field(INPUT, pa.string()))
    sink = PartsSink(
        lambda name, data: send(target, f"{DATA}{name}", data), schema, metadata, (file_mb or FILE_MB) << 20
    )
    tables = in_order(plan, with_inputs(plan, latest_rows(passes), inputs), order)
    (count,) = write_rows(tables, schema.names, [sink])
    send(target, CARD, card(facts, target.url).encode())
    kept = {f"{DATA}part-{number:05d}.parquet" for number in range(sink.count)} | {FACTS, CARD, SUCCESS}
    for name in sorted(earlier - kept):
        target.delete(name)
    if isinstance(target, HubStore):
        target.commit(f"Publish the draftmill run {plan.spec.name}")
    else:
        target.put(SUCCESS, b"")
    print(f"{target.url}: {counted(count, 'sample')} in {counted(sink.count, 'file')}")
    return OK


def open_dataset(place: Place, field: str) -> Store | HubStore:
    """The store of a published dataset; UserError for other places than a folder, hf:// and s3://."""
    reason = ", since draftmill writes to no other buckets" if field == TO else ""
    if problem := path_problem(place.url, ("hf", "s3"), reason):
        raise UserError(problem, field=field)
    return HubStore(place.url) if place.url.startswith("hf://") else open_store(place)


def files_of(store: ReadStore) -> Iterator[Any]:
    """The Stats of a published dataset's files, in the order of names below each of the folder and the root's names."""
    for prefix in (DATA.rstrip("/"), CARD, FACTS, SUCCESS):
        yield from (stat for stat in store.list(prefix) if OURS.fullmatch(stat.name))


def check_provable(plan: Plan) -> None:
    """Raise UserError if a row can't be decoded again from what a dataset has of it."""
    if plan.spec.decoder.drafting_runs:
        reason = "the drafts are other runs' texts, which a dataset does not have, so that no row could be proved"
        raise UserError(f"{reason}; --format parquet --file-mb N --out FOLDER exports it", field="decoder.drafter")


def check_earlier(target: Store | HubStore, earlier: set[str], facts: dict[str, Any], *, overwrite: bool) -> None:
    """Raise UserError if the place has files of another run, or of no run."""
    if not earlier or overwrite:
        return
    known = read_facts(target) if FACTS in earlier else {}
    if known.get("fingerprint") != facts["fingerprint"]:
        raise UserError(f"{target.url!r} has {min(earlier)} of another export; --overwrite replaces it", field=TO)


def read_facts(store: ReadStore) -> dict[str, Any]:
    """The facts of a published dataset; UserError if it has none, or damaged ones."""
    try:
        (stat,) = (stat for stat in store.list(FACTS) if stat.name == FACTS)
        facts = parse_json(store.get_range(FACTS, 0, stat.size))
        return dict(facts)
    except (ValueError, TypeError) as error:
        raise UserError(f"{store.url} has no readable {FACTS}, as `draftmill export --to` writes it: {error}") from None


def send(target: Store | HubStore, name: str, data: bytes) -> None:
    """Write a file, unless the place has the same one."""
    if isinstance(target, HubStore):  # the hub compares hashes itself
        target.put(name, data)
        return
    sha256, there = hashlib.sha256(data).hexdigest(), target.stat(name)
    if there is not None and there.size == len(data):
        if there.metadata.get("sha256") == sha256 or target.get(name) == data:
            return
    if there is not None:
        target.delete(name)
    target.create(name, data, metadata={"sha256": sha256})


def with_inputs(plan: Plan, tables: Iterator[pa.Table], inputs: Sequence[Any]) -> Iterator[pa.Table]:
    """The tables, one for each unit, with the column INPUT."""
    recipe = plan.spec.recipe()
    for unit, table in enumerate(tables):
        rows = read_planned(plan.unit_rows(unit), inputs, read_columns(recipe), recipe.chunk_chars)
        texts = [input_text(recipe, row, status) for row, status in zip(rows, table["status"].to_pylist(), strict=True)]
        yield table.append_column(INPUT, pa.array(texts, pa.string()))


def input_text(recipe: RowRecipe, row: Row, status: str) -> str | None:
    """What the job read of a row, as JSON; None if it could not be read. UserError for a value that JSON would change."""
    if row.values is None:
        return None
    asked = set(recipe.columns.to_read(recipe.task).values())
    names = [*asked, *read_columns(recipe).values(), *(REQUEST if is_openai_request(row.values) else ())]
    values = {name: row.values[name] for name in sorted(set(names)) if name in row.values}
    text = {name: plain(value) for name, value in values.items()}
    # A template sees its columns in this form, and bytes are read as text.
    for name in asked & values.keys() if status == "ok" else ():
        if not isinstance(values[name], bytes) and text[name] != values[name]:
            reason = f"JSON would change {brief(repr(values[name]))}, so that the row could not be proved"
            raise UserError(f"column {name!r}: {reason}; --file-mb exports it", field=TO)
    return json.dumps(text, ensure_ascii=False)


def facts_of(passes: Sequence[Pass]) -> dict[str, Any]:
    """What is in FACTS: all that a proof needs beside the rows, and what the card says."""
    plan, sums = passes[0].plan, sums_of(passes)
    logged = sum((read_sessions(part.store) for part in passes), Sessions())
    spec = plan.spec.model_dump(mode="json", include=SPEC)
    spec["input"] = plan.spec.input.model_dump(mode="json", include={"columns", "truncate"})
    return {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "code_version": plan.code_version,
        "exact": all_exact(part.manifest.exact for part in passes if part.manifest is not None),
        "devices": sorted(logged.started_on),
        "samples": {"ok": sums.ok, "failed": sums.failed},
        "errors": sums.errors,
        "tokens": sums.new_tokens,
        "nfe": sums.nfe,
        "results": plan.results,
        "spec": spec,
    }


def card(facts: dict[str, Any], url: str) -> str:
    """The dataset card: its head is what the hub reads."""
    head = {
        "configs": [{"config_name": "default", "data_files": f"{DATA}*.parquet"}],
        "tags": ["draftmill", "synthetic"],
    }
    results, spec = facts["results"], facts["spec"]
    shown = {key: facts[key] for key in ("samples", "errors", "tokens", "nfe", "exact", "devices")}
    shown["model"] = {"path": spec["model"]["path"], **results["model"]}
    shown |= {key: results[key] for key in ("task", "decoder", "sampling", "seed") if key in results}
    shown |= {key: facts[key] for key in ("fingerprint", "code_version")}
    body = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).replace("\n", "\n    ").rstrip()
    return redacted(f"""---
{yaml.safe_dump(head, sort_keys=False)}---
# {spec["name"]}

{counted(sum(facts["samples"].values()), "row")} that draftmill {facts["code_version"]} decoded. Of the model, `checkpoint` is the SHA-256 of its
weights; {FACTS} has the whole spec.

    {body}

## Prove it

    draftmill prove {url} --rows 20

decodes 20 of these rows again, from their column `{INPUT}`, and compares them with the ones here.
""")
