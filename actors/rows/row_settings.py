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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Final, NoReturn

from pydantic import Field, ValidationError

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.chat import kwargs_problem
from draftmill.actors.rows.constraints import ConstraintMaker, constraint_of_body, read_constraint
from draftmill.actors.rows.fim import fills_in_middle
from draftmill.actors.rows.row import CHAT, Values, body_of, decode_bytes, endpoint_of, missing, problems_of
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, NewTokens, Score, Stops
from draftmill.decoders.base import ModelInfo, RowSettings
from draftmill.decoders.common_settings import MOST_TOP_LOGPROBS, Sampling, Settings
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

    def settings(self, own: OwnSettings) -> RowSettings:
        """The settings for the decoder. Its stop strings also cut the row's text."""
        stops, texts = None, own.stop
        min_new = own.penalties.get("min_new_tokens", self.recipe.sampling.min_new_tokens)
        if texts is None and min_new != self.recipe.sampling.min_new_tokens:
            texts = getattr(self.recipe.task, "stop", ())
        if texts:
            assert self.tokenizer is not None, "stop strings without a tokenizer are refused"
            stops = StopStrings(self.tokenizer, texts, skip_special=self._skips_special, min_new=min_new)
        return RowSettings(
            **{key: getattr(own, key) for key in ("temperature", "top_p", "top_k", "min_p", "stop_ids")},
            stop_text=NeverStops() if own.stop == () else stops,
            token_logprobs=own.logprobs or self.recipe.sampling.top_logprobs > 0,
            top_logprobs=own.top_logprobs or self.recipe.sampling.top_logprobs,
            penalties=self._penalties(own),
        )

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
        task, sampling = self.recipe.task, self.recipe.sampling
        given = {}  # field -> (its name for messages, its value)
        for field_name, keys in _KEYS.items():
            name, value = _setting(values, getattr(self.recipe.columns, field_name, None), body, keys)
            if value is not None:
                given[field_name] = name, value
        if not isinstance(task, Complete):
            if "max_new_tokens" in given and not fills_in_middle(task, self.info):
                _refuse(f"{_shown(*given['max_new_tokens'])}, but this job fills holes of given lengths; allowed: null")
            for field_name, what in (("stop", "stop strings"), ("stop_token_ids", "stop tokens")):
                if given.get(field_name, ("", []))[1] != []:
                    _refuse(f"{_shown(*given[field_name])}, but {what} end completions only; allowed: null")
                given.pop(field_name, None)
        own = _read(_OtherSettings, given) | _read(Sampling, given)
        constraint, stop = self._constraint(values, body), own.get("stop")
        is_constrained = constraint or getattr(task, "constraint", None)
        if (stop or getattr(task, "stop", ())) and is_constrained:
            _refuse("stop: stop strings would cut a text before it matches its constraint; allowed: only one of them")
        draws: dict[str, Any] = {key: own.get(key) for key in ("temperature", "top_p", "top_k", "min_p")}
        if draws["top_k"] is not None:
            draws["top_k"] = max(draws["top_k"], 0)  # 0 cuts nothing off, and so does -1 of a request
        self._check_draws(**draws)
        logprobs, tops = self._logprobs(body, endpoint)
        penalties, stop_ids = self._own_penalties(own), own.get("stop_token_ids", ())
        if is_constrained:
            banning = [*sampling.model_copy(update=penalties).bans, *(["stop_token_ids"] if stop_ids else [])]
            if banning:
                _refuse(
                    f"{banning[0]}: could leave no token that a constraint allows, or cut a text; allowed: only one of them"
                )
        if stop is not None:
            self._check_stop(given["stop"][0], stop)
        return OwnSettings(
            max_new_tokens=own.get("max_new_tokens"),
            stop=stop,
            logprobs=logprobs,
            constraint=constraint,
            endpoint=endpoint,
            top_logprobs=tops,
            stop_ids=stop_ids,
            penalties=penalties,
            **draws,
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

    def _own_penalties(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of Sampling that a body changes; a neutral value is one, too, where the job has another."""
        found = {key: own[key] for key in _PENALTIES if key in own and own[key] != getattr(self.recipe.sampling, key)}
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

    def _check_stop(self, name: str, stops: Sequence[str]) -> None:
        if stops and self.tokenizer is None:
            _refuse(f"{name}: stop strings are searched in text, which needs a tokenizer; model.tokenizer is 'none'")
        problem = self.unseen_stop(stops)
        if problem is not None:
            _refuse(f"{name}: {problem}")

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


class _OtherSettings(Settings):
    """The settings of a row that are not those of Sampling."""

    max_new_tokens: NewTokens = 1
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    stop: Stops = ()
    stop_token_ids: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()


_PENALTIES: Final = {
    **{key: (key,) for key in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    **{"min_new_tokens": ("min_tokens",), "logit_bias": ("logit_bias",), "bad_words": ("bad_words",)},
}
_KEYS: Final[Mapping[str, Sequence[str]]] = {
    **{"max_new_tokens": ("max_completion_tokens", "max_tokens")},
    **{key: (key,) for key in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")},
    **_PENALTIES,
}
"""The settings of a row, and the keys of a body that have them."""


def _read(kind: type[Settings], given: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """What is given of the fields of a class of settings; a text that spells a number is valid, since csv has only texts."""
    own = {key: pair for key, pair in given.items() if key in kind.model_fields and (key, kind) != ("top_k", Sampling)}
    for key, (name, value) in own.items():
        if isinstance(value, bool):
            _bad(name, value, "a number")
        if key == "logit_bias" and not (isinstance(value, dict) and all(map(_is_bias, value.items()))):
            _bad(name, value, "an object of token ids with numbers from -100 to 100")
        if key == "bad_words" and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            _bad(name, value, "a list of non-empty texts")
    try:
        read = kind.model_validate({key: _plain(kind, key, value) for key, (_, value) in own.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        _bad(*own[str(first["loc"][0])], first["msg"])
    return {key: getattr(read, key) for key in own}


def _plain(kind: type[Settings], key: str, value: Any) -> Any:
    """A whole number for one that is spelled as in `1e1`, and no bias for null."""
    if key == "logit_bias":
        return {token: 0.0 if bias is None else bias for token, bias in value.items()}
    if isinstance(value, str) and kind.model_fields[key].annotation is int:
        with suppress(ValueError, OverflowError):
            return int(number) if (number := float(value)) == int(number) else value
    return value


def _is_bias(pair: tuple[Any, Any]) -> bool:
    """Whether a token is given by its id, and its bias is no bool."""
    return str(pair[0]).isascii() and str(pair[0]).isdigit() and not isinstance(pair[1], bool)


def _shown(name: str, value: Any) -> str:
    return f"{name}: {brief(str(value))}"


def _bad(name: str, value: Any, allowed: str) -> NoReturn:
    raise RowError("bad_setting", "read", f"{_shown(name, value)}; allowed: {allowed}")


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
