"""What makes the prompt of a row, or fails it by name; chat templates can neither loop without end nor fill the memory."""

from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows import chat as template_limits
from draftmill.actors.rows.chat import ChatTemplate
from draftmill.actors.rows.makers import Maker, PromptMaker, maker_for
from draftmill.actors.rows.prompts import columns_of, read_columns
from draftmill.actors.rows.row import CHAT
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Chat, Columns, Complete, Infill, Prompt, Score, Task
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.lines import openai_request
from tests.actors.tokenizers_for_tests import byte_level, model_info
from tests.decoders.support import decoder_settings

COMPLETE = Complete(kind="complete", max_new_tokens=4)
ASKING = Complete(kind="complete", max_new_tokens=4, chat=True)
SHOTS = ({"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"})
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is false %}</think>{% endif %}{{ effort }}"
)


@pytest.fixture(scope="module")
def chatting() -> Tokenizer:
    from draftmill.actors.rows.chat import ChatTemplate

    plain = byte_level()
    return Tokenizer(plain._core, chat=ChatTemplate(TEMPLATE, {}))


DECODER = decoder_settings("autoregressive")


def maker(
    section: dict,
    task: Task = COMPLETE,
    *,
    tokenizer: Tokenizer | None = None,
    chat: dict | None = None,
    **columns: str,
) -> Maker:
    prompt = Prompt.model_validate(section, strict=True)
    recipe = RowRecipe(
        task, Columns(**columns), DECODER, Sampling(), prompt=prompt, chat=Chat(template_kwargs=chat or {})
    )
    return maker_for(recipe, tokenizer or byte_level(), model_info(max_length=400))


def prompt_of(made: Maker, row: dict) -> str:
    """The prompt of the row, or the text of its canvas with [] for each hole; planning knows its size."""
    canvas = made.make(row, 1)
    assert made.size(row, 1) == canvas.size
    pieces, start = [], 0
    for hole, end in (*canvas.holes, (len(canvas.tokens), 0)):
        pieces.append(byte_level().decode(canvas.tokens[start:hole].tolist()))
        start = end
    text = "[]".join(pieces)
    return text.removesuffix("[]") if isinstance(made, PromptMaker) else text


def failure(made: Maker, row: dict) -> str:
    with pytest.raises(RowError) as caught:
        made.make(row, 1)
    with pytest.raises(RowError) as planned:
        made.size(row, 1)
    assert planned.value.message == caught.value.message
    return f"{caught.value.kind}: {caught.value.message}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Q: {{ q }}\nA:", "Q: what?\nA:"),
        ("{{ row['a b'] }} {{ row.q }} {{ deep.er }}", "yes what? inside"),
        ("{{ none | default('-', true) }}{% if none %}x{% endif %}{{ absent | default('+') }}", "-+"),
        ("{{ day }} {{ q | upper }} {{ [1, 2] | tojson }}", "2026-11-26T00:00:00 WHAT? [1, 2]"),
        ("{% for x in [1, 2] %}\n{{ x }}\n{% endfor %}\n{{ q }}", "1\n2\nwhat?"),
    ],
)
def test_a_template_makes_the_prompt_of_the_row_s_columns(template, expected):
    row = {"q": "what?", "a b": "yes", "deep": {"er": "inside"}, "none": None, "day": datetime(2026, 11, 26)}
    assert prompt_of(maker({"template": template}), row) == expected


def test_what_a_row_lacks_fails_it_by_name():
    made = maker({"template": "{{ q }} {{ hint }}"})
    assert failure(made, {"q": "x"}) == ("missing_column: prompt.template: 'hint' is undefined; the row has 'q'")
    assert "null columns: 'hint'" in failure(made, {"q": "x", "hint": None})
    assert failure(maker({"template": "{{ 1 // q }}"}), {"q": 0}).startswith("bad_template: prompt.template: ZeroDiv")
    assert "steps" in failure(
        maker({"template": "{% for x in range(9999) %}{% for y in range(9999) %}{{ q }}{% endfor %}{% endfor %}"}),
        {"q": "x"},
    )
    assert "SecurityError" in failure(maker({"template": "{{ q.__class__.__mro__ }}"}), {"q": "x"})


def test_the_columns_of_a_template_are_read_and_no_others():
    assert columns_of("{% for e in examples %}{{ e.q }}{% endfor %}{{ q }}{% set x = range(2) %}{{ x }}") == (
        "examples",
        "q",
    )
    prompt = Prompt(template="{{ id }}{{ row['a.b'] }}")
    read = read_columns(RowRecipe(COMPLETE, Columns(id="key"), DECODER, Sampling(), prompt=prompt))
    assert set(read.values()) == {"key", "id", "a.b", "prompt", "text", "messages"}
    for template, problem in (
        ("{{ q", "line 1"),
        ("{{ q | nofilter }}", "nofilter"),
        ("{{ row }}", r"write row\['NAME'\]"),
        ("{{ row[q] }}", r"write row\['NAME'\]"),
    ):
        with pytest.raises(ValueError, match=problem):
            columns_of(template)


def test_a_template_gives_infilling_its_text_and_scoring_its_prompt():
    marked = Infill.model_validate({"kind": "infill", "mask": {"kind": "marker", "length": 3}}, strict=True)
    assert prompt_of(maker({"template": "def {{ name }}(<mask>): <mask>"}, marked), {"name": "f"}) == "def f([]): []"
    lines = Infill.model_validate({"kind": "infill", "mask": {"kind": "random", "rate": 1.0}}, strict=True)
    assert prompt_of(maker({"template": "{{ a }}{{ a }}"}, lines), {"a": "xy"}) == "[]"
    canvas = maker({"template": "Q {{ q }} A "}, Score(kind="score")).make({"q": "1", "completion": "one"}, 1)
    before, scored = canvas.tokens[: canvas.score_from], canvas.tokens[canvas.score_from :]
    assert [byte_level().decode(ids.tolist()) for ids in (before, scored)] == ["Q 1 A ", "one"]


def test_a_template_has_the_examples_and_a_chat_has_them_as_turns(chatting):
    loop = "{% for e in examples %}{{ e.q }}={{ e.a }};{% endfor %}{{ q }}="
    assert prompt_of(maker({"template": loop, "examples": {"rows": [*SHOTS]}}), {"q": "3+3"}) == "1+1=2;2+2=4;3+3="
    turns = {"template": "{{ q }}?", "system": "Add.", "examples": {"rows": [*SHOTS], "answer": "a"}}
    assert prompt_of(maker(turns, ASKING, tokenizer=chatting), {"q": "3+3"}) == (
        "<system>Add.<user>1+1?<assistant>2<user>2+2?<assistant>4<user>3+3?<assistant>"
    )
    plain = {"examples": {"rows": [*SHOTS], "answer": "a"}}
    assert prompt_of(maker(plain, ASKING, tokenizer=chatting, prompt="q"), {"q": "0"}) == (
        "<user>1+1<assistant>2<user>2+2<assistant>4<user>0<assistant>"
    )
    with pytest.raises(UserError, match=r"prompt\.examples: example 2: .*'q' is undefined"):
        maker(turns | {"examples": {"rows": [SHOTS[0], {"a": "4"}], "answer": "a"}}, ASKING, tokenizer=chatting)


def test_a_row_s_system_text_comes_before_its_conversation_s_and_this_before_the_job_s(chatting):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]
    job = {"system": "job"}
    made = maker(job, ASKING, tokenizer=chatting)
    assert prompt_of(made, {"prompt": "u"}) == "<system>job<user>u<assistant>"
    assert prompt_of(made, {"messages": own}) == "<system>own<user>u<assistant>"
    made = maker(job, ASKING, tokenizer=chatting, system="s")
    assert prompt_of(made, {"messages": own, "s": "row"}) == "<system>row<user>u<assistant>"
    assert prompt_of(made, {"messages": own, "s": None}) == "<system>own<user>u<assistant>"
    assert prompt_of(made, {"prompt": "u", "s": ""}) == "<system>job<user>u<assistant>"
    assert "missing_column: the column 's' is missing" in failure(made, {"prompt": "u"})


def test_arguments_of_the_chat_template_come_from_the_job_and_the_row_and_the_request(chatting):
    def asked(made: Maker, row: dict) -> str:
        return prompt_of(made, row).removeprefix("<user>u<assistant>")

    made = maker({}, ASKING, tokenizer=chatting, chat={"enable_thinking": False, "effort": "low"})
    assert asked(made, {"prompt": "u"}) == "</think>low"
    messages = [{"role": "user", "content": "u"}]

    def request(**body) -> dict:
        return openai_request({"custom_id": "a", "url": CHAT, "body": {"messages": messages} | body})

    assert asked(made, request(chat_template_kwargs={"enable_thinking": True, "effort": None})) == "low"
    plain = maker({}, ASKING, tokenizer=chatting)
    assert asked(plain, request(chat_template_kwargs={"enable_thinking": False})) == "</think>"
    own = maker({}, ASKING, tokenizer=chatting, template_kwargs="kw")
    assert asked(own, {"prompt": "u", "kw": '{"effort": "high"}'}) == "high"
    assert asked(own, {"prompt": "u", "kw": {"effort": "high"}}) == "high"
    values: tuple = ("x", [1], {"messages": []})
    for value in values:
        assert failure(own, {"prompt": "u", "kw": value}).startswith("bad_setting: kw: ")
    body = {"prompt": "u", "chat_template_kwargs": {"enable_thinking": False}}
    request_of_text = openai_request({"custom_id": "a", "body": body})
    assert "chat_template_kwargs: does not belong to /v1/completions" in failure(plain, request_of_text)


def test_a_scored_answer_has_the_same_prompt(chatting):
    task = Score(kind="score", chat=True)
    made = maker({"system": "s"}, task, tokenizer=chatting, chat={"effort": "low"}, template_kwargs="kw")
    canvas = made.make({"prompt": "u", "completion": "!", "kw": {"effort": "high"}}, 1)
    assert byte_level().decode(canvas.tokens.tolist()) == "<system>s<user>u<assistant>high!"


def test_a_long_templated_chat_is_cut_with_its_arguments(chatting):
    prompt, chat = Prompt(template="{{ q }}", system="s"), Chat(template_kwargs={"effort": "low"})
    recipe = RowRecipe(ASKING, Columns(), DECODER, Sampling(), truncate="left", prompt=prompt, chat=chat)
    made = maker_for(recipe, chatting, model_info(max_length=60))
    canvas = made.make({"q": "7" * 99 + "x"}, 1)
    text = byte_level().decode(canvas.tokens[: canvas.holes[0][0]].tolist())
    assert text.startswith("<system>s<user>7") and text.endswith("7x<assistant>low") and canvas.truncated > 0


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
