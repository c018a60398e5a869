"""From the constraint of a job or a row to automata over the model's tokens, and to what a hole of a canvas must match.

    task.constraint     one for all holes, a list with one a hole, or names that markers refer to: <mask:int>, <mask:int:4>
    a row's own         its column (an object, a list or JSON text), or the body of an OpenAI request

    regex               as it is: it must match the whole text of a hole
    choice              a regex of alternatives
    grammar             a Lark grammar, by llguidance (causal models)
    json_schema         a regex by outlines-core, with the keywords below; properties come in their order

An automaton is built when a row first needs it. A worker keeps the latest ones, as far as they fit into memory.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import TypeAdapter, ValidationError

from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Constraints, ConstraintSettings
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.constraints.automaton import Automaton, Vocabulary, automaton_of
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.constraints.grammar import Grammar
from draftmill.storage.errors import RowError, brief

if TYPE_CHECKING:
    from draftmill.actors.rows.canvas import Canvas

_FIELD: Final = "constraint"
_MOST_BYTES: Final = 1 << 28
_NESTING: Final = frozenset({"properties", "anyOf", "prefixItems", "items", "$ref", "$defs", "definitions"})
_KEYWORDS: Final = frozenset(
    {"type", "required", "additionalProperties", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"enum", "const", "title", "description", "default", "examples", "$schema", "$id", "$comment"}
)
"""What the expression of a schema keeps, and what says nothing of a value."""
_FORMATS: Final = frozenset({"date", "time", "date-time", "uuid"})
# JSON Schema's patterns are ECMAScript's, where these are ASCII; in the library's they are Unicode.
_ASCII: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\([dw])")
_CLASSES: Final = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
_PROBES: Final = ("a b", " the 12, (x)", "é\n")
_FORM: Final[TypeAdapter[Any]] = TypeAdapter(Constraints)
_OPENAI: Final = {"guided_regex": "regex", "guided_choice": "choice", "guided_json": "json_schema"}
_OUTPUTS: Final = {"regex": "regex", "choice": "choice", "json": "json_schema", "grammar": "grammar"}


class ConstraintMaker:
    """Makes the constraints of rows for one model; `ends` are the tokens that end a text before its limit."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, ends: Sequence[int]) -> None:
        self._tokenizer, self._ends, self._vocab_size = tokenizer, tuple(ends), info.vocab_size
        self._is_causal = info.kind == "causal"
        self._automata = OrderedDict[str, Automaton | Grammar | str]()

    def applied(self, canvas: Canvas) -> Canvas:
        """The canvas with an automaton for each of its holes' constraints; RowError if a hole can't be filled so."""
        row, rules, lengths = canvas.infilling, canvas.rules, canvas.limits
        automata = [None if rule is None else self.compiled(rule) for rule in rules]
        name = ", ".join(dict.fromkeys(rule.name or rule.kind for rule in rules if rule is not None)) or None
        parts = [(automaton,) for automaton in automata] if row is not None else [tuple(automata)]
        made = [Constraint(part, self._ends) for part in parts]
        if canvas.lengths is not None:
            canvas, lengths = self._possible(canvas, automata)
        for constraint, sizes in zip(made, [[each] for each in lengths] if row is not None else [lengths], strict=True):
            problem = constraint.problem(sizes)
            if problem:
                raise RowError("unsatisfiable", "tokenize", f"{_FIELD}: {problem}")
        if row is not None:
            return replace(canvas, infilling=replace(row, constraints=tuple(made)), constraint=name)
        return replace(canvas, settings=replace(canvas.settings, constraint=made[0]), constraint=name)

    def _possible(self, canvas: Canvas, automata: Sequence[Automaton | Grammar | None]) -> tuple[Canvas, list[int]]:
        """The canvas without lengths of which no text matches, and the greatest lengths left; RowError if none are."""
        assert canvas.lengths is not None, "lengths are open"
        choices = []
        for automaton, own in zip(automata, canvas.lengths.choices, strict=True):
            constraint = Constraint((automaton,), self._ends)
            left = tuple(length for length in own if constraint.problem([length]) is None)
            if not left:
                raise RowError("unsatisfiable", "tokenize", f"{_FIELD}: {constraint.problem([own[-1]])}")
            choices.append(left)
        found = replace(canvas.lengths, choices=tuple(choices))
        if found.room is not None and sum(each[0] for each in choices) > found.room:
            reason = f"{_FIELD}: no lengths that match it fit into the model's longest text"
            raise RowError("unsatisfiable", "tokenize", reason)
        canvas = replace(canvas.with_lengths(found.longest), lengths=found)
        return canvas, list(found.longest)

    def automaton(self, rule: ConstraintSettings) -> Automaton:
        """The automaton of a constraint that is no grammar; RowError as `compiled` raises it."""
        automaton = self.compiled(rule)
        assert isinstance(automaton, Automaton), "a regular constraint"
        return automaton

    def compiled(self, rule: ConstraintSettings) -> Automaton | Grammar:
        """The automaton of a constraint, or its grammar; RowError if there is none, or if no text of these tokens matches."""
        expression = rule.grammar or expression_of(rule)
        found = self._automata.pop(expression, None)
        if found is None:
            try:
                if rule.grammar:
                    found = self._grammar(rule.grammar)
                else:
                    found = automaton_of(expression, self._vocabulary)
            except ValueError as error:
                found = str(error)
        self._automata[expression] = found
        while sum(each.num_bytes for each in self._automata.values() if isinstance(each, Automaton)) > _MOST_BYTES:
            if len(self._automata) == 1:
                break
            self._automata.popitem(last=False)
        if isinstance(found, str):
            _refuse(found)
        return found

    def _grammar(self, text: str) -> Grammar:
        if not self._ends or not self._is_causal:
            _refuse(
                "a grammar is for causal models, and for texts with an end token; allowed: regex, choice, json_schema"
            )
        try:
            return Grammar(text, self._spelled, self._tokenizer.encode, self._ends)
        except ImportError:
            _refuse("a grammar needs llguidance: pip install 'draftmill[constraints]'")

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._spelled)

    @cached_property
    def _spelled(self) -> list[bytes | None]:
        spelled = [self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]
        for text in _PROBES:
            ids = self._tokenizer.encode_behind(text)
            if b"".join(spelled[token] or b"" for token in ids) != self._tokenizer.continuation(ids).encode():
                _refuse(
                    "the tokenizer's tokens are not pieces of its texts; allowed: byte-level and SentencePiece vocabularies"
                )
        return spelled


def expression_of(rule: ConstraintSettings) -> str:
    """The regular expression of a constraint; RowError if it has none."""
    if rule.regex is not None:
        return rule.regex
    if rule.choice is not None:
        return "|".join(map(re.escape, rule.choice))
    if rule.json_schema is None:
        _refuse("a grammar has no regular expression")
    from outlines_core.json_schema import build_regex_from_schema

    schema = json.loads(rule.json_schema)
    _check_schema(schema, schema, ())
    try:
        expression: str = build_regex_from_schema(rule.json_schema)
    except Exception as error:  # noqa: BLE001 - the library raises anything
        _refuse(f"json_schema: {brief(str(error))}")
    return _ASCII.sub(lambda match: match[1] + _CLASSES[match[2]], expression)


def _check_schema(schema: Any, root: Any, refs: tuple[str, ...]) -> None:
    """RowError for what the library would leave out of the expression without a word: then texts could break the schema."""
    if not isinstance(schema, Mapping):
        _refuse(f"json_schema: {brief(str(schema))}; allowed: an object")
    for key, value in schema.items():
        match key:
            case "properties" | "$defs" | "definitions":
                parts = list(value.values()) if key == "properties" else []
            case "anyOf" | "prefixItems":
                parts = list(value)
            case "items":
                parts = [value]
            case "$ref":
                if value in refs:
                    _refuse(f"json_schema: {value!r} refers to itself, and no regular expression is recursive")
                _check_schema(_referred(value, root), root, (*refs, value))
                parts = []
            case _:
                _check_keyword(key, value, schema)
                parts = []
        for part in parts:
            _check_schema(part, root, refs)


def _referred(ref: str, root: Any) -> Any:
    place = root
    for name in ref.removeprefix("#").split("/")[1:]:
        place = place.get(name) if isinstance(place, Mapping) else None
    if not ref.startswith("#") or place is None:
        _refuse(f"json_schema: {ref!r} is nowhere in the schema; allowed: a reference such as #/$defs/name")
    return place


def _check_keyword(key: str, value: Any, schema: Mapping[str, Any]) -> None:
    if key not in _KEYWORDS:
        _refuse(f"json_schema: {key!r} can't be kept; allowed: {', '.join(sorted(_KEYWORDS | _NESTING))}")
    if key in {"minLength", "maxLength"} and schema.keys() & {"pattern", "format"}:
        _refuse(
            f"json_schema: {key!r} can't be kept beside pattern or format; allowed: a pattern that says it, as [a-z]{{2,5}}"
        )
    if key == "format" and value not in _FORMATS:
        _refuse(
            f"json_schema: the format {value!r} can't be kept; allowed: {', '.join(sorted(_FORMATS))}, or a pattern"
        )
    if key == "additionalProperties" and isinstance(value, Mapping) and "properties" not in schema:
        _refuse("json_schema: additionalProperties can't be kept without properties; allowed: name the properties")


Rules = tuple[ConstraintSettings | None, ...]
"""The constraint of each hole, None for none."""


def rules_of(given: Any, named: Rules, count: int) -> Rules:
    """The constraint of each of `count` holes by the row's or the task's; `named` are those that markers name."""
    if isinstance(given, Mapping):
        if len(named) != count:
            _refuse(
                f"{count} holes have {len(named)} markers: two markers stand side by side; allowed: text between them"
                if named
                else "only markers name constraints; allowed: one, or a list"
            )
        return named
    if isinstance(given, ConstraintSettings):
        return (given,) * count
    if len(given) != count:
        _refuse(f"{len(given)} constraints, but the row has {count} holes; allowed: one for each")
    return tuple(given)


def read_constraint(value: Any) -> Any:
    """A row's own constraint from its column; None for none. RowError if it is invalid."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            _refuse(
                f'{brief(value)}; allowed: an object such as {{"regex": "[0-9]+"}}, a list of them, or JSON text of one'
            )
    if isinstance(value, Mapping):  # Arrow fills missing keys with nulls
        value = {key: part for key, part in value.items() if part is not None}
    return None if not value else _checked(value)


def constraint_of_body(body: Mapping[str, Any]) -> Any:
    """The constraint of an OpenAI request, as OpenAI and vLLM name it; None for none. RowError if it is invalid."""
    found = {field: body[key] for key, field in _OPENAI.items() if body.get(key) is not None}
    if body.get("guided_grammar") is not None:
        found["grammar"] = body["guided_grammar"]
    for key, part in (body.get("structured_outputs") or {}).items():
        if part is not None:
            found[_OUTPUTS.get(key, key)] = part
    wanted = body.get("response_format") or {}
    match wanted.get("type", "text") if isinstance(wanted, Mapping) else wanted:
        case "text":
            pass
        case "json_schema":
            schema = wanted.get("json_schema") or {}
            found["json_schema"] = schema.get("schema")
            if schema.get("name"):
                found["name"] = schema["name"]
        case other:
            message = f"response_format: {brief(str(other))} is not supported; allowed: text, json_schema"
            raise RowError("unsupported", "read", message)
    return _checked(found) if found else None


def _checked(value: Any) -> Any:
    try:
        return _FORM.validate_python(value, strict=True)
    except ValidationError as error:
        _refuse(brief(error.errors()[0]["msg"]))


def _refuse(message: str) -> NoReturn:
    raise RowError("bad_setting", "read", f"{_FIELD}: {message}")
