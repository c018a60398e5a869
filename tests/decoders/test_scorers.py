"""Every family has one decoder that scores texts, and it is found from any of the family's decoders."""

from pkgutil import resolve_name
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from draftmill.actors.loop.loading import most_canvases
from draftmill.actors.task import Score
from draftmill.decoders.base import ModelKind
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.settings import DECODERS, DecoderSettings, scorer_of

MINIMAL: dict[str, dict[str, Any]] = {"specdiff": {"drafter": {"path": "m"}}}


def settings_of(kind: str, **more: Any) -> DecoderChoice:
    adapter: TypeAdapter[Any] = TypeAdapter(DecoderSettings)
    found = adapter.validate_python({"kind": kind} | MINIMAL.get(kind, {}) | more)
    assert isinstance(found, DecoderChoice)
    return found


@pytest.mark.parametrize("family", get_args(ModelKind))
def test_each_kind_of_models_has_one_decoder_that_scores(family):
    (kind,) = (name for name, one in DECODERS.items() if one.runs_on == family and "score" in one.tasks)
    assert callable(resolve_name(DECODERS[kind].scorer))
    for name, one in DECODERS.items():
        if one.runs_on == family:
            assert scorer_of(settings_of(name)).name() == kind


def test_what_scores_keeps_the_settings_that_a_score_depends_on():
    drafting = settings_of("s2d2", block_size=4, causal_cache=True, fused=True, tau=0.5)
    assert scorer_of(drafting) == settings_of("block_diffusion", block_size=4, causal_cache=True)
    assert scorer_of(settings_of("stepwise", tokens_per_step=4)) == settings_of("stepwise")


def test_a_row_has_as_many_canvases_as_its_score_has_samples():
    task = Score.model_validate({"kind": "score", "estimate": {"samples": 16}}, strict=True)
    for kind, expected in (("stepwise", 80), ("any_subset", 5), ("autoregressive", 5)):
        assert most_canvases(task, settings_of(kind), 5) == expected  # type: ignore[arg-type]
    assert most_canvases(Score(kind="score"), settings_of("ancestral"), 2) == 256  # type: ignore[arg-type]
