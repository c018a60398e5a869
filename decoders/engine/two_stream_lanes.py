"""The lane of an any-subset model: content rows write the columns of decided tokens and drafts, query rows are answered.

Legend: C content rows, Q query rows, R answered rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftmill.decoders.backbones.base import Backbone
from draftmill.decoders.backbones.rows import Rows, StreamShape
from draftmill.decoders.engine.lanes import Lane, Packed, Reading, Run, following
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.samples import Sample


class TwoStreamLane(Lane):
    """An any-subset model: content rows carry tokens, query rows are answered; columns are ranks."""

    backbone: Backbone

    def start(self, sample: Sample) -> None:
        """Tell the model the positions of the sample's ranks."""
        super().start(sample)
        self.backbone.set_order(sample.slot, self.put(np.array(sample.order, dtype=np.int64)))

    @property
    def can_capture(self) -> bool:
        """See Lane."""
        return True

    def plan(self, packed: Packed, reading: Reading[Any], parcel: Parcel) -> Run:
        """See Lane. Content rows are never answered."""
        content, queries = packed.table, packed.queries
        assert queries is not None, "an any-subset model is asked by queries"
        column_N, rank_Q = content.columns(), queries.columns()
        seen_N, limit_Q = content.limits(column_N), queries.limits(rank_Q)
        num_columns = max(int(seen_N.max(initial=0)), int(limit_Q.max()))
        token_N = np.array(packed.tokens, dtype=np.int64)
        captures = reading.form is not None
        sizes = [self.size(count) if captures else None for count in (content.num_rows, queries.num_rows)]
        size_C, size_Q = sizes if None not in sizes else (None, None)
        captured = size_C is not None
        num_slots = (self.size(len(packed.slot_B)) if captured else None) or len(packed.slot_B)
        assert not captured or num_columns <= self.trash, "a row sees the column of dead rows"
        # Dead rows are of slot 0, see nothing, and, where they have a token, write it to a column that no row sees.
        names = [parcel.enclose(each_C, size=size_C) for each_C in (content.owner_N, content.lines(), token_N, seen_N)]
        columns = parcel.enclose(column_N, size=size_C, fill=self.trash)
        fields_Q = queries.owner_N, queries.lines(), rank_Q, limit_Q
        query_names = [parcel.enclose(numbers_Q, size=size_Q) for numbers_Q in fields_Q]
        slots = parcel.enclose(packed.slot_B, size=num_slots)
        shape = StreamShape(
            num_slots=num_slots,
            num_content=content.num_lines,
            num_queries=queries.num_lines,
            num_columns=num_columns,
            num_positions=self._shape[1] if captured else packed.longest,
            slots=following(packed.slot_B),
            some_blind=bool((limit_Q == 0).any()),  # queries of an empty prompt
        )

        def rows(sent: Sent) -> Rows:
            owner_C, line_C, token_C, limit_C = (sent[name] for name in names)
            owner_Q, line_Q, column_Q, ends_Q = (sent[name] for name in query_names)
            return Rows(
                slots_B=sent[slots],
                content_owner_C=owner_C,
                content_line_C=line_C,
                content_token_C=token_C,
                content_column_C=sent[columns],
                content_limit_C=limit_C,
                query_owner_Q=owner_Q,
                query_line_Q=line_Q,
                query_column_Q=column_Q,
                query_limit_Q=ends_Q,
                shape=shape,
            )

        asked = self._enclosed(queries.asked_places(), queries.num_rows, reading, parcel)
        form = "streams" if captured else None
        return Run(rows, asked, content.num_rows + queries.num_rows, packed.slot_B, form=form)
