"""What the tests of recipes share: a few files, a causal model to start from, a short schedule."""

from __future__ import annotations

from pathlib import Path

from recipes import ar, causal, causal_folder, corpus, loop

SHAPE = ar.SIZES["micro-test"].shape


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
