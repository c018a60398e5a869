"""Builds a running decoder from its settings, which name what runs them (`runs`); its module is imported only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from draftmill.decoders.backbones.base import Model, Running
from draftmill.decoders.backbones.heads.files import head_place
from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from draftmill.decoders.backbones.packed import product_kind, replace_products
from draftmill.decoders.base import CachedDecoder
from draftmill.decoders.common_settings import DecoderChoice, Estimate, Sampling
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.score_engine import ScoreEngine
from draftmill.decoders.settings import check_model


def build_decoder(setup: Setup, settings: DecoderChoice) -> CachedDecoder:
    """Return a decoder with free slots. Raises ValueError, with the field path, where settings and model do not fit."""
    check_model(settings, setup.info)
    settings.check_sampling(setup.sampling)
    return Engine(setup, algorithm_of(setup, settings))


def algorithm_of(setup: Setup, settings: DecoderChoice) -> Algorithm:
    return resolve_name(settings.runs)(setup, settings)


def build_scorer(setup: Setup, settings: DecoderChoice, estimate: Estimate) -> CachedDecoder:
    """Return what scores texts, with free slots. Raises ValueError, with the field path, where settings and model do not fit."""
    check_model(settings, setup.info)
    algorithm: Algorithm = resolve_name(settings.scorer)(setup, settings, estimate)
    # The model's own distribution scores; at temperature 0 its first choice is known beside it, and there is no noise.
    plain = replace(setup, sampling=Sampling(temperature=0.0), heads=None, drafter=None, trace=False)
    return ScoreEngine(plain, algorithm) if algorithm.estimates else Engine(plain, algorithm)


def find_heads(settings: DecoderChoice, folder: Path, backbone: Model) -> DraftHeads | None:
    """Load the draft head that the settings name onto the device of the model that drafts, the one in `folder`. 'auto' is the
    head in that folder, if any. Raises ValueError if the named place has no head, none for this decoder, or one that does not
    fit the model."""
    place = head_place(settings, folder)
    heads = None if place is None else load_heads(*place)
    if heads is None:
        return None
    width = heads.sizes()["width"]
    if width != backbone.width:
        raise ValueError(f"decoder.head: made for models of width {width}, but this model has {backbone.width}")
    heads = heads.to(device=backbone.device, dtype=backbone.dtype)
    kind = product_kind(Running(backbone.dtype, backbone.device, backbone.exact))
    if backbone.min_rows == 1 and kind is not None:
        # The model's rows need no padding to keep their bits: the head's must not need any, either.
        replace_products(heads, kind)
    return heads
