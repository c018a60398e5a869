"""Merges a LoRA adapter into a checkpoint's weights.

    python -m draftmill.actors.checkpoints.merge_adapter BASE HASH ADAPTER HASH FOLDER

PEFT merges in float32, whatever the checkpoint's dtype, so that `model.dtype` rounds only once. Every weight of the adapter
must match a weight of the model: PEFT itself only warns about others.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from draftmill.actors.checkpoints.made_folders import SOURCE, read_source, refuse, write_source
from draftmill.actors.checkpoints.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from draftmill.decoders.backbones.checkpoint import inspect_model, read_config
from draftmill.decoders.backbones.families.causal import CAUSAL_FAMILIES, CausalFamily
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.backbones.quantized import find_form

_ENDS = ("lm_head", "embed_tokens", "wte")


class MergeRefused(ValueError):
    """The adapter can't be merged; the message is for the user."""


def merge(base: Path, base_hash: str, adapter: Path, digest: str, folder: Path) -> None:
    """Write the merged checkpoint. Raises MergeRefused if model and adapter do not fit."""
    family = _family(base)
    import transformers

    plain = getattr(transformers, family.model_class).from_pretrained(base, dtype=torch.float32, local_files_only=True)
    merged = merge_into(plain, adapter)
    _save(merged, family, folder)
    for file in base.iterdir():
        if file.is_file() and file.name != SOURCE and "safetensors" not in file.name:
            shutil.copy(file, folder)
    write_source(folder, (read_source(base) or {}) | {"weights": base_hash, "adapter": digest})
    inspect_model(folder)


def merge_into(plain: Any, adapter: Path) -> Any:
    """The model with the adapter's weights added to its own."""
    from peft import PeftConfig, PeftModel
    from peft.utils import get_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(adapter))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise MergeRefused(f"it is of type {kind}, which adds to prompts and can't be merged into weights")
    try:
        model = PeftModel.from_pretrained(plain, str(adapter))
    except (ValueError, RuntimeError, KeyError) as error:
        raise MergeRefused(f"it does not fit the model: {' '.join(str(error).split())[:400]}") from error
    if not hasattr(model, "merge_and_unload"):
        raise MergeRefused(f"it is of type {kind}, which can't be merged into weights")
    touched = {name.split(".")[-1] for name, part in model.named_modules() if hasattr(part, "merge")}
    if plain.config.tie_word_embeddings and touched.intersection(_ENDS):
        raise MergeRefused("it changes the embeddings or the output layer, which are one tensor in this model")
    _check_names(get_peft_model_state_dict(model, save_embedding_layers=False), adapter)
    return model.merge_and_unload(safe_merge=True)


def _check_names(held: dict[str, Any], adapter: Path) -> None:
    from safetensors import safe_open

    with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
        # With an adapted embedding table, PEFT also stores a copy of the table itself.
        given = {name for name in file.keys() if ".base_layer." not in name}  # noqa: SIM118
    for names, what in (
        (given - held.keys(), "has weights for parts that the model lacks"),
        (held.keys() - given, "lacks"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise MergeRefused(f"it {what}: {', '.join(sorted(names)[:3])}{more}")


def _family(base: Path) -> CausalFamily:
    family = find_family(read_config(base), "auto")
    if find_form(read_config(base)) is not None:
        raise MergeRefused("the model's checkpoint is quantized; an adapter needs one that is not")
    if family.causal not in CAUSAL_FAMILIES:
        names = ", ".join(known.name for known in CAUSAL_FAMILIES)
        reason = f"this model is of family {family.name!r}"
        raise MergeRefused(f"adapters are supported for models of the families {names}; {reason}")
    assert family.causal is not None
    return family.causal


def _save(merged: Any, family: CausalFamily, folder: Path) -> None:
    from safetensors.torch import save_file

    weights = {name: tensor.detach().clone().contiguous() for name, tensor in merged.state_dict().items()}
    if merged.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str]) -> int:
    """Merge the adapter; prints a refusal on standard output, for `draftmill.actors.checkpoints.made_folders.run_maker`."""
    base, base_hash, adapter, digest, folder = arguments
    try:
        merge(Path(base), base_hash, Path(adapter), digest, Path(folder))
    except MergeRefused as error:
        refuse(f"the adapter in {adapter} can't be merged: {error}")
        return 2
    except (ValueError, TypeError, KeyError, OSError) as error:  # a damaged config or file
        reason = " ".join(str(error).split())[:400]
        files = f"{ADAPTER_CONFIG}, {ADAPTER_WEIGHTS}"
        refuse(f"the adapter in {adapter} ({files}) can't be merged: {type(error).__name__}: {reason}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
