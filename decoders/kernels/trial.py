"""Tries each kernel once on a device, on small inputs beside torch's own operations.

A driver, a compiler or a GPU that nobody has tried must cost speed, not results. A trial yields what the kernel gives and what
it must give; the smallest and the largest tile, which take unequal shared memory, are both tried. Triton is imported when a
kernel is tried, and nowhere before.

Legend: N flat rows, H heads, K key heads, S slots, W columns; of layers: P rows, D width, J = H + 2 K, I inner width; of experts:
P rows, sorted by expert, E experts, D numbers in, M numbers out; of fixed products: K numbers in, M numbers out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.sampling import Warp, sample
from draftmill.decoders.draws.settings import NOTES, Uses
from draftmill.decoders.kernels.seen import Seen, Tiling

_log = logging.getLogger(__name__)
Pairs = Iterator[tuple[Tensor, Tensor]]
# The largest difference allowed, beside the largest number.
_ROUNDING: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Rows of three slots, one of which sees nothing, with five intervals: no decoder has more (decoders/masked/ssd.py).
_SLOTS: Final = [0, 0, 0, 1, 1, 2, 2, 2]
_LINES: Final = [0, 1, 2, 0, 1, 0, 1, 2]
_LOW: Final = [
    [0, 0, 5, 9, 0, 0, 250, 0],
    [0, 0, 30, 0, 0, 0, 0, 290],
    [0, 0, 64, 0, 0, 0, 0, 120],
    [0, 0, 100, 0, 0, 0, 0, 150],
    [0, 0, 290, 0, 0, 0, 0, 200],
]
_HIGH: Final = [
    [200, 9, 40, 9, 300, 1, 280, 90],
    [0, 0, 60, 0, 0, 0, 0, 300],
    [0, 0, 65, 0, 0, 0, 0, 140],
    [0, 0, 180, 0, 0, 0, 0, 190],
    [0, 0, 299, 0, 0, 0, 0, 230],
]


@lru_cache
def problem(name: str, device: torch.device, dtype: torch.dtype, **asked: Any) -> str | None:
    """Why the kernel of this name is not used, in one line; None if it is. The answer is remembered. `asked` as in its trial."""
    try:
        wrong = [
            float((found - expected).abs().max())
            for found, expected in TRIALS[name](device, dtype, **asked)
            if not _close(found, expected)
        ]
    except Exception as error:  # noqa: BLE001 - see below
        # Of any kind: a missing Python.h is a CalledProcessError, a missing libcuda an AssertionError, a cache that can't be
        # written a PermissionError. A lost device (an illegal access, say) rejects every later call, with or without kernels:
        # this one then raises, which ends the worker.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        reason = "fails here: " + f"{type(error).__name__}: {lines[0]}"[:200]
    else:
        reason = f"is wrong here by up to {max(wrong):g}" if wrong else ""
    if reason:
        _log.warning("the kernel for %s %s; torch's own operations run instead", name, reason)
    return reason or None


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether all numbers agree up to rounding; NaN never does."""
    most = _ROUNDING[found.dtype] * expected.abs().max().clamp(min=1.0)
    return bool(((found - expected).abs() <= most).all())


def _normal(device: torch.device, *shape: int) -> Tensor:
    """Random normal numbers, the same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_heads: int,
    key_heads: int,
    width: int,
    relative: bool = False,
    plain: bool = True,
) -> Pairs:
    """`relative`: the model adds a score that depends on distances; not `plain`: it caps scores, and has sinks."""
    from draftmill.decoders.kernels.attention import attend

    group, places = num_heads // key_heads, (_SLOTS, _LINES, _LOW, _HIGH)
    slot_N, line_N, low_IN, high_IN = (torch.tensor(numbers, device=device) for numbers in places)
    position_N, column_W = 30 * torch.arange(8, device=device), torch.arange(300, device=device)
    query_NHd = _normal(device, 8, num_heads, width).to(dtype)
    layer_2SKWd = _normal(device, 2, 3, key_heads, 300, width).to(dtype)
    key_NHWd, value_NHWd = layer_2SKWd[:, slot_N].float().repeat_interleave(group, 2)
    score_NHW, options = (key_NHWd @ query_NHd.float().unsqueeze(3)).squeeze(3) * width**-0.5, dict[str, Any]()
    sink_NH1 = torch.full_like(score_NHW[..., :1], -torch.inf)
    if not plain:
        options |= {"cap": 1.5, "sink_H": _normal(device, num_heads).to(dtype)}
        score_NHW, sink_NH1 = 1.5 * (score_NHW / 1.5).tanh(), sink_NH1.copy_(options["sink_H"].unsqueeze(1))
    if relative:
        options["relative_NHP"] = _normal(device, 8, num_heads, 600).to(dtype)
        distance_N1W = (position_N.unsqueeze(1) - column_W + 300).unsqueeze(1).expand_as(score_NHW)
        score_NHW += options["relative_NHP"].float().gather(2, distance_N1W)
    sizes = Tiling.of(device, dtype, group=group, width=width, relative=relative).sizes
    for lines, shares, window in ((sizes[0], 4, None), (sizes[-1], 1, None), (sizes[-1], 1, 50)):
        tables = Tiling(group, lines, few=()).tables(line_N)
        seen = Seen(slot_N, low_IN, high_IN, position_N, column_W.repeat(3, 1), tables=tables)
        hidden_N1W = ~seen.visible_NW(300, window).unsqueeze(1)
        weight_NHX = torch.cat([score_NHW.masked_fill(hidden_N1W, -torch.inf), sink_NH1], 2).softmax(2).nan_to_num()
        expected_NHd = (weight_NHX[..., :300].unsqueeze(2) @ value_NHWd).squeeze(2)
        found_NHd = attend(query_NHd, layer_2SKWd, seen, scaling=width**-0.5, window=window, shares=shares, **options)
        yield found_NHd, expected_NHd


def _layers(device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int) -> Pairs:
    """The kernels between the products of a layer."""
    from draftmill.decoders.kernels import layers

    weight_D, added_PD = _normal(device, 96).to(dtype), _normal(device, 6, 96)[1:].to(dtype)
    gate_PI, up_PI = added_PD.float().chunk(2, 1)
    yield layers.gated(added_PD), functional.silu(gate_PI) * up_PI
    for adds in (False, True):
        states_PD = _normal(device, 5, 96).to(dtype)
        sum_PD = states_PD + added_PD if adds else states_PD.clone()
        normed_PD = layers.add_norm(states_PD, added_PD if adds else None, weight_D, 1e-5)
        yield normed_PD, functional.rms_norm(sum_PD.float(), (96,), weight_D.float(), 1e-5)
        yield states_PD, sum_PD
    heads_PJd = _normal(device, 5, num_heads + 2 * key_heads, width).to(dtype)
    scale_d = 1.0 + _normal(device, width) / 10
    position_P, cell_P = torch.arange(5, device=device) * 700, torch.tensor([7, 0, 3, 8, 2], device=device)
    frequency_h = (10.0 ** -(torch.arange(width // 2) % 4)).to(device)
    angle_P1h = (position_P.unsqueeze(1) * frequency_h).unsqueeze(1)
    turn_P1h = torch.polar(torch.full_like(angle_P1h, 1.2), angle_P1h)
    for norms in (None, (scale_d.to(dtype), scale_d.to(dtype), 1e-6)):
        found_PJd, pool_2CKd = heads_PJd.clone(), heads_PJd.new_zeros(2, 9, key_heads, width)
        layers.rotate(found_PJd, position_P, cell_P, pool_2CKd, (frequency_h, 1.2), norms)
        normed_PXd, expected_2CKd = heads_PJd[:, :-key_heads].float(), torch.zeros_like(pool_2CKd.float())
        if norms is not None:
            normed_PXd = functional.rms_norm(normed_PXd, (width,), norms[0].float(), norms[2])
        turned_PXh = torch.complex(*normed_PXd.chunk(2, 2)) * turn_P1h
        turned_PXd = torch.cat([turned_PXh.real, turned_PXh.imag], 2)
        expected_2CKd[0, cell_P] = turned_PXd[:, num_heads:]
        expected_2CKd[1, cell_P] = heads_PJd[:, -key_heads:].float()
        yield found_PJd, torch.cat([turned_PXd[:, :num_heads], heads_PJd[:, num_heads:].float()], 1)
        yield pool_2CKd, expected_2CKd


def _fixed_products(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Some of the rows must have the same bits as among all of them."""
    from draftmill.decoders.kernels.products import fixed_product

    for heads in ((), (3,)):
        rows_NK = _normal(device, 130, *heads, 200).to(dtype)
        weight_MK, bias_M = ((_normal(device, *shape) / 10).to(dtype) for shape in ((*heads, 72, 200), (72,)))
        asked = (weight_MK, None) if heads else (weight_MK, bias_M)
        whole_NM = fixed_product(rows_NK, *asked)
        expected_NM = (rows_NK.double().transpose(0, -2) @ weight_MK.double().mT).transpose(0, -2)
        yield whole_NM, expected_NM if heads else expected_NM + bias_M.double()
        for some in (slice(7, 8), slice(100, 117)):
            differs_NM = (fixed_product(rows_NK[some], *asked) != whole_NM[some]).float()
            yield differs_NM, torch.zeros_like(differs_NM)


def _experts(device: torch.device, dtype: torch.dtype, *, fixed: bool) -> Pairs:
    from draftmill.decoders.kernels import experts

    ends, product = (0, 3, 3, 40, 41, 70), experts.fixed_product if fixed else experts.product
    rows_PD, weight_EMD = _normal(device, 70, 96).to(dtype), (_normal(device, 5, 72, 96) / 10).to(dtype)
    each = [
        rows_PD[first:end].float() @ one.float().T for (first, end), one in zip(pairwise(ends), weight_EMD, strict=True)
    ]
    yield product(rows_PD, weight_EMD, torch.tensor(ends[1:], dtype=torch.int32, device=device)), torch.cat(each)


def _sampling(device: torch.device, _: torch.dtype) -> Pairs:
    """With and without notes and cuts, and on rows of two parts."""
    from draftmill.decoders.kernels import sampling

    number_R = torch.arange(8, device=device)
    keys = noise.key_words([sample_key(0, str(row)) for row in range(8)], device)
    # Of every three rows the first names no token to score: then it is the token drawn.
    scored: dict[str, Any] = {"draw_R": number_R * 3, "scored_R": number_R % 3 * 100 - 1, "ahead": 1}
    noted: dict[str, Any] = {**scored, "wanted": NOTES, "mask_id": 5}
    for size, top_k, warped, more in (
        (9001, 0, False, {}), (601, 30, False, scored), (601, 0, False, noted), (601, 30, True, noted)
    ):  # fmt: skip
        settings_4R = np.array([[1.0, 0.0, 0.7, 2.0] * 2, [1.0] * 4 + [0.8] * 4, [0.0] * 8, [top_k] * 8])
        never_V = torch.arange(size, device=device) < 3
        warp = Warp(torch.from_numpy(settings_4R).to(device), Uses.of(settings_4R), number_R[:3], never_V)
        found, expected = (
            draw(_normal(device, 8, size) * 4, warp, keys, number_R, warped=warped, **more).float()
            for draw in (sampling.sample, sample)
        )
        yield from zip(found.unbind(1), expected.unbind(1), strict=True)


TRIALS: Final[dict[str, Callable[..., Pairs]]] = {
    "attention": _attention,
    "layers": _layers,
    "fixed products": _fixed_products,
    "experts": _experts,
    "sampling": _sampling,
}
"""By the name of the kernel."""
