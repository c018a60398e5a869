"""The benchmark for GPUs: its commands run in small on a CPU, and no case can end the others."""

import json
import re
import subprocess
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks import device, device_right
from benchmarks.device_models import AR, LLAMA_8B, Bench, Case, decoder_of, first_difference, requests_of, stream
from tests.decoders.replaying import use_graphs
from tests.device import steps
from tests.device.steps import CASES, run_on_cpu
from tests.runs.jobs_of_tests import soak

TEXTS = next(iter(device_right.COLUMNS))
# What only jobs need; a bare GPU image does not have all of it.
NOT_THERE = ("ray", "pyarrow", "datasets", "boto3", "tenacity", "botocore", "scipy", "outlines_core")


def printing(name: str, *lines: Any, then: str = "", **more: Any) -> Case:
    """A case whose process is a shell that prints lines, rows of the case in JSON among them, and does something else then."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    script = "\n".join([*(f"printf '%s\\n' '{text}'" for text in texts), then])
    return Case(name, TEXTS, lambda bench: iter(()), command=("sh", "-c", script), **more)


def rows(name: str, *found: str, done: bool = True) -> dict[str, Any]:
    return {"case": name, "rows": [(TEXTS, [name, text]) for text in found], **({"done": True} if done else {})}


def report_of(cases: list[Case], tmp_path: Any, *, seconds: float = 60.0, together: int = 1) -> str:
    output = tmp_path / "found" / "device.md"
    report = device.Report("right", cases, output)
    device.run_all(cases, report, seconds=seconds, options=["--rehearse"], at_once=2, together=together)
    assert output.read_text() == str(report)
    return str(report)


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
    text = report_of(cases, tmp_path)
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


def test_a_case_that_runs_only_where_launches_block_has_the_rows_of_that_run(tmp_path):
    fails = 'test "$CUDA_LAUNCH_BLOCKING" || { seq 70; echo "torch.AcceleratorError: CUDA error"; exit 1; }'
    case = printing("shy", then=f"{fails}\nprintf '%s\\n' '{json.dumps(rows('shy', 'equal'))}'")
    text = report_of([case], tmp_path)
    assert "| shy | equal |" in text
    assert "| failed: torch.AcceleratorError: CUDA error; with CUDA_LAUNCH_BLOCKING=1: it runs |" in text
    assert text.partition("```text\n")[2].splitlines()[0] == "22", "the last 50 of 71 lines"
    assert text.count("### ") == 1


def test_cases_of_one_process_that_come_after_one_that_fails_run_in_another(tmp_path):
    """The process of several cases gets their names as arguments."""
    script = """for name in a b c; do
      case "$*" in *"--case $name"*) ;; *) continue;; esac
      test $name = b && { echo "RuntimeError: b"; exit 1; }
      printf '{"case": "%s", "rows": [], "done": true}\\n' $name
    done"""
    seen = list[tuple[str, str]]()
    cases = [replace(printing(name), command=("sh", "-c", script)) for name in "abc"]
    report = device.Report("right", cases, tmp_path / "device.md")
    report.add = lambda case, rows, note="", failures=(): seen.append((case.name, note))  # type: ignore[method-assign]
    device.run_all(cases, report, seconds=60, options=["--rehearse"], together=3)
    again = "failed: RuntimeError: b; with CUDA_LAUNCH_BLOCKING=1: RuntimeError: b"
    assert seen == [("a", ""), ("b", again), ("c", "")]


def test_cases_without_time_or_program_say_so(tmp_path):
    missing = replace(printing("needs it"), command=("no-such-sanitizer", "--strict"))
    assert "| needs it | no-such-sanitizer is not installed |" in report_of([missing], tmp_path)
    assert "| late | no time left |" in report_of([printing("late")], tmp_path, seconds=0)


def test_a_line_that_was_cut_off_is_no_row():
    whole = json.dumps(rows("a", "equal"))
    ended = device._read([whole + "\n", whole[:30]])
    assert ended.rows == {"a": [(TEXTS, ["a", "equal"])]} and ended.tail == whole[:30]


def test_texts_that_differ_are_named_by_request_and_token():
    expected = run_on_cpu("autoregressive").outcomes
    assert first_difference(expected, expected) == "equal"
    tokens = expected[3].tokens.copy()
    tokens[2] += 1
    found = expected | {3: replace(expected[3], tokens=tokens)}
    one, other = tokens[2], expected[3].tokens[2]
    assert first_difference(found, expected) == (
        f"differs at token 2 of request 3: {one} in place of {other}; 4 of 5 are equal"
    )
    failed = expected | {0: replace(expected[0], error_kind="nan_logits", error="not finite")}
    assert first_difference(failed, expected) == "request 0 failed: nan_logits: not finite"


def test_a_stream_admits_what_fits_beside_the_longest():
    model = Bench(rehearse=True).model(LLAMA_8B)
    decoder = decoder_of(model, AR, 2, columns=12)
    queue = deque(requests_of(model, [(4, 2), (18, 4), (4, 3)]))
    done = [outcome.index for _, ended in stream(decoder, queue) for outcome in ended]
    assert done == [0, 1, 2]


def test_a_long_run_is_compared_where_steps_are_captured(monkeypatch):
    use_graphs(monkeypatch)
    found = [cells for _, cells in device_right._long("any_subset", "two engines", Bench(rehearse=True))]
    assert [cells[1:3] for cells in found] == [["two engines", "equal"], ["the second engine", "equal"]]
    assert all(re.fullmatch(r"[1-9]\d* replayed, [1-9]\d* captured", cells[-1]) for cells in found)


def test_texts_of_the_cpu_are_read_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "expected.json"
    device.main(["expect", "--rehearse", "--expected", str(path), "--case", "autoregressive"])
    bench = Bench(rehearse=True, expected=path)
    compared = partial(device_right._usual, "autoregressive", device_right._WAYS)
    assert [cells[2] for _, cells in compared(bench)] == ["equal"] * 3
    with monkeypatch.context() as patch:
        patch.setattr(device_right, "_decode", lambda decoder, requests: pytest.fail("decoded on the CPU"))
        assert (
            len(device_right._on_cpu(bench, "autoregressive", "float64", steps.toy_canvases(2, "autoregressive"))) == 2
        )
    texts = {key: [[7], *more] for key, (_, *more) in json.loads(path.read_text()).items()}
    (other := tmp_path / "other.json").write_text(json.dumps(texts))
    found = [cells[2] for _, cells in compared(Bench(rehearse=True, expected=other))]
    assert all(text.startswith("differs at token 0 of request 0: ") for text in found)


@pytest.mark.parametrize("name", ["autoregressive", "assd"])
def test_prompts_join_texts_in_a_wide_cache(name, monkeypatch):
    use_graphs(monkeypatch)
    (_, cells), *_ = device_right._wide(name, Bench(rehearse=True))
    assert cells[:3] == [name, "51 columns", "equal"]
    longest = max(len(one.canvas) for one in device_right._wide_requests(name, Bench(rehearse=False)))
    assert longest > 1024 + steps.LENGTH


def test_a_file_of_texts_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        device.parse(["right", "--rehearse", "--expected", str(tmp_path / "none.json")])
    assert "none.json is not there; `python -m benchmarks.device expect` writes it" in capsys.readouterr().err


def test_every_decoder_is_compared_and_names_are_given_once():
    cases = [case for command in device.COMMANDS for case in device.cases_of(command)[1:]]
    assert len({case.name for case in cases}) == len(cases) and {case.name for case in cases} >= set(CASES)
    for name, command in device.COMMANDS.items():
        assert {case.table for case in command.CASES} <= set(command.COLUMNS), name


def test_without_a_gpu_it_refuses(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="this machine has no usable GPU; --rehearse runs all cases in small on the"):
        device.main(["right"])


def test_an_unknown_case_is_named(capsys):
    with pytest.raises(SystemExit):
        device.parse(["job", "--case", "speed"])
    assert "--case: 'speed' is not known; allowed: facts, Llama-8B, automatic, " in capsys.readouterr().err


def test_a_case_runs_where_neither_ray_nor_arrow_is_installed():
    block = f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE}))"
    run = "from benchmarks import device; device.main(['--rehearse', '--case', 'facts'])"
    found = subprocess.run([sys.executable, "-c", f"{block}; {run}"], capture_output=True, text=True, check=True)
    last = json.loads(found.stdout.splitlines()[-1])
    assert last["case"] == "facts" and last["done"]
    assert ["The device", ["kernel: experts", "off: they are for NVIDIA GPUs"]] in last["rows"]


@pytest.mark.slow
def test_an_exception_in_a_case_stands_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTMILL_KERNELS", "2")
    output = tmp_path / "device.md"
    device.main(["right", "--rehearse", "--case", "logits", "--output", str(output)])
    assert (
        "| logits | failed: ValueError: DRAFTMILL_KERNELS: '2' is not allowed; allowed: 0, 1; with"
        in output.read_text()
    )


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
