"""Is it right? The cases of `python -m benchmarks.device right`: texts of builtin models on the device beside those of the CPU.

Every decoder of tests/device/steps.py: in float64 without kernels, in float32 with kernels, and with graphs. Then three hundred
steps of one decoder of each kind where graphs have failed elsewhere: caches that are resized, graphs that are dropped because
there are too many, two engines in one process. What differs is reported, not refused: near a tie rounding decides.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.device_models import Bench, Case, Row, first_difference, graphs_on, stream
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.engine import cuda_graphs
from tests.device import steps

COLUMNS: Final = {
    "Texts beside those of the CPU": "decoder | on the device | texts | log p differs by | steps | forwards",
    "A capture that fails": "what | found",
    "Logits beside float32 on the CPU": "model | dtype | largest difference | largest logit | same maximum | KL",
}
_TEXTS, _FAILS, _LOGITS = COLUMNS
_WAYS: Final = (
    ("float64, no kernels", "float64", False),
    ("float32, kernels", "float32", False),
    ("float32, kernels, graphs", "float32", True),
)  # what is least likely to crash comes first
_LONG: Final = (
    "autoregressive", "speculative, model", "multiblock_jacobi", "any_subset", "assd", "assd, fused", "stepwise, cached",
    "block_diffusion", "s2d2",
)  # fmt: skip
_REHEARSED: Final = (
    "autoregressive",
    "any_subset",
    "stepwise, cached",
    "ancestral, analytic",
    "s2d2",
    "stepwise, score",
)
_STEPS: Final = 300
_Found = dict[int, Outcome]


def _made(name: str, device: torch.device | str, dtype: str = "float32") -> Any:
    return steps.made(name, {}, str(device), dtype=dtype)


def _decode(decoder: Any, requests: Sequence[Request], *, most_steps: int | None = None) -> _Found:
    """The outcomes of the requests; none begins after so many steps."""
    queue, found = deque(requests), _Found()
    for number, (_, done) in enumerate(stream(decoder, queue)):
        found |= {outcome.index: outcome for outcome in done}
        if number == most_steps:
            queue.clear()
    return found


def _texts(name: str, how: str, decoder: Any, found: _Found, expected: _Found) -> Row:
    gaps = [
        abs(one.logprob - expected[one.index].logprob)  # type: ignore[operator]
        for one in found.values()
        if one.logprob is not None and one.tokens.tolist() == expected[one.index].tokens.tolist()
    ]
    graphs, reasons = decoder.target.graphs, [] if decoder.graphs == "on" else [decoder.graphs]
    counts = [f"{graphs.num_replayed} replayed, {graphs.num_captured} captured"] if graphs else []
    same = first_difference(found, {index: expected[index] for index in found})
    return _TEXTS, [
        name,
        how,
        same,
        f"{max(gaps, default=0.0):.1g}",
        str(decoder.stats.steps),
        "; ".join([*counts, *reasons]),
    ]


def _usual(name: str, ways: Sequence[tuple[str, str, bool]], bench: Bench) -> Iterator[Row]:
    requests, expected = steps.toy_canvases(bench.size(12, 2), name), dict[str, _Found]()
    for how, dtype, captures in ways:
        with graphs_on(captures):
            decoder = _made(name, bench.device, dtype)
            found = _decode(decoder, requests)
            expected[dtype] = expected.get(dtype) or _decode(_made(name, "cpu", dtype), requests)
            yield _texts(name, how, decoder, found, expected[dtype])


def _long(name: str, how: str, bench: Bench) -> Iterator[Row]:
    # More requests than so many steps need: a step commits at most the whole texts of four slots.
    requests = steps.toy_canvases(4 * bench.size(_STEPS, 2), name)
    if how == "lengths grow":
        requests = [replace(one, canvas=_longer(one.canvas, 4 * one.index % 440)) for one in requests]
    few = mock.patch.object(cuda_graphs, "_MOST_GRAPHS", 4) if how == "four graphs" else nullcontext()
    with few:
        decoder = _made(name, bench.device)
        found = _decode(decoder, requests, most_steps=bench.size(_STEPS, 2))
    done = [request for request in requests if request.index in found]
    expected = _decode(_made(name, "cpu"), done)
    yield _texts(name, how, decoder, found, expected)
    if how == "two engines":
        second = _made(name, bench.device)
        again = _decode(second, done[::2])
        # Its graphs must live on when those of the first engine die.
        del decoder
        gc.collect()
        yield _texts(name, "the second engine", second, again | _decode(second, done[1::2]), expected)


def _longer(canvas: Any, count: int) -> Any:
    """So many more given tokens in front."""
    return np.concatenate([np.resize(canvas[canvas >= 0], count), canvas])


def _failed_capture(bench: Bench) -> Iterator[Row]:
    """A step asks for a number in the middle of its capture, which CUDA forbids; then everything must go on."""
    name = "autoregressive"
    requests = steps.toy_canvases(bench.size(12, 2), name)
    expected, decoder = _decode(_made(name, "cpu"), requests), _made(name, bench.device)
    if graphs := decoder.target.graphs:
        run = graphs.run
        graphs.run = lambda key, batch, work: run(key, batch, lambda sent: _asking(work(sent)))
    yield _FAILS, ["texts", first_difference(_decode(decoder, requests), expected)]
    yield _FAILS, ["graphs of this engine", decoder.graphs]
    yield _FAILS, ["memory afterwards", "-" if bench.rehearse else _fill_memory()]
    later = _made(name, bench.device)
    yield _FAILS, ["texts of the next engine", first_difference(_decode(later, requests), expected)]
    yield _FAILS, ["graphs of the next engine", later.graphs]


def _asking(done: cuda_graphs.Work) -> cuda_graphs.Work:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        done.record.sum().item()
    return done


def _fill_memory() -> str:
    """Allocate to the brim of a quarter of the memory, twice: what was taken must come back."""
    torch.cuda.set_per_process_memory_fraction(0.25)  # other cases run beside this one
    taken, held = [], list[Tensor]()
    for _ in range(2):
        torch.cuda.empty_cache()
        try:
            while True:
                held.append(torch.empty(1 << 28, dtype=torch.int8, device="cuda"))
        except torch.OutOfMemoryError:
            taken.append(f"{len(held) / 4:.1f}")
        held.clear()
    return f"{' GiB, then '.join(taken)} of {torch.cuda.mem_get_info()[1] / 2**32:.1f} GiB could be taken"


def _logits(bench: Bench) -> Iterator[Row]:
    for name in ("ar-tiny", "mdm-tiny", "block-tiny"):
        expected = _logits_of(name, "float32", "cpu")
        for dtype in ("float32", "bfloat16"):
            found = _logits_of(name, dtype, str(bench.device))
            same = float((found.argmax(1) == expected.argmax(1)).double().mean())
            law, own = expected.log_softmax(1), found.log_softmax(1)
            kl = float((law.exp() * (law - own)).sum(1).mean())
            most = [float((found - expected).abs().max()), float(expected.abs().max())]
            yield _LOGITS, [name, dtype, *(f"{number:.2g}" for number in most), f"{same:.1%}", f"{kl:.1g}"]


def _logits_of(name: str, dtype: str, device: str) -> Tensor:
    """Logits of four texts of 48 tokens, in which each sees those before it; float64 on the host."""
    backbone: Any = load_backbone(steps.BUILTIN / name, dtype=dtype, device=device)
    backbone.allocate(4, 64)
    tokens_N = torch.from_numpy(np.random.default_rng(0).integers(10, 2000, 4 * 48)).to(device)
    hidden_ND = backbone.forward(causal_rows(range(4), [48] * 4, [0] * 4, tokens_N))
    logits: Tensor = backbone.logits(hidden_ND).double().cpu()
    return logits


_SANITIZER: Final = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "5")
_EACH_ALONE: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that an access beyond an allocation is seen
_KERNELS_ALONE: Final = partial(_usual, "autoregressive", [("under compute-sanitizer", "float32", False)])
CASES: Final = [
    *(Case(name, _TEXTS, partial(_usual, name, _WAYS), rehearsed=name in _REHEARSED) for name in steps.CASES),
    *(
        Case(f"{name}: {how}", _TEXTS, partial(_long, name, how), rehearsed=name in _REHEARSED[:1])
        for name in _LONG
        for how in ("lengths grow", "four graphs", "two engines")
    ),
    Case("failed capture", _FAILS, _failed_capture),
    Case("logits", _LOGITS, _logits),
    Case("compute-sanitizer", _TEXTS, _KERNELS_ALONE, 180, _SANITIZER, _EACH_ALONE),
]
