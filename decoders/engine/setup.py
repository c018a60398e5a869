"""The arguments from which every decoder is built, apart from its own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops

if TYPE_CHECKING:
    from draftmill.decoders.backbones.base import Model
    from draftmill.decoders.backbones.heads.markov import DraftHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The model, the sampling settings, the batch size, and arguments that only some decoders use.

    A batch has at most `max_rows` samples and `max_tokens` cached columns. `heads` serve the any-subset decoders and `specdiff`,
    `stops` those that write from left to right, a `drafter` (a model of the same vocabulary) `speculative` and `specdiff`.
    `drafter_info` gives the drafter's longest text; without it, that of the model applies. With `trace` every outcome has the
    steps that led to it. `has_constraints`: a request may have one, or penalties.

    `prompt_rows` bounds the rows of prompts that run in one forward beside the rows of samples that decode; longer prompts run
    in chunks (scheduler.py). None: `DEVICE_ROWS` or more where attention reads rows by a kernel; else prompts run whole, and
    apart from the others unless they are few.
    """

    backbone: Model
    info: ModelInfo
    sampling: Sampling
    max_rows: int
    max_tokens: int
    stops: Stops | None = None
    heads: DraftHeads | None = None
    drafter: Model | None = None
    drafter_info: ModelInfo | None = None
    trace: bool = False
    prompt_rows: int | None = None
    has_constraints: bool = False
