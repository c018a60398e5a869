"""From the constraint of a job or a row to automata over the model's tokens, and to what a hole of a canvas must match.

    task.constraint     one for all holes, a list with one a hole, or names that markers refer to: <mask:int>, <mask:int:4>
    a row's own         its column (an object, a list or JSON text), or the body of an OpenAI request

    regex               as it is: it must match the whole text of a hole
    choice              one of some texts
    grammar             a Lark grammar, by llguidance (causal models)
    json_schema         see decoders/constraints/json_schema.py

An automaton is built when a row first needs it. A worker keeps the latest ones, as far as they fit into memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import TypeAdapter, ValidationError

from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Constraints, ConstraintSettings
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.constraints import json_schema
from draftmill.decoders.constraints.automaton import Automaton, Vocabulary, automaton_of
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.constraints.expressions import Node, Text, either
from draftmill.decoders.constraints.grammar import Grammar
from draftmill.decoders.constraints.regex import machine_of
from draftmill.storage.errors import RowError, brief
from draftmill.storage.json_text import parse_json

if TYPE_CHECKING:
    from draftmill.actors.rows.canvas import Canvas

_FIELD: Final = "constraint"
_MOST_BYTES: Final = 1 << 28
_PROBES: Final = ("a b", " the 12, (x)", "é\n")
_FORM: Final[TypeAdapter[Any]] = TypeAdapter(Constraints)
_OPENAI: Final = {"guided_regex": "regex", "guided_choice": "choice", "guided_json": "json_schema"}
_OUTPUTS: Final = {"regex": "regex", "choice": "choice", "json": "json_schema", "grammar": "grammar"}


class ConstraintMaker:
    """Makes the constraints of rows for one model; `ends` are the tokens that end a text before its limit."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, ends: Sequence[int]) -> None:
        self._tokenizer, self._ends, self._vocab_size = tokenizer, tuple(ends), info.vocab_size
        self._is_causal = info.kind == "causal"
        self._automata = OrderedDict[ConstraintSettings, Automaton | Grammar | str]()

    def applied(self, canvas: Canvas) -> Canvas:
        """The canvas with an automaton for each of its holes' constraints; RowError if a hole can't be filled so."""
        row, rules, lengths = canvas.infilling, canvas.rules, canvas.limits
        automata = [None if rule is None else self.compiled(rule) for rule in rules]
        name = ", ".join(dict.fromkeys(rule.shown for rule in rules if rule is not None)) or None
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
        key = rule.model_copy(update={"name": None})
        found = self._automata.pop(key, None)
        if found is None:
            try:
                found = self._grammar(rule.grammar) if rule.grammar else automaton_of(node_of(rule), self._vocabulary)
            except (ValueError, RecursionError) as error:
                found = str(error) if isinstance(error, ValueError) else f"{rule.kind}: is nested too deeply"
        self._automata[key] = found
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


def node_of(rule: ConstraintSettings) -> Node | None:
    """The texts that match a constraint, None if it is a grammar or there are none; RowError with all reasons against it."""
    try:
        if rule.regex is not None:
            machine = machine_of(rule.regex)
            return None if machine is None else Text(machine)
        if rule.choice is not None:
            return either(text.encode() for text in rule.choice)
        return None if rule.json_schema is None else json_schema.node_of(json.loads(rule.json_schema), rule.ignore)
    except (ValueError, RecursionError) as error:
        _refuse(f"{rule.kind}: {error if isinstance(error, ValueError) else 'is nested too deeply'}")


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
            value = parse_json(value)
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
        case "json_object":
            found |= {"json_schema": {"type": "object"}, "name": "json_object"}
        case other:
            message = f"response_format: {brief(str(other))} is not supported; allowed: text, json_schema, json_object"
            raise RowError("unsupported", "read", message)
    return _checked(found) if found else None


def _checked(value: Any) -> Any:
    try:
        return _FORM.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part not in ("one", "list", "named"))
        if first["type"] == "extra_forbidden":
            _refuse(f"the key {brief(key)} is unknown; allowed: {', '.join(ConstraintSettings.model_fields)}")
        _refuse(brief(f"{key}: {first['msg']}" if key else first["msg"]))


def _refuse(message: str) -> NoReturn:
    raise RowError("bad_setting", "read", f"{_FIELD}: {message}")
