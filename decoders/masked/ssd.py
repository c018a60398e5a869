"""`ssd`: one forward drafts what the next forwards would reveal, and the next one verifies it.

The last forward's predictions for the remaining masks are the drafts: a token for each, in the order in which they would be
revealed (blocks first, then confidence). Where each step draws anew, the n-th draft is what the n-th next step would draw and
reveal if distributions stayed as they are (Look.ahead). The first N drafts make a chain of canvases, each with one more draft,
and all of them run in one forward:

    node 0    the big _ sat _ _ .      the canvas as it is          next: cat at 2            the first draft: go on
    node 1    the big cat sat _ _ .    with the first draft         next: mat at 5            the second draft: go on
    node 2    the big cat sat _ mat .  with the first two drafts    next: on at 4             not the third: take it and stop

A node whose drafts are right reveals what `stepwise` reveals from that canvas, drafted or not. So every forward reveals between
1 and N + 1 tokens, and the text and the order of revealing are those of `stepwise`. The predictions of the last right node are
the next drafts. With `tree: mixed` each node but the last two has one more child, which swaps the next two drafts: if only the
order of two drafts was wrong, the walk gets one token further.

With a cache, when it is rebuilt (cached_windows.py), node 0 runs the whole canvas and the other nodes run their windows in the
same forward: a window reads node 0's new keys and values in every layer, as `stepwise` would in its next forward, so a refresh is
exact. Drafts end where the next one is due: at the block's end, or with `refresh` after that many tokens, and then they
continue into the next block (ssd_nodes.py). With `dual_relaxed` they continue past it, and the cache is rebuilt after the
round: fewer forwards, but the text may differ from that of `stepwise`.

`proposed` counts nodes beside the root: NFE + `proposed` are a sample's sequence-forwards.

Source: "Self speculative decoding for diffusion large language models" (SSD, Algorithm 1, figure 4). Differs on purpose: the
first forward's own token counts; blocks after the next one give drafts too; sampling is supported as well, since a draft
reads the noise of its position and step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Decoding
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.looks import Pick
from draftmill.decoders.masked.cached_windows import Caching, Windows
from draftmill.decoders.masked.settings import SelfSpeculativeSettings
from draftmill.decoders.masked.ssd_nodes import Node, Readings, Standing, cut, moved, plant
from draftmill.decoders.masked.stepwise import caching_of, canvases_of, runs_no_prompt

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup

MOST_AHEAD: Final = 8
"""For how many steps ahead masks are drawn; later drafts are what the last of these would reveal."""


@dataclass(frozen=True, slots=True)
class Tree:
    """How `ssd` drafts: up to `drafts` of them, in a chain or `mixed`, around which cache.

    Their tokens are drawn for so many steps `ahead`.
    """

    drafts: int
    mixed: bool
    caching: Caching
    block_length: int | None
    ahead: int = 0

    @property
    def cached(self) -> bool:
        """Whether nodes share a cache."""
        return self.caching.kind != "none"

    @property
    def relaxed(self) -> bool:
        """Whether drafts continue past a refresh without making one."""
        return self.caching.kind == "dual_relaxed"

    @property
    def crosses(self) -> bool:
        """Whether drafts continue into the next block and read the existing cache there."""
        return self.relaxed or (self.cached and self.caching.refresh is not None)

    @property
    def most_nodes(self) -> int:
        """The most canvases of a sample, the root included."""
        return 1 + self.drafts + (self.drafts - 1 if self.mixed else 0)

    def stride(self, length: int) -> int:
        """How many columns a node takes beside a canvas of this length."""
        if self.block_length is None or self.caching.kind in {"none", "prefix"}:
            return length
        return min(length, self.block_length + self.caching.shift)

    def columns(self, length: int) -> int:
        """How many columns a canvas and its nodes take around a cache."""
        # The node that enters the next block runs two blocks.
        return length + (self.most_nodes - 1 + self.crosses) * self.stride(length)


def ssd(s: Canvas, tree: Tree) -> Decoding:
    """Draft, run all nodes, reveal what the right ones choose."""
    windows, readings = Windows(s, tree.caching), Readings()
    while s.holes:
        runs = windows.next_runs(s.block(s.holes[0]))
        drafts = candidates(s, tree, windows, readings)
        nodes = plant(s.holes, drafts, mixed=tree.mixed)
        near = 1 + tree.drafts + (s.size if tree.cached and tree.block_length else 0)
        standing = Standing(s, drafts, tree.caching.shift, count=near, best=tree.drafts + 1)
        stand(s, tree, windows, standing, nodes, runs)
        picks = yield standing.rows.look(ahead=tree.ahead)
        each = len(picks) // (1 + tree.ahead)
        said_A = [cut(picks[step * each : (step + 1) * each], nodes) for step in range(1 + tree.ahead)]
        news, last = walk(nodes, said_A[0], drafts, mixed=tree.mixed)
        for number in {0, last} if last else (0,):
            step = s.revealed + len(nodes[number].gone)
            readings.learn(nodes[number], [said[number] for said in said_A], step)
        if tree.cached and tree.caching.refresh is not None:
            windows.last = nodes[last].block
            s.copies = moved(nodes[last].sight, windows.window(windows.last))
        s.reveal(news, len(nodes) - 1, [token for _, token in drafts])


def candidates(s: Canvas, tree: Tree, windows: Windows, readings: Readings) -> list[tuple[int, int]]:
    """The drafts of a round, in the order in which they are expected; the last mask needs none."""
    ahead, num_open = s.block(s.length), len(s.holes)
    if tree.cached:
        ahead = s.block(s.holes[0])
        num_open = bisect_left(s.holes, s.end_of(ahead))
        if tree.crosses and num_open < len(s.holes):
            ahead = s.block(s.holes[num_open])
            num_open = bisect_left(s.holes, s.end_of(ahead))
    most = min(tree.drafts, num_open - 1)
    if tree.cached and tree.caching.refresh is not None and not tree.relaxed:
        most = min(most, tree.caching.refresh - windows.since() - 1)
    return readings.drafts(s, ahead, most)


def stand(
    s: Canvas, tree: Tree, windows: Windows, standing: Standing, nodes: Sequence[Node], runs: Sequence[tuple[int, int]]
) -> None:
    """Place all nodes; the root runs `runs`."""
    for number, node in enumerate(nodes):
        node.block = s.block(node.nth_mask(s.holes, 0))
        if not tree.cached:
            standing.alone(number, node)
        elif not number:
            standing.root(node, runs)
        else:
            before = nodes[node.before]
            standing.beside(number, node, before, windows.between(before.block, node.block))


def walk(
    nodes: Sequence[Node], said: Sequence[Sequence[Sequence[Pick]]], drafts: Sequence[tuple[int, int]], *, mixed: bool
) -> tuple[list[Pick], int]:
    """Follow the chain while a node's own choice is the next draft; returns the choices, and the last right node."""
    news, node, num = list[Pick](), 0, len(drafts)
    while True:
        choice = said[node][0][0]
        news.append(choice)
        if node < num and choice[1:3] == drafts[node]:
            node += 1
            continue
        if mixed and node <= num - 2 and choice[1:3] == drafts[node + 1]:
            # Only the order of two drafts was wrong.
            node += num + 1
            news.append(said[node][0][0])
        return news, node


def algorithm(setup: Setup, settings: SelfSpeculativeSettings) -> Algorithm:
    """How the engine runs these settings."""
    # At temperature 0 all steps draw alike.
    anew = settings.draws_anew and setup.sampling.temperature > 0.0
    k = settings.draft_length
    ahead = min(k, MOST_AHEAD) if anew else 0
    tree = Tree(k, settings.tree == "mixed", caching_of(setup, settings), settings.block_length, ahead)
    return Algorithm(
        decode=partial(ssd, tree=tree),
        kind="masked",
        canvases=canvases_of(setup, settings, num_slots=1 if tree.cached else tree.most_nodes),
        columns=tree.columns,
        sample=partial(Canvas, block_length=settings.block_length),
        has_prompt=runs_no_prompt,
    )
