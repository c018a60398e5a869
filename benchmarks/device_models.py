"""Models of known shapes with random weights, made on the device itself, and what the cases of benchmarks.device do with them.

Speed depends on shapes, not on what a model says. Knows nothing of processes or of other software.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.backbones.base import Model, Running
from draftmill.decoders.backbones.families.rotary import RotaryShape
from draftmill.decoders.backbones.families.table import describe, find_family
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.base import HOLE, ModelInfo, Outcome, Request
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.cuda_graphs import VARIABLE as GRAPH_SWITCH
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import StepwiseSettings
from draftmill.decoders.registry import build_decoder

LLAMA_8B: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B: Final[dict[str, Any]] = {
    **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2_1_7B: Final[dict[str, Any]] = {
    **LLAMA_1B, "vocab_size": 49152, "num_hidden_layers": 24, "num_key_value_heads": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0},
}  # fmt: skip
QWEN_05B: Final[dict[str, Any]] = {
    **LLAMA_1B, "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
LLADA_8B: Final[dict[str, Any]] = {
    "model_type": "llada", "vocab_size": 126464, "embedding_size": 126464, "d_model": 4096, "mlp_hidden_size": 12288,
    "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "max_sequence_length": 4096, "rope_theta": 500000.0,
    "weight_tying": False, "mask_token_id": 126336, "rms_norm_eps": 1e-5, "block_type": "llama", "layer_norm_type": "rms",
    "activation_type": "silu", "rope": True, "include_bias": False, "include_qkv_bias": False, "eos_token_id": 126081,
}  # fmt: skip
XLNET_110M: Final[dict[str, Any]] = {
    "model_type": "xlnet", "vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072,
}  # fmt: skip
AR: Final = AutoregressiveSettings(kind="autoregressive")
ASSD: Final = AssdSettings(kind="assd", k=5)
STEPWISE: Final = StepwiseSettings(kind="stepwise", cache="dual_strict", block_length=32)
_SMALL_ROTARY: Final[dict[str, Any]] = {
    "vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "llama": _SMALL_ROTARY,
    "qwen2": _SMALL_ROTARY,
    "llada": {
        "vocab_size": 211, "embedding_size": 211, "d_model": 32, "mlp_hidden_size": 48, "n_layers": 2, "n_heads": 4,
        "n_kv_heads": 4, "max_sequence_length": 256, "mask_token_id": 200, "eos_token_id": 201,
    },
    "xlnet": {"vocab_size": 211, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
}  # fmt: skip
# Small enough that no sum overflows in half precision, large enough that tokens differ.
_SPREAD: Final = 0.02


@dataclass(frozen=True, slots=True)
class Made:
    """A model, what is known of it, and the bytes of its weights."""

    backbone: Model
    info: ModelInfo
    num_bytes: int


def make_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Made:
    """Make a model with random weights: scales are one, everything else is normal with a small spread."""
    family = find_family(config, "auto")
    sizes = family.shape(config)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in family.weight_shapes(config).items():
        if "norm" in name and len(shape) == 1:
            weights[name] = torch.full(shape, float("bias" not in name), dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
    backbone: Any
    how = Running(dtype, device)
    if family.rows_are_tokens:
        assert isinstance(sizes, RotaryShape), "only models with rotary positions are made here"
        backbone = RotaryBackbone(sizes, family.own_names(config, weights), how)
    else:
        backbone = XLNetBackbone(sizes, weights, how)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Made(cast(Model, backbone), describe(family, config, mask_id=None), num_bytes)


# ---- a device, and what is asked of it -------------------------------------------------------------------------------

Row = tuple[str, list[str]]
"""The title of a table, and a line of it."""


class Time(NamedTuple):
    """Milliseconds of a call; `captured`: inside a graph, so without its launches."""

    ms: float
    captured: bool

    def __str__(self) -> str:
        return f"{self.ms:.3f}" if self.captured else f"{self.ms:.3f} (with launches)"


class Bench:
    """The device and dtype of a run. A rehearsal runs on the CPU with everything in small: its numbers mean nothing. `expected`
    is the file with the CPU's texts (device_right.py)."""

    def __init__(self, *, rehearse: bool, expected: Path | None = None) -> None:
        self.rehearse, self.expected = rehearse, expected
        self.device = torch.device("cpu" if rehearse else "cuda:0")
        self.dtype = torch.float32 if rehearse else torch.bfloat16

    def size(self, usual: int, little: int) -> int:
        """A size on the device, and in a rehearsal."""
        return little if self.rehearse else usual

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a model of this kind; in a rehearsal of a small one."""
        return {**config, **_SMALL[config["model_type"]]} if self.rehearse else dict(config)

    def model(self, config: Mapping[str, Any]) -> Made:
        """A model of this shape."""
        return make_model(self.config(config), self.device, self.dtype)

    def wait(self) -> None:
        """Until the device has done what it was asked for."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Bytes that this process may still take, those that its allocator keeps included."""
        if self.rehearse:
            return 1 << 30
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + kept

    def time(self, *functions: Callable[[], object], times: int = 20) -> Time:
        """The median time of a call. The functions do the same with inputs of their own and are called in turn, so that a call
        does not read what the one before left in the device's cache. Device events stand around a graph of all calls, or around
        the calls themselves where they can't be captured."""
        if self.rehearse:
            began_s = time.perf_counter()
            for function in functions:
                function()
            return Time(1000 * (time.perf_counter() - began_s) / len(functions), captured=False)
        run = partial(_call, functions)
        first_ms = _events_ms(run, 3)
        # A short graph would be measured with the events' own time.
        repeats = 1 + int(_LEAST_MS / max(first_ms, 1e-3))
        if graph := _captured(partial(_call, functions * repeats)):
            return Time(_events_ms(graph.replay, times) / repeats / len(functions), captured=True)
        return Time(_events_ms(run, times) / len(functions), captured=False)

    @cached_property
    def bytes_per_ms(self) -> float:
        """What a large copy reads and writes in a millisecond."""
        source = torch.zeros(1 << self.size(30, 16), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.time(lambda: target.copy_(source)).ms

    def normal(self, *shape: int) -> Tensor:
        """Random numbers of the run's dtype."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


_LEAST_MS: Final = 1.0


def _call(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()


def _events_ms(run: Callable[[], object], times: int) -> float:
    """The median milliseconds of a run between two events of the device, after two runs that nobody measures."""
    for _ in range(2):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for before, after in pairs:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairs)


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A graph of what has run before; None where it asks the device for numbers, which no graph can."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to find out, in a process of its own that may take `limit_s` seconds. `find` yields its rows as they come; of a
    case that dies, or is not run, `table` has a row that says so. `command` stands before python, `env` is added to the
    process' environment; `{folder}` in it is a folder of the run. Of cases that are alike, only some are `rehearsed`."""

    name: str
    table: str
    find: Callable[[Bench], Iterator[Row]]
    limit_s: float = 90.0
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rehearsed: bool = True


def decoder_of(
    model: Made, settings: DecoderChoice, rows: int, *, columns: int, captures: bool = True, temperature: float = 1.0
) -> Any:
    """A decoder of up to so many samples, which have so many columns on average; without graphs unless it `captures`."""
    setup = Setup(
        backbone=model.backbone,
        info=model.info,
        sampling=Sampling(temperature=temperature),
        max_rows=rows,
        max_tokens=rows * columns,
        stops=Stops() if model.info.kind == "causal" else None,
    )
    with graphs_on(captures):
        return build_decoder(setup, settings)


def graphs_on(captures: bool) -> Any:
    """Whether what is built inside captures its steps."""
    return mock.patch.dict(os.environ, {GRAPH_SWITCH: str(int(captures))})


def requests_of(model: Made, sizes: Iterable[tuple[int, int]]) -> list[Request]:
    """A canvas of random tokens for each pair: so many given, so many holes; any-subset models have their holes anywhere."""
    rng, requests = np.random.default_rng(0), []
    for index, (prompt, new) in enumerate(sizes):
        canvas = rng.integers(10, min(model.info.vocab_size, 200), prompt + new).astype(np.int32)
        holes = rng.permutation(len(canvas))[:new] if model.info.kind == "any_subset" else slice(prompt, None)
        canvas[holes] = HOLE
        requests.append(Request(index, sample_key(0, str(index)), canvas))
    return requests


def stream(decoder: Any, queue: deque[Request]) -> Iterator[tuple[float, list[Outcome]]]:
    """Keep the slots full until queue and slots are empty; the seconds and outcomes of each step, which waits for its record."""
    while queue or decoder.active:
        while queue and (room := decoder.room(longest := len(queue[0].canvas))) > 0:
            fitting = itertools.takewhile(lambda request: len(request.canvas) <= longest, itertools.islice(queue, room))
            decoder.admit([queue.popleft() for _ in list(fitting)])
        began_s = time.perf_counter()
        done = decoder.step()
        yield time.perf_counter() - began_s, done


def first_difference(found: Mapping[int, Outcome], expected: Mapping[int, Any]) -> str:
    """Where the texts of `found` first differ from the expected ones of the same requests; `equal` if nowhere."""
    places, num_equal = [], 0
    for index, theirs in expected.items():
        ours = found[index]
        if ours.error_kind is not None:
            return f"request {index} failed: {ours.error_kind}: {ours.error}"
        pairs = list(itertools.zip_longest(ours.tokens.tolist(), theirs.tokens.tolist()))
        num_equal += all(one == other for one, other in pairs)
        places += [(place, index, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]][:1]
    if not places:
        return "equal"
    place, index, one, other = min(places)
    return f"differs at token {place} of request {index}: {one} in place of {other}; {num_equal} of {len(expected)} are equal"
