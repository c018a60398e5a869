"""What an engine must know of a decoder: its generator, and how its samples share a batch. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.engine.asks import Decoding
from draftmill.decoders.engine.samples import Sample

WHOLE: Final = 0
"""As grain: a prompt is taken over from another sample as a whole or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the answers to named rows hold, and how their drafts are judged.

    `entropy`: the entropy of the drawing distribution in nats. `worth`: a measure of it and its parameter (notes.py). `by_ratio`:
    drafts are accepted with probability min(1, (p/q)^temper), else if they equal the token drawn; `cells` are then the hidden
    states that a sample keeps of its drafts. `fresh`: each step of a block draws anew (Named.number).
    """

    entropy: bool = False
    worth: tuple[str, float] | None = None
    by_ratio: bool = False
    temper: float = 1.0
    cells: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvases:
    """How masked diffusion keeps its canvases (canvases.py): each node has one of `num_slots` slots, or all share one.

    `confidence` says how sure a token is (picks.py), by the distribution that it is drawn from if `warped`. With `fresh`
    each step draws all masks anew. With `cached` the nodes stand beside the canvas in its slot; `conditioned` models are told the
    time of each canvas.
    """

    confidence: str
    num_slots: int = 1
    cached: bool = False
    conditioned: bool = False
    fresh: bool = False
    warped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`decode` makes the generator of a sample that has at least one hole.

    `window` is how many ranks from the first undecided one on may be asked about at one time. `most_auto` is the most
    drafts of a sample if their number is chosen by time, else 0; `auto_rows` and `auto_forwards` are what an iteration with 0, 1,
    .. drafts takes, `draft_forwards` those of a drafting model (budget.py). `keeps_laws`: its drafts have a
    distribution, which the rejection rule reads. `knows_logprob`: the log-probabilities of its tokens add up to that of the text.
    With `joins_prompts` the first forward of a few new samples may run along with the others' forward. `columns` are those of a
    canvas length. With `scores` the samples have tokens to score where others have holes; `estimates`: by several canvases each
    (score_engine.py).

    `shared` is how many leading columns of a prompt can at most be in place before the first ask: taken over from another sample
    whose prompt begins alike, a multiple of `grain` of them, or with grain WHOLE all or none; or run in pieces (pieces.py), which
    end at such multiples too. The first ask runs the rest, at least one row.

    `windows` says that the drafting model is a diffusion model which runs whole windows: as short as they can be, or full.
    `sample` is the kind of sample that `decode` works on, and `has_prompt` says whether a sample's first forward runs a prompt.
    `notes` are those of named rows, `canvases` is for masked diffusion.
    """

    decode: Callable[[Any], Decoding]
    kind: Literal["causal", "any_subset", "blocks", "masked"] = "causal"
    window: int = 1
    most_auto: int = 0
    auto_rows: Sequence[int] | None = None
    auto_forwards: Sequence[int] | None = None
    draft_forwards: Sequence[int] | None = None
    keeps_laws: bool = False
    knows_logprob: bool = True
    windows: Literal["short", "full"] | None = None
    joins_prompts: bool = True
    columns: Callable[[int], int] = lambda length: length
    scores: bool = False
    estimates: bool = False
    shared: Callable[[Sample], int] = lambda sample: 0
    grain: int = 1
    sample: Callable[..., Sample] = Sample
    has_prompt: Callable[[Sample], bool] = lambda sample: True
    notes: Notes = Notes()
    canvases: Canvases | None = None


def check_completion(canvas_L: NDArray[np.int32], *, scores: bool = False) -> None:
    """Raise ValueError unless the canvas [L] is a prompt of at least one token, and then holes, or tokens to score."""
    holes = canvas_L < 0
    num_prompt = int(len(holes) - holes.sum())
    if num_prompt == 0 or bool(holes[:num_prompt].any()):
        if scores:
            raise ValueError("a causal model scores the end of a text, after at least one given token")
        raise ValueError("a causal model completes a prompt of at least one token; the holes must come after it")


def without_scored(request: Request) -> NDArray[np.int32]:
    """The canvas of a text, [L], with holes where its tokens are scored; raises as Request.to_score does."""
    canvas_L = request.canvas.copy()
    canvas_L[request.to_score()] = HOLE
    return canvas_L
