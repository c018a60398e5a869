"""Mixtures of experts in plain torch; a row's result has the same bits in any batch.

Every row chooses its own experts, and no expert has a capacity: a row's result depends on no other row. An expert multiplies
just the rows that chose it, and their number changes from forward to forward; so each expert's rows are padded by the same rule
as the rows of the whole forward (`padded`), and a row's contributions are added in the order of its own choice.

The number of rows of each expert is known on the device alone. The loop over experts reads it back, which a GPU would wait for:
there one grouped product multiplies all pairs of rows and experts, sorted by expert (`gather`).

Knows nothing of caches and masks. Legend: E experts, K experts of a row, G groups, P = N K pairs, I inner numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.families.rotary import MixtureShape
from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.backbones.packed import UnsetLinear
from draftmill.decoders.kernels.find import Product


def _exact(rows: Tensor) -> Tensor:
    """In float32 or better."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


class Expert(nn.Module):
    """down(activate(up(x), ..)), [N, D] -> [N, D], for any number of leading dimensions."""

    def __init__(self, activate: Callable[..., Tensor], down: nn.Module, **ups: nn.Module) -> None:
        super().__init__()
        self.activate, self.down_proj, self.ups = activate, down, tuple(ups)
        for name, up in ups.items():
            self.add_module(name, up)

    def forward(self, rows_ND: Tensor) -> Tensor:
        return self.down_proj(self.activate(*[getattr(self, name)(rows_ND) for name in self.ups]))


def gated_expert(width: int, inner: int) -> Expert:
    """down(silu(gate(x)) * up(x))."""
    gate, up = (UnsetLinear(width, inner, bias=False) for _ in range(2))
    down = UnsetLinear(inner, width, bias=False)
    return Expert(lambda gate_NI, up_NI: functional.silu(gate_NI) * up_NI, down, gate_proj=gate, up_proj=up)


Stacked = tuple[Tensor, Tensor | None]
"""The weights of one product of all experts, [E, M, D], and their biases, [E, M]."""


class Experts(nn.Module):
    """Networks; the router sends every row to a few of them. `padded` maps a number of rows to the number that a product runs
    over; the backbone sets it for the machine."""

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.padded: Callable[[int], int] = lambda count: count
        self._product: Product | None = None
        self._stacked: list[Stacked] = []

    @property
    def is_gathered(self) -> bool:
        return self._product is not None

    def gather(self, product: Product) -> None:
        """From now on multiply by this grouped product. The experts' weights become views of tensors that hold all of
        them; memory grows by one kind of one layer's weights at most."""
        self._product, first = product, cast("Expert", self.experts[0])
        for name in (*first.ups, "down_proj"):
            layers: list[nn.Linear] = [getattr(expert, name) for expert in self.experts]
            stacked = layers[0].weight.new_empty(len(layers), *layers[0].weight.shape)
            for layer, weight in zip(layers, stacked, strict=True):
                weight.copy_(layer.weight.detach())
                layer.weight = nn.Parameter(weight, requires_grad=False)  # frees the one before
            biases: list[Any] = [layer.bias for layer in layers]
            self._stacked.append((stacked, None if biases[0] is None else torch.stack(biases).detach()))

    def mix(self, rows_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """The sum of each row's experts' answers, weighted, [N, D] in the weights' dtype."""
        each_NKD = self._ask(rows_ND, expert_NK).to(weight_NK.dtype)
        # One after another: torch may sum over a dimension in another order for another shape.
        mixed_ND = each_NKD[:, 0] * weight_NK[:, :1]
        for rank in range(1, expert_NK.shape[1]):
            mixed_ND += each_NKD[:, rank] * weight_NK[:, rank : rank + 1]
        return mixed_ND

    def _ask(self, rows_ND: Tensor, expert_NK: Tensor) -> Tensor:
        """The outputs of each row's experts, [N, K, D]."""
        expert_P, num_chosen = expert_NK.flatten(), expert_NK.shape[1]
        sorted_P, order_P = expert_P.sort(stable=True)
        answer_PD = rows_ND.new_empty(order_P.shape[0], rows_ND.shape[1])
        if self._product is not None:
            asked_PD = rows_ND.index_select(0, order_P // num_chosen)
            answer_PD.index_copy_(0, order_P, self._ask_at_once(self._product, asked_PD, sorted_P))
        else:
            counts = torch.bincount(expert_P, minlength=len(self.experts)).tolist()
            for expert, pairs in zip(self.experts, order_P.split(counts), strict=True):
                if count := len(pairs):
                    answer_PD[pairs] = at_least_rows(self.padded(count), expert, rows_ND[pairs // num_chosen])
        return answer_PD.view(*expert_NK.shape, -1)

    def _ask_at_once(self, product: Product, rows_PD: Tensor, expert_P: Tensor) -> Tensor:
        """The outputs of the expert of each row, [P, D]; rows are sorted by expert. Nothing is read back from the device."""
        expert_E = torch.arange(len(self.experts), device=expert_P.device)
        end_E = torch.searchsorted(expert_P, expert_E, right=True, out_int32=True)

        def multiplied(rows: Tensor, stacked: Stacked) -> Tensor:
            weight_EMD, bias_EM = stacked
            result = product(rows, weight_EMD, end_E)
            return result if bias_EM is None else result + bias_EM[expert_P]

        first: Any = self.experts[0]
        *ups, down = self._stacked
        return multiplied(first.activate(*[multiplied(rows_PD, up) for up in ups]), down)


class GivenExperts(Experts):
    """The experts of a model of transformers, whose own router calls them; see transformers.integrations.moe."""

    def __init__(self, module: Any) -> None:
        """`module` is transformers' own and loses its weights."""
        name, activate = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)
        ups, downs = _linears(module, name), _linears(module, "down_proj")
        super().__init__(Expert(activate, down, up_proj=up) for up, down in zip(ups, downs, strict=True))
        self.norm = module.post_expert_norm if module.has_post_expert_norm else None
        self.forced: tuple[Tensor, Tensor] | None = None
        """Experts and weights that replace the router's choice."""

    def forward(self, rows_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        if self.forced is not None:
            expert_NK, weight_NK = self.forced
        return self.mix(rows_ND, expert_NK, _exact(weight_NK)).to(rows_ND.dtype)

    def _ask(self, rows_ND: Tensor, expert_NK: Tensor) -> Tensor:
        each_NKD = super()._ask(rows_ND, expert_NK)
        return each_NKD if self.norm is None else self.norm(each_NKD)


def _linears(module: Any, name: str) -> list[nn.Linear]:
    """A product of each expert: views of the module's tensors, which lay weights out as [E, M, D] or [E, D, M]."""
    weight_EMD = getattr(module, name).detach()
    biases: Any = getattr(module, f"{name}_bias").detach() if module.has_bias else itertools.repeat(None)
    if module.is_transposed:
        weight_EMD = weight_EMD.transpose(1, 2).contiguous()
    delattr(module, name)
    made: list[nn.Linear] = []
    for weight_MD, bias_M in zip(weight_EMD, biases, strict=False):
        with torch.device("meta"):
            made.append(UnsetLinear(weight_MD.shape[1], weight_MD.shape[0], bias=bias_M is not None))
        made[-1].weight = nn.Parameter(weight_MD, requires_grad=False)
        if bias_M is not None:
            made[-1].bias = nn.Parameter(bias_M, requires_grad=False)
    return made


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of transformers' experts, called with rows, their experts and weights."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def take_experts(module: nn.Module) -> None:
    """Replace the experts of transformers below `module` by ours, in place: the numbers of theirs depend on the batch."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_experts(child):
                setattr(parent, name, GivenExperts(child))


class Mixture(Experts):
    """A layer of experts and its router, of a kind of MixtureShape. Choices, weights and sums are in float32 or better."""

    def __init__(self, width: int, shape: MixtureShape) -> None:
        super().__init__(gated_expert(width, shape.inner) for _ in range(shape.num_experts))
        self.shape = shape
        self.gate = UnsetLinear(width, shape.num_experts, bias=False)
        self.shared_experts = gated_expert(width, shape.shared) if shape.shared else None
        if shape.groups is not None:
            self.expert_bias = nn.Parameter(torch.zeros(shape.num_experts))

    def choose(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's experts, best first (int64 [N, K]), and their weights (float32 or better, [N, K])."""
        if self.shape.groups is not None:
            return self._choose_in_groups(rows_ND, *self.shape.groups)
        weight_NK, expert_NK = _exact(self.gate(rows_ND)).softmax(-1).topk(self.shape.num_chosen, dim=-1)
        return expert_NK, weight_NK / weight_NK.sum(-1, keepdim=True) if self.shape.normalise else weight_NK

    def _choose_in_groups(self, rows_ND: Tensor, num_groups: int, num_kept: int) -> tuple[Tensor, Tensor]:
        """By sigmoid scores, with a bias that has no part in the weights (DeepSeek-V3's rule; LLaDA2).

        Of equal groups of experts those are kept whose two best biased scores have the largest sum; of their experts the K best
        by biased score are chosen. Weights are the scores without the bias, scaled. The router's weights are float32 or better.
        """
        score_NE = self.gate(_exact(rows_ND)).sigmoid()
        biased_NGe = (score_NE + self.expert_bias).unflatten(1, (num_groups, -1))
        best_NG2 = biased_NGe.topk(2, dim=-1).values
        kept_NG = (best_NG2[..., 0] + best_NG2[..., 1]).topk(num_kept, dim=-1).indices
        dropped_NG = torch.ones_like(biased_NGe[..., 0], dtype=torch.bool).scatter_(1, kept_NG, False)
        # Not zero, which would exceed a negative biased score.
        left_NE = biased_NGe.masked_fill(dropped_NG.unsqueeze(-1), -torch.inf).flatten(1)
        expert_NK = left_NE.topk(self.shape.num_chosen, dim=-1).indices
        weight_NK = score_NE.gather(1, expert_NK)
        if self.shape.num_chosen > 1:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        return expert_NK, weight_NK * self.shape.scale

    def forward(self, hidden: Tensor) -> Tensor:
        """The answers of each row's experts, and of the shared network, if there is one."""
        rows_ND = hidden.reshape(-1, hidden.shape[-1])
        mixed = self.mix(rows_ND, *self.choose(rows_ND)).to(hidden.dtype).view(hidden.shape)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)
