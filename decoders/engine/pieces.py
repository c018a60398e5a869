"""Cuts prompts into pieces, so that a forward runs no more rows of prompts than a budget allows beside those that decode.

    budget 512          step 1             step 2            step 3
    A  prompt of 300    300, its first ask decodes           decodes
    B  prompt of 900    212 rows           512 rows          176 rows, its first ask

A piece is leading rows of a prompt about which nothing is answered: it writes their columns and raises `cached`, as columns do
that are taken over from another sample (prefixes.py). So the decoder's generator starts when only the rest is left, and notices
nothing. The same rules say where a prompt can be cut: anywhere in a causal model, between blocks in block diffusion, nowhere in
an any-subset model, whose prompt sees all of itself. The pieces of a prompt and its first ask are one evaluation.

Source of the idea: Agrawal et al., "Sarathi" (2023), section 4: chunked prefills beside decodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import FAR, Ask, Named, wide_span
from draftmill.decoders.engine.samples import Sample

DEVICE_ROWS: Final = 2048
"""Rows of prompts in a forward on a device, unless another number is given. They take several times as long to compute as the
weights take to read (about 300 rows take as long on an H100 in bfloat16, by its data sheet): cutting costs little."""

_NO_ROWS: Final = Named([], [], [], [], [], [], 0, 0)


def rows_left(sample: Sample, algorithm: Algorithm) -> int:
    """How many rows of its prompt the sample has still to run, with those that are scored; at least one."""
    return max((sample.length if algorithm.scores else sample.prompt) - sample.cached, 1)


def piece_within(sample: Sample, algorithm: Algorithm, budget: int) -> int:
    """How many leading rows of the rest of its prompt, at most `budget`, may run without its end."""
    most, grain = algorithm.shared(sample), algorithm.grain
    if grain == WHOLE:
        return 0
    end = min(sample.cached + budget, most)
    return max(end - end % grain - sample.cached, 0)


def deal(waiting: Iterable[Sample], algorithm: Algorithm, budget: int) -> list[Sample]:
    """Divide the budget among samples in their order: which of them run rows in the next forward.

    Those with a `piece` run that many rows of their prompts, the others all that is left. What can't be cut waits until it fits,
    or runs as the only one: something runs in any case.
    """
    dealt, left = list[Sample](), budget
    for sample in waiting:
        rows, is_first = rows_left(sample, algorithm), not dealt
        if rows > left:
            most = max(left, algorithm.grain) if is_first else left
            sample.piece = piece_within(sample, algorithm, most)
            if not (sample.piece or is_first):
                break
        dealt.append(sample)
        left -= sample.piece or rows
        if left <= 0:
            break
    return dealt


def ask_of_piece(sample: Sample, algorithm: Algorithm) -> Ask:
    """The rows of the piece that the sample runs now, as its prompt has them."""
    start, count = sample.cached, sample.piece
    tokens = sample.tokens[start : start + count]
    if algorithm.kind == "blocks":
        return Ask(0, tokens, wide_span(count, start, start, 0, 0, grain=algorithm.grain), (), named=_NO_ROWS)
    return Ask(0, tokens, (count, start, start, 0, 0, FAR, 0, 0, 0), ())


def ran_ahead(sample: Sample) -> None:
    """The piece of the sample has run."""
    sample.cached += sample.piece
    sample.ask, sample.piece = None, 0
