"""The models that ship, and golden ones, under any decoder: where they are, each loaded once, what an engine of them needs."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import find_heads
from draftmill.decoders.settings import DecoderSettings

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
GOLDEN = Path(__file__).parents[1] / "data"
Case = tuple[str, Any]
"""The name of a model, and settings of a decoder, or of what scores for it."""


def folder_of(model: str) -> Path:
    return (GOLDEN if model in ("sedd", "mdlm") else BUILTIN) / model


@cache
def loaded(model: str) -> Any:
    return load_backbone(folder_of(model), device="cpu")


def setup_of(
    case: Case, sampling: Sampling, rows: int, *, load: Callable[[str], Any] = loaded, **more: Any
) -> tuple[Setup, Any]:
    """What an engine of the case needs, with its draft head, and its settings; `load` gives a model, `more` other fields."""
    model, settings = case[0], TypeAdapter(DecoderSettings).validate_python(case[1])
    name, backbone, info = getattr(getattr(settings, "drafter", None), "path", None), load(model), facts(model)
    drafter = load(name) if name else None
    fields = {
        "max_tokens": 1 << 20,
        "stops": Stops() if info.kind in ("causal", "blocks") else None,
        "drafter": drafter,
        "drafter_info": facts(name) if name else None,
    }
    if "heads" not in more:
        fields["heads"] = find_heads(settings, folder_of(name or model), drafter or backbone)
    return Setup(
        **{"backbone": backbone, "info": info, "sampling": sampling, "max_rows": rows} | fields | more
    ), settings


def facts(model: str) -> Any:
    return inspect_model(folder_of(model))
