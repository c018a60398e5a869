"""Golden checkpoints of the masked-diffusion families, and a hand that lays ragged canvases in front of a backbone."""

import json
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decoders.backbones.base import TokenRows
from decoders.backbones.load import load_backbone
from decoders.backbones.transformer import ModuleBackbone

FAMILIES = ("llada", "dream", "mdlm", "sedd")
VOCAB = {"llada": 96, "dream": 96, "mdlm": 65, "sedd": 65}


def load(folder, dtype="float32") -> Any:
    """Load a checkpoint on the CPU."""
    backbone = load_backbone(folder, dtype=dtype, device="cpu")
    assert isinstance(backbone, ModuleBackbone)
    return backbone


def copy_changed(source, target, *, config=None, weights=None):
    """Copy a golden checkpoint; `config` gives it other fields (None removes one), `weights` maps its tensors to others."""
    target.mkdir(exist_ok=True)
    fields = json.loads((source / "config.json").read_text()) | (config or {})
    fields = {key: value for key, value in fields.items() if value is not None or key not in (config or {})}
    (target / "config.json").write_text(json.dumps(fields))
    shutil.copyfile(source / "model.safetensors", target / "model.safetensors")
    if weights is not None:
        tensors = load_file(target / "model.safetensors")
        save_file(weights(tensors), target / "model.safetensors")
    return target


def without(name):
    """For `copy_changed`: all tensors but one."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def random_canvas(length, *, seed, vocab_size=65):
    """Tokens and masks (the last id) at random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size - 1, (length,), generator=generator)
    tokens[torch.rand(length, generator=generator) < 0.5] = vocab_size - 1
    return tokens.tolist()


def look(backbone, canvases, *, run=None, sigmas=None, first=0, width=None, seed=0):
    """One forward of whole canvases (by slot), or of their positions `run`; hidden states by slot.

    Position p is at column `first` + p, and every row sees all columns of its canvas. What padding rows hold is junk.
    """
    rows = {slot: list(range(len(canvas))) if run is None else list(run[slot]) for slot, canvas in canvases.items()}
    num_rows, num_slots = max(map(len, rows.values())), len(canvases)
    width = width or first + max(map(len, canvases.values()))
    generator = torch.Generator().manual_seed(seed)
    tokens, positions, columns = torch.randint(0, width, (3, num_slots, num_rows), generator=generator)
    tokens %= backbone.vocab_size
    visible = torch.rand(num_slots, num_rows, width, generator=generator) < 0.5
    valid = torch.zeros(num_slots, num_rows, dtype=torch.bool)
    sigma = None if sigmas is None else torch.full((num_slots, num_rows), torch.nan)
    for index, (slot, canvas) in enumerate(canvases.items()):
        at, count = torch.tensor(rows[slot]), len(rows[slot])
        valid[index, :count] = True
        tokens[index, :count] = torch.tensor(canvas)[at]
        positions[index, :count], columns[index, :count] = at, first + at
        visible[index, :count] = False
        visible[index, :count, first : first + len(canvas)] = True
        if sigma is not None:
            sigma[index, :count] = sigmas[slot]
    hidden = backbone.forward(
        TokenRows(torch.tensor(list(canvases)), tokens, positions, columns, valid, visible, sigma)
    )
    return {slot: hidden[index, : len(rows[slot])] for index, slot in enumerate(canvases)}


def look_alone(backbone, canvas, *, sigma=None):
    """Hidden states of one canvas in an empty cache."""
    backbone.forget()
    backbone.allocate(1, 64)
    return look(backbone, {0: canvas}, sigmas=None if sigma is None else {0: sigma})[0]
