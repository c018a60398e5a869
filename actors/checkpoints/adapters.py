"""Merges a LoRA adapter of PEFT into its checkpoint, once, into a cached folder (by draftmill.actors.checkpoints.merge_adapter).

Does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

from draftmill.actors.checkpoints.made_folders import cache_folder, made_once, run_maker
from draftmill.storage.errors import UserError

FIELD = "model.adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATTERNS = (CONFIG, WEIGHTS)
MERGER = 1
"""Version of the merging, a part of the adapter's hash; increase it when merging gives other numbers."""


def merged_folder(base: Path, base_hash: str, adapter: Path, digest: str) -> Path:
    """The cache folder of the merged checkpoint; creates it if necessary.

    `base_hash` and `digest` are the hashes of checkpoint and adapter. UserError if they can't be merged, or PEFT is missing.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "merging an adapter needs the package peft: pip install peft (the extra `adapter` of this project); or merge it "
            "yourself (PeftModel.from_pretrained(model, adapter).merge_and_unload()), save the model, and set model.path to "
            "its folder",
            field=FIELD,
        )
    versions = [importlib.metadata.version(name) for name in ("transformers", "peft")]
    name = hashlib.sha256(repr((MERGER, base_hash, digest, versions)).encode()).hexdigest()[:16]
    arguments = [str(base), base_hash, str(adapter), digest]
    make = partial(_merge, arguments)
    return made_once(cache_folder() / "models" / f"adapted-{name}", make)


def check_files(adapter: Path, named: str, model: str) -> None:
    """Raise UserError unless the folder has an adapter in safetensors, for this model as far as the names show.

    `model` is the model's path from the spec. Names are compared only if both are hub ids.
    """
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{named!r} is not an adapter: it has no {CONFIG}", field=FIELD)
    if not (adapter / WEIGHTS).is_file():
        raise UserError(f"{named!r} has no {WEIGHTS}; other formats (.bin) are not supported", field=FIELD)
    base = str(read_adapter(adapter, named).get("base_model_name_or_path") or "")
    if _is_hub_id(base) and _is_hub_id(model) and base.lower() != model.lower():
        raise UserError(
            f"{named!r} was trained on {base!r}, not on {model!r}; allowed: an adapter of that model (to merge it anyway, "
            "set model.path to a local folder)",
            field=FIELD,
        )


def read_adapter(adapter: Path, named: str) -> dict[str, Any]:
    """The adapter's config; UserError if it is not a JSON object."""
    try:
        found = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{named!r}: {CONFIG} can't be read: {error}", field=FIELD) from None
    if not isinstance(found, dict):
        raise UserError(f"{named!r}: {CONFIG} is not a JSON object", field=FIELD)
    return found


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _merge(arguments: list[str], folder: Path) -> None:
    run_maker(
        "draftmill.actors.checkpoints.merge_adapter",
        [*arguments, str(folder)],
        field=FIELD,
        what="merging the adapter into the model",
    )
