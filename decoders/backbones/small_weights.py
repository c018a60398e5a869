"""Linear layers that keep their weights in 8 or 4 bits a number (`model.weights`).

    int8    code * scale, one scale a row of the matrix; rows are rounded to 16 bits and multiplied as integers. This kind and
            the next one also hold the output layer, and embeddings tied to it
    w8a8    the same with rows of 8 bits, which are turned first to spread their outliers (network.py); `down_proj` has 16
    fp8     code * scale as int8, with codes of e4m3, and rows as they are
    int4    code * scale + low, for each 64 (or 32) columns of a row. Numbers that are on such a grid, as those of checkpoints of
            4 bits, stay what they are

A sum of integers is the same in any order: a row of integers has the same bits in any batch, on any processor. Other kinds
compute in the model's dtype: a forward writes a layer's codes into a buffer that all layers share, and multiplies by it as any
layer does, so rows agree by the shape rules of other products. Codes of weights are computed on the CPU: they are the same on
every device.

Legend: R rows, K in, M out, G groups of g columns.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.packed import replace_products

_LARGEST: Final = {"int8": 127, "int4": 15, "fp8": 448}
_EXACT: Final = 1024  # columns: 1024 * 128 * 127 is below 2^24
_AT_ONCE: Final = 256  # rows whose sums stay in a processor's cache
# Tensors, since torch converts a Python number again in each call.
_STEPS_OF_ONE, _STEPS, _BYTE = torch.tensor(127.0), torch.tensor(127.0 * 256), torch.tensor(8, dtype=torch.int32)
# Added to a number it rounds it: the last 8 or 16 bits of the sum are its code, with 128 added to each byte.
_ROUND_ONE, _ROUND = torch.tensor(1.5 * 2**23 + 128), torch.tensor(1.5 * 2**23 + 128 * 256 + 128)
_TRIED, _ROWS = 64, 1024  # rows by which a grid is looked for, and rows of a step afterwards
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")


def turn_rows(rows: Tensor, width: int | None = None) -> Tensor:
    """Multiply rows [..., K] by Hadamard's matrix over its root, in blocks of the largest power of two that divides `width` (K):
    an outlier spreads over its block. It is its own inverse. Sums and differences of pairs have the same bits everywhere.

    Source: Ashkboos et al., "QuaRot" (2024), section 3.
    """
    width = width or rows.shape[-1]
    size = width & -width
    out = rows.float().unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        one, two = out.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.cat([one + two, one - two], -1)
    return (out * size**-0.5).flatten(-2).to(rows.dtype)


class SmallLinear(nn.Module):
    """A linear layer [R, K] -> [R, M] with weights of a kind; `shrink_products` sets `buffer`. ValueError if K has no groups.

    With int8 a number of a row gets two codes, or `one_code` if its rows come turned; with `turns` they are turned here. `dtype`
    is the model's, if not the weight's.
    """

    code_MK: Tensor
    scale_MG1: Tensor
    low_MG1: Tensor | None
    packed_KM: Tensor | None

    def __init__(
        self,
        weight_MK: Tensor,
        bias_M: Tensor | None,
        kind: str,
        *,
        dtype: torch.dtype | None = None,
        one_code: bool = False,
        turns: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("packed_KM", None)
        self.out_features, self.in_features = weight_MK.shape
        self.kind, self.bias, self.dtype, self.buffer = kind, bias_M, dtype or weight_MK.dtype, weight_MK.new_empty(0)
        self.turns, self.one_code = turns, one_code or turns
        if turns:
            weight_MK = turn_rows(weight_MK.detach().float())
        exact_MGg, low_MG1, most = weight_MK.detach().float().unsqueeze(1), None, _LARGEST[kind]
        steps: Any = most
        if kind == "int4":
            exact_MGg, steps = _grouped(exact_MGg.squeeze(1))
            low_MG1 = exact_MGg.amin(2, keepdim=True).to(self.dtype)
            exact_MGg = exact_MGg - low_MG1
        largest_MG1, least = exact_MGg.abs().amax(2, keepdim=True), torch.finfo(self.dtype).tiny
        scale_MG1 = (largest_MG1 / steps).clamp(min=least).to(self.dtype)
        code_MK = (exact_MGg / scale_MG1.float()).clamp(-most if low_MG1 is None else 0, most).flatten(1)
        code_MK = code_MK.to(torch.float8_e4m3fn) if kind == "fp8" else code_MK.round().to(torch.int8)
        if kind == "int4":
            code_MK = code_MK[:, ::2] | code_MK[:, 1::2] << 4
        for name, tensor in (("code_MK", code_MK), ("scale_MG1", scale_MG1), ("low_MG1", low_MG1)):
            self.register_buffer(name, None if tensor is None else tensor.contiguous())

    def pack(self) -> None:
        """Keep codes of int8 in oneDNN's layout only, unless they are also used elsewhere: products take 15 to 35 % less."""
        if self.kind == "int8":
            self.packed_KM = torch.ops.onednn.qlinear_prepack(self.code_MK, [1, self.in_features])
            self.code_MK, zero_M = self.code_MK.new_empty(0), torch.zeros(self.out_features, dtype=torch.int32)
            self._scaling = self.scale_MG1.flatten().float(), zero_M

    def _codes(self) -> Tensor:
        """The codes in the buffer, [M, K] in the layer's dtype."""
        code = self.code_MK
        code_MK = self.buffer[: self.out_features * self.in_features].view(self.out_features, -1)
        if self.kind == "int4":  # one byte of two codes becomes two bytes
            wide = code.view(torch.uint8).to(torch.int16)
            code = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.int8)
        elif self.kind == "fp8" and code.device.type == "cpu" and self.dtype != torch.float16:
            # torch converts one code after the other. Moved by 4 bits, codes are bfloat16 of 2^-120 times the numbers.
            wide = code.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(~0x7800)
            return code_MK.copy_(wide.view(torch.bfloat16)).mul_(2.0**120)
        return code_MK.copy_(code)

    def weight_MK(self) -> Tensor:  # noqa: N802
        """The dequantized weight, [M, K]: of int8 a new tensor, of other kinds the buffer."""
        if self.kind == "int8":
            code_MK = self.code_MK if self.packed_KM is None else self.packed_KM.to_dense().T
            weight_MK = code_MK.to(self.dtype) * self.scale_MG1[:, 0]
            return turn_rows(weight_MK) if self.turns else weight_MK
        weight_MK = self._codes()
        parts_MGg = weight_MK.unflatten(1, (self.scale_MG1.shape[1], -1)).mul_(self.scale_MG1)
        if self.low_MG1 is not None:
            parts_MGg.add_(self.low_MG1)
        return weight_MK

    def _of_integers(self, rows_RK: Tensor, out_RM: Tensor | None = None) -> Tensor:
        """The products of float32 rows whose numbers are rounded to 16 bits of the row's largest one: two codes each, 256 high +
        low; or one code of 8 bits. For one row each call of torch counts: they take as long as the product."""
        if len(rows_RK) > _AT_ONCE:
            out_RM = rows_RK.new_empty(len(rows_RK), self.out_features)
            for part_RK, part_RM in zip(rows_RK.split(_AT_ONCE), out_RM.split(_AT_ONCE), strict=True):
                self._of_integers(part_RK, part_RM)
            return out_RM
        scale_R1 = rows_RK.abs().amax(1, keepdim=True).div_(_STEPS_OF_ONE if self.one_code else _STEPS)
        if self.one_code:
            codes_PK = (rows_RK / scale_R1).add_(_ROUND_ONE).view(torch.int32).to(torch.uint8)
        else:
            code_RK = (rows_RK / scale_R1).add_(_ROUND).view(torch.int32)
            codes_PK = torch.cat([code_RK, code_RK >> _BYTE]).to(torch.uint8)
        if self.packed_KM is None:
            codes_PK = (codes_PK ^ 128).view(torch.int8)
            sums_PM = integer_sums(codes_PK, self.code_MK).float().mul_(self.scale_MG1.flatten())
        else:
            sums_PM = packed_sums(codes_PK, self.packed_KM, *self._scaling)
        if not self.one_code:
            low_RM, high_RM = sums_PM.chunk(2)
            sums_PM = low_RM.add_(high_RM, alpha=256.0)
        out_RM = torch.mul(sums_PM, scale_R1, out=out_RM)
        return out_RM if self.bias is None else out_RM.add_(self.bias)

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "int8":
            if rows.ndim == 2 and rows.dtype == torch.float32:  # calls that do nothing take their time, too
                return self._of_integers(turn_rows(rows) if self.turns else rows)
            out_RM = self.forward(rows.reshape(-1, self.in_features).float())
            return out_RM.to(self.dtype).view(*rows.shape[:-1], self.out_features)
        if self.low_MG1 is None and self.dtype != torch.float16:  # products of codes would exceed float16's numbers
            out = functional.linear(rows, self._codes()).mul_(self.scale_MG1.flatten())
            return out if self.bias is None else out.add_(self.bias)
        return functional.linear(rows, self.weight_MK(), self.bias)


class SmallEmbedding(nn.Module):
    """Token embeddings [V, D] by the codes of the output layer that they are tied to; they share its memory."""

    code_VD: Tensor
    scale_V1: Tensor

    def __init__(self, output: SmallLinear) -> None:
        super().__init__()
        self.turns = output.turns
        self.register_buffer("code_VD", output.code_MK)
        self.register_buffer("scale_V1", output.scale_MG1[:, :, 0])

    def forward(self, tokens_R: Tensor) -> Tensor:
        """The embeddings of tokens, [R, D] in the model's dtype."""
        rows_RD = self.turned(tokens_R)
        return turn_rows(rows_RD) if self.turns else rows_RD

    def turned(self, tokens_R: Tensor) -> Tensor:
        """The same as the codes have them: turned, if the output layer `turns` its rows."""
        scale_R1 = self.scale_V1[tokens_R]
        return self.code_VD[tokens_R].to(scale_R1.dtype).mul_(scale_R1)

    __getitem__ = forward


def integer_sums(code_RK: Tensor, code_MK: Tensor) -> Tensor:
    """The products of rows and a matrix of codes, int8 [R, K] and [M, K]: exact sums [R, M], int32 or rounded once to float32,
    on any device."""
    device, num_rows = code_RK.device, len(code_RK)
    if device.type == "cuda" and code_RK.shape[1] % 8 == 0 == len(code_MK) % 8:
        # It wants more than 16 rows.
        padded_PK = functional.pad(code_RK, (0, 0, 0, max(0, 32 - num_rows)))
        return torch._int_mm(padded_PK, code_MK.T)[:num_rows]
    # Sums of these products are integers up to 2^24, which float32 has.
    parts = zip(code_RK.split(_EXACT, 1), code_MK.split(_EXACT, 1), strict=True)
    return sum(((rows.float() @ matrix.float().T).double() for rows, matrix in parts), torch.zeros(())).float()


def packed_sums(code_RK: Tensor, packed_KM: Tensor, scale_M: Tensor, zero_M: Tensor) -> Tensor:
    """The same, float32 and times `scale_M`, by codes that `pack` packed; `zero_M` is int32 0. To those of rows 128 is added,
    uint8: oneDNN is fast where they have no sign, and subtracts it again."""
    weight = packed_KM, scale_M, zero_M, None
    return torch.ops.onednn.qlinear_pointwise.default(code_RK, 1.0, 128, *weight, 1.0, 0, torch.float32, "none", [], "")


@cache
def adds_exactly() -> bool:
    """Whether the CPU's products of packed codes are there and right: without VNNI they add two products in 16 bits, which is too
    narrow."""
    if not torch.backends.mkldnn.is_available():
        return False
    extreme = torch.tensor([[127], [-128]]).expand(2, 64)
    codes = extreme.clamp(min=-127).to(torch.int8).contiguous()
    packed = torch.ops.onednn.qlinear_prepack(codes, [1, 64])
    found = packed_sums((extreme + 128).to(torch.uint8), packed, torch.ones(2), torch.zeros(2, dtype=torch.int32))
    return torch.equal(found, integer_sums(extreme.to(torch.int8), codes))


def _grouped(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in groups of columns, [M, G, g], and the number of steps of each group's grid, [M, G, 1]. If all groups of the
    first rows lie on grids of at most 15 steps, the others' grids are found, too; else all have 15. Groups have 64 columns, or 32
    where only those lie on grids."""
    sizes, most = [size for size in (64, 32) if weight_MK.shape[1] % size == 0], _LARGEST["int4"]
    if not sizes:
        raise ValueError(f"model.weights: int4, but a layer has {weight_MK.shape[1]} inputs; allowed: auto, int8, fp8")
    on_grid = (size for size in sizes if bool((_steps(weight_MK[:_TRIED].unflatten(1, (-1, size))) <= most).all()))
    size = next(on_grid, 0)
    part_MGg = weight_MK.unflatten(1, (-1, size or sizes[0]))
    if not size:
        return part_MGg, torch.full((*part_MGg.shape[:2], 1), float(most))
    return part_MGg, torch.cat([_steps(block) for block in part_MGg.split(_ROWS)]).clamp(max=most)


def _steps(part_MGg: Tensor) -> Tensor:
    """The range of each group over its smallest gap, [M, G, 1]: the steps of the coarsest grid that holds its numbers."""
    gap_MGg = part_MGg.sort(2).values.diff(dim=2)
    least_MG1 = gap_MGg.masked_fill(gap_MGg == 0, torch.inf).amin(2, keepdim=True)
    # The mean over several gaps of one step: in half precision they differ by rounding.
    near_MGg = (gap_MGg > 0) & (gap_MGg < 1.5 * least_MG1)
    step_MG1 = (gap_MGg * near_MGg).sum(2, keepdim=True) / near_MGg.sum(2, keepdim=True)
    return (gap_MGg.sum(2, keepdim=True) / step_MG1).nan_to_num(1.0).round().clamp(min=1)


def _small(weight_MK: Tensor, bias_M: Tensor | None, *, device: torch.device, **how: Any) -> SmallLinear:
    return SmallLinear(weight_MK, bias_M, **how).to(device)


def shrink_products(base: Any, kind: str, device: torch.device) -> None:
    """Make the linear layers of a model small and move them to a device, in place; routers stay.
    Experts that transformers has in one tensor get the numbers of small ones, and become small in a second call, once they are
    layers. ValueError where weights can't be made small."""
    for part in base.modules():
        for weight in (weight for weight in part.parameters(recurse=False) if weight.ndim > 2):
            if not hasattr(part, "is_transposed"):
                raise ValueError(f"model.weights: {kind}, but {type(part).__name__} has no small form; allowed: auto")
            for weight_MK in weight.data.mT if part.is_transposed else weight.data:
                rounded = SmallLinear(weight_MK, None, kind)
                rounded.buffer = torch.empty(weight_MK.numel(), dtype=weight.dtype)
                weight_MK.copy_(rounded.weight_MK())
    small = partial(_small, kind="int8" if kind == "w8a8" else kind, dtype=next(base.parameters()).dtype, device=device)
    if kind == "w8a8":
        base.turn(small)
    replace_products(base, small, but=_ROUTERS)
    layers = [part for part in base.modules() if isinstance(part, SmallLinear)]
    size = 0 if kind in {"int8", "w8a8"} else max(part.out_features * part.in_features for part in layers)
    buffer = torch.empty(size, dtype=layers[0].dtype, device=device)
    for part in layers:
        part.buffer = buffer
