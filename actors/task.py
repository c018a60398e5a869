"""What a task is: the settings under `task:` and `input.columns`. Pure pydantic, no torch; jobs/spec.py embeds them.

They live beside the code that carries them out (canvas.py), since workers need both and know nothing of jobs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from decoders.settings import Settings

Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

TASK_KINDS = ("infill",)
LATER_KINDS = ("complete", "score")
"""Kinds whose names are reserved: no decoder runs them yet."""

COLUMN_NAMES = ("id", "text", "prefix", "suffix", "spans", "sentences", "reference", "seed", "tokens")


def _as_tuple(value: Any) -> Any:
    # Strict validation takes no list for a tuple, and YAML has only lists.
    return tuple(value) if isinstance(value, list) else value


class Columns(Settings):
    """Which of the file's columns holds what; a column that is named must be in every row.

    Not named, the id is taken from a column `id` where a row has one, and the text from a column `text` or `prompt`. `prefix` and
    `suffix` stand in for the text: the hole lies between them. `reference` is for later comparison. `seed` replaces the
    job's seed for its row.
    """

    id: str | None = None
    text: str | None = None
    prefix: str | None = None
    suffix: str | None = None
    spans: str | None = None
    sentences: str | None = None
    reference: str | None = None
    seed: str | None = None
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
            raise ValueError(
                f"input.columns: {' and '.join(named)} each say what a row holds; only one of them may be named"
            )
        return self

    def named(self) -> dict[str, str]:
        """The columns that the spec names: task column -> file column."""
        return {name: value for name in COLUMN_NAMES if (value := getattr(self, name)) is not None}

    def wanted(self) -> dict[str, str]:
        """The columns worth reading: the named ones, and those that are used where nothing is named."""
        return {"id": "id", "text": "text", "prompt": "prompt"} | self.named()


class Marker(Settings):
    """Each occurrence of `marker` in the text is a hole of `length` tokens.

    A marker that ends in a bracket may carry its own length: `<mask:12>`. With prefix and suffix columns the one hole lies
    between them.
    """

    kind: Literal["marker"]
    marker: str = Field("<mask>", min_length=1)
    length: Count = 8


class Random(Settings):
    """A share of the tokens, chosen independently: the `rate * tokens` positions (rounded, at least one) of least noise."""

    kind: Literal["random"]
    rate: Share = 0.5


class Spans(Settings):
    """`count` separate spans of `length` tokens (1 of 16), or, with a column `spans`, the row's own [start, end) characters."""

    kind: Literal["spans"]
    count: Count | None = None
    length: Count | None = None


class Lines(Settings):
    """Whole lines, without their line ends: a `rate` of those that are not blank, or a `count` of them (default 1)."""

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

    With a column `sentences`, a row is a list of sentences, joined by `separator`; else the text is split behind . ! and ?.
    The white space in front of a sentence is hidden with it, and neighbours become one hole.
    """

    kind: Literal["sentences"]
    which: Literal["middle", "random"] | Annotated[tuple[int, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = (
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


def _known_kind(value: Any) -> Any:
    if value in LATER_KINDS:
        raise ValueError(f"task.kind: no decoder here runs {value!r} yet; kinds that run: {', '.join(TASK_KINDS)}")
    return value


class Infill(Settings):
    """Fill the holes that the mask leaves in each row."""

    kind: Annotated[Literal["infill"], BeforeValidator(_known_kind)]
    mask: Mask
