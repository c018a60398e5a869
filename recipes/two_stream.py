"""A two-stream any-subset transformer with XLNet's parameters, written for training.

The parameters are those of transformers' `XLNetLMHeadModel` under the same names, so the state dict is the checkpoint.
The computation differs: query rows exist only where a token is predicted, a row's visibility is one integer (a number of
ranks), and a row that sees nothing has the zero vector as its attention output. XLNet: Yang et al. 2019, section 2.3;
the visibility: Guo and Ermon, "Reviving Any-Subset Autoregressive Models", the density pass.

Legend: B = windows, L = tokens of a window, N = query rows of the batch, E = width of a head.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKED = -1e9  # added to the score of a key that a row does not see; exp() of it is zero in every float type


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `asdict` gives the keys of XLNet's config.json."""

    d_model: int = 256
    n_layer: int = 3
    n_head: int = 8
    d_inner: int = 1024
    vocab_size: int = 2048
    layer_norm_eps: float = 1e-12

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    def config(self) -> dict[str, Any]:
        """The architecture's part of config.json."""
        return {**asdict(self), "d_head": self.d_head}


@dataclass(frozen=True)
class Canvas:
    """A batch of windows: `ids` [B, L], `rank` [B, L] (decoding order), `num_prompt` [B]."""

    ids: Tensor
    rank: Tensor
    num_prompt: Tensor


@dataclass(frozen=True)
class Context:
    """Keys and values of every layer over the canvas [B, H, L, E], what the query rows read from."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class QueryRows:
    """`index` [N] of the query rows in the flattened positions [B * L], ascending; `limit` [B, L]: ranks they see."""

    index: Tensor
    limit: Tensor


class _Spread(torch.autograd.Function):
    """Rows [N, D] to their places in zeros [total, D]; the gradient picks the same rows (no scatter-add needed)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(total, rows.shape[1]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None


class _Pick(torch.autograd.Function):
    """Rows at `index` [N], all different, of [total, D]; the inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.total = table.shape[0]
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.total, grads[0].shape[1]).index_copy_(0, index, grads[0]), None


def spread_rows(rows: Tensor, index: Tensor, total: int) -> Tensor:
    """Rows [N, D] to their places `index` [N], all different, in zeros [total, D]."""
    spread: Tensor = _Spread.apply(rows, index, total)
    return spread


def pick_rows(table: Tensor, index: Tensor) -> Tensor:
    """The rows at `index` [N], all different, of a table [total, D]."""
    picked: Tensor = _Pick.apply(table, index)
    return picked


def relative_sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Position features [2L - 1, D]; row t is for the distance (query - key) = L - 1 - t, so keys run left to right."""
    inverse = 1 / 10000 ** (torch.arange(0, width, 2, device=device).float() / width)
    distance = torch.arange(length - 1, -length, -1, device=device).float()
    angles = distance[:, None] * inverse
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def shift_to_keys(by_distance: Tensor) -> Tensor:
    """Scores by distance [B, H, L, 2L - 1] to scores by key [B, H, L, L].

    Entry (i, j) lies at column L - 1 - i + j, in the flattened rows at L - 1 + i (2L - 2) + j: a view with rows one
    shorter, started at L - 1. Its gradient is two plain copies, where that of a gather is a scatter-add.
    """
    batch, heads, length, _ = by_distance.shape
    flat = by_distance.reshape(batch, heads, -1)
    stride = 2 * length - 2
    if stride == 0:
        return by_distance
    rows = flat[..., length - 1 : length - 1 + length * stride].reshape(batch, heads, length, stride)
    return rows[..., :length]


class RelativeAttention(nn.Module):
    """Attention with relative positions: score = ((q + w) . k + (q + r) . R[distance]) / sqrt(E), then post-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = (shape.d_model, shape.n_head, shape.d_head)
        self.heads = shape.n_head
        for name in ("q", "k", "v", "o", "r"):
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            self.register_parameter(name, nn.Parameter(torch.zeros(size[1:])))
        self.seg_embed = nn.Parameter(torch.zeros(2, *size[1:]), requires_grad=False)
        self.get_parameter("r_s_bias").requires_grad_(False)  # segments are part of the checkpoint and not used
        self.layer_norm = nn.LayerNorm(shape.d_model, eps=shape.layer_norm_eps)

    def project(self, rows: Tensor, name: str) -> Tensor:
        """Rows [..., D] through the matrix `name` to [..., H * E]."""
        return functional.linear(rows, self.get_parameter(name).flatten(1).T)

    def split_heads(self, rows: Tensor, batch: int) -> Tensor:
        """[B * L, H * E] or [B, L, H * E] to [B, H, L, E]."""
        return rows.view(batch, -1, self.heads, rows.shape[-1] // self.heads).transpose(1, 2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, features: Tensor, blocked: Tensor) -> Tensor:
        """Attention outputs [B, L, H * E] of queries [B, H, L, E]; `blocked` [B, 1, L, L] is added to the scores."""
        scale = query.shape[-1] ** -0.5
        by_distance_key = self.project(features, "r").view(-1, self.heads, query.shape[-1]).permute(1, 2, 0)
        content = ((query + self.get_parameter("r_w_bias")[:, None]) * scale) @ keys.transpose(-1, -2)
        position = ((query + self.get_parameter("r_r_bias")[:, None]) * scale) @ by_distance_key
        weights = (content + shift_to_keys(position) + blocked.to(content.dtype)).softmax(-1)
        attended: Tensor = (weights @ values).transpose(1, 2).flatten(2)
        return attended

    def finish(self, attended: Tensor, rows: Tensor) -> Tensor:
        """Output projection, residual and layer norm, all on [..., D]."""
        out = functional.linear(attended, self.get_parameter("o").flatten(1))
        return self.norm(out, rows)

    def norm(self, out: Tensor, rows: Tensor) -> Tensor:
        return self.layer_norm(rows + out)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, residual, post-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer_1 = nn.Linear(shape.d_model, shape.d_inner)
        self.layer_2 = nn.Linear(shape.d_inner, shape.d_model)
        self.layer_norm = nn.LayerNorm(shape.d_model, eps=shape.layer_norm_eps)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer_norm(rows + self.layer_2(functional.gelu(self.layer_1(rows))))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rel_attn = RelativeAttention(shape)
        self.ff = FeedForward(shape)


class Transformer(nn.Module):
    """Holds the parameters under XLNet's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mask_emb = nn.Parameter(torch.empty(1, 1, shape.d_model))
        self.word_embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layer = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))


class OutputBias(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))


class TwoStream(nn.Module):
    """The whole model. `context` runs the content stream, `read` the query rows over it, `logits` the tied output."""

    def __init__(self, shape: Shape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape)
        self.lm_loss = OutputBias(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and not name.endswith(("bias", "seg_embed")):
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("layer_1.bias") or name.endswith("layer_2.bias"):
                nn.init.zeros_(parameter)

    def context(self, canvas: Canvas) -> Context:
        """The content stream: row of rank r sees ranks <= r, prompt rows the whole prompt."""
        batch, length = canvas.ids.shape
        rank = canvas.rank
        sees = torch.maximum(rank + 1, canvas.num_prompt[:, None] * (rank < canvas.num_prompt[:, None]))
        blocked = block(rank, sees)
        features = relative_sinusoids(length, self.shape.d_model, rank.device)
        rows = self.transformer.word_embedding(canvas.ids)
        keys, values = [], []
        for number, layer in enumerate(self.layers()):
            attention = layer.rel_attn
            keys.append(attention.split_heads(attention.project(rows, "k"), batch))
            values.append(attention.split_heads(attention.project(rows, "v"), batch))
            if number + 1 == self.shape.n_layer:
                break  # nothing reads the last content states
            query = attention.split_heads(attention.project(rows, "q"), batch)
            attended = attention.attend(query, keys[-1], values[-1], features, blocked)
            rows = layer.ff(attention.finish(attended, rows))
        return Context(keys, values)

    def read(self, canvas: Canvas, context: Context, query: QueryRows) -> Tensor:
        """Final hidden states [N, D] of the query rows."""
        batch, length = canvas.ids.shape
        blocked = block(canvas.rank, query.limit)
        features = relative_sinusoids(length, self.shape.d_model, query.index.device)
        seeing = (query.limit.flatten().index_select(0, query.index) > 0).unsqueeze(1)
        rows = self.transformer.mask_emb[0].expand(len(query.index), -1)
        for number, layer in enumerate(self.layers()):
            attention = layer.rel_attn
            queries = spread_rows(attention.project(rows, "q"), query.index, batch * length)
            heads = attention.split_heads(queries, batch)
            attended = attention.attend(heads, context.keys[number], context.values[number], features, blocked)
            picked = pick_rows(attended.flatten(0, 1), query.index) * seeing
            rows = layer.ff(attention.finish(picked, rows))
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary [N, V] from final hidden states [N, D]."""
        return functional.linear(hidden, self.transformer.word_embedding.weight, self.lm_loss.bias)

    def layers(self) -> list[Layer]:
        return [layer for layer in self.transformer.layer if isinstance(layer, Layer)]


def block(rank: Tensor, limit: Tensor) -> Tensor:
    """What to add to the scores [B, 1, L, L]: zero where the key's rank is below the row's limit, else BLOCKED."""
    visible = rank[:, None, :] < limit[:, :, None]
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, BLOCKED).unsqueeze(1)
