"""`draftmill prove`: decodes a few rows of a published dataset again, on this machine, and compares them with the dataset's.

A run of the same spec over the inputs of these rows must give the same rows, if the weights are the same: a row depends on
nothing else. Where the last bits of a sum may differ (`exact: false`, another device) another token proves nothing.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.actors.rows.row import row_id
from draftmill.jobs.config.spec import JobSpec, check_overridden
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.run_log import Sessions, read_sessions
from draftmill.jobs.exit_codes import OK, UNEXPECTED, UNUSABLE
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import differences, digest, shorten
from draftmill.jobs.plan.resolve import Resolved
from draftmill.jobs.results.passes import latest_rows
from draftmill.jobs.results.publish import DATA, FACTS, FORMAT, INPUT, files_of, open_dataset, read_facts
from draftmill.jobs.run.job import decode_here
from draftmill.storage.errors import RowError, UserError, printable
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.records import SCHEMA, SCHEMA_VERSION, TIMING_COLUMNS
from draftmill.storage.stores.block_cache import RangeFile
from draftmill.storage.stores.interface import Place, ReadStore, Stat

BIT, TOKENS, DIFFERENT, UNKNOWN = "equal to the bit", "equal tokens", "different", "cannot tell"

COSTS: Final = frozenset(
    "nfe nfe_draft nfe_kinds iterations proposed accepted accept_hist reused lengths_tried".split()
)
"""What drafts cost: the clock, or other rows, may decide what is drafted."""
SUMS: Final = {"logprob", "token_logprobs", "top_logprobs", "length_logprob", "logprob_stderr", "is_greedy", "metrics"}
"""What is computed from sums of floats."""
COMPARED: Final = [
    name for name in SCHEMA.names if name not in TIMING_COLUMNS and name not in {"unit", "pass", "model", "drafter"}
]
"""Columns that are a function of the row: not its times, its unit, and the paths of the weights."""


class _OtherFacts(Exception):
    """What decides results differs here from the dataset's facts."""


def prove(place: Place, rows: int, *, overrides: Sequence[str] = ()) -> int:
    """Prove `rows` rows of the dataset, or of one of its files, evenly spread, and print a line for each.

    Returns 1 if one is different, 2 if nothing can be told of any, else 0. UserError if there is no such dataset, or if its model
    can't be used here.
    """
    store, files = open_source(place)
    facts = read_facts(store)
    chosen = pick(store, files, rows)
    decoded = [row for row in chosen if row["status"] == "ok" and row[INPUT] is not None]
    again, doubt = decode_again(facts, decoded, place, overrides) if decoded else ({}, None)
    print(f"{place.url}: run {facts['fingerprint'][:12]} by draftmill {facts['code_version']}")
    counts = Counter[str]()
    for row in chosen:
        verdict, why = judge(
            row, again.get((row["id"], row["sample"])), doubt, scores=facts["spec"]["task"]["kind"] == "score"
        )
        counts[verdict] += 1
        sample = f", sample {row['sample']}" if row["sample"] else ""
        print(f"  {printable(row['id'])}{sample}: {verdict}{why and f': {printable(why)}'}")
    print(
        f"{counted(len(chosen), 'row')}: "
        + ", ".join(f"{counts[one]} {one}" for one in (BIT, TOKENS, DIFFERENT, UNKNOWN))
    )
    return UNEXPECTED if counts[DIFFERENT] else OK if counts[BIT] or counts[TOKENS] else UNUSABLE


def open_source(place: Place) -> tuple[ReadStore, list[Stat]]:
    """The store of a dataset, and the files to prove: all of them, or the one that the place names."""
    folder, _, name = place.url.rstrip("/").rpartition("/")
    if not name.endswith(".parquet"):
        store = open_dataset(place, "SOURCE")
        return store, [stat for stat in files_of(store) if stat.name.startswith(DATA)]
    root, _, last = folder.rpartition("/")
    if f"{last}/" == DATA:
        name, folder = f"{DATA}{name}", root
    store = open_dataset(place.at(folder or "."), "SOURCE")
    return store, [stat for stat in store.list(name) if stat.name == name]


def pick(store: ReadStore, files: Sequence[Stat], rows: int) -> list[dict[str, Any]]:
    """So many rows, evenly spread over the files; UserError if a file is damaged, or no file of a dataset."""
    opened = []
    for stat in files:
        try:
            file = pq.ParquetFile(io.BufferedReader(RangeFile(store, stat.name, stat.etag, stat.size)))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{store.url}/{stat.name} can't be read: {error}") from None
        if missing := [name for name in (*COMPARED, INPUT) if name not in file.schema_arrow.names]:
            raise UserError(f"{store.url}/{stat.name} lacks the columns {', '.join(missing)}")
        opened += [(file, group, file.metadata.row_group(group).num_rows) for group in range(file.num_row_groups)]
    total, first = sum(count for _, _, count in opened), 0
    wanted = sorted({(2 * number + 1) * total // (2 * rows) for number in range(rows)}) if total else []
    chosen = []
    for file, group, count in opened:
        inside = [number - first for number in wanted if first <= number < first + count]
        first += count
        if inside:
            chosen += file.read_row_group(group, columns=[*COMPARED, INPUT]).take(inside).to_pylist()
    if not chosen:
        raise UserError(f"{store.url} has no rows")
    return chosen


def decode_again(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], place: Place, overrides: Sequence[str]
) -> tuple[dict[tuple[str, int], dict[str, Any]], str | None]:
    """The rows as they are decoded here, by id and sample, and why another result would prove nothing, if so."""
    if facts.get("format") != FORMAT or facts["results"].get("schema_version") != SCHEMA_VERSION:
        return {}, f"draftmill {facts['code_version']} wrote it in a form that this version does not read"
    if digest(facts["results"]) != facts["fingerprint"]:
        raise UserError(f"{place.url}: {FACTS} was changed: its fingerprint is not that of its results")
    with TemporaryDirectory(prefix="draftmill-") as folder:
        job = job_of(facts, rows, Path(folder), place, overrides)
        try:
            passes = decode_here(job, LocalBackend(), check=lambda resolved: check_same(facts, resolved))
        except _OtherFacts as other:
            return {}, str(other)
        again = {(row["id"], row["sample"]): row for table in latest_rows(passes) for row in table.to_pylist()}
        here = sum((read_sessions(part.store) for part in passes), Sessions()).started_on
        exact = all_exact([facts["exact"], *(part.manifest.exact for part in passes if part.manifest is not None)])
    if not exact:
        return again, "exact: false, so that the batch may change last bits"
    if set(facts["devices"]) != set(here):
        return again, f"decoded on {' and '.join(facts['devices']) or 'unknown devices'}, here on {' and '.join(here)}"
    return again, None


def job_of(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path, place: Place, overrides: Sequence[str]
) -> JobSpec:
    """The dataset's job over the inputs of these rows, in a folder of its own, without others' code."""
    spec = dict(facts["spec"])
    spec["input"] = {**spec["input"], "path": str(folder / "rows.jsonl")}
    spec |= {"output": {"path": str(folder / "run")}, "model": {**spec["model"], "trust_remote_code": False}}
    job = check_overridden(spec, overrides).with_s3(place.s3)
    lines = {}
    for row in rows:
        values = json.loads(row[INPUT])
        try:
            own_id = row_id(values, job.input.columns)
        except RowError:
            own_id = None
        lines[row["id"]] = values if own_id == row["id"] else {**values, job.input.columns.id or "id": row["id"]}
    (folder / "rows.jsonl").write_text("".join(json.dumps(values) + "\n" for values in lines.values()))
    return job


def check_same(facts: Mapping[str, Any], resolved: Resolved) -> None:
    """Raise _OtherFacts, naming the differences, if what decides a row is not the same here; inputs have other files."""
    there, here = ({**results, "input": None} for results in (facts["results"], resolved.results))
    if changed := differences(there, here):
        raise _OtherFacts(shorten(changed))


def judge(
    row: Mapping[str, Any], again: Mapping[str, Any] | None, doubt: str | None, *, scores: bool = False
) -> tuple[str, str]:
    """The verdict on a row of the dataset, and what it rests on. `doubt` says why another result would prove nothing."""
    if row["status"] != "ok":
        return UNKNOWN, f"the row is {row['status']} ({row['error_kind']})"
    if again is None:
        return UNKNOWN, doubt or "it has no input"
    if again["status"] != "ok":
        return UNKNOWN, f"failed here: {again['error']}"
    differing = {name for name in COMPARED if repr(row[name]) != repr(again[name])}
    names = f"{', '.join(sorted(differing))}"
    if not differing:
        return BIT, ""
    if differing <= COSTS:
        return TOKENS, f"other {names}"
    if doubt is None:
        return DIFFERENT, f"{names}{_first_token(row['tokens'], again['tokens'])}"
    if scores or "tokens" in differing:
        return UNKNOWN, f"other {names}; {doubt}"
    return (TOKENS if differing <= COSTS | SUMS else DIFFERENT), f"other {names}"


def _first_token(there: Sequence[int], here: Sequence[int]) -> str:
    """Where the tokens first differ, in words."""
    if there == here:
        return ""
    place = next(
        (n for n, pair in enumerate(zip(there, here, strict=False)) if pair[0] != pair[1]), min(len(there), len(here))
    )
    return f"; token {place} on: {there[place:][:1]}, here {here[place:][:1]}"
