"""A template, a system message, examples and arguments of the chat template make the prompt of a row, or fail it by name."""

from datetime import datetime

import pytest

from draftmill.actors.job import RowRecipe
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
    assert made.sizes([(row, 1)]) == [canvas.size]
    pieces, start = [], 0
    for hole, end in (*canvas.holes, (len(canvas.tokens), 0)):
        pieces.append(byte_level().decode(canvas.tokens[start:hole].tolist()))
        start = end
    text = "[]".join(pieces)
    return text.removesuffix("[]") if isinstance(made, PromptMaker) else text


def failure(made: Maker, row: dict) -> str:
    with pytest.raises(RowError) as caught:
        made.make(row, 1)
    (planned,) = made.sizes([(row, 1)])
    assert isinstance(planned, RowError) and planned.message == caught.value.message
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
