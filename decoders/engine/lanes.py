"""A lane is one model of an engine: it runs packed rows, and times what it runs. One transfer down a forward.

Legend: B samples of a forward, R answered rows, N rows, I intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from decoders.backbones.base import Backbone, TokenBackbone
from decoders.backbones.rows import Rows, RowShape, StreamShape, TokenRows
from decoders.draws.absorbing import noise_of_share
from decoders.engine.asks import FAR
from decoders.engine.memory import give
from decoders.engine.packing import Ints, Table
from decoders.engine.parcels import Parcel
from decoders.engine.samples import Sample
from decoders.engine.transfers import Clock, put


@dataclass(frozen=True, slots=True)
class Packed:
    """What the samples of a forward ask: their rows, the tokens of these, and the query rows of an any-subset model.

    `longest` is the length of the longest canvas among them. `places_R` are the answered rows' numbers among all rows, where the
    asks name them. `share_B` is the share of masks of each sample's window, for a model that diffuses.
    """

    slot_B: Ints
    tokens: list[int] | Ints
    table: Table
    queries: Table | None
    longest: int
    places_R: Ints | None = None
    share_B: NDArray[np.float64] | None = None


class Lane:
    """A backbone, its cache's size, and the seconds of its forwards. `vocab_size` is the target's: logits get that width."""

    def __init__(self, backbone: Any, vocab_size: int, *, is_target: bool) -> None:
        self.backbone, self.device, self.is_target = backbone, backbone.device, is_target
        self._vocab_size = vocab_size
        self._shape = (0, 0)
        self.clock = Clock(self.device)
        """Times the network, the output layer and draft heads."""
        self._finite: Tensor | None = None
        """Whether the hidden states of all forwards since the last answer are finite, as far as the model says."""
        self._unsure = set[int]()
        """The slots of those forwards."""
        self._answered = False
        self.useful = self.computed = 0
        """Rows of the last forward: those asked for, and those computed with padding."""
        self.hidden_ND: Tensor | None = None
        """Hidden states of all rows (query rows) of the last forward; a Roll reads them."""

    # ---- the cache -----------------------------------------------------------------------------------------------

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Give the cache this many slots and columns."""
        had, self._shape = self._shape, (FAR, FAR)  # until it has succeeded: then any size is less, and is made exactly
        give(self.backbone, num_slots, num_columns, had)
        self._shape = (num_slots, num_columns)

    def move(self, source: int, target: int) -> None:
        """Copy all that a slot holds onto another."""
        self._settle(source)
        self.backbone.move_slot(source, target)

    def start(self, sample: Sample) -> None:
        """A new sample has its slot."""
        self._settle(sample.slot)

    def _settle(self, slot: int) -> None:
        """Before a slot changes, ask about forwards in it that had no answer."""
        if slot in self._unsure:
            self.record(torch.zeros(0, dtype=torch.float64, device=self.device))

    def is_sound(self, slot: int) -> bool:
        """Whether all that a slot holds is finite; from another one nothing may be copied."""
        self._settle(slot)
        return slot not in getattr(self.backbone, "tainted", ())

    def release(self, slot: int) -> None:
        """A slot has become free."""

    @property
    def cell_bytes(self) -> int:
        """Bytes of a column of a slot."""
        return int(getattr(self.backbone, "cell_bytes", 0))

    def forward(self, packed: Packed) -> Tensor:
        """Run the rows; returns the answered rows' hidden states, [R, D]."""
        raise AssertionError("this lane runs by `look` alone")

    # ---- a forward -----------------------------------------------------------------------------------------------

    def put(self, numbers: Ints) -> Tensor:
        """Bring integers to the device."""
        return put(numbers, self.device)

    def record(self, found: Tensor) -> NDArray[np.float64]:
        """Bring an answer to the host, float64 of any shape: the one transfer up of a forward, and its one wait.

        What the model noted of NaN and infinity comes along: it will wipe the slots of such a forward before it reads them again.
        """
        told = found.flatten()
        if self._finite is not None:
            told = torch.cat([told, self._finite.to(torch.float64).unsqueeze(0)])
        host: NDArray[np.float64] = told.cpu().numpy()
        self._answered = True
        if self._finite is not None:
            if not host[-1]:
                self.backbone.taint(self._unsure)
            host, self._finite = host[:-1], None
            self._unsure.clear()
        return host.reshape(found.shape)

    def laps(self) -> list[float]:
        """The seconds of the network, output layer and heads since the last answer; without one they are left for the next."""
        on_gpu = self.device.type == "cuda"
        return [] if on_gpu and not self._answered else self.clock.laps()

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The raw logits of rows, as wide as the target's vocabulary: what only one of them has is cut off, or impossible."""
        logits_RV = self.clock.timed(lambda: self.backbone.logits(hidden_RD))
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            return functional.pad(logits_RV, (0, missing), value=-torch.inf)
        return logits_RV[:, : self._vocab_size] if missing else logits_RV

    def embed(self, tokens_R: Tensor) -> Tensor:
        """The embeddings of tokens, [R, D]."""
        embedded: Tensor = self.backbone.embed(tokens_R)
        return embedded

    def _run(self, rows: Any, useful: int, slot_B: Ints) -> Tensor:
        hidden = self.clock.timed(lambda: self.backbone.forward(rows))
        finite: Tensor | None = getattr(self.backbone, "finite", None)
        if finite is not None:
            self._finite = finite if self._finite is None else self._finite & finite
            self._unsure.update(slot_B.tolist())
        self._answered = False
        self.useful, self.computed = useful, self.backbone.num_rows_computed
        return hidden


class TokenLane(Lane):
    """A model in which every row is a token."""

    backbone: TokenBackbone

    def forward(self, packed: Packed) -> Tensor:
        """See Lane. An id that only another model has is replaced by one of this model's."""
        table = packed.table
        column_N = table.columns()
        limit_N, own_N = table.limits(column_N), table.own()
        token_N = np.array(packed.tokens, dtype=np.int64)
        if self.backbone.vocab_size < self._vocab_size:
            token_N = np.minimum(token_N, self.backbone.vocab_size - 1)
        lows, highs = [np.zeros_like(column_N)], [limit_N]
        if int(own_N.min()) < FAR:
            lows, highs = [*lows, own_N], [*highs, table.till(column_N)]
        slot_N = packed.slot_B[table.owner_N]
        parcel = Parcel()
        parcel.add("rows", np.stack([table.owner_N, table.lines(), slot_N, token_N, table.positions(), column_N]))
        parcel.add("sights", np.stack([*lows, *highs]))
        parcel.add("slots", packed.slot_B)
        parcel.maybe("shares", packed.share_B)
        parcel.maybe("asked", table.asked_places() if packed.places_R is None else packed.places_R)
        sent = parcel.send(self.put)
        owner, line, slot, token, position, column = sent["rows"]
        rows = TokenRows(
            slots_B=sent["slots"],
            owner_N=owner,
            line_N=line,
            slot_N=slot,
            token_N=token,
            position_N=position,
            column_N=column,
            low_IN=sent["sights"][: len(lows)],
            high_IN=sent["sights"][len(lows) :],
            shape=RowShape(
                num_slots=len(packed.slot_B),
                num_lines=table.num_lines,
                num_columns=max(int(high_N.max()) for high_N in highs),
                slots=following(packed.slot_B),
            ),
            sigma_B=noise_of_share(sent["shares"]) if "shares" in sent else None,
        )
        hidden_ND = self.hidden_ND = self._run(rows, table.num_rows, packed.slot_B)
        return hidden_ND.index_select(0, sent["asked"]) if "asked" in sent else hidden_ND


def following(slot_B: Ints) -> slice | None:
    """Slots that follow each other as a slice; None for others."""
    first, last = int(slot_B[0]), int(slot_B[-1])
    ascending = last - first == len(slot_B) - 1 and bool((np.diff(slot_B) == 1).all())
    return slice(first, last + 1) if ascending else None


class TwoStreamLane(Lane):
    """An any-subset model: content rows carry tokens, query rows are answered; columns are ranks."""

    backbone: Backbone

    def start(self, sample: Sample) -> None:
        """Tell the model the positions of the sample's ranks."""
        super().start(sample)
        self.backbone.set_order(sample.slot, self.put(np.array(sample.order, dtype=np.int64)))

    def forward(self, packed: Packed) -> Tensor:
        """See Lane. Content rows are never answered."""
        content, queries = packed.table, packed.queries
        assert queries is not None, "an any-subset model is asked by queries"
        column_N, rank_Q = content.columns(), queries.columns()
        seen_N, limit_Q = content.limits(column_N), queries.limits(rank_Q)
        token_N = np.array(packed.tokens, dtype=np.int64)
        parcel = Parcel()
        parcel.add("content", np.stack([content.owner_N, content.lines(), token_N, column_N, seen_N]))
        parcel.add("queries", np.stack([queries.owner_N, queries.lines(), rank_Q, limit_Q]))
        parcel.add("slots", packed.slot_B)
        parcel.maybe("asked", queries.asked_places())
        sent = parcel.send(self.put)
        owner_C, line_C, token_C, column_C, limit_C = sent["content"]
        owner_Q, line_Q, column_Q, ends_Q = sent["queries"]
        rows = Rows(
            slots_B=sent["slots"],
            content_owner_C=owner_C,
            content_line_C=line_C,
            content_token_C=token_C,
            content_column_C=column_C,
            content_limit_C=limit_C,
            query_owner_Q=owner_Q,
            query_line_Q=line_Q,
            query_column_Q=column_Q,
            query_limit_Q=ends_Q,
            shape=StreamShape(
                num_slots=len(packed.slot_B),
                num_content=content.num_lines,
                num_queries=queries.num_lines,
                num_columns=max(int(seen_N.max(initial=0)), int(limit_Q.max())),
                num_positions=packed.longest,
                slots=following(packed.slot_B),
                some_blind=bool((limit_Q == 0).any()),  # queries of an empty prompt
            ),
        )
        hidden_QD = self.hidden_ND = self._run(rows, content.num_rows + queries.num_rows, packed.slot_B)
        return hidden_QD.index_select(0, sent["asked"]) if "asked" in sent else hidden_QD
