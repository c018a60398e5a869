"""From settings to a running decoder: which class runs which `decoder.kind`.

Knows every decoder and no job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decoders.any_subset.assd import AssdDecoder
from decoders.any_subset.decoder import Parallel, Sequential
from decoders.any_subset.one_pass import OnePassDecoder
from decoders.any_subset.settings import AnySubsetSettings, AssdSettings, ParallelSettings
from decoders.backbones.base import Model, TokenBackbone
from decoders.backbones.heads import DraftHeads, load_heads
from decoders.backbones.packed import can_pack, pack_products
from decoders.base import ModelInfo
from decoders.blocks.block_diffusion import BlockDiffusion
from decoders.blocks.decoder import BlockSlots
from decoders.blocks.s2d2 import S2d2Decoder
from decoders.blocks.s2d2_fused import FusedS2d2
from decoders.blocks.settings import BlockSettings, S2d2Settings
from decoders.causal.autoregressive import Autoregressive
from decoders.causal.jacobi import Jacobi
from decoders.causal.multiblock_jacobi import MultiblockJacobi
from decoders.causal.settings import (
    AutoregressiveSettings,
    JacobiSettings,
    MultiblockJacobiSettings,
    SpecDiffSettings,
    SpeculativeSettings,
)
from decoders.causal.specdiff import SpecDiff
from decoders.causal.speculative import Speculative
from decoders.common_settings import Sampling, Settings
from decoders.engine.ends import Stops
from decoders.engine.slots import SlotDecoder
from decoders.fit import check_family, head_place
from decoders.masked.ancestral import Ancestral
from decoders.masked.decoder import MaskedDecoder
from decoders.masked.settings import (
    AncestralSettings,
    FactorSettings,
    MaskedSettings,
    SelfSpeculativeSettings,
    StepwiseSettings,
    ThresholdSettings,
)
from decoders.masked.ssd import SelfSpeculative
from decoders.masked.stepwise import Factor, Stepwise, Threshold
from decoders.settings import check_acceptance

_MASKED: dict[type[Settings], type[MaskedDecoder]] = {
    StepwiseSettings: Stepwise,
    ThresholdSettings: Threshold,
    FactorSettings: Factor,
    SelfSpeculativeSettings: SelfSpeculative,
    AncestralSettings: Ancestral,
}


def stored_heads(settings: Settings, folder: Path) -> DraftHeads | None:
    """Load the draft head that the settings name; 'auto' is the one in the `folder` of the model that drafts, if there is one.

    Raises ValueError where there is none in the place named, or none that serves the decoder.
    """
    place = head_place(settings, folder)
    return None if place is None else load_heads(*place)


def find_heads(settings: Settings, folder: Path, backbone: Model) -> DraftHeads | None:
    """`stored_heads` on the device of the model that drafts, which is the one in `folder`; ValueError where they don't fit it."""
    heads = stored_heads(settings, folder)
    if heads is None:
        return None
    width = heads.sizes()["width"]
    if width != backbone.width:
        raise ValueError(f"decoder.head: made for models of width {width}, but this model has {backbone.width}")
    heads = heads.to(device=backbone.device, dtype=backbone.dtype)
    if backbone.min_rows == 1 and can_pack(backbone.dtype, backbone.device):
        # The model's rows need no company to keep their bits, since its products are packed: nor may those of its head.
        pack_products(heads)
    return heads


def _of_blocks(settings: BlockSettings) -> type[BlockSlots]:
    if not isinstance(settings, S2d2Settings):
        return BlockDiffusion
    return FusedS2d2 if settings.drafts_in_verifications else S2d2Decoder


def build_decoder(
    backbone: Model,
    info: ModelInfo,
    settings: Settings,
    sampling: Sampling,
    *,
    max_rows: int,
    max_tokens: int,
    heads: DraftHeads | None = None,
    stops: Stops | None = None,
    drafter: TokenBackbone | None = None,
    drafter_info: ModelInfo | None = None,
    trace: bool = False,
) -> SlotDecoder:
    """Return a decoder with free slots. Raises ValueError, with the field path, where settings and model do not fit.

    `heads` serve the any-subset decoders and `specdiff`; `stops` and a `drafter` (a model of the same vocabulary) those of
    causal models. `drafter_info` says how long a text the drafter takes; without it, as long as the model's.
    """
    check_family(settings, info)
    check_acceptance(settings, sampling)
    size: dict[str, Any] = {"max_rows": max_rows, "max_tokens": max_tokens, "trace": trace}
    match settings:
        case AnySubsetSettings():
            return Sequential(backbone, info, sampling, **size)
        case ParallelSettings():
            return Parallel(backbone, info, sampling, **size)
        case AssdSettings(fused="none"):
            return AssdDecoder(backbone, info, sampling, settings=settings, heads=heads, **size)
        case AssdSettings():
            return OnePassDecoder(backbone, info, sampling, settings=settings, heads=heads, **size)
        case AutoregressiveSettings():
            return Autoregressive(backbone, info, sampling, stops=stops, **size)
        case SpeculativeSettings(k=0):
            return Autoregressive(backbone, info, sampling, stops=stops, **size)
        case SpeculativeSettings() | SpecDiffSettings():
            more: dict[str, Any] = {"stops": stops, "drafter": drafter, "drafter_info": drafter_info, **size}
            if isinstance(settings, SpecDiffSettings):
                return SpecDiff(backbone, info, sampling, settings=settings, heads=heads, **more)
            return Speculative(backbone, info, sampling, settings=settings, **more)
        case JacobiSettings():
            return Jacobi(backbone, info, sampling, settings=settings, stops=stops, **size)
        case MultiblockJacobiSettings():
            return MultiblockJacobi(backbone, info, sampling, settings=settings, stops=stops, **size)
        case MaskedSettings() | AncestralSettings():
            return _MASKED[type(settings)](backbone, info, sampling, settings=settings, stops=stops, **size)
        case BlockSettings():
            return _of_blocks(settings)(backbone, info, sampling, settings=settings, stops=stops, **size)
    raise AssertionError(f"no decoder for {type(settings).__name__}")
