"""Scores the end of a text under block diffusion: exactly at block size 1, else by a bound over random masks in each block.

The probability of a block's tokens is that of masked diffusion given the clean blocks before it. So one forward runs the clean
text up to the last block, and after it a masked copy of every block that is scored (the layout of these models' training).
Several draws share the clean text, as far as their copies take no more rows than it:

    columns       0 .. last block's start | draw 0: block 3, block 4, .. | draw 1: block 3, block 4, ..
    a row sees    its block and those before it (causal_cache: the tokens to its left)
                                          | the clean blocks before its own, and its copy

With blocks of one token each copy is a single mask, so every token's own probability is read: the score is exact.

In models that predict the next token (Fast-dLLM v2), the first token of a block is predicted by the clean row before it, as when
decoding, so it is never masked; only at position 0 there is no such row. The last block ends with the text, as in training.

Sources: Arriola et al., "Block diffusion" (BD3-LM, 2025), the bound of a sum over blocks; SDAR (Cheng et al., 2025).

Legend: L positions of a text, R rows that are read.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from draftmill.decoders.base import Request
from draftmill.decoders.blocks.settings import BlockDiffusionSettings, Rules
from draftmill.decoders.common_settings import Estimate
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import FAR, Ints, Span
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.estimates import Draw, Grouping, ScoredRows, Text, estimate_algorithm


def is_alone(rules: Rules, position_R: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which tokens the clean row before them predicts, [R]."""
    return (position_R % rules.size == 0) & (position_R > 0) & bool(rules.shift)


def grouping(request: Request, *, rules: Rules) -> Grouping:
    """Each block is a group; raises ValueError unless the end of the text is scored."""
    scored, length = request.to_score(), len(request.canvas)
    if length - int(scored[0]) != len(scored):
        raise ValueError("block diffusion scores the end of a text: all tokens from the first scored one on")
    alone = is_alone(rules, scored)
    masked = scored[~alone]
    blocks = masked // rules.size
    if not len(masked):
        return [], scored, 1
    first, last = int(blocks[0]) * rules.size, int(blocks[-1]) * rules.size
    groups = [masked[blocks == block] for block in np.unique(blocks)]
    return groups, scored[alone], max(1, last // (length - first))


def rows_of(s: Text, canvas: list[Draw], *, rules: Rules) -> ScoredRows:
    """The clean text, and behind it the masked blocks of each draw; a row's number is its column."""
    text = s.request.canvas.astype(np.int64)
    # The clean rows go up to the last block with masks, or to the last token that the row before it predicts.
    last_block = int(s.positions[-1][0]) // rules.size * rules.size if s.positions else 0
    used = max(last_block, int(s.alone[-1]) if len(s.alone) else 0)
    spans: tuple[int, ...] = Span(used, 0, 0, block=rules.grain) if used else ()
    tokens, rows = [text[:used]], []
    for draw in canvas:
        hidden, row_L = text.copy(), np.full(s.length, -1, dtype=np.int64)
        hidden[draw.masked] = rules.mask
        for block in np.unique(draw.masked // rules.size).tolist():
            start, end = block * rules.size, min((block + 1) * rules.size, s.length)
            row_L[start:end] = np.arange(used, used + end - start)
            tokens.append(hidden[start:end])
            spans += Span(end - start, used, start, start, FAR, own=used, till=used + end - start)
            used += end - start
        before_R = np.maximum(draw.asked_R - rules.shift, 0)
        rows.append(np.where(is_alone(rules, draw.asked_R), before_R, row_L[before_R]))
    asked_R = np.concatenate([draw.asked_R for draw in canvas])
    return ScoredRows(np.concatenate(tokens), spans, np.concatenate(rows), text[asked_R])


def algorithm(setup: Setup, settings: BlockDiffusionSettings, estimate: Estimate) -> Algorithm:
    assert not setup.info.prompt_block, "which blocks a text is made of is not known without its prompt"
    rules = Rules(settings, setup.info)
    return estimate_algorithm(
        settings,
        estimate,
        partial(rows_of, rules=rules),
        partial(grouping, rules=rules),
        kind="blocks",
        # The clean text, and copies that are not longer than the whole text.
        columns=lambda length: 2 * length,
    )
