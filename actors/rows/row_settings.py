"""A row's own settings, which override the job's: from columns that the spec names, or from the body of an OpenAI request.

    max_new_tokens   input.columns.max_new_tokens   body.max_completion_tokens, body.max_tokens
    temperature      input.columns.temperature      body.temperature
    top_p            input.columns.top_p            body.top_p
    stop             input.columns.stop             body.stop
    seed             input.columns.seed             body.seed             (draftmill.actors.rows.row.row_key)
    top_k            input.columns.top_k            body.top_k
    logprobs                                        body.logprobs, body.top_logprobs
    penalties                                       body.presence_penalty, body.logit_bias, ... (`_PENALTIES`)
    constraint       input.columns.constraint       body.response_format, body.structured_outputs, body.guided_*
    template_kwargs  input.columns.template_kwargs  body.chat_template_kwargs, of a conversation

Null (in a column, also an empty text) means the job's own value; a column overrides the body. Each problem is a RowError:
`bad_setting` for an invalid value, `unsupported` for one that the job can't support. Pure: no files, no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, Final, NoReturn

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.chat import kwargs_problem
from draftmill.actors.rows.constraints import ConstraintMaker, constraint_of_body, read_constraint
from draftmill.actors.rows.fim import fills_in_middle
from draftmill.actors.rows.row import CHAT, Values, body_of, decode_bytes, endpoint_of, missing, problems_of
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import MOST_NEW_TOKENS, Complete, Score
from draftmill.decoders.base import ModelInfo, RowSettings
from draftmill.decoders.common_settings import MOST_TOP_LOGPROBS, Sampling
from draftmill.decoders.engine.ends import NeverStops
from draftmill.decoders.engine.penalties import Penalties
from draftmill.decoders.settings import DECODERS
from draftmill.storage.errors import RowError, brief
from draftmill.storage.json_text import parse_json


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """One row's own settings; None means the job's value. `endpoint` is the endpoint of an OpenAI request."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] | None = None
    logprobs: bool = False
    endpoint: str | None = None
    constraint: Any = None
    top_k: int | None = None
    min_p: float | None = None
    top_logprobs: int = 0
    stop_ids: tuple[int, ...] = ()
    penalties: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Sampling, in place of the job's."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool | None:
        """Whether the row is a conversation; None if the task decides."""
        return None if self.endpoint is None else self.endpoint == CHAT


@dataclass(frozen=True)
class RowRules:
    """Everything, except the row, that decides which settings a row may have.

    `constraints` makes the rows' constraints; None where they are not needed.
    """

    recipe: RowRecipe
    tokenizer: Tokenizer | None
    info: ModelInfo
    constraints: ConstraintMaker | None = None

    def constraint(self, own: OwnSettings) -> Any:
        """What the text of a row must match: its own constraint, else the task's; None for none."""
        return getattr(self.recipe.task, "constraint", None) if own.constraint is None else own.constraint

    @cached_property
    def job_penalties(self) -> Penalties | None:
        """Those of rows without their own; ValueError as penalties_of."""
        return penalties_of(self.recipe.sampling, self.tokenizer, self.info.vocab_size, self.recipe.ends)

    def own_settings(self, values: Values) -> OwnSettings:
        """The row's own settings; RowError if one is invalid or unsupported."""
        body = body_of(values)
        if body is None and not self.recipe.columns.has_own_settings():
            return OwnSettings()
        endpoint = None
        if body is not None:
            endpoint = endpoint_of(values, body)
            if problems := list(problems_of(body, self._job_values(), endpoint)):
                _refuse("; ".join(problems))
        kwargs = self._template_kwargs(values, body or {})
        if isinstance(self.recipe.task, Score):  # nothing is generated, so the other settings have no effect
            return OwnSettings(endpoint=endpoint, template_kwargs=kwargs)
        return replace(self._settings_of(values, body or {}, endpoint), template_kwargs=kwargs)

    def settings(self, own: OwnSettings) -> tuple[RowSettings, StopStrings | None]:
        """The settings for the decoder, and the row's own stop strings, which cut its text; None if it has none."""
        stops, texts = None, own.stop
        min_new = own.penalties.get("min_new_tokens", self.recipe.sampling.min_new_tokens)
        if texts is None and min_new != self.recipe.sampling.min_new_tokens:
            texts = getattr(self.recipe.task, "stop", ())
        if texts:
            assert self.tokenizer is not None, "stop strings without a tokenizer are refused"
            stops = StopStrings(self.tokenizer, texts, skip_special=self._skips_special, min_new=min_new)
        return RowSettings(
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            stop_text=NeverStops() if own.stop == () else stops,
            stop_ids=own.stop_ids,
            token_logprobs=own.logprobs or self.recipe.sampling.top_logprobs > 0,
            top_logprobs=own.top_logprobs or self.recipe.sampling.top_logprobs,
            penalties=self._penalties(own),
        ), stops

    def _penalties(self, own: OwnSettings) -> Penalties | None:
        if not own.penalties and not own.stop_ids:
            return self.job_penalties
        sampling, ends = self.recipe.sampling.model_copy(update=dict(own.penalties)), (*self.recipe.ends, *own.stop_ids)
        try:
            return penalties_of(sampling, self.tokenizer, self.info.vocab_size, ends)
        except ValueError as error:
            raise RowError("bad_setting", "read", str(error)) from None

    # ---- the values

    def _settings_of(self, values: Values, body: Mapping[str, Any], endpoint: str | None) -> OwnSettings:
        task, columns, sampling = self.recipe.task, self.recipe.columns, self.recipe.sampling
        name, most = _setting(values, columns.max_new_tokens, body, ("max_completion_tokens", "max_tokens"))
        stop_name, stop = _setting(values, columns.stop, body, ("stop",))
        if not isinstance(task, Complete):
            if most is not None and not fills_in_middle(task, self.info):
                _refuse(f"{name}: {brief(str(most))}, but this job fills holes of given lengths; allowed: null")
            if stop is not None and stop != []:
                _refuse(f"{stop_name}: {brief(str(stop))}, but stop strings end completions only; allowed: null")
            stop = None
        constraint = self._constraint(values, body)
        if (stop or getattr(task, "stop", ())) and (constraint or getattr(task, "constraint", None)):
            _refuse(
                f"{stop_name}: stop strings would cut a text before it matches its constraint; allowed: only one of them"
            )
        temperature = _number(*_setting(values, columns.temperature, body, ("temperature",)), most=100.0)
        top_p = _number(*_setting(values, columns.top_p, body, ("top_p",)), most=1.0, above=True)
        top_k, min_p = self._top_k(values, body), _number("min_p", body.get("min_p"), most=1.0)
        self._check_draws(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        logprobs, tops = self._logprobs(body, endpoint)
        penalties, stop_ids = self._own_penalties(body), self._stop_ids(body.get("stop_token_ids"))
        if constraint or getattr(task, "constraint", None):
            banning = [*sampling.model_copy(update=penalties).bans, *(["stop_token_ids"] if stop_ids else [])]
            if banning:
                _refuse(
                    f"{banning[0]}: could leave no token that a constraint allows, or cut a text; allowed: only one of them"
                )
        return OwnSettings(
            max_new_tokens=_count(name, most),
            temperature=temperature,
            top_p=top_p,
            stop=self._stop(stop_name, stop),
            logprobs=logprobs,
            constraint=constraint,
            endpoint=endpoint,
            top_k=top_k,
            min_p=min_p,
            top_logprobs=tops,
            stop_ids=stop_ids,
            penalties=penalties,
        )

    def _constraint(self, values: Values, body: Mapping[str, Any]) -> Any:
        """The row's own constraint; RowError where the job can't keep it."""
        column = self.recipe.columns.constraint
        name, value = _setting(values, column, {}, ("constraint",))
        given = constraint_of_body(body) if value is None else read_constraint(value)
        if given is None:
            return None
        if self.tokenizer is None:
            _refuse(f"{name}: a constraint is about text, which needs a tokenizer; model.tokenizer is 'none'")
        if (
            column is None
            and self.recipe.sampling.acceptance == "rejection"
            and getattr(self.recipe.task, "constraint", None) is None
        ):
            _refuse(
                f"{name}: with sampling.acceptance 'rejection' the job must say that rows have constraints; "
                "set task.constraint or input.columns.constraint"
            )
        return given

    def _template_kwargs(self, values: Values, body: Mapping[str, Any]) -> dict[str, Any]:
        """The row's own arguments of the chat template, without nulls; a csv file has them as JSON text."""
        name, value = _setting(values, self.recipe.columns.template_kwargs, body, ("chat_template_kwargs",))
        if isinstance(value, str):
            with suppress(ValueError):
                value = parse_json(value)
        if value is None:
            return {}
        if problem := kwargs_problem(value):
            raise RowError("bad_setting", "read", f"{name}: {problem}")
        return {key: given for key, given in value.items() if given is not None}

    def _top_k(self, values: Values, body: Mapping[str, Any]) -> int | None:
        """0 cuts nothing off, and so does -1 of a request."""
        name, value = _setting(values, self.recipe.columns.top_k, body, ("top_k",))
        number = None if value is None else _spelt(value)
        if value is not None and (number is None or number != int(number) or not -1 <= number < 2**31):
            _bad(name, value, "a whole number from 1 on; 0 or -1: all tokens")
        return None if number is None else max(int(number), 0)

    def _own_penalties(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of Sampling that a body changes; a neutral value is one, too, where the job has another."""
        found = dict[str, Any]()
        for key, (name, read) in _PENALTIES.items():
            value = None if body.get(key) is None else read(key, body[key])
            if value is not None and value != getattr(self.recipe.sampling, name):
                found[name] = value
        changed = self.recipe.sampling.model_copy(update=found)
        if found.get("min_new_tokens") and not isinstance(self.recipe.task, Complete):
            _refuse(
                f"min_tokens: {found['min_new_tokens']}, but only completions have a length of their own; allowed: 0"
            )
        if getattr(self.recipe.decoder, "tau_edit", None) is not None and changed.reads_text:
            _refuse(f"{changed.reads_text[0]}: depends on the tokens so far, which decoder.tau_edit may replace")
        keys = changed.changes_logits
        if keys and not self.recipe.sampling.changes_logits and self.recipe.sampling.acceptance == "rejection":
            _refuse(
                f"{keys[0]}: under sampling.acceptance 'rejection' rows have penalties of their own only where the "
                "job has some; set them in sampling, or use acceptance 'coupled'"
            )
        return found

    def _stop_ids(self, value: Any) -> tuple[int, ...]:
        if value is None or value == []:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            _bad("stop_token_ids", value, "a list of token ids")
        if not isinstance(self.recipe.task, Complete):
            _refuse(f"stop_token_ids: {brief(str(value))}, but stop tokens end completions only; allowed: []")
        return tuple(value)

    def _check_draws(self, **own: float | None) -> None:
        """RowError for values other than the job's, if the decoder uses the job's values for all rows."""
        sampling, decoder = self.recipe.sampling, self.recipe.decoder.baseline
        if decoder.draws_by_row:
            return
        job = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or 0.0,
        }
        for key, value in own.items():
            if value is not None and value != job[key]:
                _refuse(
                    f"{key}: {value:g}, but decoder {decoder.name()!r} uses one value for all rows; allowed: {job[key]:g}, "
                    f"from sampling.{key}"
                )

    def _stop(self, name: str, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(item, str) and item for item in given):
            _bad(name, value, "a non-empty text, or a list of non-empty texts")
        if any("\ufffd" in item for item in given):
            _bad(name, value, "texts without U+FFFD, which stands for invalid bytes")
        if given and self.tokenizer is None:
            _refuse(f"{name}: stop strings are searched in text, which needs a tokenizer; model.tokenizer is 'none'")
        problem = self.unseen_stop(given)
        if problem is not None:
            _refuse(f"{name}: {problem}")
        return tuple(given)

    def unseen_stop(self, stops: Sequence[str]) -> str | None:
        """Why one of the stop strings can never occur; None if all can, or if end tokens have the same effect."""
        if self.tokenizer is None or not self._skips_special:
            return None
        for token, text in sorted(self.tokenizer.special.items()):
            for stop in stops:
                if text in stop and token not in self.recipe.ends:
                    return (
                        f"{brief(stop)} contains the special token {text!r}, which the text does not have; "
                        "allowed: other texts, or any text with task.skip_special_tokens: false"
                    )
        return None

    def _logprobs(self, body: Mapping[str, Any], endpoint: str | None) -> tuple[bool, int]:
        """Whether log-probabilities are asked for, and how many of the best tokens'."""
        value, tops = body.get("logprobs"), body.get("top_logprobs")
        if endpoint == CHAT:
            if value is not None and not isinstance(value, bool):
                _bad("logprobs", value, "true, false")
            if tops and not value:
                _bad("top_logprobs", tops, "0, null; other numbers only with logprobs: true")
        elif tops:
            _refuse(f"top_logprobs: {brief(str(tops))} is of {CHAT}; allowed: 0, null; here logprobs is a number")
        else:
            value, tops = value is not None and value is not False, value or 0
        if tops is not None and (type(tops) is not int or not 0 <= tops <= MOST_TOP_LOGPROBS):
            key = "top_logprobs" if endpoint == CHAT else "logprobs"
            _bad(key, body.get(key), f"a whole number from 0 to {MOST_TOP_LOGPROBS}, null")
        if value and not self.recipe.decoder.baseline.token_logprobs:
            _refuse(
                f"logprobs: decoder {self.recipe.decoder.baseline.name()!r} does not record them; "
                f"allowed: null, or one of {', '.join(sorted(kind for kind, rules in DECODERS.items() if rules.token_logprobs))}"
            )
        return bool(value), tops or 0

    # ---- the job

    @property
    def _skips_special(self) -> bool:
        return not isinstance(self.recipe.task, Score) and self.recipe.task.skip_special_tokens

    def _job_values(self) -> dict[str, tuple[Any, ...]]:
        """The values that some keys of a body must have, since they are fixed for the whole job."""
        ignores = isinstance(self.recipe.task, Complete) and self.recipe.task.ignore_eos
        return {
            "n": (self.recipe.sampling.n,),
            "ignore_eos": (ignores,),
            "skip_special_tokens": (self._skips_special,),
        }


def _setting(values: Values, column: str | None, body: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    """A setting's name for messages and its value: from its column, else from the first key in the body."""
    if column is not None:
        if column not in values:
            raise missing(values, column)
        value = decode_bytes(values[column], column)
        if value is not None and value != "" and not (isinstance(value, float) and math.isnan(value)):
            return column, value
    given = [(key, body[key]) for key in keys if body.get(key) is not None]
    if len({str(value) for _, value in given}) > 1:
        _refuse(f"{given[0][0]}: {given[0][1]!r}, but {given[1][0]} is {given[1][1]!r}; allowed: only one of them")
    return given[0] if given else (keys[-1], None)


def _number(name: str, value: Any, *, most: float, least: float = 0.0, above: bool = False) -> float | None:
    """A number from (or above) `least` to `most`; a text that spells a number is valid, since csv has only texts."""
    if value is None:
        return None
    number = _spelt(value)
    if number is None or not least <= number <= most or (above and number == least):
        _bad(name, value, f"a number {f'above {least:g}, up to' if above else f'from {least:g} to'} {most:g}")
    return number


def _count(name: str, value: Any, *, least: int = 1) -> int | None:
    if value is None:
        return None
    number = _spelt(value)
    if number is None or number != int(number) or not least <= number <= MOST_NEW_TOKENS:
        _bad(name, value, f"a whole number from {least} to {MOST_NEW_TOKENS}")
    return int(number)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(str(key).isascii() and str(key).isdigit() for key in value):
        _bad(name, value, "an object of token ids with numbers from -100 to 100")
    return {int(key): _number(f"{name}.{key}", bias, least=-100.0, most=100.0) or 0.0 for key, bias in value.items()}


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        _bad(name, value, "a list of non-empty texts")
    return tuple(value)


_PENALTIES: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "presence_penalty": ("presence_penalty", partial(_number, least=-2.0, most=2.0)),
    "frequency_penalty": ("frequency_penalty", partial(_number, least=-2.0, most=2.0)),
    "repetition_penalty": ("repetition_penalty", partial(_number, most=100.0, above=True)),
    "min_tokens": ("min_new_tokens", partial(_count, least=0)),
    "logit_bias": ("logit_bias", _biases),
    "bad_words": ("bad_words", _words),
}
"""Keys of a body, the fields of Sampling that they replace, and what reads them."""


def _spelt(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _bad(name: str, value: Any, allowed: str) -> NoReturn:
    raise RowError("bad_setting", "read", f"{name}: {brief(str(value))}; allowed: {allowed}")


def _refuse(message: str) -> NoReturn:
    raise RowError("unsupported", "read", message[:1000])


# ---- penalties in tokens: texts of `logit_bias`, `bad_words` and `suppress_tokens` become ids, by the model's tokenizer


def penalties_of(
    sampling: Sampling, tokenizer: Tokenizer | None, size: int, ends: Sequence[int] = ()
) -> Penalties | None:
    """What changes the logits by these settings; None if nothing does. `ends` end a text. ValueError, which begins with the key,
    for a text that is not one token where it must be, and for ids beyond the model's `size`."""
    biases = {_one_token("logit_bias", given, tokenizer, size): bias for given, bias in sampling.logit_bias.items()}
    banned = dict[tuple[int, ...], None]()
    for given in sampling.suppress_tokens:
        banned[(_one_token("suppress_tokens", given, tokenizer, size),)] = None
    for word in sampling.bad_words:
        # As transformers does, an end may stand alone: else no text could end.
        banned |= {run: None for run in _runs_of(word, tokenizer, size) if len(run) > 1 or run[0] not in ends}
    made = Penalties(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        ngram=sampling.no_repeat_ngram_size,
        biases=tuple((token, bias) for token, bias in biases.items() if bias),
        banned=tuple(banned),
        min_new=sampling.min_new_tokens,
        ends=tuple(ends) if sampling.min_new_tokens else (),
    )
    return None if made == Penalties() else made


def _one_token(key: str, given: int | str, tokenizer: Tokenizer | None, size: int) -> int:
    """The id of a token that is given by its id or text: behind other text, at the beginning of one, or as a special token."""
    if isinstance(given, int):
        return _known(key, given, size)
    core = _needed(key, tokenizer)
    spellings = [encode(given) for encode in (core.encode_behind, core.encode, core.parse)]
    one = next((ids[0] for ids in spellings if len(ids) == 1), None)
    if one is None:
        raise ValueError(f"{key}: {brief(given)} is {len(spellings[0])} tokens; allowed: ids, and texts of one token")
    return one


def _runs_of(given: tuple[int, ...] | str, tokenizer: Tokenizer | None, size: int) -> Iterator[tuple[int, ...]]:
    """The runs of tokens that spell a text inside of another one, with a space before it or not."""
    if isinstance(given, tuple):
        yield tuple(_known("bad_words", token, size) for token in given)
        return
    core = _needed("bad_words", tokenizer)
    for text in (given, f" {given.lstrip()}"):
        if run := tuple(core.encode_behind(text)):
            yield run


def _known(key: str, token: int, size: int) -> int:
    if token >= size:
        raise ValueError(f"{key}: {token} is not an id of the model; allowed: 0 to {size - 1}")
    return token


def _needed(key: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{key}: texts need a tokenizer, and model.tokenizer is 'none'; allowed: ids")
    return tokenizer
