"""What an engine must know of a decoder: its generator, and how its samples share a batch. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.draws.settings import Note
from draftmill.decoders.engine.asks import Ask, Decoding
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.samples import Sample

WHOLE: Final = 0
"""As `cut_multiple`: a prompt is taken over from another sample as a whole or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`decode` makes the generator of a sample that has at least one hole; `sample` is the kind of sample that it works on.

    How samples share a batch. `window` is how many ranks from the first undecided one on may be asked about at one time.
    `columns` are those of a canvas length. `reusable` is how many leading columns of a prompt can at most be in place before the
    first ask: taken over from another sample whose prompt begins alike, or run in chunks (scheduler.py); by default all but the
    last, whose row predicts the first hole. A multiple of `cut_multiple` of them, or with WHOLE all or none. The first ask runs
    the rest, at least one row. `has_prompt`: whether a
    sample's first forward runs a prompt; with `joins_prompts` that of a few new samples may run along with the others' forward.
    Where nothing is kept (`keeps` is false) each canvas of a sample has one slot for the time of a forward, up to
    `num_slots`. `nodes`: canvases of a sample stand beside each other in its slot.

    How tokens are drawn. `notes` are what answers tell of each row, by the distribution that it is drawn from if `warped`, else
    by the model's own; with `measured` the last of them is, at temperature 0, of the distribution after top-k and top-p. With
    `fresh` each step draws anew, and answers have `ahead` more draws. `by_ratio`: drafts are accepted with probability min(1,
    (p/q)^temper), by default if the sampling settings say so. `keeps_laws`: its drafts have a distribution, which the rejection
    rule reads, kept in `banks` of a window each; `names_laws`: the decoder names it. `knows_logprob`: the log-probabilities of
    its tokens add up to that of the text. With `scores` the samples have tokens to score where others have holes; `estimates`: by
    several canvases each (score_engine.py).

    `follows` gives the ask after the present one of a sample, before the present one's token is read (asks.UNREAD); None where
    that token ends the text. With it the host packs a forward while a GPU runs the one before it (engine.py).

    `auto` chooses the number of drafts by time (auto.py); None if it is fixed. `probe` makes the generator of a probe
    (Request.probe); None if the decoder answers none. With a `guidance` w the logits of a row are u + (w + 1) (c - u), its own c
    and its partner's u, and a forward counts as two. `windows` says that the drafting model is a diffusion model which runs whole
    windows: as short as they can be, or full. With `reads_states` it is a draft head, which reads states of the target's layers.
    """

    decode: Callable[[Any], Decoding]
    kind: Literal["causal", "any_subset", "blocks", "masked"] = "causal"
    sample: Callable[..., Sample] = Sample
    window: int = 1
    columns: Callable[[int], int] = lambda length: length
    reusable: Callable[[Sample], int] = lambda sample: sample.prompt - 1
    cut_multiple: int = 1
    has_prompt: Callable[[Sample], bool] = lambda sample: True
    joins_prompts: bool = True
    keeps: bool = True
    num_slots: int = 1
    nodes: bool = False
    notes: tuple[Note, ...] = ()
    warped: bool = False
    measured: bool = False
    fresh: bool = False
    ahead: int = 0
    by_ratio: bool | None = None
    temper: float = 1.0
    keeps_laws: bool = False
    names_laws: bool = False
    banks: int = 1
    knows_logprob: bool = True
    scores: bool = False
    estimates: bool = False
    follows: Callable[[Any], Ask | None] | None = None
    auto: AutoLength | None = None
    windows: Literal["short", "full"] | None = None
    reads_states: bool = False
    guidance: float = 0.0
    probe: Callable[[Any], Decoding] | None = None


def no_prompt(sample: Sample) -> bool:
    """As `has_prompt`: no. The first forward of a sample has as many rows as its others, so new samples join at once."""
    return False


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
