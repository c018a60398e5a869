"""A sample of masked diffusion: its canvas, whose masks are revealed in any order; what is asked about it. Imports no torch.

    position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11        block_length 4, the first mask at 3
    block       0 0 0   0 0 0 0   1 1 1 1    2

Blocks begin at the first mask, so that those of a completion are those of the public code. Masks may be anywhere; positions
without one are never changed. A completion ends as soon as all tokens before an end token, or up to a stop string, are revealed;
tokens after it are dropped.

What a decoder asks about (`CanvasAsk`): rows of canvases with drafts in them (nodes, which ssd.py draws, all in one
forward), and the surest tokens for some of their masks.

    canvas       the  _  sat  _  _  .            a mask at 1, 3 and 4
    node 0       the  _  sat  _  _  .            the canvas as it is
    node 1       the cat sat  _ mat .            with two drafts, which are not revealed: for this forward only
    asked        of node 1, the mask at 3        ->  (how sure, position, token, ..)

Which positions a forward with a cache runs (`Windows`): the whole canvas when the cache is rebuilt, else a window around its
masks.

    block_length 4           position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    the cache is made                    x x x   x x x x   x x x x    x
    then, in the first block             . . .   x x x x   . . . .    .      `prefix` runs all after it too
    the first in the second block,
    where the cache is not rebuilt     . . .   x x x x   x x x x    .

Other positions are read from the cache. It is rebuilt at the start of each block; or, with `refresh`, after that many tokens,
wherever blocks begin. In the latter case a block that ended since the last forward runs once more, so that its last token is not
read as the mask that it was. A model with a shift reads a position from the row before it, so that row runs with the window.

Source of windows: Wu et al., "Fast-dLLM" (2025), section 3.2, whose caches live as long as a block; the interval in tokens is
that of the SSD paper, section 4.1, which does not specify how to treat a finished block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, Outcome, TraceStep
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.asks import FAR, MOST_STRETCHES, NO_DRAFT, TARGET, Answer, Ask, Ints, Span
from draftmill.decoders.engine.ends import EOS, FILLED, STOP, ending
from draftmill.decoders.engine.samples import Sample, runs_of
from draftmill.decoders.masked.settings import MaskedSettings

Pick = tuple[float, int, int, float]
"""(-how sure, position, token, log-probability under the model itself): so pairs of tuples compare as the surest first."""


class Canvas(Sample):
    """A request that is being decoded. `tokens` holds a token for each position, HOLE at masks, and `canvas` the same as an
    array; `holes` are the masks' positions, ascending. Positions of `given` had no mask in the beginning. `size` is the block
    length, by default that of the canvas."""

    def __init__(self, *args: Any, block_length: int | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.holes = [position for position, token in enumerate(self.tokens) if token == HOLE]
        self.origin = self.holes[0] if self.holes else 0
        self.size = block_length or max(self.length, 1)
        self.canvas: NDArray[np.int64] = np.array(self.tokens, dtype=np.int64)
        self.given = self.canvas != HOLE
        self.uniform: NDArray[np.float64] | None = None
        self.log_p_at: dict[int, float] = {}
        # The number of tokens that are kept of a completion that has ended.
        self.keep: int | None = None

    @property
    def revealed(self) -> int:
        """The number of tokens that were revealed; it numbers the draws of the next step."""
        return self.decided - self.prompt

    @property
    def order_uniforms(self) -> NDArray[np.float64]:
        """A uniform number of each position: an order that does not depend on the text."""
        if self.uniform is None:
            self.uniform = keys.uniforms(self.key, np.arange(self.length), keys.ORDER)
        return self.uniform

    def block(self, position: int) -> int:
        return max(position - self.origin, 0) // self.size

    def end_of(self, block: int) -> int:
        """The position after the last one of a block."""
        return min(self.origin + (block + 1) * self.size, self.length)

    def reveal(self, picks: Sequence[Pick], proposed: int = 0, drafts: Sequence[int] = ()) -> None:
        """End an iteration: reveal these tokens in their order, fewer where the completion ends. All but the first of them
        count as accepted if any were `proposed`. `drafts` are shown in the trace."""
        if len(picks) > 1:
            picks = [picks[index] for index in self.fitting([pick[1:3] for pick in picks])]
        count = self._until_end(picks)
        for _, position, token, log_p in picks[:count]:
            self.tokens[position] = self.canvas[position] = token
            if self.is_shaped:
                self.decide(position, token)
            self.log_p_at[position] = log_p
            self.logprob += log_p
        if count == 1:
            del self.holes[bisect_left(self.holes, picks[0][1])]
        else:
            self.holes = list(compress(self.holes, [self.tokens[position] == HOLE for position in self.holes]))
        if self.keep is not None:
            self.holes = []
        self.decided += count
        self._close_iteration(count, proposed, max(count - 1, 0) if proposed else 0)
        if self.trace is not None:
            tokens, positions = [pick[2] for pick in picks[:count]], [pick[1] for pick in picks[:count]]
            self.trace.append(TraceStep(len(self.trace), self.nfe, list(drafts), tokens, positions))

    def is_open(self, position: int) -> bool:
        return self.tokens[position] == HOLE

    def _until_end(self, picks: Sequence[Pick]) -> int:
        if self.end == FILLED or not self.can_stop:
            return len(picks)
        news = [(position - self.origin, token) for _, position, token, _ in picks]
        end = ending(self.tokens[self.origin :], news, self.stops)
        if end is None:
            return len(picks)
        count, self.keep, self.end = end
        assert self.end in (EOS, STOP), "a completion that ends early has a reason"
        return count

    def _generated_tokens(self) -> tuple[list[int], list[float]]:
        positions = sorted(self.log_p_at)[: self.keep]
        return [self.tokens[at] for at in positions], [self.log_p_at[at] for at in positions]

    def outcome(self) -> Outcome:
        """See Sample; of a completion that ended early only what is kept counts."""
        outcome = super().outcome()
        if self.keep is not None and outcome.logprob is not None:
            outcome.logprob = sum(self._generated_tokens()[1])
        return outcome


class CanvasAsk:
    """Collects a forward's rows and, for each range of masks, the number of best tokens to return. A row predicts the position
    `shift` after its own. With `given` each canvas runs once more, masked where this is true: these rows guide the others."""

    def __init__(self, shift: int, given: NDArray[np.bool_] | None = None) -> None:
        self._given = given
        self._shift, self._spans, self._num_rows = shift, list[int](), 0
        self._tokens, self._stretches = list[Ints](), list[int]()
        # Of each stretch of masks: the offset of their rows, their positions, the number of their draws, the picks to return.
        self._firsts, self._positions, self._draws, self._bests = list[int](), list[Ints](), list[int](), list[int]()

    def run(
        self, canvas: Ints, low: int, high: int, *, column: int, below: int = 0, node: int = 0, sees: Sequence[int] = ()
    ) -> int:
        """Run the positions [low, high) of a canvas, which see the columns `below`, or these stretches; returns the offset of
        their rows, for `read`."""
        canvases = [canvas] if self._given is None else [canvas, np.where(self._given, HOLE, canvas)]
        for number, each in enumerate(canvases):
            self._spans += Span(high - low, column, low, below, FAR, node=len(canvases) * node + number)
            self._stretches += sees
            self._tokens.append(each[low:high])
        first, self._num_rows = self._num_rows - low, self._num_rows + len(canvases) * (high - low)
        return first

    def read(self, first: int, positions: Sequence[int], *, best: int, draw: int) -> None:
        """Ask for the `best` most confident tokens of these masks, given in ascending order; their rows begin at `first`."""
        assert best <= len(positions), "more picks than masks"
        self._firsts.append(first)
        self._positions.append(np.array(positions, dtype=np.int64))
        self._draws.append(draw)
        self._bests.append(best)

    def ask(self, sigmas: Sequence[float] = ()) -> Ask:
        position_R, sizes = np.concatenate(self._positions), [len(each) for each in self._positions]
        row_R = np.repeat(self._firsts, sizes) + np.maximum(position_R - self._shift, 0)
        runs = runs_of(row_R, position_R, TARGET, np.repeat(self._draws, sizes))
        drafts, partners = np.full(len(row_R), NO_DRAFT), () if self._given is None else row_R + len(self._given)
        tokens, stretches = np.concatenate(self._tokens), self._stretches
        return Ask(tokens, self._spans, runs, drafts, stretches=stretches, partners=partners, sigmas=sigmas)

    def picks(self, answer: Answer, sure_AR: NDArray[np.float64]) -> list[list[list[Pick]]]:
        """The picks of each draw, stretch by stretch: the surest first, among equals the one asked about first.

        masks         a    b    c  |  d    e          two stretches, three masks and two
        sure          .2   .9   .9 |  .4   .7
        picks         b    c       |  e               the best two, equals by position; the best one
        """
        position_R = np.concatenate(self._positions)
        size_A, best_A = np.array([len(each) for each in self._positions]), np.array(self._bests)
        stretch_R, first_A = np.repeat(np.arange(len(size_A)), size_A), size_A.cumsum() - size_A
        end_A = best_A.cumsum()
        place_P = np.repeat(first_A - end_A + best_A, best_A) + np.arange(int(end_A[-1]))
        draws, ends = list[list[list[Pick]]](), [0, *end_A.tolist()]
        for sure_R, token_R, log_p_R in zip(sure_AR, answer.tokens, answer.log_ps, strict=True):
            best_P = np.lexsort((-sure_R, stretch_R))[place_P]
            parts = (-sure_R[best_P], position_R[best_P], token_R[best_P], log_p_R[best_P])
            picks = list(zip(*(part.tolist() for part in parts), strict=True))
            draws.append([picks[first:end] for first, end in pairwise(ends)])
        return draws

    def sure(self, s: Canvas, settings: MaskedSettings, answer: Answer) -> NDArray[np.float64]:
        """The confidence of each token, for each draw; `random`: the position's uniform number. With `suppress_end`, tokens that
        end the text rank below all others."""
        if settings.confidence == "random":
            uniform_R: NDArray[np.float64] = s.order_uniforms[np.concatenate(self._positions)]
            sure_AR = np.broadcast_to(uniform_R, np.shape(answer.tokens))
        else:
            sure_AR = -answer.notes[0] if settings.confidence == "entropy" else answer.notes[0]
        return np.where(np.isin(answer.tokens, s.stops.ids), -np.inf, sure_AR) if settings.suppress_end else sure_AR


Positions = tuple[int, int]
"""The positions from the first number up to the second."""


class Windows:
    """When the cache of a sample was made, and the windows that follow from it, from the settings and from the model's shift."""

    def __init__(self, s: Canvas, settings: MaskedSettings, shift: int) -> None:
        self._s, self.settings, self.shift, self.fresh = s, settings, shift, settings.draws_anew
        # The block of the last forward, -1 before the first; the number of decided tokens when the cache was made.
        self.last, self.made_at = -1, s.decided

    def ask(self) -> CanvasAsk:
        """What a forward is asked; with guidance, a second canvas guides each one."""
        return CanvasAsk(self.shift, self._s.given if self.settings.guidance_scale else None)

    def window(self, block: int) -> Positions:
        """The positions that a forward in a block runs when the cache is not rebuilt."""
        start = self._s.origin + block * self._s.size
        end = self._s.length if self.settings.cache == "prefix" else self._s.end_of(block)
        return max(start - self.shift, 0), end

    def next_runs(self, block: int) -> list[Positions]:
        """The positions that the next forward runs, whose first masks are in `block`; it then becomes the last forward."""
        last, self.last = self.last, block
        if self.settings.cache == "none":
            return [(0, self._s.length)]
        refresh = self.settings.refresh
        if last < 0 or (last != block if refresh is None else self.since() >= refresh):
            self.made_at = self._s.decided
            return [(0, self._s.length)]
        return self.between(last, block)

    def between(self, last: int, block: int) -> list[Positions]:
        """The positions that a forward in `block` runs after one in `last`, when the cache is not rebuilt."""
        (first, middle), (start, end) = sorted((self.window(last), self.window(block)))
        return [(first, max(middle, end))] if start <= middle else [(first, middle), (start, end)]

    def since(self) -> int:
        """The number of tokens that were revealed since the cache was made."""
        return self._s.decided - self.made_at


Visible = list[tuple[int, int, int]]
"""What a node sees: positions [low, high) in the columns from the third number on."""
Draft = tuple[int, int]
"""A position, and the token that may be revealed there."""


@dataclass(slots=True)
class Node:
    """A canvas with some drafts; it continues the node `before`. `gone` are the numbers that its drafts have among the masks of
    the canvas. `block` is that of its first mask, `visible` what it sees. `asked` are the stretches that it answers: (block,
    first position, end, number of picks, whether these are all of the block's masks)."""

    drafts: frozenset[Draft]
    before: int
    gone: list[int]
    block: int = 0
    visible: Visible = field(default_factory=list)
    asked: list[tuple[int, int, int, int, bool]] = field(default_factory=list)

    def nth_mask(self, holes: Sequence[int], number: int) -> int:
        """The position of its mask with this number, or of its last one."""
        at = min(number, len(holes) - len(self.gone) - 1)
        for index in self.gone:
            at += index <= at
        return holes[at]

    def masks(self, holes: Sequence[int], low: int, high: int) -> list[int]:
        """Its masks at positions [low, high)."""
        first, end = bisect_left(holes, low), bisect_left(holes, high)
        gone = self.gone[bisect_left(self.gone, first) : bisect_left(self.gone, end)]
        positions = list(holes[first:end])
        for index in reversed(gone):
            del positions[index - first]
        return positions

    def evictions(self, window: Positions) -> list[tuple[int, int, int]]:
        """Columns beside the canvas to copy into it, but those that the next forward's window runs: (from, to, count) each."""
        return [
            (at + low - first, low, high - low)
            for first, end, at in self.visible
            for low, high in ((first, min(end, window[0])), (max(first, window[1]), end))
            if low < high and at != first
        ]


class NodeLayout:
    """Where the nodes of a round stand: builds the rows and stretches of an ask, node after node; the root runs `runs`. Each node
    answers its `best` surest masks in each of the first blocks that hold `count` of its masks."""

    def __init__(
        self, s: Canvas, nodes: Sequence[Node], windows: Windows, runs: Sequence[Positions], *, count: int, best: int
    ) -> None:
        self._s, self._count, self._best, self._fresh = s, count, best, windows.fresh
        self._shift, self.asked = windows.shift, windows.ask()
        self._column = s.length  # nodes stand beside the canvas
        for number, node in enumerate(nodes):
            node.block = s.block(node.nth_mask(s.holes, 0))
            if windows.settings.cache == "none":  # a whole canvas of its own
                first = self.asked.run(self._canvas(node), 0, s.length, column=0, below=s.length, node=number)
                self._ask(node, [(first, 0, s.length)])
            elif not number:  # the canvas itself, in its own columns
                node.visible = [(0, s.length, 0)]
                self._run(0, node, runs, beside=False)
            else:  # beside the canvas: it sees what the node before it sees, except what it runs itself
                before, column = nodes[node.before], self._column
                own, node.visible = windows.between(before.block, node.block), before.visible
                for low, high in own:
                    node.visible = overlay(node.visible, low, high, column)
                    column += high - low
                self._run(number, node, own, beside=True)

    def _run(self, number: int, node: Node, runs: Sequence[Positions], *, beside: bool) -> None:
        sees, parts, canvas = columns_of(node.visible), [], self._canvas(node)
        for low, high in runs:
            column = self._column if beside else low
            first = self.asked.run(canvas, low, high, column=column, node=number, sees=sees)
            if beside:
                self._column += high - low
            # The positions that these rows predict.
            parts.append((first, low + self._shift if low else 0, high + self._shift))
        self._ask(node, parts)

    def _canvas(self, node: Node) -> Ints:
        """The tokens of a node, HOLE at masks."""
        if not node.drafts:
            return self._s.canvas
        canvas = self._s.canvas.copy()
        for position, token in node.drafts:
            canvas[position] = token
        return canvas

    def _ask(self, node: Node, parts: Sequence[tuple[int, int, int]]) -> None:
        """Ask about a node's masks: `parts` are spans, and the positions [low, high) that each can tell."""
        s, block = self._s, node.block
        end = s.end_of(s.block(node.nth_mask(s.holes, self._count - 1)))
        while (start := s.origin + block * s.size if block else 0) < end:
            stop = s.end_of(block)
            total = len(node.masks(s.holes, start, stop))
            for first, can_low, can_high in parts if total else ():
                low, high = max(start, can_low), min(stop, can_high)
                if low < high and (masks := node.masks(s.holes, low, high)):
                    best = min(self._best, len(masks))
                    draw = s.revealed + len(node.gone) if self._fresh else 0
                    self.asked.read(first, masks, best=best, draw=draw)
                    node.asked.append((block, low, high, best, len(masks) == total))
            block += 1


def overlay(visible: Visible, low: int, high: int, column: int) -> Visible:
    """A visible in which the positions [low, high) stand in the columns from `column` on."""
    parts: Visible = []
    for first, end, at in visible:
        if first < low:
            parts.append((first, min(end, low), at))
        if end > high:
            start = max(first, high)
            parts.append((start, end, at + start - first))
    return sorted([*parts, (low, high, column)])


def columns_of(visible: Visible) -> list[int]:
    """The columns of a visible as stretches [low, high), the empty ones last. Drafts reach two blocks. So five stretches are
    the most: what is before the first block, between the two and behind the second, and each block where it was last run."""
    stretches: list[list[int]] = []
    for low, high in sorted((at, at + end - first) for first, end, at in visible if first < end):
        if stretches and stretches[-1][1] == low:
            stretches[-1][1] = high
        else:
            stretches.append([low, high])
    assert len(stretches) <= MOST_STRETCHES, f"a node sees {len(stretches)} stretches of columns"
    return [number for stretch in stretches for number in stretch] + [0] * 2 * (MOST_STRETCHES - len(stretches))
