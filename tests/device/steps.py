"""The decoders on a pretended GPU, and what their steps do there."""

from dataclasses import dataclass, field

import numpy as np

from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import JOB_SETTINGS, Outcome, Request, RowSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.registry import build_decoder, build_scorer
from tests.decoders.shipped import Case, facts, folder_of, setup_of
from tests.device.pretend import KINDS, Counts, pretending

OWN = [JOB_SETTINGS, RowSettings(temperature=0.0), RowSettings(temperature=1.4, top_p=0.5)]
SLOTS, LENGTH, NEW = 4, 30, 14

CASES: dict[str, Case] = {
    "autoregressive": ("ar-tiny", {"kind": "autoregressive"}),
    "speculative": ("ar-tiny", {"kind": "speculative", "k": 4}),
    "speculative, model": (
        "ar-tiny",
        {"kind": "speculative", "k": 4, "drafter": {"kind": "model", "path": "ar-micro"}},
    ),
    "speculative, suffix": ("ar-tiny", {"kind": "speculative", "k": 4, "drafter": {"kind": "suffix"}}),
    "jacobi": ("ar-tiny", {"kind": "jacobi", "block_size": 8}),
    "multiblock_jacobi": ("ar-tiny", {"kind": "multiblock_jacobi", "block_size": 8}),
    "specdiff": ("ar-tiny", {"kind": "specdiff", "gamma": 4, "drafter": {"path": "mdm-tiny"}, "head": "none"}),
    "any_subset": ("asarm-tiny", {"kind": "any_subset"}),
    "parallel": ("asarm-tiny", {"kind": "parallel"}),
    "assd": ("asarm-tiny", {"kind": "assd", "k": 5}),
    "assd, n-gram": ("asarm-tiny", {"kind": "assd", "k": 5, "drafter": "ngram"}),
    "assd, fused": ("asarm-tiny", {"kind": "assd", "k": 5, "fused": "rows"}),
    "stepwise": ("mdm-tiny", {"kind": "stepwise"}),
    "stepwise, cached": ("mdm-tiny", {"kind": "stepwise", "cache": "dual_strict", "block_length": 8}),
    "threshold": ("mdm-tiny", {"kind": "threshold"}),
    "factor": ("mdm-tiny", {"kind": "factor"}),
    "ssd": ("mdm-tiny", {"kind": "ssd", "draft_length": 2}),
    "ssd, cached": ("mdm-tiny", {"kind": "ssd", "draft_length": 2, "cache": "dual_strict", "block_length": 8}),
    "stepwise, random": ("mdm-tiny", {"kind": "stepwise", "confidence": "random"}),
    "ancestral, analytic": ("sedd", {"kind": "ancestral", "steps": 6}),
    "block_diffusion": ("block-tiny", {"kind": "block_diffusion"}),
    "s2d2": ("block-tiny", {"kind": "s2d2"}),
    "s2d2, fused": (
        "block-tiny",
        {"kind": "s2d2", "block_size": 8, "causal_cache": True, "fused": True, "head": "none"},
    ),
    "s2d2, head": ("block-tiny", {"kind": "s2d2", "block_size": 4, "causal_cache": True, "fused": True}),
    "stepwise, score": ("mdm-tiny", {"kind": "stepwise"}),
    "block_diffusion, score": ("block-tiny", {"kind": "block_diffusion", "block_size": 8}),
}
"""Name of the case: a builtin model, and the settings of a decoder, or of what scores for it."""


@dataclass(slots=True)
class Step:
    """The counts of one step, or of one sample's admission.

    `steady`: no sample came before the step, none ended in it, and it started one forward of the target: the first step after a
    pause starts its own forward and the next one, from then on each starts the next one. `ended` samples ended in it.
    """

    steady: bool
    ended: int
    launches: int
    down: int
    up: int
    waits: int
    shapes: int
    idle: int


@dataclass(slots=True)
class Found:
    """The outcomes of a case, by index, and the counts of its steps and admissions and where they come from."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    admissions: list[Step] = field(default_factory=list)
    places: str = ""

    def said(self) -> dict[int, tuple]:
        """Texts and forwards by index; a sample must not fail."""
        assert all(one.error_kind is None for one in self.outcomes.values())
        return {index: (one.tokens.tolist(), one.nfe) for index, one in self.outcomes.items()}

    @property
    def steady(self) -> list[Step]:
        return [step for step in self.steps if step.steady]


def run(
    name: str,
    *,
    requests: int = 5,
    own: bool = False,
    prompt_rows: int | None = None,
    exact: bool = False,
    **sampling,
) -> Found:
    """Decode a few samples on the pretended device, four at a time; `own`: some have sampling settings of their own.

    `prompt_rows` as in Setup, `exact` as in `load_backbone`.
    """
    found = Found()
    with pretending() as counts:
        decoder = made(name, sampling, "cuda", prompt_rows, exact=exact)
        _decode(decoder, toy_canvases(requests, name, own=own), counts, found)
        found.places = str(counts)
    return found


def run_on_cpu(name: str, *, requests: int = 5, own: bool = False, **sampling) -> Found:
    found = Found()
    _decode(made(name, sampling, "cpu"), toy_canvases(requests, name, own=own), Counts(), found)
    return found


def made(
    name: str,
    sampling: dict,
    device: str,
    prompt_rows: int | None = None,
    *,
    dtype: str = "float32",
    exact: bool = False,
):
    load = lambda model: load_backbone(folder_of(model), dtype=dtype, device=device, exact=exact)  # noqa: E731
    more = {"max_tokens": SLOTS * 512, "prompt_rows": prompt_rows}
    setup, settings = setup_of(CASES[name], Sampling.model_validate(sampling, strict=True), SLOTS, load=load, **more)
    if name.endswith("score"):
        return build_scorer(setup, settings, Estimate(samples=12))
    return build_decoder(setup, settings)


def _decode(decoder, waiting: list[Request], counts: Counts, found: Found) -> None:
    while waiting or decoder.active:
        admitted = bool(waiting) and decoder.room(LENGTH) > 0
        while waiting and decoder.room(LENGTH):
            before = counts.state()
            decoder.admit([waiting.pop(0)])
            found.admissions.append(Step(False, 0, *_since(before, counts)))
        before = counts.state()
        done = decoder.step()
        found.outcomes |= {outcome.index: outcome for outcome in done}
        found.steps.append(Step(not (admitted or done), len(done), *_since(before, counts)))


def _since(before: dict[str, int], counts: Counts) -> list[int]:
    now = counts.state()
    return [now[kind] - before[kind] for kind in (*KINDS, "idle")]


def toy_canvases(count: int, name: str, *, own: bool = False) -> list[Request]:
    """Canvases of repeated words, with holes at the end or everywhere; of two lengths, so that a slot moves and is refilled."""
    model, _ = CASES[name]
    vocab_size, rng, made = facts(model).vocab_size, np.random.default_rng(0), []
    for index in range(count):
        length = LENGTH - 6 * (index % 2)
        canvas = np.resize(rng.integers(10, vocab_size - 10, 7), length).astype(np.int32)
        if model == "asarm-tiny":
            canvas[rng.permutation(length)[: NEW - 6 * (index % 2)]] = -1
        elif not name.endswith("score"):
            canvas[LENGTH - NEW :] = -1
        settings = OWN[index % len(OWN)] if own else JOB_SETTINGS
        made.append(Request(index, 1000 + 7 * index, canvas, settings=settings, score_from=LENGTH - NEW))
    return made
