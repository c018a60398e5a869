"""Where does a step go? The cases of `python -m benchmarks.device step`: whole steps beside their roofline, and their parts.

The roofline of a step is the time in which the device reads the weights and the cache once, at the bandwidth that a large copy
reaches. The plain loop (device_peer.py) is one CUDA graph that decodes all rows greedily, without a scheduler, ends or samplers.
Attention reads the engine's pool of cells; SDPA is torch's own, over keys and values that lie head by head. Kernels are timed as
Bench.time says, with three inputs in turn.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks import device_models as models
from benchmarks import device_peer
from benchmarks.device_models import Bench, Case, Row
from draftmill.decoders.any_subset.settings import AnySubsetSettings
from draftmill.decoders.causal.settings import NgramDrafterSettings, SpeculativeSettings
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.sampling import Warp, sample
from draftmill.decoders.draws.settings import Uses
from draftmill.decoders.kernels import find
from draftmill.decoders.kernels.seen import Seen, Tiling
from tests.decoders.references import kernels as reference

COLUMNS: Final = {
    "Steps": "case | slots x tokens | eager, ms | replayed, ms | roofline, ms | steps replayed | captures | ms each | MiB each",
    "A plain loop": "case | rows x columns | ms | roofline, ms | tokens/s",
    "Where a step goes": "case | ms | kernels | they take, ms | gaps, ms | largest gap, us | host waits for all",
    "The longest kernels of a step": "case | kernel | times | us | of all kernels",
    "Attention of one layer of Llama-8B": "case | ms | reached | SDPA, ms | SDPA reached",
    "Kernels beside their references": "kernel | case | ms | reference, ms | equal tokens | largest difference (of log p "
    "where tokens are equal)",
    "Kernels that Triton compiled": "cache | compiled | seconds | longest, s | read from disk | the whole stream, s",
}
_STEPS, _PLAIN, _WHERE, _LONGEST, _ATTENTION, _KERNELS, _COMPILED = COLUMNS
_IN_TURN: Final = range(3)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A decoder over so many slots: texts of `length` tokens, of which 64 are decoded. Of some cases steps are profiled."""

    name: str
    config: dict[str, Any]
    settings: DecoderChoice
    rows: int
    length: int = 704
    is_profiled: bool = False


_NGRAM: Final = SpeculativeSettings(kind="speculative", k=4, drafter=NgramDrafterSettings(kind="ngram"))
_ANY: Final = AnySubsetSettings(kind="any_subset")
DECODINGS: Final = [
    Decoding("Llama-8B autoregressive, 64", models.LLAMA_8B, models.AR, 64, is_profiled=True),
    Decoding("XLNet-110M assd k=5, 64", models.XLNET_110M, models.ASSD, 64, 512, is_profiled=True),
    Decoding("XLNet-110M any_subset, 64", models.XLNET_110M, _ANY, 64, 512),
    Decoding("XLNet-110M any_subset, 256", models.XLNET_110M, _ANY, 256, 512),
    Decoding("Llama-8B autoregressive, 16", models.LLAMA_8B, models.AR, 16),
    Decoding("Llama-8B autoregressive, 256", models.LLAMA_8B, models.AR, 256, 256),
    Decoding("SmolLM2-1.7B autoregressive, 64", models.SMOLLM2_1_7B, models.AR, 64),
    Decoding("Llama-3.2-1B autoregressive, 256", models.LLAMA_1B, models.AR, 256, 256),
    Decoding("Qwen2.5-0.5B autoregressive, 256", models.QWEN_05B, models.AR, 256, 256),
    Decoding("Llama-8B n-gram k=4, 64", models.LLAMA_8B, _NGRAM, 64),
    Decoding("LLaDA-8B stepwise, dual cache, 16", models.LLADA_8B, models.STEPWISE, 16, 768),
]


_LATER: Final = 8  # their prompts take three steps


# ---- whole steps -----------------------------------------------------------------------------------------------------


class _Lap(NamedTuple):
    ms: float
    replayed: int
    captured: int
    is_steady: bool


def _laps(decoder: Any, requests: list[Any]) -> Iterator[_Lap]:
    """A full batch, step by step. Steps in which prompts run, samples end or a graph is captured are not steady."""
    graphs, before, all_decode = decoder.target.graphs, (0, 0), False
    for seconds, done in models.stream(decoder, deque(requests)):
        now = (graphs.num_replayed, graphs.num_captured) if graphs else (0, 0)
        captured = now[1] - before[1]
        yield _Lap(1000 * seconds, now[0] - before[0], captured, all_decode and not done and not captured)
        before, all_decode = now, _all_decode(decoder, len(requests))


def _all_decode(decoder: Any, count: int) -> bool:
    """Whether so many samples are inside and none waits for its prompt."""
    return len(decoder.samples) == count and all(sample.iterations for sample in decoder.samples)


def _median_ms(laps: list[_Lap]) -> float:
    return statistics.median([lap.ms for lap in laps if lap.is_steady] or [lap.ms for lap in laps] or [float("nan")])


def _steps(case: Decoding, bench: Bench) -> Iterator[Row]:
    model, rows, new = bench.model(case.config), bench.size(case.rows, 2), bench.size(64, 16)
    requests = models.requests_of(model, [(bench.size(case.length - 64, 20), new)] * (rows + _LATER))
    requests, later = requests[:rows], requests[rows:]
    length = len(requests[0].canvas)
    # More columns than a canvas has, for rows that fill up a captured forward; and slots for those that come later.
    make = partial(models.decoder_of, model, case.settings, rows + _LATER, columns=length + 64)
    eager_ms, decoder = _median_ms(list(_laps(make(captures=False), requests))), make()
    laps, free_bytes = [], []
    for lap in _laps(decoder, requests):
        laps.append(lap)
        free_bytes.append(bench.free_bytes())
    num_bytes = model.num_bytes + rows * (length - new // 2) * int(getattr(model.backbone, "cell_bytes", 0))
    times_ms = (eager_ms, _median_ms([lap for lap in laps if lap.replayed]), num_bytes / bench.bytes_per_ms)
    share = f"{sum(lap.replayed > 0 for lap in laps) / len(laps):.0%}" if decoder.target.graphs else decoder.graphs
    cells = [case.name, f"{rows} x {length}", *(f"{ms:.2f}" for ms in times_ms), share]
    if count := sum(lap.captured for lap in laps):
        more_ms = sum(lap.ms - eager_ms for lap in laps if lap.captured)
        taken_mib = (free_bytes[1] - free_bytes[-1]) / 2**20
        cells += [str(count), f"{more_ms / count:.0f}", f"{taken_mib / count:.1f}"]
    yield _STEPS, cells
    if case.is_profiled:
        queue, decoder = deque(requests), make()
        for _ in models.stream(decoder, queue):
            if _all_decode(decoder, rows):
                break
        for _ in itertools.islice(models.stream(decoder, queue), 4):  # two forwards of a shape come before its graph
            pass
        yield from _profile(f"{case.name}: steady", bench, models.stream(decoder, queue))
        queue.extend(later)
        yield from _profile(f"{case.name}: with {_LATER} new prompts", bench, models.stream(decoder, queue))


def _profile(name: str, bench: Bench, steps: Iterator[object]) -> Iterator[Row]:
    """What the device does in three steps."""
    kind = "CPU" if bench.rehearse else "CUDA"
    bench.wait()
    with profile(activities=[ProfilerActivity.CPU, *([] if bench.rehearse else [ProfilerActivity.CUDA])]) as found:
        began_s = time.perf_counter()
        count = max(1, sum(1 for _ in itertools.islice(steps, bench.size(3, 1))))
        whole_ms = 1000 * (time.perf_counter() - began_s)
        bench.wait()
    total_us, times, gaps_us, end, num_waits = Counter[str](), Counter[str](), [0.0], None, 0
    for event in sorted(found.events(), key=lambda event: event.time_range.start):
        num_waits += event.name in ("cudaStreamSynchronize", "cudaMemcpy")
        if event.device_type.name == kind:
            span = event.time_range
            total_us[event.name] += span.end - span.start
            times[event.name] += 1
            gaps_us.append(max(0.0, span.start - (span.start if end is None else end)))
            end = max(span.end, end or span.end)
    sums = [whole_ms, times.total(), total_us.total() / 1000, sum(gaps_us) / 1000]
    per_step = [f"{number / count:.4g}" for number in sums]
    yield _WHERE, [name, *per_step, f"{max(gaps_us):.0f}", f"{num_waits / count:.2g}"]
    for kernel, us in total_us.most_common(20):
        label, share = " ".join(kernel.split())[:70], us / max(total_us.total(), 1e-9)
        yield _LONGEST, [name, label, f"{times[kernel] / count:.3g}", f"{us / count:.1f}", f"{share:.1%}"]


# ---- attention -------------------------------------------------------------------------------------------------------


def _attention(bench: Bench) -> Iterator[Row]:
    """Prompts by the arithmetic that is needed, steps by the keys and values that they read."""
    for before in (0, 4096, 16384):
        lines, before = bench.size(2048, 8), bench.size(before, before >> 10)  # noqa: PLW2901
        yield _attend(bench, f"{lines:,} rows of a prompt after {before:,}", 1, lines, before + lines)
    for slots, columns in itertools.product((1, 16, 64), (1024, 8192, 32768)):
        slots, columns = bench.size(slots, 2), bench.size(columns, columns >> 10)  # noqa: PLW2901
        yield _attend(bench, f"{slots} slots of a row and {columns:,} columns", slots, 1, columns)


def _attend(bench: Bench, case: str, slots: int, lines: int, columns: int) -> Row:
    asked = [_attention_over(bench, (32, 8, 128), (slots, lines, columns)) for _ in _IN_TURN]
    ours = [function for function, _ in asked if function]
    cells = _speed(bench, ours, amount := _amount(slots, lines, columns))
    del ours
    theirs = list[Callable[[], Tensor]]()
    while asked:  # one at a time: the largest pools take 8.6 GB each
        _, (query, layer, _) = asked.pop()
        if lines == 1:  # the heads of a group are as rows, which see all
            keys, values = layer.contiguous()
            theirs.append(partial(scaled_dot_product_attention, query.view(slots, 8, 4, 128), keys, values))
        else:
            keys, values = layer.repeat_interleave(4, 2)
            mask = causal_lower_right(lines, columns)
            theirs.append(
                partial(scaled_dot_product_attention, query.transpose(0, 1)[None], keys, values, attn_mask=mask)
            )
    return _ATTENTION, [case, *cells, *_speed(bench, theirs, amount)]


def _amount(slots: int, lines: int, columns: int) -> tuple[float, str]:
    """What a call reads, or what a prompt computes, and its unit a second."""
    if lines == 1:
        return 2 * 2 * slots * 8 * columns * 128 / 1e9, "GB/s"
    return 4 * 32 * 128 * lines * (columns - (lines - 1) / 2) / 1e12, "TFLOP/s"


def _speed(bench: Bench, functions: Sequence[Callable[[], Tensor]], amount: tuple[float, str]) -> list[str]:
    if not functions:
        return ["not used here", "-"]
    found = bench.time(*functions)
    return [str(found), f"{1000 * amount[0] / found.ms:,.0f} {amount[1]}"]


def _attention_over(
    bench: Bench, heads: tuple[int, int, int], sizes: tuple[int, int, int], **scores: Tensor
) -> tuple[Callable[[], Tensor] | None, tuple[Tensor, Tensor, Seen]]:
    """The kernel for (heads, key heads, width), called for (slots, rows of a slot, columns), and what it is called with: rows
    see the columns up to their own, keys and values are a view of a pool as `SlotCache` keeps it."""
    (num_heads, key_heads, width), (slots, lines, columns) = heads, sizes
    attend = find.find_attention(
        bench.device, bench.dtype, num_heads=num_heads, key_heads=key_heads, width=width, relative=bool(scores)
    )
    slot_N = torch.arange(slots, device=bench.device).repeat_interleave(lines)
    high_IN = (columns - lines + 1 + torch.arange(lines, device=bench.device)).repeat(slots).unsqueeze(0)
    group = num_heads // key_heads
    tiling = Tiling.of(bench.device, bench.dtype, group=group, width=width, relative=bool(scores))
    seen = Seen(
        slot_N,
        torch.zeros_like(high_IN),
        high_IN,
        position_N=high_IN[0] - 1,
        positions_SW=torch.arange(columns, device=bench.device).repeat(slots, 1),
        tables=tiling.tables(torch.arange(lines, device=bench.device).repeat(slots)),
    )
    layer_2SKWd = bench.normal(2, slots, columns, key_heads, width).transpose(2, 3)
    asked = bench.normal(slots * lines, num_heads, width), layer_2SKWd, seen
    return attend and partial(attend, *asked, scaling=width**-0.5, **scores), asked


# ---- kernels beside their references ---------------------------------------------------------------------------------


_Pair = tuple[Callable[[], Tensor] | None, Callable[[], Tensor]]
"""A kernel and its reference with the same input."""


def _compare(bench: Bench, name: str, case: str, pairs: Sequence[_Pair]) -> Row:
    """Ids of tokens have no order: those drawn are counted where they agree, and only there are log-probabilities compared."""
    ours, references = [one for one, _ in pairs if one], [one for _, one in pairs]
    cells = [str(bench.time(*references, times=5)), "-", "-"]
    if not ours:
        return _KERNELS, [name, case, "not used here", *cells]
    found, expected = ours[0]().double(), references[0]().double()
    if name == "sampling":
        is_same_R = found[0, 0] == expected[0, 0]
        cells[1] = f"{float(is_same_R.double().mean()):.2%}"
        found, expected = found[0, 1:, is_same_R], expected[0, 1:, is_same_R]
    cells[2] = f"{float((found - expected).abs().max()):.2g}" if found.numel() else "-"
    return _KERNELS, [name, case, str(bench.time(*ours)), *cells]


def _kernels(bench: Bench) -> Iterator[Row]:
    llama, xlnet = (32, 8, 128), (12, 12, 64)
    for heads, (slots, lines, columns) in ((llama, (64, 1, 768)), (llama, (2, 256, 768)), (xlnet, (64, 5, 512))):
        slots, lines, columns = (bench.size(slots, 2), bench.size(lines, 3), bench.size(columns, 40))  # noqa: PLW2901
        pairs = list[_Pair]()
        for _ in _IN_TURN:
            distances: dict[str, Any] = (
                {"relative_NHP": bench.normal(slots * lines, heads[0], 2 * columns)} if heads == xlnet else {}
            )
            ours, asked = _attention_over(bench, heads, (slots, lines, columns), **distances)
            pairs.append((ours, partial(reference.attend, *asked, scaling=heads[2] ** -0.5, **distances)))
        case = f"{heads[0]} heads of {heads[2]}, {slots} slots of {lines} rows, {columns} columns"
        yield _compare(bench, "attention", case, pairs)
    product, num_experts = find.find_product(bench.device, bench.dtype), bench.size(128, 4)
    weights = [bench.normal(num_experts, 768, 2048) for _ in _IN_TURN]
    for count in (bench.size(512, 4), bench.size(2048, 8)):
        expert = torch.arange(count, device=bench.device) * num_experts // count
        ends = torch.searchsorted(expert, torch.arange(num_experts, device=bench.device), right=True, out_int32=True)
        pairs = [
            (product and partial(product, states, one, ends), partial(reference.product, states, one, ends))
            for one, states in ((one, bench.normal(count, 2048)) for one in weights)
        ]
        yield _compare(bench, "experts", f"{count} rows, {num_experts} experts of 2048 x 768", pairs)


def _draws(bench: Bench) -> Iterator[Row]:
    kernel, size = find.find_sampling(bench.device, bench.dtype), bench.size(128256, 211)
    never_V = torch.arange(size, device=bench.device) < 3
    cuts = (("plain", 1.0, 0), ("top-k 50", 1.0, 50), ("top-p 0.9", 0.9, 0), ("top-k 50, top-p 0.9", 0.9, 50))
    for rows, wanted in ((1, ()), (64, ()), (256, ()), (64, ("top1", "entropy"))):
        for name, top_p, top_k in cuts:
            row_R = torch.arange(bench.size(rows, 4), device=bench.device)
            keys = noise.key_words([sample_key(0, str(row)) for row in range(len(row_R))], bench.device)
            settings_4R = np.repeat([[1.0], [top_p], [0.0], [top_k]], len(row_R), axis=1)
            settings = torch.from_numpy(settings_4R).to(bench.device), Uses.of(settings_4R)
            warp = Warp(*settings, never_V.nonzero()[:, 0], never_V)
            notes: Any = {"wanted": wanted, "warped": bool(wanted)}
            pairs = list[_Pair]()
            for _ in _IN_TURN:
                asked = (torch.randn(len(row_R), size, device=bench.device) * 3, warp, keys, row_R)
                pairs.append((kernel and partial(kernel, *asked, **notes), partial(sample, *asked, **notes)))
            case = f"{len(row_R)} rows of {size:,}, {name}{', with notes' if wanted else ''}"
            yield _compare(bench, "sampling", case, pairs)


def _plain(case: Decoding, bench: Bench) -> Iterator[Row]:
    rows, columns = bench.size(case.rows, 2), bench.size(case.length - 32, 20)
    step, num_bytes = device_peer.plain_step(bench, bench.config(case.config), rows, columns)
    found = bench.time(step)
    cells = [
        f"{rows} x {columns}",
        str(found),
        f"{num_bytes / bench.bytes_per_ms:.2f}",
        f"{1000 * rows / found.ms:,.0f}",
    ]
    yield _PLAIN, [f"plain loop, {case.name}", *cells]


# ---- compiling -------------------------------------------------------------------------------------------------------


def _compiled(cache: str, bench: Bench) -> Iterator[Row]:
    """What Triton compiles in a stream of many lengths, for a model with the heads of Llama-8B and two layers."""
    if importlib.util.find_spec("triton") is None:
        yield _COMPILED, [cache, "Triton is not installed"]
        return
    import triton

    taken_s = {False: list[float](), True: list[float]()}
    # Triton tells a listener the microseconds of each compilation, and whether the kernel was found on disk.
    triton.knobs.compilation.listener = lambda *, times, cache_hit, **_: taken_s[cache_hit].append(times.total / 1e6)
    began_s, model = time.perf_counter(), bench.model({**models.LLAMA_8B, "num_hidden_layers": 2})
    sizes = [(16 + 37 * number % bench.size(600, 9), 8 + number % 9) for number in range(bench.size(200, 3))]
    decoder = models.decoder_of(model, models.AR, bench.size(64, 2), columns=1024)
    for _ in models.stream(decoder, deque(models.requests_of(model, sizes))):
        pass
    bench.wait()
    new_s, seconds = taken_s[False], time.perf_counter() - began_s
    cells = [str(len(new_s)), f"{sum(new_s):.1f}", f"{max(new_s, default=0):.1f}", str(len(taken_s[True]))]
    yield _COMPILED, [cache, *cells, f"{seconds:.1f}"]


_OWN_CACHE: Final = {"TRITON_CACHE_DIR": "{folder}/triton"}
CASES: Final = [
    *(Case(one.name, _STEPS, partial(_steps, one)) for one in DECODINGS[:2]),
    Case("attention", _ATTENTION, _attention),
    Case("draws", _KERNELS, _draws),
    Case("kernels", _KERNELS, _kernels),
    *(Case(one.name, _STEPS, partial(_steps, one), 60) for one in DECODINGS[2:]),
    *(
        Case(f"plain loop, {one.name}", _PLAIN, partial(_plain, one), 60)
        for one in DECODINGS
        if one.settings is models.AR and one.rows >= 64
    ),
    Case("compiled, cold", _COMPILED, partial(_compiled, "empty"), env=_OWN_CACHE),
    Case("compiled, warm", _COMPILED, partial(_compiled, "as the line above left it"), env=_OWN_CACHE),
]
