"""Regular expressions as nodes: the syntax that Python, Rust and ECMAScript share, as far as automata go.

    a text      characters, `.`, classes, escapes, groups, `|`, `* + ? {m} {m,} {m,n}`, `^`, `$`, \\p{..}, (?s) and (?i)
    refused     look-around (but directly behind a first `^`), back-references, word boundaries: with their place and the reason

`^` and `$` are characters here, which stand before and behind a text and nowhere else. A look-ahead behind the first `^` is a
second expression that the text matches, or does not.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NoReturn

from draftmill.decoders.constraints import expressions as nodes
from draftmill.decoders.constraints.expressions import BEFORE_LINE_END, BEGIN, END, LAST, Chars, Dfa, Node, Ranges

_DIGITS: Final[Ranges] = ((0x30, 0x39),)
_WORD: Final[Ranges] = (*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final[Ranges] = ((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A))
_SPACES: Final[Ranges] = (*_SPACE, (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))
_LINE_ENDS: Final[Ranges] = ((10, 10), (13, 13), (0x2028, 0x2029))
_LETTERS: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
_CODES: Final = re.compile(
    r"x([0-9A-Fa-f]{2})|[xu]\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|c([A-Za-z])"
)
_LOW_HALF: Final = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_CATEGORY: Final = re.compile(r"([pP])(?:\{(?:(?:gc|General_Category)=)?([A-Za-z]{1,2})\}|([A-Z]))")
_TIMES: Final = re.compile(r"\*|\+|\?|\{(\d+)(,?)(\d*)\}")
_GROUP: Final = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|([si]*):)")
_FLAGS: Final = re.compile(r"\(\?([si]+)\)")
_DEEPEST: Final = 100
_SHOWN: Final = 200  # characters of an expression in a message
_ANYTHING, _BEGIN, _END = (Chars(((low, high),)) for low, high in ((0, LAST), (BEGIN, BEGIN), (END, END)))
_BOUNDED: Final = "only what a text of any length allows with a fixed memory can be an automaton"


class RegexError(ValueError):
    """An expression that can't be compiled: where, and why."""


class _Parser:
    """Reads one expression. `is_ecma`: as JSON Schema's patterns, where \\d and \\w are ASCII and `.` excludes all line ends.
    `is_wide`: all that some dialect matches, for what is negated; otherwise only what all of them match."""

    def __init__(self, text: str, *, is_ecma: bool, is_wide: bool) -> None:
        self.text, self.at, self._is_ecma, self._is_wide = text, 0, is_ecma, is_wide
        self.looks = list[tuple[bool, Node | None]]()
        self._depth = 0
        flags = _FLAGS.match(text)
        self.at, letters = (flags.end(), flags[1]) if flags else (0, "")
        self._dot_all, self._ignores_case = "s" in letters, "i" in letters

    def whole(self) -> Node | None:
        """The node of the expression; its look-aheads are in `looks`."""
        if self.text.startswith(("^(?=", "^(?!"), self.at):
            self.at += 1
            while self.text.startswith(("(?=", "(?!"), self.at):
                self.at += 3
                is_not = self.text[self.at - 1] == "!"
                self._is_wide ^= is_not
                self.looks.append((not is_not, self._alternatives()))
                self._is_wide ^= is_not
                if not self.text.startswith(")", self.at):
                    self._refuse(") is missing")
                self.at += 1
            node = nodes.sequence(_BEGIN, self._row())
            if self.text.startswith("|", self.at):
                self._refuse("a look-ahead before alternatives can't be kept; allowed: alternatives in a group")
        else:
            node = self._alternatives()
        if self.at < len(self.text):
            self._refuse("this ) has no (")
        return node

    def _refuse(self, reason: str, at: int | None = None) -> NoReturn:
        place = self.at if at is None else at
        shown = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + "..."
        raise RegexError(f"{shown!r} is no regular expression that can be compiled: character {place + 1}: {reason}")

    def _alternatives(self) -> Node | None:
        parts = [self._row()]
        while self.text.startswith("|", self.at):
            self.at += 1
            parts.append(self._row())
        return nodes.either(parts)

    def _row(self) -> Node | None:
        parts = list[Node | None]()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            part = self._atom()
            while times := _TIMES.match(self.text, self.at):
                part = self._times(part, times)
            parts.append(part)
        return nodes.sequence(*parts)

    def _times(self, part: Node | None, times: re.Match[str]) -> Node | None:
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if times[0] in signs:
            least, most = signs[times[0]]
        else:
            least, most = int(times[1]), int(times[3]) if times[3] else None if times[2] else int(times[1])
        if most is not None and most < least:
            self._refuse(f"{times[0]} has no count")
        self.at = times.end()
        if self.text.startswith("+", self.at):
            self._refuse("a possessive repetition can't be kept; allowed: the same without the second +")
        self.at += self.text.startswith("?", self.at)  # which of several ways is taken says nothing of a whole text
        return nodes.repeated(part, least, most)

    def _atom(self) -> Node | None:
        character, begun = self.text[self.at], self.at
        self.at += 1
        match character:
            case "(":
                return self._group(begun)
            case "[":
                return Chars(self._class(begun))
            case ".":
                if self._dot_all:
                    return _ANYTHING
                return Chars(nodes.inverted(_LINE_ENDS if self._is_ecma and not self._is_wide else ((10, 10),)))
            case "^":
                return _BEGIN
            case "$":
                return Chars(((END, BEFORE_LINE_END),)) if self._is_wide else _END
            case "\\" if self.text.startswith(("A", "z", "Z"), self.at):
                self.at += 1
                return _BEGIN if self.text[self.at - 1] == "A" else _END
            case "\\":
                return Chars(self._escape(begun))
            case "*" | "+" | "?":
                self._refuse(f"nothing stands before {character}", begun)
            case "{" if self.text.startswith(",", self.at):
                self._refuse("dialects differ in what {,n} is; allowed: {0,n}, \\\\{", begun)
        return Chars(self._cased(((ord(character), ord(character)),)))

    def _group(self, begun: int) -> Node | None:
        before = self._dot_all, self._ignores_case
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"groups are nested deeper than {_DEEPEST}", begun)
        if opened := _GROUP.match(self.text, self.at):
            self.at, flags = opened.end(), opened[1] or ""
            self._dot_all, self._ignores_case = self._dot_all or "s" in flags, self._ignores_case or "i" in flags
        elif self.text.startswith(("?=", "?!", "?<=", "?<!"), self.at):
            self._refuse(f"look-around needs what stands elsewhere: {_BOUNDED}", begun)
        elif self.text.startswith("?", self.at):
            self._refuse("this group can't be kept; allowed: (..), (?:..), (?P<name>..), (?s:..), (?i:..)", begun)
        inner = self._alternatives()
        if not self.text.startswith(")", self.at):
            self._refuse("this ( has no )", begun)
        self.at += 1
        self._depth -= 1
        self._dot_all, self._ignores_case = before
        return inner

    def _class(self, begun: int) -> Ranges:
        is_not = self.text.startswith("^", self.at)
        self.at += is_not
        if self._is_ecma and self.text.startswith("]", self.at):
            self._refuse("dialects differ in what a class that begins with ] is; allowed: \\\\]", begun)
        found, first = list[tuple[int, int]](), True
        self._is_wide ^= is_not
        while first or not self.text.startswith("]", self.at):
            if self.at >= len(self.text):
                self._refuse("this [ has no ]", begun)
            if self.text.startswith(("[:", "&&", "--", "~~"), self.at):
                self._refuse("sets of classes can't be kept; allowed: single characters, ranges, escapes")
            low, first = self._member(), False
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in {"]", ""}:
                self.at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] < low[0][0]:
                    self._refuse("this range has no characters")
                low = ((low[0][0], high[0][1]),)
            found += low
        self.at += 1
        ranges = _joined(self._cased(tuple(found)))
        self._is_wide ^= is_not
        return nodes.inverted(ranges) if is_not else ranges

    def _member(self) -> Ranges:
        self.at += 1
        if self.text[self.at - 1] != "\\":
            return ((ord(self.text[self.at - 1]), ord(self.text[self.at - 1])),)
        if self.text.startswith("b", self.at):
            self.at += 1
            return ((8, 8),)
        return self._escape(self.at - 1)

    def _escape(self, begun: int) -> Ranges:
        letter = self.text[self.at : self.at + 1]
        if found := _CODES.match(self.text, self.at):
            self.at = found.end()
            digits = found[1] or found[2] or found[3] or found[4]
            code = ord(found[5]) % 32 if found[5] else int(digits, 16)
            if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self.text, self.at)):
                code, self.at = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00, low.end()
            return self._cased(((min(code, LAST), min(code, LAST)),))
        if named := _CATEGORY.match(self.text, self.at):
            self.at = named.end()
            ranges = _of_category(named[2] or named[3])
            return nodes.inverted(ranges) if named[1] == "P" else ranges
        self.at += 1
        if letter.lower() in {"d", "w", "s"}:
            return _escaped_class(letter, self._is_ecma, self._is_wide)
        if letter in _LETTERS:
            return ((_LETTERS[letter], _LETTERS[letter]),)
        if letter.isdecimal() or letter == "k":
            self._refuse(f"a back-reference repeats what was read: {_BOUNDED}", begun)
        if letter in {"b", "B"}:
            self._refuse(f"a word boundary needs what stands beside it: {_BOUNDED}", begun)
        if not letter or letter.isalnum():
            self._refuse(f"\\{letter} is unknown; allowed: d w s n r t f v x u p and their like", begun)
        return ((ord(letter), ord(letter)),)

    def _cased(self, ranges: Ranges) -> Ranges:
        if not self._ignores_case:
            return ranges
        if self._is_wide:
            alike = (codes for codes in _cases() if any(low <= code <= high for code in codes for low, high in ranges))
            return (*ranges, *((code, code) for codes in alike for code in codes))
        letters = [chr(code) for low, high in ranges for code in range(low, min(high, low + 2000) + 1)]
        others = {other for letter in letters for other in (letter.lower(), letter.upper()) if len(other) == 1}
        return (*ranges, *((ord(other), ord(other)) for other in sorted(others)))


def _escaped_class(letter: str, is_ecma: bool, is_wide: bool) -> Ranges:
    """\\d, \\w, \\s and what they exclude. ECMAScript's are ASCII; a character on which Python and it differ is in neither,
    or in both where `is_wide`."""
    kind = letter.lower()
    small = {"d": _DIGITS, "w": _WORD, "s": _SPACES}[kind]
    if is_wide == letter.islower():
        found = (*small, *_of_python(kind), *(((0xFEFF, 0xFEFF),) if kind == "s" else ()))
    else:
        found = small if is_ecma else _of_python(kind)
    return found if letter.islower() else nodes.inverted(found)


@lru_cache(maxsize=1)
def _cases() -> list[list[int]]:
    """Groups of characters that are the same under (?i) in some dialect."""
    found = dict[str, list[int]]()
    for code in range(0x1F000):
        if (key := chr(code).upper().casefold()[0]) != chr(code):
            found.setdefault(key, [ord(key)]).append(code)
    return list(found.values())


@lru_cache(maxsize=3)
def _of_python(letter: str) -> Ranges:
    """Python's \\d, \\s or \\w."""
    is_one = re.compile(f"\\{letter}").match
    return _joined((code, code) for code in range(LAST + 1) if is_one(chr(code)))


@lru_cache(maxsize=32)
def _of_category(name: str) -> Ranges:
    return _joined((code, code) for code in range(LAST + 1) if unicodedata.category(chr(code)).startswith(name))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """In order, those that touch as one."""
    return nodes.inverted(nodes.inverted(tuple(ranges)))


@lru_cache(maxsize=256)
def machine_of(text: str, *, is_search: bool = False, is_wide: bool = False) -> Dfa | None:
    """The automaton over characters of the texts that an expression matches as a whole, or with `is_search` anywhere, then in the
    dialect of JSON Schema's patterns; None if there are none. Dialects differ: a text is one that all match, or with `is_wide`,
    for what is then negated, that some match. RegexError if it can't be compiled."""
    parser = _Parser(text, is_ecma=is_search, is_wide=is_wide)
    node = parser.whole()
    before = nodes.optional(nodes.sequence(_BEGIN, nodes.repeated(_ANYTHING, 0, None)) if is_search else _BEGIN)
    whole = nodes.sequence(before, node, *([] if is_search else [nodes.optional(_END)]))
    machine = _between(nodes.dfa_of(whole, in_bytes=False, is_search=is_search))
    for is_there, look in parser.looks:
        found = _between(nodes.dfa_of(nodes.sequence(nodes.optional(_BEGIN), look), in_bytes=False, is_search=True))
        machine = nodes.both(machine, found if is_there else nodes.negated(found))
    return machine


def _between(machine: Dfa | None) -> Dfa | None:
    """The texts between BEGIN and END, or between BEGIN and a last line end with BEFORE_LINE_END before it."""
    start = None if machine is None else machine.step(0, BEGIN)
    if machine is None or start is None:
        return None

    def is_end(state: int | None, *symbols: int) -> bool:
        for symbol in (*symbols, END):
            state = None if state is None else machine.step(state, symbol)
        return state is not None and machine.ends[state]

    def steps(name: tuple[int | None, bool]) -> Iterator[tuple[int, int, tuple[int | None, bool]]]:
        state = name[0]
        if state is None:
            return
        edges: list[tuple[int, int, tuple[int | None, bool]]]
        edges = [(low, min(high, LAST), (to, False)) for low, high, to in machine.edges[state] if low <= LAST]
        if is_end(state, BEFORE_LINE_END, 10) and not is_end(state, 10):
            parts = [(*part, to) for low, high, to in edges for part in ((low, min(high, 9)), (max(low, 11), high))]
            edges = sorted([*(part for part in parts if part[0] <= part[1]), (10, 10, (machine.step(state, 10), True))])
        yield from edges

    found = nodes.explored((start, False), steps, lambda name: name[1] or is_end(name[0]))
    return nodes.both(found, Dfa([[(0, LAST, 0)]], [True]))
