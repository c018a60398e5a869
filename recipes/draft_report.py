"""Measures a draft head of `specdiff` on held-out files, and writes the figures into the drafter's README."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from draftmill.decoders.backbones.heads.markov import DraftHeads
from draftmill.decoders.base import CachedDecoder, Outcome, Request
from draftmill.decoders.causal.settings import SpecDiffSettings
from draftmill.decoders.common_settings import DrafterPlace, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from recipes.corpus import TokenStream
from recipes.evaluation import window_indices
from recipes.frozen_pair import Pair, PairRows, draft_law, join, read_rows, target_law
from recipes.head_training import acceptance

HEADING = "## Draft head"
GAMMA = 8
STEPS = (1, 2)
LENGTH, NUM_PROMPT = 128, 64
BATCH_ROWS = 1024


@dataclass(frozen=True)
class Drafted:
    """Decoding held-out prompts: drafts accepted per round, tokens per forward of the target, forwards of the drafter."""

    accepted: float
    tokens_per_forward: float
    draft_forwards: float


@dataclass(frozen=True)
class Case:
    """How texts were decoded."""

    temperature: float
    acceptance: Literal["coupled", "rejection"]
    steps: int


CASES = (
    # At temperature 0 the two rules are one.
    *(Case(0.0, "coupled", steps) for steps in STEPS),
    *(Case(1.0, "coupled", steps) for steps in STEPS),
    *(Case(1.0, "rejection", steps) for steps in STEPS),
)


@dataclass(frozen=True)
class HeadReport:
    """`by_place` the mean acceptance of the first to the last mask, `decoded` by case; each without the head and with it."""

    by_place: tuple[list[float], list[float]]
    decoded: dict[Case, tuple[Drafted, Drafted]]


# ---- measures ----------------------------------------------------------------------------------------------------


def held_out_rows(pair: Pair, stream: TokenStream, *, limit: int | None) -> PairRows:
    """The last GAMMA tokens of held-out windows as masks."""
    batches = window_indices(stream, length=LENGTH, limit=limit)
    return join([read_rows(pair, stream.ids[index], np.full(len(index), GAMMA)) for index in batches])


@torch.no_grad()
def acceptance_by_place(pair: Pair, rows: PairRows, heads: DraftHeads | None) -> list[float]:
    """Mean of sum_v min(p, q) at temperature 1, the true tokens before each draft, by how many the drafter has not seen."""
    head = None if heads is None else heads.markov
    parts = [rows.take(index) for index in torch.arange(len(rows)).split(BATCH_ROWS)]
    accepted = torch.cat([acceptance(target_law(pair, part), draft_law(pair, part, head)) for part in parts])
    places = range(int(rows.place.min()), int(rows.place.max()) + 1)
    return [float(accepted[rows.place == place].double().mean()) for place in places]


def decode(pair: Pair, stream: TokenStream, case: Case, heads: DraftHeads | None, *, limit: int | None) -> Drafted:
    """Continue the first half of held-out windows."""
    settings = SpecDiffSettings(kind="specdiff", gamma=GAMMA, steps=case.steps, drafter=DrafterPlace(path="drafter"))
    setup = Setup(
        backbone=pair.target.model,
        info=pair.target.info,
        sampling=Sampling(temperature=case.temperature, acceptance=case.acceptance),
        max_rows=16,
        max_tokens=1 << 20,
        heads=heads,
        drafter=pair.drafter.model,
        drafter_info=pair.drafter.info,
    )
    outcomes = continued(build_decoder(setup, settings), stream, limit=limit)
    num_forwards = sum(outcome.nfe for outcome in outcomes)
    return Drafted(
        accepted=sum(outcome.accepted for outcome in outcomes) / sum(outcome.iterations for outcome in outcomes),
        tokens_per_forward=sum(len(outcome.tokens) for outcome in outcomes) / num_forwards,
        draft_forwards=sum(outcome.nfe_draft for outcome in outcomes) / num_forwards,
    )


def continued(decoder: CachedDecoder, stream: TokenStream, *, limit: int | None) -> list[Outcome]:
    """What a decoder makes of the first half of held-out windows."""
    windows = np.concatenate(list(window_indices(stream, length=LENGTH, limit=limit)))
    canvases = np.where(np.arange(LENGTH) < NUM_PROMPT, stream.ids[windows], -1).astype(np.int32)
    requests = [Request(i, sample_key(0, str(i)), canvas) for i, canvas in enumerate(canvases)]
    outcomes = list[Outcome]()
    while requests or decoder.active:
        num_new = min(len(requests), decoder.room(LENGTH))
        decoder.admit(requests[:num_new])
        requests = requests[num_new:]
        outcomes += decoder.step()
    return outcomes


def measure(pair: Pair, heads: DraftHeads, stream: TokenStream, *, limit: int | None = 48) -> HeadReport:
    """All figures of the README; with `limit`, that many windows are decoded and four times as many scored."""
    rows = held_out_rows(pair, stream, limit=None if limit is None else 4 * limit)
    bare, headed = (acceptance_by_place(pair, rows, which) for which in (None, heads))
    decoded = {
        case: (decode(pair, stream, case, None, limit=limit), decode(pair, stream, case, heads, limit=limit))
        for case in CASES
    }
    return HeadReport((bare, headed), decoded)


# ---- the README --------------------------------------------------------------------------------------------------


def section(target: str, settings: dict[str, str], report: HeadReport) -> list[str]:
    """The lines of the README's section."""
    return [
        HEADING,
        "",
        f"For `specdiff` with target `{target}`: it corrects each draft for those before it in the same forward,",
        "and for differences from the target. Trained by `python -m recipes.specdiff_head` on rows of both frozen models. With",
        "another target it may help less; it never changes a text.",
        "",
        "Mean of sum_v min(p, q) at temperature 1 of the masks after held-out texts, true tokens before each:",
        "",
        *place_table(report.by_place),
        "",
        f"Drafts accepted a round of gamma = {GAMMA}, and in brackets tokens for each forward of the target, over",
        f"{LENGTH - NUM_PROMPT} tokens after the first {NUM_PROMPT} of held-out windows:",
        "",
        *_decoded_table(report),
        "",
        *(f"- {key}: {value}" for key, value in settings.items()),
    ]


def place_table(by_place: tuple[list[float], list[float]]) -> Iterable[str]:
    """The rows of a table of acceptances by place, without a head and with it."""
    places = range(1, len(by_place[0]) + 1)
    yield "| | " + " | ".join(map(str, places)) + " |"
    yield "|---|" + "---|" * len(places)
    for name, means in zip(("without", "with the head"), by_place, strict=True):
        yield f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |"


def _decoded_table(report: HeadReport) -> Iterable[str]:
    yield "| temperature | acceptance | steps | without | with the head |"
    yield "|---|---|---|---|---|"
    for case, both in report.decoded.items():
        rule = case.acceptance if case.temperature else "either"
        cells = " | ".join(f"{drafted.accepted:.2f} ({drafted.tokens_per_forward:.2f})" for drafted in both)
        yield f"| {case.temperature:g} | {rule} | {case.steps} | {cells} |"


def put_section(readme: Path, lines: list[str]) -> None:
    """Put the section into a README in place of an older one: before the section on training, or at the end."""
    text = readme.read_text() if readme.exists() else f"# {readme.parent.name}\n"
    others = re.sub(rf"(?ms)^{HEADING}\n.*?(?=^## |\Z)", "", text)
    before, mark, after = others.partition("\n## Training\n")
    rest = mark + after.rstrip("\n") + "\n" if mark else ""
    readme.write_text("\n".join([before.rstrip("\n"), "", *lines, rest]))
