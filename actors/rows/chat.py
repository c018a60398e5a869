"""Renders a checkpoint's Jinja chat template in a sandbox, like transformers but without importing it, and within limits.

A template sees only plain JSON values: other values of a row become placeholders that name their type, since the sandbox does
not know the methods of rich objects. Source: `render_jinja_template` in transformers' utils/chat_template_utils.py;
tests/actors/rows/test_tokenizer_files.py compares the two.

A template is a program by the author of the checkpoint. Jinja's sandbox keeps it from the system, but not from endless loops and
from texts of gigabytes. Here a rendering has MOST_STEPS: a pass of a loop is one, so is a call, CHARS_A_STEP characters that are
copied or compared, and a part of a list that is printed or made. No text or list may be longer than MOST_CHARS, and each is
measured before it is made.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import date, datetime, time
from functools import cached_property, partial, update_wrapper
from itertools import islice
from string import Formatter
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import (
    CallBlock,
    Compare,
    Concat,
    Const,
    Filter,
    For,
    Getitem,
    List,
    Node,
    Slice,
    Template,
    TemplateData,
)
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from draftmill.actors.rows.row import Messages
from draftmill.actors.task import today
from draftmill.storage.errors import brief

MOST_STEPS: Final = 1_000_000
MOST_CHARS: Final = 2**24
"""More than any model reads."""
CHARS_A_STEP: Final = 1024
_ITEMS_A_STEP: Final = 16
_ESCAPED: Final = 12
"""The most characters as which one of a text in a list is printed: those of an emoji in JSON."""
_MOST_POWER: Final = 4096
_MOST_BITS: Final = 2**16
_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[#0\- +]*([0-9*]*)(?:\.([0-9*]*))?")
_names: Final = partial(re.findall, r"\w+")
_INSTANT: Final = frozenset(_names("length count first last default d"))
"""Filters that take no longer for a long text or list."""
_SLOW: Final = frozenset(
    _names("title urlize urlencode wordwrap striptags wordcount pprint xmlattr escape e forceescape translate")
)
"""What takes a step for each character."""
_PRINTING: Final = _SLOW | frozenset(_names("string tojson upper lower capitalize trim center truncate safe"))
"""Filters that turn any value into a text."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Counts the steps of each rendering; `start` begins one. Several threads may render."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(finalize=self._count_print, **settings)
        self._local = threading.local()
        del self.globals["lipsum"]
        self.tests = {name: self._limit_test(cast("Callable[..., Any]", call)) for name, call in self.tests.items()}
        self.filters = {name: self.limit(name, call) for name, call in self.filters.items()}
        self.filters |= {_STEPS: self._count_passes, _READ: self._read, _WEIGHED: self._weighed, _JOINED: self._join}

    def start(self) -> None:
        """A rendering begins."""
        self._local.steps = self._local.chars = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        return cast("Template", _Counting().visit(super()._parse(source, name, filename)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja names them
        """See SandboxedEnvironment: calls of functions, methods and macros."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja's sandbox wraps str.format
        name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        subject, args = __self._admit(name, subject, args, kwargs)
        return __self._check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    self._make(len(text) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            self._make(self._percent(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._make(len(left) + len(right))
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and max(abs(left), abs(right)) > _MOST_POWER:
                raise SecurityError(f"a template computes a power of more than {_MOST_POWER:,}; allowed: up to that")
            if left.bit_length() + right.bit_length() > _MOST_BITS:
                raise SecurityError(f"a template computes with numbers of more than {_MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def limit(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts its steps and makes no long text."""
        passed, name = int(hasattr(call, "jinja_pass_arg")), "percent" if name == "format" else name

        def limited(*args: Any, **kwargs: Any) -> Any:
            subject, given = self._admit(name, args[passed], args[passed + 1 :], kwargs)
            return self._check(call(*args[:passed], subject, *given, **kwargs))

        if passed:
            limited.jinja_pass_arg = call.jinja_pass_arg  # type: ignore[attr-defined]
        return limited

    def _limit_test(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._step(1 / _ITEMS_A_STEP)
            for value in args:
                self._read(value)
            return call(*args, **kwargs)

        return update_wrapper(limited, call)

    # ---- what is counted

    def _step(self, count: float) -> None:
        self._local.steps = getattr(self._local, "steps", 0) + count
        if self._local.steps > MOST_STEPS:
            raise SecurityError(f"a template takes more than {MOST_STEPS:,} steps; is one of its loops endless?")

    def _make(self, chars: int) -> None:
        """A text or list of this length is about to be made."""
        _refuse_beyond(chars)
        self._step(chars / CHARS_A_STEP)

    def _print(self, chars: int) -> None:
        self._local.chars = getattr(self._local, "chars", 0) + chars
        _refuse_beyond(self._local.chars)

    def _count_print(self, value: Any) -> Any:
        """Return what a template prints; counted once for each block that prints it."""
        self._print(len(value) if isinstance(value, str) else self._weigh(value))
        return value

    def _count_passes(self, values: Any, chars: int) -> Any:
        """Return what a loop iterates over; its passes are counted as it begins, and `chars` of text for each."""
        values = _sized(values)
        passes = len(values) if hasattr(values, "__len__") else 1
        self._step(passes)
        self._print(passes * chars)
        return values

    def _read(self, value: Any) -> Any:
        """Return what is copied or compared."""
        if isinstance(value, str | bytes):
            self._step(len(value) / CHARS_A_STEP)
        elif isinstance(value, Mapping | list | tuple):
            self._step(len(value) / _ITEMS_A_STEP)
        return value

    def _weighed(self, value: Any) -> Any:
        """Return a list or mapping that was just made; lists of themselves, over and over, would grow without an end."""
        if isinstance(value, Mapping | list | tuple):
            self._weigh(value)
        return self._read(value)

    def _check(self, value: Any) -> Any:
        if isinstance(value, str | bytes | list | tuple):
            self._make(len(value))
        return value

    def _join(self, parts: list[Any]) -> str:
        """The text of `a ~ b ~ c`."""
        self._make(sum(self._weigh(part) for part in parts))
        return "".join(map(str, parts))

    def _weigh(self, value: Any) -> int:
        """The characters of a value as text, at most, those of texts in lists as they are escaped; takes steps."""
        if isinstance(value, str):
            return len(value)
        total, left = 0, [value]
        while left:
            part = left.pop()
            if isinstance(part, str):
                total += 2 + len(part) * (1 if part.isascii() and part.isprintable() else _ESCAPED)
            elif isinstance(part, Mapping | list | tuple | set):
                self._step(len(part))
                left += [*part, *part.values()] if isinstance(part, Mapping) else part
                total += 2 + 2 * len(part)
            else:
                total += part.bit_length() // 3 + 2 if isinstance(part, int) else 64
            _refuse_beyond(total)
        return total

    # ---- calls

    def _admit(
        self, name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Count a call, or refuse it; returns what it is called of and with, generators that it would join as lists."""
        if name == "join":
            subject, args = _sized(subject), tuple(map(_sized, args))
        given = [*args, *kwargs.values()]
        self._step(1)
        if name not in _INSTANT:
            self._read(subject)
        for most in [limit for names, limit in _NUMBERS if name in names]:
            if wrong := next((value for value in given if isinstance(value, int) and abs(value) > most), None):
                raise SecurityError(f"a template calls {name} with {wrong:,}; allowed: up to {most:,}")
        if name in {"batch", "slice"}:
            self._step(sum(abs(value) for value in given if isinstance(value, int)))
        if name in _SHORT and any(
            (isinstance(value, list | tuple | Mapping) and not (name == "sum" and value == []))
            or self._weigh(value) > 1000
            for value in given
        ):
            raise SecurityError(f"a template calls {name} with a list or a long text; allowed: up to 1,000 characters")
        self._make(self._most(name, subject, given))
        return subject, args

    def _most(self, name: str, subject: Any, given: list[Any]) -> int:
        """The characters that a call makes, at most; 0 if no more than it gets. A filter's subject may be anything."""
        first = given[0] if given else None
        texts = [len(value) for value in given if isinstance(value, str)]
        match name:
            case "percent":
                return self._percent(str(subject) if isinstance(subject, str) else "", given)
            case "format" | "format_map" if isinstance(subject, str):
                return self._braces(subject, given)
            case "join":  # `items|join(text)`, or `text.join(items)`
                items, between = (first, len(subject)) if isinstance(subject, str) else (subject, max(texts, default=0))
                return self._weigh(items) + between * (len(items) if isinstance(items, Sized) else 0)
            case "sum" if [] in given:  # lists one behind the other, each sum a list of its own
                return sum(len(item) for item in subject if isinstance(item, Sized)) * len(subject)
            case "replace":
                times = subject.count(first) if isinstance(subject, str) and isinstance(first, str) else 1
                return self._weigh(subject) + times * max(texts, default=0)
            case "indent":
                lines = 1 + subject.count("\n") if isinstance(subject, str) else self._weigh(subject)
                return self._weigh(subject) + lines * max(
                    [4, *texts, *(value for value in given if type(value) is int)]
                )
            case "expandtabs":
                return len(subject) + subject.count("\t") * max(
                    [8, *(value for value in given if isinstance(value, int))]
                )
            case "wordwrap" | "translate":
                weight = self._weigh(subject) * max([1, *(self._weigh(value) for value in given)])
            case _ if name in _PRINTING:
                weight = self._weigh(subject)
            case _:
                return 0
        if name in _SLOW:
            _refuse_beyond(weight)
            self._step(weight)
        return weight

    def _percent(self, form: str, values: Any) -> int:
        found = [width for pair in _PERCENT.findall(form) for width in pair if width]
        return len(form) + self._widths(found) + form.count("%") * self._weigh(values)

    def _braces(self, form: str, given: list[Any]) -> int:
        fields = [spec for _, field, spec, _ in Formatter().parse(form) if field is not None]
        if any("{" in (spec or "") for spec in fields):
            raise SecurityError(f"a template formats with {form[:50]!r}; allowed: widths that are numbers")
        return (
            len(form)
            + self._widths(re.findall("[0-9]+", " ".join(map(str, fields))))
            + len(fields) * self._weigh([given])
        )

    def _widths(self, found: list[str]) -> int:
        if wrong := next((width for width in found if not width.isdecimal() or len(width) > 5), None):
            raise SecurityError(f"a template formats with a width of {wrong[:50]}; allowed: up to 5 digits")
        return sum(map(int, found))


_NUMBERS: Final = (
    (
        frozenset(_names("center ljust rjust zfill expandtabs indent wordwrap batch slice to_bytes truncate")),
        MOST_STEPS,
    ),
    (frozenset({"round"}), 99),
)
"""Calls that make something as long as a number says, and the greatest such number."""
_SHORT: Final = frozenset({"strftime", "sum", "batch", "slice"})
"""Calls that would multiply what they are called with."""
_STEPS: Final = "draftmill_steps"
_READ: Final = "draftmill_read"
_WEIGHED: Final = "draftmill_weighed"
_JOINED: Final = "draftmill_joined"


class _Counting(NodeTransformer):
    """Puts a count around what Jinja can't intercept: loops, `~`, slices, comparisons, and lists that are written out."""

    def _around(self, node: Any, name: str, *args: Any) -> Filter:
        return Filter(node, name, [Const(arg) for arg in args], [], None, None, lineno=node.lineno)

    def visit_For(self, node: For) -> Node:  # noqa: N802
        chars = sum(len(data.data) for data in node.find_all(TemplateData))
        self.generic_visit(node)
        node.iter = self._around(node.iter, _STEPS, chars)
        return node

    def visit_Concat(self, node: Concat) -> Node:  # noqa: N802
        self.generic_visit(node)
        return self._around(List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: Compare) -> Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._around(node.expr, _READ)
        for operand in node.ops:
            operand.expr = self._around(operand.expr, _READ)
        return node

    def visit_Getitem(self, node: Getitem) -> Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, Slice):
            node.node = self._around(node.node, _READ)
        return node

    def visit_made(self, node: Any) -> Node:
        self.generic_visit(node)
        is_read = getattr(node, "ctx", "load") == "load"
        return (
            self._around(node, _WEIGHED)
            if is_read and not all(isinstance(part, Const) for part in node.items)
            else node
        )

    visit_List = visit_Tuple = visit_Dict = visit_made


def _sized(values: Any) -> Any:
    """A generator as a list, of what a rendering may read at most; other values as they are."""
    is_endless = not hasattr(values, "__len__") and isinstance(values, Iterable) and not isinstance(values, Undefined)
    return list(islice(values, MOST_STEPS + 1)) if is_endless else values


def _refuse_beyond(length: int) -> None:
    if length > MOST_CHARS:
        raise SecurityError(f"a template makes a text of up to {length:,} characters; allowed: {MOST_CHARS:,}")


# Names of a message's reasoning in the input; chat templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders a conversation up to the start of the model's answer. `source` is the template, in Jinja; `names` are the
    special tokens by name: {bos_token: <s>}.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source, self._names = source, dict(names)

    @property
    def has_date(self) -> bool:
        """Whether what it renders may depend on the date."""
        return "strftime_now" in self.source

    def __call__(self, messages: Messages, day: date | None = None, more: Mapping[str, Any] | None = None) -> str:
        """Return the conversation's text, with special tokens spelled out; raises whatever the template raises.

        `day`, at midnight, is the template's time: a clock would give each worker and each resume another prompt. None is today
        in UTC. `more` are further arguments of the template (`chat.template_kwargs`), none of them in RESERVED.
        """
        if not messages:
            raise ValueError("an empty conversation; a chat needs at least one message")
        # Rows have null for missing keys of a message, and many templates would print it.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        plain = [_with_reasoning(message) for message in _plain(given)]
        template = self._template
        cast("LimitedEnvironment", template.environment).start()
        given_by_us = {
            "messages": plain,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": datetime.combine(day or today(), time()).strftime,
        }
        return template.render(self._names | _plain(more or {}) | given_by_us)

    @cached_property
    def _template(self) -> jinja2.Template:
        return environment().from_string(self.source)


RESERVED: Final = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
"""Arguments of a chat template that draftmill gives itself."""


def kwargs_problem(value: Any) -> str | None:
    """Why a value can't be arguments of a chat template; None if it can."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return f"{brief(str(value))}; allowed: an object such as {{enable_thinking: false}}"
    taken = [name for name in RESERVED if name in value]
    return f"{taken[0]!r} is not allowed; draftmill gives the template {', '.join(RESERVED)} itself" if taken else None


def environment(**settings: Any) -> LimitedEnvironment:
    """What templates are compiled with: of chats, and of prompts (prompts.py)."""
    made = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], **settings)
    made.filters["tojson"] = made.limit("tojson", _to_json)
    made.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    return made


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` without the attributes of the type `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace; rejects names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        allowed = "names that do not start with _"
        raise SecurityError(f"a template can't store {name!r} in a namespace; allowed: {allowed}")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, which Jinja's own filter adds."""
    layout: dict[str, Any] = {"indent": indent, "separators": separators}
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, sort_keys=sort_keys, **layout)
    if indent is None and separators is None:
        return encoder.encode(value)
    if len(str(layout)) > 100 or (isinstance(indent, int) and indent > 100):
        raise SecurityError("a template calls tojson with a long indent or separator; allowed: up to 100 characters")
    parts, length = [], 0
    for part in encoder.iterencode(value):
        length += len(part)
        _refuse_beyond(length)
        parts.append(part)
    return "".join(parts)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Put a message's reasoning under the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
