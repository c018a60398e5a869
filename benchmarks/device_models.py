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
from functools import cached_property
from typing import Any, Final, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.families.table import describe, find_family
from draftmill.decoders.backbones.families.xlnet import xlnet_shape
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
LLAMA_05B: Final[dict[str, Any]] = {
    **LLAMA_8B, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
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
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
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
    family.check(config)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in family.weight_shapes(config).items():
        if "norm" in name and len(shape) == 1:
            weights[name] = torch.full(shape, float("bias" not in name), dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
    backbone: Any
    if family.rows_are_tokens:
        full = family.full_names(weights)
        named = {full[name]: tensor for name, tensor in weights.items()}
        assert family.rotary is not None, "only models with rotary positions are made here"
        backbone = RotaryBackbone(family.rotary(config), family.convert(named), dtype=dtype, device=device)
    else:
        backbone = XLNetBackbone(xlnet_shape(config), weights, dtype=dtype, device=device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Made(cast(Model, backbone), describe(family, config, mask_id=None, max_length=None), num_bytes)


# ---- a device, and what is asked of it -------------------------------------------------------------------------------

Row = tuple[str, list[str]]
"""The title of a table, and a line of it."""


class Bench:
    """The device and dtype of a run. A rehearsal runs on the CPU with everything in small: its numbers mean nothing."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
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

    def ms(self, function: Callable[[], object], *, times: int = 20) -> float:
        """The median milliseconds of a call, launch and wait included."""
        for _ in range(self.size(3, 0)):
            function()
        times_ms = []
        for _ in range(self.size(times, 1)):
            self.wait()
            began = time.perf_counter()
            function()
            self.wait()
            times_ms.append(1000 * (time.perf_counter() - began))
        return statistics.median(times_ms)

    @cached_property
    def bytes_per_ms(self) -> float:
        """What a large copy reads and writes in a millisecond."""
        source = torch.zeros(1 << self.size(30, 16), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.ms(lambda: target.copy_(source))

    def normal(self, *shape: int) -> Tensor:
        """Random numbers of the run's dtype."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


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


def decoder_of(model: Made, settings: DecoderChoice, rows: int, *, columns: int, captures: bool = True) -> Any:
    """A decoder of up to so many samples, which have so many columns on average; without graphs unless it `captures`."""
    setup = Setup(
        backbone=model.backbone,
        info=model.info,
        sampling=Sampling(),
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


def first_difference(found: Mapping[int, Outcome], expected: Mapping[int, Outcome]) -> str:
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
