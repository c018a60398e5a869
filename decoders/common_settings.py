"""Base classes of all decoder settings, and the sampling settings (`sampling:` in a spec). Pydantic only, no torch."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from draftmill.decoders.base import ModelInfo, ModelKind


class Settings(BaseModel):
    """Base of every settings model: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


MOST_SAMPLES: Final = 4096
"""The largest `sampling.n`."""


class Sampling(Settings):
    """How a token is drawn from the model's logits; the same warp is applied to target and draft. `n` samples are drawn a row."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    acceptance: Literal["coupled", "rejection"] = "coupled"
    n: int = Field(default=1, ge=1, le=MOST_SAMPLES)


Tasks = tuple[Literal["infill", "complete", "score"], ...]


class DecoderChoice(Settings):
    """Base of a decoder's settings, one class for each `decoder.kind`; all that other packages know of a decoder.

    `runs_on` is the kind of models that it decodes and `tasks` are its tasks. `runs` is what runs it, as `module:name`: a string,
    so that settings load without torch; called with a Setup and these settings, it gives an Algorithm for the engine. With
    `draws_by_row` a sample may have a temperature and a top_p of its own; with `token_logprobs` the decoder records the
    log-probability of each token where a row asks for it. Under sampling.acceptance 'rejection' a decoder needs `draft_law`, the
    probabilities with which a draft was drawn.

    If `score` is among the tasks, `scorer` is what scores texts (`module:name`, called with a Setup, these settings and an
    Estimate; it gives an Algorithm). `estimates` are the kinds of estimators that it has, the family's own first, none if its
    scores are exact; with `scores_any` it scores any tokens given all others, else only the end of a text. `scored_with` are the
    only settings that a score depends on.
    """

    runs_on: ClassVar[ModelKind]
    runs: ClassVar[str]
    tasks: ClassVar[Tasks]
    draws_by_row: ClassVar[bool] = True
    token_logprobs: ClassVar[bool] = False
    draft_law: ClassVar[bool] = True
    scorer: ClassVar[str] = ""
    estimates: ClassVar[tuple[Literal["llada", "mdlm"], ...]] = ()
    scores_any: ClassVar[bool] = False
    scored_with: ClassVar[tuple[str, ...]] = ()

    @property
    def drafts_of_neighbours(self) -> bool:
        """Whether what is drafted depends on other samples."""
        return False

    @property
    def draft_head(self) -> str:
        """Which draft head to use: `auto`, `none`, or a folder."""
        return "none"

    @classmethod
    def name(cls) -> str:
        """The `kind` of the class."""
        return str(get_args(cls.model_fields["kind"].annotation)[0])

    def check_model(self, info: ModelInfo) -> None:
        """Raise ValueError if the settings ask for something that the model, by its config.json, cannot do."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError if the decoder has no rejection rule, or if texts would depend on timing or neighbours under it. A
        draft length chosen by timing does not change the text under coupled acceptance, nor do drafts from other samples'
        texts. Under the rejection rule they decide which random numbers a token is drawn with."""
        if sampling.acceptance != "rejection":
            return
        if not self.draft_law:
            raise ValueError(
                f"sampling.acceptance: 'rejection' needs the probabilities of a draft, and decoder {self.name()!r} has none; "
                "allowed: 'coupled'"
            )
        if self.drafts_of_neighbours:
            raise ValueError(
                "decoder.drafter: 'suffix' drafts from other samples' texts, and under sampling.acceptance 'rejection' a text "
                "depends on its drafts, so it would depend on its neighbours; allowed with 'rejection': any other drafter; "
                "with 'suffix': acceptance 'coupled'"
            )
        for field in ("k", "gamma"):
            if getattr(self, field, None) == "auto":
                raise ValueError(
                    f"decoder.{field}: 'auto' chooses by time, and under sampling.acceptance 'rejection' the results would "
                    "depend on it; allowed with 'rejection': a number"
                )


class Estimate(Settings):
    """How the log-probability of a text is estimated where a model has none that is exact (decoders/estimates.py). `kind` is
    LLaDA's estimator or MDLM's; `auto` is the family's own. `samples` masks are drawn for each text."""

    kind: Literal["auto", "llada", "mdlm"] = "auto"
    samples: int = Field(default=128, ge=2, le=2**20)

    @field_validator("samples")
    @classmethod
    def _in_pairs(cls, samples: int) -> int:
        if samples % 2:
            raise ValueError(
                f"task.estimate.samples: {samples}; allowed: even numbers, since the standard error compares pairs of masks"
            )
        return samples
