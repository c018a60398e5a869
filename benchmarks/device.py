"""Everything that only a GPU can tell, in one command: kernels, graphs, tokens/s beside the roofline, waits, equal texts.

    python -m benchmarks.device                      all parts; about ten minutes and 60 GiB of GPU memory
    python -m benchmarks.device --parts kernels,waits
    python -m benchmarks.device --rehearse           all parts in small on the CPU: shows that they run, measures nothing

Models have known shapes and random weights (device_models.py), so nothing is downloaded. The roofline of a step is the time in
which the device reads the weights and the cache once, at the bandwidth that a large copy reaches. `expected` are the milliseconds
an eager step that were computed before any GPU was there, for an H100: the roofline, and what launches and waits would add to it.
Prints tables in Markdown and writes them to `--output` with the device's name. Parts that no time is left for say so.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.device_models import LLADA_8B, LLAMA_8B, XLNET_110M, Made, make_model, small
from draftmill.decoders.any_subset.settings import AnySubsetSettings, AssdSettings
from draftmill.decoders.backbones.rows import intervals_of, token_rows
from draftmill.decoders.base import HOLE, Outcome, Request
from draftmill.decoders.causal.settings import AutoregressiveSettings, NgramDrafterSettings, SpeculativeSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.cuda_graphs import VARIABLE as GRAPH_SWITCH
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.kernels import find, sampling_reference
from draftmill.decoders.kernels.find import find_attention, find_product, find_sampling
from draftmill.decoders.kernels.sampling_reference import Wanted, Warp
from draftmill.decoders.kernels.seen import Seen
from draftmill.decoders.masked.settings import StepwiseSettings
from draftmill.decoders.registry import build_decoder

NO_GPU: Final = "this machine has no usable GPU; --rehearse runs all parts in small on the CPU"
_AR: Final = AutoregressiveSettings(kind="autoregressive")
_NGRAM: Final = SpeculativeSettings(kind="speculative", k=4, drafter=NgramDrafterSettings(kind="ngram"))
_ANY: Final = AnySubsetSettings(kind="any_subset")
_ASSD: Final = AssdSettings(kind="assd", k=5)
_STEPWISE: Final = StepwiseSettings(kind="stepwise", cache="dual_strict", block_length=32)


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder over so many slots, and the milliseconds a step that were expected: roofline, and with launches and waits."""

    name: str
    config: dict[str, Any]
    settings: DecoderChoice
    rows: int
    length: int
    new: int
    expected: tuple[float, float] | None = None


CASES: Final = [
    Case("XLNet-110M any_subset", XLNET_110M, _ANY, 64, 512, 64, (0.4, 4.3)),
    Case("XLNet-110M any_subset", XLNET_110M, _ANY, 256, 512, 64, (1.2, 6.0)),
    Case("XLNet-110M assd k=5", XLNET_110M, _ASSD, 64, 512, 64, (0.5, 9.6)),
    Case("Llama-8B autoregressive", LLAMA_8B, _AR, 16, 704, 64, (6.0, 9.8)),
    Case("Llama-8B autoregressive", LLAMA_8B, _AR, 64, 704, 64, (7.5, 11.0)),
    Case("Llama-8B autoregressive", LLAMA_8B, _AR, 256, 704, 64, (13.0, 24.0)),
    Case("Llama-8B n-gram k=4", LLAMA_8B, _NGRAM, 64, 704, 64, (8.0, 15.0)),
    Case("LLaDA-8B stepwise, dual cache", LLADA_8B, _STEPWISE, 16, 768, 64, (14.5, 30.0)),
]


@dataclass(frozen=True, slots=True)
class Table:
    """A part's result."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """In Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"## {self.title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""])


class Bench:
    """The device and the sizes of a run; models are made when a part first needs them, one at a time."""

    def __init__(self, *, rehearse: bool, seconds: float) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu" if rehearse else "cuda:0")
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.ends_at = time.monotonic() + seconds
        self._held: tuple[str, Made] | None = None

    @property
    def name(self) -> str:
        """The device's name."""
        return "CPU (rehearsal)" if self.rehearse else torch.cuda.get_device_name(self.device)

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.ends_at

    def cases(self) -> list[Case]:
        """What is decoded; models of one shape follow each other."""
        if not self.rehearse:
            return CASES
        return [Case(case.name, small(case.config), case.settings, min(case.rows, 2), 24, 4) for case in CASES]

    def model(self, config: dict[str, Any]) -> Made:
        """The model of this shape; another one is dropped first."""
        if self._held is None or self._held[0] != str(config):
            self.drop()
            self._held = (str(config), make_model(config, self.device, self.dtype))
        return self._held[1]

    def drop(self) -> None:
        """Free the model."""
        self._held = None
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done what it was asked for."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def ms(self, function: Callable[[], object], *, times: int = 20) -> float:
        """The median milliseconds of a call."""
        for _ in range(1 if self.rehearse else 3):
            function()
        times_ms = []
        for _ in range(1 if self.rehearse else times):
            self.wait()
            began = time.perf_counter()
            function()
            self.wait()
            times_ms.append(1000 * (time.perf_counter() - began))
        return statistics.median(times_ms)

    @cached_property
    def bytes_per_ms(self) -> float:
        """What a large copy reads and writes in a millisecond."""
        source = torch.zeros(1 << (16 if self.rehearse else 30), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.ms(lambda: target.copy_(source))

    def normal(self, *shape: int) -> Tensor:
        """Random numbers of the run's dtype."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


# ---- kernels beside their references ---------------------------------------------------------------------------------


def kernels(bench: Bench) -> Table:
    """Each kernel's largest difference from its reference, and both times."""
    rows = [*_attention_rows(bench), *_sampling_rows(bench), *_expert_rows(bench)]
    return Table("Kernels", ["kernel", "case", "largest difference", "ms", "reference, ms"], rows)


def _compare(
    bench: Bench, name: str, case: str, ours: Callable[[], Tensor] | None, reference: Callable[[], Tensor]
) -> list[str]:
    theirs_ms = bench.ms(reference, times=5)
    if ours is None:
        return [name, case, "not used here", "-", f"{theirs_ms:.3f}"]
    difference = (ours().double() - reference().double()).abs().max()
    return [name, case, f"{float(difference):.2g}", f"{bench.ms(ours):.3f}", f"{theirs_ms:.3f}"]


def _attention_rows(bench: Bench) -> Iterator[list[str]]:
    # Heads, key heads, width; slots, rows of a slot, columns; relative scores.
    shapes = {
        "Llama-8B, 64 slots, a row each": ((32, 8, 128), (64, 1, 768), False),
        "Llama-8B, 4 slots, a row each, 8,192 columns": ((32, 8, 128), (4, 1, 8192), False),
        "Llama-8B, 2 slots of 256 rows": ((32, 8, 128), (2, 256, 768), False),
        "XLNet-110M, 64 slots of 5 rows": ((12, 12, 64), (64, 5, 512), True),
    }
    for case, ((heads, key_heads, width), (slots, lines, columns), relative) in shapes.items():
        if bench.rehearse:
            slots, lines, columns = 2, min(lines, 3), 40  # noqa: PLW2901
        attend = find_attention(bench.device, bench.dtype, num_heads=heads, key_heads=key_heads, width=width)
        slot_N = torch.arange(slots, device=bench.device).repeat_interleave(lines)
        low_IN = torch.zeros(1, slots * lines, dtype=torch.int32, device=bench.device)
        high_IN = low_IN + columns - (slot_N * 7 % (columns // 2)).to(torch.int32)
        seen = Seen.of(
            slot_N,
            low_IN,
            high_IN,
            position_N=high_IN[0].long() - 1,
            positions_SW=torch.arange(columns, device=bench.device).repeat(slots, 1),
            rows_at_once=lines,
            group=heads // key_heads,
        )
        query, layer = bench.normal(slots * lines, heads, width), bench.normal(2, slots, key_heads, columns, width)
        more = {"relative_NHP": bench.normal(slots * lines, heads, 2 * columns) if relative else None}

        def run(function: Any, query: Any = query, layer: Any = layer, seen: Any = seen, more: Any = more) -> Tensor:
            mixed: Tensor = function(query, layer, seen, scaling=0.1, **more)
            return mixed

        ours = None if attend is None else partial(run, attend)
        yield _compare(bench, "attention", case, ours, partial(run, find.reference_attend))


def _sampling_rows(bench: Bench) -> Iterator[list[str]]:
    num_rows, vocab_size = (4, 211) if bench.rehearse else (64, 128256)
    logits_RV = torch.randn(num_rows, vocab_size, device=bench.device) * 3
    keys = noise.key_words([sample_key(0, str(row)) for row in range(num_rows)], bench.device)
    positions = torch.arange(num_rows, device=bench.device)
    kernel, never_V = find_sampling(bench.device, bench.dtype), torch.arange(vocab_size, device=bench.device) < 3
    warps: dict[str, tuple[float, int | None]] = {
        "no warp": (1.0, None),
        "top-p 0.9": (0.9, None),
        "top-k 50": (1.0, 50),
    }
    notes: dict[str, tuple[Wanted, ...]] = {"": (), ", two notes": ("top1", "entropy")}
    for (name, (top_p, top_k)), (note, wanted) in itertools.product(warps.items(), notes.items()):
        job, own_4R = Sampling(top_k=top_k), torch.zeros(4, num_rows, dtype=torch.float64, device=bench.device)
        own_4R[0], own_4R[1] = 1.0, top_p
        warp = Warp(job, own_4R, top_p < 1.0, positions[:3], never_V)

        def run(function: Any, warp: Warp = warp, wanted: tuple[Wanted, ...] = wanted) -> Tensor:
            fields: Tensor = function(logits_RV, warp, keys, positions, wanted=wanted, warped=True)
            return fields

        ours = None if kernel is None else partial(run, kernel)
        case = f"{num_rows} rows of {vocab_size:,} numbers, {name}{note}"
        yield _compare(bench, "sampling", case, ours, partial(run, sampling_reference.sample))


def _expert_rows(bench: Bench) -> Iterator[list[str]]:
    product = find_product(bench.device, bench.dtype)
    num_experts, width, inner = (4, 16, 24) if bench.rehearse else (128, 2048, 768)
    weights = bench.normal(num_experts, inner, width)
    for count in (num_experts, 4 * num_experts) if bench.rehearse else (512, 2048):
        rows = bench.normal(count, width)
        expert = torch.arange(count, device=bench.device) * num_experts // count
        ends = torch.searchsorted(expert, torch.arange(num_experts, device=bench.device), right=True, out_int32=True)
        ours = None if product is None else partial(product, rows, weights, ends)
        case = f"{count} rows, {num_experts} experts of {width} x {inner}"
        yield _compare(bench, "experts", case, ours, partial(find.reference_product, rows, weights, ends))


# ---- graphs ----------------------------------------------------------------------------------------------------------


def graphs(bench: Bench) -> Table:
    """One step of a causal model, network and output layer: operation by operation, and replayed as a CUDA graph."""
    config = small(LLAMA_8B) if bench.rehearse else LLAMA_8B
    backbone, lines = bench.model(config).backbone, []
    for slots in (2,) if bench.rehearse else (16, 64, 256):
        columns = 16 if bench.rehearse else 704
        backbone.allocate(slots, columns)
        last = torch.full((slots,), columns - 1, device=bench.device)
        seen = intervals_of(torch.ones(slots, columns, dtype=torch.bool, device=bench.device))
        rows = token_rows(list(range(slots)), [1] * slots, torch.zeros_like(last), last, last, seen)

        def step(rows: Any = rows) -> Tensor:
            return backbone.logits(backbone.forward(rows))

        lines.append([f"Llama-8B, {slots} rows", f"{bench.ms(step):.2f}", _time_replays(bench, step)])
    return Table("Graphs", ["step", "eager, ms", "graph, ms"], lines)


def _time_replays(bench: Bench, step: Callable[[], Tensor]) -> str:
    if bench.rehearse:
        return "no graphs on a CPU"
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return f"not capturable: {str(error).splitlines()[0][:80]}"
    return f"{bench.ms(graph.replay):.2f}"


# ---- decoders --------------------------------------------------------------------------------------------------------


def _requests(case: Case, vocab_size: int, count: int) -> list[Request]:
    rng, requests = np.random.default_rng(0), []
    for index in range(count):
        canvas = rng.integers(10, min(vocab_size, 200), case.length).astype(np.int32)
        if case.config["model_type"] == "xlnet":
            canvas[rng.permutation(case.length)[: case.new]] = HOLE
        else:
            canvas[case.length - case.new :] = HOLE
        requests.append(Request(index, sample_key(0, str(index)), canvas))
    return requests


def _decoder(bench: Bench, case: Case, rows: int, *, captures: bool = True) -> Any:
    model = bench.model(case.config)
    causal = case.config["model_type"] == "llama"
    setup = Setup(
        backbone=model.backbone,
        info=model.info,
        sampling=Sampling(),
        max_rows=rows,
        # A column more than a canvas has, for rows that fill up a captured forward.
        max_tokens=rows * (case.length + 1),
        stops=Stops() if causal else None,
    )
    with mock.patch.dict(os.environ, {GRAPH_SWITCH: str(int(captures))}):
        return build_decoder(setup, case.settings)


def _decode_all(decoder: Any, requests: list[Request]) -> Iterator[tuple[float, list[Outcome]]]:
    """Seconds and outcomes of each step, which waits for its record."""
    queue = list(reversed(requests))
    while queue or decoder.active:
        room = decoder.room(len(queue[-1].canvas)) if queue else 0
        decoder.admit([queue.pop() for _ in range(min(room, len(queue)))])
        began = time.perf_counter()
        done = decoder.step()
        yield time.perf_counter() - began, done


def families(bench: Bench) -> Table:
    """Tokens/s of every case, and its steady steps beside the roofline and what was expected."""
    rows = []
    for case in bench.cases():
        if bench.is_late:
            rows.append([case.name, str(case.rows), *["no time left"] * 7])
            continue
        eager, _, _ = _time_case(bench, case, captures=False)
        ms, tokens_per_s, share = _time_case(bench, case, captures=True)
        roofline = _roofline_ms(bench, bench.model(case.config), case)
        expected = "-" if case.expected is None else f"{case.expected[0]:g} .. {case.expected[1]:g}"
        times = [f"{time_ms:.2f}" for time_ms in (eager, ms)]
        numbers = [f"{tokens_per_s:.0f}", *times, f"{share:.0%}", f"{roofline:.2f}"]
        rows.append([case.name, str(case.rows), *numbers, expected, _verdict(eager, case)])
    columns = ["case", "rows", "tokens/s", "ms a step, eager", "with graphs", "replayed"]
    return Table("Decoders", [*columns, "roofline, ms", "expected eager, ms", "verdict"], rows)


def _time_case(bench: Bench, case: Case, *, captures: bool) -> tuple[float, float, float]:
    """Milliseconds of a steady step, tokens a second of all steps, and the share of steps that replayed a graph."""
    decoder = _decoder(bench, case, case.rows, captures=captures)
    requests = _requests(case, bench.model(case.config).info.vocab_size, case.rows)
    steps = [(seconds, len(done)) for seconds, done in _decode_all(decoder, requests)]
    bench.wait()
    # The first steps run the prompts and capture, the last ones have fewer rows.
    steady = [seconds for seconds, done in steps[4:] if not done] or [steps[-1][0]]
    graphs_of_target = decoder.target.graphs
    share = 0.0 if graphs_of_target is None else graphs_of_target.num_replayed / len(steps)
    tokens_per_s = case.rows * case.new / sum(seconds for seconds, _ in steps)
    return 1000 * statistics.median(steady), tokens_per_s, share


def _roofline_ms(bench: Bench, model: Made, case: Case) -> float:
    cells = int(getattr(model.backbone, "cell_bytes", 0)) * case.rows * (case.length - case.new // 2)
    return (model.num_bytes + cells) / bench.bytes_per_ms


def _verdict(ms: float, case: Case) -> str:
    """What the measurement says about what was expected of an engine that launches operation by operation."""
    if case.expected is None:
        return "-"
    best, worst = case.expected
    if ms < best:
        return "refuted: faster than the roofline of the model"
    return "confirmed" if ms <= 1.25 * worst else f"refuted: {ms / worst:.1f} times the expected"


def waits(bench: Bench) -> Table:
    """How often steady steps wait for all that the device does, by CUDA's own warnings; for records they wait by events."""
    rows, seen = [], set()
    for case in bench.cases():
        if case.name in seen or bench.is_late:
            continue
        seen.add(case.name)
        decoder = _decoder(bench, case, min(case.rows, 16))
        steps = _decode_all(decoder, _requests(case, bench.model(case.config).info.vocab_size, min(case.rows, 16)))
        for _ in range(3):
            next(steps)
        rows.append([case.name, _count_waits(bench, steps)])
    return Table("Waits for the device", ["case", "in three steps (0 are expected)"], rows)


def _count_waits(bench: Bench, steps: Iterator[object]) -> str:
    if bench.rehearse:
        for _ in zip(range(1), steps, strict=False):
            pass
        return "no device"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in zip(range(3), steps, strict=False):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The benchmark's own synchronisation is not among them: it waits by name.
    return str(sum("synchroniz" in str(warning.message) for warning in caught))


def invariance(bench: Bench) -> Table:
    """The share of texts that are equal at other numbers of slots, and without graphs."""
    lines, seen = [], set()
    for case in bench.cases():
        if case.name in seen or bench.is_late:
            continue
        seen.add(case.name)
        requests = _requests(case, bench.model(case.config).info.vocab_size, 4 if bench.rehearse else 16)
        texts, many = [], 2 if bench.rehearse else 16
        for rows, captures in ((many, True), (many // 4 or 1, True), (many, False)):
            decoder = _decoder(bench, case, rows, captures=captures)
            outcomes = [outcome for _, done in _decode_all(decoder, requests) for outcome in done]
            texts.append({outcome.index: outcome.tokens.tolist() for outcome in outcomes})
        equal = [sum(texts[0][index] == other[index] for index in other) for other in texts[1:]]
        lines.append([case.name, *(f"{count} of {len(requests)}" for count in equal)])
    return Table("Texts equal to those with 16 slots and graphs", ["case", "with 4 slots", "without graphs"], lines)


# ---- other software --------------------------------------------------------------------------------------------------


def public(bench: Bench) -> Table:
    """transformers and vLLM over a causal model of the same shape, also with random weights."""
    bench.drop()
    config = small(LLAMA_8B) if bench.rehearse else LLAMA_8B
    count, new = (2, 3) if bench.rehearse else (64, 64)
    prompts = np.random.default_rng(0).integers(10, 200, (count, 8 if bench.rehearse else 640)).tolist()
    engines: dict[str, Callable[[], int]] = {
        "transformers, generate": lambda: _generate(bench, config, prompts, new),
        "transformers, continuous batching": lambda: _continuous(bench, config, prompts, new),
        "vLLM": lambda: _vllm(config, prompts, new),
    }
    rows = []
    for name, engine in engines.items():
        missing = name == "vLLM" and (bench.rehearse or importlib.util.find_spec("vllm") is None)
        late = bench.is_late
        rows.append([name, "not installed" if missing else "no time left" if late else _speed(bench, engine)])
        bench.drop()
    return Table(f"Other software: {count} prompts, {new} new tokens each", ["engine", "tokens/s"], rows)


def _speed(bench: Bench, engine: Callable[[], int]) -> str:
    bench.wait()
    try:
        began = time.perf_counter()
        count = engine()
        bench.wait()
    except (RuntimeError, ValueError, AttributeError, TypeError, ImportError) as error:
        # Another project's failure is a result, not the end of the benchmark.
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return f"{count / (time.perf_counter() - began):.0f}" if count else "failed: no token came"


def _theirs(bench: Bench, config: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device(bench.device):
        fields = {name: value for name, value in config.items() if name != "model_type"}
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=bench.dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@torch.inference_mode()
def _generate(bench: Bench, config: dict[str, Any], prompts: list[list[int]], new: int) -> int:
    ids = torch.tensor(prompts, device=bench.device)
    model = _theirs(bench, config)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return int(out[:, ids.shape[1] :].numel())


def _continuous(bench: Bench, config: dict[str, Any], prompts: list[list[int]], new: int) -> int:
    from transformers import GenerationConfig

    wanted = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = _theirs(bench, config).generate_batch(inputs=prompts, generation_config=wanted, progress_bar=False)
    return sum(len(result.generated_tokens) for result in results.values())


def _vllm(config: dict[str, Any], prompts: list[list[int]], new: int) -> int:
    import json

    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        own_config = config | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(own_config))
        engine = vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True)
        wanted = vllm.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
    return sum(len(result.outputs[0].token_ids) for result in results)


# ---- the command -----------------------------------------------------------------------------------------------------

PARTS: Final[dict[str, Callable[[Bench], Table]]] = {
    "kernels": kernels,
    "graphs": graphs,
    "families": families,
    "waits": waits,
    "invariance": invariance,
    "public": public,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="what only a GPU can tell", allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true", help="all parts in small on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="parts that would begin later are left out")
    parser.add_argument("--output", type=Path, default=Path("runs/device.md"))
    flags = parser.parse_args(arguments)
    unknown = [name for name in flags.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)} not known; allowed: {', '.join(PARTS)}")
    return flags


def main(arguments: list[str] | None = None) -> None:
    """Run the parts one after the other; each table is written as soon as it is there."""
    flags = parse(arguments)
    if not flags.rehearse and not torch.cuda.is_available():
        sys.exit(NO_GPU)
    bench = Bench(rehearse=flags.rehearse, seconds=60 * flags.minutes)
    triton = importlib.util.find_spec("triton")
    version = "no Triton" if triton is None else f"Triton {importlib.import_module('triton').__version__}"
    speed = f"copies at {bench.bytes_per_ms / 1e9:.2f} TB/s"
    text = f"# {bench.name}\n\ntorch {torch.__version__}, {version}, {bench.dtype}, {speed}\n"
    print(text)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    for name in flags.parts.split(","):
        table = Table(name, ["no time left"], []) if bench.is_late else PARTS[name](bench)
        print(table, flush=True)
        text += f"\n{table}"
        flags.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
