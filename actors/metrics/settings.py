"""The settings of all metrics (`metrics:` in a spec, `--metric` on the command line). Pydantic only.

A metric is written as a name (`rouge`, `rougeL`, `pass@10`), as a Python file of one's own (`my_metric.py`), or as a mapping
with a `kind` and settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from draftmill.actors.task import as_tuple
from draftmill.decoders.common_settings import MODEL, Dtype, PathMark, Settings
from draftmill.storage.stores.store import is_local

Column = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.@-]*$", max_length=100)]


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("a value is listed twice")
    return values


Orders = Annotated[
    tuple[Annotated[int, Field(ge=1, le=16)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(_once),
    Field(min_length=1),
]


Better = Literal["higher", "lower"]


class MetricBase(Settings):
    """What every metric has: `name` is the column of a metric with one column, else the beginning of its columns' names.

    `needs_reference` and `needs_text` say what a row must have. Settings in `changes_nothing` don't decide values. `better` says
    which values are the better ones, None if that depends on the purpose.
    """

    needs_reference: ClassVar[bool] = False
    needs_text: ClassVar[bool] = True
    changes_nothing: ClassVar[frozenset[str]] = frozenset({"name"})
    better: ClassVar[Better | None] = None
    is_proportion: ClassVar[bool] = False
    """Whether a value is 0 or 1, and the mean a share of samples."""

    name: Column | None = Field(default=None, description="the metric's column, or the beginning of its columns' names")

    @property
    def shown(self) -> str:
        """The metric in messages."""
        return self.name or str(getattr(self, "kind", ""))

    def own_columns(self) -> tuple[str, ...]:
        """The columns' names if the spec gives none: the kind of a metric with one column."""
        return (str(getattr(self, "kind", "")),)

    def columns(self) -> tuple[str, ...]:
        """The columns that the metric writes."""
        own = self.own_columns()
        if self.name is None:
            return own
        return (self.name,) if len(own) == 1 else tuple(f"{self.name}_{column}" for column in own)

    def estimates(self) -> dict[str, dict[str, Any]]:
        """The columns that are estimates over all samples of a row; see draftmill.storage.runs.metric_files.MeasuredMetric."""
        return {}

    def kept_columns(self) -> tuple[str, ...]:
        """The columns of the inputs that it reads from `keep`, besides the reference."""
        return ()


class ReferenceMetric(MetricBase):
    """A metric that compares the text with references."""

    needs_reference: ClassVar[bool] = True
    better: ClassVar[Better | None] = "higher"


class ExactMatch(ReferenceMetric):
    """1 if the text equals a reference, else 0: as they are, normalised as for SQuAD, or by the last number as for GSM8K."""

    is_proportion: ClassVar[bool] = True
    kind: Literal["exact_match", "normalised_match", "number_match"]


RougeType = Annotated[str, Field(pattern=r"^rouge([1-9]|L|Lsum)$")]
RougeTypes = Annotated[tuple[RougeType, ...], BeforeValidator(as_tuple), AfterValidator(_once), Field(min_length=1)]


class Rouge(ReferenceMetric):
    """The F of ROUGE of the text against the reference, by the package rouge-score; of several references the best counts."""

    kind: Literal["rouge"]
    types: RougeTypes = Field(default=("rouge1", "rouge2", "rougeL"), description="each is a column")
    stemmer: bool = Field(default=False, description="compare words by their stems")
    words: Literal["ascii", "unicode"] = Field(default="ascii", description="ascii drops all letters but a to z")

    def own_columns(self) -> tuple[str, ...]:
        return self.types

    def columns(self) -> tuple[str, ...]:
        return self.types if self.name is None else tuple(f"{self.name}_{kind}" for kind in self.types)


class Bleu(ReferenceMetric):
    """BLEU of the text as one sentence, 0 to 100, by sacrebleu (effective order, exponential smoothing)."""

    kind: Literal["bleu"]
    tokenize: Literal["13a", "intl", "char", "none"] = Field(default="13a", description="sacrebleu's tokenizer")


class Chrf(ReferenceMetric):
    """chrF of the text as one sentence, 0 to 100, by sacrebleu."""

    kind: Literal["chrf"]
    word_order: Annotated[int, Field(ge=0, le=4)] = Field(default=0, description="2 is chrF++")


class EditSimilarity(ReferenceMetric):
    """1 - Levenshtein distance / length of the longer one, over characters or words; of several references the best."""

    kind: Literal["edit_similarity"]
    over: Literal["characters", "words"] = Field(default="characters", description="what is compared")


class Distinct(MetricBase):
    """Different n-grams / all n-grams of the text (Li et al. 2016), over words or generated tokens."""

    kind: Literal["distinct"]
    n: Orders = Field(default=(1, 2), description="lengths of the n-grams")
    over: Literal["words", "tokens"] = Field(default="words", description="what n-grams consist of")

    def own_columns(self) -> tuple[str, ...]:
        return tuple(f"distinct_{n}" for n in self.n)

    def columns(self) -> tuple[str, ...]:
        return self.own_columns() if self.name is None else tuple(f"{self.name}_{n}" for n in self.n)


class Entropy(MetricBase):
    """The entropy in nats of the frequencies of the sample's own tokens (or words): low for repetitive texts."""

    needs_text: ClassVar[bool] = False
    kind: Literal["entropy"]
    over: Literal["tokens", "words"] = Field(default="tokens", description="what is counted")


class Length(MetricBase):
    """The number of generated (or scored) tokens, and of the text's characters and words."""

    needs_text: ClassVar[bool] = False
    kind: Literal["length"]

    def own_columns(self) -> tuple[str, ...]:
        return ("length_tokens", "length_characters", "length_words")


class Judge(MetricBase):
    """The log-probability and the perplexity of the text under another causal model, the judge.

    The text is tokenized and scored as `task: score` does.
    """

    changes_nothing: ClassVar[frozenset[str]] = frozenset({"name", "model", "revision"})
    kind: Literal["judge"]
    model: Annotated[str, Field(min_length=1), MODEL] = Field(description="the judge, found as model.path is")
    revision: str | None = Field(default=None, description="of a hub model")
    prompt: Column | None = Field(default=None, description="a kept column with the text before the sample's")
    dtype: Dtype = Field(default="auto", description="as in model.dtype")

    def own_columns(self) -> tuple[str, ...]:
        return ("judge_logprob", "judge_perplexity", "judge_tokens")

    def columns(self) -> tuple[str, ...]:
        return tuple(f"{self.name or 'judge'}_{part}" for part in ("logprob", "perplexity", "tokens"))

    def kept_columns(self) -> tuple[str, ...]:
        return () if self.prompt is None else (self.prompt,)


Ks = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100_000)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(_once),
    Field(min_length=1),
]
HUMANEVAL: Final = "{prompt}{text}\n{test}\ncheck({entry_point})\n"
PLACE: Final = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_.]*)\}\}|\{([A-Za-z_][A-Za-z0-9_.]*)\}")
"""A place of a program's template; in double braces it is just the name in braces."""


class PassAtK(MetricBase):
    """The probability that one of k samples of a row passes its tests, estimated from all samples of the row.

    `program` is Python: `{text}` stands for the sample's text, `{NAME}` for a kept column of the inputs, and `{{NAME}}` for
    {NAME}; the sample passes if the program runs to its end. It runs in a sandbox, and only with `allow_code_execution: true`.
    """

    changes_nothing: ClassVar[frozenset[str]] = frozenset({"name", "allow_code_execution"})
    better: ClassVar[Better | None] = "higher"
    is_proportion: ClassVar[bool] = True
    kind: Literal["pass_at_k"]
    k: Ks = Field(default=(1,), description="the k of pass@k, at most sampling.n")
    program: Annotated[str, Field(min_length=1)] = Field(default=HUMANEVAL, description="Python with {text} and {NAME}")
    code: Literal["as_is", "fenced"] = Field(default="as_is", description="fenced: only the first ``` block")
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = Field(default=10.0, description="seconds")
    processes: Annotated[int, Field(ge=0, le=256)] = Field(default=0, description="how many processes it may start")
    allow_code_execution: bool = Field(default=False, description="required: true")

    @field_validator("program")
    @classmethod
    def _has_the_text(cls, program: str) -> str:
        if not any(name == "text" for _, name in PLACE.findall(program)):
            raise ValueError("the program does not contain {text}, the place of the sample's text")
        return program

    def places(self) -> tuple[str, ...]:
        """The names in braces in the program, `text` included."""
        return tuple(dict.fromkeys(name for _, name in PLACE.findall(self.program) if name))

    def own_columns(self) -> tuple[str, ...]:
        return ("passed", *(f"pass@{k}" for k in self.k))

    def estimates(self) -> dict[str, dict[str, Any]]:
        first, *rest = self.columns()
        return {column: {"of": first, "k": k} for column, k in zip(rest, self.k, strict=True)}

    def kept_columns(self) -> tuple[str, ...]:
        return tuple(place for place in self.places() if place != "text")


class OwnMetric(MetricBase):
    """A metric of one's own: a Python file with a function `measure(row)`; docs/metrics.md says what it gets and returns."""

    needs_text: ClassVar[bool] = False
    changes_nothing: ClassVar[frozenset[str]] = frozenset({"name", "path"})
    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1), PathMark()] = Field(description="the Python file")
    values: Annotated[tuple[Column, ...], BeforeValidator(as_tuple), AfterValidator(_once)] = Field(
        default=(), description="keys of the dict that it returns"
    )
    reference: bool = Field(default=False, description="refuse runs without references")

    @model_validator(mode="after")
    def _is_a_file(self) -> OwnMetric:
        if not is_local(self.path) or not self.path.endswith(".py"):
            raise ValueError(f"{self.path!r} is not allowed; allowed: the path of a Python file (.py) on this machine")
        if not self.values and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.@-]*", self._stem()) and self.name is None:
            raise ValueError(f"{self.path!r} gives no name for a column; name it with `name`")
        return self

    def _stem(self) -> str:
        return self.path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")

    @property
    def shown(self) -> str:
        return self.name or self.path

    def own_columns(self) -> tuple[str, ...]:
        return self.values or (self._stem(),)


Metric = (
    ExactMatch | Rouge | Bleu | Chrf | EditSimilarity | Distinct | Entropy | Length | Judge | PassAtK | OwnMetric
)  # fmt: skip
"""Any metric's settings."""

KINDS: Final[Mapping[str, type[MetricBase]]] = {
    kind: metric for metric in get_args(Metric) for kind in get_args(metric.model_fields["kind"].annotation)
}
"""The settings class of each kind."""

_HIGHER = ("acc", "bleu", "chrf", "edit_similarity", "is_greedy", "logprob", "pass", "rouge")
_LOWER = ("perplexity", "bits_per_byte")


def better_of(kind: str | None, column: str) -> Better | None:
    """Which values of a metric's column are better, None if unknown. Of a judge and of one's own metrics, its name says it."""
    known = KINDS.get(kind or "")
    if known is not None and known not in {Judge, OwnMetric}:
        return known.better
    if any(part in column for part in _LOWER):
        return "lower"
    return "higher" if "match" in column or column.endswith("_logprob") or column.startswith(_HIGHER) else None


_PASS = re.compile(r"pass@(k|[1-9]\d{0,5})")


def needs_reference(metric: MetricBase) -> bool:
    """Whether the metric compares texts with references."""
    return type(metric).needs_reference or (isinstance(metric, OwnMetric) and metric.reference)


def as_mapping(value: Any, place: str) -> Any:
    """A metric as a mapping with a `kind`, from a name or a path; ValueError, led by `place`, if the name is not known."""
    if isinstance(value, MetricBase):
        return value
    if isinstance(value, Mapping):
        kind = value.get("kind")
        if not isinstance(kind, str):
            raise ValueError(f"{place}.kind: missing; allowed: {', '.join(KINDS)}")
        if kind not in KINDS:
            raise ValueError(f"{place}.kind: {_unknown(kind)}")
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: {value!r} is not a metric; allowed: a name, a Python file, or a mapping with a kind"
        )
    if value.endswith(".py"):
        return {"kind": "file", "path": value}
    if value in KINDS:
        return {"kind": value}
    if match := _PASS.fullmatch(value):
        return {"kind": "pass_at_k"} | ({} if match[1] == "k" else {"k": [int(match[1])]})
    if re.fullmatch(r"rouge([1-9]|L|Lsum)", value):
        return {"kind": "rouge", "types": [value]}
    if match := re.fullmatch(r"distinct_([1-9]|1[0-6])", value):
        return {"kind": "distinct", "n": [int(match[1])]}
    raise ValueError(f"{place}: {_unknown(value)}")


def as_metrics(value: Any) -> Any:
    """A list of metrics as mappings; see `as_mapping`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return tuple(as_mapping(metric, f"metrics.{index}") for index, metric in enumerate(value))


NAMES: Final = (*KINDS, "rouge1", "rouge2", "rougeL", "rougeLsum", "distinct_1", "distinct_2", "pass@1", "pass@k")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return f"{name[:80]!r} is not a metric{hint} allowed: {', '.join(KINDS)}, or a Python file"


def expand_metrics(metrics: Sequence[Metric]) -> list[tuple[int, Metric]]:
    """Each different metric once, with its place in the list; those that measure one thing per column, once per column.

    So `rouge` measured once covers a later `rougeL`.
    """
    expanded: list[tuple[int, Metric]] = []
    for index, metric in enumerate(metrics):
        parts: list[Metric] = [metric]
        if isinstance(metric, Rouge):
            parts = [metric.model_copy(update={"types": (kind,)}) for kind in metric.types]
        elif isinstance(metric, Distinct):
            parts = [metric.model_copy(update={"n": (n,)}) for n in metric.n]
        expanded += [(index, part) for part in parts if all(part != other for _, other in expanded)]
    return expanded


def clashing(metrics: Sequence[MetricBase]) -> tuple[int, str] | None:
    """The first metric with a column that an earlier one has, by its place in the list, and the column; None if none has."""
    seen: set[str] = {"id", "sample"}
    for index, metric in enumerate(metrics):
        for column in metric.columns():
            if column in seen:
                return index, column
            seen.add(column)
    return None


_OfKind = Annotated[Metric, Field(discriminator="kind")]
Metrics = Annotated[tuple[_OfKind, ...], BeforeValidator(as_metrics, json_schema_input_type=tuple[str | _OfKind, ...])]
"""The type of a spec's `metrics`."""
