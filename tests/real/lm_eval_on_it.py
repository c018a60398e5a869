"""lm-evaluation-harness on the real model: `draftmill eval` beside lm_eval's own `hf` model, on tasks written here."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.real.jobs_on_it import Place, call

TASKS: dict[str, dict] = {
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{word}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "words": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}
CHOICES = ("The", "I am", "1", "Paris")


def write_tasks(
    folder: Path, questions: Sequence[str], new_tokens: int, until: Sequence[str] = ("\n\n", "</s>")
) -> Path:
    """The three tasks over these questions, as lm_eval reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": text, "word": text.split()[0], "choices": CHOICES, "gold": 0} for text in questions]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        kwargs = {"until": list(until), "max_gen_toks": new_tokens, "do_sample": False}
        generates = {"generation_kwargs": kwargs} if name == "answers" else {}
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(source | {"test_split": "test"} | task | generates))
    return folder


def offline() -> None:
    """Neither library may ask the hub for a data set, or for a description of the model."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1")


def ours(place: Place, tasks: Path, names: Sequence[str], *options: str, **sections) -> dict[str, list[dict]]:
    """The logged samples of `draftmill eval` by task."""
    folder = place.root / "lm_eval"
    spec = {
        "model": {"path": place.model},
        "decoder": {"kind": "speculative"},
        "workers": {"count": 1, "cpus": place.threads},
        "errors": {"max_count": 0},
        "output": {"path": str(folder / "eval")},
    } | sections
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = ["eval", str(folder / "spec.yaml"), "--tasks", *names, "--include_path", str(tasks), "--quiet", *options]
    code, said = call(*command)
    assert code == 0, f"eval ended with {code}: {said[-1500:]}"
    return {name: newest(folder / "eval", name) for name in names}


def newest(folder: Path, task: str) -> list[dict]:
    file = max(folder.glob(f"*/samples_{task}_*.jsonl"))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def theirs(model, tokenizer, tasks: Path, names: Sequence[str], **options) -> Mapping:
    """The results of lm_eval's own `hf` model over the same weights and the same tokenizer."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.pop("batch_size", 8)),
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found


def same_choices(one: Sequence[Mapping], other: Sequence[Mapping], close: float) -> int:
    """How many documents have log-probabilities this close and the same `is_greedy`; lm_eval logs them as texts."""
    count = 0
    for mine, their in zip(one, other, strict=True):
        pairs = zip((of[0] for of in mine["resps"]), (of[0] for of in their["resps"]), strict=True)
        count += all(
            abs(float(a) - float(b)) < close and str(greedy) == str(expected) for (a, greedy), (b, expected) in pairs
        )
    return count
