"""Layers whose rows do not depend on the number of rows: on a CPU with packed weights, on a GPU by kernels of fixed tiles.

On a CPU oneDNN sums every output in one order whatever the number of rows, from a single row on and for any number of threads,
where the library behind `functional.linear` has other kernels for few rows: batches need no padding to agree bit by bit, and
large products are somewhat faster as well. self_test.py tests on each machine whether all that holds.

On a GPU the order follows the number of rows in products. A model that must be exact there (`model.exact: true`) has other layers
in their place, which cost speed.

Knows nothing of models. Legend: K in, M out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones.base import Running
from draftmill.decoders.kernels.find import find_fixed_product

_BLOCK: Final = 8


class PackedLinear(nn.Module):
    """A linear layer [R, K] -> [R, M] that keeps its weight in oneDNN's layout only, unless it is also used elsewhere."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_MK.shape
        self.dtype = weight_MK.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_MK.detach().contiguous(), None)
        self.bias_M = bias_M

    def forward(self, rows_RK: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(rows_RK, self._packed, self.bias_M, "none", [], "")

    def weight_MK(self) -> Tensor:  # noqa: N802
        """The weight as it was before it was packed."""
        return self._packed.to_dense()


class FixedLinear(nn.Module):
    """A linear layer on a GPU, by tiles of one size (kernels/products.py); ValueError, with the reason, if it can't be used."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None) -> None:
        super().__init__()
        self._product = find_fixed_product(weight_MK.device, weight_MK.dtype)
        self.out_features, self.in_features = weight_MK.shape
        self.weight, self.bias = weight_MK.contiguous(), bias_M

    def forward(self, rows_RK: Tensor) -> Tensor:
        out_NM = self._product(rows_RK.reshape(-1, self.in_features), self.weight, self.bias)
        return out_NM.view(*rows_RK.shape[:-1], self.out_features)


class UnsetLinear(nn.Linear):
    """A linear layer without random initialisation, since its weight comes from a checkpoint; saves time with many experts."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch packs weights of this kind; bfloat16 needs a CPU with instructions for it."""
    ops: Any = torch.ops.mkldnn
    known = hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
    if not known or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D; checked by name, so that transformers need not be imported."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def product_kind(how: Running) -> type[PackedLinear | FixedLinear] | None:
    """What takes the place of linear layers; None where they stay. ValueError, with the reason, where a model can't be exact."""
    if can_pack(how.dtype, how.device):
        return PackedLinear
    if how.is_fixed and not hasattr(torch.ops.aten, "_fused_rms_norm"):
        # Older versions take the mean of a norm by a general reduction: more threads for a row the fewer rows there are.
        raise ValueError(f"model.exact: true needs torch 2.9 or later on a GPU, and here is {torch.__version__}")
    return FixedLinear if how.is_fixed else None


def replace_products(
    module: nn.Module, kind: Callable[[Tensor, Tensor | None], nn.Module], *, but: Collection[str] = ()
) -> None:
    """Replace every linear layer below `module`, in place, except those of the names in `but`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if name in but:
                continue
            if isinstance(child, nn.Linear) and type(child) in {nn.Linear, UnsetLinear}:
                setattr(parent, name, kind(child.weight, child.bias))
            elif is_conv1d(child):  # GPT-2 keeps [in, out]
                matrix: Any = child
                setattr(parent, name, kind(matrix.weight.t(), matrix.bias))


def block_of_rows(count: int) -> int:
    """Round a number of rows up: each new shape makes oneDNN write a kernel, so there must not be too many of them."""
    return count if count <= _BLOCK else -(-count // _BLOCK) * _BLOCK
