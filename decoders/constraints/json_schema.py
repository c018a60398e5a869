"""JSON Schemas (2020-12) as nodes over JSON text: what a node spells is JSON, and valid by the schema.

At each place of a text some schemas apply together, a conjunction. It is taken apart, and never joined as text:

    $ref, allOf                   more schemas of the conjunction
    anyOf, oneOf, if, enum, ..    alternatives: one conjunction each; unsatisfiable ones are dropped
    what is left                  keywords of one type at a time, all of them together: a number, a string, an array, an object

So keywords that stand together hold together. `not` is turned into alternatives that say the opposite. Not every valid text is
spelled: properties come in the order in which they are declared, others only where the schema says so, and recursion goes to a
depth at which the automaton stays small. Keywords that can't be kept are refused by name (`problems_of`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import combinations, starmap
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from draftmill.decoders.constraints import expressions as nodes
from draftmill.decoders.constraints.expressions import EMPTY, WRITABLE, Dfa, Node, Text, TooLarge
from draftmill.decoders.constraints.regex import machine_of

_FORMS: Final = {
    **dict.fromkeys(
        ("not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames"), "schema"
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "schemas"),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), "named"),
    **dict.fromkeys(("$defs", "definitions"), "unread"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"), "count"),
    **dict.fromkeys(("minProperties", "maxProperties"), "count"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **{"$ref": "ref", "type": "types", "enum": "values", "const": "value", "pattern": "pattern", "format": "format"},
    **{"required": "names", "dependentRequired": "names of", "uniqueItems": "flag", "multipleOf": "positive"},
}
"""The form of the value of each keyword that is kept."""
_SAYS_NOTHING: Final = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
    | {"$comment", "discriminator", "contentEncoding", "contentMediaType", "contentSchema", "xml", "externalDocs"}
)
_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_LONG_MONTHS: Final = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAYS: Final = f"(?:{_LONG_MONTHS}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_YEARS: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTHS: Final = "(?:0[48]|[2468][048]|[13579][26])"
_DATE: Final = f"(?:{_YEARS}-{_DAYS}|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
_HOUR: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR})"
_LABEL: Final = "[a-zA-Z](?:[a-zA-Z0-9-]{0,28}[a-zA-Z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = "[0-9a-fA-F]"
_SHORT: Final = "[0-9a-fA-F]{1,4}"
_SIGNS: Final = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_PATH: Final = rf"(?:/{_SIGNS}*)*(?:\?(?:{_SIGNS}|[/?])*)?(?:#(?:{_SIGNS}|[/?])*)?"
_FOR_DAYS: Final = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_FOR_HOURS: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_FOR_DAYS}(?:{_FOR_HOURS})?|{_FOR_HOURS}|[0-9]+W)",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(?:\.[a-zA-Z0-9_+-]{{1,30}})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "ipv6": "|".join(
        [f"(?:{_SHORT}:){{7}}{_SHORT}", f"(?:{_SHORT}:){{1,7}}:", f"::{_SHORT}(?::{_SHORT}){{0,6}}", "::"]
        + [f"(?:{_SHORT}:){{{before}}}(?::{_SHORT}){{1,{7 - before}}}" for before in range(1, 7)]
    ),
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*://{_HOST}(?::[0-9]{{1,4}})?{_PATH}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}
"""Expressions for the formats that are kept: no text of theirs is refused by a checker, and some are left out."""
_DEPTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_SMALL, _MOST_PLACES, _MOST_DIGITS = 10_000, 20_000, 15
"""The number of states below which recursion goes deeper; the most places of a schema; the most digits that a float keeps."""

Item = tuple[Any, str, tuple[str, ...]]
"""A schema, its JSON pointer, and the references of this place of a text that led to it."""
_SPACE: Final = nodes.optional(b" ")
_COMMA, _COLON = (nodes.sequence(_SPACE, sign, _SPACE) for sign in (b",", b":"))


class SchemaError(ValueError):
    """A schema that can't be kept; each of its `problems` begins with a JSON pointer."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))


def node_of(root: Any, ignored: Sequence[str] = ()) -> Node:
    """The texts of values that a schema allows, without the keywords `ignored`. SchemaError with all problems at once, or where
    nothing satisfies it; TooLarge."""
    root, best, closed = _without(root, ignored), None, set[str]()
    if problems := list(problems_of(root)):
        raise SchemaError(problems)
    for depth in _DEPTHS:
        places = _Places(root, depth)
        try:
            node = places.value([(root, "#", ())], ())
        except TooLarge:
            if best is None:
                raise
            break
        if best is not None and (node is None or nodes.size_of(node) > _SMALL):
            break
        best, closed = node, places.closed
        if not places.was_cut:
            break
    if best is None:
        reason = "it needs more than what is declared; allowed: additionalProperties, items, which say what else there may be"
        raise SchemaError([f"{at}: {reason}" for at in sorted(closed)] or ["#: no value satisfies the schema"])
    return best


def _without(schema: Any, ignored: Sequence[str]) -> Any:
    """A copy without the keywords `ignored`, in the schemas below it, too."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ignored}
    for key, value in kept.items():
        match _FORMS.get(key), value:
            case "schema", _:
                kept[key] = _without(value, ignored)
            case "schemas", list():
                kept[key] = [_without(part, ignored) for part in value]
            case "named" | "unread", Mapping():
                kept[key] = {name: _without(part, ignored) for name, part in value.items()}
    return kept


def problems_of(root: Any) -> Iterator[str]:  # noqa: PLR0912 - one for each form
    """Every keyword that can't be kept, and every one with a value that it can't have, each with its JSON pointer."""
    waiting, seen = [(root, "#")], {"#"}
    for schema, at in waiting:
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            yield f"{at}: {_brief(schema)} is no schema; allowed: an object, true, false"
            continue
        for key, value in schema.items():
            place, form = f"{at}/{_escaped(key)}", _FORMS.get(key)
            if key == "$id" and at != "#":
                yield f"{place}: it changes what $ref means; allowed: $id of the whole schema, ignore: [$id]"
                continue
            if key in _SAYS_NOTHING or key.startswith("x-"):
                continue
            if form is None:
                yield f"{place}: this keyword can't be kept; allowed: ignore: [{key}], and {', '.join(_FORMS)}"
                continue
            wrong = _wrong_value(form, value)
            if wrong:
                yield f"{place}: {_brief(value)}; allowed: {wrong}"
                continue
            parts: list[tuple[Any, str]] = []
            match form:
                case "schema":
                    parts = [(value, place)]
                case "schemas":
                    parts = [(part, f"{place}/{number}") for number, part in enumerate(value)]
                case "named":
                    parts = [(part, f"{place}/{_escaped(name)}") for name, part in value.items()]
                case "ref":
                    try:
                        parts = [(_referred(root, value), value)]
                    except LookupError:
                        yield f"{place}: {_brief(value)} is nowhere in the schema; allowed: a place in it, such as #/$defs/name"
            patterns = [value] if form == "pattern" else list(value) if key == "patternProperties" else []
            for pattern in patterns:
                try:
                    machine_of(pattern, is_search=True)
                except ValueError as error:
                    yield f"{place}: {error}"
            waiting += [part for part in parts if part[1] not in seen]
            seen |= {place for _, place in parts}


def _wrong_value(form: str, value: Any) -> str | None:
    """The values that a keyword may have, if it has another one."""
    is_number = not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    )
    is_list, is_text, is_object = isinstance(value, list), isinstance(value, str), isinstance(value, Mapping)
    kinds = {*_TYPES, "integer"}
    checks = {
        "schemas": (is_list and len(value) > 0, "a list of one schema or more"),
        "named": (is_object, "an object with schemas"),
        "unread": (is_object, "an object with schemas"),
        "count": (is_number and value >= 0 and value == int(value), "a whole number from 0 on"),
        "number": (is_number, "a number"),
        "positive": (
            is_number and value > 0 and Fraction(value) == Fraction(str(value)),
            "a number above 0 that a float has exactly, such as 0.25; ignore: [multipleOf]",
        ),
        "ref": (is_text, "a text such as #/$defs/name"),
        "types": (value in kinds if is_text else bool(value) and _are_texts(value, kinds), ", ".join(sorted(kinds))),
        "values": (is_list and len(value) > 0, "a list of one value or more: nothing satisfies an empty one"),
        "pattern": (is_text, "a regular expression"),
        "format": (is_text and value in FORMATS, f"{', '.join(FORMATS)}; a pattern; ignore: [format]"),
        "names": (_are_texts(value), "a list of texts"),
        "names of": (is_object and all(map(_are_texts, value.values())), "an object with lists of texts"),
        "flag": (isinstance(value, bool), "true or false"),
    }
    is_right, allowed = checks.get(form, (True, ""))
    return None if is_right else allowed


def _are_texts(value: Any, allowed: Set[str] | None = None) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) and (allowed is None or each in allowed) for each in value
    )


def _brief(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _referred(root: Any, ref: str) -> Any:
    """The schema at a reference; LookupError if there is none."""
    if ref != "#" and not ref.startswith("#/"):
        raise LookupError(ref)
    place = root
    for name in ref.split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if place is not root and isinstance(place, Mapping) and isinstance(place.get("$id"), str):
            raise LookupError(ref)
        if isinstance(place, list) and key.isdecimal():
            place = place[int(key)]
        elif isinstance(place, Mapping):
            place = place[key]
        else:
            raise LookupError(ref)
    return place


class _Places:
    """The nodes of the places of a text. References are followed `depth` times below each other; `was_cut`: some were not.
    `closed`: keywords that need more members than are declared, where others come only if the schema says so."""

    def __init__(self, root: Any, depth: int) -> None:
        self._root, self._depth, self._count, self.was_cut = root, depth, 0, False
        self.closed = set[str]()
        self._known = dict[tuple[Any, ...], tuple[Node | None, bool]]()

    def value(self, items: Sequence[Item], above: tuple[str, ...]) -> Node | None:
        """What satisfies all of some schemas, below the references `above`; None if nothing does."""
        key = (tuple(at for _, at, _ in items), above)
        if key not in self._known:
            before, self.was_cut = self.was_cut, False
            self._known[key] = self._at(items, above, (), []), self.was_cut
            self.was_cut = before
        node, was_cut = self._known[key]
        self.was_cut = self.was_cut or was_cut
        return node

    def _at(self, items: Sequence[Item], above: tuple[str, ...], here: tuple[str, ...], choices: Any) -> Node | None:
        """`here` are the references of this place. From each list in `choices` one alternative must hold."""
        flat, waiting, choices = list[tuple[dict[str, Any], str]](), list(items), list(choices)
        self._count += 1
        if self._count > _MOST_PLACES:
            raise TooLarge
        while waiting:
            schema, at, chain = waiting.pop(0)
            if schema is False:
                return None
            if schema is True:
                continue
            own = {key: value for key, value in schema.items() if key not in _APART and key not in _SAYS_NOTHING}
            if own:
                flat.append((own, at))
            for ref in (
                each["$ref"] for each in (schema, schema.get("not")) if isinstance(each, Mapping) and "$ref" in each
            ):
                if above.count(ref) >= self._depth:
                    self.was_cut = True
                    return None
                here = (*here, ref)
            if "$ref" in schema:
                ref = schema["$ref"]
                if ref in chain:
                    return None
                waiting.append((_referred(self._root, ref), ref, (*chain, ref)))
            waiting += _parts_of(schema, "allOf", at, chain)
            choices += self._choices(schema, at, chain)
        if choices:
            again = [(own, at, ()) for own, at in flat]
            return nodes.either(self._at([*again, *chosen], above, here, choices[1:]) for chosen in choices[0])
        kinds, inner = _kinds_of([own for own, _ in flat]), tuple(sorted((*above, *set(here))))
        if not flat and above.count("") >= self._depth:
            self.was_cut = True
            kinds -= {"array", "object"}
        made = {
            "null": lambda: b"null",
            "boolean": lambda: nodes.either(
                b"true" if value else b"false" for value in _allowed(flat, [True, False]) or ()
            ),
            "number": lambda: _number(flat),
            "string": lambda: _string(flat),
            "array": lambda: self._array(flat, inner),
            "object": lambda: self._object(flat, inner),
        }
        return nodes.either(made[kind]() for kind in _TYPES if kind in kinds)

    def _choices(self, schema: Any, at: str, chain: tuple[str, ...]) -> Iterator[list[list[Item]]]:
        """For each keyword of a schema that has alternatives: the schemas of each alternative."""
        if "const" in schema:
            yield [[part] for part in _constants([schema["const"]], f"{at}/const")]
        if "enum" in schema:
            yield [[part] for part in _constants(schema["enum"], f"{at}/enum")]
        if "anyOf" in schema:
            yield [[part] for part in _parts_of(schema, "anyOf", at, chain)]
        if "oneOf" in schema:
            parts = _parts_of(schema, "oneOf", at, chain)
            alternatives = list[list[Item]]()
            for one in parts:
                others = (other for other in parts if other is not one and not self._apart([one[0]], [other[0]]))
                alternatives.append([one, *map(_not, others)])
            yield alternatives
        if "not" in schema:
            yield self._opposite(schema["not"], f"{at}/not", chain)
        if "if" in schema and schema.keys() & {"then", "else"}:
            when, yes, no = ((schema.get(key, True), f"{at}/{key}", chain) for key in ("if", "then", "else"))
            yield [[when, yes], [_not(when), no]]
        names = {name: {"required": names} for name, names in schema.get("dependentRequired", {}).items()}
        for key, given in (("dependentRequired", names), ("dependentSchemas", schema.get("dependentSchemas", {}))):
            for name, part in given.items():
                place = f"{at}/{key}/{_escaped(name)}"
                present = {"required": [name]}, f"{place}~1", ()
                yield [[({"~absent": [name]}, f"{place}~0", ())], [present, (part, place, chain)]]

    def _apart(self, part: Sequence[Any], other: Sequence[Any], depth: int = 3) -> bool:
        """Whether surely no value satisfies all of both: by types, values, or those of a property that one of them requires."""
        mine, theirs = self._joined(part), self._joined(other)
        kinds, values = _kinds_of([*mine, *theirs]), list[set[bytes]]()
        for schema in (*mine, *theirs):
            for some in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
                if some is not None:
                    kinds &= {_kind(value) for value in some}
                    values.append({_plain(json.dumps(value).encode()) for value in some})
        if not kinds or (values and not set.intersection(*values)):
            return True
        if kinds != {"object"} or not depth:
            return False
        needed = {name for schema in (*mine, *theirs) for name in schema.get("required", ())}
        return any(self._apart(_named(mine, name), _named(theirs, name), depth - 1) for name in needed)

    def _joined(self, schemas: Sequence[Any]) -> list[Any]:
        """The schemas, and all that they include by $ref or allOf."""
        found, waiting, seen = list[Any](), list(schemas), set[str]()
        for schema in waiting:
            if isinstance(schema, bool):
                found += [] if schema else [{"enum": []}]
                continue
            found.append(schema)
            waiting += schema.get("allOf", ())
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                waiting.append(_referred(self._root, schema["$ref"]))
        return found

    def _opposite(self, schema: Any, at: str, chain: tuple[str, ...]) -> list[list[Item]]:
        """Alternatives that each contradict the schema. The list may be incomplete: then fewer texts are spelled."""
        if isinstance(schema, bool):
            return [] if schema else [[]]
        found = list[list[Item]]()
        for key, value in schema.items():
            place = f"{at}/{_escaped(key)}"
            if key == "$ref":
                found += [] if value in chain else self._opposite(_referred(self._root, value), value, (*chain, value))
            elif key == "allOf":
                found += [[_not(part)] for part in _parts_of(schema, key, at, chain)]
            elif key in {"anyOf", "oneOf"}:
                found.append([_not(part) for part in _parts_of(schema, key, at, chain)])
            elif key == "not":
                found.append([(value, place, chain)])
            else:
                made = _opposites(key, value, schema)
                found += [[(part, f"{place}~{number}", ())] for number, part in enumerate(made)]
        return found

    def _child(self, items: Sequence[Item], above: tuple[str, ...]) -> Node | None:
        real = [item for item in items if item[0] is not True and item[0] != {}]
        return self.value(real, above if real else tuple(sorted((*above, ""))))

    def _array(self, flat: Any, above: tuple[str, ...]) -> Node | None:  # noqa: PLR0912
        """The items at each index, and their number. A state has the index and, for `contains`, the hits so far, for unique
        items the set of values so far."""
        tuples = max([len(own.get("prefixItems", ())) for own, _ in flat], default=0)
        least, most = _counts(flat, "Items")
        if tuples and most is None and not any("items" in own for own, _ in flat):
            most = max(tuples, least)  # as objects: no more than what is declared
            self.closed |= {f"{at}/contains" for own, at in flat if "contains" in own}
        wanted = [(own, at) for own, at in flat if "contains" in own]
        unique = next((at for own, at in flat if own.get("uniqueItems")), None)
        if most is not None and most <= 1:
            unique = None
        last = max(tuples, least, most or 0, 1)
        if last > 10_000:
            raise TooLarge
        if len(wanted) > 1 or (wanted and unique):
            _refuse(wanted[0][1], "contains", "can't be kept beside another one or uniqueItems; allowed: one of them")
        at_least, at_most, hits = 0, None, []
        if wanted:
            own, at = wanted[0]
            at_least, at_most = int(own.get("minContains", 1)), own.get("maxContains")
            hits = [(own["contains"], f"{at}/contains", ())]
        edges, texts = list[tuple[Any, Node | None, Any]](), list[bytes]()
        at_index = list[list[tuple[int, Node | None]]]()
        for index in range(min(tuples, last) + 1):
            mine = list(_of_index(flat, index))
            node = self._child(mine if at_most is None else [*mine, _not(hits[0])], above)
            if unique:
                at_index.append(list(self._unique(node, unique, texts)))
            else:
                at_index.append([(0, node), *((1, self._child([*mine, hit], above)) for hit in hits)])
        number_hits = 0 if not wanted else int(at_least if at_most is None else max(at_most, at_least))
        states, waiting = {(0, 0)}, [(0, 0)]
        for state in waiting:
            index, seen = state
            if most is not None and index >= most:
                continue
            for number, node in at_index[min(index, tuples)]:
                if seen >> number & 1 if unique else at_most is not None and number and seen >= at_most:
                    continue
                after = (min(index + 1, last), seen | 1 << number if unique else min(seen + number, number_hits))
                item = ("item", after, id(node))
                edges += [(state, _SPACE if not index else _ARRAY_COMMA, item), (item, node, after)]
                if node is not None and after not in states:
                    states.add(after)
                    waiting.append(after)
                    if len(states) > _MOST_PLACES:
                        raise TooLarge
        ends = [state for state in states if state[0] >= least and (not wanted or state[1] >= at_least)]
        edges += [(end, _ARRAY_END, "end") for end in ends]
        return nodes.graph([("open", b"[", (0, 0)), *dict.fromkeys(edges)], "open", ["end"])

    def _unique(self, node: Node | None, at: str, texts: list[bytes]) -> Iterator[tuple[int, Node]]:
        """The few texts of an item, each with the number of its value."""
        machine = nodes.dfa_of(node, in_bytes=True)
        found = [] if machine is None else machine.texts(64)
        values = {} if found is None else {_plain(bytes(text)): bytes(text) for text in found}
        if found is None or len(values) > 16:
            _refuse(
                at, "uniqueItems", "is for items of few values; allowed: an enum of at most 16, ignore: [uniqueItems]"
            )
        for value, text in values.items():
            if value not in texts:
                texts.append(value)
            yield texts.index(value), text

    def _object(self, flat: Any, above: tuple[str, ...]) -> Node | None:  # noqa: PLR0912
        """The declared properties in their order, then others; the number of those so far where it matters."""
        absent = {name for each in _given(flat, "~absent") for name in each}
        needed = dict.fromkeys(name for each in _given(flat, "required") for name in each)
        names = list(dict.fromkeys([*(name for each in _given(flat, "properties") for name in each), *needed]))
        if absent & needed.keys():
            return None
        spelled = [(own["propertyNames"], f"{at}/propertyNames", ()) for own, at in flat if "propertyNames" in own]
        good_names = None
        if spelled:
            good_names = nodes.dfa_of(self.value([*spelled, ({"type": "string"}, "~string", ())], above), in_bytes=True)
        patterns = sorted({pattern for each in _given(flat, "patternProperties") for pattern in each})
        properties = list[tuple[bytes, Node, bool]]()
        for name in names:
            spelling = _spelled(name)
            is_good = name not in absent and (not spelled or (good_names is not None and good_names.accepts(spelling)))
            strict, wide = (
                [
                    pattern
                    for pattern in patterns
                    if (made := machine_of(pattern, is_search=True, is_wide=is_wide)) and made.accepts(map(ord, name))
                ]
                for is_wide in (False, True)
            )
            node = self._child(list(_of_member(flat, name, strict, wide)), above) if is_good else None
            if node is None and name in needed:
                return None
            if node is not None:
                properties.append((spelling, node, name in needed))
        least, most = _counts(flat, "Properties")
        others = list(self._others(flat, {*names, *absent}, patterns, good_names if spelled else None, above))
        if spelled and good_names is None:
            others = []
        if least > max(1, len(needed)) and others:
            if len(properties) < least:
                at = next(at for own, at in flat if "minProperties" in own)
                _refuse(
                    at, "minProperties", "free names could be equal; allowed: 1, more names, ignore: [minProperties]"
                )
            others = []
        if most is not None and not others and most >= len(properties):
            most = None
        if not others and least > len(properties):
            if _given(flat, "additionalProperties") == []:
                self.closed |= {f"{at}/minProperties" for own, at in flat if own.get("minProperties") == least}
            return None
        top = max(1, least, most or 0)
        if top > 10_000:
            raise TooLarge
        edges, count = list[tuple[Any, Node | None, Any]](), len(properties)
        contents = [
            (index, index + 1, nodes.sequence(name, _COLON, node)) for index, (name, node, _) in enumerate(properties)
        ]
        for index, after, content in [*contents, *((count, count, other) for other in others)]:
            for seen in range(top + 1):
                if index < count and not properties[index][2]:
                    edges.append(((index, seen), EMPTY, (after, seen)))
                if most is None or seen < most:
                    there = (after, min(seen + 1, top))
                    member = ("member", there, id(content))
                    edges += [((index, seen), _COMMA if seen else _SPACE, member), (member, content, there)]
        ends = [((count, seen), _OBJECT_END, "end") for seen in range(top + 1) if seen >= least]
        return nodes.graph([("open", b"{", (0, 0)), *dict.fromkeys(edges), *ends], "open", ["end"])

    def _others(
        self, flat: Any, names: set[str], patterns: Sequence[str], good_names: Dfa | None, above: tuple[str, ...]
    ) -> Iterator[Node]:
        """Members whose names are not declared: one node for each set of patterns that their names match."""
        if len(patterns) > 6:
            at = next(at for own, at in flat if "patternProperties" in own)
            _refuse(at, "patternProperties", f"{len(patterns)} patterns; allowed: 6")
        free = nodes.counted(WRITABLE, 0, None)
        if names:
            free = nodes.both(free, _none_of_texts(sorted(names)))
        is_open = any("additionalProperties" in own for own, _ in flat) or not any(
            own.keys() & {"properties", "patternProperties", "required"} for own, _ in flat
        )
        for number in range(0 if is_open else 1, len(patterns) + 1):
            for chosen in combinations(patterns, number):
                machine = free
                for pattern in patterns:
                    matches = machine_of(pattern, is_search=True, is_wide=pattern not in chosen)
                    machine = nodes.both(machine, matches if pattern in chosen else nodes.negated(matches))
                if machine is None:
                    continue
                name: Node | None = Text(machine, quoted=True)
                if good_names is not None:
                    common = nodes.both(nodes.dfa_of(name, in_bytes=True), good_names)
                    name = None if common is None else Text(common, raw=True)
                if name is None:
                    continue
                member = self._child(list(_of_member(flat, None, chosen, chosen)), above)
                if (node := nodes.sequence(name, _COLON, member)) is not None:
                    yield node


_ARRAY_COMMA, _ARRAY_END = nodes.sequence(b",", _SPACE), nodes.sequence(_SPACE, b"]")
_OBJECT_END: Final = nodes.sequence(_SPACE, b"}")
_APART: Final = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"}
    | {"$defs", "definitions", "dependentRequired", "dependentSchemas"}
)


def _named(schemas: Sequence[Any], name: str) -> list[Any]:
    """The schemas that some schemas declare for a property."""
    return [schema["properties"][name] for schema in schemas if name in schema.get("properties", {})]


def _kinds_of(schemas: Sequence[Any]) -> set[str]:
    """The types that all of some schemas allow; an integer is a number."""
    kinds = set(_TYPES)
    for schema in schemas:
        kinds &= {"number" if kind == "integer" else kind for kind in _listed(schema.get("type", _TYPES))}
    return kinds


def _refuse(at: str, key: str, reason: str) -> NoReturn:
    raise SchemaError([f"{at}/{key}: {reason}"])


def _given(flat: Any, key: str) -> list[Any]:
    return [own[key] for own, _ in flat if key in own]


def _counts(flat: Any, of: str) -> tuple[int, int | None]:
    """The least and the most `Length`, `Items` or `Properties` that all keywords of a place allow; most None: any number."""
    most = min(_given(flat, f"max{of}"), default=None)
    return int(max([0, *_given(flat, f"min{of}")])), None if most is None else int(most)


def _allowed(flat: Any, default: list[Any] | None = None) -> list[Any] | None:
    """The values that all enums of a place have."""
    lists = _given(flat, "=")
    return [value for value in dict.fromkeys(lists[0]) if all(value in each for each in lists)] if lists else default


def _listed(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, str) else value


def _parts_of(schema: Any, key: str, at: str, chain: tuple[str, ...]) -> list[Item]:
    """The schemas in the list of a keyword, if it has one."""
    return [(part, f"{at}/{key}/{number}", chain) for number, part in enumerate(schema.get(key, ()))]


def _not(item: Item) -> Item:
    schema, at, chain = item
    return {"not": schema}, f"{at}~not", chain


def _spelled(text: str) -> bytes:
    """A string as JSON writes it."""
    return json.dumps(text, ensure_ascii=any(0xD800 <= ord(sign) < 0xE000 for sign in text)).encode()


def _none_of_texts(texts: Sequence[str]) -> Dfa:
    """Every other text."""
    return nodes.negated(machine_of("|".join(map(re.escape, texts))))


def _plain(text: bytes) -> bytes:
    """A canonical text of the value."""
    numbers = json.loads(text, parse_float=lambda part: int(float(part)) if float(part).is_integer() else float(part))
    return json.dumps(numbers, sort_keys=True).encode()


def _of_index(flat: Any, index: int) -> Iterator[Item]:
    """The schemas of the item at an index."""
    for own, at in flat:
        if index < len(own.get("prefixItems", ())):
            yield own["prefixItems"][index], f"{at}/prefixItems/{index}", ()
        elif "items" in own:
            yield own["items"], f"{at}/items", ()


def _of_member(flat: Any, name: str | None, matched: Collection[str], maybe: Collection[str]) -> Iterator[Item]:
    """The schemas of the property `name`, or of one that is not declared, whose name matches the patterns `matched`; in some
    dialects also those of `maybe`, whose schemas then hold, too."""
    for own, at in flat:
        is_named, patterns = name in own.get("properties", {}), own.get("patternProperties", {})
        if is_named:
            yield own["properties"][name], f"{at}/properties/{_escaped(name or '')}", ()
        for pattern, part in patterns.items():
            if pattern in maybe:
                yield part, f"{at}/patternProperties/{_escaped(pattern)}", ()
        if not is_named and patterns.keys().isdisjoint(matched) and "additionalProperties" in own:
            yield own["additionalProperties"], f"{at}/additionalProperties", ()


def _constants(values: Sequence[Any], at: str) -> list[Item]:
    """Schemas that together allow exactly these values."""
    found, plain = list[Item](), dict[str, list[Any]]()
    for number, value in enumerate(values):
        match value:
            case dict():
                made: Any = {"properties": {name: {"const": part} for name, part in value.items()}}
                made |= {"type": "object", "required": list(value), "additionalProperties": False}
            case list():
                made = {"type": "array", "prefixItems": [{"const": part} for part in value]}
                made |= {"minItems": len(value), "maxItems": len(value)}
            case _:
                plain.setdefault(_kind(value), []).append(value)
                continue
        found.append((made, f"{at}~{number}", ()))
    return [*found, *(({"type": kind, "=": some}, f"{at}~{kind}", ()) for kind, some in plain.items())]


_BEYOND: Final = {
    **{"minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum"},
    **{"maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum"},
}
"""The keyword whose bound contradicts that of a keyword."""
_COUNTED: Final = {"Length": "string", "Items": "array", "Properties": "object"}


def _opposites(key: str, value: Any, schema: Any) -> list[Any]:
    """Schemas that each contradict the keyword; contradictions that no schema can express are left out."""
    match key:
        case "type":
            kinds = set(_listed(value))
            others = [kind for kind in _TYPES if kind not in kinds and not (kind == "number" and "integer" in kinds)]
            has_fractions = "integer" in kinds and "number" not in kinds
            fractions = [{"type": "number", "~integer": _FRACTION}] if has_fractions else []
            return [*([{"type": others}] if others else []), *fractions]
        case "const" | "enum":
            return _none_of([value] if key == "const" else value)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return [{"type": "number", _BEYOND[key]: value}]
        case "minLength" | "minItems" | "minProperties":
            return [{"type": _COUNTED[key[3:]], f"max{key[3:]}": value - 1}] if value else []
        case "maxLength" | "maxItems" | "maxProperties":
            return [{"type": _COUNTED[key[3:]], f"min{key[3:]}": value + 1}]
        case "pattern" | "multipleOf":
            return [{"type": "string" if key == "pattern" else "number", f"~{key}": value}]
        case "required":
            return [{"type": "object", "~absent": [name]} for name in value]
        case "properties":
            return [
                {"type": "object", "required": [name], "properties": {name: {"not": part}}}
                for name, part in value.items()
            ]
        case "items" if "prefixItems" not in schema:
            return [{"type": "array", "contains": {"not": value}}]
        case "prefixItems":
            return [
                {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, {"not": part}], "items": True}
                for index, part in enumerate(value)
            ]
    return []


def _none_of(values: Sequence[Any]) -> list[Any]:
    kinds = {kind: [value for value in values if _kind(value) == kind] for kind in _TYPES}
    found: list[Any] = [{"type": [kind for kind in _TYPES if not kinds[kind]]}]
    if len(kinds["boolean"]) == 1:
        found.append({"const": not kinds["boolean"][0]})
    if kinds["string"]:
        found.append({"type": "string", "~=": kinds["string"]})
    numbers = sorted(kinds["number"])
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        found.append({"type": "number"} | {key: bound for key, bound in bounds.items() if bound is not None})
    return found


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _string(flat: Any) -> Node | None:
    """A string: its length, patterns, formats and values hold together."""
    least, most = _counts(flat, "Length")
    machines = [machine_of(pattern, is_search=True) for pattern in _given(flat, "pattern")]
    machines += [machine_of(FORMATS[name]) for name in _given(flat, "format")]
    machines += [
        nodes.negated(machine_of(pattern, is_search=True, is_wide=True)) for pattern in _given(flat, "~pattern")
    ]
    machines += [_none_of_texts(texts) for texts in _given(flat, "~=")]
    if (allowed := _allowed(flat)) is not None:
        return nodes.either(
            _spelled(text)
            for text in allowed
            if least <= len(text)
            and (most is None or len(text) <= most)
            and all(each and each.accepts(map(ord, text)) for each in machines)
        )
    machine = reduce(nodes.both, machines, nodes.counted(WRITABLE, least, most))
    return None if machine is None else Text(machine, quoted=True)


_WHOLE: Final = "-?(?:0|[1-9][0-9]*)"
_DECIMAL: Final = rf"{_WHOLE}(?:\.[0-9]+)?"
_FRACTION: Final = r".*\.[0-9]*[1-9][0-9]*"
_FEW_DIGITS: Final = rf"-?(?:[0-9]*|(?:[0-9]\.?){{1,{_MOST_DIGITS}}})"
"""With few enough digits that a float is on the same side of a bound."""
_INTEGER, _NUMBER = (
    Text(found) for each in (_WHOLE, rf"{_DECIMAL}(?:[eE][+-][0-9]{{1,2}})?") if (found := machine_of(each))
)
_SIDES: Final = {"minimum": (0, 1), "exclusiveMinimum": (1,), "maximum": (-1, 0), "exclusiveMaximum": (-1,)}


def _number(flat: Any) -> Node | None:
    """A number: its bounds, multiples and values hold together."""
    is_whole = any("number" not in _listed(own.get("type", "number")) for own, _ in flat)
    bounds = [(Decimal(_full(value)), sides) for key, sides in _SIDES.items() for value in _given(flat, key)]
    multiples = [(Decimal(_full(value)), True) for value in _given(flat, "multipleOf")]
    multiples += [(Decimal(_full(value)), False) for value in _given(flat, "~multipleOf")]
    expressions, allowed = [_WHOLE if is_whole else _DECIMAL, *_given(flat, "~integer")], _allowed(flat)
    if not (bounds or multiples or expressions[1:]) and allowed is None:
        return _INTEGER if is_whole else _NUMBER
    if allowed is None and not is_whole:
        expressions.append(_FEW_DIGITS)
    machine = _decimals(tuple(expressions), tuple(bounds), tuple(multiples))
    if allowed is None:
        return None if machine is None else Text(machine)
    texts = {json.dumps(value): _full(value) for value in allowed}
    return nodes.either(text.encode() for text, full in texts.items() if machine and machine.accepts(full.encode()))


def _full(value: float) -> str:
    """A number without an exponent and without zeros behind its fraction: one text for all that are equal."""
    full = f"{Decimal(str(value)):f}"
    return full.rstrip("0").rstrip(".") if "." in full else full


@lru_cache(maxsize=256)
def _decimals(
    expressions: tuple[str, ...],
    bounds: tuple[tuple[Decimal, tuple[int, ...]], ...],
    multiples: tuple[tuple[Decimal, bool], ...],
) -> Dfa | None:
    """Decimal numbers that match all expressions, are on the given sides of bounds, and are multiples of steps, or are none."""
    machines = (*map(machine_of, expressions), *starmap(_beside, bounds), *starmap(_of_multiples, multiples))
    return reduce(nodes.both, machines)


def _beside(bound: Decimal, sides: tuple[int, ...]) -> Dfa:
    """Numbers on these sides of a bound: -1 below it, 0 equal, 1 above.

    A state: whether there was a minus, and a point; and of the magnitude the digits read since, as far as the bound has digits,
    and its side so far.
    """
    whole, _, part = f"{bound.copy_abs():f}".partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")

    def steps(state: tuple[bool, bool, int, int]) -> Iterator[tuple[int, int, tuple[bool, bool, int, int]]]:
        minus, behind, done, side = state
        yield 0x2D, 0x2D, (True, behind, done, side)
        if not behind:
            yield 0x2E, 0x2E, (minus, True, 0, side if done == len(whole) else -1)
        digits = part if behind else whole
        for digit in range(0x30, 0x3A):
            against = ord(digits[done]) if done < len(digits) else 0x30
            now = side or (digit > against) - (digit < against)
            if not behind and done == len(whole):
                now = 1  # it has more digits than the bound
            yield digit, digit, (minus, behind, min(done + 1, len(digits)), now)

    def is_end(state: tuple[bool, bool, int, int]) -> bool:
        minus, behind, done, side = state
        if not behind:
            done, side = 0, side if done == len(whole) else -1
        side = side or -(done < len(part))
        if bound and minus != (bound < 0):
            side = 1  # the signs decide
        return (-side if minus else side) in sides

    return nodes.explored((False, False, 0, 0), steps, is_end)


def _of_multiples(step: Decimal, is_one: bool) -> Dfa:
    """Numbers that are multiples of a step, or are none, with at most as many digits after the point as the step has.

    A state: the remainder, and the number of digits after the point, -1 before it.
    """
    most = len(f"{step:f}".partition(".")[2])
    modulus = int(Fraction(step) * 10**most)

    def steps(state: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        rest, behind = state
        yield 0x2D, 0x2D, state
        if behind < 0 and most:
            yield 0x2E, 0x2E, (rest, 0)
        for digit in range(10) if behind < most else ():
            yield 0x30 + digit, 0x30 + digit, ((rest * 10 + digit) % modulus, behind + (behind >= 0))

    return nodes.explored(
        (0, -1), steps, lambda state: (state[0] * 10 ** (most - max(state[1], 0)) % modulus == 0) == is_one
    )
