"""An exact toy model whose rows are all tokens: a table of logits for every position and every set of visible tokens.

Vocabulary and length are tiny, so that the distribution of a whole decoder can be enumerated. Its conditionals are arbitrary: a
decoder that reads a wrong context, a dead column or two candidates for one position is detected at once.

Legend: as in backbones/base.py; P positions, X contexts.
"""

import torch
from torch import Tensor

from draftmill.decoders.backbones.rows import TokenRows, seen_columns
from tests.decoders.references.table import Table


class TokenTable(Table):
    """p(next | position of the row, set of visible (position, token))."""

    def __init__(self, *, vocab_size: int = 3, num_positions: int = 6, **more) -> None:
        super().__init__(vocab_size=vocab_size, num_positions=num_positions, **more)

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of a slot."""
        for held_SW in (self.tokens_SW, self.positions_SW):
            held_SW[target, :num_columns] = held_SW[source, :num_columns]

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        for held_SW in (self.tokens_SW, self.positions_SW):
            held_SW[slots_R, to_R] = held_SW[slots_R, from_R]

    def forward(self, rows: TokenRows) -> Tensor:
        """Look up the logits of every row, [N, V]."""
        slots, columns = rows.slot_N, rows.column_N
        assert torch.equal(rows.slots_G[rows.owner_N], slots), "a row's slot is not its owner's"
        assert len(torch.unique(torch.stack([slots, columns]), dim=1)[0]) == len(slots), "two rows write one column"
        self.tokens_SW[slots, columns] = rows.token_N
        self.positions_SW[slots, columns] = rows.position_N
        self.num_rows_computed = rows.shape.num_slots * rows.shape.num_lines
        seen_NW = seen_columns(rows.low_IN, rows.high_IN, rows.shape.num_columns)
        assert bool(seen_NW.gather(1, columns.unsqueeze(1)).all()), "a row does not see itself"
        return self.table_PXV[rows.position_N, self._context(slots, seen_NW)]

    def _context(self, slots_N: Tensor, visible_NW: Tensor) -> Tensor:
        positions_NW, tokens_NW = self._seen(slots_N, visible_NW)
        weights_NW = (self.vocab_size + 1) ** positions_NW
        empty = (self.vocab_size + 1) ** self.num_positions - 1
        return empty + ((tokens_NW - self.vocab_size) * weights_NW * visible_NW).sum(-1)

    def _seen(self, slots_N: Tensor, visible_NW: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and tokens of the columns of each row's slot, of which it sees one for a position at most."""
        width = visible_NW.shape[1]
        positions_NW, tokens_NW = self.positions_SW[slots_N, :width], self.tokens_SW[slots_N, :width]
        held_NP = torch.zeros(len(slots_N), self.num_positions, dtype=torch.int64, device=self.device)
        held_NP.scatter_add_(1, positions_NW, visible_NW.to(torch.int64))
        assert int(held_NP.max()) <= 1, "a row sees two columns of one position"
        return positions_NW, tokens_NW
