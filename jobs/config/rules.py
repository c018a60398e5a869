"""Rules that join several keys of a spec. Pure.

A problem is a sentence that starts with the path of the key to change; one of metrics is a pair of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from draftmill.actors.metrics.settings import Metric, PassAtK, clashing, expand_metrics, needs_reference
from draftmill.actors.rows.chat import kwargs_problem
from draftmill.actors.rows.prompts import EXAMPLES, columns_of
from draftmill.actors.task import (
    Columns,
    Complete,
    Given,
    Infill,
    Lines,
    Marker,
    Mask,
    Prompt,
    Score,
    Sentences,
    SpanFraction,
    Spans,
    Task,
)
from draftmill.decoders.causal.settings import HeadDrafterSettings
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.settings import DECODERS, decoders_for, decoders_of
from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.paths import place_problem

if TYPE_CHECKING:
    from draftmill.jobs.config.spec import JobSpec

_READ_BY_ALL = ("id", "reference", "seed", "tokens")
_COMPLETE_COLUMNS = ("prompt", "text", "messages")
_OWN_SETTINGS = ("temperature", "top_p", "top_k", "max_new_tokens", "constraint", "stop")
_SCORE_COLUMNS = ("prompt", "text", "completion", "messages")
_INFILL_COLUMNS = ("text", "prefix", "suffix", "spans", "sentences")
_CHAT_COLUMNS = ("system", "template_kwargs")


def problems(spec: JobSpec) -> Iterator[str]:
    """What does not fit together in this spec. Only the first problem counts: later ones may follow from it."""
    decoder, mask = spec.decoder, getattr(spec.task, "mask", None)
    if problem := place_problem(spec):
        yield problem
    yield from _of_input(spec)
    yield from _of_chat(spec)
    yield from _of_prompt(spec)
    yield from _of_columns(spec)
    yield from _of_content(spec) if mask is None else _of_mask(mask, spec.input.columns)
    yield from _of_decoder(spec)
    if not decoder.is_open:
        baseline = decoder.baseline
        yield from _of_row_settings(spec, baseline)
        if isinstance(spec.task, Score):
            yield from _of_score(spec.task, spec.input.columns, baseline)
        if isinstance(spec.task, Infill):
            yield from _of_infill(spec, spec.task, baseline)
        yield from _of_constraint(spec, baseline)
    yield from _of_truncation(spec)
    yield from _of_sampling(spec)
    yield from _of_metrics(spec)
    yield from _of_workers(spec)
    yield from _of_model(spec)


def _has_tokenizer(spec: JobSpec) -> bool:
    return spec.model.tokenizer != "none"


def _of_input(spec: JobSpec) -> Iterator[str]:
    given = spec.input
    if None not in {given.path, given.run}:
        yield "input.run: the rows are those of a run or of input.path; use only one of them"
    for key in ("since", "dedupe"):
        if (value := getattr(given, key)) is None:
            continue
        if not has_date(spec.output.path) and spec.output.logical_date is None:
            yield (
                f"input.{key}: {value!r} needs a run directory for each date: write {{date:%Y-%m-%d}} in output.path "
                "(not in sweeps); allowed: null"
            )
        if given.limit is not None:
            yield (
                f"input.limit: {given.limit}, but input.{key} takes all that is new: rows beyond the limit would count "
                "as done; allowed: null"
            )
    if any(map(has_date, given.paths)):
        if given.since is not None:
            yield "input.since: input.path has a date, so each run reads the files of its own date; allowed: null"
        if given.dedupe is not None and given.columns.id is None:
            yield (
                "input.dedupe: input.path has a date, and rows without a column of ids have the same ids on each date; "
                "name the column in input.columns.id"
            )


def _of_chat(spec: JobSpec) -> Iterator[str]:
    prompt, columns, examples = spec.prompt, spec.input.columns, spec.prompt.examples
    if problem := kwargs_problem(spec.chat.template_kwargs):
        yield f"chat.template_kwargs: {problem}"
    of_chats = {
        "prompt.system": prompt.system,
        "prompt.examples.answer": examples and examples.answer,
        "chat.template_kwargs": spec.chat.template_kwargs,
        "input.columns.system": columns.system,
        "input.columns.template_kwargs": columns.template_kwargs,
    }
    for key, value in of_chats.items():
        if value and not getattr(spec.task, "chat", False):
            yield f"{key}: only a chat has a use for it; set task.chat: true, of complete or score"


def _of_prompt(spec: JobSpec) -> Iterator[str]:
    prompt, task, examples, names = spec.prompt, spec.task, spec.prompt.examples, tuple[str, ...]()
    if prompt.template is not None:
        try:
            names = columns_of(prompt.template)
        except ValueError as error:
            yield f"prompt.template: {error}"
        given: tuple[str, ...] = ("prompt", "messages")
        what = "prompt"
        if getattr(task, "mask", None) is not None:
            given, what = _INFILL_COLUMNS, "text"
        elif isinstance(task, Complete):
            given = _COMPLETE_COLUMNS
        for name in spec.input.columns.mapping():
            if name in {"tokens", *given}:
                yield f"input.columns.{name}: prompt.template gives the {what} of a row; use only one of them"
    if examples is None:
        return
    if examples.path is not None and examples.k is None:
        yield "prompt.examples.k: missing; it says how many rows of the file are examples"
    if examples.answer is None and EXAMPLES not in names:
        yield (
            f"prompt.examples: prompt.template must have a loop over `{EXAMPLES}` to show them; or, in a chat, name the column "
            "of their replies in prompt.examples.answer"
        )
    if examples.answer is not None and EXAMPLES in names:
        yield f"prompt.examples.answer: makes turns of the chat of the examples, but prompt.template reads `{EXAMPLES}`, too"


def _of_columns(spec: JobSpec) -> Iterator[str]:
    used = {
        "infill": (*_INFILL_COLUMNS, *_OWN_SETTINGS[:-1]),
        "complete": (*_COMPLETE_COLUMNS, *_OWN_SETTINGS, *_CHAT_COLUMNS),
        "score": (*_SCORE_COLUMNS, *_CHAT_COLUMNS),
        "score with task.mask": _INFILL_COLUMNS,
    }
    task, columns = spec.task, spec.input.columns
    kind = "score with task.mask" if isinstance(task, Score) and task.mask is not None else task.kind
    for name in columns.mapping():
        if name not in _READ_BY_ALL and name not in used[kind]:
            others = ", ".join(kind for kind, columns in used.items() if name in columns)
            yield f"input.columns.{name}: the task {kind!r} does not use it; used by: {others}"
    if not columns.tokens and not _has_tokenizer(spec):
        yield "model.tokenizer: 'none' needs rows that give their tokens; name their column in input.columns.tokens"


def _of_mask(mask: Mask, columns: Columns) -> Iterator[str]:
    named = columns.mapping()
    if isinstance(mask, Given) and "tokens" not in named:
        yield "input.columns.tokens: mask kind 'given' needs the column that holds each row's tokens"
    if "tokens" in named and isinstance(mask, Marker | Lines | Sentences):
        yield f"task.mask.kind: {mask.kind!r} needs text, but the rows give tokens; allowed: given, random, spans, span_fraction"
    for name, kind in (("prefix", Marker), ("suffix", Marker), ("spans", Spans), ("sentences", Sentences)):
        if name in named and not isinstance(mask, kind):
            (allowed,) = get_args(kind.model_fields["kind"].annotation)
            yield f"input.columns.{name}: mask kind {mask.kind!r} does not use it; {allowed!r} does"
    if isinstance(mask, Spans) and "spans" in named:
        if mask.count is not None or mask.length is not None:
            yield "task.mask: count and length are for random spans, but input.columns.spans gives each row its own"
        if "tokens" in named:
            yield "input.columns.spans: ranges of characters need text, but the rows give tokens"


def _of_content(spec: JobSpec) -> Iterator[str]:
    """Rows without holes give one prompt, or one text to score."""
    task, columns, named = spec.task, spec.input.columns, spec.input.columns.mapping()
    is_chat = getattr(task, "chat", False)
    if "messages" in named and not is_chat:
        yield "input.columns.messages: only a chat has messages; set task.chat: true, or name input.columns.prompt"
    if "tokens" in named and is_chat:
        yield "task.chat: a chat is made of text, but the rows give tokens"
    if not _has_tokenizer(spec) and (columns.stop is not None or getattr(task, "stop", None)):
        key = "task.stop" if columns.stop is None else "input.columns.stop"
        yield f"{key}: stop strings are searched in text, which needs a tokenizer; model.tokenizer is 'none'"
    # A row can have only one column of each group.
    groups: list[tuple[str, ...]] = [("prompt", "messages"), ("text", "completion")]
    if "tokens" in named:
        groups = [("tokens", *_SCORE_COLUMNS)]
    elif isinstance(task, Complete):
        groups = [_COMPLETE_COLUMNS]
    for group in groups:
        if len(names := [name for name in named if name in group]) > 1:
            yield f"input.columns: {' and '.join(names)} each give a row's content; name only one of them"


def _of_decoder(spec: JobSpec) -> Iterator[str]:
    task, decoder = spec.task, spec.decoder
    if decoder.kind not in (allowed := decoders_for(task.kind)):
        yield f"decoder.kind: {decoder.kind!r} does not run the task {task.kind!r}; allowed: {', '.join(allowed)}"
    if getattr(decoder.baseline, "suppress_end", False) and (not isinstance(task, Complete) or task.ignore_eos):
        yield "decoder.suppress_end: true, but only completions without task.ignore_eos have end tokens; allowed: false"


def _of_row_settings(spec: JobSpec, decoder: DecoderChoice) -> Iterator[str]:
    columns = spec.input.columns
    if isinstance(spec.task, Infill) and columns.max_new_tokens is not None and decoder.runs_on != "causal":
        yield _of_causal_models("input.columns.max_new_tokens", decoder)
    for name in ("temperature", "top_p", "top_k"):
        if getattr(columns, name) is not None and not decoder.draws_by_row:
            yield (
                f"input.columns.{name}: decoder {decoder.name()!r} uses sampling.{name} for all rows; "
                f"decoders that use each row's own: {', '.join(sorted(_having(lambda choice: choice.draws_by_row)))}"
            )


def _of_causal_models(key: str, decoder: DecoderChoice) -> str:
    return (
        f"{key}: the decoder {decoder.name()!r} does not use it, since the mask fixes the lengths of its holes; "
        f"used by: {', '.join(decoders_of('causal'))}"
    )


def _having(has: Callable[[type[DecoderChoice]], object]) -> Iterator[str]:
    """The kinds of the decoders that have something."""
    return (kind for kind, choice in DECODERS.items() if has(choice))


def _of_score(task: Score, columns: Columns, decoder: DecoderChoice) -> Iterator[str]:
    if task.mask is not None:
        if not decoder.scores_any:
            able = ", ".join(_having(lambda choice: "score" in choice.tasks and choice.scores_any))
            yield (
                f"task.mask: the decoder {decoder.name()!r} scores a text from left to right, so it can't see what follows a "
                f"hole; allowed: null, or one of the decoders {able}"
            )
        if task.chat:
            yield "task.chat: true scores the answer to a prompt, task.mask what it hides of a text; allowed: only one of them"
        if isinstance(task.mask, Marker | Given) and columns.reference is None:
            yield (
                f"task.mask.kind: {task.mask.kind!r} marks holes whose text is not in the row's own; name the column with what "
                "belongs there in input.columns.reference"
            )
    if task.estimate is not None and not decoder.estimates:
        able = ", ".join(_having(lambda choice: "score" in choice.tasks and choice.estimates))
        yield (
            f"task.estimate: the decoder {decoder.name()!r} gives exact scores; allowed: null, or one of the decoders {able}"
        )
    if task.estimate is not None and task.estimate.kind not in {"auto", *decoder.estimates}:
        yield (
            f"task.estimate.kind: {task.estimate.kind!r} is not for decoder {decoder.name()!r}; "
            f"allowed: {', '.join(sorted({'auto', *decoder.estimates}))}"
        )


def _of_infill(spec: JobSpec, task: Infill, decoder: DecoderChoice) -> Iterator[str]:
    mask = task.mask
    if decoder.runs_on == "causal":
        if not isinstance(mask, Marker | Spans | Lines | SpanFraction):
            yield (
                f"task.mask.kind: {mask.kind!r} makes holes that a causal model can't fill one after another; "
                f"allowed with the decoder {decoder.name()!r}: marker, spans, lines, span_fraction"
            )
        if not _has_tokenizer(spec):
            yield "model.tokenizer: a causal model needs its tokenizer's special tokens to fill a hole; 'none' does not work here"
        return
    for key in ("fim", "max_new_tokens"):
        if getattr(task, key) != Infill.model_fields[key].default:
            yield _of_causal_models(f"task.{key}", decoder)
    if isinstance(mask, Marker) and mask.lengths[0] < mask.lengths[1] and not decoder.finds_lengths:
        able = ", ".join(_having(lambda choice: choice.finds_lengths))
        yield f"task.mask.length: decoder {decoder.name()!r} can't find lengths; allowed: a number, or a decoder among {able}"
    if isinstance(mask, Marker) and mask.bias is not None and decoder.runs_on != "masked":
        yield f"task.mask.bias: decoder {decoder.name()!r} finds lengths without it; allowed: null"


def _of_constraint(spec: JobSpec, decoder: DecoderChoice) -> Iterator[str]:
    task, columns = spec.task, spec.input.columns
    given = getattr(task, "constraint", None)
    if given is None and columns.constraint is None:
        return
    key = "input.columns.constraint" if given is None else "task.constraint"
    if not _has_tokenizer(spec):
        yield f"{key}: a constraint is about text, which needs a tokenizer; model.tokenizer is 'none'"
    if getattr(task, "stop", ()) or columns.stop is not None:
        yield f"{key}: stop strings would cut a text before it matches; allowed: no task.stop and no input.columns.stop"
    if getattr(decoder, "tau_edit", None) is not None:
        yield f"{key}: with decoder.tau_edit tokens that matched may be replaced; allowed: decoder.tau_edit null"
    has_markers = isinstance(task, Infill) and isinstance(task.mask, Marker) and not (columns.prefix or columns.suffix)
    if isinstance(given, dict) and not has_markers:
        yield f"{key}: names are for the markers of holes, and only task.mask.kind 'marker' has them; allowed: one, or a list"


def _of_truncation(spec: JobSpec) -> Iterator[str]:
    task, named = spec.task, spec.input.columns.mapping()
    if not spec.input.truncate or isinstance(task, Complete):
        return
    if task.mask is not None:
        yield (
            "input.truncate: texts with holes are never cut (a causal model sees as much text around a hole as fits); "
            "allowed: null"
        )
    has_prompt = getattr(task, "chat", False) or spec.prompt.template is not None
    if not has_prompt and not named.keys() & {"prompt", "reference"} and named.keys() & {"tokens", "text"}:
        yield "input.truncate: only a prompt can be cut, not the scored text, and these rows have no prompt; allowed: null"


def _of_sampling(spec: JobSpec) -> Iterator[str]:
    task, sampling = spec.task, spec.sampling
    if sampling.min_new_tokens and not isinstance(task, Complete):
        yield f"sampling.min_new_tokens: {sampling.min_new_tokens}, but only completions have end tokens to wait for; allowed: 0"
    if sampling.bans and (getattr(task, "constraint", None) or spec.input.columns.constraint):
        yield (
            f"sampling.{sampling.bans[0]}: bans tokens by what is known of the text, and task.constraint allows few: together "
            "they could leave none; allowed: only one of them"
        )
    for key in ("logit_bias", "bad_words", "suppress_tokens"):
        texts = [given for given in getattr(sampling, key) if isinstance(given, str)]
        if texts and not _has_tokenizer(spec):
            yield f"sampling.{key}: {texts[0]!r} is a text, and model.tokenizer is 'none'; allowed: ids"
    if task.kind == "score" and sampling.n > 1:
        yield f"sampling.n: {sampling.n}, but the task 'score' draws nothing: a text has one score; allowed: 1"


def _of_metrics(spec: JobSpec) -> Iterator[str]:
    reference, _ = reference_of(spec.input.columns, spec.task, spec.kept, spec.prompt)
    fields = [f"metrics.{index}" for index in range(len(spec.metrics))]
    if problem := metric_problem(spec, spec.metrics, fields, kept=spec.kept, has_reference=reference is not None):
        yield ": ".join(problem)


def _of_workers(spec: JobSpec) -> Iterator[str]:
    counts = [shape.gpus_per_model for shape in spec.shapes]
    if len(set(counts)) > 1:
        yield (
            f"workers: gpus_per_model is {', '.join(map(str, counts))}; allowed: the same for all kinds of workers, "
            "since it changes how sums are rounded"
        )
    if counts[0] > 1 and isinstance(getattr(spec.decoder, "drafter", None), HeadDrafterSettings):
        yield (
            f"workers.gpus_per_model: {counts[0]}, but decoder.drafter.kind 'head' reads states of a model in one process; "
            "allowed: 1"
        )


def _of_model(spec: JobSpec) -> Iterator[str]:
    model, is_split = spec.model, spec.shapes[0].gpus_per_model > 1
    if model.exact and model.device == "cpu":
        if model.dtype in {"bfloat16", "float16"}:
            yield f"model.exact: true, but model.dtype is {model.dtype}; allowed on a CPU: auto, float32"
    elif model.exact:
        if model.dtype == "float64" and model.device != "auto":
            yield "model.exact: true, but model.dtype is float64; allowed on a GPU: auto, bfloat16, float16, float32"
        if is_split and any(shape.gpus != 0 for shape in spec.shapes):
            yield "model.exact: true, but workers.gpus_per_model is above 1: the sums of several GPUs are not fixed; allowed: 1"
    if model.weights == "auto":
        return
    if model.weights == "w8a8" and not spec.decoder.keeps_bits:
        yield (
            f"model.weights: w8a8, but decoder.kind is {spec.decoder.kind}, whose sums may differ from the baseline's in the "
            "last bits, which rows of 8 bits turn into other tokens; allowed: auto, int8, int4, fp8"
        )
    reasons = {
        "model.dtype is float64": model.dtype == "float64",
        "workers.gpus_per_model is above 1": is_split,
        "model.exact has other products on a GPU": model.exact and model.device.startswith("cuda"),
    }
    for reason, is_so in reasons.items():
        if is_so:
            yield f"model.weights: {model.weights}, but {reason}; allowed: auto"


# ---- metrics


Problem = tuple[str, str]


def kept_names(
    keep: Sequence[str], columns: Columns, task: Task, metrics: Sequence[Metric], prompt: Prompt
) -> tuple[str, ...]:
    """The input columns that travel into the results: those of `input.keep`, and the references.

    Without a column of references, metrics that need one compare a filled text with the text itself, which then travels, too.
    """
    names = list(keep)
    reference = columns.reference
    if reference is None and any(needs_reference(metric) for metric in metrics):
        reference = original_column(columns, task, prompt)
    if reference is not None and reference not in names:
        names.append(reference)
    return tuple(names)


def original_column(columns: Columns, task: Task, prompt: Prompt) -> str | None:
    """The column with the text as it was before its tokens were hidden; None if the rows do not have it."""
    if prompt.template is not None:
        return None
    if not isinstance(task, Infill) or isinstance(task.mask, Marker) or columns.tokens is not None:
        return None
    return columns.sentences or columns.text or "text"


def reference_of(
    columns: Columns, task: Task, kept: Collection[str], prompt: Prompt, named: str | None = None
) -> tuple[str | None, str | None]:
    """The kept column with the references, None if there is none, and what joins a text that is a list of sentences."""
    column = named or columns.reference
    if column is not None:
        return (column if column in kept else None), None
    column = original_column(columns, task, prompt)
    if column is None or column not in kept:
        return None, None
    mask = getattr(task, "mask", None)
    return column, mask.separator if column == columns.sentences and isinstance(mask, Sentences) else None


def metric_problem(
    spec: JobSpec, metrics: Sequence[Metric], fields: Sequence[str], *, kept: Collection[str], has_reference: bool
) -> Problem | None:
    """Why these metrics can't be measured on a job's results; None if they can. `fields` are the metrics' own paths."""
    parts = expand_metrics(metrics)
    if clash := clashing([part for _, part in parts]):
        index, column = clash
        place = fields[parts[index][0]]
        return place, f"the column {column!r} is already that of an earlier metric; give this one another `name`"
    for metric, place in zip(metrics, fields, strict=True):
        if not has_reference and needs_reference(metric):
            why = "needs references, and the results have none; name their column here before the run"
            return "input.columns.reference", f"the metric {metric.shown!r} {why}"
        if missing := [name for name in metric.kept_columns() if name not in kept]:
            names = ", ".join(kept) or "none"
            return (
                "input.keep",
                f"the metric {metric.shown!r} reads {', '.join(missing)}; columns in the results: {names}",
            )
        if metric.needs_text and not _has_tokenizer(spec):
            return place, f"{metric.shown} needs texts, and the results have none: model.tokenizer is none"
        if isinstance(metric, PassAtK) and not metric.allow_code_execution:
            reason = "pass_at_k runs code that a model wrote, in a sandbox (docs/guarantees.md); allowed: true"
            return f"{place}.allow_code_execution", reason
        if isinstance(metric, PassAtK) and max(metric.k) > (most := spec.sampling.n):
            return f"{place}.k", f"{max(metric.k)} is more than the samples of a row (sampling.n: {most})"
    return None
