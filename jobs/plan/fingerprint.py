"""The fingerprint that identifies a job: it covers everything that changes results, and nothing else. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftmill.actors.task import Infill
from draftmill.decoders.base import ModelInfo
from draftmill.jobs.config.spec import JobSpec
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.records import SCHEMA_VERSION

SHOWN = 8
"""Number of differing keys that are named; the rest are only counted."""


def results_key(
    spec: JobSpec,
    info: ModelInfo,
    *,
    model: str,
    tokenizer: str,
    head: str | None = None,
    drafter: str | None = None,
    adapter: str | None = None,
    begin: int | None = None,
    ends: Sequence[int] = (),
    fim: dict[str, Any] | None = None,
    run: dict[str, str] | None = None,
    runs: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Everything that results depend on, as JSON data; excludes the paths of the checkpoint and the inputs.

    SHA-256 of the checkpoint (weights, config, own draft head), its tokenizer, an external draft head, the drafter model and
    a LoRA adapter. The ids that begin and end a text, which may come from the checkpoint's generation config. The special
    tokens with which a causal model fills in the middle. The state of the run whose rows are the input; the fingerprints
    of the `runs` that draft. `with_files` adds the
    inputs.
    """
    key = spec.results_key()
    if not isinstance(spec.task, Infill):
        key["task"] |= {"begin": begin, "ends": list(ends)}
    elif fim is not None:
        key["task"] |= {"fim": fim, "ends": list(ends)}
    if drafter is not None:
        key["decoder"]["drafter"] |= {"weights": drafter}
    if runs is not None:
        key["decoder"]["drafter"] |= {"runs": list(runs)}
    if adapter is not None:
        key["model"] |= {"adapter": adapter}
    facts = {"checkpoint": model, "tokenizer": tokenizer, "head": head, "family": info.family, "mask_id": info.mask_id}
    key["model"] |= facts
    key["input"] |= {"files": None} | ({} if run is None else {"run": run})
    return key | {"schema_version": SCHEMA_VERSION}


def with_files(results: dict[str, Any], inputs: Sequence[InputFile]) -> dict[str, Any]:
    """A results key with what identifies the inputs; the digest of it is the job's fingerprint."""
    return results | {"input": results["input"] | {"files": digest([identity(file) for file in inputs])}}


def digest(value: Any) -> str:
    """SHA-256 of a plain value in canonical JSON, 64 hexadecimal digits; that of a results key is the job's fingerprint."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def identity(file: InputFile) -> dict[str, Any]:
    """What identifies a version of an input: name, format, size, and its hash or etag, or else its modification time."""
    known = {
        key: value
        for key, value in file.facts().items()
        if key not in {"uri", "delimiter"} and (key != "sha256" or value is not None)
    }
    if file.sha256 is not None or file.etag is not None:
        del known["mtime_s"]  # a file that was touched or uploaded again still has the same content
    return known


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], specs: tuple[JobSpec, JobSpec] | None = None
) -> list[str]:
    """Describe each dotted key whose value differs, as `decoder.k was 5, is 4`; sorted. `specs` have values that are defaults."""
    old, new = dict(flat(before)), dict(flat(now))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if specs is not None:
        wholes = (dict(flat(spec.model_dump(mode="json"))) for spec in specs)
        old, new = (whole | values for whole, values in zip(wholes, (old, new), strict=True))
    named = {"model.head": "decoder.head, its files,"}  # the key of the spec whose files have that hash
    return [f"{named.get(key, key)} was {format_value(old, key)}, is {format_value(new, key)}" for key in changed]


def changed_files(before: Sequence[InputFile], now: Sequence[InputFile]) -> list[str]:
    """Name each input that is new, missing or changed, as `a.jsonl (changed, 10 -> 12 bytes)`."""
    old, new = {file.name: file for file in before}, {file.name: file for file in now}
    changes = [f"{name} (missing)" for name in old.keys() - new.keys()]
    for name, file in new.items():
        if name not in old:
            changes.append(f"{name} (new)")
        elif identity(file) != identity(old[name]):
            before_size, size = old[name].size, file.size
            sizes = "" if None in {before_size, size} or before_size == size else f", {before_size:,} -> {size:,} bytes"
            changes.append(f"{name} (changed{sizes})")
    return sorted(changes)


def shorten(items: Sequence[str]) -> str:
    """The first SHOWN items, and the number of the others."""
    more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values inside of mappings by their dotted keys."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def format_value(values: Mapping[str, Any], key: str) -> str:
    """A value as JSON, cut if it is long; `not set` if there is none."""
    if key not in values:
        return "not set"
    text = json.dumps(values[key])
    return text if len(text) <= 60 else f"{text[:12]}...{text[-1]}"
