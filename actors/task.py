"""The settings under `task:` and `input.columns`. Pure pydantic, no torch; jobs/spec/job_spec.py embeds them.

They are in this package, next to the code that uses them (canvas.py), since workers need both and know nothing of jobs.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from draftmill.decoders.common_settings import Estimate, Settings

Side = Literal["left", "right", "middle"]
"""Which part of a prompt is cut off if the prompt is too long."""

Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MOST_NEW_TOKENS: Final = 2**20
"""Upper limit for max_new_tokens."""


def as_tuple(value: Any) -> Any:
    """Turn a list into a tuple: strict validation does not accept a list as a tuple, and YAML has only lists."""
    return tuple(value) if isinstance(value, list) else value


class Columns(Settings):
    """Maps the project's columns to the file's columns; a column that is named must be in every row.

    If no column is named, the id comes from a column `id` if a row has one, and the task reads its default columns (`reads`).
    `prefix` and `suffix` replace the text: the hole is between them. `reference` is for later comparison. `seed` replaces
    the job's seed for its row; `max_new_tokens`, `temperature`, `top_p` and `stop` replace the task's and the sampling's
    values if they are not null.
    """

    id: str | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    prefix: str | None = None
    suffix: str | None = None
    spans: str | None = None
    sentences: str | None = None
    reference: str | None = None
    seed: str | None = None
    max_new_tokens: str | None = None
    temperature: str | None = None
    top_p: str | None = None
    stop: str | None = None
    tokens: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Columns:
        between = self.prefix is not None or self.suffix is not None
        sources = {
            "text": self.text,
            "tokens": self.tokens,
            "sentences": self.sentences,
            "prefix/suffix": between or None,
        }
        named = [name for name, column in sources.items() if column is not None]
        if len(named) > 1:
            raise ValueError(f"input.columns: {' and '.join(named)} each give a row's content; name only one of them")
        return self

    def named(self) -> dict[str, str]:
        """The columns that the spec names: task column -> file column."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def own_settings(self) -> bool:
        """Whether a column holds the rows' own settings, other than the seed."""
        return any((self.max_new_tokens, self.temperature, self.top_p, self.stop))

    def wanted(self, task: Task) -> dict[str, str]:
        """The columns to read: the named ones, and the defaults that the task looks for if none is named."""
        return {name: name for name in ("id", *task.reads)} | self.named()


class Marker(Settings):
    """Each occurrence of `marker` in the text is a hole of `length` tokens.

    A marker that ends in a bracket may give its own length: `<mask:12>`. With prefix and suffix columns, the only hole is
    between them.
    """

    kind: Literal["marker"]
    marker: str = Field("<mask>", min_length=1)
    length: Count = 8


class Random(Settings):
    """A share of the tokens: the `rate * tokens` positions (rounded, at least one) with the least noise."""

    kind: Literal["random"]
    rate: Share = 0.5


class Spans(Settings):
    """`count` separate spans of `length` tokens (1 of 16), or, with a column `spans`, the row's own [start, end) characters."""

    kind: Literal["spans"]
    count: Count | None = None
    length: Count | None = None


class Lines(Settings):
    """Whole non-blank lines, without their line ends: a share (`rate`) of them, or a `count` (default 1)."""

    kind: Literal["lines"]
    rate: Share | None = None
    count: Count | None = None

    @model_validator(mode="after")
    def _one_amount(self) -> Lines:
        if self.rate is not None and self.count is not None:
            raise ValueError("task.mask: give rate or count of lines, not both")
        return self


class Sentences(Settings):
    """Whole sentences: the inner ones (`middle`), `count` random ones (`random`), or those of the listed indices.

    With a column `sentences`, a row is a list of sentences, joined by `separator`; else the text is split after . ! and ?.
    The white space before a sentence is hidden with it, and adjacent sentences become one hole.
    """

    kind: Literal["sentences"]
    which: Literal["middle", "random"] | Annotated[tuple[int, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        "middle"
    )
    count: Count = 1
    separator: str = " "


class SpanFraction(Settings):
    """One span of `fraction` of the tokens (rounded, at least one), at a random place."""

    kind: Literal["span_fraction"]
    fraction: Share = 0.5


class Given(Settings):
    """The nulls of the row's own `tokens`."""

    kind: Literal["given"]


Mask = Annotated[Marker | Random | Spans | Lines | Sentences | SpanFraction | Given, Field(discriminator="kind")]


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


Spelling = Annotated[str, Field(min_length=1)]


class Fim(Settings):
    """The special tokens with which a causal model fills in the middle, as its tokenizer spells them.

    `psm` is prefix P suffix S middle, `spm` is suffix S prefix P middle, where P is the text before the hole and S the text
    after it; only `spm` works without a middle token. `ends` end a hole, as do the model's end tokens and the other tokens here.
    """

    prefix: Spelling
    suffix: Spelling
    middle: Spelling | None = None
    order: Literal["psm", "spm"] = "psm"
    ends: Annotated[tuple[Spelling, ...], BeforeValidator(_one_or_more)] = ()

    @model_validator(mode="after")
    def _psm_has_a_middle(self) -> Fim:
        if self.order == "psm" and self.middle is None:
            raise ValueError(
                "task.fim.middle: null is allowed only with order spm; order psm ends the prompt with this token"
            )
        return self


class Infill(Settings):
    """Fill the holes that the mask makes in each row.

    A causal model fills them from left to right, each until an end token or `max_new_tokens`; `fim` gives the special tokens
    of its prompts, `auto` finds them in its tokenizer.

    With `skip_special_tokens`, the texts leave out generated special tokens; `tokens` keeps them.
    """

    reads: ClassVar[tuple[str, ...]] = ("text", "prompt")
    goal: ClassVar[str] = "to generate"
    done: ClassVar[str] = "generated"
    kind: Literal["infill"]
    mask: Mask
    fim: Literal["auto"] | Fim = "auto"
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] | None = None
    skip_special_tokens: bool = True


def _visible(text: str) -> str:
    if "\ufffd" in text:
        raise ValueError("task.stop: U+FFFD stands for invalid bytes; it is not allowed in a stop string")
    return text


Stop = Annotated[str, Field(min_length=1), AfterValidator(_visible)]


def _as_date(value: Any) -> Any:
    """A date from the text of a plan; YAML has dates of its own."""
    try:
        return date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"{value!r} is not a date; allowed: YEAR-MONTH-DAY, such as 2026-11-23") from None


def today() -> date:
    """The date in UTC, which is the same in every time zone."""
    return datetime.now(UTC).date()


Day = Annotated[date | None, BeforeValidator(_as_date)]


class Complete(Settings):
    """Continue each row's prompt by up to `max_new_tokens` tokens, until an end token or one of the `stop` strings.

    With `ignore_eos`, end tokens have no special meaning. With `skip_special_tokens`, the text leaves out special tokens, and
    stop strings are searched in the remaining text; `tokens` keeps them. With `chat`, the prompt is a conversation, or one
    user message, rendered with the tokenizer's chat template; `chat_date` is the date that the template sees, null for that of
    the plan.
    """

    reads: ClassVar[tuple[str, ...]] = ("prompt", "text", "messages")
    goal: ClassVar[str] = "to generate, at most"
    done: ClassVar[str] = "generated"
    kind: Literal["complete"]
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] = 128
    stop: Annotated[tuple[Stop, ...], BeforeValidator(_one_or_more)] = ()
    ignore_eos: bool = False
    chat: bool = False
    chat_date: Day = None
    skip_special_tokens: bool = True


class Score(Settings):
    """Log-probabilities of each row's text, of its completion after its prompt, or of what a `mask` hides of its text.

    `chat` and `chat_date` as in Complete. `estimate` is for models whose scores are estimates; null takes its defaults.
    """

    reads: ClassVar[tuple[str, ...]] = ("text", "prompt", "completion", "messages")
    goal: ClassVar[str] = "to score"
    done: ClassVar[str] = "scored"
    kind: Literal["score"]
    chat: bool = False
    chat_date: Day = None
    mask: Mask | None = None
    estimate: Estimate | None = None


Task = Infill | Complete | Score
