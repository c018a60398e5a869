"""Renders a checkpoint's Jinja chat template in a sandbox, like transformers but without importing it, and within limits.

A template sees only plain JSON values: other values of a row become placeholders that name their type, since the sandbox does
not know the methods of rich objects. Source: `render_jinja_template` in transformers' utils/chat_template_utils.py;
tests/actors/rows/test_tokenizer_files.py compares the two.

A template is a program by the author of the checkpoint. Jinja's sandbox keeps it from the system, but not from endless loops and
from texts of gigabytes. Here every pass of a loop and every call is a step, and no operation may make a text or a list that is
longer than MOST_CHARS: what could make one at once is refused before, what makes one bit by bit as soon as it is too long.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from functools import cached_property
from itertools import islice
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Concat, Const, Filter, For, Node, Template, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from draftmill.actors.rows.row import Messages
from draftmill.actors.task import today
from draftmill.storage.errors import brief

MOST_STEPS: Final = 1_000_000
MOST_CHARS: Final = 2**26
"""A row has at most 64 MiB, too (storage/inputs/rows.py)."""
_MOST_POWER: Final = 4096
_WIDE: Final = re.compile(r"\d{6,}|\*")
# Filters and methods that copy one argument for each part of another.
_PRODUCTS: Final = ("replace", "join", "indent", "translate", "expandtabs")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Counts the steps of each rendering; `start` begins one. Several threads may render."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(finalize=self._count_print, **settings)
        self._local = threading.local()
        self.filters = {name: self.limit(name, call) for name, call in self.filters.items()}
        self.filters |= {_STEPS: self._count_passes, _CHECK: self._check}

    def start(self) -> None:
        """A rendering begins."""
        self._local.steps = self._local.chars = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(For)):
            chars = Const(sum(len(data.data) for data in loop.find_all(TemplateData)))
            loop.iter = Filter(loop.iter, _STEPS, [chars], [], None, None, lineno=loop.lineno)
        return _check_joins(tree)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja names them
        """See SandboxedEnvironment: calls of functions, methods and macros."""
        __self._step(1)
        _check_arguments(getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None), args, kwargs)
        return __self._check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _refuse_beyond(len(text) * times)
            if isinstance(left, int) and isinstance(right, int):
                _refuse_beyond(left.bit_length() + right.bit_length())
        elif operator == "**" and max(abs(left), abs(right)) > _MOST_POWER:
            raise SecurityError(f"a template computes {left} ** {right}; allowed: up to {_MOST_POWER}")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError(f"a template formats with {left[:50]!r}; allowed: widths of up to 5 digits")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _refuse_beyond(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def limit(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts as a step and makes no long text."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            self._step(1)
            given = args[1:] if hasattr(call, "jinja_pass_arg") else args
            _check_arguments(name, given[0] if given else None, given[1:], kwargs)
            return self._check(call(*args, **kwargs))

        if hasattr(call, "jinja_pass_arg"):
            limited.jinja_pass_arg = call.jinja_pass_arg  # type: ignore[attr-defined]
        return limited

    def _step(self, count: int) -> None:
        self._local.steps = getattr(self._local, "steps", 0) + count
        if self._local.steps > MOST_STEPS:
            raise SecurityError(f"a template takes more than {MOST_STEPS:,} steps; is one of its loops endless?")

    def _print(self, chars: int) -> None:
        self._local.chars = getattr(self._local, "chars", 0) + chars
        _refuse_beyond(self._local.chars)

    def _count_print(self, value: Any) -> Any:
        """Return what a template prints; counted once for each block that prints it."""
        self._print(len(value) if isinstance(value, str) else 1)
        return value

    def _count_passes(self, values: Any, chars: int) -> Any:
        """Return what a loop iterates over; its passes are counted as it begins, and `chars` of text for each."""
        if not hasattr(values, "__len__") and isinstance(values, Iterable):
            values = list(islice(values, MOST_STEPS + 1))
        passes = len(values) if hasattr(values, "__len__") else 1
        self._step(passes)
        self._print(passes * chars)
        return values

    def _check(self, value: Any) -> Any:
        if isinstance(value, str | bytes | list | tuple):
            _refuse_beyond(len(value))
        return value


_STEPS: Final = "draftmill_steps"
_CHECK: Final = "draftmill_check"


def _check_joins(tree: Template) -> Template:
    """Put a check around each `~`, which is no operator that can be intercepted."""
    for join in list(tree.find_all(Concat)):
        nodes = (tree, *tree.find_all(Node))
        parent = next(node for node in nodes if any(child is join for child in node.iter_child_nodes()))
        check = Filter(join, _CHECK, [], [], None, None, lineno=join.lineno)
        for name in parent.fields:
            held = getattr(parent, name)
            if held is join:
                setattr(parent, name, check)
            elif isinstance(held, list):
                setattr(parent, name, [check if child is join else child for child in held])
    return tree


def _check_arguments(name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse numbers that make long texts, as those of `center`, and products of texts."""
    given = [*args, *kwargs.values()]
    if name in {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson"}:
        for value in given:
            if isinstance(value, int) and value > MOST_STEPS:
                raise SecurityError(f"a template calls {name} with {value:,}; allowed: up to {MOST_STEPS:,}")
    if name in {"format", "format_map"} and isinstance(subject, str) and _WIDE.search(subject):
        raise SecurityError(f"a template formats with {subject[:50]!r}; allowed: widths of up to 5 digits")
    if name in _PRODUCTS:
        sizes = [len(value) for value in (subject, *given) if isinstance(value, str | list | tuple)]
        sizes += [value for value in given if isinstance(value, int)]
        if name == "replace" and isinstance(subject, str) and len(given) > 1 and isinstance(given[0], str):
            sizes = [subject.count(given[0]), len(str(given[1]))]
        _refuse_beyond(math.prod(max(1, size) for size in sizes[:2]))


def _refuse_beyond(length: int) -> None:
    if length > MOST_CHARS:
        raise SecurityError(f"a template makes a text of {length:,} characters; allowed: up to {MOST_CHARS:,}")


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
