"""docs/library.md and the README's lines of Python run as they are, one block after another."""

import re

import pytest
import yaml

import draftmill
from tests.conftest import ROOT

PROMPTS = "id,question,level\na,def is_prime(n):,1\nb,import os,2\n"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    spec: dict = {
        "task": {"kind": "complete", "max_new_tokens": 16},
        "input": {"path": "prompts.csv", "columns": {"id": "id", "prompt": "question"}, "keep": ["level"]},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "speculative"},
        "output": {"path": "runs/of-the-file"},
    }
    (tmp_path / "prompts.csv").write_text(PROMPTS)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert len(names["frame"]) == 2
    if page == "docs/library.md":
        out = capsys.readouterr().out
        assert "<draftmill run job: 2 of 2 samples ok, runs/first>" in out
        assert "\ndecoder.kind: 'assd' " in out


@pytest.mark.slow
@pytest.mark.parametrize(("page", "file"), [("extraction", "orders.csv"), ("holes", "snippets.jsonl")])
def test_the_job_of_a_tutorial_runs(page, file, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    before, job = text.split("```yaml\n", 1)
    (tmp_path / file).write_text("\n".join(re.findall(r"^    (.*)$", before, re.MULTILINE)) + "\n")
    monkeypatch.chdir(tmp_path)
    run = draftmill.run(yaml.safe_load(job.partition("```")[0]), local=True)
    rows = list(run.rows())
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == before.count("\n    ") - (page == "extraction")
    names: dict = {}
    exec(compile(text.partition("```python\n")[2].partition("```")[0], page, "exec"), names)
    printed, shown = (part.split() for part in (capsys.readouterr().out, text.rpartition("```text\n")[2]))
    assert printed[:2] == shown[:2]
    if page == "extraction":
        schema = yaml.safe_load(job.partition("```")[0])["task"]["constraint"]["json_schema"]
        assert list(names["records"].columns) == schema["required"]
    else:
        assert "".join(fill["text"] for fill in rows[1]["fills"]).isprintable()
        assert re.fullmatch(r"timeout = \d+\nverbose = (True|False)\nretries = \d+\n", rows[1]["text"])
