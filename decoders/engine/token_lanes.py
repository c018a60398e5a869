"""The lane of a model in which every row is a token.

Legend: N rows, R answered rows, I intervals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from draftmill.decoders.backbones.base import TokenBackbone
from draftmill.decoders.backbones.rows import RowShape, TokenRows
from draftmill.decoders.draws.absorbing import noise_of_share, total_noise
from draftmill.decoders.engine.asks import DRAFTED
from draftmill.decoders.engine.lanes import Lane, Packed, Reading, Run, drafted_cells, following
from draftmill.decoders.engine.parcels import Parcel, Sent


class TokenLane(Lane):
    """A model in which every row is a token."""

    backbone: TokenBackbone

    @property
    def can_capture(self) -> bool:
        """See Lane."""
        return True

    def plan(self, packed: Packed, reading: Reading[Any], parcel: Parcel) -> Run:
        """See Lane. An id that only another model has is replaced by one of this model's."""
        table = packed.table
        column_N = table.columns()
        slot_N, token_N = packed.slot_B[table.owner_N], np.array(packed.tokens, dtype=np.int64)
        if self.backbone.vocab_size < self._vocab_size:
            token_N = np.minimum(token_N, self.backbone.vocab_size - 1)
        takes_drafts = bool(token_N[0] == DRAFTED)
        assert ((token_N == DRAFTED) == takes_drafts).all(), "drafts are on the device in all samples, or in none"
        if takes_drafts:
            token_N = drafted_cells(slot_N, column_N)
        lows, highs = table.intervals()
        num_columns = max(int(high_N.max()) for high_N in highs)
        size = self.size(table.num_rows) if reading.form is not None else None
        num_slots = len(packed.slot_B) if size is None else self.size(len(packed.slot_B))
        if size is not None:
            assert num_columns <= self.trash, "a row sees the column of dead rows"
        # A dead row is token 0 at position 0 of slot 0, and sees nothing.
        fields = table.owner_N, table.lines(), slot_N, token_N, table.positions()
        names = [parcel.enclose(numbers_N, size=size) for numbers_N in fields]
        names.append(parcel.enclose(column_N, size=size, fill=self.trash))
        sights = parcel.enclose(np.stack([*lows, *highs]), size=size)
        slots = parcel.enclose(packed.slot_B, size=num_slots)
        shares, times = (
            None if each is None else parcel.enclose(each, size=num_slots) for each in (packed.share_B, packed.time_B)
        )
        shape = RowShape(
            num_slots=len(packed.slot_B) if num_slots is None else num_slots,
            num_lines=table.num_lines,
            num_columns=num_columns,
            slots=following(packed.slot_B),
            num_positions=packed.num_positions,
        )

        def sigma(sent: Sent) -> Tensor | None:
            if shares is not None:
                return noise_of_share(sent[shares])
            return None if times is None else total_noise(sent[times])

        def rows(sent: Sent) -> TokenRows:
            owner, line, slot, token, position, column = (sent[name] for name in names)
            if takes_drafts:
                assert self.drafted_C is not None, "a model that drafts"
                token = self.drafted_C.index_select(0, token)
            return TokenRows(
                slots_B=sent[slots],
                owner_N=owner,
                line_N=line,
                slot_N=slot,
                token_N=token,
                position_N=position,
                column_N=column,
                low_IN=sent[sights][: len(lows)],
                high_IN=sent[sights][len(lows) :],
                shape=shape,
                sigma_B=sigma(sent),
            )

        place_R = table.asked_places() if packed.places_R is None else packed.places_R
        asked = self._enclosed(place_R, table.num_rows, reading, parcel)
        return Run(rows, asked, table.num_rows, packed.slot_B, form=None if size is None else (len(lows), takes_drafts))
