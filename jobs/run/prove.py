"""`draftmill prove`: decodes a few rows of a published dataset again, on this machine, and compares them with the dataset's.

A run of the same spec over the inputs of these rows gives the same rows, if the weights are the same: a row depends on nothing
else. Where last bits may differ (`exact: false`, another device) another token proves nothing.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.config.yaml_file import read_overrides
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.exit_codes import OK, UNEXPECTED, UNUSABLE
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import differences, shorten
from draftmill.jobs.plan.resolve import Resolved
from draftmill.jobs.results.passes import latest_rows
from draftmill.jobs.results.publish import DATA, FACTS, INPUT, OURS, SPEC, Dataset, facts_of, open_dataset, read_facts
from draftmill.jobs.run.job import decode_here
from draftmill.storage.errors import UserError, printable
from draftmill.storage.runs.records import SCHEMA, SCHEMA_VERSION, TIMING_COLUMNS
from draftmill.storage.stores.block_cache import RangeFile
from draftmill.storage.stores.store import Place, Stat

BIT, TOKENS, DIFFERENT, UNKNOWN = "equal to the bit", "equal tokens", "different", "cannot tell"

OTHER: Final = {*TIMING_COLUMNS, "unit", "pass", "model", "drafter"}
COMPARED: Final = [name for name in SCHEMA.names if name not in OTHER]
"""Columns that are a function of the row: not its times, its unit, and the paths of the weights."""

COSTS: Final = {"nfe", "nfe_draft", "nfe_kinds", "iterations", "proposed", "accepted", "accept_hist", "reused"}
"""The clock, or other rows, may decide what is drafted."""

FLOATS: Final = {"logprob", "token_logprobs", "top_logprobs", "length_logprob", "logprob_stderr"}


def prove(place: Place, rows: int, *, overrides: Sequence[str] = ()) -> int:
    """Prove `rows` rows of the dataset, or of one of its files, evenly spread, and print a line for each.

    Returns 1 if one is different, 2 if nothing can be told of any, else 0. UserError if there is no such dataset.
    """
    store, files = open_source(place)
    facts = read_facts(store)
    chosen, total = pick(store, files, rows)
    planned = sum(facts["rows"].get(name, 0) for name in ("ok", "failed", "skipped"))
    is_whole = len(files) != 1 or not place.url.rstrip("/").endswith(files[0].name)
    decoded = [row for row in chosen if row["status"] == "ok"]
    again, doubt = decode_again(facts, decoded, place, overrides) if decoded else ({}, None)
    print(f"{place.url}: run {facts['fingerprint'][:12]}, draftmill {facts['code_version']}")
    counts = Counter(dict.fromkeys((BIT, TOKENS, DIFFERENT, UNKNOWN), 0))
    for row in chosen:
        same_row = again.get((row["id"], row["sample"]))
        verdict, why = judge(row, same_row, doubt, scores=facts["spec"]["task"]["kind"] == "score")
        counts[verdict] += 1
        sample = f", sample {row['sample']}" if row["sample"] else ""
        name = row["id"] if row["id"].isprintable() else repr(row["id"])  # so that it stays in its line
        print(printable(f"  {name}{sample}: {verdict}{why and f': {why}'}"))
    print(f"{counted(len(chosen), 'row')}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    if is_whole and total != planned:
        print(f"BROKEN: the files have {counted(total, 'row')}, and {FACTS} says {planned:,}")
        return UNEXPECTED
    return UNEXPECTED if counts[DIFFERENT] else OK if counts[BIT] or counts[TOKENS] else UNUSABLE


def open_source(place: Place) -> tuple[Dataset, list[Stat]]:
    """The store of a dataset, and the files to prove: all of them, or the one that the place names."""
    match = re.fullmatch(rf"(?s)(.*?)/*((?:{DATA})?[^/]+\.parquet)?", place.url.rstrip("/"))
    assert match is not None, "any text matches"
    store = open_dataset(place.at(match[1] or (place.url and ".")), "SOURCE")
    found = store.list(match[2] or DATA.rstrip("/"))
    return store, [stat for stat in found if (stat.name == match[2] if match[2] else OURS.fullmatch(stat.name))]


def pick(store: Dataset, files: Sequence[Stat], rows: int) -> tuple[list[dict[str, Any]], int]:
    """So many rows, evenly spread over the files, and how many there are; UserError if a file is not of a dataset."""
    chosen, first, columns = [], 0, [*COMPARED, INPUT]
    try:
        opened = [
            pq.ParquetFile(io.BufferedReader(RangeFile(store, stat.name, stat.etag, stat.size))) for stat in files
        ]
        total = sum(file.metadata.num_rows for file in opened)
        rows = min(rows, total)
        wanted = sorted({(2 * number + 1) * total // (2 * rows) for number in range(rows)})
        for file, group in ((each, group) for each in opened for group in range(each.num_row_groups)):
            count = file.metadata.row_group(group).num_rows
            if inside := [number - first for number in wanted if first <= number < first + count]:
                chosen += file.read_row_group(group, columns).select(columns).take(inside).to_pylist()
            first += count
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{store.url}: not the files of `draftmill export --to`: {error}") from None
    if not chosen:
        what = "rows" if files else f"files in {DATA}, or not the one that was named"
        raise UserError(f"{store.url} has no {what}")
    return chosen, total


def decode_again(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], place: Place, overrides: Sequence[str]
) -> tuple[dict[tuple[str, int], dict[str, Any]], str | None]:
    """The rows as they are decoded here, by id and sample; and why another result would prove nothing, if so."""
    there = facts["results"]

    def check(resolved: Resolved) -> None:
        if changed := differences({**there, "input": None}, {**resolved.results, "input": None}):
            raise UserError(shorten(changed))

    if there["schema_version"] != SCHEMA_VERSION:
        return {}, f"draftmill {facts['code_version']} has results of another schema"
    with TemporaryDirectory(prefix="draftmill-") as folder:
        job = job_of(facts, rows, Path(folder), place, overrides)
        if (n := job.sampling.n) > 1:
            inputs = counted(len({row["id"] for row in rows}), "input row")
            Display().note(f"to prove {counted(len(rows), 'row')}, all {n} samples of {inputs} are decoded")
        try:
            passes = decode_here(job, LocalBackend(), check=check)
        except UserError as error:
            return {}, str(error)
        again = {(row["id"], row["sample"]): row for table in latest_rows(passes) for row in table.to_pylist()}
        here = facts_of(passes)
    if not (facts["exact"] and here["exact"]):
        return again, "exact: false, so last bits may differ"
    if facts["devices"] != here["devices"]:
        return again, f"it was decoded on {facts['devices']}, here on {here['devices']}"
    return again, None


def job_of(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path, place: Place, overrides: Sequence[str]
) -> JobSpec:
    """The dataset's job over the inputs of these rows, in a folder of its own. Runs no code of the dataset, and uses no other
    keys: they may name commands, or send requests elsewhere."""
    spec, lines = facts["spec"], {}
    name = spec["input"]["columns"]["id"] or "id"
    for row in rows:
        try:
            values = dict(json.loads(row[INPUT]))
        except (ValueError, TypeError):
            values = {}  # the row fails here
        lines[row["id"]] = values if str(values.get(name)) == row["id"] else {**values, name: row["id"]}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(values)}\n" for values in lines.values()))
    made = {key: spec[key] for key in SPEC} | {"output": {"path": str(folder / "run")}}
    made["input"] = {**spec["input"], "path": str(folder / "rows.jsonl")}
    made["model"] = {**spec["model"], "trust_remote_code": False}
    return check_spec(made, read_overrides(overrides)).with_s3(place.s3)


def judge(
    row: Mapping[str, Any], again: Mapping[str, Any] | None, doubt: str | None, *, scores: bool = False
) -> tuple[str, str]:
    """The verdict on a row of the dataset, and its reason. `doubt` says why another result would prove nothing."""
    if row["status"] != "ok":
        return UNKNOWN, f"the row is {row['status']} ({row['error_kind']})"
    if again is None or again["status"] != "ok":
        return UNKNOWN, (doubt or "") if again is None else f"failed here: {again['error']}"
    differing = {name for name in COMPARED if repr(row[name]) != repr(again[name])}
    why = f"other {', '.join(sorted(differing))}" if differing else ""
    if differing <= COSTS:
        return TOKENS if differing else BIT, why
    if doubt is not None and (scores or "tokens" in differing):
        return UNKNOWN, f"{why}; {doubt}"
    return TOKENS if doubt is not None and differing <= COSTS | FLOATS else DIFFERENT, why
