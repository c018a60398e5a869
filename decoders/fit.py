"""Whether a decoder's settings fit a model, as far as that can be told from config.json alone. Imports no torch.

A driver asks here before anything is loaded; the decoders ask again when they are built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from decoders.any_subset.settings import AssdSettings
from decoders.backbones.head_files import CONFIG, WEIGHTS, HeadKind, check_files, read_sizes
from decoders.base import ModelInfo
from decoders.blocks.settings import BlockSettings
from decoders.causal.settings import SpecDiffSettings
from decoders.common_settings import Settings
from decoders.masked.settings import AncestralSettings

_PREDICTORS: Final = {"mdlm": ("ddpm",), "sedd": ("analytic", "euler")}


def check_family(settings: Settings, info: ModelInfo) -> None:
    """Raise ValueError where the decoder does not run on the model's family, naming what would."""
    kind = str(getattr(settings, "kind", ""))
    if kind not in info.decoders:
        allowed = ", ".join(info.decoders) or "none yet"
        raise ValueError(f"decoder.kind: {kind!r} does not run on models of family {info.family!r}; allowed: {allowed}")
    if isinstance(settings, AncestralSettings):
        predictor_of(settings, info.family)
    if isinstance(settings, BlockSettings):
        check_blocks(settings, info)


def predictor_of(settings: AncestralSettings, family: str) -> str:
    """The predictor asked for, or the family's own; ValueError where the model can't be asked for it."""
    allowed = _PREDICTORS.get(family, ("ddpm", "analytic", "euler"))
    if settings.predictor == "auto":
        return allowed[0]
    if settings.predictor not in allowed:
        raise ValueError(
            f"decoder.predictor: {settings.predictor!r} does not run on models of family {family!r}; "
            f"allowed: auto, {', '.join(allowed)}"
        )
    return settings.predictor


def block_size_of(settings: BlockSettings, info: ModelInfo) -> int:
    """The size that is asked for, else that of the training; ValueError where there is neither, or sub-blocks don't fit."""
    size = settings.block_size or info.block_size
    if size is None:
        raise ValueError(f"decoder.block_size: models of family {info.family!r} don't say theirs; allowed: a number")
    if settings.sub_block is not None and size % settings.sub_block:
        raise ValueError(
            f"decoder.sub_block: {settings.sub_block} does not divide block_size = {size}; allowed: its divisors"
        )
    return size


def check_blocks(settings: BlockSettings, info: ModelInfo) -> None:
    """Raise ValueError where the model's blocks can't be decoded as the settings say."""
    block_size_of(settings, info)
    if settings.fused and info.shift and not settings.drafts_in_verifications:
        raise ValueError(
            f"decoder.fused: models of family {info.family!r} say the first token of a block in the forward before it; "
            "allowed: false, or s2d2 over a causal cache that verifies always, without sub_block, tau_edit and paper_compat"
        )


def check_window(settings: SpecDiffSettings, drafter: ModelInfo) -> None:
    """Raise ValueError where a full window is asked for and nobody knows how long that is."""
    longest = drafter.max_length
    if settings.window == "full" and longest is None:
        raise ValueError(
            "decoder.window: 'full' is the length that the drafter was trained on, which its config.json doesn't say; "
            "allowed: short"
        )


def head_place(settings: Settings, folder: Path) -> tuple[Path, HeadKind] | None:
    """Where the draft head is that the settings name, and of which kind; None where none serves. 'auto' is the one in `folder`.

    Raises ValueError where there is none in the place named.
    """
    if not isinstance(settings, AssdSettings | SpecDiffSettings) or settings.head == "none":
        return None
    if isinstance(settings, SpecDiffSettings) and settings.order == "native":
        return None
    if settings.head == "auto":
        return folder, settings.kind
    place = Path(settings.head).expanduser()
    if read_sizes(place, settings.kind) is None:
        raise ValueError(f"decoder.head: {settings.head} has no {CONFIG} and {WEIGHTS}")
    return place, settings.kind


def check_heads(settings: Settings, folder: Path) -> None:
    """Raise ValueError where a draft head is named, or lies in `folder`, that can't serve the decoder."""
    place = head_place(settings, folder)
    if place is not None:
        check_files(*place)
