"""docs/library.md and the README's lines of Python run as they are, one block after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

PROMPTS = "id,question,level\na,def is_prime(n):,1\nb,import os,2\n"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: dict[str, Any] = {
        "task": {"kind": "complete", "max_new_tokens": 16},
        "input": {"path": "prompts.csv", "columns": {"id": "id", "prompt": "question"}, "keep": ["level"]},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "speculative"},
        "output": {"path": "runs/of-the-file"},
    }
    (tmp_path / "prompts.csv").write_text(PROMPTS)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert len(names["frame"]) == 2
    if page == "docs/library.md":
        out = capsys.readouterr().out
        assert "<draftmill run job: 2 of 2 samples ok, runs/first>" in out
        assert "\ndecoder.kind: 'assd' " in out
