"""The settings of all decoders (`decoder:` in a spec), and which models and tasks each one supports.

Pydantic only, without torch, so that a spec is checked in milliseconds. Each room has its settings in its own settings.py;
a new decoder's class is added to the union here.
"""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from draftmill.decoders.any_subset import settings as any_subset
from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.blocks import settings as blocks
from draftmill.decoders.causal import settings as causal
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.fastest import ROOMS, FastestSettings
from draftmill.decoders.masked import settings as masked

DecoderSettings = Annotated[
    any_subset.AnySubsetSettings
    | any_subset.ParallelSettings
    | any_subset.AssdSettings
    | causal.AutoregressiveSettings
    | causal.SpeculativeSettings
    | causal.SpecDiffSettings
    | causal.JacobiSettings
    | causal.MultiblockJacobiSettings
    | masked.StepwiseSettings
    | masked.ThresholdSettings
    | masked.FactorSettings
    | masked.SelfSpeculativeSettings
    | masked.AncestralSettings
    | blocks.BlockDiffusionSettings
    | blocks.S2d2Settings
    | FastestSettings,
    Field(discriminator="kind"),
]
DECODERS: dict[str, type[DecoderChoice]] = {choice.name(): choice for choice in get_args(get_args(DecoderSettings)[0])}
"""The settings of each `decoder.kind`, in the order of the union."""


def decoders_of(model: ModelKind) -> tuple[str, ...]:
    own = tuple(kind for kind, choice in DECODERS.items() if choice.runs_on == model and choice is not FastestSettings)
    return (*own, "fastest") if model in ROOMS else own


def decoders_for(task: str) -> tuple[str, ...]:
    return tuple(kind for kind, choice in DECODERS.items() if task in choice.tasks)


def scorer_of(settings: DecoderChoice) -> DecoderChoice:
    """The decoder that scores texts under the models of this one, with the settings that its scores depend on."""
    settings = settings.baseline
    (kind,) = (choice for choice in DECODERS.values() if choice.runs_on == settings.runs_on and "score" in choice.tasks)
    kept = {name: getattr(settings, name) for name in kind.scored_with if name in type(settings).model_fields}
    return kind.model_validate({"kind": kind.name()} | kept, strict=True)


def check_model(settings: DecoderChoice, info: ModelInfo, task: str | None = None) -> None:
    """Raise ValueError if a decoder cannot run on a model with these settings; the message names the alternatives (for a
    `task`). The driver asks before anything is loaded; the decoder asks again when it is built."""
    if settings.baseline.runs_on != info.kind and not settings.is_open:
        fitting = (kind for kind in decoders_of(info.kind) if task is None or task in DECODERS[kind].tasks)
        allowed = ", ".join(fitting) or "none yet"
        if info.family == "sdar" and settings.baseline.runs_on == "causal":
            allowed += "; or model.family: idlm, if the model was trained to be causal (I-DLM)"
        raise ValueError(
            f"decoder.kind: {settings.baseline.name()!r} does not run on models of family {info.family!r}; allowed: {allowed}"
        )
    if task == "score" and info.prompt_block:
        raise ValueError(
            f"task.kind: 'score', but the blocks of family {info.family!r} begin at a prompt's end, which a scored text does not "
            "tell; allowed: complete"
        )
    settings.check_model(info)
