"""`autoregressive`: one token per forward, the baseline that every lossless decoder of causal models must equal."""

from __future__ import annotations

from decoders.causal.decoder import CausalDecoder
from decoders.causal.settings import AutoregressiveSettings, SpeculativeSettings
from decoders.engine.setup import Setup
from decoders.engine.state import Group


class Autoregressive(CausalDecoder):
    """The first forward runs the prompt and gives the first token; NFE equals the number of generated tokens."""

    def __init__(self, setup: Setup, settings: AutoregressiveSettings | SpeculativeSettings) -> None:
        super().__init__(setup)

    def _advance(self, group: Group) -> None:
        self._advance_by_one(group)
