"""The log-probabilities of given tokens in the rows that predict them, and whether each is the model's first choice.

Legend: R rows that are read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.engine.lanes import Lane
from decoders.engine.memory import Account
from decoders.engine.packing import Ints
from decoders.engine.setup import Setup


class Scores:
    """Reads rows in parts whose logits fit into memory (`account`). Ids that are never generated are impossible."""

    def __init__(self, setup: Setup, account: Callable[[], Account]) -> None:
        device, info = setup.backbone.device, setup.info
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=device)
        self._dtype = torch.float64 if setup.backbone.dtype == torch.float64 else torch.float32
        self._row_bytes, self._account = info.vocab_size * self._dtype.itemsize, account

    def read(self, lane: Lane, hidden_RD: Tensor, token_R: Ints) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The log-probability of each token in its row, and whether it is the most likely one, [R] each; one record."""
        if not len(token_R):
            lane.record(torch.zeros(0, dtype=torch.float64, device=hidden_RD.device))
            return np.zeros(0), np.zeros(0, dtype=np.bool_)
        wanted_R = lane.put(token_R)
        parts = [
            self._part(lane, hidden_RD[part], wanted_R[part])
            for part in self._account().parts(len(token_R), self._row_bytes)
        ]
        log_p_R, is_first_R = lane.record(torch.cat(parts, 1))
        return log_p_R, is_first_R > 0

    def _part(self, lane: Lane, hidden_RD: Tensor, token_R: Tensor) -> Tensor:
        logits_RV = lane.logits(hidden_RD).index_fill_(-1, self._suppressed, -torch.inf)
        law_RV = logits_RV.to(self._dtype).log_softmax(-1)
        log_p_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return torch.stack([log_p_R, (law_RV.argmax(-1) == token_R).to(torch.float64)])
