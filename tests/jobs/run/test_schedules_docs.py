"""docs/schedules.md: its walk, as typed, prints what it says."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from draftmill.jobs.cli import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "schedules.md"


@pytest.mark.slow
def test_the_walk_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    walk = PAGE.read_text().partition("\n## Dates\n")[0]
    said = ""
    blocks = re.findall(r"```(\w+)\n(.*?)```", walk, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "yaml", *["sh", "text"] * 3]
    for kind, block in blocks:
        if kind == "yaml":
            Path("job.yaml").write_text(block)
        if kind == "sh":
            said = "".join(typed(line, capsys) for line in block.splitlines())
        if kind == "text":
            lines = [line for line in said.splitlines() if line in block.splitlines()]
            assert lines == block.splitlines()


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    if not line.startswith("draftmill "):
        subprocess.run(line, shell=True, check=True)
        return ""
    assert main(shlex.split(line)[1:]) == 0, line
    return capsys.readouterr().out
