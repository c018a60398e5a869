"""A chat template can neither loop without end nor fill the memory; ordinary ones render as before."""

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftmill.actors.rows import chat as template_limits
from draftmill.actors.rows.chat import ChatTemplate

SAID = [{"role": "user", "content": "Hello"}]
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
    "width of a field": "{{ '{:{}}'.format(1, 10**9) }}",
    "fields": "{{ ('{0}' * 2**10).format('a' * 2**20) }}",
    "percents": "{{ ('%s' * 2**10) % ([x] * 2**10) }}{{ ('%s' * 2**10)|format('a' * 2**20) }}",
    "mapped percent": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "wordwrap": "{{ ('a' * 1000)|wordwrap(1, wrapstring='b' * 10**6) }}",
    "indent": "{{ ('a\n' * 1000)|indent('b' * 10**6) }}",
    "join of long items": "{{ (['a' * 10**6] * 1000)|join }}",
    "join of a generator": "{{ ('a' * 10**4).join(range(10**5)|map('string')) }}",
    "list of long items": "{{ ['a' * 10**6] * 1000 }}",
    "tojson of long items": "{{ (['a' * 10**6] * 1000)|tojson }}",
    "tojson with separators": "{{ ([1] * 10**5)|tojson(separators=('a' * 10**5, ':')) }}",
    "list of itself": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "sum of lists": "{{ ([['a'] * 10**5] * 1000)|sum(start=[]) }}",
    "batch": "{% for i in range(10**4) %}{% set x = [1]|batch(10**6, 0)|list %}{% endfor %}",
    "bytes": "{{ (1).to_bytes(10**9, 'big')|length }}",
    "round": "{{ 10|round(-10**9) }}",
    "translate": "{{ ('a' * 10**5).translate({97: 'b' * 10**6})|length }}",
    "comparisons": "{% set x = 'a' * 2**23 %}{% for i in range(10**5) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "slices": "{% set x = 'a' * 2**23 %}{% for i in range(10**5) %}{% set y = x[1:] %}{% endfor %}",
    "copies": "{% set x = 'a' * 2**23 %}{% for i in range(10**5) %}{% set y = x + 'b' %}{% endfor %}",
    "slow filters": "{% set x = 'a b ' * 2**17 %}{% for i in range(10**5) %}{% set y = x|title %}{% endfor %}",
    "numbers": "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "dates": "{{ strftime_now('%c' * 10**6) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_a_template_that_would_hang_or_fill_the_memory_is_stopped(name):
    with pytest.raises(SecurityError, match=r"a template (takes|makes|computes|calls|formats)"):
        ChatTemplate(HOSTILE[name], {})(SAID)


def test_lipsum_is_not_there_and_texts_that_are_no_formats_are_not_refused():
    with pytest.raises(UndefinedError, match="'lipsum' is undefined"):
        ChatTemplate("{{ lipsum(n=10**9) }}", {})(SAID)
    assert (
        ChatTemplate("{{ '**%s** of 1000000' % 'x' }}{{ '{0}{a:>3}'.format(1, a=2) }}", {})(SAID)
        == "**x** of 10000001  2"
    )


def test_lists_are_joined_by_a_sum_within_the_limits():
    assert ChatTemplate("{{ [[1], [2, 3]]|sum(start=[]) }}", {})(SAID) == "[1, 2, 3]"
    many = "{% set many = [['a'] * 1000] * 2000 %}{{ (many|sum(start=[]))|length }}"
    with pytest.raises(SecurityError, match="a template makes"):
        ChatTemplate(many, {})(SAID)


def test_each_rendering_has_its_own_steps(monkeypatch):
    monkeypatch.setattr(template_limits, "MOST_STEPS", 50)
    template = ChatTemplate("{% for a in range(30) %}{{ loop.index }}{% endfor %}", {})
    assert template(SAID) == template(SAID) == "".join(map(str, range(1, 31)))


def test_what_templates_do_renders_as_in_jinjas_own_sandbox():
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
