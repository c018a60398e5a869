"""Local tasks of lm-evaluation-harness, of every kind of request, and a slow plain model that answers them."""

import json
from pathlib import Path

import yaml

DOCUMENTS = 6
UNTIL = ["\n\n", "class", "</s>"]
"""The last one is the end token of the builtin models, as tasks often name one."""

GENERATES: dict = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": UNTIL, "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
SAMPLES = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.9}
CHOOSES: dict = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ROLLS: dict = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{long}}",
    "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
}
TASKS: dict[str, dict] = {
    "gen": GENERATES,
    "repeated": GENERATES | {"generation_kwargs": SAMPLES, "repeats": 3},
    "choose": CHOOSES,
    "bare": CHOOSES | {"doc_to_text": "", "target_delimiter": ""},
    "roll": ROLLS,
}


def document(number: int) -> dict:
    """A question, choices that begin and end differently, and a text longer than the builtin models where it is the first."""
    return {
        "q": f"import os\n\ndef area{number}(width, height):\n    return width *" + " " * (number % 2),
        "a": str(number),
        "choices": ["height", "width + 1", "in", f"{number}"],
        "gold": number % 4,
        "long": f"def f{number}(x):\n    return x + {number}\n" * (90 if number == 0 else 3),
    }


def write_tasks(folder: Path, tasks: dict[str, dict] = TASKS, *, count: int = DOCUMENTS) -> Path:
    """The folder of these tasks, each with the same documents."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document(number)) + "\n" for number in range(count)))
    for name, task in tasks.items():
        given = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(given | {"test_split": "test"} | task))
    return folder


def write_eval_spec(folder: Path, **sections) -> Path:
    spec = {
        "seed": 7,
        "model": {"path": "builtin:ar-tiny", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "eval"), "unit_rows": 4},
    } | sections
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def samples_of(folder: Path, task: str) -> list[dict]:
    file = max((folder / "eval").glob(f"*/samples_{task}_*.jsonl"))
    return [json.loads(line) for line in file.read_text().splitlines()]


def results_of(folder: Path) -> dict:
    found: dict = json.loads(max((folder / "eval").glob("*/results_*.json")).read_text())
    return found
