"""Whole jobs whose texts must match, and whose holes find their own lengths: every family, lossless decoders and baselines."""

import json
import re
from itertools import zip_longest

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


CODE = "def add_{0}(a, b):\n    return <mask:1-4>\n\n\nfor name in <mask>(a, {0}):\n    print(name)\n"
ROWS = [{"id": f"{n}", "text": CODE.format(n)} for n in range(4)]
OPEN: dict = {"kind": "infill", "mask": {"kind": "marker", "length": {"min": 1, "max": 3}}}


def opened(folder, rows: list[dict], model: str, decoder, task, **more):
    sections = {"sampling": {"temperature": 0.9}, "model": {"path": f"builtin:{model}"}} | more
    results = next_job(folder, rows, unit_rows=2, task=task, decoder=decoder, **sections)
    assert {row["status"] for row in results.values()} == {"ok"}, [row["error"] for row in results.values()]
    return results


def lengths_of(row: dict) -> list[int]:
    return [fill["end"] - fill["start"] for fill in row["fills"]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model", "decoders"),
    [
        ("asarm-tiny", [{"kind": "any_subset"}, {"kind": "assd", "k": 3}, {"kind": "assd", "k": 3, "fused": "rows"}]),
        ("mdm-tiny", [{"kind": "stepwise"}, {"kind": "ssd"}]),
    ],
)
def test_a_text_is_that_of_a_job_with_the_lengths_that_were_found(tmp_path, model, decoders):
    found = [opened(tmp_path, ROWS, model, decoder, OPEN) for decoder in decoders]
    for results in found[1:]:
        assert [row["text"] for row in results.values()] == [row["text"] for row in found[0].values()]
    fixed = []
    for row in ROWS:
        texts = re.split(r"<mask.*?>", row["text"])
        markers = [f"<mask:{length}>" for length in lengths_of(found[0][row["id"]])]
        fixed.append(row | {"text": "".join(map("".join, zip_longest(texts, markers, fillvalue="")))})
    plain = opened(tmp_path, fixed, model, decoders[0], OPEN)
    for name, row in found[0].items():
        assert row["text"] == plain[name]["text"] and row["tokens"] == plain[name]["tokens"]
        assert row["logprob"] == pytest.approx(plain[name]["logprob"], abs=1e-6)
        assert plain[name]["lengths_tried"] is None and plain[name]["length_logprob"] is None
    if model == "asarm-tiny":
        assert len({tuple(lengths_of(row)) for row in found[0].values()}) > 1, "lengths are drawn"


def test_forwards_count_for_all_lengths_that_were_tried(tmp_path):
    """Four lengths of the first hole, beside two tokens of the second; then one and three tokens of that one."""
    for row in opened(tmp_path, ROWS, "asarm-tiny", {"kind": "any_subset"}, OPEN).values():
        first, second = lengths_of(row)
        assert row["lengths_tried"] == 6 and row["length_logprob"] < 0.0
        assert row["nfe"] == sum(first + 2 for first in (1, 2, 3, 4)) + 2 * first + 1 + 3 + 6
        assert row["iterations"] == first + second == len(row["tokens"])
    for row in opened(tmp_path, ROWS, "mdm-tiny", {"kind": "stepwise"}, OPEN).values():
        assert row["lengths_tried"] == 7 and row["length_logprob"] is None
        assert row["nfe"] == 7 + sum(lengths_of(row))


def test_only_lengths_that_can_match_a_constraint_are_tried(tmp_path):
    rule = {"choice": ["a", "a + b", "a + b + a"]}
    task = OPEN | {"mask": {"kind": "marker", "length": "auto"}, "constraint": rule}
    rows = [{"id": "x", "text": "def add(a, b):\n    return <mask>\n"}]
    row = opened(tmp_path, rows, "asarm-tiny", {"kind": "assd", "k": 3}, task)["x"]
    assert row["fills"][0]["text"] in rule["choice"]
    assert row["lengths_tried"] < 12, "a text of 5 characters has no more tokens, and few lengths have a text"


def test_decoders_that_can_not_find_lengths_say_so(tmp_path):
    with pytest.raises(UserError, match=r"task.mask.length: decoder 'parallel' can't find lengths"):
        opened(tmp_path, ROWS, "asarm-tiny", {"kind": "parallel"}, OPEN)
    closed = OPEN | {"mask": {"kind": "marker", "length": 2}}
    model = {"path": "builtin:asarm-tiny"}
    results = next_job(tmp_path, ROWS[:1], task=closed, decoder={"kind": "parallel"}, model=model)
    assert "can't find a hole's length" in results["0"]["error"]
    with pytest.raises(UserError, match=r"at most 256 lengths"):
        opened(
            tmp_path, ROWS, "asarm-tiny", {"kind": "assd"}, OPEN | {"mask": {"kind": "marker", "length": {"max": 999}}}
        )
