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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa
import yaml

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.unit_io import read_planned
from draftmill.jobs.config.paths import path_problem
from draftmill.jobs.config.sweep_spec import RECORD
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.resolve import inputs_of
from draftmill.jobs.results.export import COLUMNS, ERRORS, STDOUT, in_order, inside_problem, parquet_format, write_rows
from draftmill.jobs.results.formats import SUCCESS, PartsSink
from draftmill.jobs.results.passes import Pass, finished_passes, latest_rows, passes_of
from draftmill.jobs.results.summary import sums_of
from draftmill.storage.errors import UserError, brief
from draftmill.storage.inputs.kept import plain
from draftmill.storage.inputs.lines import is_openai_request
from draftmill.storage.inputs.rows import InputFile, Row
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.records import without_dictionaries
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.secrets import redacted
from draftmill.storage.stores.fsspec_store import DRIVERS, FsspecStore, HubStore
from draftmill.storage.stores.store import Place, Store, open_store

Dataset: TypeAlias = Store | FsspecStore

TO = "--to"
FACTS, CARD, DATA, INPUT = "draftmill.json", "README.md", "data/", "input"
FORMAT, MIB = 1, 2**20
OURS = re.compile(rf"{DATA}part-\d{{5,}}\.parquet|README\.md|draftmill\.json|{SUCCESS}")

SPEC: Final = ("name", "seed", "task", "model", "decoder", "sampling", "prompt", "chat")
"""What a row depends on, beside two keys of `input`."""

NEEDED: Final = {"fingerprint", "code_version", "exact", "devices"}
"""The other facts that a proof needs."""

REQUEST: Final = ("custom_id", "method", "url", "body")
HEAD: Final = {"configs": [{"config_name": "default", "data_files": f"{DATA}*.parquet"}], "tags": ["draftmill"]}
"""What the hub reads of the card."""


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
    if plan.spec.decoder.drafting_runs:
        reason = "other runs draft, and a dataset does not have their texts, so no row could be proved; use --out"
        raise UserError(reason, field="decoder.drafter")
    if problem := inside_problem(to, plan.store.url):
        raise UserError(problem, field=TO)
    target, facts = open_dataset(place.at(to), TO), facts_of(passes)
    earlier = earlier_files(target, to)
    known = read_facts(target) if FACTS in earlier and not overwrite else {}
    if earlier and not overwrite and known.get("fingerprint") != facts["fingerprint"]:
        raise UserError(f"{to!r} has {min(earlier)} of another export; --overwrite replaces it", field=TO)
    tables = with_inputs(plan, latest_rows(passes), inputs_of(plan))
    if SUCCESS in earlier:
        target.delete(SUCCESS)
    send(target, FACTS, json.dumps(facts, indent=1, ensure_ascii=False).encode())
    schema, metadata = parquet_format(plan, plan.schema.names)
    schema = without_dictionaries(schema).append(pa.field(INPUT, pa.string()))
    file_bytes = (file_mb or 128) * MIB  # memory holds one file
    sink = PartsSink(lambda name, data: send(target, f"{DATA}{name}", data), schema, metadata, file_bytes)
    try:
        (count,) = write_rows(in_order(plan, tables, order), schema.names, [sink])
    except UserError:  # the same command would be refused again
        for name in {FACTS, *(f"{DATA}{name}" for name in sink.names)} - earlier:
            target.delete(name)
        raise
    if overwrite or CARD not in earlier:  # people edit cards
        send(target, CARD, card(facts, target.url).encode())
    for name in earlier - {FACTS, CARD, SUCCESS, *(f"{DATA}{name}" for name in sink.names)}:
        target.delete(name)
    if isinstance(target, HubStore):
        target.commit(f"Publish the draftmill run {plan.spec.name}")
    else:
        target.put(SUCCESS, b"")
    print(f"{target.url}: {counted(count, 'sample')} in {counted(len(sink.names), 'file')}")
    return OK


def earlier_files(target: Dataset, to: str) -> set[str]:
    """The files of an earlier export; UserError where the place is a run's, or has data that is not ours."""
    if any(stat.name in {PLAN, RECORD} for prefix in (PLAN, RECORD) for stat in target.list(prefix)):
        raise UserError(f"{to!r} is a run or a sweep, which may hold only its own files", field=TO)
    found = {stat.name for prefix in (DATA.rstrip("/"), CARD, FACTS, SUCCESS) for stat in target.list(prefix)}
    earlier = set(filter(OURS.fullmatch, found))
    if others := sorted(name for name in found - earlier if name.startswith(DATA) and name.endswith(".parquet")):
        raise UserError(f"{to!r} has {others[0]}, which a reader would take for a part of the dataset", field=TO)
    return earlier


def open_dataset(place: Place, field: str) -> Dataset:
    """The store of a dataset; UserError, led by `field`, for other places than a folder, the hub, and a bucket."""
    problem = path_problem(place.url, ("hf", "s3", *DRIVERS))
    if problem or place.url in {"", STDOUT}:
        raise UserError(problem or f"{place.url!r} is not a path", field=field)
    match place.url.partition("://")[0]:
        case "hf":
            return HubStore(place.url)
        case scheme if scheme in DRIVERS:
            return FsspecStore(place.url)
    return open_store(place)


def read_facts(store: Dataset) -> dict[str, Any]:
    """The facts of a dataset; UserError if it has none that this version can read."""
    stat = next((stat for stat in store.list(FACTS) if stat.name == FACTS), None)
    if stat is None:
        is_empty, no_run = (next(iter(store.list(name)), None) is None for name in ("", PLAN))
        hint = "nothing is there" if is_empty else "other files are" if no_run else "it is a run, not published yet"
        raise UserError(f"{store.url} has no {FACTS} of `draftmill export --to`: {hint}")
    try:
        facts: dict[str, Any] = parse_json(store.get_range(FACTS, 0, stat.size))
        if facts["format"] != FORMAT:
            raise UserError(f"{store.url}: {FACTS} has format {facts['format']}; this draftmill reads {FORMAT}")
        spec = facts["spec"]
        _ = spec["task"]["kind"], spec["input"]["columns"]["id"], facts["results"]["schema_version"]
        _ = [facts[name] for name in sorted(NEEDED)], [spec[name] for name in SPEC]
    except UserError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else "is damaged"
        raise UserError(f"{store.url}: {FACTS} {what}") from None
    if digest(facts["results"]) != facts["fingerprint"]:
        raise UserError(f"{store.url}: {FACTS} was changed: the hash of its results is not its fingerprint")
    return facts


def send(target: Dataset, name: str, data: bytes) -> None:
    """Write a file, unless the place has the same one."""
    if isinstance(target, FsspecStore):  # which looks itself
        target.put(name, data)
        return
    sha256, there = hashlib.sha256(data).hexdigest(), target.stat(name)
    if there is not None:
        if there.metadata.get("sha256") == sha256 or (there.size == len(data) and target.get(name) == data):
            return
        target.delete(name)
    target.create(name, data, metadata={"sha256": sha256})


def with_inputs(plan: Plan, tables: Iterable[pa.Table], inputs: Sequence[InputFile]) -> Iterator[pa.Table]:
    """The tables, one for each unit, with the column INPUT."""
    recipe = plan.spec.recipe()
    for unit, table in enumerate(tables):
        rows = read_planned(plan.unit_rows(unit), inputs, read_columns(recipe), recipe.chunk_chars)
        texts = [input_text(recipe, row, status) for row, status in zip(rows, table["status"].to_pylist(), strict=True)]
        yield table.append_column(INPUT, pa.array(texts, pa.string()))


def input_text(recipe: RowRecipe, row: Row, status: str) -> str | None:
    """What the job read of a row, as JSON; None if it could not be read. UserError if JSON would change an ok row's value."""
    if row.values is None:
        return None
    names = {*read_columns(recipe).values(), *(REQUEST if is_openai_request(row.values) else ())}
    text = {name: plain(row.values[name]) for name in sorted(names & row.values.keys())}
    by_template = text.keys() - recipe.columns.to_read(recipe.task).values()  # it sees this form of its columns
    for name in text.keys() - by_template if status == "ok" else ():
        if text[name] != (value := row.values[name]) and not isinstance(value, bytes):  # which are read as text
            reason = f"JSON would change {brief(repr(value))}, so the row could not be proved; use --out"
            raise UserError(f"column {name!r}: {reason}", field=TO)
    return json.dumps(text, ensure_ascii=False)


def facts_of(passes: Sequence[Pass]) -> dict[str, Any]:
    """All that a proof needs beside the rows, and what the card says."""
    plan, sums = passes[0].plan, sums_of(passes)
    return {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "code_version": plan.code_version,
        "rows": {"ok": sums.ok, "failed": sums.failed, "skipped": sums.skipped, "errors": sums.errors},
        "tokens": sums.new_tokens,
        "nfe": sums.nfe,
        "exact": all_exact(part.manifest.exact for part in passes if part.manifest is not None),
        "devices": sorted({device for part in passes for device in read_sessions(part.store).started_on}),
        "results": plan.results,
        "spec": plan.spec.model_dump(
            mode="json", include=dict.fromkeys(SPEC, True) | {"input": {"columns", "truncate"}}
        ),
    }


def card(facts: Mapping[str, Any], url: str) -> str:
    """The dataset card."""
    results, name, model = facts["results"], facts["spec"]["name"], facts["spec"]["model"]["path"]
    shown = {key: value for key, value in facts.items() if key not in {"format", "results", "spec"}}
    shown |= {"model": {"path": model, **results["model"]}}
    shown |= {key: results[key] for key in ("task", "decoder", "sampling", "seed") if key in results}
    lines = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).splitlines()
    return redacted(
        f"---\n{yaml.safe_dump(HEAD)}---\n# {name}\n\n"
        f"draftmill decoded these rows. {FACTS} has the whole spec; `checkpoint` is the SHA-256 of the model's files.\n\n"
        + "".join(f"    {line}\n" for line in lines)
        + f"\n## Prove it\n\n    draftmill prove {url} --rows 20\n\n"
        f"decodes 20 of these rows again, from their column `{INPUT}`, and compares them.\n"
    )
