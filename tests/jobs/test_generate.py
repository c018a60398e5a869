"""`draftmill.generate`: rows in order, the texts of a job with the same ids, and a model that is loaded once."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import draftmill
from draftmill.decoders.backbones import load
from tests.conftest import ROOT
from tests.jobs.test_api import MODEL, PROMPTS, TASK, job_of


def texts(rows: list[dict]) -> list[str]:
    return [row["text"] for row in rows]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the models that were loaded since."""
    real, loaded = load.load_backbone, list[Path]()

    def counting(folder: Path, *arguments, **options):
        loaded.append(folder)
        return real(folder, *arguments, **options)

    monkeypatch.setattr(load, "load_backbone", counting)
    return loaded


@pytest.mark.slow
def test_texts_are_those_of_a_job_with_the_same_ids(tmp_path):
    ids = [f"row-{number}" for number in range(len(PROMPTS))]
    rows = [{"id": name, "prompt": prompt, "level": 0} for name, prompt in zip(ids, PROMPTS, strict=True)]
    spec = job_of(tmp_path, rows, seed=5)
    expected = [row["text"] for row in draftmill.run(spec, local=True).rows(order="input")]
    found = draftmill.generate(MODEL, PROMPTS, ids=ids, task=TASK, seed=5)
    assert texts(found) == expected and [row["id"] for row in found] == ids
    drafted = draftmill.generate(MODEL, rows, task=TASK, seed=5, decoder={"kind": "speculative"})
    assert texts(drafted) == expected


@pytest.mark.slow
def test_a_prompt_has_the_same_text_alone_and_by_default_its_number_is_its_id():
    together = draftmill.generate(MODEL, PROMPTS, task=TASK)
    assert [row["id"] for row in together] == ["0", "1", "2", "3"]
    assert texts(draftmill.generate(MODEL, [PROMPTS[2]], ids=[2], task=TASK)) == [together[2]["text"]]


@pytest.mark.slow
def test_the_model_is_loaded_once_until_its_files_change(tmp_path, loads):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "decoders" / "builtin" / "ar-tiny", folder)
    model = {"path": str(folder), "device": "cpu"}
    first = draftmill.generate(model, PROMPTS[:2], task=TASK)
    assert texts(draftmill.generate(model, PROMPTS[:2], task=TASK)) == texts(first)
    assert loads == [folder]
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, folder / "model.safetensors")
    draftmill.generate(model, PROMPTS[:1], task=TASK)
    assert loads == [folder, folder]


def test_each_row_has_its_samples_side_by_side():
    rows = draftmill.generate(MODEL, PROMPTS[:2], task=TASK, sampling={"n": 3})
    assert [(row["id"], row["sample"]) for row in rows] == [(name, sample) for name in "01" for sample in range(3)]


@pytest.mark.slow
def test_holes_are_filled_by_the_baseline_of_the_models_family():
    task = {"kind": "infill", "mask": {"kind": "marker", "length": 3}}
    model = {"path": "builtin:asarm-tiny", "device": "cpu"}
    [row] = draftmill.generate(model, ["def add(a, b):\n    return <mask>\n"], task=task)
    assert row["decoder"] == "any_subset" and row["text"].startswith("def add(a, b):\n    return ")
    assert row["fills"][0]["text"] in row["text"]


@pytest.mark.slow
def test_a_prompt_that_fails_is_a_row_with_the_reason():
    good, bad = draftmill.generate(MODEL, [PROMPTS[0], "x = 1\n" * 2000], task=TASK)
    assert good["status"] == "ok" and (bad["status"], bad["error_kind"], bad["text"]) == ("failed", "too_long", None)


def test_nothing_is_printed_for_a_few_prompts(capfd):
    assert draftmill.generate(MODEL, PROMPTS[:1], task=TASK)[0]["status"] == "ok"
    assert draftmill.generate(MODEL, []) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "import os"}, "prompts: is a text; allowed: a list of texts or of rows"),
        ({"ids": ["a"]}, "ids: 1 ids of 2 prompts; allowed: one for each"),
        ({"output": {"path": "x"}}, "output: is not a section that generate takes; allowed: seed, task"),
        ({"task": {"kind": "complet"}}, "task.kind: "),
        ({"task": "complete"}, "task: "),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown key; did you mean sampling.temperature"),
        ({"model": "builtin:nothing"}, "model.path: 'builtin:nothing' does not exist"),
        ({"decoder": {"kind": "assd"}, "task": {"kind": "infill", "mask": {"kind": "random"}}}, "decoder.kind: 'assd'"),
        ({"prompts": [{"prompt": {1}}]}, "prompts.0: Object of type set is not JSON serializable"),
    ],
    ids=str,
)
def test_what_can_not_be_used_is_refused(arguments, message):
    with pytest.raises(draftmill.Error) as caught:
        given: dict = {"model": MODEL, "prompts": PROMPTS[:2], "task": TASK}
        draftmill.generate(**given | arguments)
    assert str(caught.value).startswith(message)
