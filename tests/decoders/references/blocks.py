"""A plain reference of block diffusion and S2D2: one sample, no cache, every random choice made by a chooser (choosers.py).

Written to be read beside the papers and to be enumerated: the batched decoders must give the same tokens and counts from the
same noise, and the exact distribution of this code is summed up. Every forward runs the text from its beginning, and each row
lists the columns that it sees. The only router is the minimum span; there is no editing and there are no stops.

Sources: SDAR (Cheng et al., 2025); S2D2 (2026), Algorithm 3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.heads.markov import MarkovHead
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.blocks.samples import KINDS
from draftmill.decoders.blocks.settings import BlockSettings, MinSpan, S2d2Settings
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.causal import corrected
from tests.decoders.references.choosers import Rule
from tests.decoders.references.rows import intervals_of
from tests.decoders.references.sampling import log_law

Row = tuple[int, int, int, frozenset[int]]
"""(token, position, column, the other columns that it sees)."""


class PlainBlocks:
    """A block-diffusion model that recomputes every forward from scratch; results are memoised."""

    def __init__(self, backbone: Model, info: ModelInfo, settings: BlockSettings, sampling: Sampling) -> None:
        self.backbone, self.info, self.sampling, self.settings = backbone, info, sampling, settings
        self.size = settings.size_for(info)
        self.left_shift = info.shift if info.left_shift is None else info.left_shift
        self.prompt = 0
        """The length of the prompt, where that is a block of its own."""
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64)
        self._known: dict[tuple[tuple[Row, ...], int], Tensor] = {}

    def law(self, rows: Sequence[Row], column: int) -> Tensor:
        """The log-probabilities that the row at `column` gives, warped; at temperature 0 the model's own, [V]."""
        known = self._known.get((tuple(rows), column))
        if known is None:
            known = self._known[tuple(rows), column] = self._computed(rows, column)
        return known

    def headed(
        self, rows: Sequence[Row], column: int, head: MarkovHead, text: Sequence[int], num_unseen: int
    ) -> Tensor:
        """As `law`, of a row that a draft head has corrected for the last tokens of `text`."""
        return self._computed(rows, column, lambda row: corrected(self.backbone, head, row, text, num_unseen))

    def _computed(
        self, rows: Sequence[Row], column: int, change: Callable[[Tensor], Tensor] = lambda row: row
    ) -> Tensor:
        width = 1 + max(max(seen | {own}) for _, _, own, seen in rows)
        self.backbone.allocate(1, width)
        seen = torch.zeros(len(rows), width, dtype=torch.bool)
        for index, (_, _, own, others) in enumerate(rows):
            seen[index, [own, *others]] = True
        tokens, positions, columns = (torch.tensor([row[part] for row in rows]) for part in range(3))
        hidden = self.backbone.forward(token_rows([0], [len(rows)], tokens, positions, columns, intervals_of(seen)))
        index = [row[2] for row in rows].index(column)
        logits = self.backbone.logits(change(hidden[index : index + 1])).index_fill_(-1, self._suppressed, -torch.inf)
        if self.sampling.temperature == 0.0:
            return torch.log_softmax(logits.to(torch.float64), dim=-1)[0]
        return log_law(logits, self.sampling)[0]

    # ---- rows ----------------------------------------------------------------------------------------------------

    def finished(self, tokens: Sequence[int], end: int) -> list[Row]:
        """The rows of the blocks before `end`, as a cache holds them."""
        if self.settings.causal_cache:
            ends = [place + 1 for place in range(end)]
        else:
            whole, size = self.prompt, self.size
            blocks = [max(whole + ((place - whole) // size + 1) * size, whole) for place in range(end)]
            ends = [min(stop, end) for stop in blocks]
        return [(tokens[place], place, place, frozenset(range(ends[place]))) for place in range(end)]

    def drafting(self, canvas: Sequence[int], start: int, end: int) -> list[Row]:
        """The rows of a draft of the block [start, end) after the blocks before it; HOLE is a mask."""
        masks = [place for place in range(start, end) if canvas[place] == HOLE]
        causal = isinstance(self.settings, S2d2Settings) and self.settings.causal_draft
        front = min(masks) if causal and masks else start
        mask = self.info.mask_id
        assert mask is not None
        block = [
            (
                mask if canvas[place] == HOLE else canvas[place],
                place,
                place,
                frozenset(range(place + 1 if place < front else end)),
            )
            for place in range(start, end)
        ]
        return [*self.finished(canvas, start), *block]

    def verifying(self, canvas: Sequence[int], start: int, place: int) -> tuple[list[Row], int]:
        """The rows that predict `place` from the tokens to its left, and the column of the one to read."""
        mask = self.info.mask_id
        assert mask is not None
        left = [(canvas[at], at, at, frozenset(range(at + 1))) for at in range(start, place)]
        rows = [*self.finished(canvas, start), *left]
        if self.left_shift and place > 0:
            return rows, place - 1
        return [*rows, (mask, place, place, frozenset(range(place + 1)))], place


@dataclass(slots=True)
class BlockTrail:
    """The result of a reference decoder: the whole canvas, forwards by kind, drafts verified and accepted."""

    canvas: list[int]
    nfe: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    proposed: int = 0
    accepted: int = 0
    drafts: int = 0


def decode_blocks(model: PlainBlocks, canvas: Sequence[int], rule: Rule) -> BlockTrail:
    """Denoise the canvas, a prompt and then holes, block after block; returns it whole, the cut-off tail included."""
    info, size, length = model.info, model.size, len(canvas)
    prompt = sum(token != HOLE for token in canvas)
    start = prompt if info.prompt_block else prompt // size * size
    model.prompt = start if info.prompt_block else 0
    full = start + -(-(length - start) // size) * size
    if info.max_length is not None:
        full = max(min(full, info.max_length), length)
    trail = BlockTrail([*canvas, *[HOLE] * (full - length)])
    trail.nfe["prefill"] = int(start > 0)
    seeds = info.shift or (model.left_shift and model.settings.causal_cache)
    while HOLE in trail.canvas[:length]:
        if seeds and start > 0 and trail.canvas[start] == HOLE:
            law = model.law(model.finished(trail.canvas, start), start - 1)
            trail.canvas[start] = rule.direct(law, start, trail.drafts)
        _denoise(_Block(model, trail, rule, start, min(start + size, full)), length)
        start += size
        trail.nfe["commit"] += int(HOLE in trail.canvas[:length])
    return trail


@dataclass(slots=True)
class _Block:
    """One block of a canvas under way."""

    model: PlainBlocks
    trail: BlockTrail
    rule: Rule
    start: int
    end: int
    laws: dict[int, Tensor] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    drawn: int = -1

    @property
    def number(self) -> int:
        """The number of the step's noise."""
        return self.drawn if self.model.settings.draws_anew else 0


def _denoise(block: _Block, length: int) -> None:
    """Denoise step by step, part by part, until the block or all requested positions are done."""
    canvas, start = block.trail.canvas, block.start
    step, part, width = 0, -1, block.model.settings.sub_block or block.model.size
    while HOLE in canvas[start : block.end] and HOLE in canvas[:length]:
        number = (canvas.index(HOLE) - start) // width
        step, part = (step + 1 if number == part else 0), number
        places = range(start + number * width, min(start + (number + 1) * width, block.end))
        _step(block, [place for place in places if canvas[place] == HOLE], step)


def _step(block: _Block, masks: list[int], step: int) -> None:
    model, trail = block.model, block.trail
    trail.nfe["draft"] += 1
    trail.drafts, block.drawn = trail.drafts + 1, block.drawn + 1
    rows = model.drafting(trail.canvas, block.start, block.end)
    block.laws = {place: model.law(rows, max(place - model.info.shift, 0)) for place in masks}
    block.tokens = {place: block.rule.draft(block.laws[place], place, trail.drafts, block.number) for place in masks}
    share = min(_share(model.settings, model.size, step), len(masks))
    span = [place for place in masks if place - masks[0] == masks.index(place)]
    decoded = _judge(block, span) if _verified(model.settings, len(span)) else 0
    left = [place for place in masks if trail.canvas[place] == HOLE]
    for place in _chosen(model.settings, left, block.laws, block.tokens, share - decoded):
        trail.canvas[place] = block.tokens[place]


def _verified(settings: BlockSettings, span: int) -> bool:
    return isinstance(settings, S2d2Settings) and isinstance(settings.router, MinSpan) and span >= settings.router.span


def _share(settings: BlockSettings, size: int, step: int) -> int:
    size = settings.sub_block or size
    steps = min(settings.steps or size, size)
    return size // steps + int(step < size % steps)


def _judge(block: _Block, span: list[int]) -> int:
    """Verify the span; returns how many tokens it revealed."""
    model, trail = block.model, block.trail
    trail.nfe["verify"] += 1
    trail.proposed += len(span)
    for count, place in enumerate(span, 1):
        p_law = model.law(*model.verifying(trail.canvas, block.start, place))
        draft = block.laws[place], block.tokens[place]
        passed, token = block.rule.settle(p_law, *draft, place, trail.drafts, block.number)
        trail.canvas[place] = token
        trail.accepted += passed
        if not passed:
            return count
    return len(span)


def _chosen(
    settings: BlockSettings, masks: list[int], laws: dict[int, Tensor], tokens: dict[int, int], share: int
) -> list[int]:
    """The masks that the schedule reveals, at least `share` of them; none if `share` is below one."""
    if share < 1 or not masks:
        return []
    sure = {place: float(laws[place][tokens[place]].to(torch.float64).exp()) for place in masks}
    surest = sorted(masks, key=lambda place: (-sure[place], place))
    match settings.schedule:
        case "sequential":
            return masks[:share]
        case "static":
            return surest[:share]
        case "dynamic":
            above = [place for place in surest if sure[place] > settings.tau]
            return above if len(above) >= share else surest[:share]
    entropies = {place: _entropy(laws[place]) for place in masks}
    calmest, spent = sorted(masks, key=lambda place: (entropies[place], place)), 0.0
    chosen = list[int]()
    for place in calmest:
        if chosen and spent > settings.tau:
            break
        chosen.append(place)
        spent += entropies[place]
    return chosen


def _entropy(law_V: Tensor) -> float:
    return -sum(math.exp(value) * value for value in law_V.tolist() if value > -math.inf)


def law_at_size_one(model: PlainBlocks, prompt: Sequence[int], length: int) -> Callable[[Sequence[int]], float]:
    """The probability of each completion under the model at block size 1, with a causal cache."""

    def probability(completion: Sequence[int]) -> float:
        canvas, total = [*prompt, *completion], 0.0
        for place in range(len(prompt), length):
            rows, column = model.verifying(canvas, 0, place)
            total += float(model.law(rows, column)[canvas[place]])
        return math.exp(total)

    return probability
