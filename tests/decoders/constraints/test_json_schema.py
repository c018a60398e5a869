"""What a schema's automaton spells: JSON, and valid by the library jsonschema, for generated schemas and short lengths, too."""

import json
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from draftmill.decoders.constraints import expressions, json_schema
from draftmill.decoders.constraints.automaton import Automaton, Vocabulary, automaton_of
from draftmill.decoders.constraints.expressions import TooLarge, dfa_of
from draftmill.decoders.constraints.json_schema import FORMATS, SchemaError, node_of, problems_of
from draftmill.decoders.constraints.regex import machine_of

CHECKER = Draft202012Validator.FORMAT_CHECKER
WORDS = [
    "true",
    "false",
    "null",
    '"a',
    '":',
    '", "',
    "é",
    "\U0001f600",
    "12",
    "00",
    "-1",
    "\\n",
    '\\"',
    "[]",
    "{}",
    "}}",
]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), b"ab", b"kind", b'{"', None]
KEYS = ["a", "b", "kind", 'q"x', "é\\"]


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS)


def automaton(schema) -> Automaton:
    return automaton_of(node_of(schema), vocabulary())


def text_of(made: Automaton, left: int, rng: random.Random, *, exactly: bool = False) -> str | None:
    """A random way through an automaton of at most `left` tokens, or exactly so many; None if there is none."""
    state, spelled = 0, b""
    while True:
        if made.is_end_S[state] and (not left if exactly else rng.random() < 0.2):
            return spelled.decode()
        allowed = np.flatnonzero(made.allowed(state, left, exactly=exactly)) if left else np.zeros(0, dtype=int)
        if not len(allowed):
            return spelled.decode() if made.is_end_S[state] and not (exactly and left) else None
        token = int(rng.choice(allowed.tolist()))
        state, left, spelled = made.step(state, token), left - 1, spelled + (TOKENS[token] or b"")


def check(schema, made: Automaton, rng: random.Random, *, count: int = 4) -> int:
    """Texts of several lengths, the shortest, too; the number of those that there were."""
    validator, least, found = Draft202012Validator(schema, format_checker=CHECKER), int(made.least_S[0]), 0
    for left, exactly in ((least, False), (least, True), (least + 1, True), (least + 9, False), (least + 40, False)):
        for _ in range(count):
            text = text_of(made, left, rng, exactly=exactly)
            if text is not None:
                found += 1
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
                assert not errors, (schema, text, errors)
    return found


class Schemas:
    """Random schemas; most can be satisfied."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def any(self, depth: int):
        kinds = [self.integer, self.number, self.string, self.string, self.enum, self.constant, self.scalar]
        nested = [self.object, self.object, self.array, self.either, self.one, self.all, self.both_sides, self.negative]
        made = self.rng.choice(kinds if depth <= 0 else [*kinds, *nested, *nested])
        return made(depth)

    def some(self, **choices) -> dict:
        return {key: value() for key, value in choices.items() if self.rng.random() < 0.4}

    def scalar(self, depth: int):
        return self.rng.choice([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, True, {}])

    def integer(self, depth: int):
        low = self.rng.choice([-30, -1, 0, 7, 99])
        size = self.rng.choice([1, 9, 100, 12345])
        key, other = self.rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        bounds = self.some(**{key: lambda: low, other: lambda: low + size + 3})
        return {"type": "integer"} | bounds | self.some(multipleOf=lambda: self.rng.choice([1, 2, 3]))

    def number(self, depth: int):
        low = self.rng.choice([-2.5, -0.125, 0, 1.75, 10])
        bounds = self.some(minimum=lambda: low, exclusiveMaximum=lambda: low + self.rng.choice([0.5, 3, 17.25]))
        return {"type": "number"} | bounds | self.some(multipleOf=lambda: self.rng.choice([0.5, 0.25]))

    def string(self, depth: int):
        patterns = [
            "cat|dog",
            "^.{3,12}$",
            "^ab",
            "^a$|^b$",
            "[0-9]",
            "^[^a]*$",
            '\\\\|"',
            "^(?=.*x)[a-x]+$",
            "b{2}$",
            "^\\w+\\s",
        ]
        if self.rng.random() < 0.3:
            return {"type": "string", "format": self.rng.choice(list(FORMATS))}
        sizes = self.some(minLength=lambda: self.rng.randint(0, 3), maxLength=lambda: self.rng.randint(6, 40))
        return {"type": "string"} | sizes | self.some(pattern=lambda: self.rng.choice(patterns))

    def enum(self, depth: int):
        values = ["a", "cat", 'x"y\n', 1, 2.5, True, None, {"a": [1, "b"]}, [], -3, "é"]
        return {"enum": self.rng.sample(values, self.rng.randint(1, 5))} | self.some(
            type=lambda: ["string", "number", "null"]
        )

    def constant(self, depth: int):
        return {"const": self.rng.choice(["a", "\\", 3, 0.5, False, None, {"kind": 1}, [1, 2]])}

    def array(self, depth: int):
        low = self.rng.randint(0, 2)
        if self.rng.random() < 0.2:
            few = {"enum": self.rng.sample(["a", 1, None, True, "b"], 3)}
            return {"type": "array", "items": few, "uniqueItems": True} | self.some(minItems=lambda: low)
        sizes = self.some(minItems=lambda: low, maxItems=lambda: low + self.rng.randint(0, 2))
        items = self.some(items=lambda: self.any(depth - 1), contains=lambda: self.any(0))
        first = self.some(prefixItems=lambda: [self.any(depth - 1) for _ in range(self.rng.randint(1, 2))])
        return (
            {"type": "array"}
            | sizes
            | items
            | first
            | (self.some(maxContains=lambda: 1) if "contains" in items else {})
        )

    def object(self, depth: int):
        names = self.rng.sample(KEYS, self.rng.randint(0, 4))
        made = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        return made | self.some(
            required=lambda: self.rng.sample(KEYS, self.rng.randint(0, 2)),
            additionalProperties=lambda: self.rng.choice([False, True, {"type": "integer"}]),
            minProperties=lambda: 1,
            maxProperties=lambda: self.rng.randint(2, 4),
            dependentRequired=lambda: {"a": ["b"]},
            patternProperties=lambda: {"^a": {"type": ["integer", "string"], "maximum": 9}, "x$": True},
            propertyNames=lambda: {"maxLength": 6},
        )

    def either(self, depth: int):
        return {"anyOf": [self.any(depth - 1) for _ in range(2)]} | self.some(description=lambda: "either")

    def one(self, depth: int):
        if self.rng.random() < 0.5:
            return {"oneOf": [self.any(depth - 1) for _ in range(2)]}
        parts = [{"properties": {"kind": {"const": n}, "v": self.any(depth - 1)}, "required": ["kind"]} for n in "xy"]
        return {"type": "object", "oneOf": parts}

    def all(self, depth: int):
        parts = [{"required": [self.rng.choice(KEYS)]}, {"properties": {"a": self.any(0)}}, {"maxProperties": 3}]
        return {"allOf": [self.object(depth - 1), *self.rng.sample(parts, 2)]}

    def both_sides(self, depth: int):
        given = {"properties": {"a": self.any(0)}, "required": ["a"]}
        return (
            self.object(depth - 1)
            | {"if": given, "then": {"required": ["b"]}}
            | self.some(**{"else": lambda: {"minProperties": 1}})
        )

    def negative(self, depth: int):
        return {"type": self.rng.choice(["string", "integer", "boolean", "array"]), "not": self.any(depth - 1)}


@pytest.mark.one_in(12, soak=3)
@pytest.mark.parametrize("seed", range(60))
def test_texts_of_generated_schemas_are_valid_at_every_length(seed):
    rng, outcomes = random.Random(seed), Counter[str]()
    for _ in range(10):
        schema = Schemas(rng).any(2)
        Draft202012Validator.check_schema(schema)
        try:
            made = automaton(schema)
        except SchemaError as error:
            outcomes["refused"] += 1
            assert "#" in str(error)
            continue
        except TooLarge:
            outcomes["too large"] += 1
            continue
        outcomes["spelled"] += check(schema, made, rng) > 0
    assert outcomes["spelled"] >= 6, outcomes


FOUND: list[tuple] = [
    ({"type": "string", "pattern": "cat|dog"}, ['"cat"', '"a dog"'], ['"cat', '"cow"']),
    ({"type": "string", "pattern": "^.{3,5}$"}, ['"a\\"b"'], ['"ab"', '"a", "b"']),
    ({"type": "string", "pattern": "^a$|^b$"}, ['"a"', '"b"'], ['"ab"']),
    ({"properties": {"a": {"type": "integer"}}, "type": "object", "required": ["a", "b"]}, ['{"a": 7, "b": []}'], ['{"a": 7}']),
    ({"enum": ["a", "bb"], "type": "string", "minLength": 2}, ['"bb"'], ['"a"']),
    ({"const": 3, "type": "integer", "maximum": 3.0}, ["3"], ["4"]),
    ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string"}}}, ['"ab"'], ['"abc"', "1"]),
    ({"type": "string", "maxLength": 3.0}, ['"abc"'], ['"abcd"']),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}, ["[1, {}]"], ["[1]", "[[], 1]"]),
    ({"properties": {'5" p\\\t': {"type": "null"}}, "type": "object"}, ['{"5\\" p\\\\\\t": null}'], ['{"5" p": null}']),
    ({}, ['{"a": [1, {"b": null}]}', '"x"', "[]", "-1.5e+10"], ["[", "nul", "01"]),
    ({"type": "object"}, ['{"a": {"b": {"c": 1}}}', "{}"], ["1"]),
    ({"type": "array"}, ["[1, []]"], ["{}"]),
    ({"type": ["integer", "null"], "exclusiveMinimum": -5, "maximum": 120}, ["-4", "120", "null", "0"], ["-5", "121", "1.0"]),
    ({"type": "number", "minimum": 0.1, "maximum": 1}, ["0.1", "1", "1.0", "0.25"], ["0.09", "1.01", "-0.5", "10"]),
    ({"type": "integer", "minimum": 10**30 + 7}, [f"{10**30 + 7}", "1" * 32], [f"{10**30 + 6}", "9"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.75", "12.5", "-3"], ["0.7"]),
    ({"type": "array", "items": {"enum": ["a", 1]}, "uniqueItems": True}, ['["a", 1]', "[1]"], ['["a", "a"]']),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, ["2", "9"], ["6", "1"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"x": 1, "y": 2}'], ['{"x": "1"}']),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, ['{"xa": null}', "{}"], ['{"a": null}', '{"x": 1}']),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}}}, ['{"b": 2}'], ['{"a": 1}']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"0000-01-01"', '"2024-04-31"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59.5+01:00"'], ['"2024-02-29T23:59:59"', '"2024-02-29"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"00:00:00-05:30"'], ['"23:59:59"', '"24:00:00Z"', '"23:59:59\\aZ"']),
    ({"type": "string", "not": {"pattern": "^a*$"}}, ['"b"', '"ab\\n"'], ['"a"', '"a\\n"', '"\\n"']),
    ({"type": "string", "not": {"pattern": "\\d"}}, ['"a"'], ['"1"', '"٣"']),
    ({"type": "string", "pattern": "^(?!a$)"}, ['"ab"'], ['"a"', '"a\\n"']),
    ({"type": "string", "pattern": "^[^\\d]+$"}, ['"a"', '"é"'], ['"1"', '"٣"']),
    ({"type": "string", "pattern": "^[^\\W\\d_]+$"}, ['"a"'], ['"1"', '"٣"', '"_"', '"-"']),
    ({"type": "string", "pattern": "(?i)^[^kis]$"}, ['"a"'], ['"K"', '"\u212a"', '"ſ"', '"İ"', '"ı"']),
    ({"type": "string", "pattern": "^(^a$)$"}, ['"a"'], ['"aa"']),
    ({"type": "integer", "minimum": 10**400}, ["1" + "0" * 400], ["9" * 400]),
    ({"oneOf": [{"type": "string", "pattern": "^a+$"}, {"not": {"type": "string", "minLength": 3}}]}, ['"aaa"', "7"], ['"a"']),
    (
        {"type": "object", "oneOf": [{"minProperties": 1}, {"properties": {"a": {"type": "integer"}}, "minProperties": 2}]},
        ['{"x": 1}', '{"a": "x"}'],
        ['{"x": 1, "y": 2}', '{"a": 1, "y": 2}'],
    ),
    (
        {"$defs": {"t": {"type": "object", "properties": {"n": {"$ref": "#/$defs/t"}}, "additionalProperties": False}}}
        | {"oneOf": [{"$ref": "#/$defs/t"}, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}]},
        ['{"n": {"n": {}}}'],
        ['{"n": 1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x$": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ['{"x": 1, "y": "a"}'],
        ['{"x\\n": "a"}', '{"x\\n": 1}', '{"x": "a"}'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), FOUND, ids=lambda value: json.dumps(value)[:50])
def test_what_stands_together_holds_together(schema, good, bad):
    machine = dfa_of(node_of(schema), in_bytes=True)
    assert machine is not None
    assert [text for text in good if not machine.accepts(text.encode())] == []
    assert [text for text in bad if machine.accepts(text.encode())] == []
    check(schema, automaton(schema), random.Random(1))


REFUSED: list[tuple] = [
    ({"enum": []}, "#/enum: "),
    ({"anyOf": []}, "#/anyOf: "),
    ({"type": []}, "#/type: "),
    ({"type": "text"}, '#/type: "text"'),
    ({"type": "string", "minLength": -1}, "#/minLength: -1"),
    ({"multipleOf": 0}, "#/multipleOf: 0"),
    ([], "#: \\[\\] is no schema"),
    ({"properties": {"a/b": 5}}, "#/properties/a~1b: 5 is no schema"),
    ({"properties": {"a": {"unevaluatedProperties": False}}}, "#/properties/a/unevaluatedProperties: this keyword"),
    ({"type": "string", "format": "phone"}, "#/format: "),
    ({"type": "string", "pattern": "(a)\\1"}, "#/pattern: .*character 4: a back-reference"),
    ({"type": "string", "pattern": "a(?<=b)"}, "#/pattern: .*character 2: look-around"),
    ({"type": "string", "pattern": "a{,3}"}, "#/pattern: .*dialects differ in what {,n} is"),
    ({"type": "string", "pattern": "[^]a]"}, "#/pattern: .*a class that begins with ]"),
    ({"oneOf": [{"type": "string", "pattern": "^a+$"}, {"not": {"format": "date"}}]}, "no value satisfies"),
    ({"multipleOf": 0.1}, r"#/multipleOf: 0.1; .*ignore: \[multipleOf\]"),
    ({"properties": {"a": {"$id": "http://x/y"}}}, r"#/properties/a/\$id: "),
    ({"$ref": "#/$defs/o/$defs/i", "$defs": {"o": {"$id": "http://x", "$defs": {"i": {}}}}}, "nowhere in the schema"),
    (
        {"type": "object", "properties": {"a": {}}, "minProperties": 1e9},
        "#/minProperties: it needs more than what is declared",
    ),
    ({"type": "array", "prefixItems": [{"type": "null"}], "contains": {"const": 1}}, "#/contains: it needs more than"),
    ({"type": "string", "pattern": "a{1000000000}"}, "#/pattern: its automaton has more than"),
    ({"$ref": "#/$defs/none"}, "nowhere in the schema"),
    ({"type": "string", "enum": [1]}, "no value satisfies"),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "no value satisfies"),
    ({"items": {"type": "string"}, "uniqueItems": True}, "#/uniqueItems: "),
    ({"type": "object", "minProperties": 3}, "#/minProperties: "),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: json.dumps(value)[:50])
def test_what_can_not_be_kept_is_refused_at_its_place(schema, words):
    with pytest.raises(SchemaError, match=words):
        node_of(schema)


def test_all_problems_of_a_schema_are_found_at_once():
    schema = {
        "properties": {"a": {"minimum": "1"}, "b": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"format": "x"}, "c": 1},
        "if": 5,
    }
    assert {problem.split(":")[0] for problem in problems_of(schema)} == {
        "#/if",
        "#/properties/a/minimum",
        "#/$defs/b/format",
    }


def test_recursion_goes_to_a_depth():
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
    machine = dfa_of(node_of(node), in_bytes=True)
    assert machine is not None and machine.accepts(b'{"v": 1, "next": {"v": 2, "next": {"v": 3, "next": {"v": 4}}}}')
    assert not machine.accepts(b'{"v": 1, "next": {}}')
    check(node, automaton(node), random.Random(0))


def test_equal_numbers_have_equal_automata():
    """So an automaton does not depend on what was compiled before it."""
    sizes = set[int]()
    for step in (3.0, 3):
        json_schema._decimals.cache_clear()
        machine = dfa_of(node_of({"multipleOf": step}), in_bytes=True)
        sizes.add(0 if machine is None else len(machine.edges))
    assert len(sizes) == 1 and 0 not in sizes


def test_counts_cost_states_and_no_powers():
    sizes = [
        len(dfa.edges)
        for size in (20, 200)
        if (dfa := dfa_of(node_of({"type": "string", "maxLength": size}), in_bytes=True))
    ]
    assert sizes[1] < 11 * sizes[0]
    assert automaton_of('"([^"]|""){0,16}"', vocabulary()).num_states < 200
    lists = {
        "type": "array",
        "items": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
    }
    assert automaton(lists).num_states < 1000


def test_an_automaton_beyond_the_limit_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(expressions, "MOST_STATES", 500)
    schemas: list = [{"type": "string", "maxLength": 10**9}, {"type": "string", "pattern": "a.{12}$"}]
    for schema in [*schemas, {"type": "object", "maxProperties": 200_000}]:
        with pytest.raises(ValueError, match="more than 500 states"):
            automaton(schema)
    monkeypatch.setattr(expressions, "MOST_STEPS", 1000)
    with pytest.raises(ValueError, match="possible at once"):
        machine_of("\\w{9}")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("[a-z]{1,1000}" * 9, "possible at once"), ("(" * 101 + "a" + ")" * 101, "nested deeper than 100")],
)
def test_expressions_that_take_long_are_refused_early(monkeypatch, expression, reason):
    monkeypatch.setattr(expressions, "MOST_WORK", 10_000)
    with pytest.raises(ValueError, match=reason):
        machine_of(expression)


PATTERNS = [
    "cat|dog",
    "^a$|^b$",
    "^ab",
    "^.{2,3}$",
    "b+c?",
    "(a|b)*c$",
    "^(?!ab)[a-c]*$",
    "^(?=.*b)[abc]{2,}$",
    "[^a]b",
    "a{2}|",
    "^$",
    "(?i)A",
    "(a$)\n|b",
    "(b$|a)\n?$",
    "^(^a|$)",
    "[^\\W1]$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_searched_for(pattern):
    import itertools
    import re

    machine = machine_of(pattern, is_search=True)
    texts = ["".join(text) for size in range(5) for text in itertools.product("abct1\n"[: 6 - (size > 3)], repeat=size)]
    assert machine is not None
    strict = pattern.replace("$", r"\Z")
    assert [text for text in texts if machine.accepts(map(ord, text)) != bool(re.search(strict, text))] == []
    wide = machine_of(pattern, is_search=True, is_wide=True)
    assert wide is not None
    assert [text for text in texts if wide.accepts(map(ord, text)) != bool(re.search(pattern, text))] == []
