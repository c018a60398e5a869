"""One plan for several jobs: jobs whose rows have the same canvases get copies of one unit table.

Reading and tokenizing the rows is the expensive part of planning; a copy needs neither. Each job's run directory stays complete:
it has its own `_plan.json` with its own fingerprint, and its own copy of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from draftmill.actors.rows.fim import fills_in_middle
from draftmill.actors.rows.makers import shares_beginnings
from draftmill.actors.task import Score
from draftmill.jobs.plan.fingerprint import digest, with_files
from draftmill.jobs.plan.packing import discard_parts
from draftmill.jobs.plan.plan import Plan, create_plan
from draftmill.jobs.plan.resolve import Resolved, begins_with_request
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.unit_table import part_name
from draftmill.storage.stores.interface import Store

OF_DRAWING = ("temperature", "top_k", "top_p", "acceptance")
"""Keys of `sampling` that no canvas depends on."""


def plan_groups(jobs: Sequence[Resolved]) -> list[list[int]]:
    """Group jobs, by their numbers, whose unit tables are equal: the same rows, ids, keys, canvases and units.

    Of jobs whose rows have settings of their own, only those are together that allow a row the same settings.
    """
    by_canvas: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        by_canvas.setdefault(canvas_key(job), []).append(number)
    groups: dict[tuple[str, str], list[int]] = {}
    for key, numbers in by_canvas.items():
        recipe = jobs[numbers[0]].recipe
        have_settings = recipe.columns.has_own_settings() or begins_with_request(recipe, jobs[numbers[0]].inputs)
        for number in numbers:
            groups.setdefault((key, settings_key(jobs[number]) if have_settings else ""), []).append(number)
    return list(groups.values())


def canvas_key(resolved: Resolved) -> str:
    """A digest of everything that the canvases and units depend on, except the settings that rows may have of their own.

    These are the inputs, the task, the tokenizer, the seed, the window, the model's length limit and ids, and whether rows
    that begin alike come together. Everything in the fingerprint counts that is not known to be without effect.
    """
    spec, recipe, info, tokenizer = resolved.spec, resolved.recipe, resolved.info, resolved.tokenizer
    key = dict(resolved.results)
    model = key.pop("model")
    del key["decoder"]
    key["sampling"] = {name: value for name, value in key.get("sampling", {}).items() if name not in OF_DRAWING}
    key["files"] = _files_key(tuple(resolved.inputs))
    key["keep"] = list(spec.kept)  # input.keep, and what metrics need
    key["packing"] = [spec.batching.window, spec.output.unit_rows]
    key["tokenizer"] = [model["tokenizer"], tokenizer is None, getattr(tokenizer, "bos_id", None), list(recipe.ends)]
    key["model"] = [info.max_length, info.vocab_size, info.mask_id, fills_in_middle(recipe.task, info)]
    key["beginnings"] = shares_beginnings(recipe.task, info)
    if isinstance(recipe.task, Score):  # what can be scored depends on the kind of model
        key["model"] += [info.kind, list(info.suppressed), info.shift, info.block_size]
    return digest(key)


@lru_cache(maxsize=16)
def _files_key(files: tuple[InputFile, ...]) -> str:
    """A digest of inputs as they were listed; a hash is known only of those that were planned before."""
    return digest([file.facts() | {"sha256": None} for file in files])


def settings_key(resolved: Resolved) -> str:
    """A digest of everything that decides which settings a row may have."""
    decoder, sampling = resolved.recipe.decoder.baseline, resolved.recipe.sampling
    return digest([decoder.draws_by_row, decoder.token_logprobs, sampling.model_dump(mode="json")])


def copy_plan(resolved: Resolved, donor: Plan, store: Store, *, epoch: int) -> Plan:
    """Write a plan with the units of `donor`, the plan of a job in the same group, into another run directory.

    Call it only under the run directory's lease, whose epoch is `epoch`. The result is the plan that `make_plan` would make.
    """
    discard_parts(store, epoch)
    parts = []
    for number, part in enumerate(donor.parts):
        failpoint("plan.before_part")
        parts.append(part | {"name": part_name(number, epoch)})
        store.put(parts[-1]["name"], donor.store.get(part["name"]))
    failpoint("plan.before_plan")
    results = with_files(resolved.results, donor.files)
    return create_plan(store, resolved.recorded, results, donor.files, donor.totals, parts, keep=donor.keep)
