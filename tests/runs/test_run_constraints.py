"""Whole jobs whose texts must match: every family, lossless decoders and their baselines, rows with constraints of their own."""

import json
import re

import jsonschema
import pytest

from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import next_job

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
}
PROMPTS = [{"id": f"{n}", "prompt": f"def read_{n}(file):\n    return "} for n in range(6)]
TEXTS = [{"id": f"{n}", "text": f"for i in range(<mask:int>):\n    x = {n}<mask:sum:4>\n"} for n in range(6)]
NAMED = {"int": {"regex": "[1-9][0-9]{0,4}"}, "sum": {"regex": r" \+ [a-z]+"}}
INFILL = {"kind": "infill", "mask": {"kind": "marker", "length": 2}, "constraint": NAMED}
COMPLETE = {"kind": "complete", "max_new_tokens": 40, "constraint": {"json_schema": SCHEMA, "name": "file"}}
MODEL = {"kind": "model", "path": "builtin:ar-micro"}


def decoded(folder, rows: list[dict], model: str, decoder, task, **more):
    sections = {"sampling": {"temperature": 0.9}, "model": {"path": f"builtin:{model}"}} | more
    return next_job(folder, rows, unit_rows=4, task=task, decoder=decoder, **sections)


def texts_of(results: dict[str, dict]) -> dict[str, str]:
    assert {row["status"] for row in results.values()} == {"ok"}, [row["error"] for row in results.values()]
    return {name: row["text"] for name, row in results.items()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model", "decoders"),
    [
        (
            "ar-tiny",
            [{"kind": "autoregressive"}, {"kind": "speculative", "k": 4, "drafter": MODEL}, {"kind": "jacobi"}],
        ),
        ("mdm-tiny", [{"kind": "stepwise"}, {"kind": "ssd"}]),
    ],
)
def test_every_answer_is_valid_and_lossless_decoders_give_the_baselines(tmp_path, model, decoders):
    found = [decoded(tmp_path, PROMPTS, model, decoder, COMPLETE) for decoder in decoders]
    texts = [texts_of(results) for results in found]
    assert all(each == texts[0] for each in texts) and len(set(texts[0].values())) > 1
    for text in texts[0].values():
        jsonschema.validate(json.loads(text), SCHEMA)
    assert {row["constraint"] for row in found[0].values()} == {"file"}
    free = decoded(tmp_path, PROMPTS, model, decoders[0], COMPLETE | {"constraint": None})
    assert not any(text.startswith("{") for text in texts_of(free).values()), "the model does not do it by itself"


def test_holes_match_what_their_markers_name(tmp_path):
    found = [
        decoded(tmp_path, TEXTS, "asarm-tiny", decoder, INFILL)
        for decoder in ({"kind": "any_subset"}, {"kind": "assd", "k": 4}, {"kind": "assd", "fused": "rows"})
    ]
    assert texts_of(found[0]) == texts_of(found[1]) == texts_of(found[2])
    for row in found[0].values():
        number, summand = (fill["text"] for fill in row["fills"])
        assert re.fullmatch(NAMED["int"]["regex"], number) and re.fullmatch(NAMED["sum"]["regex"], summand)


def test_a_causal_model_fills_typed_holes_one_after_another(tmp_path):
    results = decoded(tmp_path, TEXTS, "fim-tiny", {"kind": "autoregressive"}, INFILL)
    for row in results.values():
        assert row["status"] == "ok", row["error"]
        number, summand = (fill["text"] for fill in row["fills"])
        assert re.fullmatch(NAMED["int"]["regex"], number) and re.fullmatch(NAMED["sum"]["regex"], summand)


def test_rows_have_constraints_of_their_own_and_bad_ones_fail_alone(tmp_path):
    rules = [{"choice": ["a", "b"]}, '{"regex": "[0-9]{3}"}', None, {"regex": "("}, {"regex": "x{90}"}, "?"]
    rows = [{"id": f"{n}", "prompt": "def f", "rule": rule} for n, rule in enumerate(rules)]
    (tmp_path / "rows.jsonl").write_text("")
    found = decoded(
        tmp_path,
        rows,
        "ar-tiny",
        {"kind": "autoregressive"},
        {"kind": "complete", "max_new_tokens": 8},
        input={"path": str(tmp_path / "rows.jsonl"), "columns": {"constraint": "rule"}},
    )
    assert found["0"]["text"] in {"a", "b"} and re.fullmatch("[0-9]{3}", found["1"]["text"])
    assert [found[f"{n}"]["constraint"] for n in range(3)] == ["choice", "regex", None]
    kinds = {name: row["error_kind"] for name, row in found.items() if row["status"] == "failed"}
    assert kinds == {"3": "bad_setting", "4": "unsatisfiable", "5": "bad_setting"}


def test_a_constraint_that_no_text_of_the_job_can_keep_ends_it_before_work_starts(tmp_path):
    for constraint, words in (
        ({"regex": "("}, "can be compiled"),
        ({"regex": "x{99}"}, "the shortest text that matches it has"),
        ({"json_schema": {"properties": {"a": {"minimum": "1"}}, "if": 5}}, "#/properties/a/minimum.*#/if: 5 is no"),
        ({"json_schema": "nowhere.json"}, "can't be read"),
    ):
        with pytest.raises(UserError, match=words):
            decoded(tmp_path, PROMPTS, "ar-tiny", {"kind": "autoregressive"}, COMPLETE | {"constraint": constraint})


LISTS = 'start: "[" item ("," item)* "]"\nitem: NUMBER | start\nNUMBER: /[0-9]{1,2}/\n'


@pytest.mark.slow
def test_causal_models_write_by_a_grammar_and_what_does_not_end_in_time_fails(tmp_path):
    task = {"kind": "complete", "max_new_tokens": 32, "constraint": {"grammar": LISTS}}
    found = [
        decoded(tmp_path, PROMPTS, "ar-tiny", decoder, task)
        for decoder in ({"kind": "autoregressive"}, {"kind": "speculative", "k": 4, "drafter": MODEL})
    ]
    assert [row["tokens"] for row in found[0].values()] == [row["tokens"] for row in found[1].values()]
    good = [row["text"] for row in found[0].values() if row["status"] == "ok"]
    assert good and all(re.fullmatch(r"[\[\],0-9]+", text) and isinstance(json.loads(text), list) for text in good)
    assert {row["error_kind"] for row in found[0].values()} <= {None, "bad_constraint"}


def test_a_grammar_is_for_causal_models(tmp_path):
    for model, decoder, grammar, words in (
        ("mdm-tiny", {"kind": "stepwise"}, LISTS, "a grammar is for causal models"),
        ("ar-tiny", {"kind": "autoregressive"}, "start: (", "not a grammar that llguidance can read"),
    ):
        with pytest.raises(UserError, match=words):
            decoded(tmp_path, PROMPTS, model, decoder, COMPLETE | {"constraint": {"grammar": grammar}})


def test_a_schema_is_refused_before_the_model_is_looked_for(tmp_path):
    task = COMPLETE | {"constraint": {"json_schema": {"minimum": "a", "properties": {"a": {"format": "x"}}}}}
    with pytest.raises(UserError, match=r"#/minimum.*#/properties/a/format"):
        decoded(tmp_path, PROMPTS, "nothing", {"kind": "autoregressive"}, task)
