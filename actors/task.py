"""The settings under `task:` and `input.columns`. Pure pydantic, no torch; jobs/config/spec.py embeds them.

They are in this package, next to the code that uses them (canvas.py), since workers need both and know nothing of jobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from draftmill.decoders.common_settings import Estimate, PathMark, Settings
from draftmill.storage.stores.fsspec_store import DRIVERS, UNSEEN

Side = Literal["left", "right", "middle"]
"""Which part of a prompt is cut off if the prompt is too long."""

Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MOST_NEW_TOKENS: Final = 2**20
"""Upper limit for max_new_tokens."""
NewTokens = Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def as_tuple(value: Any) -> Any:
    """Turn a list into a tuple: strict validation does not accept a list as a tuple, and YAML has only lists."""
    return tuple(value) if isinstance(value, list) else value


Spelling = Annotated[str, Field(min_length=1)]
INPUTS: Final = PathMark(("s3", "hf", *DRIVERS), reason=UNSEEN)
CONSTRAINTS: Final = ("regex", "choice", "json_schema", "grammar")


def _as_json(value: Any) -> Any:
    """An inline schema as text; the order of properties is that of the texts."""
    return json.dumps(value) if isinstance(value, Mapping) else value


class Columns(Settings):
    """Maps the project's columns to the file's columns; a column that is named must be in every row.

    If no column is named, the task reads its default columns (`reads`). A null in a column means the job's own value.
    """

    id: str | None = Field(default=None, description="a text or integer; else the column id or file:row")
    text: str | None = Field(default=None, description="the text; else the column text, else prompt")
    prompt: str | None = Field(default=None, description="the prompt (complete, score)")
    completion: str | None = Field(default=None, description="the text to score after the prompt (score)")
    messages: str | None = Field(default=None, description="a conversation (with chat)")
    prefix: str | None = Field(default=None, description="the text before the hole (marker)")
    suffix: str | None = Field(default=None, description="the text after the hole (marker)")
    spans: str | None = Field(default=None, description="[start, end) or {start, end} ranges of characters (spans)")
    sentences: str | None = Field(default=None, description="a list of texts (sentences)")
    reference: str | None = Field(default=None, description="what the generated text should be")
    seed: str | None = Field(default=None, description="a whole number in place of the job's seed")
    max_new_tokens: str | None = Field(default=None, description="in place of task.max_new_tokens")
    temperature: str | None = Field(default=None, description="in place of sampling.temperature")
    top_p: str | None = Field(default=None, description="in place of sampling.top_p; 1: none")
    top_k: str | None = Field(default=None, description="in place of sampling.top_k; 0: none")
    stop: str | None = Field(default=None, description="in place of task.stop; an empty list: none")
    constraint: str | None = Field(default=None, description="in place of task.constraint: an object or JSON text")
    tokens: str | None = Field(default=None, description="token ids, null where masked; else without nulls")
    system: str | None = Field(default=None, description="in place of prompt.system and of a conversation's own")
    template_kwargs: str | None = Field(default=None, description="an object, over chat.template_kwargs")

    @model_validator(mode="after")
    def _one_source(self) -> Columns:
        sources = {"text": self.text, "tokens": self.tokens, "sentences": self.sentences}
        sources["prefix/suffix"] = self.suffix if self.prefix is None else self.prefix
        names = [name for name, column in sources.items() if column is not None]
        if len(names) > 1:
            raise ValueError(f"input.columns: {' and '.join(names)} each give a row's content; name only one of them")
        return self

    def mapping(self) -> dict[str, str]:
        """The columns that the spec names: task column -> file column."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def has_own_settings(self) -> bool:
        """Whether a column holds the rows' own settings, other than the seed."""
        numbers = (self.max_new_tokens, self.temperature, self.top_p, self.top_k)
        own = (*numbers, self.stop, self.constraint, self.template_kwargs)
        return any(own)

    def to_read(self, task: Task) -> dict[str, str]:
        """The columns to read: the named ones, and the defaults that the task looks for if none is named."""
        return {name: name for name in ("id", *task.reads)} | self.mapping()


class ConstraintSettings(Settings):
    """What a generated text must match as a whole: exactly one of these."""

    regex: Spelling | None = Field(default=None, description="a regular expression for the whole text")
    choice: Annotated[tuple[Spelling, ...], BeforeValidator(as_tuple), Field(min_length=1)] | None = Field(
        default=None, description="one of these texts"
    )
    json_schema: Annotated[
        Annotated[Spelling, BeforeValidator(_as_json, json_schema_input_type=Spelling | dict[str, Any])] | None,
        PathMark(other=r"\s*\{[\s\S]*"),
    ] = Field(default=None, description="a JSON Schema, or a file that holds one")
    grammar: Spelling | None = Field(default=None, description="a Lark grammar (causal models)")
    ignore: Annotated[tuple[Spelling, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="keywords of the schema that are not enforced"
    )
    name: Spelling | None = Field(default=None, description="its name in the results; null: its kind")

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def shown(self) -> str:
        """What the results call it."""
        return f"{self.name or self.kind}{' without ' if self.ignore else ''}{' and '.join(self.ignore)}"

    @model_validator(mode="after")
    def _one_kind(self) -> ConstraintSettings:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a constraint has {' and '.join(given) or 'no kind'}; allowed: one of {', '.join(CONSTRAINTS)}"
            )
        if self.ignore and self.json_schema is None:
            raise ValueError("ignore: is for keywords of a json_schema; allowed: leave it out")
        return self


def _form_of(value: Any) -> str:
    """Which form a constraint has: one for all holes, a list with one a hole, or names for markers to refer to."""
    if isinstance(value, list | tuple):
        return "list"
    if not isinstance(value, Mapping) or value.keys() & set(CONSTRAINTS):
        return "one"
    return (
        "named" if value and all(isinstance(each, Mapping | ConstraintSettings) for each in value.values()) else "one"
    )


Constraints = Annotated[
    Annotated[ConstraintSettings, Tag("one")]
    | Annotated[tuple[ConstraintSettings | None, ...], BeforeValidator(as_tuple), Field(min_length=1), Tag("list")]
    | Annotated[dict[str, ConstraintSettings], Tag("named")],
    Discriminator(_form_of),
]
"""One for all holes; or a list, one a hole, null for none; or names, to which the markers of holes refer."""


AUTO_LENGTHS: Final = (1, 32)
MOST_LENGTHS: Final = 256
"""The lengths that `auto` tries, and how many may be tried for a hole."""


class LengthRange(Settings):
    """The lengths of a hole of unknown length."""

    min: Count = Field(default=1, description="fewest tokens")
    max: Count = Field(description="most tokens")

    @model_validator(mode="after")
    def _in_order(self) -> LengthRange:
        if not self.min <= self.max < self.min + MOST_LENGTHS:
            raise ValueError(
                f"task.mask.length: {{min: {self.min}, max: {self.max}}}; allowed: min up to max, at most {MOST_LENGTHS} lengths"
            )
        return self


class Marker(Settings):
    """Each occurrence of `marker` in the text is a hole of `length` tokens; with prefix and suffix columns, what is between."""

    kind: Literal["marker"]
    marker: str = Field(default="<mask>", min_length=1, description="the text of a hole")
    length: Count | Literal["auto"] | LengthRange = Field(
        default=8, description="tokens of a hole; {min, max}: the model finds how many; auto: 1 to 32"
    )
    bias: Annotated[tuple[float, float, float, float, float], BeforeValidator(as_tuple)] | None = Field(
        default=None, description="masked models, open lengths: a, b, c, d, e of CAL; null: those published for LLaDA"
    )

    @field_validator("bias")
    @classmethod
    def _positive(cls, bias: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if bias is not None and (min(bias[0], bias[2], bias[4]) < 0 or not any(bias[::2])):
            raise ValueError(f"task.mask.bias: {list(bias)}; allowed: a, c and e of at least 0, not all of them 0")
        return bias

    @property
    def lengths(self) -> tuple[int, int]:
        """The fewest and the most tokens of a hole whose marker does not say them."""
        if isinstance(self.length, LengthRange):
            return self.length.min, self.length.max
        return AUTO_LENGTHS if self.length == "auto" else (self.length, self.length)


class Random(Settings):
    """A share of the tokens: the `rate * tokens` positions (rounded, at least one) with the least noise."""

    kind: Literal["random"]
    rate: Share = Field(default=0.5, description="share of the tokens")


class Spans(Settings):
    """`count` separate spans of `length` tokens (1 of 16), or, with a column `spans`, the row's own [start, end) characters."""

    kind: Literal["spans"]
    count: Count | None = Field(default=None, description="number of spans; null: 1")
    length: Count | None = Field(default=None, description="tokens of a span; null: 16")


class Lines(Settings):
    """Whole non-blank lines, without their line ends: a share (`rate`) of them, or a `count` (default 1)."""

    kind: Literal["lines"]
    rate: Share | None = Field(default=None, description="share of the lines")
    count: Count | None = Field(default=None, description="number of lines")

    @model_validator(mode="after")
    def _one_amount(self) -> Lines:
        if self.rate is not None and self.count is not None:
            raise ValueError("task.mask: give rate or count of lines, not both")
        return self


class Sentences(Settings):
    """Whole sentences: the inner ones (`middle`), `count` random ones (`random`), or those of the listed indices.

    The white space before a sentence is hidden with it, and adjacent sentences become one hole.
    """

    kind: Literal["sentences"]
    which: Literal["middle", "random"] | Annotated[tuple[int, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        Field(default="middle", description="which sentences are hidden")
    )
    count: Count = Field(default=1, description="number of random sentences")
    separator: str = Field(default=" ", description="the text between listed sentences")


class SpanFraction(Settings):
    """One span of `fraction` of the tokens (rounded, at least one), at a random place."""

    kind: Literal["span_fraction"]
    fraction: Share = Field(default=0.5, description="share of the tokens")


class Given(Settings):
    """The nulls of the row's own `tokens`."""

    kind: Literal["given"]


Mask = Annotated[Marker | Random | Spans | Lines | Sentences | SpanFraction | Given, Field(discriminator="kind")]


def one_or_more(value: Any) -> Any:
    """A text, or a list of texts, as a tuple."""
    return (value,) if isinstance(value, str) else as_tuple(value)


Spellings = Annotated[
    tuple[Spelling, ...], BeforeValidator(one_or_more, json_schema_input_type=Spelling | tuple[Spelling, ...])
]


class Fim(Settings):
    """The special tokens with which a causal model fills in the middle, as its tokenizer spells them."""

    prefix: Spelling = Field(description="the token of the text before the hole, P")
    suffix: Spelling = Field(description="the token of the text after the hole, S")
    middle: Spelling | None = Field(default=None, description="the token before the hole's text; optional with spm")
    order: Literal["psm", "spm"] = Field(default="psm", description="psm: prefix P suffix S middle; spm: S first")
    ends: Spellings = Field(default=(), description="more tokens that end a hole")

    @model_validator(mode="after")
    def _psm_has_a_middle(self) -> Fim:
        if self.order == "psm" and self.middle is None:
            reason = "null is allowed only with order spm; order psm ends the prompt with this token"
            raise ValueError(f"task.fim.middle: {reason}")
        return self


class Infill(Settings):
    """Fill the holes that the mask makes in each row; a causal model from left to right, each up to an end token."""

    reads: ClassVar[tuple[str, ...]] = ("text", "prompt")
    goal: ClassVar[str] = "to generate"
    done: ClassVar[str] = "generated"
    kind: Literal["infill"]
    mask: Mask = Field(description="which tokens are generated")
    fim: Literal["auto"] | Fim = Field(default="auto", description="the prompt's special tokens; auto: the tokenizer's")
    max_new_tokens: NewTokens | None = Field(default=None, description="causal models: most tokens a hole; null: 128")
    skip_special_tokens: bool = Field(default=True, description="leave special tokens out of the texts")
    constraint: Constraints | None = Field(default=None, description="what holes match: one, a list, or names")


def _visible(text: str) -> str:
    if "\ufffd" in text:
        raise ValueError("task.stop: U+FFFD stands for invalid bytes; it is not allowed in a stop string")
    return text


Stop = Annotated[str, Field(min_length=1), AfterValidator(_visible)]
Stops = Annotated[tuple[Stop, ...], BeforeValidator(one_or_more, json_schema_input_type=Stop | tuple[Stop, ...])]


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
    """Continue each row's prompt by up to `max_new_tokens` tokens, until an end token or one of the `stop` strings."""

    reads: ClassVar[tuple[str, ...]] = ("prompt", "text", "messages")
    goal: ClassVar[str] = "to generate, at most"
    done: ClassVar[str] = "generated"
    kind: Literal["complete"]
    max_new_tokens: NewTokens = Field(default=128, description="most generated tokens")
    stop: Stops = Field(default=(), description="texts that end generation; they may span tokens")
    ignore_eos: bool = Field(default=False, description="end tokens have no special meaning")
    chat: bool = Field(default=False, description="render the prompt with the tokenizer's chat template")
    chat_date: Day = Field(default=None, description="date for the template; null: logical date or plan's")
    skip_special_tokens: bool = Field(default=True, description="leave special tokens out of the text")
    constraint: ConstraintSettings | None = Field(default=None, description="what the text matches")


class Score(Settings):
    """Log-probabilities of each row's text, of its completion after its prompt, or of what a `mask` hides of its text."""

    reads: ClassVar[tuple[str, ...]] = ("text", "prompt", "completion", "messages")
    goal: ClassVar[str] = "to score"
    done: ClassVar[str] = "scored"
    kind: Literal["score"]
    chat: bool = Field(default=False, description="score the answer to a conversation")
    chat_date: Day = Field(default=None, description="as for complete")
    mask: Mask | None = Field(default=None, description="score what it hides, given the rest")
    estimate: Estimate | None = Field(default=None, description="how bounds are estimated; null: the defaults")


Task = Infill | Complete | Score

MOST_EXAMPLES: Final = 1000
"""Upper limit for prompt.examples.k."""


class Examples(Settings):
    """Few-shot examples: rows of a file, or rows that the spec has itself. A plan has the rows in place of the file."""

    path: Annotated[Spelling | None, INPUTS] = Field(default=None, description="a file or more, as in input.path")
    k: Annotated[int, Field(ge=1, le=MOST_EXAMPLES)] | None = Field(default=None, description="how many rows of it")
    seed: Seed | None = Field(default=None, description="draw them; null: the first k")
    rows: Annotated[tuple[dict[str, Any], ...], BeforeValidator(as_tuple), Field(min_length=1)] | None = Field(
        default=None, description="in place of path and k"
    )
    answer: Spelling | None = Field(
        default=None,
        description="column of the reply: examples become turns of the chat; null: the template shows them",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Examples:
        if (self.path is None) == (self.rows is None):
            raise ValueError("prompt.examples: give either path, with k, or rows")
        if self.rows is not None and (self.k, self.seed) != (None, None):
            raise ValueError("prompt.examples: k and seed choose rows of a file, but here are the rows themselves")
        return self


class Prompt(Settings):
    """How a row's columns become its prompt."""

    template: Spelling | None = Field(default=None, description="Jinja over the columns")
    system: Spelling | None = Field(default=None, description="a chat's system message, unless the row has one")
    examples: Examples | None = Field(default=None, description="few-shot examples")


class Chat(Settings):
    """How the tokenizer's chat template is rendered."""

    template_kwargs: dict[str, Any] = Field(default={}, description="its arguments, such as {enable_thinking: false}")


NO_PROMPT: Final = Prompt()
NO_CHAT: Final = Chat()
