"""lm-evaluation-harness's requests as ours: its texts as token ids, its generation_kwargs as settings of a job.

Texts become token ids as in its own `hf` model, so that both get the same answers.

    generate_until          context                          special tokens before it, as the tokenizer adds them
    loglikelihood           context | continuation           encoded together, cut where the context alone ends
    loglikelihood           prefix token | continuation      without a context
    loglikelihood_rolling   prefix token | text              windows of the model's length, each token scored once

The prefix token is the begin token, else the end token; any-subset models have none. The spelling of a special token is parsed
wherever it occurs, as in transformers. Different from `hf`: the model's length counts the last scored token, too, and a rolling
text has one begin token. Source: TemplateLM and HFLM of lm_eval 0.4.13.

    max_gen_toks (max_new_tokens, max_tokens, max_completion_tokens)    task.max_new_tokens
    until                                                               task.stop
    do_sample, temperature, top_k, top_p, OTHERS                        sampling
    guided_regex, guided_choice, guided_json, guided_grammar            task.constraint, and then `until` has no effect
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic import ValidationError

from draftmill.actors.rows.constraints import constraint_of_body
from draftmill.actors.rows.text import Tokenizer
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import RowError, UserError

Ids = tuple[int, ...]

UNLIMITED_WINDOW: Final = 2048
"""Tokens of a rolling window if the model has no maximum length, as in lm_eval."""

KEPT_CONTEXTS: Final = 4096
"""Encoded contexts that are kept: the choices of a question share their context."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The ids of a context, and those that are scored after it."""

    context: Ids
    scored: Ids


class Encoder:
    """The texts of requests as ids; see the module's docstring."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._most = info.max_length
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        # Any-subset models see no begin token, see actors/rows/makers.py.
        self._prefix: Ids = () if begin is None or info.kind == "any_subset" else (begin,)
        self._spelled = "" if begin is None else tokenizer.decode([begin])
        self.context = lru_cache(KEPT_CONTEXTS)(self._context)

    def _context(self, text: str) -> Ids:
        """Ids of a prompt: the tokenizer's special tokens come first, unless the text begins with the begin token itself."""
        begun = bool(self._spelled) and text.startswith(self._spelled)
        return (*(() if begun else self._tokenizer.lead), *self._tokenizer.parse(text))

    def pair(self, context: str, continuation: str) -> ScoredTokens:
        """Ids of a context and a continuation, of which the continuation is scored; white space between them belongs to it."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if not bare:
            return self._behind_prefix(tuple(self._tokenizer.parse(continuation)))
        before, whole = self.context(bare), self._context(bare + continuation)
        # As in lm_eval, also where a token spans the border.
        return ScoredTokens(before, whole[len(before) :] or tuple(self._tokenizer.parse(continuation)))

    def _behind_prefix(self, tokens: Ids) -> ScoredTokens:
        begun = bool(self._prefix) and tokens[:1] == self._prefix
        return ScoredTokens(self._prefix, tokens[1:] if begun else tokens)

    def windows(self, text: str) -> Iterator[ScoredTokens]:
        """The windows of a text, each with all the context that fits before its scored tokens."""
        tokens = tuple(self._tokenizer.parse(text))
        most = UNLIMITED_WINDOW if self._most is None else self._most
        first = self._behind_prefix(tokens)
        tokens, done = first.scored, min(len(first.scored), most - len(first.context))
        if done:
            yield ScoredTokens(first.context, tokens[:done])
        while done < len(tokens):
            count = min(len(tokens) - done, most - 1)
            done += count
            yield ScoredTokens(tokens[done - most : done - count], tokens[done - count : done])


MOST: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names of the maximum number of tokens; the first one that is given counts, as in lm_eval."""

DEFAULT_MOST: Final = 256
"""Maximum number of tokens of a task that gives none, as in lm_eval."""

OTHERS: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
"""Keys that are those of `sampling`, with its bounds."""

GUIDED: Final = ("guided_regex", "guided_choice", "guided_json", "guided_grammar")
"""A task's own constraint, as vLLM names it."""

KNOWN: Final = (*MOST, *GUIDED, "until", "do_sample", "temperature", "top_k", "top_p", *OTHERS)

WITHOUT_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1, None),
    "use_cache": (True, False, None),
    "seed": (None,),
}
"""Other keys, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How one job generates; `temperature` 0 takes the most probable token, and then there is no top_k and no top_p. The
    `constraint` is JSON text."""

    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    constraint: str | None = None


def generation_of(
    given: Mapping[str, Any], task: str, *, sampling: Sampling, temperature: float | None, most: int | None
) -> Generation:
    """The settings for a task's generation_kwargs. UserError, with the task's name and the key, for what no decoder can do.

    `sampling` is the spec's; its top_k and top_p count where the task has none. `temperature` is the spec's own temperature,
    None if it names none: it counts where the task says only that it samples. `most` is the spec's max_new_tokens, or None.
    """
    for key, value in given.items():
        if key not in KNOWN and value not in WITHOUT_EFFECT.get(key, ()):
            raise _unsupported(
                task, key, value, ", ".join(map(str, WITHOUT_EFFECT.get(key, (*KNOWN, *WITHOUT_EFFECT))))
            )
    named = {key: value for key, value in given.items() if value is not None}
    chosen = {key: named[key] for key in ("temperature", "top_k", "top_p", *OTHERS) if key in named}
    if chosen.get("top_k") in (0, -1):  # how transformers and vLLM say: all tokens
        chosen["top_k"] = None
    try:
        Sampling.model_validate(chosen, strict=True)
    except ValidationError as error:
        key, allowed = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"].removeprefix("Input should be ")
        raise _unsupported(task, key, given[key], allowed) from None
    samples = named.get("do_sample")
    if not isinstance(samples, bool | None):
        raise _unsupported(task, "do_sample", samples, "true, false")
    if samples is False or not (samples or "temperature" in chosen):
        warmth = 0.0
    else:
        warmth = float(chosen.get("temperature", 1.0 if temperature is None else temperature))
    top_k, top_p = chosen.get("top_k", given.get("top_k", sampling.top_k)), given.get("top_p", sampling.top_p)
    return Generation(
        _most(named, task, most),
        _stops(named, task),
        warmth,
        top_k=top_k if warmth else None,
        top_p=top_p if warmth and top_p != 1 else None,
        others=tuple((key, chosen[key]) for key in OTHERS if key in chosen),
        constraint=_constraint(named, task),
    )


def _most(named: Mapping[str, Any], task: str, most: int | None) -> int:
    key = next((key for key in MOST if key in named), None)
    if key is None:
        return DEFAULT_MOST if most is None else most
    value = named[key]
    if type(value) not in {int, float} or not float(value).is_integer() or value < 1:
        raise _unsupported(task, key, value, "a whole number from 1")
    return int(value)


def _constraint(named: Mapping[str, Any], task: str) -> str | None:
    try:
        found = constraint_of_body({key: named[key] for key in GUIDED if key in named})
    except RowError as error:
        raise UserError(error.message, field=f"{task}: generation_kwargs") from None
    return None if found is None else str(found.model_dump_json(exclude_defaults=True))


def _stops(named: Mapping[str, Any], task: str) -> tuple[str, ...]:
    until = named.get("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(stop, str) for stop in until):
        raise _unsupported(task, "until", list(until), "a text, or a list of texts")
    return tuple(dict.fromkeys(stop for stop in until if stop))


def _unsupported(task: str, key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{value!r} is not supported; allowed: {allowed}", field=f"{task}: generation_kwargs.{key}")
