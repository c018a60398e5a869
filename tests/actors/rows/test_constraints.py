"""From what a job or a row says to what its text must match."""

import json
from typing import Any

import numpy as np
import pytest

from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.constraints import ConstraintMaker, constraint_of_body, node_of, read_constraint
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.task import ConstraintSettings, Infill, Marker
from draftmill.decoders.base import HOLE
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.expressions import dfa_of
from draftmill.jobs.config.spec import check_spec
from draftmill.storage.errors import RowError, UserError
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of, word_pieces
from tests.decoders.support import accepts
from tests.jobs.specs import completion

DIGITS = ConstraintSettings(regex="[0-9]+")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def maker(constraints: Any, *, marker: str = "<hole>") -> Maker:
    task = Infill(kind="infill", mask=Marker(kind="marker", marker=marker, length=2), constraint=constraints)
    builder = ConstraintMaker(byte_level(), model_info(), ())
    return maker_for(recipe_of(task), byte_level(), model_info(), constraints=builder)


def made(text: str, constraints: Any, **more: Any) -> Canvas:
    return maker(constraints, **more).make({"text": text}, 0)


def refusal(text: str, constraints: Any, **more: Any) -> str:
    with pytest.raises(RowError) as caught:
        made(text, constraints, **more)
    return f"{caught.value.kind} {caught.value.message}"


def matching(canvas: Canvas, *texts: str) -> list[bool]:
    constraint = canvas.settings.constraint
    assert constraint is not None
    automata = zip(constraint.automata, texts, strict=True)
    return [
        automaton is None or (isinstance(automaton, Automaton) and accepts(automaton, byte_level().encode(text)))
        for automaton, text in automata
    ]


@pytest.mark.parametrize("tokenizer", [byte_level(), word_pieces()], ids=["bytes", "words"])
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(tokenizer):
    for text in ("the cat sat. a dog", "a mat"):
        ids = tokenizer.encode_behind(text)
        assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == tokenizer.continuation(ids)
    assert all(tokenizer.token_bytes(token) is None for token in tokenizer.special)


def test_one_constraint_is_for_all_holes_and_a_list_has_one_for_each():
    canvas = made("x = <hole> + <hole>", DIGITS)
    assert (matching(canvas, "12", "x"), canvas.constraint) == ([True, False], "regex")
    listed = made("x = <hole> + <hole>", (ConstraintSettings(choice=("yes", "no"), name="answer"), None))
    assert (matching(listed, "no", "x"), listed.constraint) == ([True, True], "answer")
    assert matching(listed, "12", "x") == [False, True]


def test_a_list_of_another_length_than_the_holes_fails_the_row():
    assert refusal("x = <hole>", (DIGITS, DIGITS)) == (
        "bad_setting constraint: 2 constraints, but the row has 1 holes; allowed: one for each"
    )


@pytest.mark.parametrize(
    ("marker", "text", "lengths"),
    [
        ("<hole>", "<hole:int> is <hole:word:3>, <hole> or <hole:4>", [2, 3, 2, 4]),
        ("{{...}}", "{{age:int}} is {{name:word:3}}, {{x}} or {{:4}}", [2, 3, 2, 4]),
    ],
)
def test_markers_name_the_constraints_of_their_holes(marker, text, lengths):
    canvas = made(text, {"int": DIGITS, "word": ConstraintSettings(regex="[a-z]{2,}")}, marker=marker)
    assert [end - start for start, end in canvas.holes] == lengths
    assert matching(canvas, "12", "for", "?", "?") == [True, True, True, True]
    assert matching(canvas, "for", "12", "?", "?") == [False, False, True, True]


def test_a_name_that_no_constraint_has_fails_the_row():
    assert refusal("<hole:float>", {"int": DIGITS}) == (
        "bad_mask a marker says ':float'; allowed: a length, such as :12, :4-12 or :auto, and a name: 'int'"
    )
    assert "side by side" in refusal("<hole:int><hole:int>", {"int": DIGITS})


def test_a_label_that_names_a_constraint_is_that_constraint():
    canvas = made("{[[int]]} is [[age:int:3]] or [[age]]", {"int": DIGITS}, marker="[[...]]")
    assert [end - start for start, end in canvas.holes] == [2, 3, 2]
    assert canvas.rules == (DIGITS, DIGITS, None) and matching(canvas, "ab", "ab", "ab") == [False, False, True]
    found = made("x = [[auto]]", {"int": DIGITS}, marker="[[...]]").lengths
    assert found is not None and found.choices == (tuple(range(1, 33)),)


@pytest.mark.parametrize(
    "text",
    ["[[3-8]]", "[[int", "a [[int]] b [[", "[[ int ]]", "[[age:int:int]]", "[[age:3:4]]", "[[age:float]]", "[[age:]]",
     "[[age:0]]", "[[age:4-2]]", "[[age:99999999999]]", "[[a\nb]]"],
)  # fmt: skip
def test_what_begins_like_a_marker_and_is_none_fails_the_row(text):
    assert refusal(text, {"int": DIGITS}, marker="[[...]]").startswith("bad_mask")
    assert refusal(text.replace("[[age", "<hole").replace("]]", ">"), DIGITS).split()[0] in (
        "bad_mask",
        "marker_absent",
    )


def test_a_marker_without_names_in_the_spec_fails_its_row():
    assert refusal("<hole:int>", DIGITS).startswith("bad_mask a marker says ':int'; allowed: a length")
    assert refusal("<hole:int", None).startswith("bad_mask '<hole:int' begins like a marker")
    assert "marker_absent" in refusal("a < b", None)


def test_dots_that_stand_alone_are_a_marker_of_their_own():
    assert [made(f"a {marker} b", None, marker=marker).holes for marker in ("...", "[[...", "...]]")] == [((2, 4),)] * 3


def test_names_of_a_rows_own_constraints_are_read():
    task = Infill(kind="infill", mask=Marker(kind="marker", marker="<hole>", length=2))
    own = maker_for(recipe_of(task, {"constraint": "c"}), byte_level(), model_info())
    canvas = own.make({"text": "<hole:n> <hole>", "c": {"n": {"regex": "[0-9]+"}}}, 0)
    assert canvas.rules == (DIGITS, None) and canvas.size.is_constrained
    assert not own.make({"text": "<hole>", "c": None}, 0).size.is_constrained


def test_lengths_that_no_text_has_fail_the_row():
    assert refusal("<hole:1>", ConstraintSettings(regex="[0-9]{9}")) == (
        "unsatisfiable constraint: no text of exactly 1 tokens matches it (hole 0)"
    )


def spells(rule: ConstraintSettings, text: str) -> bool:
    machine = dfa_of(node_of(rule), in_bytes=True)
    return machine is not None and machine.accepts(text.encode())


def test_choices_are_taken_literally():
    choices = ConstraintSettings(choice=("a+b", "c|d", " e"))
    assert spells(choices, "a+b") and spells(choices, " e") and not spells(choices, "aab")


def test_properties_come_in_the_order_of_the_schema():
    for names in (["b", "a"], ["a", "b"]):
        schema: Any = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names}
        rule = ConstraintSettings(json_schema=schema)
        assert spells(rule, json.dumps(dict.fromkeys(names, 1)))
        assert not spells(rule, json.dumps(dict.fromkeys(reversed(names), 1)))


def test_keywords_to_ignore_are_not_kept_and_are_in_the_results():
    schema: Any = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(RowError, match="ignore"):
        node_of(ConstraintSettings(json_schema=schema))
    rule = ConstraintSettings(json_schema=schema, ignore=("uniqueItems",), name="tags")
    assert spells(rule, '["a", "a"]') and rule.shown == "tags without uniqueItems"
    with pytest.raises(ValueError, match="ignore: is for keywords of a json_schema"):
        ConstraintSettings(regex="a", ignore=("minimum",))


def test_a_constraint_is_exactly_one_of_its_kinds():
    cases: list[dict[str, Any]] = [{}, {"regex": "a", "choice": ("a",)}]
    for wrong in cases:
        with pytest.raises(ValueError, match="allowed: one of regex, choice, json_schema, grammar"):
            ConstraintSettings(**wrong)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"regex": "a", "choice": None}, ConstraintSettings(regex="a")),
        ('{"choice": ["a", "b"]}', ConstraintSettings(choice=("a", "b"))),
        ([{"regex": "a"}, None], (ConstraintSettings(regex="a"), None)),
        ({}, None),
    ],
)
def test_a_column_holds_an_object_a_list_or_json(value, wanted):
    assert read_constraint(value) == wanted


@pytest.mark.parametrize("value", ["[0-9]+", '{"regexp": "a"}', 5])
def test_anything_else_in_a_column_fails_the_row(value):
    with pytest.raises(RowError, match="constraint"):
        read_constraint(value)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"guided_regex": "a+"}, ConstraintSettings(regex="a+")),
        ({"guided_choice": ["a", "b"]}, ConstraintSettings(choice=("a", "b"))),
        ({"guided_json": SCHEMA}, ConstraintSettings(json_schema=SCHEMA)),  # type: ignore[arg-type]
        ({"structured_outputs": {"json": SCHEMA}}, ConstraintSettings(json_schema=SCHEMA)),  # type: ignore[arg-type]
        ({"structured_outputs": {"regex": None}}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "rec", "schema": SCHEMA}}},
            ConstraintSettings(json_schema=SCHEMA, name="rec"),  # type: ignore[arg-type]
        ),
    ],
)
def test_requests_say_it_as_openai_and_vllm_do(body, wanted):
    assert constraint_of_body(body) == wanted


def test_any_object_is_a_schema_and_other_formats_are_refused():
    wanted = ConstraintSettings(json_schema={"type": "object"}, name="json_object")  # type: ignore[arg-type]
    assert constraint_of_body({"response_format": {"type": "json_object"}}) == wanted
    with pytest.raises(RowError, match=r"response_format.*xml.*allowed: text, json_schema, json_object"):
        constraint_of_body({"response_format": {"type": "xml"}})


def test_a_worker_keeps_the_latest_automata_that_fit(monkeypatch):
    builder = ConstraintMaker(byte_level(), model_info(), ())
    monkeypatch.setattr("draftmill.actors.rows.constraints._MOST_BYTES", 1)
    real = builder.automaton(DIGITS)
    assert builder.automaton(DIGITS) is real
    builder.automaton(ConstraintSettings(regex="a"))
    assert builder.automaton(DIGITS) is not real


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {"stop": ["x"]}}, "allowed: no task.stop"),
        ({"model": {"tokenizer": "none"}, "input": {"columns": {"tokens": "ids"}}}, "needs a tokenizer"),
        ({"decoder": {"kind": "block_diffusion", "tau_edit": 0.5}}, "tau_edit"),
    ],
)
def test_a_job_says_why_it_can_not_keep_a_constraint(changes, said):
    base = completion(task={"kind": "complete", "constraint": {"regex": DIGITS.regex}})
    check_spec(base)
    with pytest.raises(UserError, match=f"^task.constraint: .*{said}"):
        check_spec(base | {key: {**base[key], **more} for key, more in changes.items()})


def test_holes_of_a_canvas_without_markers_take_the_constraint_too():
    canvas = made("x = <hole>", DIGITS)
    assert np.count_nonzero(canvas.tokens == HOLE) == 2 and canvas.rules == (DIGITS,)
