"""`fastest`: the lossless decoders of one baseline, of which each worker's clock chooses one at a time.

    decoder: fastest
    decoder: {kind: fastest, block_length: 16}          of a masked-diffusion model: the text of `stepwise` with this setting

Lossless decoders give one text, so a job may change from one to another after any step. All samples of a worker's batch are
decoded in the same way: by the baseline, or with drafts of some kind and number, whichever gives the most tokens per second
(engine/auto.py). This module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from draftmill.decoders.any_subset.settings import AnySubsetSettings
from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.blocks.settings import BlockDiffusionSettings
from draftmill.decoders.causal import settings as causal
from draftmill.decoders.common_settings import DecoderChoice, RunDrafterSettings, Sampling
from draftmill.decoders.masked.settings import MaskedSettings, StepwiseSettings

Like = Literal["autoregressive", "any_subset", "stepwise", "block_diffusion"]
ROOMS: Final[dict[ModelKind, tuple[Like, str]]] = {
    "causal": ("autoregressive", "causal.speculative"),
    "any_subset": ("any_subset", "any_subset.assd"),
    "masked": ("stepwise", "masked.ssd"),
    "blocks": ("block_diffusion", "blocks.s2d2"),
}
"""The baseline of each kind of models that has lossless decoders, and the module with these."""


class FastestSettings(MaskedSettings):
    """The lossless decoder that takes the least time, chosen anew while the job runs; the text is that of a baseline.
    The settings are those of `stepwise`, for masked-diffusion models."""

    kind: Literal["fastest"]
    like: Like | None = Field(
        default=None, description="the baseline, which the model decides; `draftmill eval` needs it"
    )
    drafter: (
        Annotated[
            causal.ModelDrafterSettings
            | causal.HeadDrafterSettings
            | causal.SuffixDrafterSettings
            | RunDrafterSettings,
            Field(discriminator="kind"),
        ]
        | None
    ) = Field(default=None, description="what else may draft: model, head, suffix (causal), run")

    @model_validator(mode="after")
    def _fits_baseline(self) -> Self:
        self.check_baseline()
        return self

    def check_baseline(self) -> None:
        """Raise ValueError, with the field path, where settings do not fit the baseline, if that is known."""
        if self.like is None:
            return
        if self.cache == "dual_relaxed":
            raise ValueError("decoder.cache: 'dual_relaxed' is lossy; allowed: none, prefix, dual_strict")
        other = [name for name, field in MaskedSettings.model_fields.items() if getattr(self, name) != field.default]
        if other and self.like != "stepwise":
            raise ValueError(
                f"decoder.{other[0]}: {getattr(self, other[0])!r} is for masked-diffusion models, and the baseline is "
                f"{self.like!r}; leave it out"
            )
        if self.like != "autoregressive" and not isinstance(self.drafter, RunDrafterSettings | None):
            raise ValueError(
                f"decoder.drafter.kind: {self.drafter.kind!r} drafts for causal models, and the baseline is {self.like!r}; "
                "allowed: run, or no drafter"
            )

    @property
    def runs(self) -> str:  # type: ignore[override]
        """See DecoderChoice; what drafts for the baseline is in its room."""
        return f"draftmill.decoders.{ROOMS[self.baseline.runs_on][1]}:fastest"

    @property
    def baseline(self) -> DecoderChoice:
        match self.like:
            case "autoregressive":
                return causal.AutoregressiveSettings(kind="autoregressive")
            case "any_subset":
                return AnySubsetSettings(kind="any_subset")
            case "stepwise":
                return StepwiseSettings(
                    kind="stepwise", **{name: getattr(self, name) for name in MaskedSettings.model_fields}
                )
            case "block_diffusion":
                return BlockDiffusionSettings(kind="block_diffusion", block_size=1, causal_cache=True)
        return self

    @property
    def keeps_bits(self) -> bool:
        return self.like != "block_diffusion"

    @property
    def is_open(self) -> bool:
        return self.like is None

    @property
    def drafts_of_neighbours(self) -> bool:
        return isinstance(self.drafter, causal.SuffixDrafterSettings)

    @property
    def draft_head(self) -> str:
        return "auto" if self.like in {"any_subset", "block_diffusion"} else "none"

    @property
    def head_kind(self) -> str:
        return "s2d2" if self.like == "block_diffusion" else "assd"

    def for_model(self, info: ModelInfo) -> Self:
        """The settings with the baseline of a model's kind; ValueError if it has none, or if they name another one."""
        if info.kind not in ROOMS:
            raise ValueError(f"decoder.kind: 'fastest', but models of family {info.family!r} have no lossless decoders")
        like, _ = ROOMS[info.kind]
        if self.like not in {None, like}:
            raise ValueError(
                f"decoder.like: {self.like!r} is not the baseline of models of family {info.family!r}; allowed: {like}"
            )
        made = self.model_copy(update={"like": like})
        made.check_baseline()
        return made

    def check_model(self, info: ModelInfo) -> None:
        if self.like is not None:
            self.baseline.check_model(info)

    def check_sampling(self, sampling: Sampling) -> None:
        """See DecoderChoice; what decodes is chosen by time, so that texts must not depend on it."""
        if sampling.acceptance == "rejection":
            raise ValueError(
                "decoder.kind: 'fastest' chooses by time, and under sampling.acceptance 'rejection' the results would depend on "
                "it; allowed with 'rejection': any other decoder"
            )
        if self.like is not None:
            self.baseline.check_sampling(sampling)
