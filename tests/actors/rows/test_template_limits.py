"""A chat template can neither loop without end nor fill the memory; ordinary ones render as before."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftmill.actors.rows import chat as template_limits
from draftmill.actors.rows.chat import ChatTemplate

SAID: Any = [{"role": "user", "content": "Hello"}]
TWICE = "{% set x = x ~ x %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10**9 }}",
    "list": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 9**9**9 }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "filter": "{{ '%1000000000d'|format(1) }}",
    "concat": "{% set x = 'a' %}" + 40 * TWICE + "{{ x|length }}",
    "plus": "{% set x = 'a' %}" + 40 * "{% set x = x + x %}" + "{{ x|length }}",
    "replace": "{% set x = 'a' * 10**5 %}{{ x|replace('a', x)|length }}",
    "method": "{% set x = 'a' * 10**5 %}{{ x.replace('a', x)|length }}",
    "join": "{% set x = 'a' * 10**5 %}{{ x.join(x)|length }}",
    "printed": "{% set x = 'a' * 2**25 %}{% for a in range(99) %}{{ x }}{% endfor %}",
    "block": "{% set y %}{% for a in range(9999) %}{{ 'a' * 2**20 }}{% endfor %}{% endset %}{{ y|length }}",
    "data": "{% for a in range(99999) %}" + 9999 * "a" + "{% endfor %}",
    "tojson": "{{ [1]|tojson(indent=10**9) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_a_template_that_would_hang_or_fill_the_memory_is_stopped(name: str) -> None:
    with pytest.raises(SecurityError, match=r"a template (takes|makes|computes|calls|formats)"):
        ChatTemplate(HOSTILE[name], {})(SAID)


def test_each_rendering_has_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_STEPS", 50)
    template = ChatTemplate("{% for a in range(30) %}{{ loop.index }}{% endfor %}", {})
    assert template(SAID) == template(SAID) == "".join(map(str, range(1, 31)))


def test_what_templates_do_renders_as_in_jinjas_own_sandbox() -> None:
    source = (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ m.role | upper ~ ': ' ~ m['content'] | trim }}"
        "{% if loop.first and not loop.last %}{{ '-' * 3 + '>' }}{% endif %}{% else %}none{% endfor %}"
        "{{ messages | map(attribute='role') | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% for key, value in messages[0].items() if key != 'role' %}{{ key }}={{ value.replace('l', 'L') }}{% endfor %}"
        "{{ '%s and %05.1f' | format('a', 2) }}{{ 'b: %d' % 3 }}{{ 'x' | center(5) }}{{ 2 ** 8 }}"
        "{{ 7 % 3 }}{{ 'a,b'.split(',')[1] }}"
        "{% for c in 'abc' | reverse %}{{ c }}{% endfor %}"
        "{% for x in messages | map(attribute='content') %}{{ loop.length }}{% endfor %}"
    )
    said = [*SAID, {"role": "assistant", "content": " Hi "}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert ChatTemplate(source, {})(said) == plain.render(messages=said)
