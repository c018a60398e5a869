"""Mixtures of experts in plain torch; a row's result has the same bits in any batch.

Every row chooses its own experts, and no expert has a capacity: what a row gets depends on no other row. An expert multiplies
just the rows that chose it, and how many these are changes from forward to forward; so each expert's rows are padded by the
same rule as the rows of the whole forward (`padded`), and a row's contributions are added in the order of its own choice.

How many rows an expert has is known on the device alone. The loop over experts reads it back, which a GPU would wait for: there
the experts' weights are gathered, and one grouped product multiplies all pairs of rows and experts, sorted by expert (`gather`).

Knows nothing of caches and masks. Legend: E experts, K experts of a row, G groups, P = N K pairs, I inner numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.backbones.packed import UnsetLinear
from draftmill.decoders.kernels.find import Product


def _exact(rows: Tensor) -> Tensor:
    """In float32 or better."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [N, D] -> [N, D]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (UnsetLinear(width, inner, bias=False) for _ in range(2))
        self.down_proj = UnsetLinear(inner, width, bias=False)

    def forward(self, rows_ND: Tensor) -> Tensor:
        """Return the network's output, any number of leading dimensions."""
        inner = functional.silu(self.gate_proj(rows_ND)) * self.up_proj(rows_ND)
        mixed: Tensor = self.down_proj(inner)
        return mixed


@dataclass(frozen=True, slots=True)
class Gathered:
    """The weights of all experts, and the product that takes them. Nothing is read back from the device."""

    product: Product
    gate_EID: Tensor
    up_EID: Tensor
    down_EDI: Tensor

    def answers(self, rows_ND: Tensor, expert_P: Tensor, num_chosen: int) -> Tensor:
        """The outputs of the experts of all pairs, [P, D]; pair p is of row p // `num_chosen`."""
        sorted_P, order_P = expert_P.sort(stable=True)
        expert_E = torch.arange(len(self.gate_EID), device=expert_P.device)
        end_E = torch.searchsorted(sorted_P, expert_E, right=True, out_int32=True)
        asked_PD = rows_ND.index_select(0, order_P // num_chosen)
        inner_PI = functional.silu(self.product(asked_PD, self.gate_EID, end_E))
        inner_PI *= self.product(asked_PD, self.up_EID, end_E)
        answer_PD = rows_ND.new_empty(expert_P.shape[0], self.down_EDI.shape[1])
        return answer_PD.index_copy_(0, order_P, self.product(inner_PI, self.down_EDI, end_E))


class Mixture(nn.Module, ABC):
    """A layer of experts; a subclass implements the router. Choices, weights and sums are in float32 or better. `padded` maps a
    number of rows to the number that a product runs over; the backbone sets it for the machine."""

    def __init__(self, width: int, inner: int, *, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.gate = UnsetLinear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, inner) for _ in range(num_experts))
        self.padded: Callable[[int], int] = lambda count: count
        self._gathered: Gathered | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether all experts are multiplied at once."""
        return self._gathered is not None

    def gather(self, product: Product) -> None:
        """From now on multiply by this grouped product. The experts' weights become views of tensors that hold all of them.
        Memory grows by one kind of one layer's weights at most, provided that nothing else holds the weights."""
        self._gathered = Gathered(product, *(self._stack(name) for name in ("gate_proj", "up_proj", "down_proj")))

    def _stack(self, name: str) -> Tensor:
        """One kind of weights of all experts, which share its memory from now on."""
        layers: list[UnsetLinear] = [getattr(expert, name) for expert in self.experts]
        first = layers[0].weight
        stacked = first.new_empty(len(layers), *first.shape)
        del first  # each weight is freed as soon as it is copied
        for layer, weight in zip(layers, stacked, strict=True):
            weight.copy_(layer.weight.detach())
            layer.weight = nn.Parameter(weight, requires_grad=False)
        return stacked

    @abstractmethod
    def choose(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's experts, best first (int64 [N, K]), and their weights (float32 or better, [N, K])."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix every row's experts; shape and dtype stay."""
        rows_ND = hidden.reshape(-1, hidden.shape[-1])
        expert_NK, weight_NK = self.choose(rows_ND)
        each_NKD = self._ask(rows_ND, expert_NK).to(weight_NK.dtype)
        # One after another: torch may sum over a dimension in another order for another shape.
        mixed_ND = each_NKD[:, 0] * weight_NK[:, :1]
        for rank in range(1, self.num_chosen):
            mixed_ND += each_NKD[:, rank] * weight_NK[:, rank : rank + 1]
        return mixed_ND.to(hidden.dtype).view(hidden.shape)

    def _ask(self, rows_ND: Tensor, expert_NK: Tensor) -> Tensor:
        """The outputs of each row's experts, [N, K, D]."""
        expert_P = expert_NK.flatten()
        if self._gathered is not None:
            return self._gathered.answers(rows_ND, expert_P, self.num_chosen).view(*expert_NK.shape, -1)
        order_P = expert_P.argsort(stable=True)
        answer_PD = rows_ND.new_empty(order_P.shape[0], rows_ND.shape[1])
        counts = torch.bincount(expert_P, minlength=len(self.experts)).tolist()
        for expert, pairs in zip(self.experts, order_P.split(counts), strict=True):
            count = pairs.shape[0]
            if count:
                asked = rows_ND[pairs // self.num_chosen]
                answer_PD[pairs] = at_least_rows(self.padded(count), expert, asked)
        return answer_PD.view(*expert_NK.shape, -1)


class SoftmaxMixture(Mixture):
    """The K experts of highest probability; with `normalise` their probabilities are scaled to a sum of one (Qwen3-MoE)."""

    def __init__(self, width: int, inner: int, *, num_experts: int, num_chosen: int, normalise: bool) -> None:
        super().__init__(width, inner, num_experts=num_experts, num_chosen=num_chosen)
        self.normalise = normalise

    def choose(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """See Mixture."""
        weight_NK, expert_NK = _exact(self.gate(rows_ND)).softmax(-1).topk(self.num_chosen, dim=-1)
        return expert_NK, weight_NK / weight_NK.sum(-1, keepdim=True) if self.normalise else weight_NK


class SigmoidMixture(Mixture):
    """Sigmoid scores, chosen in groups with a bias that has no part in the weights (DeepSeek-V3's rule; LLaDA2).

    Of `num_groups` equal groups of experts the `groups_kept` remain whose two best biased scores have the largest sum; of their
    experts the K best by biased score are chosen. Weights are the scores without the bias, scaled to a sum of `scale`. Besides,
    every row gets the answer of a `shared` network of this inner width, unless it is 0. The router's weights are float32 or
    better.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        num_experts: int,
        num_chosen: int,
        groups: tuple[int, int],
        scale: float,
        shared: int,
    ) -> None:
        super().__init__(width, inner, num_experts=num_experts, num_chosen=num_chosen)
        self.num_groups, self.groups_kept = groups
        self.scale = scale
        self.expert_bias = nn.Parameter(torch.zeros(num_experts))
        self.shared_experts = GatedMLP(width, shared) if shared else None

    def choose(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """See Mixture."""
        score_NE = self.gate(_exact(rows_ND)).sigmoid()
        biased_NGe = (score_NE + self.expert_bias).unflatten(1, (self.num_groups, -1))
        best_NG2 = biased_NGe.topk(2, dim=-1).values
        kept_NG = (best_NG2[..., 0] + best_NG2[..., 1]).topk(self.groups_kept, dim=-1).indices
        dropped_NG = torch.ones_like(biased_NGe[..., 0], dtype=torch.bool).scatter_(1, kept_NG, False)
        # Not zero, which would exceed a negative biased score.
        left_NE = biased_NGe.masked_fill(dropped_NG.unsqueeze(-1), -torch.inf).flatten(1)
        expert_NK = left_NE.topk(self.num_chosen, dim=-1).indices
        weight_NK = score_NE.gather(1, expert_NK)
        if self.num_chosen > 1:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        return expert_NK, weight_NK * self.scale

    def forward(self, hidden: Tensor) -> Tensor:
        """See Mixture; the shared experts' answer is added."""
        mixed = super().forward(hidden)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)
