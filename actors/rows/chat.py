"""Renders a checkpoint's Jinja chat template in a sandbox, like transformers but without importing it.

A template sees only plain JSON values: other values of a row become placeholders that name their type, since the sandbox does
not know the methods of rich objects. Source: `render_jinja_template` in transformers' utils/chat_template_utils.py;
tests/actors/rows/test_tokenizer_files.py compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from functools import cached_property
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.utils import Namespace

from draftmill.actors.rows.row import Messages
from draftmill.actors.rows.template_limits import LimitedEnvironment
from draftmill.actors.task import today

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

    def __call__(self, messages: Messages, day: date | None = None) -> str:
        """Return the conversation's text, with special tokens spelled out; raises whatever the template raises.

        `day`, at midnight, is the template's time: a clock would give each worker and each resume another prompt. None is today
        in UTC.
        """
        if not messages:
            raise ValueError("an empty conversation; a chat needs at least one message")
        # Rows have null for missing keys of a message, and many templates would print it.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        plain = [_with_reasoning(message) for message in _plain(given)]
        template = self._template
        cast("LimitedEnvironment", template.environment).start()
        return template.render(
            messages=plain,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            strftime_now=datetime.combine(day or today(), time()).strftime,
            **self._names,
        )

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.source)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = environment.limited("tojson", _to_json)
    environment.globals |= {
        "raise_exception": _raise,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


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
        raise SecurityError(
            f"a chat template can't store {name!r} in a namespace; allowed: names that do not start with _"
        )


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
    said = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}
