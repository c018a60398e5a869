"""Shared by the masked-diffusion decoders: forwards over canvases, reading masks, and revealing tokens.

Every row of such a model sees a whole canvas, in both directions. Masks are revealed in an order given by the model's own
confidence; the ranks of a slot store that order.

Without a cache every forward runs whole canvases. With a cache most forwards run only a window, and read the other positions as
an earlier forward left them (windows.py).

A completion ends as soon as all tokens before an end token, or up to a stop string, are revealed; tokens after it are dropped.

Differs on purpose from Wu et al., "Fast-dLLM" (2025), which reveals the first token of a block of Dream whatever its
confidence.

Legend: N nodes (canvases of a forward), T positions revealed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import torch
from torch import Tensor

from decoders.backbones.base import TokenBackbone
from decoders.base import HOLE, Outcome, Request
from decoders.draws import noise
from decoders.engine.ends import FINISHES, Stops, ending
from decoders.engine.kept_noise import PositionNoise
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident, trimmed
from decoders.masked.canvases import CanvasState, first_block, next_up
from decoders.masked.confidence import Reading, confidence, ranked
from decoders.masked.rows import Nodes, lay, separate
from decoders.masked.settings import MaskedSettings
from decoders.masked.windows import CachedWindows

_WHOLE_CANVAS: Final = MaskedSettings(block_length=None)


class MaskedDecoder(SlotDecoder):
    """See the module's docstring; `stops` defines what ends a completion; None fills the whole canvas."""

    backbone: TokenBackbone

    def __init__(self, setup: Setup, settings: MaskedSettings | None = None) -> None:
        """`settings` are None where the canvas is one block, ranked by probability, and nothing is cached."""
        super().__init__(setup)
        shared = settings or _WHOLE_CANVAS
        if self.info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {self.info.family!r} have no mask to start from")
        self.mask_id, self.stops = self.info.mask_id, setup.stops
        self.confidence, self.cache = shared.confidence, shared.cache
        self.canvas = CanvasState(self.state, shared.block_length)
        self._noise = PositionNoise(self.state, self.info.vocab_size)
        self._finish_S, self._keep_S = self.state.column(), self.state.column()
        self._row_bytes = int(getattr(self.backbone, "row_bytes", 0))
        self.windows = CachedWindows(
            self.state, self.canvas, kind=shared.cache, refresh=shared.refresh, shift=self.info.shift
        )

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        self.canvas.start(slot, request)
        self._noise.forget(slot)

    def slot_bytes(self, num_columns: int) -> int:
        """See SlotDecoder; adds a forward over whole canvases, and five grids over their positions."""
        grids = 5 * 8 * num_columns
        return super().slot_bytes(num_columns) + grids + self._slots_each * num_columns * self._row_bytes

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
        self.canvas.move(source, target)
        self._noise.move(source, target)

    def _next_group(self) -> Group:
        # A new sample's forward is no larger than the others', so all run together.
        self._fresh = []
        slots = list(range(self._num_dense))
        return Group(slots, torch.tensor(slots, dtype=torch.int64, device=self.state.device), fresh=False)

    # ---- one forward ---------------------------------------------------------------------------------------------

    def _width(self, group: Group) -> int:
        """Length of the longest canvas in the group."""
        return max(len(r.request.canvas) for slot in group.slots if (r := self._residents[slot]) is not None)

    def _roots(self, group: Group) -> Nodes:
        """The canvases, one per slot; with a cache only the positions that must run."""
        slots_B, width = group.index_B, self._width(group)
        tokens_BW = self.canvas.tokens_SW[slots_B, :width]
        nodes = separate(tokens_BW, self._lengths(group))
        if self.cache == "none":
            return nodes
        blocks_BW = self.canvas.blocks(slots_B, width)
        block_B = first_block(tokens_BW == HOLE, blocks_BW)
        run_BW = nodes.fed_NW & self.windows.next_run(slots_B, block_B, blocks_BW)
        return Nodes(slots_B, nodes.batch_N, tokens_BW, run_BW, nodes.columns_NW, nodes.visible_NC)

    def _lengths(self, group: Group) -> Tensor:
        lengths = [len(r.request.canvas) for slot in group.slots if (r := self._residents[slot]) is not None]
        return torch.tensor(lengths, dtype=torch.int64, device=self.state.device)

    def _look(self, group: Group, nodes: Nodes, owners_N: Tensor, asked_NW: Tensor) -> Reading:
        """Run one forward and read the masks where `asked_NW`; `owners_N` are the slots whose noise draws their tokens."""
        laid = lay(nodes, self.mask_id)
        hidden_BTD = self.counting.forward(laid.rows, group.slots)
        self.stats.verified += len(owners_N)
        node_R, position_R = asked_NW.nonzero(as_tuple=True)
        source_R = (position_R - self.info.shift).clamp(min=0)
        assert bool(nodes.fed_NW[node_R, source_R].all()), "a mask is read from a row that was not run"
        hidden_RD = hidden_BTD.flatten(0, 1)[laid.place_NW[node_R, source_R]]
        reading = Reading.empty(asked_NW)
        for part in self._parts(len(hidden_RD)):
            where = (node_R[part], position_R[part])
            tokens_R, sure_R, log_p_R = self._read(hidden_RD[part], owners_N[where[0]], where[1])
            reading.tokens_NW[where], reading.confidence_NW[where], reading.log_p_NW[where] = tokens_R, sure_R, log_p_R
        return reading

    def _read(self, hidden_RD: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token drawn at each position, its confidence, and its log-probability, [R] each."""
        logits_RV = self._logits(hidden_RD)
        if self.warps.greedy:
            tokens_R = logits_RV.argmax(1)
        else:
            gumbel_RV = self._noise.rows(slots_R, positions_R)
            tokens_R = self.warps.draw(self._law(logits_RV, slots_R), gumbel_RV, slots_R)
        law_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=1)
        if self.confidence == "random":
            keys_R2 = self.state.key_S2[slots_R]
            sure_R = noise.uniform_rows(keys_R2, positions_R, noise.ORDER, torch.zeros_like(positions_R))
        else:
            sure_R = confidence(self.confidence, law_RV, tokens_R)
        return tokens_R, sure_R, law_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)

    # ---- revealing -----------------------------------------------------------------------------------------------

    def _reveal(
        self,
        group: Group,
        positions_BT: Tensor,
        told_BT: tuple[Tensor, Tensor],
        counts_B: Tensor,
        drafts_BK: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Reveal the first `counts_B` of these positions in this order, until the completion ends; returns how many.

        `told_BT` are tokens and log-probabilities, `drafts_BK` the drafted tokens and how many there were (for the trace).
        """
        state, slots_B = self.state, group.index_B
        tokens_BT, log_p_BT = told_BT
        decided_B = state.decided_S[slots_B].clone()
        counts_B = self._until_end(group, positions_BT, tokens_BT, counts_B)
        self.canvas.reveal(slots_B, positions_BT, told_BT, counts_B)
        self._commit(group, tokens_BT, counts_B, log_p_BT)
        state.iterations_S[slots_B] += 1
        self.canvas.commits_SW[slots_B, counts_B] += 1
        ended_B = self._finish_S[slots_B] != 0
        state.length_S[slots_B] = torch.where(ended_B, state.decided_S[slots_B], state.length_S[slots_B])
        nothing = (tokens_BT[:, :0], torch.zeros_like(counts_B))
        self._trace(group, *(drafts_BK or nothing), decided_B, torch.ones_like(ended_B))
        return counts_B

    def _until_end(self, group: Group, positions_BT: Tensor, tokens_BT: Tensor, counts_B: Tensor) -> Tensor:
        if self.stops is None:
            return counts_B
        texts = [self._stop_text(slot, self.stops.text) for slot in group.slots]
        if not self.stops.ids and not any(texts):
            return counts_B
        counts = counts_B.tolist()
        for row, (slot, length) in enumerate(zip(group.slots, self._lengths(group).tolist(), strict=True)):
            first = int(self.canvas.origin_S[slot])
            news = zip(positions_BT[row, : counts[row]].tolist(), tokens_BT[row, : counts[row]].tolist(), strict=True)
            canvas = self.canvas.tokens_SW[slot, first:length].tolist()
            end = ending(
                canvas, [(position - first, token) for position, token in news], Stops(self.stops.ids, texts[row])
            )
            if end is not None:
                counts[row], self._keep_S[slot], self._finish_S[slot] = end
        return counts_B.new_tensor(counts)

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        outcome.accept_hist = trimmed(self.canvas.commits_SW[slot].tolist())
        if self.stops is None:
            return outcome
        finish = int(self._finish_S[slot])
        outcome.finish = FINISHES[finish]
        if finish and outcome.error_kind is None:
            keep, first = int(self._keep_S[slot]), int(self.canvas.origin_S[slot])
            outcome.tokens = outcome.tokens[:keep]
            if outcome.token_logprobs is not None:
                outcome.token_logprobs = outcome.token_logprobs[:keep]
            if outcome.logprob is not None:
                outcome.logprob = float(self.canvas.log_p_SW[slot, first : first + keep].sum())
        return outcome


class RootDecoder(MaskedDecoder):
    """A decoder that runs every canvas once per step and reveals some of the predictions."""

    def _advance(self, group: Group) -> None:
        nodes = self._roots(group)
        asked_BW = next_up(nodes.tokens_NW == HOLE, self.canvas.blocks(group.index_B, nodes.tokens_NW.shape[1]))
        reading = self._look(group, nodes, group.index_B, asked_BW)
        order_BW = ranked(reading.confidence_NW)
        counts_B = self._count_revealed(group, reading.confidence_NW.gather(1, order_BW), asked_BW.sum(1))
        order_BT = order_BW[:, : int(counts_B.max())]
        self._reveal(group, order_BT, reading.at(order_BT), counts_B)

    @abstractmethod
    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        """How many of `most_B` positions to reveal; `sure_BW` are their confidences, the highest first."""
