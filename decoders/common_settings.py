"""Base classes of all decoder settings, and the sampling settings (`sampling:` in a spec). Pydantic only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from draftmill.decoders.base import ModelInfo, ModelKind


class Settings(BaseModel):
    """Base of every settings model: immutable, and unknown keys are errors, as are NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class PathMark:
    """Marks a setting, in its annotation, as a local path or a URL of one of the `schemes`; jobs/config/paths.py collects them.

    A value that matches `other` is neither. `is_model`: a value that is no local path may be a model id of the hub. `reason` is
    why other schemes are refused.
    """

    schemes: tuple[str, ...] = ()
    other: str = ""
    is_model: bool = False
    reason: str = ""


MODEL: Final = PathMark(("s3",), is_model=True)
FOLDER: Final = PathMark(other="auto|none", is_model=True)
RUN: Final = PathMark(("s3",), other="last")
Head = Annotated[str, FOLDER, Field(min_length=1)]
"""`auto`: the model's own draft head; `none`; or the folder of one."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
MOST_SAMPLES: Final = 4096
"""The largest `sampling.n`."""
MOST_TOP_LOGPROBS: Final = 20
"""The largest `sampling.top_logprobs`."""


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _token(value: Any) -> Any:
    """A token's id where its digits are given: keys of JSON are texts."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _biases(value: Any) -> Any:
    return {_token(key): bias for key, bias in value.items()} if isinstance(value, dict) else value


Token = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]
"""A token by its id, or by its text."""
TokenRun = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | Annotated[str, Field(min_length=1)]
"""Tokens by their ids, or a text."""
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


class Sampling(Settings):
    """How a token is drawn from the model's logits: penalties, biases and bans change them, then temperature, top_k, top_p and
    min_p, in this order. The same warp is applied to target and draft. `n` samples are drawn a row."""

    temperature: float = Field(
        default=1.0, ge=0.0, le=100.0, description="0: the likeliest token, ties to the lowest id"
    )
    top_k: int | None = Field(default=None, ge=1, description="draw from this many of the likeliest tokens")
    top_p: float | None = Field(
        default=None, gt=0.0, le=1.0, description="draw from the fewest tokens of this probability"
    )
    min_p: float | None = Field(
        default=None, ge=0.0, le=1.0, description="draw from tokens of this share of the best one's probability"
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0.0, le=100.0, description="divides positive logits of known tokens, multiplies negative ones"
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="subtracted from logits of generated tokens"
    )
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, description="the same, once for each time")
    no_repeat_ngram_size: int = Field(
        default=0, ge=0, le=64, description="no run of this many tokens comes twice; 0: any may"
    )
    logit_bias: Annotated[dict[Token, Bias], BeforeValidator(_biases)] = Field(
        default={}, description="added to logits, by token id or text"
    )
    bad_words: Annotated[tuple[TokenRun, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="texts, also after a space, or lists of ids"
    )
    suppress_tokens: Annotated[tuple[Token, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="ids, or texts of one token"
    )
    min_new_tokens: int = Field(default=0, ge=0, le=2**20, description="no end among the first N tokens (complete)")
    top_logprobs: int = Field(
        default=0, ge=0, le=MOST_TOP_LOGPROBS, description="record the N best tokens of each place"
    )
    from_checkpoint: bool = Field(
        default=False, description="take the other keys from the model's generation_config.json"
    )
    acceptance: Literal["coupled", "rejection"] = Field(
        default="coupled", description="coupled keeps the baseline's text, rejection its distribution"
    )
    n: int = Field(default=1, ge=1, le=MOST_SAMPLES, description="samples of each row")

    @property
    def bans(self) -> tuple[str, ...]:
        """The keys that ban tokens: beside a constraint they could leave none."""
        return self._changed(*_TEXT_BANS, "suppress_tokens")

    @property
    def reads_text(self) -> tuple[str, ...]:
        """The keys that make a distribution depend on the tokens before it."""
        return self._changed("presence_penalty", "frequency_penalty", "repetition_penalty", *_TEXT_BANS)

    @property
    def changes_logits(self) -> tuple[str, ...]:
        """The keys with which rows draw from other logits than the model's."""
        return (*self.reads_text, *self._changed("logit_bias", "suppress_tokens"))

    def _changed(self, *keys: str) -> tuple[str, ...]:
        """Those of some keys that have neither their default nor an empty value."""
        return tuple(
            key for key in keys if (value := getattr(self, key)) and value != Sampling.model_fields[key].default
        )


_TEXT_BANS: Final = ("no_repeat_ngram_size", "bad_words", "min_new_tokens")

Tasks = tuple[Literal["infill", "complete", "score"], ...]


class DecoderChoice(Settings):
    """Base of a decoder's settings, one class for each `decoder.kind`; all that other packages know of a decoder.

    `runs_on` is the kind of models that it decodes and `tasks` are its tasks. `runs` names the function that makes an Algorithm
    of a Setup and these settings, as `module:name`: a string, so that settings load without torch. With
    `draws_by_row` a sample may have a temperature and a top_p of its own; with `token_logprobs` the decoder records the
    log-probability of each token where a row asks for it. Under sampling.acceptance 'rejection' a decoder needs `draft_law`, the
    probabilities with which a draft was drawn.

    With `finds_lengths` it answers the probes by which holes find their lengths (task.mask.length: auto).

    If `score` is among the tasks, `scorer` names the function that makes an Algorithm of a Setup, these settings and an
    Estimate, as `module:name`. `estimates` are the kinds of estimators that it has, the family's own first, none if its
    scores are exact; with `scores_any` it scores any tokens given all others, else only the end of a text. `scored_with` are the
    only settings that a score depends on.
    """

    runs_on: ClassVar[ModelKind]
    runs: ClassVar[str]
    tasks: ClassVar[Tasks]
    draws_by_row: ClassVar[bool] = True
    token_logprobs: ClassVar[bool] = False
    draft_law: ClassVar[bool] = True
    finds_lengths: ClassVar[bool] = False
    scorer: ClassVar[str] = ""
    estimates: ClassVar[tuple[Literal["llada", "mdlm"], ...]] = ()
    scores_any: ClassVar[bool] = False
    scored_with: ClassVar[tuple[str, ...]] = ()

    @property
    def baseline(self) -> DecoderChoice:
        """The decoder that says what a sample may ask for, and whose text this one has: itself but for `fastest`."""
        return self

    @property
    def keeps_bits(self) -> bool:
        """Whether its forwards have the bits of the baseline's, and not only the tokens."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether only the model will tell the baseline."""
        return False

    @property
    def drafts_of_neighbours(self) -> bool:
        """Whether what is drafted depends on other samples."""
        return False

    @property
    def drafting_runs(self) -> tuple[str, ...]:
        """The finished runs whose texts draft."""
        drafter = getattr(self, "drafter", None)
        return drafter.path if isinstance(drafter, RunDrafterSettings) else ()

    def with_drafting_runs(self, runs: tuple[str, ...]) -> Self:
        drafter = self.drafter.model_copy(update={"path": runs})  # type: ignore[attr-defined]
        return self.model_copy(update={"drafter": drafter})

    @property
    def draft_head(self) -> str:
        """Which draft head to use: `auto`, `none`, or a folder."""
        return "none"

    @property
    def head_kind(self) -> str:
        """The decoder that its draft head was made for."""
        return self.name()

    @classmethod
    def name(cls) -> str:
        return str(get_args(cls.model_fields["kind"].annotation)[0])

    def check_model(self, info: ModelInfo) -> None:
        """Raise ValueError if the settings ask for something that the model, by its config.json, cannot do."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError if the decoder has no rejection rule, if texts would depend on timing or neighbours under it, or if it
        can't do what else is asked for.

        A draft length chosen by timing does not change the text under coupled acceptance, nor do drafts from
        other samples' texts. Under the rejection rule they decide which random numbers a token is drawn with.
        """
        if sampling.top_logprobs and not self.token_logprobs:
            raise ValueError(
                f"sampling.top_logprobs: {sampling.top_logprobs}, but decoder {self.name()!r} records no log-probabilities of "
                "tokens; allowed: 0"
            )
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
        by_run = isinstance(drafter := getattr(self, "drafter", None), RunDrafterSettings)
        for field, owner in (("drafter.k", drafter),) if by_run else (("k", self), ("gamma", self)):
            if getattr(owner, field.rpartition(".")[2], None) == "auto":
                raise ValueError(
                    f"decoder.{field}: 'auto' chooses by time, and under sampling.acceptance 'rejection' the results would "
                    "depend on it; allowed with 'rejection': a number"
                )


class DrafterPlace(Settings):
    """The path of a drafting model: its kind is the decoder's matter, its vocabulary the target's."""

    path: Annotated[str, MODEL] = Field(min_length=1, description="where the model is, as in model.path")
    revision: str | None = Field(default=None, description="of a hub model")


class RunDrafterSettings(Settings):
    """Finished runs draft: each row's text there, found by its id, and the row's own text where that text foretells badly."""

    kind: Literal["run"]
    path: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list), RUN] = Field(
        description="a run directory, or several; last: the last finished date or sweep case"
    )
    k: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        default="auto", description="most tokens of a draft; auto: as many as pay (not under rejection)"
    )


class Estimate(Settings):
    """How the log-probability of a text is estimated where a model has none that is exact."""

    kind: Literal["auto", "llada", "mdlm"] = Field(default="auto", description="the estimator; auto: the family's own")
    samples: int = Field(default=128, ge=2, le=2**20, description="random masks for each text, an even number")

    @field_validator("samples")
    @classmethod
    def _in_pairs(cls, samples: int) -> int:
        if samples % 2:
            raise ValueError(
                f"task.estimate.samples: {samples}; allowed: even numbers, since the standard error compares pairs of masks"
            )
        return samples
