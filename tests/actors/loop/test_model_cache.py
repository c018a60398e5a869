"""The networks that a worker keeps: the next job takes those that it needs too, and the others are dropped first."""

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from draftmill.actors.job import ModelPlace
from draftmill.actors.loop.loading import ModelCache, Networks, load_networks
from draftmill.decoders.causal.settings import HeadDrafterSettings
from draftmill.storage.stores.store import Place
from tests.decoders.support import decoder_settings

BUILTIN = Path(__file__).parents[3] / "decoders" / "builtin"


def place(dtype: str = "float32") -> ModelPlace:
    return ModelPlace(Place("unused"), None, "auto", None, "auto", dtype, "cpu", False)


def take(model_cache: ModelCache, folder: Path, *, drafter: Path | None = None, dtype: str = "float32") -> Networks:
    more = {} if drafter is None else {"drafter": {"kind": "model", "path": str(drafter)}}
    settings = decoder_settings("speculative", **more)
    return load_networks(folder, place(dtype), settings, model_cache=model_cache)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    other = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(BUILTIN / "ar-micro", other)
    return BUILTIN / "ar-micro", other


@pytest.mark.slow
def test_a_model_is_loaded_again_only_for_another_folder_or_dtype(folders):
    model_cache = ModelCache()
    first = take(model_cache, folders[0])
    assert model_cache.loaded == ["model"]
    assert take(model_cache, folders[0]).backbone is first.backbone and model_cache.loaded == []
    assert take(model_cache, folders[1]).backbone is not first.backbone and model_cache.loaded == ["model"]
    assert take(model_cache, folders[1], dtype="float64").backbone.dtype is torch.float64 and model_cache.loaded == [
        "model"
    ]


@pytest.mark.slow
def test_a_drafter_stays_where_only_the_target_changes_and_goes_where_none_is_wanted(folders):
    model_cache = ModelCache()
    one = take(model_cache, folders[0], drafter=folders[1])
    assert model_cache.loaded == ["model", "drafter"]
    two = take(model_cache, folders[1], drafter=folders[1])
    assert two.drafter is one.drafter and model_cache.loaded == ["model"]
    assert take(model_cache, folders[1]).drafter is None and model_cache.loaded == []
    take(model_cache, folders[1], drafter=folders[1])
    assert model_cache.loaded == ["drafter"]


@pytest.mark.slow
def test_a_draft_head_is_loaded_again_where_its_model_is():
    drafter = HeadDrafterSettings(kind="head", path=str(BUILTIN / "ar-tiny-eagle3"))
    settings, model_cache = decoder_settings("speculative", drafter=drafter), ModelCache()

    def loaded(dtype: str) -> list[str]:
        networks = load_networks(BUILTIN / "ar-tiny", place(dtype), settings, model_cache=model_cache)
        assert networks.drafter is not None and networks.drafter.dtype is networks.backbone.dtype
        return model_cache.loaded

    assert loaded("float32") == ["model", "drafter"] and loaded("float32") == []
    assert loaded("float64") == ["model", "drafter"]


@pytest.mark.slow
def test_what_is_not_wanted_is_gone_before_anything_is_loaded(folders, monkeypatch):
    model_cache = ModelCache()
    before = weakref.ref(take(model_cache, folders[0]).backbone)
    gone: list[bool] = []
    from draftmill.decoders.backbones import load

    original = load.load_backbone

    def loading(*args: object, **kwargs: object) -> object:
        gc.collect()
        gone.append(before() is None)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "load_backbone", loading)
    take(model_cache, folders[1])
    assert gone == [True]


@pytest.mark.slow
def test_another_number_of_threads_loads_the_networks_again(folders):
    """The any-subset model prepares its products for the number of threads."""
    model_cache, threads = ModelCache(), torch.get_num_threads()
    first = take(model_cache, folders[0])
    try:
        torch.set_num_threads(threads + 1)
        assert take(model_cache, folders[0]).backbone is not first.backbone
    finally:
        torch.set_num_threads(threads)


def test_draft_heads_stay_with_their_model():
    model_cache = ModelCache()
    heads = [
        load_networks(
            BUILTIN / "asarm-tiny", place(), decoder_settings("assd", head=head), model_cache=model_cache
        ).heads
        for head in ("auto", "auto", "none")
    ]
    assert heads[0] is not None and heads[1] is heads[0] and heads[2] is None


def test_a_resting_network_has_an_empty_cache(folders):
    model_cache = ModelCache()
    backbone = take(model_cache, folders[0]).backbone
    backbone.allocate(4, 64)
    assert backbone.cache.num_slots >= 4
    model_cache.rest()
    assert backbone.cache.num_slots == 0
