"""The settings of all decoders: what a user may write under `decoder:`, and which rule of acceptance each takes.

Pure pydantic, without torch, so that a spec is checked in milliseconds. Each family's settings stand in its room, in settings.py;
a new decoder's class is added to the union here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from decoders.any_subset.settings import AnySubsetSettings, AssdSettings, ParallelSettings
from decoders.blocks.settings import BlockDiffusionSettings, S2d2Settings
from decoders.causal.settings import (
    AutoregressiveSettings,
    JacobiSettings,
    MultiblockJacobiSettings,
    SpecDiffSettings,
    SpeculativeSettings,
)
from decoders.common_settings import Sampling, Settings
from decoders.masked.settings import (
    AncestralSettings,
    FactorSettings,
    SelfSpeculativeSettings,
    StepwiseSettings,
    ThresholdSettings,
)

DecoderSettings = Annotated[
    AnySubsetSettings
    | ParallelSettings
    | AssdSettings
    | AutoregressiveSettings
    | SpeculativeSettings
    | SpecDiffSettings
    | JacobiSettings
    | MultiblockJacobiSettings
    | StepwiseSettings
    | ThresholdSettings
    | FactorSettings
    | SelfSpeculativeSettings
    | AncestralSettings
    | BlockDiffusionSettings
    | S2d2Settings,
    Field(discriminator="kind"),
]
DECODER_KINDS: dict[str, type[Settings]] = {
    "any_subset": AnySubsetSettings,
    "parallel": ParallelSettings,
    "assd": AssdSettings,
    "autoregressive": AutoregressiveSettings,
    "speculative": SpeculativeSettings,
    "specdiff": SpecDiffSettings,
    "jacobi": JacobiSettings,
    "multiblock_jacobi": MultiblockJacobiSettings,
    "stepwise": StepwiseSettings,
    "threshold": ThresholdSettings,
    "factor": FactorSettings,
    "ssd": SelfSpeculativeSettings,
    "ancestral": AncestralSettings,
    "block_diffusion": BlockDiffusionSettings,
    "s2d2": S2d2Settings,
}


def check_acceptance(settings: Settings, sampling: Sampling) -> None:
    """Raise ValueError where the decoder has no rejection rule, or where its results would depend on time under it.

    The drafts of Jacobi decoding and of ssd have no law to divide by. A draft length chosen by time leaves the text alone under
    coupled acceptance, but under the rejection rule it decides which random numbers a token is drawn with.
    """
    if isinstance(settings, S2d2Settings):
        settings.check_temper(sampling.acceptance, sampling.temperature)
    if sampling.acceptance != "rejection":
        return
    if isinstance(settings, JacobiSettings | MultiblockJacobiSettings | SelfSpeculativeSettings):
        raise ValueError(
            f"sampling.acceptance: 'rejection' needs the law of a draft, which decoder {settings.kind!r} has not; "
            "allowed: 'coupled'"
        )
    for name in ("k", "gamma"):
        if getattr(settings, name, None) == "auto":
            raise ValueError(
                f"decoder.{name}: 'auto' chooses by time, and under sampling.acceptance 'rejection' the results would depend "
                "on it; allowed with 'rejection': a number"
            )
