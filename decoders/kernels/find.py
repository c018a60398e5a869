"""Finds the kernels that can be used on a device: those that are wanted, installed, and equal to their references there.

They are used on a CUDA device, where Triton and a C compiler are installed, unless DRAFTMILL_KERNELS is 0; the compiler makes the
small library through which Triton starts kernels. Otherwise torch's own operations run, for which None stands; results of the two
differ by rounding alone.

Each kernel is tried once beside its reference in torch: a driver, a compiler or a GPU that nobody has tried must cost speed, not
results. A trial says in one line why the kernel is not used, or returns None; it remembers the answer. Triton is imported when a
kernel is tried, and nowhere before.

Legend: N flat rows, H heads, K key heads, G = H / K, S slots, W columns, P distances; of experts: P rows, sorted by expert,
E experts, D numbers in, M numbers out; of fixed products: K numbers in, M numbers out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final, TypeVar

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
# The largest difference allowed, beside the largest number.
_ROUNDING: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Rows of three slots, of which one sees nothing, with five intervals: no decoder has rows of more (decoders/masked/ssd.py).
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
_MOST_REASON: Final = 200
T = TypeVar("T")


@lru_cache
def attention_problem(
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_heads: int,
    key_heads: int,
    width: int,
    relative: bool = False,
    plain: bool = True,
) -> str | None:
    """Why attention is not used for such heads. The smallest and the largest tile take unequal shared memory: both are tried.
    `relative`: the model adds a score that depends on distances; not `plain`: it caps scores, or has sinks."""

    def trial() -> list[tuple[Tensor, Tensor]]:
        from draftmill.decoders.kernels import attention

        query_NHd = _normal(device, 8, num_heads, width).to(dtype)
        layer_2SKWd = _normal(device, 2, 3, key_heads, 300, width).to(dtype)
        slot_N, line_N, low_IN, high_IN = (
            torch.tensor(values, device=device) for values in (_SLOTS, _LINES, _LOW, _HIGH)
        )
        scores: dict[str, Any] = {"relative_NHP": _normal(device, 8, num_heads, 600).to(dtype)} if relative else {}
        scores |= {} if plain else {"cap": 1.5, "sink_H": _normal(device, num_heads).to(dtype)}
        sizes, pairs = Tiling.of(device, dtype, group=num_heads // key_heads, width=width, relative=relative).sizes, []
        for lines, shares, window in ((sizes[0], 4, None), (sizes[-1], 1, None), (sizes[-1], 1, 50)):
            seen = Seen(
                slot_N,
                low_IN,
                high_IN,
                position_N=30 * torch.arange(8, device=device),
                positions_SW=torch.arange(300, device=device).repeat(3, 1),
                tables=Tiling(num_heads // key_heads, lines, few=()).tables(line_N),
            )
            asked, options = (query_NHd, layer_2SKWd, seen), {"scaling": width**-0.5, "window": window, **scores}
            result = attention.attend(*asked, **options, shares=shares)
            pairs.append((result, reference_attend(*asked, **options)))
        return pairs

    return _problem("attention", device, trial)


@lru_cache
def layers_problem(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int
) -> str | None:
    """Why the kernels between the products of a layer are not used for such heads."""

    def trial() -> list[tuple[Tensor, Tensor]]:
        from draftmill.decoders.kernels import layers

        scale_d = (1.0 + _normal(device, width) / 10).to(dtype)
        position_P, cell_P = torch.arange(5, device=device) * 700, torch.tensor([7, 0, 3, 8, 2], device=device)
        results = list[tuple[Tensor, ...]]()
        for kernels in (layers, REFERENCE_LAYERS):
            states_PD, heads_PJd = (
                _normal(device, 5, *shape).to(dtype) for shape in ((96,), (num_heads + 2 * key_heads, width))
            )
            first = kernels.add_norm(states_PD, None, _normal(device, 96).to(dtype), 1e-5)
            second = kernels.add_norm(states_PD, _normal(device, 5, 96).to(dtype), _normal(device, 96).to(dtype), 1e-5)
            pool_2CKd, frequency_h = (
                heads_PJd.new_zeros(2, 9, key_heads, width),
                10.0 ** -(torch.arange(width // 2) % 4),
            )
            for norms in (None, (scale_d, scale_d, 1e-6)):
                kernels.rotate(heads_PJd, position_P, cell_P, pool_2CKd, (frequency_h.to(device), 1.2), norms)
            results.append((first, second, states_PD, heads_PJd, pool_2CKd, kernels.gated(states_PD)))
        return list(zip(*results, strict=True))

    return _problem("layers", device, trial)


@lru_cache
def fixed_product_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the product of fixed tiles is not used. Some of the rows must have the same bits as among all of them."""

    def trial() -> list[tuple[Tensor, Tensor]]:
        from draftmill.decoders.kernels.products import fixed_product

        pairs = []
        for heads in ((), (3,)):
            rows_NK = _normal(device, 130, *heads, 200).to(dtype)
            weight_MK, bias_M = ((_normal(device, *shape) / 10).to(dtype) for shape in ((*heads, 72, 200), (72,)))
            asked = (weight_MK, None) if heads else (weight_MK, bias_M)
            whole_NM = fixed_product(rows_NK, *asked)
            pairs.append((whole_NM, reference_fixed_product(rows_NK, *asked)))
            for some in (slice(7, 8), slice(100, 117)):
                differs = fixed_product(rows_NK[some], *asked) != whole_NM[some]
                pairs.append((differs.float(), torch.zeros_like(differs, dtype=torch.float32)))
        return pairs

    return _problem("fixed products", device, trial)


@lru_cache
def experts_problem(device: torch.device, dtype: torch.dtype, *, fixed: bool = False) -> str | None:
    """Why the product with the weights of experts is not used; `fixed` as in find_product."""

    def trial() -> list[tuple[Tensor, Tensor]]:
        from draftmill.decoders.kernels import experts

        product = experts.fixed_product if fixed else experts.product
        rows_PD, weight_EMD = _normal(device, 70, 96).to(dtype), (_normal(device, 5, 72, 96) / 10).to(dtype)
        end_E = torch.tensor([3, 3, 40, 41, 70], dtype=torch.int32, device=device)
        expected = reference_product(rows_PD, weight_EMD, end_E)
        return [(product(rows_PD, weight_EMD, end_E), expected)]

    return _problem("experts", device, trial)


@lru_cache
def sampling_problem(device: torch.device) -> str | None:
    """Why the kernel for tokens and their notes is not used; tried with and without notes and cuts, and on rows of two parts."""

    def trial() -> list[tuple[Tensor, Tensor]]:
        from draftmill.decoders.kernels import sampling

        number_R = torch.arange(8, device=device)
        keys = noise.key_words([sample_key(0, str(row)) for row in range(8)], device)
        settings = [[1.0, 0.0, 0.7, 2.0] * 2, [1.0] * 4 + [0.8] * 4, [0.0] * 8]
        # Of every three rows the first names no token to score: then it is the token drawn.
        scored: dict[str, Any] = {"draw_R": number_R * 3, "scored_R": number_R % 3 * 100 - 1, "ahead": 1}
        noted: dict[str, Any] = {**scored, "wanted": NOTES, "mask_id": 5}
        pairs = []
        for size, top_k, warped, more in (
            (9001, 0, False, {}), (601, 30, False, scored), (601, 0, False, noted), (601, 30, True, noted)
        ):  # fmt: skip
            settings_4R = np.array([*settings, [top_k] * 8])
            warp = Warp(
                torch.from_numpy(settings_4R).to(device),
                Uses.of(settings_4R),
                number_R[:3],
                torch.arange(size, device=device) < 3,
            )
            result, expected = (
                draw(_normal(device, 8, size) * 4, warp, keys, number_R, warped=warped, **more).float()
                for draw in (sampling.sample, sample)
            )
            pairs += list(zip(result.unbind(1), expected.unbind(1), strict=True))
        return pairs

    return _problem("sampling", device, trial)


def _problem(name: str, device: torch.device, trial: Callable[[], list[tuple[Tensor, Tensor]]]) -> str | None:
    try:
        wrong = [float((result - expected).abs().max()) for result, expected in trial() if not _close(result, expected)]
    except Exception as error:  # noqa: BLE001 - see below
        # Of any kind: a missing Python.h is a CalledProcessError, a missing libcuda an AssertionError, a cache that can't be
        # written a PermissionError. A lost device (an illegal access, say) rejects every later call, with or without kernels:
        # this one then raises, which ends the worker.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        reason = "fails here: " + f"{type(error).__name__}: {lines[0]}"[:_MOST_REASON]
    else:
        reason = f"is wrong here by up to {max(wrong):g}" if wrong else ""
    if reason:
        _log.warning("the kernel for %s %s; torch's own operations run instead", name, reason)
    return reason or None


def _close(result: Tensor, expected: Tensor) -> bool:
    """Whether all numbers agree up to rounding; NaN never does."""
    most = _ROUNDING[result.dtype] * expected.abs().max().clamp(min=1.0)
    return bool(((result - expected).abs() <= most).all())


def _normal(device: torch.device, *shape: int) -> Tensor:
    """Random normal numbers, the same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


# ---- references ------------------------------------------------------------------------------------------------------


def reference_attend(
    query_NHd: Tensor,
    layer_2SKWd: Tensor,
    seen: Seen,
    *,
    scaling: float,
    window: int | None = None,
    relative_NHP: Tensor | None = None,
    cap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Mix the values of the columns that each row sees by the softmax of its scores, [N, H, d]; sums are in float32 or better.
    A score is scaling x (query . key); with `cap`, cap x tanh(that / cap). With `relative_NHP` the row's number for the distance
    of the two positions is added, as it is: position of the row - position of the column + P / 2, cut to 0 .. P - 1. A head's
    sink is one more score, of a place that every row sees and that holds nothing. A row that sees nothing gets zeros."""
    num_columns = layer_2SKWd.shape[3]
    group = query_NHd.shape[1] // layer_2SKWd.shape[2]
    wide = torch.promote_types(query_NHd.dtype, torch.float32)
    key_NHWd, value_NHWd = layer_2SKWd[:, seen.slot_N].to(wide).repeat_interleave(group, 2)
    score_NHW = (key_NHWd @ query_NHd.to(wide).unsqueeze(3)).squeeze(3) * scaling
    if cap is not None:
        score_NHW = cap * (score_NHW / cap).tanh()
    if relative_NHP is not None:
        assert seen.position_N is not None and seen.positions_SW is not None, "relative scores read positions"
        distance_NW = seen.position_N.unsqueeze(1) - seen.positions_SW[seen.slot_N, :num_columns]
        num_heads, num_distances = relative_NHP.shape[1:]
        place_N1W = (distance_NW + num_distances // 2).clamp(0, num_distances - 1).unsqueeze(1)
        score_NHW += relative_NHP.to(wide).gather(2, place_N1W.expand(-1, num_heads, -1))
    hidden_N1W = ~seen.visible_NW(num_columns, window).unsqueeze(1)
    score_NHW = score_NHW.masked_fill(hidden_N1W, -torch.inf)
    if sink_H is not None:
        sink_NH1 = sink_H.to(wide)[:, None].expand(len(score_NHW), -1, 1)
        score_NHW = torch.cat([score_NHW, sink_NH1], 2)
    weight_NHW = score_NHW.softmax(2)[:, :, :num_columns].masked_fill(hidden_N1W, 0.0)
    return (weight_NHW.unsqueeze(2) @ value_NHWd).squeeze(2).to(query_NHd.dtype)


def reference_add_norm(states_PD: Tensor, added_PD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add to the states, in place, and return the sums divided by their root mean square and weighed, [P, D]."""
    if added_PD is not None:
        states_PD += added_PD
    wide = torch.promote_types(states_PD.dtype, torch.float32)
    return functional.rms_norm(states_PD.to(wide), weight_D.shape, weight_D.to(wide), eps).to(states_PD.dtype)


def reference_rotate(
    heads_PJd: Tensor,
    position_P: Tensor,
    cell_P: Tensor,
    pool_2CKd: Tensor,
    turn: tuple[Tensor, float],
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    """Turn each row's queries, in place, and its keys by its position (`turn`: radians a position, float32 [d / 2], and a factor
    of cosines and sines), and write keys and values, which follow the queries, into cell `cell_P` of the cache.
    `norms`: first norm queries and keys, by the weights of each and an epsilon."""
    key_heads, wide = pool_2CKd.shape[2], torch.promote_types(heads_PJd.dtype, torch.float32)
    turned, values = heads_PJd.to(wide).split_with_sizes([heads_PJd.shape[1] - key_heads, key_heads], 1)
    if norms is not None:
        weights_J1d = torch.cat([norms[0].expand(turned.shape[1] - key_heads, -1), norms[1].expand(key_heads, -1)])
        turned = functional.rms_norm(turned, turned.shape[2:], None, norms[2]) * weights_J1d
    frequency_h, factor = turn
    angle_P1h = (position_P.float().unsqueeze(1) * frequency_h).unsqueeze(1)
    cosine, sine = angle_P1h.cos() * factor, angle_P1h.sin() * factor
    low, high = turned.chunk(2, 2)
    turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], 2).to(heads_PJd.dtype)
    heads_PJd[:, : -2 * key_heads] = turned[:, :-key_heads]
    pool_2CKd[0, cell_P], pool_2CKd[1, cell_P] = turned[:, -key_heads:], values.to(heads_PJd.dtype)


def reference_gated(both_PI: Tensor) -> Tensor:
    """silu of the first half of each row times the second half, [P, I / 2]."""
    gate, up = both_PI.to(torch.promote_types(both_PI.dtype, torch.float32)).chunk(2, 1)
    return (functional.silu(gate) * up).to(both_PI.dtype)


def reference_fixed_product(rows_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, [N, M]; with heads, rows [N, H, K] and weights [H, M, K] give [N, H, M]. The kernel's sums are
    in float32 and in one order. Here they are in float64: once they are rounded, the order shows in one number of a billion."""
    rows_HNK = rows_NK.to(torch.float64).transpose(0, -2)
    out_NM = (rows_HNK @ weight_MK.to(torch.float64).mT).transpose(0, -2)
    if bias_M is not None:
        out_NM = out_NM + bias_M.to(torch.float64)
    return out_NM.to(rows_NK.dtype).contiguous()


def reference_product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert, [P, M]; sums are in float32 or better. Expert e has the rows from the
    end of the expert before it up to `end_E[e]` (int32); the last end is P."""
    wide = torch.promote_types(rows_PD.dtype, torch.float32)
    row_P = torch.arange(rows_PD.shape[0], dtype=end_E.dtype, device=end_E.device)
    expert_P = torch.searchsorted(end_E, row_P, right=True)
    return (weight_EMD.to(wide)[expert_P] @ rows_PD.to(wide).unsqueeze(2)).squeeze(2).to(rows_PD.dtype)


VARIABLE: Final = "DRAFTMILL_KERNELS"
"""The environment variable: 0 turns the kernels off, 1 or nothing leaves them on."""
LEAST_CAPABILITY: Final = (7, 5)
"""Compute capability for which tiles are made (seen.py); before 8.0 there is no bfloat16, which the trial finds."""

Attend = Callable[..., Tensor]
"""Attention over a layer of the slot cache: that of attention.py, or reference_attend, whose signature it has."""
REFERENCE_LAYERS: Final = SimpleNamespace(add_norm=reference_add_norm, rotate=reference_rotate, gated=reference_gated)
"""What layers.py must give."""
FixedProduct = Callable[..., Tensor]
"""A product whose rows have the same bits in any batch: that of products.py, or reference_fixed_product."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The product with the weights of experts: that of experts.py, or reference_product."""
Sample = Callable[..., Tensor]
"""From logits to tokens and what decoders want to know of each row: sampling.py, or draws/sampling.py, which gives the same."""

_VERDICTS: Final[dict[str, str]] = {}


def find_attention(device: torch.device, dtype: torch.dtype, *, fixed: bool = False, **heads: Any) -> Attend | None:
    """The kernel for such `heads`, which are the keyword arguments of attention_problem. If `fixed`, a row has the same bits in
    any batch, provided that its tiles are fixed, too (Tiling.of)."""
    if not _is_used("attention", device, dtype, lambda: attention_problem(device, dtype, **heads)):
        return None
    from draftmill.decoders.kernels.attention import attend

    # How many shares are worth it depends on how many tiles there are.
    return partial(attend, shares=1) if fixed else attend


def find_layers(device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int) -> Any:
    """The kernels between the products of a rotary model's layers: a module with `add_norm`, `rotate` and `gated`, or None."""
    heads = {"num_heads": num_heads, "key_heads": key_heads, "width": width}
    if not _is_used("layers", device, dtype, lambda: layers_problem(device, dtype, **heads)):
        return None
    from draftmill.decoders.kernels import layers

    return layers


def find_fixed_product(device: torch.device, dtype: torch.dtype) -> FixedProduct | None:
    """The product of a linear layer of a model that must be exact."""
    if not _is_used("fixed products", device, dtype, lambda: fixed_product_problem(device, dtype)):
        return None
    from draftmill.decoders.kernels.products import fixed_product

    return fixed_product


def find_product(device: torch.device, dtype: torch.dtype, *, fixed: bool = False) -> Product | None:
    """The product with the weights of experts; if `fixed`, a row has the same bits in any batch."""
    if not _is_used("experts", device, dtype, lambda: experts_problem(device, dtype, fixed=fixed)):
        return None
    from draftmill.decoders.kernels import experts

    return experts.fixed_product if fixed else experts.product


def demanded(name: str, kernel: T | None) -> T:
    """This kernel, for a model that must be exact; ValueError, with the reason, if it can't be used."""
    if kernel is None:
        raise ValueError(
            f"model.exact: true needs the kernel for {name} on a GPU, and here it is {_VERDICTS.get(name)}; decode in bfloat16, "
            "float16 or float32 on an NVIDIA GPU with Triton, or in float32 on a CPU (model.device: cpu); or leave it out"
        )
    return kernel


def find_sampling(device: torch.device, dtype: torch.dtype) -> Sample | None:
    """What draws the tokens of a model of this dtype, and makes their notes."""
    if not _is_used("sampling", device, dtype, lambda: sampling_problem(device)):
        return None
    from draftmill.decoders.kernels.sampling import sample

    return sample


def verdicts() -> dict[str, str]:
    """What was found for each kernel that was asked for since `forget_verdicts`: `on`, or `off: ` and why."""
    return dict(_VERDICTS)


def forget_verdicts() -> None:
    """Called before a model is loaded: what `verdicts` has afterwards is the model's own."""
    _VERDICTS.clear()


def _is_used(name: str, device: torch.device, dtype: torch.dtype, problem: Callable[[], str | None]) -> bool:
    reason = "float64 is computed by torch" if dtype == torch.float64 else why_no_kernels(device) or problem()
    _VERDICTS[name] = "on" if reason is None else f"off: {reason}"
    return reason is None


def is_on(variable: str) -> bool:
    """What the environment says of a switch that is on without it. Raises ValueError for anything but 0 and 1."""
    given = os.environ.get(variable, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{variable}: {given!r} is not allowed; allowed: 0, 1")
    return given == "1"


def why_no_kernels(device: torch.device) -> str | None:
    """Why kernels are not used on this device, in a few words; None if they are."""
    if not is_on(VARIABLE):
        return f"{VARIABLE} is 0"
    if device.type != "cuda" or torch.version.cuda is None:
        return "they are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {have}; the kernels are for {need} (Turing) or later"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang, or CC), with which Triton makes the library that starts kernels"
    return None
