"""Jobs whose holes find their own lengths."""

import re
from itertools import zip_longest

import pytest

from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import next_job

CODE = "def add_{0}(a, b):\n    return <mask:1-4>\n\n\nfor name in <mask>(a, {0}):\n    print(name)\n"
ROWS = [{"id": f"{n}", "text": CODE.format(n)} for n in range(4)]
OPEN: dict = {"kind": "infill", "mask": {"kind": "marker", "length": {"min": 1, "max": 3}}}


def decoded(folder, rows: list[dict], model: str, decoder, task, **more):
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
    found = [decoded(tmp_path, ROWS, model, decoder, OPEN) for decoder in decoders]
    for results in found[1:]:
        assert [row["text"] for row in results.values()] == [row["text"] for row in found[0].values()]
    fixed = []
    for row in ROWS:
        texts = re.split(r"<mask.*?>", row["text"])
        markers = [f"<mask:{length}>" for length in lengths_of(found[0][row["id"]])]
        fixed.append(row | {"text": "".join(map("".join, zip_longest(texts, markers, fillvalue="")))})
    plain = decoded(tmp_path, fixed, model, decoders[0], OPEN)
    for name, row in found[0].items():
        assert row["text"] == plain[name]["text"] and row["tokens"] == plain[name]["tokens"]
        assert row["logprob"] == pytest.approx(plain[name]["logprob"], abs=1e-6)
        assert plain[name]["lengths_tried"] is None and plain[name]["length_logprob"] is None
    if model == "asarm-tiny":
        assert len({tuple(lengths_of(row)) for row in found[0].values()}) > 1, "lengths are drawn"


def test_forwards_count_for_all_lengths_that_were_tried(tmp_path):
    """Four lengths of the first hole, beside two tokens of the second; then one and three tokens of that one."""
    for row in decoded(tmp_path, ROWS, "asarm-tiny", {"kind": "any_subset"}, OPEN).values():
        first, second = lengths_of(row)
        assert row["lengths_tried"] == 6 and row["length_logprob"] < 0.0
        assert row["nfe"] == sum(first + 2 for first in (1, 2, 3, 4)) + 2 * first + 1 + 3 + 6
        assert row["iterations"] == first + second == len(row["tokens"])
    for row in decoded(tmp_path, ROWS, "mdm-tiny", {"kind": "stepwise"}, OPEN).values():
        assert row["lengths_tried"] == 7 and row["length_logprob"] is None
        assert row["nfe"] == 7 + sum(lengths_of(row))


def test_only_lengths_that_can_match_a_constraint_are_tried(tmp_path):
    rule = {"choice": ["a", "a + b", "a + b + a"]}
    task = OPEN | {"mask": {"kind": "marker", "length": "auto"}, "constraint": rule}
    rows = [{"id": "x", "text": "def add(a, b):\n    return <mask>\n"}]
    row = decoded(tmp_path, rows, "asarm-tiny", {"kind": "assd", "k": 3}, task)["x"]
    assert row["fills"][0]["text"] in rule["choice"]
    assert row["lengths_tried"] < 12, "a text of 5 characters has no more tokens, and few lengths have a text"


def test_decoders_that_can_not_find_lengths_say_so(tmp_path):
    with pytest.raises(UserError, match=r"task.mask.length: decoder 'parallel' can't find lengths"):
        decoded(tmp_path, ROWS, "asarm-tiny", {"kind": "parallel"}, OPEN)
    closed = OPEN | {"mask": {"kind": "marker", "length": 2}}
    model = {"path": "builtin:asarm-tiny"}
    results = next_job(tmp_path, ROWS[:1], task=closed, decoder={"kind": "parallel"}, model=model)
    assert "can't find a hole's length" in results["0"]["error"]
    with pytest.raises(UserError, match=r"at most 256 lengths"):
        decoded(
            tmp_path, ROWS, "asarm-tiny", {"kind": "assd"}, OPEN | {"mask": {"kind": "marker", "length": {"max": 999}}}
        )
