"""Asks a freshly loaded model what must hold before it may decode: once, at start, in tens of milliseconds.

`find_rules` finds the shape rules under which its own products, and attention in its shapes, do not depend on the batch.
`check_masking` decodes short random rows in the company of different junk and demands the same bits: a version of
transformers that drops or replaces the mask is found here and not in the results.

Legend: B slots, T rows of a slot, W columns, K key heads, G queries of a key head, d head width, N rows, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decoders.backbones.attention import attend_grouped
from decoders.backbones.base import TokenRows
from decoders.backbones.invariance import NO_RULES, ShapeRules, first_exact, rows_exact, shapes_to_compare
from decoders.backbones.packed import PackedLinear
from decoders.masks import visible

if TYPE_CHECKING:
    from decoders.backbones.transformer import ModuleBackbone

_NUM_ROWS: Final = 300
Product = tuple[nn.Module, int, int, torch.dtype]


def find_rules(
    found: Sequence[Product], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> ShapeRules:
    """Return the cheapest shape rules under which a model's rows agree bit by bit; `heads` is (K, G, d)."""
    if device.type != "cpu":
        return NO_RULES
    each = {(type(one[0]), *one[1:]): one for one in found}

    @torch.no_grad()
    def is_exact(rules: ShapeRules) -> bool:
        return _attention_exact(heads, dtype, rules) and all(
            rows_exact(module, _random(0, _NUM_ROWS, width).to(number), rules.min_rows)
            for module, width, _, number in each.values()
        )

    return first_exact(is_exact)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products(module: nn.Module) -> Iterator[Product]:
    """Yield the modules at or below `module` that multiply rows by a matrix: the widths of input and output, the dtype."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            yield part, part.in_features, part.out_features, torch.float32
        elif isinstance(part, nn.Linear):
            yield part, part.in_features, part.out_features, part.weight.dtype
        elif isinstance(part, Conv1D):
            yield part, part.nx, part.nf, part.weight.dtype


def _attention_exact(heads: tuple[int, int, int], dtype: torch.dtype, rules: ShapeRules) -> bool:
    key_heads, group, width = heads
    least = dataclasses.replace(rules, min_queries=1)
    num_slots, num_rows, num_visible, longest = 5, rules.min_queries + 9, min(100, 3 * rules.column_multiple), 512
    query = _random(1, num_slots, num_rows, key_heads * group, width).to(dtype)
    key, value = _random(2, 2, num_slots, key_heads, longest, width).to(dtype)
    bias = torch.zeros(num_slots, num_rows, longest, dtype=dtype)
    bias[..., num_visible:] = -torch.inf
    attend = partial(attend_grouped, scaling=width**-0.5, min_queries=rules.min_queries)
    whole = attend(query, key, value, bias)
    for slots, rows, columns in shapes_to_compare(num_slots, num_visible, least):
        near = (slice(0, slots), slice(None), slice(0, columns))
        for some in (slice(0, rows), slice(num_rows - rows, num_rows)):
            part = attend(query[:slots, some], key[near], value[near], bias[:slots, some, :columns])
            if not torch.equal(part, whole[:slots, some]):
                return False
    return True


# ---- masks ---------------------------------------------------------------------------------------------------------


def check_masking(backbone: ModuleBackbone) -> None:
    """Raise ValueError where the model gives no numbers, RuntimeError where a masked column or another slot changes a row.

    A row is decoded in two forwards with rejected columns between them, among junk of two kinds; on a CPU also alone. The
    cache is empty afterwards.
    """
    try:
        outcomes = [_decode_among(backbone, junk) for junk in (0.0, 3.0)]
        alone = _decode_among(backbone, None)
    finally:
        backbone.forget()
    if not torch.isfinite(outcomes[0]).all():
        raise ValueError(f"model.dtype: in {backbone.dtype} this model's hidden states are no finite numbers")
    if not torch.equal(*outcomes):
        raise RuntimeError("self-test of the model: masked columns or other slots change a row's hidden states")
    # The batch's shape alone may move bits; what a wrong mask does is not a matter of bits.
    scale = outcomes[0].abs().max()
    if (outcomes[0] - alone).abs().max() > 0.1 * scale or (
        backbone.rules.exact and not torch.equal(outcomes[0], alone)
    ):
        raise RuntimeError("self-test of the model: a row decoded alone differs from the same row in a batch")


def _decode_among(backbone: ModuleBackbone, junk: float | None) -> Tensor:
    """Hidden states [N, D] of one sample's rows in slot 1, between slots 0 and 2 and dead columns full of junk, or alone."""
    backbone.forget()
    backbone.allocate(3, 16)
    seed = 0 if junk is None else int(junk)
    for layer in backbone.cache.layers_2SKWd:
        layer.copy_((junk or 0.0) * _random(seed, *layer.shape))
    slots = [1] if junk is None else [0, 1, 2]
    others = _random(10 + seed, 2, 8).argsort().tolist()
    own = [5, 1, 4, 2, 3, 6, 0, 7]
    tokens = torch.tensor([own] if junk is None else [others[0], own, others[1]])
    parts = []
    # Columns 3..5 are written, rejected, and written again with what counts; column 6 and what follows is never seen.
    for first, last, shift in ((0, 3, 0), (3, 6, 1), (3, 7, 0)):
        hidden = backbone.forward(_rows(backbone, slots, (tokens + shift)[:, first:last], first))
        parts.append(hidden[slots.index(1)])
    return torch.cat([parts[0], parts[2]])


def _rows(backbone: ModuleBackbone, slots: list[int], tokens_BT: Tensor, first: int) -> TokenRows:
    columns = torch.arange(first, first + tokens_BT.shape[1]).expand(tokens_BT.shape)
    rows = TokenRows(
        slots_B=torch.tensor(slots),
        tokens_BT=tokens_BT % backbone.vocab_size,
        positions_BT=columns,
        columns_BT=columns,
        valid_BT=torch.ones(tokens_BT.shape, dtype=torch.bool),
        visible_BTW=visible(columns + 1, 16),
        sigma_BT=torch.ones(tokens_BT.shape),
    )
    return TokenRows(
        **{field.name: getattr(rows, field.name).to(backbone.device) for field in dataclasses.fields(rows)}
    )
