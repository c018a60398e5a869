"""The Backbone interfaces: what a decoder's engine asks of a model.

A backbone turns rows into hidden states against a cache of slots. It knows nothing of drafts, acceptance or samples. There are
two kinds: two-stream models (any-subset) have content rows and query rows; in all other models every row is a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KnownStreams:
    """What the host knows of the rows of a two-stream forward, so that nothing of it has to be read from the device.

    `content_N` and `query_N` are the places of the valid rows in their flattened rectangles, int64 on the device; None where they
    fill them in order. `blind_N` are the valid queries that see no column, None if all see one; every content row does. `slots`
    are the slots where they follow each other.
    """

    content_N: Tensor | None
    query_N: Tensor | None
    blind_N: Tensor | None
    slots: slice | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one two-stream forward. Columns of a slot are the ranks of its decoding order.

    Content rows carry a token and write its keys and values at `content_columns_BC`; query rows carry none, stand at the
    rank `query_columns_BQ`, and predict the token there. `*_limits` say how many columns a row sees. Rows that are
    not `*_valid` are padding: their indices are in range but mean nothing, and they write nothing that is ever read.
    `slots_B` names the slot of each batch row; `order_SW` gives the position of every column of every slot. Without `known` a
    forward looks for these facts, and waits for the device.
    """

    slots_B: Tensor
    content_tokens_BC: Tensor
    content_columns_BC: Tensor
    content_limits_BC: Tensor
    content_valid_BC: Tensor
    query_columns_BQ: Tensor
    query_limits_BQ: Tensor
    query_valid_BQ: Tensor
    num_columns: int
    """No row sees a column at or beyond this one."""
    num_positions: int
    """No position of these slots is at or beyond this one."""
    known: KnownStreams | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the host knows of the rows of a forward, so that nothing of it has to be read from the device.

    `place_N` are the places of the valid rows in the flattened rectangle, int64 [N] on the device; None if they fill it in order.
    `slots` are the slots where they follow each other. Every valid row sees its own column, in all layers.
    """

    place_N: Tensor | None
    slots: slice | None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of one forward of a model in which every row carries a token.

    A row stands at the position `positions_BT` (what the model's position encoding sees) and writes its keys and values at
    the column `columns_BT` of its slot; several columns may hold one position, such as candidates that compete for it. All rows
    write first, then each attends to the columns where `visible_BTW` (bool) is True; its own column is among them. The
    columns of one slot's valid rows differ. Rows that are not `valid_BT` are padding: their indices are in range but mean
    nothing, they write nothing that is ever read, and their `visible_BTW` may be anything.

    `sigma_BT` is the total noise of the canvas that a row belongs to (float, >= 0; decoders/draws/absorbing.py), for models that
    are conditioned on it; all others ignore it. Without `known` a forward looks for these facts, and waits for the device.
    """

    slots_B: Tensor
    tokens_BT: Tensor
    positions_BT: Tensor
    columns_BT: Tensor
    valid_BT: Tensor
    visible_BTW: Tensor
    sigma_BT: Tensor | None = None
    known: Known | None = None


def lines_of(valid_BT: Tensor, place_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """The batch row and the line of rows at these places of the flattened rectangle, [N] each; None: of all its places."""
    if place_N is None:
        place_N = torch.arange(valid_BT.numel(), device=valid_BT.device)
    return place_N // valid_BT.shape[1], place_N % valid_BT.shape[1]


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
        ...

    def move_slot(self, source: int, target: int) -> None:
        """Copy all that slot `source` holds onto slot `target`."""
        ...

    def forward(self, rows: Any) -> Tensor:
        """Run one forward; the kind of backbone defines the type of `rows` and which hidden states are returned."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the raw logits of hidden states, [R, V]; nothing is suppressed yet."""
        ...

    def embed(self, tokens_R: Tensor) -> Tensor:
        """Return the input embeddings of tokens, [R, D]; draft heads read them."""
        ...


class Backbone(Model, Protocol):
    """A two-stream model over a slot cache whose columns are ranks."""

    def set_order(self, slot: int, order_L: Tensor) -> None:
        """Set the positions of a slot's columns, int64 [L]; forgets what the slot held."""
        ...

    def forward(self, rows: Rows) -> Tensor:
        """Write the content rows into the cache and return the hidden states of the query rows, [B, Q, D]."""
        ...


class TokenBackbone(Model, Protocol):
    """A model over a slot cache whose rows are all tokens: causal, masked and block diffusion models."""

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """Copy what a column of a slot holds onto another of its columns, for R of them; none is both read and written."""
        ...

    def forward(self, rows: TokenRows) -> Tensor:
        """Write every valid row into the cache and return the hidden states of all rows, [B, T, D]; padding rows hold junk."""
        ...
