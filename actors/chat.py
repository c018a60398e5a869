"""Chat templates: a checkpoint's own Jinja program, rendered in a sandbox as transformers renders it, but without importing it.

A template sees plain JSON values only: whatever else a row holds becomes a placeholder that names its type, since the methods
of rich objects are unknown to the sandbox. Source: `render_jinja_template` in transformers' utils/chat_template_utils.py, which
tests/actors/test_tokenizer_files.py compares with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from actors.rows import Messages

# Names under which a message's reasoning is passed; the first is the one that chat templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders a conversation up to where the model's answer begins. `names` are the special tokens by name: {bos_token: <s>}."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source, self._names = source, dict(names)

    def __call__(self, messages: Messages) -> str:
        """Return the conversation's text, special tokens spelled out; raises whatever the template raises."""
        if not messages:
            raise ValueError("an empty conversation; a chat needs at least one message")
        # Rows give null for what a message lacks, and many templates would print it.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        plain = [_with_reasoning(message) for message in _plain(given)]
        return self._template.render(
            messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._names
        )

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self._source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; the text is that of its body."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, which takes no name with an underscore in front."""

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
        raise SecurityError(f"a chat template can't store {name!r} in a namespace; allowed: names without _ in front")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would escape HTML."""
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
    """Give a message's reasoning the names that templates read."""
    said = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}
