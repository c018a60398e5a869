"""A plain decode loop in torch as a peer: what a minimal engine reaches with the same shapes, one CUDA graph a step.

Greedy, all rows at one place, keys and values of a fixed number of columns; no scheduler, sampling, ends, prompts or text. Knows
nothing of draftmill's code.

Legend: B rows, D width of the model, H heads, K key heads, d width of a head, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from benchmarks.device_models import Bench


@torch.no_grad()
def plain_step(bench: Bench, config: Mapping[str, Any], rows: int, columns: int) -> tuple[Callable[[], None], int]:
    """A step of a Llama-like model with random weights: each row's next token after `columns` - 1 others. Also the bytes of
    weights and cache, all of which it reads."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys, head = config["num_key_value_heads"], width // heads

    def weight(*shape: int) -> Tensor:
        return 0.02 * bench.normal(*shape)

    layers = [
        (weight((heads + 2 * keys) * head, width), weight(width, width), weight(2 * inner, width), weight(width, inner))
        for _ in range(config["num_hidden_layers"])
    ]
    caches_2BKWd = [bench.normal(2, rows, keys, columns, head) for _ in layers]
    embedding_VD, scale_D = weight(config["vocab_size"], width), torch.ones_like(bench.normal(width))
    token_B = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    angle_d = (columns - 1) * 10000.0 ** (-torch.arange(0, head, 2, device=bench.device) / head).repeat(2)
    cosine_d, sine_d = angle_d.cos().to(bench.dtype), angle_d.sin().to(bench.dtype)

    def turned(states: Tensor) -> Tensor:
        low, high = states.chunk(2, -1)
        return states * cosine_d + torch.cat([-high, low], -1) * sine_d

    @torch.no_grad()
    def step() -> None:
        states_BD = embedding_VD[token_B]
        for (joined, out, up, down), cache_2BKWd in zip(layers, caches_2BKWd, strict=True):
            parts = linear(rms_norm(states_BD, (width,), scale_D), joined).view(rows, -1, head)
            query, key, value = parts.split((heads, keys, keys), 1)
            cache_2BKWd[0, :, :, -1], cache_2BKWd[1, :, :, -1] = turned(key), value
            grouped = turned(query).view(rows, keys, heads // keys, head)
            states_BD = states_BD + linear(scaled_dot_product_attention(grouped, *cache_2BKWd).flatten(1), out)
            gate, more = linear(rms_norm(states_BD, (width,), scale_D), up).chunk(2, -1)
            states_BD = states_BD + linear(silu(gate) * more, down)
        token_B.copy_(linear(rms_norm(states_BD, (width,), scale_D), embedding_VD).argmax(-1))

    read = [embedding_VD, *caches_2BKWd, *(one for layer in layers for one in layer)]
    return step, sum(one.nbytes for one in read)
