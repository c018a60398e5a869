"""The benchmark for GPUs runs all of its parts in small on a CPU, and refuses to measure without a GPU."""

import pytest

from benchmarks import device


@pytest.mark.slow
def test_every_part_runs_in_a_rehearsal(tmp_path, monkeypatch, capsys):
    # Continuous batching takes a minute to begin on a CPU.
    monkeypatch.setattr(device, "_continuous", lambda *_: 6)
    output = tmp_path / "found" / "device.md"
    device.main(["--rehearse", "--output", str(output)])
    text = output.read_text()
    assert (
        text.startswith("# CPU (rehearsal)\n")
        and text.strip() == capsys.readouterr().out.replace("\n\n\n", "\n\n").strip()
    )
    for title in (
        "Kernels",
        "Graphs",
        "Decoders",
        "Waits for the device",
        "Texts equal to those with 16 slots and graphs",
        "Other software",
    ):
        assert f"## {title}" in text
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert {case.name for case in device.CASES} <= set(lines)
    assert "failed" not in lines["transformers, generate"] and "no time left" not in text
    assert all(
        "| 4 of 4 | 4 of 4 |" in line
        for line in text.partition("## Texts equal")[2].partition("## ")[0].splitlines()[4:]
        if line
    )


def test_parts_that_no_time_is_left_for_say_so(tmp_path):
    output = tmp_path / "device.md"
    device.main(["--rehearse", "--parts", "families,kernels", "--minutes", "0", "--output", str(output)])
    assert output.read_text().count("no time left") == 2


def test_without_a_gpu_it_refuses(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="this machine has no usable GPU; --rehearse runs all parts in small on the CPU"
    ):
        device.main([])


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        device.parse(["--parts", "kernels,speed"])
    assert (
        "--parts: speed not known; allowed: kernels, graphs, families, waits, invariance, public"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [
        (0.3, "refuted: faster than the roofline of the model"),
        (3.0, "confirmed"),
        (8.6, "refuted: 2.0 times the expected"),
    ],
)
def test_a_measurement_judges_what_was_expected(ms, verdict):
    assert device._verdict(ms, device.CASES[0]) == verdict
