"""Runs the layers of transformers' rotary models (Llama, Mistral, Qwen2, Qwen3) on flat rows, without what surrounds them.

With few rows most of a forward's time goes into what is not arithmetic: wrappers and keyword arguments of every module, masks
that nothing reads, and queries and keys that are rotated one after the other; on a GPU into the start of some forty kernels a
layer. What a model is built of is looked up in its own modules, and has two lean forms:

    on a CPU, float32    the same products, norms and activations in the same order; queries and keys are rotated together
    on a GPU             kernels for all that stands between the products (decoders/kernels/layers.py): nine launches a layer

On a CPU `lean_layers` runs a form beside transformers' code when a model is loaded, and refuses it if a single bit differs; of
plain models there are modules of our own (rotary_modules.py), and transformers is not imported. On a GPU the kernels were tried
beside torch's operations (decoders/kernels/find.py). Products of the same rows (queries, keys and values; gate and up) then
become one product; on a CPU if that gives the same bits too.

Legend: P rows with padding, D width, H heads, K key heads, J = H + K (before the values are cut off: H + 2 K), I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.attention import AnyLayout, FlatLayout, Scores, attend_rows
from draftmill.decoders.backbones.families.causal import head_width, key_value_heads
from draftmill.decoders.backbones.invariance import VECTOR, normal
from draftmill.decoders.backbones.packed import FixedLinear, PackedLinear
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.backbones.small_weights import SmallLinear

if TYPE_CHECKING:
    from draftmill.decoders.backbones.transformer import TransformerBackbone

_BASES: Final = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
# Row counts to try joined products with.
_COUNTS: Final = (1, 2, 3, 4, 7, 8, 16, 47, 129, 300)
# Forwards to try the layers with: the rows of each slot, and the columns that they begin at.
_TRIALS: Final = (((5, 3, 18), (0, 0, 0)), ((1, 1, 1), (5, 3, 18)), ((2, 6, 1), (6, 4, 19)))
_SILU: Final = frozenset({"SiLU", "SiLUActivation"})
Rowwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Norm:
    """weight * x / rms(x), over the last dimension, in float32."""

    weight_D: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.rms_norm(rows, self.weight_D.shape, self.weight_D, self.eps)


class _Together:
    """Several products of the same rows, each with a part of `parent`; one product once they are joined."""

    def __init__(self, parent: Any, *names: str) -> None:
        self.parent, self.names = parent, names
        self.products: list[Any] = [getattr(parent, name) for name in names]
        self.joined: Rowwise | None = None
        self.widths: list[int] = [product.out_features for product in self.products]

    def whole(self, rows_PD: Tensor) -> Tensor:
        """All results side by side."""
        if self.joined is not None:
            return self.joined(rows_PD)
        return torch.cat(self.apart(rows_PD), 1)

    def apart(self, rows_PD: Tensor) -> list[Tensor] | tuple[Tensor, ...]:
        """One result after the other."""
        if self.joined is not None:
            return self.joined(rows_PD).split_with_sizes(self.widths, 1)
        return [product(rows_PD) for product in self.products]

    @property
    def shape(self) -> tuple[int, ...]:
        """The widths of input and outputs; products of one shape run by one kernel."""
        return (self.products[0].in_features, *self.widths)

    def join(self) -> None:
        """Replace the products by one. Their module loses them: memory holds one form of the weights."""
        self.joined = join_products(self.products)
        self.products.clear()
        for name in self.names:
            delattr(self.parent, name)


def can_join(products: Sequence[Any]) -> bool:
    """Whether products of the same rows can be one product, to the bit, at any number of rows."""
    if not all(isinstance(product, PackedLinear) for product in products):
        return False
    biases = [product.bias_M is not None for product in products]
    if any(biases) != all(biases) or any(product.out_features % VECTOR for product in products):
        return False
    joint = join_products(products)
    rows_PD = normal(0, max(_COUNTS), products[0].in_features)
    return all(
        torch.equal(joint(rows_PD[:count]), torch.cat([product(rows_PD[:count]) for product in products], 1))
        for count in _COUNTS
    )


def join_products(products: Sequence[Any]) -> Rowwise:
    """One product in place of several, side by side; all have a bias, or none."""
    is_packed = isinstance(products[0], PackedLinear)
    weight_MK = torch.cat([product.weight_MK() if is_packed else product.weight for product in products])
    biases = [bias for product in products if (bias := _bias(product)) is not None]
    bias_M = torch.cat(biases) if biases else None
    kind = type(products[0])
    if kind in {PackedLinear, FixedLinear}:
        return kind(weight_MK, bias_M).forward
    return partial(functional.linear, weight=weight_MK, bias=bias_M)


def _bias(product: Any) -> Tensor | None:
    bias_M: Tensor | None = product.bias_M if isinstance(product, PackedLinear) else product.bias
    return bias_M


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of one layer. `head_norms` are those of queries and keys, where a model has them."""

    heads: _Together
    output: Rowwise
    inner: _Together
    down: Rowwise
    activation: Rowwise
    attention_norm: _Norm
    inner_norm: _Norm
    head_norms: tuple[_Norm, _Norm] | None
    scores: Scores

    @classmethod
    def of(cls, module: Any) -> _Layer:
        attention, inner = module.self_attn, module.mlp
        has_norms = hasattr(attention, "q_norm")
        return cls(
            heads=_Together(attention, "q_proj", "k_proj", "v_proj"),
            output=attention.o_proj.forward,
            inner=_Together(inner, "gate_proj", "up_proj"),
            down=inner.down_proj.forward,
            activation=inner.act_fn.forward,
            attention_norm=_Norm.of(module.input_layernorm),
            inner_norm=_Norm.of(module.post_attention_layernorm),
            head_norms=(_Norm.of(attention.q_norm), _Norm.of(attention.k_norm)) if has_norms else None,
            scores=Scores(attention.scaling),
        )


class RotaryLayers:
    """The layers of a base model, called with tokens and positions [P] and a layout; see the module's docstring."""

    name = "own layers"

    def __init__(self, base: Any) -> None:
        config = base.config
        self._embed, self._angles, self._norm = base.embed_tokens.forward, base.rotary_emb.forward, _Norm.of(base.norm)
        self.layers = [_Layer.of(layer) for layer in base.layers]
        self._num_heads, self._key_heads = int(config.num_attention_heads), key_value_heads(config)
        self._head_width = head_width(config)
        self._turns_2Wd = torch.empty(2, 0, self._head_width)
        self.taps: frozenset[int] = frozenset()
        self.tapped = dict[int, Tensor]()
        """The states after each of `taps` layers in the last forward, [P, D]."""

    def join(self) -> None:
        """From now on run products of the same rows as one, where that gives the same bits. `base` cannot run any more."""
        tried = dict[tuple[int, ...], bool]()
        for layer in self.layers:
            for together in (layer.heads, layer.inner):
                shape = together.shape
                if shape not in tried:
                    tried[shape] = can_join(together.products)
                if tried[shape]:
                    together.join()

    def _turns(self, num_positions: int) -> Tensor:
        """Cosines and sines of so many positions or more, [2, W, d], computed once. A head (a, b) turns to (a, b) * cos + (-b,
        a) * sin: the sign is put into the sine."""
        if self._turns_2Wd.shape[1] < num_positions:
            cos_1Wd, sin_1Wd = self._angles(self._turns_2Wd, torch.arange(num_positions).unsqueeze(0))
            sin_1Wd[:, :, : self._head_width // 2].neg_()
            self._turns_2Wd = torch.cat([cos_1Wd, sin_1Wd])
        return self._turns_2Wd

    @torch.inference_mode()
    def __call__(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout) -> Tensor:
        """Return the final hidden states (normed), [P, D]."""
        half = self._head_width // 2
        cos_P1d, sin_P1d = self._turns(layout.cache.num_columns).index_select(1, positions_P).unsqueeze(2).unbind(0)
        num_heads, num_turned = self._num_heads, self._num_heads + self._key_heads
        all_heads = (-1, num_turned + self._key_heads, self._head_width)
        states_PD = self._embed(tokens_P)
        for index, layer in enumerate(self.layers):
            heads_PJd = layer.heads.whole(layer.attention_norm(states_PD)).view(all_heads)
            turned_PJd = heads_PJd[:, :num_turned]
            if layer.head_norms is not None:
                query_norm, key_norm = layer.head_norms
                turned_PJd[:, :num_heads] = query_norm(turned_PJd[:, :num_heads])
                turned_PJd[:, num_heads:] = key_norm(turned_PJd[:, num_heads:])
            swapped_PJd = turned_PJd.roll(half, -1).mul_(sin_P1d)
            turned_PJd.mul_(cos_P1d).add_(swapped_PJd)
            mixed_PHd = attend_rows(
                index, heads_PJd[:, :num_heads], heads_PJd[:, num_heads:], scores=layer.scores, layout=layout
            )
            states_PD = states_PD + layer.output(mixed_PHd.flatten(1))
            gate_PI, up_PI = layer.inner.apart(layer.inner_norm(states_PD))
            states_PD = states_PD + layer.down(layer.activation(gate_PI).mul_(up_PI))
            if index + 1 in self.taps:
                self.tapped[index + 1] = states_PD
        return self._norm(states_PD)


class KernelLayers(RotaryLayers):
    """The same on a GPU, with a pooled cache."""

    name = "own layers, with kernels"

    def __init__(self, base: Any, kernels: Any) -> None:
        super().__init__(base)
        self._kernels = kernels
        self._turn = base.rotary_emb.inv_freq.float(), float(base.rotary_emb.attention_scaling)
        activations = {type(layer.mlp.act_fn).__name__ for layer in base.layers}
        if not activations <= _SILU or 2 * len(self._turn[0]) != self._head_width:
            raise AttributeError("no kernels for its activation or its rotation")

    def join(self) -> None:
        """From now on run products of the same rows as one. `base` cannot run any more."""
        for layer in self.layers:
            for together in (layer.heads, layer.inner):
                biases = [_bias(product) is not None for product in together.products]
                if any(biases) == all(biases) and not isinstance(together.products[0], SmallLinear):
                    together.join()

    @torch.no_grad()
    def __call__(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout) -> Tensor:
        """Return the final hidden states (normed), [P, D]."""
        assert isinstance(layout, FlatLayout), "kernels attend"
        kernels, cache, num_heads = self._kernels, layout.cache, self._num_heads
        all_heads = (-1, num_heads + 2 * self._key_heads, self._head_width)
        states_PD = self._embed(tokens_P)
        count, padding = layout.count, len(tokens_P) - layout.count
        norms = [*(layer.attention_norm for layer in self.layers), self._norm]
        rows_PD = kernels.add_norm(states_PD, None, norms[0].weight_D, norms[0].eps)
        for index, layer in enumerate(self.layers):
            heads_PJd = layer.heads.whole(rows_PD).view(all_heads)
            head_norms = None
            if layer.head_norms is not None:
                query_norm, key_norm = layer.head_norms
                head_norms = query_norm.weight_D, key_norm.weight_D, query_norm.eps
            rotated = heads_PJd[:count], positions_P[:count], layout.places
            kernels.rotate(*rotated, cache.pools_2CKd[index], self._turn, head_norms)
            mixed_PHd = layout.attend(
                heads_PJd[:count, :num_heads],
                cache.layers_2SKWd[index],
                layout.seen,
                scaling=layer.scores.scaling,
                window=layout.windows[index],
            )
            if padding:  # only where a CPU stands in for a GPU
                mixed_PHd = functional.pad(mixed_PHd, (0, 0, 0, 0, 0, padding))
            added_PD, norm = layer.output(mixed_PHd.flatten(1)), layer.inner_norm
            rows_PD = kernels.add_norm(states_PD, added_PD, norm.weight_D, norm.eps)
            added_PD, norm = layer.down(kernels.gated(layer.inner.whole(rows_PD))), norms[index + 1]
            rows_PD = kernels.add_norm(states_PD, added_PD, norm.weight_D, norm.eps)
            if index + 1 in self.taps:
                self.tapped[index + 1] = states_PD.clone()  # the next layer adds in place
        return rows_PD


def own_layers(backbone: TransformerBackbone) -> RotaryLayers:
    """The layers of modules of our own (rotary_modules.py)."""
    lean = RotaryLayers(backbone.base)
    lean.join()
    return lean


def lean_layers(backbone: TransformerBackbone) -> RotaryLayers | str:
    """The lean form of a backbone's base model, or why there is none. On a GPU it is used where its kernels are; on a CPU only in
    float32, where few rows are common and bits are promised, and only if it gives the bits of transformers' code. The backbone's
    cache is empty afterwards."""
    name, on_cpu = type(backbone.base).__name__, backbone.device.type == "cpu" and not backbone.reads_rows
    if name not in _BASES:
        return f"there is no other form of {name}"
    if on_cpu and backbone.dtype != torch.float32:
        return "on a CPU the other form is for float32"
    kernels = None if on_cpu else backbone.find_layers()
    if not on_cpu and kernels is None:
        return "the kernels for layers or attention are off"
    try:
        lean = KernelLayers(backbone.base, kernels) if kernels else RotaryLayers(backbone.base)
    except AttributeError as error:  # another version of transformers, or no kernels for it
        return str(error)
    if kernels is None and not _agree(backbone, lean):
        return "the other form gives other bits"
    lean.join()
    return lean


def _agree(backbone: TransformerBackbone, lean: RotaryLayers) -> bool:
    """Whether a few forwards of ragged slots leave the same hidden states, keys and values, to the bit."""
    forms: list[list[Tensor]] = []
    try:
        for layers in (None, lean):
            backbone.forget()
            backbone.allocate(3, VECTOR)
            backbone.lean = layers
            states = []
            for counts, firsts in _TRIALS:
                token_N = torch.arange(sum(counts), device=backbone.device) * 7 % backbone.vocab_size
                states.append(backbone.forward(causal_rows(range(3), counts, firsts, token_N)))
            forms.append([*states, *backbone.cache.layers_2SKWd])
    finally:
        backbone.lean = None
        backbone.forget()
    return all(torch.equal(theirs, ours) for theirs, ours in zip(*forms, strict=True))
