"""Linear layers that keep their weights in 8 or 4 bits a number and compute in the model's dtype (`model.weights`).

A forward writes a layer's codes into a buffer that all layers share, and multiplies by it as any layer does. Memory holds the
codes and one matrix, and rows agree by the shape rules of other products. Codes are computed on the CPU: they are the same on
every device.

    int8    code * scale, one scale a row of the matrix
    fp8     the same with codes of e4m3
    int4    code * scale + low, for each 64 (or 32) columns of a row. Numbers that are on such a grid, as those of checkpoints of
            4 bits, stay what they are

Legend: K in, M out, G groups of g columns.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.packed import replace_products

_LARGEST: Final = {"int8": 127, "int4": 15, "fp8": 448}
_TRIED, _ROWS = 64, 1024  # rows by which a grid is looked for, and rows of a step afterwards
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")


class SmallLinear(nn.Module):
    """A linear layer [R, K] -> [R, M] with weights of a kind; `shrink_products` sets `buffer`. ValueError if K has no groups."""

    code_MK: Tensor
    scale_MG1: Tensor
    low_MG1: Tensor | None

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None, kind: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_MK.shape
        self.kind, self.bias, self.dtype, self.buffer = kind, bias_M, weight_MK.dtype, weight_MK.new_empty(0)
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
        """The dequantized weight, [M, K], in the buffer."""
        weight_MK = self._codes()
        parts_MGg = weight_MK.unflatten(1, (self.scale_MG1.shape[1], -1)).mul_(self.scale_MG1)
        if self.low_MG1 is not None:
            parts_MGg.add_(self.low_MG1)
        return weight_MK

    def forward(self, rows: Tensor) -> Tensor:
        """Return the products, any number of leading dimensions."""
        if self.low_MG1 is None and self.dtype != torch.float16:  # products of codes would exceed float16's numbers
            out = functional.linear(rows, self._codes()).mul_(self.scale_MG1.flatten())
            return out if self.bias is None else out.add_(self.bias)
        return functional.linear(rows, self.weight_MK(), self.bias)


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


def shrink_products(base: nn.Module, kind: str, device: torch.device) -> None:
    """Make the linear layers of a model small and move them to a device, in place; routers and the output layer stay.
    Experts that transformers has in one tensor get the numbers of small ones, and become small in a second call, once they are
    layers. ValueError where weights can't be made small."""
    if kind not in _LARGEST:
        raise ValueError(f"model.weights: {kind!r}; allowed: auto, {', '.join(_LARGEST)}")
    for part in base.modules():
        for weight in (weight for weight in part.parameters(recurse=False) if weight.ndim > 2):
            if not hasattr(part, "is_transposed"):
                raise ValueError(f"model.weights: {kind}, but {type(part).__name__} has no small form; allowed: auto")
            for weight_MK in weight.data.mT if part.is_transposed else weight.data:
                rounded = SmallLinear(weight_MK, None, kind)
                rounded.buffer = torch.empty(weight_MK.numel(), dtype=weight.dtype)
                weight_MK.copy_(rounded.weight_MK())
    replace_products(base, lambda weight, bias: SmallLinear(weight, bias, kind).to(device), but=_ROUTERS)
    layers = [part for part in base.modules() if isinstance(part, SmallLinear)]
    size = max(part.out_features * part.in_features for part in layers)
    buffer = torch.empty(size, dtype=layers[0].dtype, device=device)
    for part in layers:
        part.buffer = buffer
