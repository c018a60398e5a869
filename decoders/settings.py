"""Settings of the decoders and of sampling: what a user may write under `decoder:` and `sampling:`.

Pure pydantic, without torch, so that a spec is checked in milliseconds. Every decoder family adds its settings here
and its algorithm in a file of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from decoders.blocks.settings import BlockDiffusion, S2d2
from decoders.common_settings import Settings as Settings  # noqa: PLC0414 -- others import it from here


class Sampling(Settings):
    """How a token is drawn from the model's logits; the same warp is applied to target and draft."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    acceptance: Literal["coupled", "rejection"] = "coupled"


class AnySubset(Settings):
    """Sequential decoding of an any-subset model, one token per forward: the baseline."""

    kind: Literal["any_subset"]


class Parallel(Settings):
    """All holes at once in one forward, each independent of the others: fast and lossy."""

    kind: Literal["parallel"]


class Assd(Settings):
    """Any-subset speculative decoding (ASSD, Algorithms 1 and 2) and its one-pass variants."""

    kind: Literal["assd"]
    k: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 5
    drafter: Literal["self", "ngram"] = "self"
    head: str = Field(default="auto", min_length=1, description="auto, none, or the folder of a draft head")
    fused: Literal["none", "rows", "chain"] = "none"
    rows: Literal["all", "ends"] = "all"

    @model_validator(mode="after")
    def _consistent(self) -> Assd:
        if self.drafter == "ngram" and self.fused != "none":
            raise ValueError(
                f"decoder.fused: {self.fused!r} drafts with the model itself; with drafter 'ngram' it must be 'none'"
            )
        if self.fused == "chain" and self.head == "none":
            raise ValueError(
                "decoder.head: fused 'chain' drafts with a draft head; head may be 'auto' or a folder, not 'none'"
            )
        return self


class Autoregressive(Settings):
    """Sequential decoding of a causal model, one token per forward: the baseline."""

    kind: Literal["autoregressive"]


class DrafterPlace(Settings):
    """Where a model that drafts is: a masked-diffusion model with the same vocabulary."""

    path: str = Field(min_length=1)
    revision: str | None = None


class ModelDrafter(DrafterPlace):
    """A smaller causal model with the same vocabulary drafts."""

    kind: Literal["model"]


class NgramDrafter(Settings):
    """Prompt look-up: what followed the last occurrence of the last `max_n` (down to `min_n`) tokens drafts."""

    kind: Literal["ngram"]
    max_n: int = Field(default=3, ge=1, le=16)
    min_n: int = Field(default=1, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> NgramDrafter:
        if self.min_n > self.max_n:
            raise ValueError(f"decoder.drafter.min_n: {self.min_n} is above max_n = {self.max_n}; allowed: 1 .. max_n")
        return self


class Speculative(Settings):
    """Speculative decoding of a causal model (Leviathan et al., 2023; Chen et al., 2023)."""

    kind: Literal["speculative"]
    k: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = 5
    drafter: Annotated[ModelDrafter | NgramDrafter, Field(discriminator="kind")] = NgramDrafter(kind="ngram")


class SpecDiff(Settings):
    """Speculative decoding of a causal model whose drafts a masked-diffusion model fills in (SpecDiff).

    Up to `gamma` masks behind the text are revealed in at most `steps` forwards: from left to right, or in the random order of
    diffusion (`native`), which under sampling.acceptance 'rejection' is lossy. The drafter's window is the text and the masks
    (`short`), or of the length it was trained on, the tail left masked (`full`). A draft head corrects each draft for those
    that were revealed before it in the same forward; there is none for the native order.
    """

    kind: Literal["specdiff"]
    gamma: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = 8
    steps: int = Field(default=2, ge=1, le=256)
    order: Literal["left_to_right", "native"] = "left_to_right"
    window: Literal["short", "full"] = "short"
    drafter: DrafterPlace
    head: str = Field(default="auto", min_length=1, description="auto, none, or the folder of a draft head")

    @model_validator(mode="after")
    def _head_needs_order(self) -> SpecDiff:
        if self.order == "native" and self.head not in {"auto", "none"}:
            raise ValueError(
                f"decoder.head: {self.head!r} corrects a draft for those before it, which in the order 'native' may come "
                "later; allowed with it: auto, none"
            )
        return self


class Jacobi(Settings):
    """Jacobi decoding of a causal model: a block of drafts, refined by every forward until it is the model's own text."""

    kind: Literal["jacobi"]
    block_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = 16
    window: Literal["fixed", "running"] = "fixed"


class MultiblockJacobi(Settings):
    """Jacobi decoding with several blocks at once and rejection recycling (pcLLM, Algorithm 1)."""

    kind: Literal["multiblock_jacobi"]
    block_size: int = Field(default=16, ge=1, le=256)
    blocks: int = Field(default=2, ge=1, le=8)
    spawn_ratio: float = Field(default=0.85, gt=0.0, le=1.0)
    verify_size: int = Field(default=4, ge=1, le=16)
    pool_size: int = Field(default=4, ge=0, le=256)


class MaskedDiffusion(Settings):
    """What the decoders of masked-diffusion models share.

    Blocks of `block_length` positions, from the first hole on, are finished one after the other; null makes the whole canvas
    one. `confidence` says which position of a block comes next. With a `cache`, whatever lies outside of a forward's window is
    read as it was when the cache was made: for each block, or every `refresh` revealed tokens. Only `ssd` has anything to relax:
    with `dual_relaxed` its drafts go on where the cache would be made anew, which is lossy.
    """

    block_length: Annotated[int, Field(ge=1, le=2**20)] | None = 32
    confidence: Literal["top1", "margin", "entropy", "random"] = "top1"
    cache: Literal["none", "prefix", "dual_strict", "dual_relaxed"] = "none"
    refresh: Annotated[int, Field(ge=1, le=2**20)] | None = None

    @model_validator(mode="after")
    def _something_to_refresh(self) -> MaskedDiffusion:
        if self.refresh is not None and self.cache == "none":
            raise ValueError(
                f"decoder.refresh: {self.refresh}, but with cache 'none' nothing is kept; allowed with it: null"
            )
        return self


class Stepwise(MaskedDiffusion):
    """Masked diffusion by a schedule (LLaDA, Dream); one token a step is the baseline of `ssd`."""

    kind: Literal["stepwise"]
    tokens_per_step: int = Field(default=1, ge=1)
    steps: Annotated[int, Field(ge=1)] | None = None
    schedule: Literal["even", "dream"] = "even"

    @model_validator(mode="after")
    def _one_schedule(self) -> Stepwise:
        if self.steps is not None and self.tokens_per_step != 1:
            raise ValueError("decoder.steps: give tokens_per_step or steps, not both")
        if self.schedule == "dream" and self.steps is None:
            raise ValueError("decoder.steps: the schedule 'dream' needs the number of steps")
        if self.schedule == "dream" and self.block_length is not None:
            raise ValueError(
                f"decoder.block_length: {self.block_length}, but the schedule 'dream' knows no blocks; allowed: null"
            )
        return self


class SelfSpeculative(MaskedDiffusion):
    """Self-speculative masked diffusion (SSD): the text and the order of `stepwise`, in fewer forwards."""

    kind: Literal["ssd"]
    draft_length: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 4
    tree: Literal["chain", "mixed"] = "chain"


class Threshold(MaskedDiffusion):
    """Masked diffusion that reveals all it is sure enough of (Fast-dLLM); lossy."""

    kind: Literal["threshold"]
    confidence: Literal["top1", "margin"] = "top1"
    tau: float = Field(default=0.9, ge=0.0, le=1.0, allow_inf_nan=False)


class Factor(MaskedDiffusion):
    """Masked diffusion that reveals the more at once, the surer it is of all of it (Fast-dLLM); lossy."""

    kind: Literal["factor"]
    confidence: Literal["top1", "margin"] = "top1"
    factor: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


class Ancestral(Settings):
    """Masked diffusion backwards in time (MDLM, SEDD): what is revealed when is left to chance; lossy where it is much at once.

    `predictor` auto is the family's own: ddpm (MDLM) or analytic (SEDD). A sample takes at most `steps` + 1 forwards.
    """

    kind: Literal["ancestral"]
    steps: int = Field(default=128, ge=1, le=2**20)
    predictor: Literal["auto", "ddpm", "analytic", "euler"] = "auto"


DecoderSettings = Annotated[
    AnySubset
    | Parallel
    | Assd
    | Autoregressive
    | Speculative
    | SpecDiff
    | Jacobi
    | MultiblockJacobi
    | Stepwise
    | Threshold
    | Factor
    | SelfSpeculative
    | Ancestral
    | BlockDiffusion
    | S2d2,
    Field(discriminator="kind"),
]
DECODER_KINDS: dict[str, type[Settings]] = {
    "any_subset": AnySubset,
    "parallel": Parallel,
    "assd": Assd,
    "autoregressive": Autoregressive,
    "speculative": Speculative,
    "specdiff": SpecDiff,
    "jacobi": Jacobi,
    "multiblock_jacobi": MultiblockJacobi,
    "stepwise": Stepwise,
    "threshold": Threshold,
    "factor": Factor,
    "ssd": SelfSpeculative,
    "ancestral": Ancestral,
    "block_diffusion": BlockDiffusion,
    "s2d2": S2d2,
}


def check_acceptance(settings: Settings, sampling: Sampling) -> None:
    """Raise ValueError where the decoder has no rejection rule, or where its results would depend on time under it.

    The drafts of Jacobi decoding and of ssd have no law to divide by. A draft length chosen by time leaves the text alone under
    coupled acceptance, but under the rejection rule it decides which random numbers a token is drawn with.
    """
    if isinstance(settings, S2d2):
        settings.check_temper(sampling.acceptance, sampling.temperature)
    if sampling.acceptance != "rejection":
        return
    if isinstance(settings, Jacobi | MultiblockJacobi | SelfSpeculative):
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
