"""Runs a module over the slot cache under any visibility rule: a network of our own, or a causal model of transformers.

The rows of a forward run through the module as one flat sequence with explicit positions. Its layers call attention.py, which
alone knows slots, columns and masks.

Legend: N rows of all slots, P the same with padding.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.attention import AnyLayout, FlatLayout, Layout, cut_rows, tile_of
from draftmill.decoders.backbones.base import Model, Running
from draftmill.decoders.backbones.invariance import VECTOR, at_least_rows
from draftmill.decoders.backbones.moe import Experts
from draftmill.decoders.backbones.packed import PackedLinear, UnsetLinear, block_of_rows, product_kind, replace_products
from draftmill.decoders.backbones.rows import TokenRows, columns_in_order, seen_columns
from draftmill.decoders.backbones.self_test import model_rules, products
from draftmill.decoders.backbones.small_weights import SmallEmbedding, SmallLinear, adds_exactly, shrink_products
from draftmill.decoders.kernels.find import Attend, find_attention, find_product
from draftmill.decoders.kernels.seen import Seen, Tiling


class ModuleBackbone(Model):
    """Runs a `model` of `parts`: all but its output layer, that layer, and the embeddings. `windows` has an entry a layer."""

    layers_by = "own network"
    """The code that runs the layers, as users are shown it."""
    kernels: Mapping[str, str] = MappingProxyType({})
    """Each kernel that this model asked for, and whether it is used (decoders/kernels/find.py)."""
    is_foreign: ClassVar[bool] = False
    """Whether the layers run the code of others: then only a test tells whether rows are exact."""

    def __init__(
        self, model: Any, parts: tuple[Any, Any, Any], parsed: Any, windows: tuple[int | None, ...], how: Running
    ) -> None:
        self.device, self.dtype, dtype, is_fixed = how.device, how.dtype, how.dtype, how.is_fixed
        on_cpu, kind = self.device.type == "cpu", product_kind(how)
        self._packed = kind is PackedLinear
        self.model, self.windows = model, windows
        self.base, self.head, embeddings = parts
        inner = getattr(parsed, "widths", None) or [num_out for _, _, num_out, _ in products(self.base)]
        self._inner = max(inner)
        mixtures = [part for part in self.base.modules() if isinstance(part, Experts)]
        of_experts = {id(part) for mixture in mixtures for part in mixture.experts.modules()}
        dense = (product for product in products(self.base) if id(product[0]) not in of_experts)
        self.num_weights = sum(num_in * num_out for _, num_in, num_out, _ in dense)
        if kind is not None:
            replace_products(self.base, kind)
            if not isinstance(self.head, SmallLinear):
                self.head = kind(self.head.weight, self.head.bias)
        for part in model.modules():
            if isinstance(part, SmallLinear) and on_cpu and adds_exactly():
                part.pack()
        self.embedding_VD: Any = embeddings if isinstance(embeddings, SmallEmbedding) else embeddings.weight
        self.vocab_size, self.width = int(parsed.vocab_size), int(parsed.hidden_size)
        key_heads, width = parsed.num_key_value_heads, parsed.head_dim
        group = parsed.num_attention_heads // key_heads
        longest = getattr(parsed, "max_position_embeddings", None) or parsed.max_length
        all_products = [*products(self.base), *products(self.head)]
        self.rules = model_rules(all_products, (key_heads, group, width), how, longest)
        self.min_rows, self.exact = self.rules.min_rows, self.rules.exact
        self._row_multiple = VECTOR // math.gcd(VECTOR, width, *inner) if on_cpu else 1
        for part in mixtures:
            part.padded = self._padded
        can_gather = mixtures and not any(isinstance(part, SmallLinear) for part in self.base.modules())
        # All experts are multiplied at once where there is a kernel for their weights.
        if can_gather and (product := find_product(self.device, dtype, fixed=is_fixed)) is not None:
            for part in mixtures:
                part.gather(product)
        self.tiling = Tiling.of(self.device, dtype, group=group, width=width, fixed=is_fixed)
        self._heads = {"num_heads": key_heads * group, "key_heads": key_heads, "width": width}
        is_plain = getattr(parsed, "is_plain", True)
        self._attend = find_attention(self.device, dtype, **self._heads, plain=is_plain, fixed=is_fixed)
        self.num_rows_computed = 0
        self.reader: Any = None
        """The draft head that reads states of the layers, if any (heads/published.py); its cache follows this one's."""
        self._hooks, self._tapped = list[Any](), dict[int, Tensor]()
        # Experts that are multiplied one by one read their row counts back, and a captured forward may not wait.
        self.captures = self._attend is not None and all(part.is_gathered for part in mixtures)
        self.cache_shape = len(windows), key_heads, width
        self.forget()

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        super().copy_prefix(source, target, num_columns)
        if self.reader is not None:
            self.reader.copy_prefix(source, target, num_columns)

    def clear_slot(self, slot: int) -> None:
        super().clear_slot(slot)
        if self.reader is not None:
            self.reader.clear_slot(slot)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's states, heads, and widest product with its gate."""
        return (8 * self.width + 3 * self._inner) * self.dtype.itemsize

    @torch.no_grad()
    def forward(self, rows: TokenRows) -> Tensor:
        """See Model; states are normed. `num_rows_computed` counts the rows of products, not those of attention's rectangles."""
        count = rows.num_rows
        self.num_rows_computed = self._padded(count)
        hidden_ND = self._run(self._pad(rows.token_N), self._pad(rows.position_N), self._layout(rows), rows)[:count]
        if self.reader is not None:
            layers = self.reader.speculator.layer_ids
            states = [self._tapped.pop(number).view(-1, self.width)[:count] for number in layers]
            self.reader.read(torch.cat(states, 1), rows)
        self.sums_N = hidden_ND.sum(1, dtype=torch.float64)
        return hidden_ND

    def tap(self, reader: Any) -> None:
        """See Model. ValueError where the layers can't be found."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.reader = [], reader
        ids = () if reader is None else reader.speculator.layer_ids
        layers: Any = getattr(self.base, "layers", None) or getattr(self.base, "h", None)
        if ids and not layers:
            raise ValueError(f"decoder.drafter.kind: 'head' can't read the layers of {type(self.base).__name__}")
        for number in ids:
            self._hooks.append(layers[number - 1].register_forward_hook(partial(self._note_states, number)))

    def _note_states(self, number: int, layer: Any, arguments: Any, output: Any) -> None:
        self._tapped[number] = output if isinstance(output, Tensor) else output[0]

    @abstractmethod
    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        """The final hidden states of padded rows, [P, D]."""

    def _padded(self, count: int) -> int:
        """The number of rows, with padding, that the products run over for `count` rows."""
        least, multiple = max(count, self.min_rows), self._row_multiple
        return -(-(block_of_rows(least) if self._packed else least) // multiple) * multiple

    def _pad(self, values_N: Tensor) -> Tensor:
        """A value of each row, [P]."""
        missing = self.num_rows_computed - values_N.shape[0]
        return functional.pad(values_N, (0, missing)) if missing else values_N

    def _layout(self, rows: TokenRows) -> AnyLayout:
        shape = rows.shape
        assert shape.num_columns <= self.cache.num_columns, "rows see columns beyond the cache"
        if self._attend is not None:
            return self._flat_layout(rows, self._attend)
        places = self.cache.places(rows.slot_N, rows.column_N, rows.position_N)
        num_columns = self.rules.columns(shape.num_columns, self.cache.num_columns)
        order_BW = None
        if shape.num_positions is not None:
            # Some positions may stand beside their own columns. Sums run in the order of positions, as if none did.
            num_columns = self.rules.columns(shape.num_positions, self.cache.num_columns)
            order_BW, length_B = columns_in_order(rows, self.cache.positions_SW, num_columns)
            end_1N = length_B[rows.owner_N].unsqueeze(0)
            rows = replace(rows, low_IN=torch.zeros_like(end_1N), high_IN=end_1N)
        heads, multiple = self._heads["num_heads"], self.rules.column_multiple
        cuts = cut_rows(rows, num_columns, self.cache, heads, multiple, ordered=order_BW is not None)
        biases = self._biases(rows, num_columns, order_BW)
        tiles = tuple(tile_of(cut, rows, order_BW, biases) for cut in cuts)
        return Layout(self.cache, rows.num_rows, self.rules, places, self.windows, tiles)

    def _flat_layout(self, rows: TokenRows, attend: Attend) -> FlatLayout:
        start_N, places = self.cache.cells(rows.slot_N, rows.column_N, rows.start_N)
        if any(self.windows):
            self.cache.positions_SW[0].index_copy_(0, places, rows.position_N)
        sight = rows.slot_N, rows.low_IN, rows.high_IN, rows.position_N
        tables = rows.tables or self.tiling.tables(rows.line_N)
        seen = Seen(*sight, self.cache.positions_SW, tables, start_N, self.cache.num_columns)
        return FlatLayout(self.cache, rows.num_rows, places, self.windows, seen, attend)

    def _biases(self, rows: TokenRows, num_columns: int, order_BW: Tensor | None) -> dict[int | None, Tensor]:
        """What rows see in each window, as an additive bias (0 or -inf), [N, W]."""
        seen_NW = seen_columns(rows.low_IN, rows.high_IN, num_columns)
        biases: dict[int | None, Tensor] = {}
        for window in dict.fromkeys(self.windows):
            within_NW = seen_NW
            if window is not None:
                near_NW = self.cache.positions_SW[rows.slot_N, :num_columns]
                if order_BW is not None:
                    near_NW = torch.arange(num_columns, device=self.device).expand(rows.num_rows, -1)
                within_NW = seen_NW & (near_NW > rows.position_N.unsqueeze(1) - window)
            biases[window] = torch.where(within_NW, 0.0, -torch.inf).to(self.dtype)
        return biases

    @torch.no_grad()
    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        return at_least_rows(self._padded(len(hidden_RD)), self.head, hidden_RD)

    @torch.no_grad()
    def embed(self, tokens_R: Tensor) -> Tensor:
        embedded_RD: Tensor = self.embedding_VD[tokens_R].to(self.dtype)
        return embedded_RD


class NetworkBackbone(ModuleBackbone):
    """Runs a network of our own: `stack` makes all but the output layer from its sizes, `shape`, is called with tokens and
    positions [P] and a layout, and has its embeddings as `word_embeddings`. `weights` are the tensors of the stack (`model.`) and
    of the output layer (`lm_head.`). They are removed from the dict, so that no reference keeps the experts in memory a second
    time."""

    def __init__(self, stack: Callable[[Any], nn.Module], shape: Any, weights: dict[str, Tensor], how: Running) -> None:
        with torch.device("meta"):
            network: Any = nn.Module()
            network.model, num_last = stack(shape), getattr(shape, "num_last", shape.hidden_size)
            network.lm_head = UnsetLinear(num_last, shape.vocab_size, bias="lm_head.bias" in weights)
        network.load_state_dict(weights, assign=True)
        weights.clear()
        network.eval().requires_grad_(False)
        if how.small != "auto":
            shrink_products(network.model, how.small, how.device)
        if how.small in {"int8", "w8a8"}:
            output, embeddings, turns = network.lm_head, network.model.word_embeddings, how.small == "w8a8"
            network.lm_head = SmallLinear(output.weight, output.bias, "int8", turns=turns).to(how.device)
            if output.weight.data_ptr() == embeddings.weight.data_ptr():  # they are tied
                network.model.word_embeddings = SmallEmbedding(network.lm_head)
        network.to(how.device)
        windows = getattr(shape, "windows", (None,) * shape.num_hidden_layers)
        super().__init__(network, (network.model, network.lm_head, network.model.word_embeddings), shape, windows, how)
        network.lm_head = self.head  # once packed, it is not kept a second time

    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        hidden_PD: Tensor = self.base(tokens_P, positions_P, layout)
        return hidden_PD
