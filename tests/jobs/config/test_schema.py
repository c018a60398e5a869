"""`validate --schema`: valid JSON Schemas, to which every example and page conforms, and wrong keys and values do not."""

import json
import re
from unittest.mock import Mock

import jsonschema
import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import json_schema, load_spec
from draftmill.jobs.config.sweep_spec import sweep_schema
from tests.conftest import ROOT
from tests.jobs.specs import completion

PUBLISHED = sorted((ROOT / "examples" / "published").glob("*.yaml"))
FILES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "papers").glob("*.yaml"), *PUBLISHED])
JOB = completion()
SWEEP = {"base": JOB, "cases": {"a": None, "b": {"decoder.k": 4}}, "output": {"path": "out"}}


def problems(data) -> list[str]:
    """What the schema of its kind says of a spec or a sweep file."""
    schema = sweep_schema() if "base" in data else json_schema()
    found = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def spec_blocks(page) -> list:
    """The whole specs and sweep files in a page."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    return [block for block in blocks if isinstance(block, dict) and {"output", "task"} <= block.keys() | {"task"}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("words", [[], ["job"], ["sweep"]], ids=str)
def test_the_command_prints_a_valid_schema(words, capsys):
    assert main(["validate", "--schema", *words]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == (sweep_schema() if words == ["sweep"] else json_schema())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_example_conforms(file):
    assert problems(yaml.safe_load(file.read_text())) == []


def test_published_settings_are_whole_jobs():
    assert len({load_spec(path).name for path in PUBLISHED}) == len(PUBLISHED) == 8


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "first-job.md", ROOT / "docs" / "sweeps.md"], ids=str
)
def test_every_spec_of_a_page_conforms(page):
    blocks = spec_blocks(page)
    assert blocks and [problem for block in blocks for problem in problems(block)] == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"sed": 1}, ""),
        ({"task": {"kind": "complete", "max_tokens": 3}}, "task"),
        ({"task": {"kind": "complete", "max_new_tokens": 0}}, "task"),
        ({"decoder": {"kind": "assd", "k": "four"}}, "decoder"),
        ({"notify": {"command": ["a"], "on": ["end"]}}, "notify"),
    ],
    ids=str,
)
def test_a_wrong_key_or_value_does_not_conform(changes, place):
    [problem] = problems(JOB | changes)
    [of_sweep] = problems(SWEEP | {"base": JOB | changes})
    assert problem.startswith(f"{place}:") and of_sweep.startswith("base:")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"kind": "complete", "stop": "x"}},
        {"task": {"kind": "complete", "stop": ["x", "y"]}},
        {"metrics": ["length", "pass@1", {"kind": "rouge"}]},
        {"notify": {"command": "date", "on": "finish"}},
        {"workers": [{"gpus": 1}, {"count": 2}]},
    ],
    ids=str,
)
def test_short_forms_conform(changes):
    assert problems(JOB | changes) == [] and problems(SWEEP | {"base": JOB | changes}) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "conforms"),
    [
        ({"base": "job.yaml"}, True),
        ({"base": {"output": {"unit_rows": 8}, "model": {}}}, True),
        ({"cases": {"a": 3}}, False),
        ({"grid": {"seed": [1, 2]}}, False),
        ({"output": {}}, False),
        ({"case": {}}, False),
    ],
    ids=str,
)
def test_a_sweep_has_a_base_and_either_cases_or_a_grid(changes, conforms):
    assert (problems(SWEEP | changes) == []) is conforms
    grid = {key: value for key, value in SWEEP.items() if key != "cases"} | {"grid": {"seed": [1, 2]}}
    assert problems(grid) == []


def test_a_spec_beside_schema_is_refused(capsys):
    """It would not be checked."""
    with pytest.raises(SystemExit) as refused:
        main(["validate", "job.yaml", "--schema"])
    assert refused.value.code == 2 and "--schema: not allowed with argument SPEC.yaml" in capsys.readouterr().err


def test_a_reader_that_has_exited_ends_the_schema_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    assert main(["validate", "--schema"]) == 1
    assert capsys.readouterr().err == ""
