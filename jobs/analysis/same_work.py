"""Whether two runs decoded the same samples: equal inputs, task and canvases. Only such runs are compared.

A different model, decoder, sampling or seed is what one compares. But the seed also places the masks of some tasks, and a
tokenizer decides what a mask of tokens hides; for those tasks they must be equal, too.
"""

from __future__ import annotations

import json
from typing import Any

from draftmill.actors.task import Infill, Lines, Random, Sentences, SpanFraction, Spans
from draftmill.jobs.plan.fingerprint import changed_files, shortened
from draftmill.jobs.plan.plan import Plan
from draftmill.storage.errors import UserError

FREE_INPUT = ("path", "limit", "keep", "columns", "since", "dedupe")
"""Keys of `input` that don't change what a sample's canvas is. Paths count by content; `columns` has rules of its own."""

FREE_COLUMNS = ("reference", "temperature", "top_p")
"""Columns that don't change a sample's canvas; neither does `seed`, unless it places the mask."""

FREE_TASK = ("fim", "estimate")
"""How a causal model is asked to fill a hole, and how closely a score is estimated: how the work is done, not what it is."""

OF_SOME = ("task.max_new_tokens", "seed", "input.columns.seed", "model.tokenizer")
"""Keys that matter to some models or masks, and are compared only where they matter to both runs."""

FILES = "input.files"


def check_same_work(name: str, plan: Plan, other_name: str, other: Plan) -> None:
    """Raise UserError, naming the keys that differ, unless both runs decoded the same samples (or parts of the same)."""
    before, now = _flat(decoded_by(plan)), _flat(decoded_by(other))
    for key in OF_SOME:
        if (key in before) != (key in now):
            before.pop(key, None)
            now.pop(key, None)
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if not keys:
        return
    told = [_difference(key, name, before, other_name, now) for key in keys if key != FILES]
    if FILES in keys:
        told.append(f"{FILES}: {shortened(changed_files(plan.files, other.files) or ['other contents'])}")
    raise UserError(
        f"{other_name} did not decode the same as {name}: {shortened(told)}; "
        "only runs of the same inputs, task and canvases can be compared",
        field=keys[0],
    )


def decoded_by(plan: Plan) -> dict[str, Any]:
    """What a run decoded, as JSON data with the keys of the spec."""
    spec, results = plan.spec, plan.results
    task = {key: value for key, value in spec.task.model_dump(mode="json").items() if key not in FREE_TASK}
    if isinstance(spec.task, Infill) and spec.decoder.runs_on != "causal":
        task.pop("max_new_tokens")  # only causal models use it; the holes of other models have their lengths
    full = spec.input.model_dump(mode="json")
    columns = {key: value for key, value in full["columns"].items() if key not in FREE_COLUMNS}
    drawn = places_masks_by_noise(plan)
    if not drawn:
        columns.pop("seed")
    found: dict[str, Any] = {
        "task": task,
        "input": {key: value for key, value in full.items() if key not in FREE_INPUT}
        | {"columns": columns, "files": results["input"]["files"]},
    }
    if drawn and spec.input.columns.seed is None:  # a row's own seed replaces the job's
        found["seed"] = spec.seed
    if masks_tokens(plan):
        found["model"] = {"tokenizer": results["model"]["tokenizer"]}
    return found


def places_masks_by_noise(plan: Plan) -> bool:
    """Whether the seed decides what is masked."""
    mask = getattr(plan.spec.task, "mask", None)
    if isinstance(mask, Spans):
        return plan.spec.input.columns.spans is None
    return isinstance(mask, Random | SpanFraction | Lines) or (isinstance(mask, Sentences) and mask.which == "random")


def masks_tokens(plan: Plan) -> bool:
    """Whether the mask counts tokens, so that a tokenizer decides what it hides."""
    columns = plan.spec.input.columns
    mask = getattr(plan.spec.task, "mask", None)
    return columns.tokens is None and (
        isinstance(mask, Random | SpanFraction) or (isinstance(mask, Spans) and columns.spans is None)
    )


def same_tokenizer(plan: Plan, other: Plan) -> bool:
    """Whether token ids mean the same in both runs."""
    return bool(plan.results["model"]["tokenizer"] == other.results["model"]["tokenizer"])


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return found


def _difference(key: str, name: str, before: dict[str, Any], other_name: str, now: dict[str, Any]) -> str:
    return f"{key} is {_shown(before, key)} in {name}, {_shown(now, key)} in {other_name}"


def _shown(values: dict[str, Any], key: str) -> str:
    text = json.dumps(values[key]) if key in values else "not set"
    return text if len(text) <= 60 else f"{text[:12]}..."
