"""What a decoder's engine asks of a model.

A backbone turns rows into hidden states against a cache of slots. It knows nothing of drafts, acceptance or samples. There are
two kinds: two-stream models (any-subset) have content rows and query rows; in all other models every row is a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftmill.decoders.backbones.cache import SlotCache, rounded
from draftmill.decoders.backbones.invariance import ShapeRules
from draftmill.decoders.kernels.find import Attend
from draftmill.decoders.kernels.seen import Tiling


class Running(NamedTuple):
    """How a model runs: dtype and device of its tensors; with `exact` a row has the same bits in any batch on a GPU, too, or the
    model is refused; `small` is a kind of small_weights.py."""

    dtype: torch.dtype
    device: torch.device
    exact: bool = False
    small: str = "auto"

    @property
    def is_fixed(self) -> bool:
        """Whether all products run by kernels of fixed tiles."""
        return self.exact and self.device.type != "cpu"

    @property
    def first(self) -> torch.device:
        """Where weights are read to: full ones never reach a device that gets small ones."""
        return self.device if self.small == "auto" else torch.device("cpu")


class Model(ABC):
    """All tensors live on `device`; hidden states have `dtype`, logits float32 or better. Keys and values are in a slot `cache`,
    whose columns are a multiple of what the `rules` say; tests have tables in its place."""

    vocab_size: int
    width: int
    device: torch.device
    dtype: torch.dtype
    cache: SlotCache
    cache_shape: tuple[int, int, int]
    """The cache's layers, heads, and width of a head."""
    rules: ShapeRules
    min_rows: int
    """Products over fewer rows than this are padded, so that results do not depend on the batch (invariance.py)."""
    exact: bool
    """Whether a row has the same bits in any batch, according to the self-test at start."""
    num_rows_computed: int
    """Token rows that the last forward computed, padding included."""
    captures: bool = False
    """Whether its forwards can be captured as CUDA graphs."""
    tiling: Tiling
    """The tiles of that kernel, where `reads_rows`."""
    num_weights: int = 0
    """Weights that each row is multiplied by, without experts: 2 FLOPs each."""
    has_sums: ClassVar[bool] = True
    sums_N: Tensor | None = None
    """With `has_sums`: a float64 sum over each row's state in the last forward, not finite if any number of it is not."""
    _attend: Attend | None = None

    @property
    def reads_rows(self) -> bool:
        """Whether a kernel reads flat rows: then a slot with many rows costs the others nothing."""
        return self._attend is not None

    @property
    def cell_bytes(self) -> int:
        """Bytes of one column of one slot in the cache."""
        return self.cache.cell_bytes

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a token row's activations in a forward."""
        return 0

    @property
    def column_multiple(self) -> int:
        """The multiple to which it rounds columns up."""
        return self.rules.column_multiple

    def forget(self) -> None:
        """Drop the whole cache."""
        self.cache = SlotCache(*self.cache_shape, dtype=self.dtype, device=self.device, pooled=self.reads_rows)
        self.sums_N = None

    def allocate(self, num_slots: int, num_columns: int) -> None:
        """Make room for at least this many slots and columns; see `resize`."""
        self.resize(max(num_slots, self.cache.num_slots), max(num_columns, self.cache.num_columns))

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Resize to this many slots and columns; content within them stays. If memory runs out, the cache becomes empty."""
        self.cache.resize(num_slots, rounded(num_columns, self.column_multiple))

    def reserve(self, num_cells: int) -> None:
        """Take the memory for this many columns of all slots together, where the cache is one pool."""
        self.cache.reserve(num_cells)

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """Whether a resize to this leaves all that a captured forward reads as it is."""
        return self.cache.stays(num_slots, rounded(num_columns, self.column_multiple))

    @property
    def spreads(self) -> bool:
        """Whether the cache is one pool of cells, in which slots have different numbers of columns."""
        return self.cache.is_pooled

    def spread(self, num_slots: int, num_columns: int) -> bool:
        """Have this many slots of up to this many columns, which get cells by `place`. False if what a captured forward reads
        has moved."""
        self.cache.spread(num_slots, rounded(num_columns, self.column_multiple))
        return True

    def place(self, slot: int, start: int, num_columns: int) -> bool:
        """Give a slot the cells from `start` on, with what they hold. False as in `spread`."""
        return self.cache.place(slot, start, num_columns)

    @property
    def dead_cell(self) -> int:
        """A cell that is no slot's, where rows write that mean nothing."""
        return self.cache.dead_cell

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of slot `source` onto slot `target`; not its order."""
        self.cache.copy_prefix(source, target, num_columns)

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """Copy columns of slots onto others of the same slots; none is both read and written. Of slots that were placed these are
        cells. Models whose rows are tokens."""
        self.cache.copy_columns(slots_R, from_R, to_R)

    def clear_slot(self, slot: int) -> None:
        """Put zeros into a slot that holds NaN or infinity."""
        self.cache.clear_slot(slot)

    def set_order(self, slot: int, order_L: Tensor) -> None:
        """Set the positions of a slot's columns, int64 [L]; forgets what the slot held. Two-stream models."""
        self.cache.set_positions(slot, order_L)

    def tap(self, reader: Any) -> None:
        """Give a draft head the states after some layers, from the next forward on; None gives them to nobody."""
        assert reader is None, "this model has no layers for a draft head to read"

    @abstractmethod
    def forward(self, rows: Any) -> Tensor:
        """Write the rows into the cache; hidden states of all rows, [N, D], or of a two-stream model's query rows, [Q, D]."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the raw logits of hidden states, [R, V], in float32 or better; nothing is suppressed yet."""
        raw_RV = self.raw_logits(hidden_RD)
        return raw_RV if raw_RV.dtype == torch.float64 else raw_RV.float()

    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        """The same in the dtype of the model's products, for kernels that compute in float32 themselves."""
        raise NotImplementedError

    def embed(self, tokens_R: Tensor) -> Tensor:
        """Return the input embeddings of tokens, [R, D]; draft heads read them."""
        raise NotImplementedError
