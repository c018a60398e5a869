"""Tests a freshly loaded model, once at start: shape rules for batch-independent results, and correct masking.

`model_rules` finds the shape rules under which its own products, and attention in its shapes, do not depend on the batch.
`check_masking` decodes short random rows beside different junk and demands the same bits: a version of
transformers that drops or replaces the mask is found here and not in the results.

Legend: K key heads, G queries of a key head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones import invariance
from draftmill.decoders.backbones.attention import Scores, attend_grouped
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.invariance import NO_RULES, NUM_PROBE_ROWS, Attention, Product, ShapeRules
from draftmill.decoders.backbones.moe import Experts
from draftmill.decoders.backbones.packed import PackedLinear, is_conv1d
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.backbones.small_weights import SmallLinear

if TYPE_CHECKING:
    from draftmill.decoders.backbones.transformer import ModuleBackbone

# Of each row, beside the row: rounding is far below it, the effect of a wrong mask far above.
_TOLERANCE: Final = 0.1


@torch.no_grad()
def model_rules(
    all_products: Sequence[Product], heads: tuple[int, int, int], how: Running, longest: int | None = None
) -> ShapeRules:
    """The cheapest shape rules under which a model's rows agree bit by bit; `heads` is (K, G, d), `longest` as in find_rules. On
    a GPU a model is exact if it was made so, by kernels that need no rules."""
    if how.device.type != "cpu":
        return dataclasses.replace(NO_RULES, exact=how.exact)
    by_kind = {(type(product[0]), *product[1:]): product for product in all_products}
    attention = _grouped_attention(heads, how.dtype, longest)
    return invariance.find_rules([*by_kind.values()], attention, how.dtype, longest=longest, least_rows=1)


def _grouped_attention(heads: tuple[int, int, int], dtype: torch.dtype, longest: int | None) -> Attention:
    key_heads, group, width = heads
    key, value = (invariance.probe_columns(seed, longest, heads=key_heads, width=width).to(dtype) for seed in (1, 2))
    query = invariance.normal(3, 2, NUM_PROBE_ROWS, key.shape[1] * group, width).to(dtype)
    scores = Scores(width**-0.5)

    def attention(slots: int, rows: slice, visible: int, columns: int, rules: ShapeRules) -> Tensor:
        part = query[:slots, rows]
        bias = torch.zeros(slots, part.shape[1], columns, dtype=dtype)
        bias[..., visible:] = -torch.inf
        near = (slice(0, slots), slice(None), slice(0, columns))
        return attend_grouped(part, key[near], value[near], bias, scores=scores, rules=rules)

    return attention


def products(module: nn.Module) -> Iterator[Product]:
    """Yield what multiplies rows by a matrix at or below `module`: the widths of input and output, the dtype."""
    for part in module.modules():
        if isinstance(part, PackedLinear | SmallLinear):
            yield part, part.in_features, part.out_features, part.dtype
        elif isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            yield part, part.in_features, part.out_features, part.weight.dtype
        elif is_conv1d(part):
            matrix: Any = part
            yield part, matrix.nx, matrix.nf, matrix.weight.dtype
        elif getattr(weight := part._parameters.get("weight"), "ndim", 0) == 2 and not isinstance(part, nn.Embedding):
            assert weight is not None, "a matrix of a module that chooses experts, say"
            yield partial(nn.functional.linear, weight=weight), weight.shape[1], weight.shape[0], weight.dtype


def check_masking(backbone: ModuleBackbone) -> None:
    """Raise ValueError on NaN or infinity, RuntimeError if a masked column or another slot changes a row.

    A row is decoded in two forwards with rejected columns between them: among junk of two kinds and neighbours of two kinds, and
    alone. Equal shapes have to give equal bits on every device. Other neighbours lead to other shapes in a mixture of experts,
    and a row alone does everywhere: there bits count only where the rules make them hold. The cache is empty afterwards.
    """
    try:
        calm, junk = (_decode_among(backbone, among, 0) for among in (0.0, 3.0))
        others, alone = _decode_among(backbone, 3.0, 1), _decode_among(backbone, None, 0)
    finally:
        backbone.forget()
    if not torch.isfinite(calm).all():
        raise ValueError(
            f"model.dtype: in {backbone.dtype} this model's hidden states contain NaN or infinity; allowed: a wider dtype, or "
            "weights and a config.json without wrong numbers"
        )
    if backbone.is_foreign and not (torch.equal(calm, others) and torch.equal(calm, alone)):
        # Code that is not ours may round by the shape of a batch.
        backbone.rules, backbone.exact = dataclasses.replace(backbone.rules, exact=False), False
    exact = backbone.rules.exact
    mixes = any(isinstance(part, Experts) for part in backbone.model.modules())
    if not torch.equal(calm, junk) or not _agree(calm, others, exact=exact or not mixes):
        raise RuntimeError("self-test of the model: masked columns or other slots change a row's hidden states")
    if not _agree(calm, alone, exact=exact):
        raise RuntimeError("self-test of the model: a row decoded alone differs from the same row in a batch")


def _agree(first: Tensor, second: Tensor, *, exact: bool) -> bool:
    """Whether two results are the same: bit by bit, or within a tolerance that a wrong mask would exceed."""
    near = bool(((first - second).norm(dim=1) <= _TOLERANCE * first.norm(dim=1)).all())
    return near and (not exact or torch.equal(first, second))


def _decode_among(backbone: ModuleBackbone, junk: float | None, neighbours: int) -> Tensor:
    """Hidden states [N, D] of one sample's rows in slot 1, between slots 0 and 2 and dead columns full of junk, or alone."""
    backbone.forget()
    backbone.allocate(3, 16)
    for layer in backbone.cache.layers_2SKWd:
        layer.copy_((junk or 0.0) * invariance.normal(int(junk or 0), *layer.shape))
    slots = [1] if junk is None else [0, 1, 2]
    others = invariance.normal(10 + neighbours, 2, 8).argsort().tolist()
    own = [5, 1, 4, 2, 3, 6, 0, 7]
    tokens = torch.tensor([own] if junk is None else [others[0], own, others[1]])
    parts = []
    # Columns 3..5 are written, rejected, and written again with the final tokens; columns from 6 on are never seen.
    for first, last, shift in ((0, 3, 0), (3, 6, 1), (3, 7, 0)):
        token_N = ((tokens + shift)[:, first:last].flatten() % backbone.vocab_size).to(backbone.device)
        rows = causal_rows(slots, [last - first] * len(slots), [first] * len(slots), token_N)
        parts.append(backbone.forward(rows).unflatten(0, (len(slots), -1))[slots.index(1)])
    return torch.cat([parts[0], parts[2]])
