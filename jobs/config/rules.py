"""Checks that a task fits the columns of its rows and its decoder, and that metrics fit the job. Pure.

A problem of a task is a sentence that starts with the path of the key to change; one of metrics is a pair of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import get_args

from draftmill.actors.metrics.settings import Metric, PassAtK, clashing, expand_metrics, needs_reference
from draftmill.actors.rows.chat import kwargs_problem
from draftmill.actors.rows.prompts import EXAMPLES, columns_of
from draftmill.actors.task import (
    Chat,
    Columns,
    Complete,
    Examples,
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
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.settings import DECODERS, DecoderSettings, decoders_for, decoders_of

_READ_BY_ALL = ("id", "reference", "seed", "tokens")
_COMPLETE_COLUMNS = ("prompt", "text", "messages")
_OWN_SETTINGS = ("temperature", "top_p", "top_k", "max_new_tokens", "constraint", "stop")
_SCORE_COLUMNS = ("prompt", "text", "completion", "messages")
_INFILL_COLUMNS = ("text", "prefix", "suffix", "spans", "sentences")
_CHAT_COLUMNS = ("system", "template_kwargs")
_NO_TOKENIZER = "model.tokenizer: 'none' needs rows that give their tokens; name their column in input.columns.tokens"


def task_problem(task: Task, columns: Columns, decoder: DecoderSettings, *, has_tokenizer: bool) -> str | None:
    """Why this decoder can't do this task on rows with these columns; None if it can."""
    mask = None if isinstance(task, Complete) else task.mask
    return (
        _stray_column(task, columns.mapping())
        or (None if has_tokenizer or columns.tokens else _NO_TOKENIZER)
        or (None if mask is None else mask_problem(mask, columns))
        or (None if mask or isinstance(task, Infill) else prompt_problem(task, columns, has_tokenizer=has_tokenizer))
        or decoder_problem(task, decoder)
        or (
            None if decoder.is_open else _baseline_problem(task, columns, decoder.baseline, has_tokenizer=has_tokenizer)
        )
    )


def _baseline_problem(task: Task, columns: Columns, decoder: DecoderChoice, *, has_tokenizer: bool) -> str | None:
    """The same, as far as the model's kind decides it."""
    return (
        _own_settings_problem(task, columns, decoder)
        or (score_problem(task, columns, decoder) if isinstance(task, Score) else None)
        or (fim_problem(task, decoder, has_tokenizer=has_tokenizer) if isinstance(task, Infill) else None)
        or (length_problem(task, decoder) if isinstance(task, Infill) else None)
        or constraint_problem(task, columns, decoder, has_tokenizer=has_tokenizer)
    )


def constraint_problem(task: Task, columns: Columns, decoder: DecoderChoice, *, has_tokenizer: bool) -> str | None:
    """Why texts of this job can't have constraints; None if they can, or have none."""
    given = getattr(task, "constraint", None)
    if given is None and columns.constraint is None:
        return None
    key = "input.columns.constraint" if given is None else "task.constraint"
    if not has_tokenizer:
        return f"{key}: a constraint is about text, which needs a tokenizer; model.tokenizer is 'none'"
    if getattr(task, "stop", ()) or columns.stop is not None:
        return (
            f"{key}: stop strings would cut a text before it matches; allowed: no task.stop and no input.columns.stop"
        )
    if getattr(decoder, "tau_edit", None) is not None:
        return f"{key}: with decoder.tau_edit tokens that matched may be replaced; allowed: decoder.tau_edit null"
    has_markers = isinstance(task, Infill) and isinstance(task.mask, Marker) and not (columns.prefix or columns.suffix)
    if isinstance(given, dict) and not has_markers:
        return f"{key}: names are for the markers of holes, and only task.mask.kind 'marker' has them; allowed: one, or a list"
    return None


def decoder_problem(task: Task, decoder: DecoderSettings) -> str | None:
    """Why this decoder does not support this kind of task, or can't suppress its end tokens; None if it does."""
    allowed = decoders_for(task.kind)
    if decoder.kind not in allowed:
        return f"decoder.kind: {decoder.kind!r} does not run the task {task.kind!r}; allowed: {', '.join(allowed)}"
    if getattr(decoder.baseline, "suppress_end", False) and (not isinstance(task, Complete) or task.ignore_eos):
        return (
            "decoder.suppress_end: true, but only completions without task.ignore_eos have end tokens; allowed: false"
        )
    return None


def _own_settings_problem(task: Task, columns: Columns, decoder: DecoderChoice) -> str | None:
    """Why this decoder can't use the rows' own settings; None if it can, or if the rows have none."""
    if isinstance(task, Infill) and columns.max_new_tokens is not None and decoder.runs_on != "causal":
        return (
            f"input.columns.max_new_tokens: the decoder {decoder.name()!r} does not use it, since the mask fixes the lengths of "
            f"its holes; used by: {', '.join(decoders_of('causal'))}"
        )
    for name in ("temperature", "top_p", "top_k"):
        if getattr(columns, name) is not None and not decoder.draws_by_row:
            allowed = sorted(kind for kind, choice in DECODERS.items() if choice.draws_by_row)
            return (
                f"input.columns.{name}: decoder {decoder.name()!r} uses sampling.{name} for all rows; "
                f"decoders that use each row's own: {', '.join(allowed)}"
            )
    return None


def sampling_problem(task: Task, sampling: Sampling, columns: Columns, *, has_tokenizer: bool) -> str | None:
    """Why these sampling settings don't fit the task and its rows; None if they do."""
    if sampling.min_new_tokens and not isinstance(task, Complete):
        return f"sampling.min_new_tokens: {sampling.min_new_tokens}, but only completions have end tokens to wait for; allowed: 0"
    if sampling.bans and (getattr(task, "constraint", None) or getattr(columns, "constraint", None)):
        return (
            f"sampling.{sampling.bans[0]}: bans tokens by what is known of the text, and task.constraint allows few: together "
            "they could leave none; allowed: only one of them"
        )
    for key in ("logit_bias", "bad_words", "suppress_tokens"):
        texts = [given for given in getattr(sampling, key) if isinstance(given, str)]
        if texts and not has_tokenizer:
            return f"sampling.{key}: {texts[0]!r} is a text, and model.tokenizer is 'none'; allowed: ids"
    return None


def _stray_column(task: Task, named: dict[str, str]) -> str | None:
    """The problem with a named column that the task does not use; None if it uses all."""
    used = {
        "infill": (*_INFILL_COLUMNS, *_OWN_SETTINGS[:-1]),
        "complete": (*_COMPLETE_COLUMNS, *_OWN_SETTINGS, *_CHAT_COLUMNS),
        "score": (*_SCORE_COLUMNS, *_CHAT_COLUMNS),
        "score with task.mask": _INFILL_COLUMNS,
    }
    kind = "score with task.mask" if isinstance(task, Score) and task.mask is not None else task.kind
    for name in named:
        if name not in _READ_BY_ALL and name not in used[kind]:
            others = [kind for kind, columns in used.items() if name in columns]
            return f"input.columns.{name}: the task {kind!r} does not use it; used by: {', '.join(others)}"
    return None


def template_problem(prompt: Prompt, chat: Chat, task: Task, columns: Columns) -> str | None:
    """Why `prompt` or `chat` does not fit this task and these columns; None if both do."""
    if problem := _chat_problem(prompt, chat, task, columns):
        return problem
    names: tuple[str, ...] = ()
    if prompt.template is not None:
        try:
            names = columns_of(prompt.template)
        except ValueError as error:
            return f"prompt.template: {error}"
        given, what = _given_by_template(task)
        if clash := [name for name in columns.mapping() if name in given]:
            return f"input.columns.{clash[0]}: prompt.template gives the {what} of a row; use only one of them"
    return None if prompt.examples is None else _examples_problem(prompt.examples, names)


def _examples_problem(examples: Examples, names: Collection[str]) -> str | None:
    """Why these examples don't fit a template that reads these names; None if they do."""
    if examples.path is not None and examples.k is None:
        return "prompt.examples.k: missing; it says how many rows of the file are examples"
    if examples.answer is None and EXAMPLES not in names:
        return (
            f"prompt.examples: prompt.template must have a loop over `{EXAMPLES}` to show them; or, in a chat, name the column "
            "of their replies in prompt.examples.answer"
        )
    if examples.answer is not None and EXAMPLES in names:
        return f"prompt.examples.answer: makes turns of the chat of the examples, but prompt.template reads `{EXAMPLES}`, too"
    return None


def _chat_problem(prompt: Prompt, chat: Chat, task: Task, columns: Columns) -> str | None:
    if problem := kwargs_problem(chat.template_kwargs):
        return f"chat.template_kwargs: {problem}"
    of_chats = {
        "prompt.system": prompt.system,
        "prompt.examples.answer": prompt.examples and prompt.examples.answer,
        "chat.template_kwargs": chat.template_kwargs,
        "input.columns.system": columns.system,
        "input.columns.template_kwargs": columns.template_kwargs,
    }
    if getattr(task, "chat", False):
        return None
    stray = next((key for key, value in of_chats.items() if value), None)
    return (
        None if stray is None else f"{stray}: only a chat has a use for it; set task.chat: true, of complete or score"
    )


def _given_by_template(task: Task) -> tuple[tuple[str, ...], str]:
    """The columns whose place a template takes, and what they hold."""
    if isinstance(task, Infill) or (isinstance(task, Score) and task.mask is not None):
        return ("tokens", *_INFILL_COLUMNS), "text"
    return ("tokens", *(_COMPLETE_COLUMNS if isinstance(task, Complete) else ("prompt", "messages"))), "prompt"


def truncate_problem(task: Task, columns: Columns, *, has_template: bool = False) -> str | None:
    """Why long prompts of this task can't be truncated; None if they can."""
    if not isinstance(task, Complete) and task.mask is not None:
        return (
            "input.truncate: texts with holes are never cut (a causal model sees as much text around a hole as fits); "
            "allowed: null"
        )
    named = columns.mapping()
    given = named.keys() & {"prompt", "reference"}
    if (
        isinstance(task, Score)
        and not task.chat
        and not given
        and not has_template
        and ("tokens" in named or "text" in named)
    ):
        return "input.truncate: only a prompt can be cut, not the scored text, and these rows have no prompt; allowed: null"
    return None


# ---- infill


def mask_problem(mask: Mask, columns: Columns) -> str | None:
    """Why this mask can't be applied to rows with these columns; None if it can."""
    named = columns.mapping()
    if isinstance(mask, Given) and "tokens" not in named:
        return "input.columns.tokens: mask kind 'given' needs the column that holds each row's tokens"
    if "tokens" in named and isinstance(mask, Marker | Lines | Sentences):
        return f"task.mask.kind: {mask.kind!r} needs text, but the rows give tokens; allowed: given, random, spans, span_fraction"
    for name, kind in (("prefix", Marker), ("suffix", Marker), ("spans", Spans), ("sentences", Sentences)):
        if name in named and not isinstance(mask, kind):
            allowed = kind.model_fields["kind"].annotation
            return f"input.columns.{name}: mask kind {mask.kind!r} does not use it; {get_args(allowed)[0]!r} does"
    if isinstance(mask, Spans) and "spans" in named:
        if mask.count is not None or mask.length is not None:
            return "task.mask: count and length are for random spans, but input.columns.spans gives each row its own"
        if "tokens" in named:
            return "input.columns.spans: ranges of characters need text, but the rows give tokens"
    return None


def length_problem(task: Infill, decoder: DecoderChoice) -> str | None:
    """Why this decoder can't find the lengths of holes; None if it can, or need not."""
    mask = task.mask
    if not isinstance(mask, Marker) or decoder.runs_on == "causal":
        return None
    if mask.lengths[0] < mask.lengths[1] and not decoder.finds_lengths:
        allowed = ", ".join(kind for kind, choice in DECODERS.items() if choice.finds_lengths)
        return f"task.mask.length: decoder {decoder.name()!r} can't find lengths; allowed: a number, or a decoder among {allowed}"
    if mask.bias is not None and decoder.runs_on != "masked":
        return f"task.mask.bias: decoder {decoder.name()!r} finds lengths without it; allowed: null"
    return None


def fim_problem(task: Infill, decoder: DecoderChoice, *, has_tokenizer: bool) -> str | None:
    """Why a causal model's decoder can't fill this task's holes, or why another decoder can't use its keys; None if valid."""
    if decoder.runs_on != "causal":
        for key in ("fim", "max_new_tokens"):
            if getattr(task, key) != Infill.model_fields[key].default:
                return (
                    f"task.{key}: the decoder {decoder.name()!r} does not use it, since the mask fixes the lengths of its holes; "
                    f"used by: {', '.join(decoders_of('causal'))}"
                )
        return None
    if not isinstance(task.mask, Marker | Spans | Lines | SpanFraction):
        return (
            f"task.mask.kind: {task.mask.kind!r} makes holes that a causal model can't fill one after another; "
            f"allowed with the decoder {decoder.name()!r}: marker, spans, lines, span_fraction"
        )
    if not has_tokenizer:
        return "model.tokenizer: a causal model needs its tokenizer's special tokens to fill a hole; 'none' does not work here"
    return None


# ---- score


def score_problem(task: Score, columns: Columns, decoder: DecoderChoice) -> str | None:
    """Why this decoder can't score what the task asks for; None if it can."""
    if task.mask is not None:
        if not decoder.scores_any:
            return (
                f"task.mask: the decoder {decoder.name()!r} scores a text from left to right, so it can't see what follows a "
                f"hole; allowed: null, or one of the decoders {_scoring(lambda choice: choice.scores_any)}"
            )
        if task.chat:
            return "task.chat: true scores the answer to a prompt, task.mask what it hides of a text; allowed: only one of them"
        if isinstance(task.mask, Marker | Given) and columns.reference is None:
            return (
                f"task.mask.kind: {task.mask.kind!r} marks holes whose text is not in the row's own; name the column with what "
                "belongs there in input.columns.reference"
            )
    if task.estimate is None:
        return None
    if not decoder.estimates:
        return (
            f"task.estimate: the decoder {decoder.name()!r} gives exact scores; allowed: null, or one of the decoders "
            f"{_scoring(lambda choice: bool(choice.estimates))}"
        )
    if task.estimate.kind not in {"auto", *decoder.estimates}:
        return (
            f"task.estimate.kind: {task.estimate.kind!r} is not for decoder {decoder.name()!r}; "
            f"allowed: {', '.join(sorted({'auto', *decoder.estimates}))}"
        )
    return None


def _scoring(has: Callable[[type[DecoderChoice]], bool]) -> str:
    return ", ".join(kind for kind, choice in DECODERS.items() if "score" in choice.tasks and has(choice))


# ---- complete and score


def prompt_problem(task: Complete | Score, columns: Columns, *, has_tokenizer: bool) -> str | None:
    """Why rows with these columns give no prompt or text to score, or more than one; None if they give exactly one."""
    named = columns.mapping()
    if "messages" in named and not task.chat:
        return "input.columns.messages: only a chat has messages; set task.chat: true, or name input.columns.prompt"
    if "tokens" in named and task.chat:
        return "task.chat: a chat is made of text, but the rows give tokens"
    if not has_tokenizer and (columns.stop is not None or getattr(task, "stop", None)):
        key = "task.stop" if columns.stop is None else "input.columns.stop"
        return f"{key}: stop strings are searched in text, which needs a tokenizer; model.tokenizer is 'none'"
    # A row can have only one column of each group.
    groups: list[tuple[str, ...]] = [("prompt", "messages"), ("text", "completion")]
    if "tokens" in named:
        groups = [("tokens", *_SCORE_COLUMNS)]
    elif isinstance(task, Complete):
        groups = [_COMPLETE_COLUMNS]
    for group in groups:
        if len(names := [name for name in named if name in group]) > 1:
            return f"input.columns: {' and '.join(names)} each give a row's content; name only one of them"
    return None


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
    metrics: Sequence[Metric],
    fields: Sequence[str],
    *,
    kept: Collection[str],
    has_reference: bool,
    has_tokenizer: bool,
    samples: int | None,
) -> Problem | None:
    """Why these metrics can't be measured on a job's results; None if they can. `fields` are the metrics' own paths."""
    parts = expand_metrics(metrics)
    if clash := clashing([part for _, part in parts]):
        index, column = clash
        place = fields[parts[index][0]]
        return place, f"the column {column!r} is already that of an earlier metric; give this one another `name`"
    for metric, place in zip(metrics, fields, strict=True):
        if not has_reference and needs_reference(metric):
            return (
                "input.columns.reference",
                f"the metric {metric.shown!r} needs references, and the results have none; name their column here before the run",
            )
        if missing := [name for name in metric.kept_columns() if name not in kept]:
            names = ", ".join(kept) or "none"
            return (
                "input.keep",
                f"the metric {metric.shown!r} reads {', '.join(missing)}; columns in the results: {names}",
            )
        if metric.needs_text and not has_tokenizer:
            return place, f"{metric.shown} needs texts, and the results have none: model.tokenizer is none"
        if isinstance(metric, PassAtK) and (problem := _code_problem(metric, place, samples)):
            return problem
    return None


def _code_problem(metric: PassAtK, place: str, samples: int | None) -> Problem | None:
    if not metric.allow_code_execution:
        return (
            f"{place}.allow_code_execution",
            "pass_at_k runs code that a model wrote, in a sandbox (docs/guarantees.md); allowed: true",
        )
    if samples is not None and max(metric.k) > samples:
        return f"{place}.k", f"{max(metric.k)} is more than the samples of a row (sampling.n: {samples})"
    return None
