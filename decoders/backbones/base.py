"""What a decoder's engine asks of a model.

A backbone turns rows into hidden states against a cache of slots. It knows nothing of drafts, acceptance or samples. There are
two kinds: two-stream models (any-subset) have content rows and query rows; in all other models every row is a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftmill.decoders.kernels.seen import Tiling


class Model(ABC):
    """All tensors live on `device`; hidden states have `dtype`, logits float32 or better.

    What has a default is for models with more than a table: those on slots (cache.py), kernels and graphs override it.
    """

    vocab_size: int
    width: int
    device: torch.device
    dtype: torch.dtype
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
    """Weights that each row is multiplied by: 2 FLOPs each."""
    has_sums: ClassVar[bool] = False
    sums_N: Tensor | None = None
    """With `has_sums`: a float64 sum over each row's state in the last forward, not finite if any number of it is not."""

    # ---- memory --------------------------------------------------------------------------------------------------

    @property
    def reads_rows(self) -> bool:
        """Whether a kernel reads flat rows: then a slot with many rows costs the others nothing."""
        return False

    @property
    def cell_bytes(self) -> int:
        """Bytes of one column of one slot in the cache."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a token row's activations in a forward."""
        return 0

    @property
    def column_multiple(self) -> int:
        """The multiple to which it rounds columns up."""
        return 1

    @abstractmethod
    def allocate(self, num_slots: int, num_columns: int) -> None:
        """Make room for at least this many slots and columns; the cache keeps its content, even if memory runs out."""

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Resize to exactly this many slots and columns; content within them stays."""
        self.allocate(num_slots, num_columns)

    def reserve(self, num_cells: int) -> None:  # noqa: B027 - a default
        """Take the memory for this many columns of all slots together, where a cache is one pool."""

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """Whether a resize to this leaves all that a captured forward reads as it is."""
        return False

    @property
    def spreads(self) -> bool:
        """Whether the cache is one pool of cells, in which slots have different numbers of columns."""
        return False

    def spread(self, num_slots: int, num_columns: int) -> bool:
        """Have this many slots of up to this many columns, which get their cells by `place`; those that are placed stay. False if
        something that a captured forward reads has moved."""
        raise NotImplementedError

    def place(self, slot: int, start: int, num_columns: int) -> bool:
        """Give a slot the cells from `start` on, with what they hold. False as in `spread`."""
        raise NotImplementedError

    @property
    def dead_cell(self) -> int:
        """A cell that is no slot's, where rows write that mean nothing."""
        raise NotImplementedError

    @abstractmethod
    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of slot `source` onto slot `target`; not its order."""

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """Copy columns of slots onto others of the same slots; none is both read and written. Of slots that were placed these are
        cells. Models whose rows are tokens."""
        raise NotImplementedError

    def clear_slot(self, slot: int) -> None:  # noqa: B027 - a default
        """Put zeros into a slot that holds NaN or infinity."""

    def set_order(self, slot: int, order_L: Tensor) -> None:
        """Set the positions of a slot's columns, int64 [L]; forgets what the slot held. Two-stream models."""
        raise NotImplementedError

    # ---- a forward -----------------------------------------------------------------------------------------------

    def tap(self, reader: Any) -> None:
        """Give a draft head the states after some layers, from the next forward on; None gives them to nobody."""
        assert reader is None, "this model has no layers for a draft head to read"

    @abstractmethod
    def forward(self, rows: Any) -> Tensor:
        """Write the rows into the cache and return hidden states: of all rows, [N, D], for TokenRows; of the query rows, [Q, D],
        for the Rows of two streams."""

    @abstractmethod
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the raw logits of hidden states, [R, V], in float32 or better; nothing is suppressed yet."""

    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        """The same in the dtype of the model's products, for kernels that compute in float32 themselves."""
        return self.logits(hidden_RD)

    def embed(self, tokens_R: Tensor) -> Tensor:
        """Return the input embeddings of tokens, [R, D]; draft heads read them."""
        raise NotImplementedError
