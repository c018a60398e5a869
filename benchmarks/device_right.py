"""Is it right? The cases of `python -m benchmarks.device right`: texts of builtin models on the device beside those of the CPU.

First what a first forward needs: logits, and a capture that fails. Then every decoder of tests/device/steps.py: in float64
without kernels, in float32 with kernels, and with graphs. One of each kind has more than a thousand columns, and prompts that
join texts which are being decoded; one of each kind runs for three hundred steps where graphs have failed elsewhere: caches that
are resized, graphs that are dropped because there are too many, two engines in one process. What differs is reported, not
refused: near a tie rounding decides.

The texts of the CPU come from a file where there is one (`--expected FILE`), since a device's minutes are dear; `python -m
benchmarks.device expect --expected FILE` writes it, on a machine without a GPU. A text that is not in it is decoded here.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.device_models import Bench, Case, Row, first_difference, graphs_on, stream
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.engine import cuda_graphs
from tests.decoders.shipped import BUILTIN
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
_WIDE: Final = ("autoregressive", "speculative, model", "assd", "stepwise, cached", "block_diffusion", "s2d2")
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


class Text(NamedTuple):
    """What is compared of an outcome: its tokens, their log-probability, and why it failed."""

    tokens: NDArray[np.int32]
    logprob: float | None
    error_kind: str | None = None
    error: str | None = None


_Texts = Mapping[int, Outcome | Text]


# ---- the texts of the CPU --------------------------------------------------------------------------------------------


def write_expected(path: Path, bench: Bench, names: Sequence[str] = ()) -> None:
    """Decode on the CPU what the cases compare with (of decoders with these names, or of all) and write it to `path`."""
    texts = dict[str, Any]()
    for name, dtype, requests, most_steps in _compared(bench):
        if not names or name in names:
            found = _decode(_made(name, "cpu", dtype), requests, most_steps=most_steps)
            for request in requests:
                if request.index in found:
                    one = found[request.index]
                    texts[_key(name, dtype, request)] = [one.tokens.tolist(), one.logprob, one.error_kind, one.error]
            print(f"{name}, {dtype}: {len(found)} texts of {len(requests)} requests", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(texts))


def _compared(bench: Bench) -> Iterator[tuple[str, str, list[Request], int | None]]:
    """Of each case the decoder, the dtype, its requests, and the steps after which no request begins."""
    for name in steps.CASES:
        for dtype in ("float64", "float32"):
            yield name, dtype, _usual_requests(name, bench), None
    for name in _WIDE:
        yield name, "float32", _wide_requests(name, bench), None
    for name in _LONG:
        for how in _HOWS[:2]:  # the others have the requests of the second
            yield name, "float32", _long_requests(name, how, bench), bench.size(_STEPS, 2)


def _key(name: str, dtype: str, request: Request) -> str:
    canvas = hashlib.sha256(request.canvas.tobytes()).hexdigest()[:16]
    return f"{name} {dtype} {request.index} {request.key} {canvas}"


@cache
def _written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _on_cpu(bench: Bench, name: str, dtype: str, requests: Sequence[Request]) -> dict[int, Outcome | Text]:
    """The CPU's texts of the requests: those of the file, and what it lacks."""
    written = _written(bench.expected) if bench.expected else {}
    found, missing = dict[int, Outcome | Text](), list[Request]()
    for request in requests:
        if text := written.get(_key(name, dtype, request)):
            found[request.index] = Text(np.array(text[0], dtype=np.int32), *text[1:])
        else:
            missing.append(request)
    return found | (_decode(_made(name, "cpu", dtype), missing) if missing else {})


# ---- texts -----------------------------------------------------------------------------------------------------------


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


def _texts(name: str, how: str, decoder: Any, found: _Found, expected: _Texts) -> Row:
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


def _usual_requests(name: str, bench: Bench) -> list[Request]:
    return steps.toy_canvases(bench.size(12, 2), name)


def _usual(name: str, ways: Sequence[tuple[str, str, bool]], bench: Bench) -> Iterator[Row]:
    requests, expected = _usual_requests(name, bench), dict[str, _Texts]()
    for how, dtype, captures in ways:
        with graphs_on(captures):
            decoder = _made(name, bench.device, dtype)
            found = _decode(decoder, requests)
            expected[dtype] = expected.get(dtype) or _on_cpu(bench, name, dtype, requests)
            yield _texts(name, how, decoder, found, expected[dtype])


def _wide_requests(name: str, bench: Bench) -> list[Request]:
    """Long canvases first, so that the cache has all its columns; then short and long prompts that come while others decode."""
    more = (1070, 1070, 150, 150, 260, 1070, 40, 150)
    return [
        replace(one, canvas=_longer(one.canvas, bench.size(count, count // 50)))
        for one, count in zip(steps.toy_canvases(len(more), name), more, strict=True)
    ]


def _wide(name: str, bench: Bench) -> Iterator[Row]:
    requests = _wide_requests(name, bench)
    decoder = _made(name, bench.device)
    found = _decode(decoder, requests)
    yield _texts(
        name, f"{len(requests[0].canvas):,} columns", decoder, found, _on_cpu(bench, name, "float32", requests)
    )


def _long_requests(name: str, how: str, bench: Bench) -> list[Request]:
    # More requests than so many steps need: a step commits at most the whole texts of four slots.
    requests = steps.toy_canvases(4 * bench.size(_STEPS, 2), name)
    if how == _HOWS[0]:
        return [replace(one, canvas=_longer(one.canvas, 4 * one.index % 440)) for one in requests]
    return requests


def _long(name: str, how: str, bench: Bench) -> Iterator[Row]:
    requests = _long_requests(name, how, bench)
    few = mock.patch.object(cuda_graphs, "_MOST_GRAPHS", 4) if how == "four graphs" else nullcontext()
    with few:
        decoder = _made(name, bench.device)
        found = _decode(decoder, requests, most_steps=bench.size(_STEPS, 2))
    done = [request for request in requests if request.index in found]
    expected = _on_cpu(bench, name, "float32", done)
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
    requests, decoder = _usual_requests(name, bench), _made(name, bench.device)
    expected = _on_cpu(bench, name, "float32", requests)
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
    backbone: Any = load_backbone(BUILTIN / name, dtype=dtype, device=device)
    backbone.allocate(4, 64)
    tokens_N = torch.from_numpy(np.random.default_rng(0).integers(10, 2000, 4 * 48)).to(device)
    hidden_ND = backbone.forward(causal_rows(range(4), [48] * 4, [0] * 4, tokens_N))
    logits: Tensor = backbone.logits(hidden_ND).double().cpu()
    return logits


_SANITIZER: Final = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "5")
_EACH_ALONE: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that an access beyond an allocation is seen
_KERNELS_ALONE: Final = partial(_usual, "autoregressive", [("under compute-sanitizer", "float32", False)])
_HOWS: Final = ("lengths grow", "four graphs", "two engines")
CASES: Final = [
    Case("logits", _LOGITS, _logits),
    Case("failed capture", _FAILS, _failed_capture),
    *(Case(name, _TEXTS, partial(_usual, name, _WAYS), rehearsed=name in _REHEARSED) for name in steps.CASES),
    *(Case(f"{name}: wide", _TEXTS, partial(_wide, name), rehearsed=name in _REHEARSED[:3]) for name in _WIDE),
    *(
        Case(f"{name}: {how}", _TEXTS, partial(_long, name, how), rehearsed=name in _REHEARSED[:1])
        for name in _LONG
        for how in _HOWS
    ),
    Case("compute-sanitizer", _TEXTS, _KERNELS_ALONE, 180, _SANITIZER, _EACH_ALONE),
]
