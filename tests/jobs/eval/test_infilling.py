"""Tasks that ask for a hole: the rows that the model gets, the sandbox's pass@1, and what is refused before any work."""

import json

import pytest
import yaml

from draftmill.jobs.eval.infilling import TASKS, pass_at_k
from tests.jobs.eval.tasks_of_tests import GENERATES, results_of, samples_of, write_eval_spec, write_tasks
from tests.jobs.eval.test_evaluate import evaluated, offline

__all__ = ["offline"]

NAME = "humaneval_multi_line_infilling"
BODY, SUFFIX = "    return width * height", "\n\nlast = area\n"
DOCUMENTS = [
    {
        "task_id": f"MultiLineInfilling/{number}",
        "prompt": f'def area(width, height):\n    """Area {number}."""\n',
        "suffix": SUFFIX,
        "canonical_solution": BODY,
        "entry_point": "area",
        "test": "def check(candidate):\n    assert candidate(3, 4) == 12\n    assert last is candidate\n",
        "language": ("py", "js")[number],
    }
    for number in range(2)
]
MODELS: dict[str, dict] = {
    "asarm-tiny": {"kind": "assd"},
    "mdm-tiny": {"kind": "stepwise"},
    "fim-tiny": {"kind": "speculative"},
}
FOUND = {"kind": "marker", "length": {"min": 1, "max": 12}}
KNOWN = {"kind": "spans"}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory):
    """Draftmill's own tasks, under their names, with a data set that is made here."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCUMENTS))
    for file in TASKS.glob("*.yaml"):
        if file.stem != "humaneval_infilling":
            local: dict = {"dataset_path": "json", "dataset_name": None, "test_split": "test"}
            local |= {"dataset_kwargs": {"data_files": {"test": str(data)}}}
            (folder / file.name).write_text(yaml.safe_dump({"include": str(file), "task": file.stem} | local))
    return folder


def infilled(tasks, folder, model: str, task: dict | None, *names: str, most: int = 40) -> int:
    sections: dict = {} if task is None else {"task": {"kind": "infill"} | task}
    write_eval_spec(folder, model={"path": f"builtin:{model}", "device": "cpu"}, decoder=MODELS[model], **sections)
    options = ["--confirm_run_unsafe_code", "--gen_kwargs", f"max_gen_toks={most}"]
    return evaluated(folder, tasks, [*names] or [NAME], *options)


def rows_of(folder) -> list[dict]:
    """What the model was asked for this task."""
    files = (folder / "eval" / "requests").glob("infill-*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if row["id"].startswith(f"{NAME}:")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mask", [FOUND, KNOWN], ids=["found", "known"])
def test_a_perfect_fill_passes_and_a_wrong_one_fails(tasks, tmp_path, model, mask):
    """A constraint of one choice plants the fill. A wrong one has as many tokens, for the length that is known."""
    for fill, passed in ((BODY, 1.0), (BODY.replace("*", "+"), 0.0)):
        folder = tmp_path / str(passed)
        assert infilled(tasks, folder, model, {"mask": mask, "constraint": {"choice": [fill]}}) == 0
        assert [sample["resps"] for sample in samples_of(folder, NAME)] == [[[fill]]] * 2
        whole = [[[doc["prompt"] + fill + doc["suffix"]]] for doc in DOCUMENTS]
        assert [sample["filtered_resps"] for sample in samples_of(folder, NAME)] == whole
        assert results_of(folder)["results"][NAME]["pass@1,create_test"] == passed
        for row, doc in zip(rows_of(folder), DOCUMENTS, strict=True):
            if mask is KNOWN:
                (start, end), text = row["spans"][0], row["text"]
                assert (text[:start], text[start:end], text[end:]) == (doc["prompt"], BODY, doc["suffix"])
            else:
                assert (row["prefix"], row["suffix"]) == (doc["prompt"], doc["suffix"])
                assert row.keys() == {"id", "prefix", "suffix"}, "the hidden text is not given away"


@pytest.mark.parametrize("model", MODELS)
def test_a_free_fill_is_that_of_an_ordinary_infilling(tasks, tmp_path, model):
    """Also a fixed length; the single-line task takes the fill up to its first line end."""
    from tests.runs.causal_jobs import job_spec, run_here

    mask = {"kind": "marker", "length": 5}
    assert infilled(tasks, tmp_path, model, {"mask": mask}, NAME, NAME.replace("multi", "single"), most=16) == 0
    own = {"max_new_tokens": 16} if model == "fim-tiny" else {}
    spec = job_spec(
        tmp_path,
        rows_of(tmp_path),
        task={"kind": "infill", "mask": mask} | own,
        model={"path": f"builtin:{model}", "device": "cpu"},
        decoder=MODELS[model],
        sampling={"temperature": 0.0},
        seed=7,
        input={"path": str(tmp_path / "rows.jsonl"), "columns": {"prefix": "prefix", "suffix": "suffix"}},
    )
    fills = [row["fills"][0] for row in run_here(spec).values()]
    assert [sample["resps"][0][0] for sample in samples_of(tmp_path, NAME)] == [fill["text"] for fill in fills]
    lines = [sample["resps"][0][0] for sample in samples_of(tmp_path, NAME.replace("multi", "single"))]
    assert lines == [fill["text"].split("\n")[0] for fill in fills]
    if model != "fim-tiny":
        assert all(fill["end"] - fill["start"] == 5 for fill in fills)


def test_santacoder_counts_exact_matches_by_language(tasks, tmp_path):
    task = {"mask": KNOWN, "constraint": {"choice": [BODY]}}
    assert infilled(tasks, tmp_path, "fim-tiny", task, "santacoder_fim") == 0
    found = results_of(tmp_path)["results"]["santacoder_fim"]
    assert found["exact_match,none"] == found["py Exact Match,none"] == found["js Exact Match,none"] == 1.0


def test_programs_run_confined(tmp_path):
    """A program that would write outside fails; several samples of a document estimate pass@k."""
    made = tmp_path / "made"
    programs = ["x = 1", f"open({str(made)!r}, 'w').write('x')\nx = 1"]
    assert pass_at_k(["assert x == 1"], [programs], [1, 2]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert not made.exists()


def test_a_model_that_can_not_infill_is_refused(tasks, tmp_path, capsys):
    for model, decoder, reason in (
        ("ar-tiny", "autoregressive", "a causal model fills holes only if it was trained to fill in the middle"),
        (
            "block-tiny",
            "s2d2",
            "do not support 'infill'; tasks they support: complete, score; families that support it: ",
        ),
    ):
        write_eval_spec(tmp_path, model={"path": f"builtin:{model}", "device": "cpu"}, decoder={"kind": decoder})
        options = ["--confirm_run_unsafe_code", "--gen_kwargs", "max_gen_toks=40"]
        assert evaluated(tmp_path, tasks, [NAME], *options) == 2
        assert reason in capsys.readouterr().err and not (tmp_path / "eval").exists()


def test_code_is_run_only_if_it_is_allowed_and_holes_have_no_examples(tasks, tmp_path, capsys):
    write_eval_spec(tmp_path, model={"path": "builtin:fim-tiny", "device": "cpu"})
    assert evaluated(tmp_path, tasks, [NAME]) == 2
    assert "--confirm_run_unsafe_code allows it" in capsys.readouterr().err
    assert evaluated(tmp_path, tasks, [NAME], "--confirm_run_unsafe_code", "--num_fewshot", "2") == 2
    assert "asks for a hole between two texts" in capsys.readouterr().err


def test_wrong_columns_of_a_task_are_refused(tmp_path, capsys):
    write_eval_spec(tmp_path)
    for infill, reason in (
        ({"prefix": "q"}, "metadata.infill: {'prefix': 'q'}; allowed: a column for each of prefix, suffix, hidden"),
        (
            {"prefix": "q", "suffix": "b", "hidden": "a"},
            "infill.suffix: 'b' is no column of the documents; allowed: a, ",
        ),
    ):
        tasks = write_tasks(tmp_path / "tasks", {"hole": GENERATES | {"metadata": {"version": 1, "infill": infill}}})
        assert evaluated(tmp_path, tasks, ["hole"]) == 2
        assert reason in capsys.readouterr().err
