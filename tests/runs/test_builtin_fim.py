"""The builtin model that fills in the middle: its tokens and its example."""

from pathlib import Path

import pytest

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.rows.fim import template_of
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.jobs.config.spec import load_spec
from tests.runs.causal_jobs import run_here

FOLDER = BUILTIN / "fim-tiny"


def test_its_tokenizer_is_ar_tinys_with_three_more_tokens():
    own, other = load_tokenizer(FOLDER), load_tokenizer(BUILTIN / "ar-tiny")
    assert own is not None and other is not None
    more = own.vocabulary().items() - other.vocabulary().items()
    assert dict(more) == {"<|fim_prefix|>": 2048, "<|fim_suffix|>": 2049, "<|fim_middle|>": 2050}
    assert other.vocabulary().items() <= own.vocabulary().items()
    template = template_of("auto", own, inspect_model(FOLDER))
    assert (template.prefix, template.suffix, template.middle, template.lead) == (2048, 2049, 2050, ())


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
