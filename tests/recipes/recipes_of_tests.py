"""What the tests of recipes share: a few files, a causal model to start from, a short schedule, what every training keeps."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from recipes import ar, causal, causal_folder, corpus, loop

SHAPE = ar.SIZES["micro-test"].shape


@cache
def few_files() -> list[corpus.SourceFile]:
    """Some training files and two held-out ones."""
    train, held_out = corpus.split(corpus.standard_library())
    return train[:12] + [file for file in held_out if 6_000 < len(file.text) < 20_000][:2]


def small_causal_model(place: Path) -> Path:
    """The folder of a causal model to start from, with queries', keys' and values' own weights."""
    folder = place / "ar-test"
    causal_folder.save_model(folder, causal.new_model(SHAPE, 0), SHAPE, ar.TOKENIZER)
    return folder


def short_schedule(steps: int, seed: int = 0) -> loop.Schedule:
    """Windows of 16 and 32 tokens."""
    return loop.Schedule(
        steps=steps,
        seed=seed,
        batch_tokens=512,
        lengths=(16, 32),
        length_shares=(0.5, 0.5),
        warmup=2,
        learning_rate=5e-3,
    )


def no_report(step: int, *values: float) -> None:
    """Training reports nothing."""


def check_training(make, steps: int = 30) -> None:
    """Training with the trainers that `make` gives is repeatable and lowers the loss."""
    losses = []
    for _ in range(2):
        trainer = make()
        losses.append([trainer.advance() for _ in range(steps)])
    assert losses[0] == losses[1]
    assert np.mean(losses[0][-8:]) < np.mean(losses[0][:8]) - 0.2


def written_twice(recipe, flags: list[str], folder: Path) -> tuple[Path, Path]:
    """What a recipe writes in one go, and in two; both see a few files in the place of the standard library."""
    few, whole, resumed = few_files(), folder / "whole", folder / "resumed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: few)
        assert recipe.main([*flags, "--out", str(whole)]) == 0
        again = [*flags, "--out", str(resumed), "--checkpoint-dir", str(folder / "state")]
        assert recipe.main([*again, "--minutes", "0"]) == 3
        assert recipe.main(again) == 0
    return whole, resumed


def check_written(folders: tuple[Path, Path], files: tuple[str, ...], *lines: str) -> None:
    """Both folders have the same files; the page has these lines and the held-out files."""
    whole, resumed = folders
    for name in files:
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name
    text = (whole / "README.md").read_text()
    assert all(f"- `{file.path}`" in text for file in few_files()[-2:])
    assert all(line in text for line in lines)


def check_config(folder: Path, public: Path, own: set[str], least: int) -> None:
    """config.json has the fields of the public checkpoint, `least` of them at least, and their values but for its own."""
    config, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, public))
    kept = (config.keys() & theirs.keys()) - own
    assert own - {"n_kv_heads"} <= config.keys() and len(kept) >= least
    assert {key: config[key] for key in kept} == {key: theirs[key] for key in kept}


def has_tokenizer(folder: Path) -> bool:
    return all(
        (folder / name).read_bytes() == (ar.TOKENIZER / name).read_bytes() for name in causal_folder.TOKENIZER_FILES
    )


MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json")
