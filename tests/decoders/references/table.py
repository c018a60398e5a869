"""An exact toy any-subset model: a table of logits for every position and every set of visible tokens.

Vocabulary and canvas are tiny, so that the distribution of a whole decoder can be enumerated. Its conditionals are arbitrary,
not the conditionals of one joint distribution, so a decoder that reads a wrong context is always detected. Hidden states are the
logits themselves, so draft heads of the same width work on it.

Legend: as in backbones/base.py; P positions.
"""

import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.rows import StreamRows


class Toy(Model):
    """A model without a slot cache, in whose place a subclass keeps tables that only grow."""

    has_sums, spreads, cell_bytes, column_multiple = False, False, 0, 1

    def resize(self, num_slots: int, num_columns: int) -> None:
        self.allocate(num_slots, num_columns)

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """Nothing captures a toy."""
        return False

    def clear_slot(self, slot: int) -> None:
        """A table has no NaN."""

    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        """The same logits."""
        return self.logits(hidden_RD)


class Table(Toy):
    """Random conditionals, float64, for a position and the visible tokens.

    The row of the table for a context is its code in base V + 1, a position without a visible token counting as digit V.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 4,
        num_positions: int = 4,
        seed: int = 0,
        spread: float = 1.5,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_contexts = (vocab_size + 1) ** num_positions
        self.vocab_size, self.width = vocab_size, vocab_size
        self.device, self.dtype = torch.device(device), torch.float64
        self.num_positions = num_positions
        self.num_rows_computed, self.min_rows, self.exact = 0, 1, True
        table = spread * torch.randn(num_positions, num_contexts, vocab_size, generator=generator, dtype=torch.float64)
        self.table_PXV = table.to(self.device)
        embedding = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        self.embedding_VD = embedding.to(self.device)
        # Of a column: the token, and the position that it is of, or the position of that rank.
        self.tokens_SW, self.positions_SW = torch.zeros(2, 0, 0, dtype=torch.int64, device=self.device)

    def allocate(self, num_slots: int, num_columns: int) -> None:
        """Make room; new cells hold junk on purpose, so that reads of dead columns are detected."""
        rows, columns = self.tokens_SW.shape
        shape = (max(num_slots, rows), max(num_columns, columns))
        tokens = torch.randint(0, self.vocab_size, shape, device=self.device)
        positions = torch.randint(0, self.num_positions, shape, device=self.device)
        tokens[:rows, :columns], positions[:rows, :columns] = self.tokens_SW, self.positions_SW
        self.tokens_SW, self.positions_SW = tokens, positions

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Hidden states are logits; a copy, since ids are suppressed in place."""
        return hidden_RD.clone()

    def embed(self, tokens_R: Tensor) -> Tensor:
        """Random embeddings, for draft heads."""
        return self.embedding_VD[tokens_R]


class TableBackbone(Table):
    """p(x_i | any set of other tokens)."""

    def set_order(self, slot: int, order_L: Tensor) -> None:
        if len(order_L) > self.num_positions:
            raise ValueError(f"canvas length {len(order_L)} exceeds the table's {self.num_positions} positions")
        self.positions_SW[slot, : len(order_L)] = order_L

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        self.tokens_SW[target, :num_columns] = self.tokens_SW[source, :num_columns]

    def forward(self, rows: StreamRows) -> Tensor:
        """Look up the logits of every query row, [Q, V]; see backbones/base.py."""
        self.tokens_SW[rows.slots_G[rows.owner_N], rows.column_N] = rows.token_N
        self.num_rows_computed = len(rows.token_N) + rows.shape.num_slots * rows.shape.num_queries
        slot_Q = rows.slots_G[rows.owner_Q]
        position_Q = self.positions_SW[slot_Q, rows.rank_Q]
        return self.table_PXV[position_Q, self._context(slot_Q, rows.limit_Q)]

    def _context(self, slot_Q: Tensor, limit_Q: Tensor) -> Tensor:
        weights_QW = (self.vocab_size + 1) ** self.positions_SW[slot_Q]
        digits_QW = self.tokens_SW[slot_Q] - self.vocab_size
        seen_QW = torch.arange(digits_QW.shape[1], device=self.device) < limit_Q.unsqueeze(1)
        empty = (self.vocab_size + 1) ** self.num_positions - 1
        return empty + (digits_QW * weights_QW * seen_QW).sum(-1)
