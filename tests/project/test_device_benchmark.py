"""The benchmark for GPUs: its commands run in small on a CPU, and no case can end the others."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import device, device_right
from benchmarks.device_models import Case
from tests.device.steps import CASES
from tests.runs.jobs_of_tests import soak

TEXTS = next(iter(device_right.COLUMNS))
# What only jobs need; a bare GPU image does not have all of it.
NOT_THERE = ("ray", "pyarrow", "datasets", "boto3", "tenacity", "botocore", "scipy")


def printing(name: str, *lines, then: str = "", **more) -> Case:
    """A case whose process is a shell that prints lines, rows of the case in JSON among them, and does something else then."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    script = "\n".join([*(f"printf '%s\\n' '{text}'" for text in texts), then])
    return Case(name, TEXTS, lambda bench: iter(()), command=("sh", "-c", script), **more)


def rows(name: str, *found: str, done: bool = True) -> dict:
    return {"case": name, "rows": [(TEXTS, [name, text]) for text in found], **({"done": True} if done else {})}


def lines_of(text: str) -> dict[str, str]:
    """The lines of all tables by their first cell; all lines of a table have as many cells."""
    tables = re.findall(r"(?:^\| .*\n)+", text, re.M)
    assert all(len({line.count(" | ") for line in table.splitlines()}) == 1 for table in tables), text
    return {line.split(" | ")[0].removeprefix("| "): line for table in tables for line in table.splitlines()}


def test_a_case_that_raises_or_hangs_is_run_again_and_reported_and_the_others_run(tmp_path):
    cases = [
        printing("good", rows("good", "equal")),
        printing("raises", rows("raises", "so far", done=False), "ValueError: 7 is odd", "more", then="exit 3"),
        printing("hangs", "about to wait", then="sleep 1000", limit_s=0.5),
        printing("crashes", then="kill -SEGV $$"),
        printing("says nothing"),
        printing("ends badly", rows("ends badly", "equal"), then="exit 9"),
        printing("good too", rows("good too", "differs at token 3")),
    ]
    output = tmp_path / "found" / "device.md"
    report = device.Report("right", cases, output)
    device.run_all(cases, report, seconds=60, options=["--rehearse"], at_once=2, together=1)
    text = str(report)
    assert output.read_text() == text
    tables, _, failures = text.partition("## Failures")
    assert re.findall(r"^\| (.*?) \| (.*?) \|", tables, re.M)[2:] == [
        ("good", "equal"),
        ("raises", "so far"),
        ("raises", "failed: ValueError: 7 is odd; with CUDA_LAUNCH_BLOCKING=1: ValueError: 7 is odd"),
        ("hangs", "failed: took more than 0.5 s; with CUDA_LAUNCH_BLOCKING=1: took more than 0.5 s"),
        ("crashes", "failed: died by SIGSEGV; with CUDA_LAUNCH_BLOCKING=1: died by SIGSEGV"),
        ("says nothing", "failed: exit code 0; with CUDA_LAUNCH_BLOCKING=1: exit code 0"),
        ("ends badly", "equal"),
        ("ends badly", "failed: exit code 9; with CUDA_LAUNCH_BLOCKING=1: exit code 9"),
        ("good too", "differs at token 3"),
    ]
    assert "### raises: ValueError: 7 is odd\n\n```text\nValueError: 7 is odd\nmore\n```" in failures
    assert "### hangs, with CUDA_LAUNCH_BLOCKING=1: took more than 0.5 s\n\n```text\nabout to wait\n```" in failures
    assert "good" not in failures


def test_every_decoder_is_compared_and_names_are_given_once():
    cases = [case for command in device.COMMANDS for case in device.cases_of(command)[1:]]
    assert len({case.name for case in cases}) == len(cases) and {case.name for case in cases} >= set(CASES)
    for name, command in device.COMMANDS.items():
        assert {case.table for case in command.CASES} <= set(command.COLUMNS), name


def test_without_a_gpu_it_refuses(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="this machine has no usable GPU; --rehearse runs all cases in small on the"):
        device.main(["right"])


def test_a_case_runs_where_neither_ray_nor_arrow_is_installed():
    block = f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE}))"
    run = "from benchmarks import device; device.main(['--rehearse', '--case', 'facts'])"
    found = subprocess.run([sys.executable, "-c", f"{block}; {run}"], capture_output=True, text=True, check=True)
    last = json.loads(found.stdout.splitlines()[-1])
    assert last["case"] == "facts" and last["done"]
    assert ["The device", ["kernel: experts", "off: they are for NVIDIA GPUs"]] in last["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["step", *soak(device.COMMANDS.keys() - {"step"})])
def test_a_command_runs_in_a_rehearsal(command, tmp_path, capsys):
    output = tmp_path / "device.md"
    device.main([command, "--rehearse", "--output", str(output)])
    text = output.read_text()
    assert text in capsys.readouterr().out and "failed" not in text and "no time left" not in text
    found = lines_of(text)
    assert found["name"] == "| name | CPU |"
    assert all(f"## {title}\n" in text for title in device.COMMANDS[command].COLUMNS)
    if command == "right":
        compared = [line.split(" | ") for line in text.partition(TEXTS)[2].partition("## ")[0].splitlines()[4:] if line]
        assert len(compared) > 20 and {cells[2] for cells in compared} <= {"equal", "-"}
