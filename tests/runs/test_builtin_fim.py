"""The builtin model that fills in the middle: its tokens, what it makes of the text after a hole, and its example."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.rows.fim import Template, template_of
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.jobs.config.spec import load_spec
from recipes import causal
from tests.runs.causal_jobs import run_here

FOLDER = BUILTIN / "fim-tiny"
END = 2
HELD_OUT = ("traceback.py", "html/parser.py", "unittest/signals.py", "sched.py")


@cache
def hidden_lines() -> list[tuple[str, str, str]]:
    """Lines of files that the model has not seen, each with the text before and after it."""
    found = []
    for name in HELD_OUT:
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()
        for start in range(0, len(text) - 900, max(900, len(text) // 8)):
            window = text[start : start + 900]
            begin = window.index("\n", 450) + 1
            end = window.find("\n", begin)
            if window[begin:end].strip():
                found.append((window[:begin], window[begin:end], window[end:]))
    return found


@cache
def model():
    torch.set_num_threads(1)
    return causal.load_model(FOLDER, torch.device("cpu"))


@cache
def tokenizer() -> Tokenizer:
    found = load_tokenizer(FOLDER)
    assert found is not None
    return found


@cache
def template() -> Template:
    return template_of("auto", tokenizer(), inspect_model(FOLDER))


def nats(before: str, middle: str, after: str, *, end: bool = True) -> float:
    """How surprised the model is by the middle (and its `end`), when it is asked for what lies between the two texts."""
    prefix, suffix = (np.array(tokenizer().encode(text), dtype=np.int32) for text in (before, after))
    prompt = template().prompt(prefix, suffix).tolist()
    wanted = [*tokenizer().encode(middle), *([END] if end else [])]
    with torch.no_grad():
        law = model()(torch.tensor([[*prompt, *wanted]])).logits[0].log_softmax(-1)
    return -sum(float(law[len(prompt) - 1 + place, token]) for place, token in enumerate(wanted))


def test_its_tokenizer_is_ar_tinys_with_three_more_tokens():
    other = load_tokenizer(BUILTIN / "ar-tiny")
    assert other is not None
    more = tokenizer().vocabulary().items() - other.vocabulary().items()
    assert dict(more) == {"<|fim_prefix|>": 2048, "<|fim_suffix|>": 2049, "<|fim_middle|>": 2050}
    assert other.vocabulary().items() <= tokenizer().vocabulary().items()
    assert (template().prefix, template().suffix, template().middle) == (2048, 2049, 2050) and template().lead == ()


@pytest.mark.slow
def test_it_reads_what_stands_after_a_hole():
    """The true line surprises it less beside its own text than beside the text that stands after another line."""
    lines = hidden_lines()
    assert len(lines) >= 16
    own = [nats(*line) for line in lines]
    others = [nats(before, middle, lines[n - 5][2]) for n, (before, middle, _) in enumerate(lines)]
    assert sum(own) < 0.95 * sum(others)
    assert sum(one < other for one, other in zip(own, others, strict=True)) > 0.7 * len(lines)


@pytest.mark.slow
def test_it_ends_a_line_where_the_line_ends():
    """The end surprises it less after a whole line than in the middle of one."""

    def end(before: str, said: str, after: str) -> float:
        return nats(before, said, after) - nats(before, said, after, end=False)

    whole = [end(*line) for line in hidden_lines()]
    half = [end(before, middle[: len(middle) // 2], after) for before, middle, after in hidden_lines()]
    assert sum(whole) < 0.5 * sum(half)


@pytest.mark.slow
def test_its_example_fills_every_hole(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    overrides = [f"output.path={tmp_path / 'run'}", "input.limit=6", "batching.max_rows=6"]
    rows = run_here(load_spec("examples/fim.yaml", overrides))
    assert {row["status"] for row in rows.values()} == {"ok"} and len(rows) == 6
    fills = [fill for row in rows.values() for fill in row["fills"]]
    assert 10 <= len(fills) <= 12, "two lines a row; neighbours are one hole"
    assert all(0 < fill["end"] - fill["start"] <= 48 for fill in fills)
    # The rows are sources of this project, so how many depends on the day; without the suffix nothing would end a line.
    assert sum("\n" not in fill["text"] for fill in fills) > len(fills) / 4, (
        "many fills are one line, as the holes were"
    )
    assert all(fill["text"] in row["text"] for row in rows.values() for fill in row["fills"])


def test_its_readme_has_its_quality():
    readme = (FOLDER / "README.md").read_text()
    assert "| this model, text on both sides | " in readme and "python -m recipes.fim" in readme
