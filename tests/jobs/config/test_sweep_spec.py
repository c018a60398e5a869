"""The sweep file: cases and grids become jobs with safe, unique names; a wrong file is refused by the key that is wrong."""

import pytest
import yaml

from draftmill.jobs.config.sweep_spec import LONGEST_NAME, Sweep, _grid, load_sweep, short_names
from draftmill.storage.errors import UserError

BASE = {
    "task": {"kind": "infill", "mask": {"kind": "given"}},
    "input": {"path": "rows.jsonl", "columns": {"id": "id", "tokens": "tokens"}},
    "model": {"path": "somewhere", "tokenizer": "none"},
    "decoder": {"kind": "assd", "k": 3},
}


def load(folder, *overrides: str, **keys) -> Sweep:
    """The sweep of a file that has these keys, without those whose value is None."""
    data = {"base": BASE, "cases": {"a": {}}, "output": {"path": "out"}} | keys
    path = folder / "many.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False))
    return load_sweep(path, overrides)


def test_a_case_is_the_base_with_other_values_and_a_folder_of_its_own(tmp_path):
    cases = {
        "same": None,
        "short": {"decoder.k": 2, "sampling": {"temperature": 0.5}},
        "other": {"decoder": {"kind": "any_subset"}},
    }
    sweep = load(tmp_path, cases=cases, output={"path": "s3://bucket/out/"})
    specs = {case.name: case.spec for case in sweep.cases}
    assert list(specs) == ["same", "short", "other"] and all(specs.values())
    found = {
        name: (
            spec.name,
            spec.output.path,
            spec.decoder.kind,
            getattr(spec.decoder, "k", None),
            spec.sampling.temperature,
        )
        for name, spec in specs.items()
        if spec is not None
    }
    assert found == {
        "same": ("many/same", "s3://bucket/out/cases/same", "assd", 3, 1.0),
        "short": ("many/short", "s3://bucket/out/cases/short", "assd", 2, 0.5),
        "other": ("many/other", "s3://bucket/out/cases/other", "any_subset", None, 1.0),
    }


def test_the_base_may_be_a_file_beside_the_sweep_file(tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(BASE | {"output": {"path": "elsewhere", "unit_rows": 7}}))
    for base in ("job.yaml", str(tmp_path / "job.yaml")):
        (case,) = load(tmp_path, base=base).cases
        assert case.spec is not None and (case.spec.output.path, case.spec.output.unit_rows) == ("out/cases/a", 7)


def test_a_grid_has_a_case_for_every_combination_named_by_its_values(tmp_path):
    grid = {"decoder.k": [2, 4], "sampling.temperature": [0, 0.75], "model.path": ["builtin:one", "models/two"]}
    sweep = load(tmp_path, cases=None, grid=grid)
    assert [case.name for case in sweep.cases][:3] == [
        "k-2_temperature-0_model-one", "k-2_temperature-0_model-two", "k-2_temperature-0.75_model-one"
    ]  # fmt: skip
    assert len(sweep.cases) == 8 and len({case.name for case in sweep.cases}) == 8
    assert dict(sweep.cases[7].changes) == {"decoder.k": 4, "sampling.temperature": 0.75, "model.path": "models/two"}


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ({"model.path": ["a/x", "b/x", "B/X"]}, ["model-x", "model-x.2", "model-X.3"]),
        (
            {"decoder.kind": ["any_subset"], "input.limit": [None, 3]},
            ["decoder-any_subset_limit-null", "decoder-any_subset_limit-3"],
        ),
        ({"decoder": [{"kind": "assd", "k": 2}, {"kind": "any_subset"}]}, ["decoder-assd-k-2", "decoder-any_subset"]),
        ({"seed": [-1, True]}, ["seed--1", "seed-true"]),
        ({"a.k": [1], "b.k": [1]}, ["a.k-1_b.k-1"]),
        ({"task.stop": [["\n\n"], ["a b", "c"]]}, ["stop-x", "stop-a-b+c"]),
        ({"name": ["é" * 300, "z" * 300]}, None),
    ],
)
def test_names_of_a_grid_are_safe_and_unique(tmp_path, grid, names):
    found = [case.name for case in load(tmp_path, cases=None, grid=grid).cases]
    assert names is None or found == names
    assert all(name.isascii() and "/" not in name and len(name) <= LONGEST_NAME for name in found)
    assert len({name.casefold() for name in found}) == len(found)


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (
            {
                "decoder": [{"kind": "assd", "k": 2}, {"kind": "assd", "k": 4}, {"kind": "any_subset"}],
                "sampling.temperature": [0],
            },
            ["assd k 2", "assd k 4", "any_subset"],
        ),
        (
            {"decoder.k": [2, 4], "sampling.temperature": [0, 0.8]},
            ["k 2 temperature 0", "k 2 temperature 0.8", "k 4 temperature 0", "k 4 temperature 0.8"],
        ),
        ({"model.path": ["org/one", "other/one"]}, ["model-one", "model-one.2"]),
        ({"decoder.k": [2]}, ["k-2"]),
    ],
)
def test_short_names_of_a_grid_say_what_tells_its_cases_apart(grid, names):
    assert list(short_names(_grid(grid)).values()) == names


def test_names_that_the_user_gave_stay():
    cases = {"slow": {"decoder.k": 2}, "fast": {"decoder.k": 4}}
    assert short_names(cases) == {"slow": "slow", "fast": "fast"} and short_names({}) == {}


def test_a_wrong_case_is_an_error_of_its_own(tmp_path):
    cases = {"good": {}, "zero": {"decoder.k": 0}, "typo": {"decoder.kk": 1}, "kind": {"decoder.kind": "any_subset"}}
    found = {case.name: case.error for case in load(tmp_path, cases=cases).cases}
    assert found["good"] is None
    assert str(found["zero"]) == "decoder.k: 0 is not allowed; allowed: >= 1 or auto"
    assert "decoder.kk: unknown key; did you mean decoder.k?" in str(found["typo"])
    assert str(found["kind"]).endswith("if the whole section is changed: decoder={kind: any_subset}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"case": {}}, "case: unknown key; did you mean cases? known keys: name, base, cases, grid, metrics, output"),
        ({"decoder": {"kind": "assd"}}, "decoder: unknown key; did you mean base.decoder?"),
        ({"base": None}, "base: missing"),
        ({"base": [1]}, "base: [1] is not allowed; allowed: a string or a mapping"),
        ({"base": "nowhere.yaml"}, "spec nowhere.yaml: No such file or directory"),
        ({"output": None}, "output: missing"),
        ({"output": {}}, "output.path: missing"),
        ({"output": {"path": 3}}, "output.path: 3 is not allowed; allowed: a string"),
        ({"output": {"path": "x", "unit_rows": 3}}, "output.unit_rows: unknown key; known under output: path"),
        ({"output": {"path": "ftp://x"}}, "output.path: ftp:// is not allowed; allowed: a local path, s3://..., memory://..."),
        ({"cases": None}, "cases: both are missing; allowed: one of cases and grid"),
        ({"grid": {"seed": [1]}}, "cases: both are there; allowed: one of cases and grid"),
        ({"cases": {}}, "cases: {} is not allowed"),
        ({"cases": {"../x": {}}}, "cases: the name '../x' is not safe as a folder's name"),
        ({"cases": {".x": {}}}, "cases: the name '.x' is not safe"),
        ({"cases": {"a b": {}}}, "cases: the name 'a b' is not safe"),
        ({"cases": {"a" * 101: {}}}, "is not safe as a folder's name"),
        ({"cases": {"a": {}, "A": {}}}, "the names 'a' and 'A' are the same folder where case does not matter"),
        ({"cases": {1: {}}}, "cases.1: 1 is not allowed; allowed: a string"),
        ({"cases": {"a": 3}}, "cases.a: 3 is not allowed; allowed: a mapping"),
        ({"cases": {"a": {"": 3}}}, "'' is not a dotted key of the job"),
        ({"cases": {"a": {"output.path": "x"}}}, "cases.a.output.path: every case's results are in its own folder"),
        ({"cases": None, "grid": {"seed": 3}}, "grid.seed: 3 is not allowed; allowed: a list"),
        ({"cases": None, "grid": {"seed": []}}, "grid.seed: [] is not allowed; allowed: a length of at least 1"),
        ({"cases": None, "grid": {"seed": [1, 1]}}, "grid.seed: 1 occurs twice"),
        ({"cases": None, "grid": {"seed": list(range(40)), "decoder.k": list(range(30))}}, "grid: 1,200 cases are too many"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_its_key(tmp_path, keys, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, **keys)
    assert message in str(error.value)


def test_a_case_that_is_named_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("base: {}\ncases:\n  a: {}\n  a: {seed: 1}\noutput: {path: out}\n")
    with pytest.raises(UserError, match="the key 'a' occurs twice"):
        load_sweep(path)


def test_an_override_sets_the_base_or_the_place_and_not_what_the_cases_vary(tmp_path):
    cases = {"a": {"decoder.k": 2}, "b": {}}
    sweep = load(tmp_path, "seed=7", "output.path=there", "base.input.limit=3", "name=x", cases=cases)
    for case in sweep.cases:
        assert case.spec is not None
        found = (case.spec.seed, case.spec.output.path, case.spec.input.limit, case.spec.name)
        assert found == (7, f"there/cases/{case.name}", 3, f"x/{case.name}")
    for override in ("decoder.k=4", "decoder={kind: any_subset}"):
        with pytest.raises(UserError, match=r"the case a of the sweep sets decoder\.k; change it in the sweep file"):
            load(tmp_path, override, cases=cases)
