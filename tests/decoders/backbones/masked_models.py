"""Golden checkpoints of the masked-diffusion families, and a hand that lays ragged canvases in front of a backbone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.backbones.transformer import ModuleBackbone

FAMILIES = ("llada", "llada_moe", "dream", "mdlm", "sedd")
PUBLIC = json.loads((Path(__file__).parents[2] / "data" / "public_configs.json").read_text())
"""What config.json says in published checkpoints, as far as it counts."""
VOCAB = {"llada": 96, "llada_moe": 96, "dream": 96, "mdlm": 65, "sedd": 65}


def load(folder, dtype="float32"):
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


def look(backbone, canvases, *, run=None, sigmas=None, first=0, width=None):
    """One forward of whole canvases (by slot), or of their positions `run`; hidden states by slot.

    Position p is at column `first` + p, and every row sees all columns of its canvas. `width` claims further columns.
    """
    runs = [list(range(len(canvas))) if run is None else list(run[slot]) for slot, canvas in canvases.items()]
    counts = [len(places) for places in runs]
    tokens = [canvas[place] for canvas, places in zip(canvases.values(), runs, strict=True) for place in places]
    positions = torch.tensor([place for places in runs for place in places], dtype=torch.int64)
    ends = torch.tensor([first + len(canvas) for canvas in canvases.values()]).repeat_interleave(torch.tensor(counts))
    rows = token_rows(
        list(canvases),
        counts,
        torch.tensor(tokens) % backbone.vocab_size,
        positions,
        first + positions,
        (torch.full_like(ends, first).unsqueeze(0), ends.unsqueeze(0)),
        sigma_G=None if sigmas is None else torch.tensor([sigmas[slot] for slot in canvases]),
    )
    if width is not None:
        rows = replace(rows, shape=replace(rows.shape, num_columns=width))
    hidden = backbone.forward(rows)
    return dict(zip(canvases, hidden.split(counts), strict=True))


def look_alone(backbone, canvas, *, sigma=None):
    """Hidden states of one canvas in an empty cache."""
    backbone.forget()
    backbone.allocate(1, 64)
    return look(backbone, {0: canvas}, sigmas=None if sigma is None else {0: sigma})[0]
