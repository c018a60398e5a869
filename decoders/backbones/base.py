"""The Backbone interfaces: what a decoder's engine asks of a model.

A backbone turns rows into hidden states against a cache of slots. It knows nothing of drafts, acceptance or samples. There are
two kinds: two-stream models (any-subset) have content rows and query rows; in all other models every row is a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftmill.decoders.backbones.rows import Rows, TokenRows


class Model(Protocol):
    """Base of both kinds of backbone. All tensors live on `device`; hidden states have `dtype`, logits float32 or better."""

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

    def allocate(self, num_slots: int, num_columns: int) -> None:
        """Make room for at least this many slots and columns; the cache keeps its content, even if memory runs out."""

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of slot `source` onto slot `target`; not its order."""

    def forward(self, rows: Any) -> Tensor:
        """Run one forward; the kind of backbone defines the type of `rows` and which hidden states are returned."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the raw logits of hidden states, [R, V]; nothing is suppressed yet."""

    def embed(self, tokens_R: Tensor) -> Tensor:
        """Return the input embeddings of tokens, [R, D]; draft heads read them."""


class Backbone(Model, Protocol):
    """A two-stream model over a slot cache whose columns are ranks."""

    def set_order(self, slot: int, order_L: Tensor) -> None:
        """Set the positions of a slot's columns, int64 [L]; forgets what the slot held."""

    def forward(self, rows: Rows) -> Tensor:
        """Write the content rows into the cache and return the hidden states of the query rows, [Q, D]."""


class TokenBackbone(Model, Protocol):
    """A model over a slot cache whose rows are all tokens: causal, masked and block diffusion models."""

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """Copy what a column of a slot holds onto another of its columns, for R of them; none is both read and written."""

    def forward(self, rows: TokenRows) -> Tensor:
        """Write every row into the cache and return the hidden states of all rows, [N, D]."""
