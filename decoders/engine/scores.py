"""The log-probabilities of given tokens in the rows that predict them, and whether each is the model's first choice.

Legend: R rows that are read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.engine.lanes import Lane, Reading
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.setup import Setup

Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]


class Scores:
    """Reads rows in parts whose logits fit into memory (`account`). Ids that are never generated are impossible."""

    def __init__(self, setup: Setup, account: Callable[[], Account]) -> None:
        device, info = setup.backbone.device, setup.info
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=device)
        self._dtype = torch.float64 if setup.backbone.dtype == torch.float64 else torch.float32
        self._row_bytes, self._account = info.vocab_size * self._dtype.itemsize, account

    def plan(self, lane: Lane, token_R: Ints, parcel: Parcel) -> Reading[Scored]:
        """Plan one answer: the log-probability of each token in its row, and whether it is the most likely one, [R] each."""
        wanted, parts = parcel.enclose(token_R), list(self._account().parts(len(token_R), self._row_bytes))

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            if not len(token_R):
                return torch.zeros(2, 0, dtype=torch.float64, device=hidden_RD.device)
            return torch.cat([self._part(lane, hidden_RD[part], sent[wanted][part]) for part in parts], 1)

        return Reading(work, lambda told_2R: iter([(told_2R[0], told_2R[1] > 0)]))

    def _part(self, lane: Lane, hidden_RD: Tensor, token_R: Tensor) -> Tensor:
        logits_RV = lane.logits(hidden_RD).index_fill_(-1, self._suppressed, -torch.inf)
        law_RV = logits_RV.to(self._dtype).log_softmax(-1)
        log_p_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return torch.stack([log_p_R, (law_RV.argmax(-1) == token_R).to(torch.float64)])
