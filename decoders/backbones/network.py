"""The rotary network: Llama, Mistral, Qwen2, Qwen3 and their relatives among masked and block diffusion models, on flat rows.

    states = embeddings of the tokens
    a layer:  queries, keys, values = qkv_proj(norm(states))         queries and keys are normed (Qwen3, LLaDA2), then rotated
              states += o_proj(attention(queries, keys, values))     which first writes keys and values to the cache
              gate, up = gate_up_proj(norm(states))
              states += down_proj(act(gate) * up)                    or a mixture of experts (moe.py)
    the result is norm(states)

Families differ in sizes, biases, norms of heads, the rotated part of a head, windows and experts: RotaryShape says which. The
caller decides what a row sees; attention.py alone knows other rows, and writes the cache.

On a GPU kernels run all between products and attention, that write too (decoders/kernels/layers.py): nine launches a layer.

Sources: Touvron et al., "Llama" (2023); Su et al., "RoFormer" (2021), rotations; Peng et al., "YaRN" (2023). Legend: P rows with
padding, D width, H heads, K key heads, X = 2 K keys and values, d head width, h = d / 2, J = H + X, I inner width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.attention import AnyLayout, FlatLayout, Scores, attend_rows
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.rotary import RotaryShape
from draftmill.decoders.backbones.moe import Mixture
from draftmill.decoders.backbones.packed import UnsetLinear
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.backbones.small_weights import SmallEmbedding, turn_rows
from draftmill.decoders.backbones.transformer import NetworkBackbone
from draftmill.decoders.kernels.find import find_layers

Rowwise = Callable[[Tensor], Tensor]
_AT_ONCE: Final = 512  # rows of a prompt whose inner products stay in a processor's cache
_tanh_gelu: Final = partial(functional.gelu, approximate="tanh")
ACTIVATE: Final[dict[str, Rowwise]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": functional.relu,
}


def frequencies(rope: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    """The angles of one position, float32 [width / 2], and a factor of cosines and sines.

    `rope` are the settings of config.json, of type default, linear, llama3 or yarn. `longest` is the length of the training where
    they do not name it.
    """
    kind, theta = rope.get("rope_type", "default"), rope["rope_theta"]
    angle_h = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if kind == "default":
        return angle_h, 1.0
    factor, trained = rope["factor"], rope.get("original_max_position_embeddings") or longest
    if kind == "linear":
        return angle_h / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        period_h = 2 * math.pi / angle_h
        share_h = ((trained / period_h - low) / (high - low)).clamp(0, 1)  # of the angle that is kept as it is
        blended_h = (1 - share_h) * angle_h / factor + share_h * angle_h
        outside_h = torch.where(period_h > trained / low, angle_h / factor, angle_h)
        return torch.where((share_h > 0) & (share_h < 1), blended_h, outside_h), 1.0
    assert kind == "yarn", "families/causal.py refuses other types"
    return _yarn(rope, angle_h, width, trained)


def _yarn(rope: Mapping[str, Any], angle_h: Tensor, width: int, trained: int) -> tuple[Tensor, float]:
    """Angles that turn more often than `beta_fast` times in the length of the training stay, those that turn less often than
    `beta_slow` times are divided by the factor, and those between are blended (YaRN, section 3.2)."""
    factor, theta = rope["factor"], rope["rope_theta"]

    def dimension(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0
    ramp_h = ((torch.arange(width // 2) - first) / (last - first)).clamp(0, 1)
    blended_h = angle_h / factor * ramp_h + angle_h * (1 - ramp_h)

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    own = grown(scales[0]) / grown(scales[1]) if scales[0] and scales[1] else grown(1.0)
    given = rope.get("attention_factor")
    return blended_h, float(own if given is None else given)


class Rotation:
    """Rotary positions of heads of `width` numbers. The halves of a head are rotated as pairs.

    Where positions rotate only the first `turned` numbers, the checkpoint's pairs are (i, i + turned / 2). `order_d` sorts a head
    so that its pairs are those of a whole head; the pairs of the rest have the angle 0. Angles are float32 in every dtype.
    """

    def __init__(
        self, rope: Mapping[str, Any], width: int, turned: int, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angle_h, self.factor = frequencies(rope, turned, longest)
        self.angle_h = functional.pad(angle_h, (0, (width - turned) // 2)).to(device)
        own, rest = torch.arange(turned).chunk(2), torch.arange(turned, width).chunk(2)
        self.order_d = None if turned == width else torch.cat([own[0], rest[0], own[1], rest[1]])
        self._dtype, self._turns_2Wd = dtype, torch.empty(2, 0, width, dtype=dtype)

    def at(self, positions_P: Tensor) -> Tensor:
        """Cosines and sines of positions, [2, P, d]: a head (a, b) becomes (a, b) * cos + (b, a) * sin, the sign in the sine."""
        angle_Ph = positions_P.float().unsqueeze(1) * self.angle_h
        cos_Ph, sin_Ph = (angle_Ph.cos() * self.factor).to(self._dtype), (angle_Ph.sin() * self.factor).to(self._dtype)
        return torch.stack([torch.cat([cos_Ph, cos_Ph], 1), torch.cat([-sin_Ph, sin_Ph], 1)])

    def of(self, positions_P: Tensor, layout: AnyLayout) -> Tensor:
        """The same, from a table that is computed once, where no graph could keep it."""
        if isinstance(layout, FlatLayout):
            return self.at(positions_P)
        num_positions = layout.cache.num_columns
        if self._turns_2Wd.shape[1] < num_positions:
            self._turns_2Wd = self.at(torch.arange(num_positions, device=self.angle_h.device))
        return self._turns_2Wd.index_select(1, positions_P)


class Norm(nn.RMSNorm):
    """weight * x / rms(x) over the last dimension; in float64 by way of float32, as transformers' modules compute it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return self.weight * functional.rms_norm(x.float(), self.normalized_shape, None, self.eps).double()


class Layer(nn.Module):
    def __init__(self, shape: RotaryShape, index: int) -> None:
        super().__init__()
        width, outer, eps = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.rms_norm_eps
        joined = outer + 2 * shape.num_key_value_heads * shape.head_dim
        self.qkv_proj = UnsetLinear(width, joined, bias=shape.qkv_bias)
        self.o_proj = UnsetLinear(outer, width, bias=shape.output_bias)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        if shape.head_norms:
            self.q_norm, self.k_norm = Norm(shape.head_dim, eps), Norm(shape.head_dim, eps)
        if shape.mixture is not None and index not in shape.dense:
            self.mlp = Mixture(width, shape.mixture)
        else:
            self.gate_up_proj = UnsetLinear(width, 2 * shape.intermediate_size, bias=shape.inner_bias)
            self.down_proj = UnsetLinear(shape.intermediate_size, width, bias=shape.inner_bias)


def _parts(layer: Any) -> Any:
    """What a forward calls of one layer: looking parts up in modules takes as long as small products."""
    is_dense = hasattr(layer, "down_proj")
    return SimpleNamespace(
        qkv=layer.qkv_proj.forward,
        output=layer.o_proj.forward,
        attention_norm=layer.input_layernorm,
        inner_norm=layer.post_attention_layernorm,
        head_norms=(layer.q_norm, layer.k_norm) if hasattr(layer, "q_norm") else None,
        gate_up=layer.gate_up_proj.forward if is_dense else None,
        down=layer.down_proj.forward if is_dense else None,
        mixture=None if is_dense else layer.mlp,
    )


class RotaryNetwork(nn.Module):
    """All but the output layer; see the module's docstring. `bind` comes before the first forward."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        self.shape = shape
        sizes = shape.vocab_size, shape.hidden_size
        # Random numbers would be drawn for a weight that is not given; on the meta device that imports torch's compilers.
        self.word_embeddings = nn.Embedding(*sizes, _weight=torch.empty(sizes))
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.kernels: Any = None
        """Those between the products; None where torch's own operations run."""
        self.taps: frozenset[int] = frozenset()
        self.tapped = dict[int, Tensor]()
        """The states after each of `taps` layers in the last forward, [P, D]."""
        self._taken = list[dict[str, Tensor]]()  # by turned layers, the weights of norms that their products took in

    @property
    def is_turned(self) -> bool:
        return bool(self._taken)

    def turn(self, kind: Callable[..., nn.Module]) -> None:
        """Let states and values of heads run turned (`turn_rows`): then one code of 8 bits is enough for a number of a row. Each
        product becomes `kind` of a weight and a bias that hold the turns, and the weights of the norm before it. Rows of
        `down_proj` are not turned. Only for a shape that `can_turn`."""
        layers: Any = self.layers
        for index, layer in enumerate(layers):
            norms = {"qkv_proj": layer.input_layernorm, "gate_up_proj": layer.post_attention_layernorm}
            self._taken.append({name: norm.weight.float().clone() for name, norm in norms.items()})
            for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
                old = getattr(layer, name)
                bias_M = None if old.bias is None else self.turned_out(name, old.bias.unsqueeze(1)).squeeze(1)
                weight_MK = self.turned_in(index, name, self.turned_out(name, old.weight))
                setattr(layer, name, kind(weight_MK, bias_M, one_code=name != "down_proj"))
            for norm in norms.values():
                nn.init.ones_(norm.weight)

    def turned_in(self, index: int, name: str, weight_MK: Tensor) -> Tensor:
        """A weight for the rows that a layer's product gets: float32 where they are turned."""
        if self.is_turned and name == "o_proj":
            return turn_rows(weight_MK.float(), self.shape.head_dim)
        taken_K = self._taken[index].get(name) if self.is_turned else None
        return weight_MK if taken_K is None else turn_rows(weight_MK * taken_K)

    def turned_out(self, name: str, weight_MK: Tensor) -> Tensor:
        """A weight whose product gives turned values or states: float32 where they are turned."""
        if not self.is_turned or name == "gate_up_proj":
            return weight_MK
        num_values = self.shape.num_key_value_heads * self.shape.head_dim if name == "qkv_proj" else len(weight_MK)
        plain_MK, turned_MK = weight_MK.float().split([len(weight_MK) - num_values, num_values])
        width = self.shape.head_dim if name == "qkv_proj" else None
        return torch.cat([plain_MK, turn_rows(turned_MK.T, width).T])

    def bind(self, rotation: Rotation, kernels: Any) -> None:
        """Note what a forward calls, after products have been replaced. `kernels` as in decoders/kernels/layers.py."""
        shape, self.kernels = self.shape, kernels
        self._parts = [_parts(layer) for layer in self.layers]
        self._rotation, self._scores = rotation, Scores(shape.head_dim**-0.5)
        self._activation = ACTIVATE[shape.hidden_act]
        num_heads, num_keys = shape.num_attention_heads, shape.num_key_value_heads
        self._num_heads, self._all_heads = num_heads, (-1, num_heads + 2 * num_keys, shape.head_dim)

    def forward(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout) -> Tensor:
        """Run flat rows; final normed states [P, D]."""
        states_PD: Tensor = self.word_embeddings(tokens_P) if not self.is_turned else self._turned_states(tokens_P)
        norms = [*(layer.attention_norm for layer in self._parts), self.norm]
        rows_PD = self._add_norm(states_PD, None, norms[0])
        turns_2P1d = None if self.kernels is not None else self._rotation.of(positions_P, layout).unsqueeze(2)
        for index, layer in enumerate(self._parts):
            heads_PJd = layer.qkv(rows_PD).view(self._all_heads)
            query_PHd, held_PXd = heads_PJd[:, : self._num_heads], None
            if turns_2P1d is None:
                self._rotate_and_write(index, layer, heads_PJd, positions_P, layout)
            else:
                held_PXd = self._rotate(layer, heads_PJd, turns_2P1d)
            mixed_PHd = attend_rows(index, query_PHd, held_PXd, scores=self._scores, layout=layout)
            rows_PD = self._add_norm(states_PD, layer.output(mixed_PHd.flatten(1)), layer.inner_norm)
            rows_PD = self._add_norm(states_PD, self._inner(layer, rows_PD), norms[index + 1])
            if index + 1 in self.taps:
                # The next layer adds in place.
                self.tapped[index + 1] = turn_rows(states_PD) if self.is_turned else states_PD.clone()
        return self._add_norm(turn_rows(states_PD), None, self.norm) if self.is_turned else rows_PD

    def _turned_states(self, tokens_P: Tensor) -> Tensor:
        table = self.word_embeddings
        return table.turned(tokens_P) if isinstance(table, SmallEmbedding) else turn_rows(table(tokens_P))

    def _add_norm(self, states_PD: Tensor, added_PD: Tensor | None, norm: Any) -> Any:
        """Add to the states, in place, and return them normed."""
        if self.kernels is not None:
            return self.kernels.add_norm(states_PD, added_PD, norm.weight, norm.eps)
        return norm(states_PD if added_PD is None else states_PD.add_(added_PD))

    def _rotate(self, layer: Any, heads_PJd: Tensor, turns_2P1d: Tensor) -> Tensor:
        """Turn queries and keys, in place, and return keys and values."""
        num_heads, (cos_P1d, sin_P1d) = self._num_heads, turns_2P1d
        turned_PJd = heads_PJd[:, : -self.shape.num_key_value_heads]
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            turned_PJd[:, :num_heads] = query_norm(turned_PJd[:, :num_heads])
            turned_PJd[:, num_heads:] = key_norm(turned_PJd[:, num_heads:])
        swapped_PJd = turned_PJd.roll(self.shape.head_dim // 2, -1).mul_(sin_P1d)
        turned_PJd.mul_(cos_P1d).add_(swapped_PJd)
        return heads_PJd[:, num_heads:]

    def _rotate_and_write(
        self, index: int, layer: Any, heads_PJd: Tensor, positions_P: Tensor, layout: AnyLayout
    ) -> None:
        """The same by a kernel, which also writes keys and values to the cache."""
        count, head_norms = layout.count, None
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            head_norms = query_norm.weight, key_norm.weight, query_norm.eps
        turn, pool_2CKd = (self._rotation.angle_h, self._rotation.factor), layout.cache.pools_2CKd[index]
        self.kernels.rotate(heads_PJd[:count], positions_P[:count], layout.places, pool_2CKd, turn, head_norms)

    def _inner(self, layer: Any, rows_PD: Tensor) -> Any:
        """What the feed-forward network or the mixture of a layer adds to the states."""
        if layer.mixture is not None:
            return layer.mixture(rows_PD)
        if len(rows_PD) >= 2 * _AT_ONCE and rows_PD.device.type == "cpu":
            parts = rows_PD.tensor_split([*range(_AT_ONCE, len(rows_PD) - _AT_ONCE + 1, _AT_ONCE)])
            return torch.cat([self._inner(layer, part_PD) for part_PD in parts])
        both_PI = layer.gate_up(rows_PD)
        if self.kernels is not None and self._activation is functional.silu:
            return layer.down(self.kernels.gated(both_PI))
        gate_PI, up_PI = both_PI.chunk(2, 1)
        return layer.down(self._activation(gate_PI).mul_(up_PI))


_JOINED: Final = {
    "q_proj": ("qkv_proj", "q_proj", "k_proj", "v_proj"),
    "gate_proj": ("gate_up_proj", "gate_proj", "up_proj"),
}
_OF_LAYER: Final = re.compile(r"(model\.layers\.\d+)\.(?:self_attn|mlp)\.(\w+_(?:proj|norm))\.(weight|bias)")


def own_weights(weights: dict[str, Tensor], order_d: Tensor | None, num_turned: int) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, given by the names of transformers' Llama, as those of RotaryNetwork: products of the
    same rows are joined. `order_d` is the Rotation's; `num_turned` heads are rotated. They are removed from the dict."""
    ready: dict[str, Tensor] = {}
    for name in list(weights):
        found = _OF_LAYER.fullmatch(name)
        if found is None:
            own = name.replace("embed_tokens", "word_embeddings").replace(".gate.expert_bias", ".expert_bias")
            ready[own] = weights.pop(name)
            continue
        layer, part, kind = found.groups()
        joined, *parts = _JOINED.get(part, (part, part))
        names = [name.replace(f".{part}.", f".{one}.") for one in parts]
        if part in {"k_proj", "v_proj", "up_proj"}:
            continue  # the first of them joins all
        tensors = [weights.pop(one) for one in names]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if order_d is not None and joined in {"qkv_proj", "q_norm", "k_norm"}:
            heads, turned = tensor.unflatten(0, (-1, len(order_d))), num_turned if joined == "qkv_proj" else 1
            tensor = torch.cat([heads[:turned, order_d.to(tensor.device)], heads[turned:]]).flatten(0, 1)
        ready[f"{layer}.{joined}.{kind}"] = tensor
    return ready


class RotaryBackbone(NetworkBackbone):
    """Runs a RotaryNetwork. `weights` are the checkpoint's tensors by the names of transformers' Llama; they are removed."""

    base: RotaryNetwork

    def __init__(self, shape: RotaryShape, weights: dict[str, Tensor], how: Running) -> None:
        for name in list(weights):
            is_wide = shape.has_groups and ".mlp.gate." in name
            dtype = torch.promote_types(how.dtype, torch.float32) if is_wide else how.dtype
            weights[name] = weights[name].to(device=how.first, dtype=dtype)
        rope = shape.rope, shape.head_dim, shape.rotary_dim, shape.max_position_embeddings
        self._rotation = Rotation(*rope, how.dtype, how.device)
        ready = own_weights(weights, self._rotation.order_d, shape.num_attention_heads + shape.num_key_value_heads)
        embedding_VD, head_VD = ready["model.word_embeddings.weight"], ready.get("lm_head.weight")
        if head_VD is None or (shape.tied and torch.equal(head_VD, embedding_VD)):
            ready["lm_head.weight"] = embedding_VD
        super().__init__(RotaryNetwork, shape, ready, how)
        self.bind()

    def bind(self) -> None:
        """Note the products of the network, once they are in their final form (packed, fixed or quantized)."""
        kernels = None if self._attend is None else find_layers(self.device, self.dtype, **self._heads)
        self.base.bind(self._rotation, kernels)
        if self.device.type != "cpu":
            self.layers_by = f"own network, {'by' if kernels is not None else 'without'} kernels"

    def tap(self, reader: Any) -> None:
        self.reader = reader
        self.base.taps = frozenset(() if reader is None else reader.speculator.layer_ids)
        self._tapped = self.base.tapped

    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        if self.device.type != "cpu" or self.reads_rows or torch.compiler.is_compiling():
            return self.base(tokens_P, positions_P, layout)
        with torch.inference_mode():  # which saves time
            return self.base(tokens_P, positions_P, layout)
