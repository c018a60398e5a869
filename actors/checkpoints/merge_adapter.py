"""Merges a LoRA adapter into a checkpoint's weights.

    python -m draftmill.actors.checkpoints.merge_adapter BASE HASH ADAPTER HASH FOLDER

PEFT merges in float32, whatever the checkpoint's dtype, so that `model.dtype` rounds only once. Every weight of the adapter
must match a weight of the model: PEFT itself only warns about others.

transformers builds the causal models of `_WHOLE`. Of all others only the modules are built that hold their tensors, under the
checkpoint's names: adapters name them so, and merging runs no forward.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftmill.actors.checkpoints.made_folders import SOURCE, read_source, refuse, write_source
from draftmill.actors.checkpoints.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from draftmill.decoders.backbones.checkpoint import inspect_model, read_config
from draftmill.decoders.backbones.families.family import Family
from draftmill.decoders.backbones.families.table import FAMILIES, find_family
from draftmill.decoders.backbones.load import load_weights
from draftmill.decoders.backbones.quantized import find_form

_WHOLE = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neo")
_TABLES = ("embed_tokens", "wte", "word_embeddings")
_ENDS = ("lm_head", *_TABLES)


class MergeRefused(ValueError):
    """The adapter can't be merged; the message is for the user."""


def merge(base: Path, base_hash: str, adapter: Path, digest: str, folder: Path) -> None:
    """Write the merged checkpoint. Raises MergeRefused if model and adapter do not fit."""
    family = _family(base)
    merged = merge_into(_plain_model(family, base), adapter)
    _save(merged, folder)
    for file in base.iterdir():
        if file.is_file() and file.name != SOURCE and "safetensors" not in file.name:
            shutil.copy(file, folder)
    write_source(folder, (read_source(base) or {}) | {"weights": base_hash, "adapter": digest})
    inspect_model(folder)


def _plain_model(family: Family, base: Path) -> Any:
    import transformers

    if family.name in _WHOLE:
        model_class = transformers.AutoModelForCausalLM
        return model_class.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    config = read_config(base)
    tied = bool(family.shape(config).optional())
    model: Any = modules_of(load_weights(base, dtype=torch.float32))
    model.config = transformers.PretrainedConfig()
    model.config.tie_word_embeddings = tied
    # PEFT asks every model for language for it, and calls it only in generation.
    model.prepare_inputs_for_generation = None
    return model


def modules_of(weights: dict[str, torch.Tensor]) -> nn.Module:
    """Modules that hold these tensors under their names: matrices called `weight` as linear layers or embeddings."""
    root = nn.Module()
    names = [name for name, tensor in weights.items() if name.endswith(".weight") and tensor.ndim == 2]
    matrices = {name.removesuffix(".weight"): weights[name] for name in names}
    for name, tensor in weights.items():
        path, _, kind = name.rpartition(".")
        parent = root
        steps = path.split(".")
        for depth, step in enumerate(steps):
            if not hasattr(parent, step):
                parent.add_module(step, _module(step, matrices.get(".".join(steps[: depth + 1]))))
            parent = getattr(parent, step)
        parent.register_parameter(kind, nn.Parameter(tensor, requires_grad=False))
    return root


def _module(name: str, weight: torch.Tensor | None) -> nn.Module:
    if weight is None:
        return nn.Module()
    if name in _TABLES:
        return nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    return nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")


def merge_into(plain: Any, adapter: Path) -> Any:
    """The model with the adapter's weights added to its own."""
    from peft import PeftConfig, PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors import SafetensorError

    config = PeftConfig.from_pretrained(str(adapter))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise MergeRefused(f"it is of type {kind}, which adds to prompts and can't be merged into weights")
    try:
        model = PeftModel.from_pretrained(plain, str(adapter))
    except SafetensorError as error:
        raise MergeRefused(f"{ADAPTER_WEIGHTS} is damaged or not a safetensors file: {error}") from error
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


def _family(base: Path) -> Family:
    """The model's family; MergeRefused for two-stream models, whose adapters have no public layout, and for quantized
    checkpoints."""
    config = read_config(base)
    if find_form(config) is not None:
        raise MergeRefused("the model's checkpoint is quantized; an adapter needs one that is not")
    family = find_family(config, "auto")
    if not family.rows_are_tokens:
        names = ", ".join(name for name, known in FAMILIES.items() if known.rows_are_tokens)
        reason = f"this model is of family {family.name!r}"
        raise MergeRefused(f"adapters are supported for models of the families {names}; {reason}")
    return family


def _save(merged: Any, folder: Path) -> None:
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
    except (ValueError, OSError, ImportError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:400]
        if isinstance(error, TypeError | KeyError | AttributeError):  # PEFT checks few types
            reason = f"PEFT can't use a value of its {ADAPTER_CONFIG} ({type(error).__name__}: {reason})"
        refuse(f"the adapter in {adapter} can't be merged: {reason}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
