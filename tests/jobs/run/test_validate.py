"""The dry run says what a job would do, and writes nothing."""

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.task import Complete
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import HOLE
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.plan.planning import FirstRow
from draftmill.jobs.plan.resolve import length_note
from draftmill.jobs.run.validate import (
    canvas_lines,
    device_lines,
    estimate_rows,
    prompt_text,
    quantized_lines,
    validate,
)
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import list_inputs
from tests.actors.tokenizers_for_tests import byte_level
from tests.jobs.specs import completion, infilling


def test_a_dry_run_names_the_first_failures_and_the_exit_code_that_they_lead_to(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    bodies = [{"prompt": "x"} | ({"best_of": 2} if number % 4 == 0 else {}) for number in range(20)]
    url = "/v1/completions"
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    spec = completion(tmp_path)
    assert validate(check_spec(spec)) == 0
    said = capsys.readouterr().out
    assert said.count("  unsupported  r") == 3 and "  unsupported  r0: best_of: '2' is not supported" in said
    assert "and 2 more of status failed and error_kind unsupported" in said
    assert (
        "5 of 20 samples failed; errors.max_rate: 0.01 allows 1 (few rows: 5 %, at most 5); the run will end with exit code 3"
        in said
    )
    assert validate(check_spec(spec | {"errors": {"max_rate": 0.5}})) == 0
    assert "exit code 3" not in capsys.readouterr().out


def test_a_dry_run_shows_small_weights_and_their_bytes(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    model = {"path": "builtin:ar-micro", "weights": "int8", "device": "cpu"}
    assert validate(check_spec(completion(tmp_path, model=model))) == 0
    said = capsys.readouterr().out
    numbers = int(re.findall(r"([\d,]+) parameters", said)[0].replace(",", ""))
    amount, unit = re.findall(r"CPU, float32, weights int8, ([\d.]+) ([kM])B, torch", said)[0]
    assert numbers < float(amount) * {"k": 1e3, "M": 1e6}[unit] < 2 * numbers
    assert "exact     true" in said


def test_a_dry_run_says_what_a_quantized_checkpoint_takes_once_it_is_unpacked(tmp_path):
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (tmp_path / "model.safetensors").write_bytes(bytes(700_000))
    resolved: Any = SimpleNamespace(folder=tmp_path, info=SimpleNamespace(num_parameters=1_000_000))
    assert list(quantized_lines(resolved)) == [
        "weights   quantized to 4 bits, 700.0 kB; unpacked when they are loaded: 4.0 MB in float32, 2.0 MB in bfloat16"
    ]
    (tmp_path / "config.json").write_text("{}")
    assert list(quantized_lines(resolved)) == []


def test_a_dry_run_shows_the_first_canvas_and_the_size(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    rows = [{"id": "bad"}, *({"id": f"r{number}", "text": f"x = <mask:{number + 1}>;\n"} for number in range(20))]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    spec = check_spec(infilling(tmp_path, name="dry", task={"kind": "infill", "mask": {"kind": "marker"}}))
    assert validate(spec) == 0
    said = capsys.readouterr().out
    for part in (
        "dry: infill, mask marker, decoder assd, drafter self",
        "3,090,944 parameters, up to 512 tokens",
        "canvas    r0:",
        "1 to generate in 1 hole",
        "  | x = [1];",
        "samples   21; read 21 of them",
        "fail    1 of those read: missing_column 1",
        "10.0 a sample, 210 to generate",
        "units     1 of at most 32 samples",
        "useful in batches",
        "device    CPU, float32, torch ",
        "memory",
        "room    ",
        "GiB free on cpu: ",
        "samples of 512 tokens at once",
    ):
        assert part in said, f"{part!r} is not in\n{said}"
    assert not (tmp_path / "run").exists()


def test_a_prompt_shows_holes_as_their_lengths():
    a, b = byte_level().encode("a")[0], byte_level().encode("b")[0]
    canvas = Canvas(np.asarray([HOLE, a, HOLE, HOLE, b], dtype=np.int32), ((0, 1), (2, 4)))
    assert prompt_text(canvas, byte_level()) == "[1]a[2]b"


def test_rows_are_estimated_from_bytes_or_known_from_parquet(tmp_path):
    (tmp_path / "a.txt").write_text("twelve chars\n" * 1000)
    inputs = list_inputs(str(tmp_path / "a.txt"))
    canvas = Canvas(np.asarray([HOLE], np.int32), ((0, 1),))
    sample = [FirstRow(0, 13 * n, "x", 0, canvas) for n in range(101)]
    assert estimate_rows(inputs, sample) == 1000
    pq.write_table(pa.table({"text": ["a"] * 77}), tmp_path / "b.parquet")
    assert estimate_rows(list_inputs(str(tmp_path / "b.parquet")), sample) == 77


def test_prompts_that_will_be_cut_are_counted():
    resolved: Any = SimpleNamespace(tokenizer=None, recipe=SimpleNamespace(task=Complete(kind="complete")))
    tokens = np.asarray([7, 7, 7, HOLE], np.int32)
    rows = [FirstRow(0, None, "r", 0, Canvas(tokens, ((3, 4),), truncated=cut)) for cut in (0, 7, 9)]
    lines = list(canvas_lines(resolved, rows))
    assert lines[-1] == "  cut     2 of the first 3 prompts do not fit: 16 of their tokens"
    assert not any("cut" in line for line in canvas_lines(resolved, rows[:1]))


def test_a_dry_run_shows_the_length_and_constraint_of_each_hole(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    text = {"text": "[[int]] of [[x:3-8]], [[a:word:2]]"}
    mask, constraint = {"kind": "marker", "marker": "[[...]]", "length": 4}, {"int": {"regex": "[0-9]+"}}
    task = {"kind": "infill", "mask": mask, "constraint": constraint | {"word": {"regex": "[a-z ]+"}}}
    spec = infilling(tmp_path, task=task, decoder={"kind": "any_subset"})
    file.write_text(json.dumps(text))
    assert validate(check_spec(spec)) == 0
    assert "\n  holes   4 tokens int, 3-8 tokens, 2 tokens word\n" in capsys.readouterr().out
    file.write_text(json.dumps({"text": "[[age]]"}))
    with pytest.raises(UserError, match="no marker of any row names one of them"):
        validate(check_spec(spec))


def test_half_precision_is_compared_with_float32_on_this_cpu():
    device = {"name": "CPU", "dtype": "bfloat16", "torch": "2.13.0"}
    lines = list(device_lines(device | {"times_float32": 5.2}))
    assert lines[0] == "device    CPU, bfloat16, torch 2.13.0"
    assert "bfloat16 products take 5.2 times as long as float32's on this CPU" in lines[1]
    assert len(list(device_lines(device))) == 1
    fast = device | {"dtype": "float32", "bfloat16_times": 0.6}
    assert "float32 is exact; bfloat16 products take 0.6 of its time" in list(device_lines(fast))[1]


def test_a_completion_longer_than_its_model_is_noted():
    info = inspect_model(BUILTIN / "ar-tiny")
    assert length_note(Complete(kind="complete", max_new_tokens=511), info) is None
    expected = "task.max_new_tokens is 4,000, but the model takes 512 tokens with the prompt: texts end there"
    assert length_note(Complete(kind="complete", max_new_tokens=4000), info) == expected
