"""Loads a job's networks (the model, its draft head, a drafter model), keeps them for the next job, and builds the decoder.

Every problem is a UserError or a ValueError with the field's path.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from draftmill.actors.checkpoints.models import (
    ADAPTER_FILES,
    fetch_model,
    hash_files,
    model_hash,
    tokenizer_hash,
    user_error,
)
from draftmill.actors.job import ModelPlace, RowRecipe
from draftmill.actors.rows.stop_text import stops_of
from draftmill.actors.rows.text import Tokenizer, has_tokenizer, load_tokenizer
from draftmill.actors.task import Score, Task
from draftmill.decoders.backbones.heads.files import check_heads, check_speculator, head_place, read_adapter, read_sizes
from draftmill.decoders.base import Decoder, ModelInfo
from draftmill.decoders.causal.settings import HeadDrafterSettings, MasksDrafterSettings, SpecDiffSettings
from draftmill.decoders.common_settings import DrafterPlace, Estimate
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import Place, S3Options

if TYPE_CHECKING:
    from draftmill.decoders.backbones.base import Model
    from draftmill.decoders.backbones.heads.markov import DraftHeads


T = TypeVar("T")

DRAFTER_FIELD = "decoder.drafter.path"


@dataclass(slots=True)
class ModelCache:
    """The networks that a worker has in memory, kept for its next job as far as that job needs the same ones.

    They are networks by name (`model`, `drafter`, `heads`), each with a key of everything that its loading depends on.

    `loaded` names those that were loaded since the last `keep_only`.
    """

    loaded: list[str] = field(default_factory=list)
    _held: dict[str, tuple[Hashable, Any]] = field(default_factory=dict)
    _threads: int = 0

    def keep_only(self, keys: Mapping[str, Hashable]) -> None:
        """Drop the networks that have another key, before others are loaded: both may not fit into memory.

        Drops all of them if the number of torch threads has changed: some networks prepare their products for it.
        """
        import torch

        self.loaded = []
        same_threads, self._threads = self._threads == torch.get_num_threads(), torch.get_num_threads()
        others = [name for name, (key, _) in self._held.items() if not same_threads or keys.get(name) != key]
        for name in others:
            del self._held[name]
        if others:
            free_memory()

    def take(self, name: str, keys: Mapping[str, Hashable], load: Callable[[], T]) -> T:
        """The network of that name and its key, loaded if it is not there."""
        if name in self._held:
            kept: T = self._held[name][1]
            return kept
        network = load()
        if name in keys:
            self._held[name] = (keys[name], network)
            self.loaded.append(name)
        return network

    def rest(self) -> None:
        """Empty the caches of the networks: the batches of the next job have other sizes."""
        for _, network in self._held.values():
            forget = getattr(network, "forget", None)  # draft heads have no cache
            if forget is not None:
                forget()
        free_memory()

    def clear(self) -> None:
        """Drop all networks."""
        self.loaded = []
        self._held.clear()
        free_memory()


def free_memory() -> None:
    """Give memory that nothing uses any more back to the device. Graphs would keep the model that they run."""
    import torch

    from draftmill.decoders.engine.cuda_graphs import drop_all

    drop_all()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a decoder; `heads` and `drafter` are None if unused.

    The heads belong to the drafter if there is one, else to the model.
    """

    backbone: Model
    heads: DraftHeads | None
    drafter: Model | None
    drafter_info: ModelInfo | None = None

    @property
    def exact(self) -> bool:
        """Whether results are bit-identical in any batch; on GPUs they are with `model.exact` alone."""
        return self.backbone.exact and (self.drafter is None or self.drafter.exact)


def load_networks(
    folder: Path, place: ModelPlace, decoder: DecoderSettings, *, model_cache: ModelCache | None = None
) -> Networks:
    """Load the model in `folder`, its draft heads and its drafter onto the device of `place`.

    Networks that `model_cache` holds are not loaded again; afterwards it holds the networks of this job and no others.
    """
    from draftmill.decoders.backbones.checkpoint import inspect_model
    from draftmill.decoders.backbones.load import load_backbone
    from draftmill.decoders.registry import find_heads

    model_cache = model_cache or ModelCache()
    drafter_folder = fetch_drafter(decoder, place.checkpoint.s3)
    keys = network_keys(folder, place, decoder, drafter_folder)
    model_cache.keep_only(keys)
    drafter_settings = getattr(decoder, "drafter", None)
    if drafter_folder is not None and isinstance(drafter_settings, MasksDrafterSettings):
        from draftmill.decoders.backbones.heads.adapter import adapt_masks

        mask_id = inspect_model(folder, family=place.family, mask_id=place.mask_id).mask_id
        load = partial(load_model, folder, place)
        return Networks(
            model_cache.take("model", keys, lambda: adapt_masks(load(), drafter_folder, mask_id)), None, None
        )
    backbone = model_cache.take("model", keys, lambda: load_model(folder, place))
    if drafter_folder is None:
        return Networks(backbone, model_cache.take("heads", keys, lambda: find_heads(decoder, folder, backbone)), None)
    if isinstance(drafter_settings, HeadDrafterSettings):
        from draftmill.decoders.backbones.heads.published import load_speculator

        load_head = partial(load_speculator, drafter_folder, backbone, exact=place.exact)
        head = model_cache.take("drafter", keys, load_head)
        return Networks(backbone, head.heads, head)
    device = str(backbone.device)
    load_drafter = partial(load_backbone, drafter_folder, dtype=place.dtype, device=device, exact=place.exact)
    drafter = model_cache.take("drafter", keys, load_drafter)
    heads = model_cache.take("heads", keys, lambda: find_heads(decoder, drafter_folder, drafter))
    return Networks(backbone, heads, drafter, inspect_model(drafter_folder))


def load_model(folder: Path, place: ModelPlace) -> Model:
    """Load a model, or this process's share of it: rank 0 then leads the other processes."""
    from draftmill.decoders.backbones.load import load_backbone

    load = partial(
        load_backbone,
        folder,
        family=place.family,
        dtype=place.dtype,
        device=place.device,
        exact=place.exact,
        small=place.weights,
    )
    if place.share is None:
        return load()
    from draftmill.decoders.backbones.split import SplitBackbone

    backbone = load(share=place.share)
    assert isinstance(backbone, SplitBackbone)
    if place.share.rank == 0:
        backbone.lead()
    return backbone


def network_keys(
    folder: Path, place: ModelPlace, decoder: DecoderSettings, drafter: Path | None
) -> dict[str, Hashable]:
    """What the loading of each of a job's networks depends on: `model`, `drafter` and `heads`, the last two if it has them.

    `folder` and `drafter` are the local folders of the checkpoints.
    """
    options = (place.dtype, place.device, place.share, place.exact)
    keys: dict[str, Hashable] = {"model": (folder, place.family, place.weights, *options)}
    if drafter is not None and isinstance(getattr(decoder, "drafter", None), MasksDrafterSettings):
        return {"model": (keys["model"], drafter, place.mask_id)}
    if drafter is not None:
        # A draft head shares weights with its model.
        shared = keys["model"] if isinstance(getattr(decoder, "drafter", None), HeadDrafterSettings) else None
        keys["drafter"] = (drafter, *options, shared)
    head = head_place(decoder, folder if drafter is None else drafter)
    if head is not None and read_sizes(*head) is not None:  # `auto` names a folder that may have no heads
        keys["heads"] = (head, keys.get("drafter", keys["model"]))
    return keys


def build(
    networks: Networks,
    recipe: RowRecipe,
    folder: Path,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    bounds: tuple[int | None, int | None] = (None, None),
    *,
    unit_rows: int = 1,
    trace: bool = False,
) -> Decoder:
    """Return the decoder for the task, with the model in `folder`. ValueError, with the field's path, if both do not fit.

    `bounds` are max_rows and max_tokens; None is chosen for the device, and for units of up to `unit_rows` rows.
    """
    from draftmill.decoders.engine.cuda_graphs import rows_of_launches
    from draftmill.decoders.engine.setup import Setup
    from draftmill.decoders.registry import build_decoder, build_scorer

    task, sampling, backbone = recipe.task, recipe.sampling, networks.backbone
    on_gpu = backbone.device.type != "cpu"
    most = most_canvases(task, recipe.decoder, unit_rows)
    max_rows = bounds[0] or auto_rows(most, gpu_rows=rows_of_launches(backbone.num_weights) if on_gpu else None)
    has_constraints = getattr(task, "constraint", None) is not None or recipe.columns.constraint is not None
    setup = Setup(
        backbone=backbone,
        info=info,
        sampling=sampling,
        max_rows=max_rows,
        max_tokens=bounds[1] or max_rows * (2048 if on_gpu else 512),
        stops=stops_of(task, sampling, folder, tokenizer, info),
        heads=networks.heads,
        drafter=networks.drafter,
        drafter_info=networks.drafter_info,
        trace=trace,
        has_constraints=has_constraints or bool(sampling.changes_logits),
    )
    if isinstance(task, Score):
        return build_scorer(setup, recipe.decoder, task.estimate or Estimate())
    return build_decoder(setup, recipe.decoder)


def load_decoder(
    place: ModelPlace,
    recipe: RowRecipe,
    threads: int,
    bounds: tuple[int | None, int | None],
    *,
    model_cache: ModelCache | None = None,
    **more: Any,
) -> tuple[Decoder, Networks, Tokenizer | None, ModelInfo]:
    """Fetch and load the model, and build the decoder (`more` as in `build`); UserError or ValueError if that fails."""
    import torch

    from draftmill.decoders.backbones.checkpoint import inspect_model

    torch.set_num_threads(threads)
    folder = fetch_model(place.checkpoint, place.revision, adapter=place.adapter)
    info = inspect_model(folder, family=place.family, mask_id=place.mask_id)
    tokenizer = load_tokenizer(folder, place.tokenizer, trust_remote_code=place.trust_remote_code)
    networks = load_networks(folder, place, recipe.decoder, model_cache=model_cache)
    return build(networks, recipe, folder, tokenizer, info, bounds, **more), networks, tokenizer, info


def auto_rows(unit_rows: int, *, gpu_rows: int | None) -> int:
    """Slots of a worker for `max_rows: auto`; `unit_rows` are the canvases of its largest unit.

    A CPU gains little beyond 64 rows, and slots that the two units it holds can't keep full are wasted. A GPU gains by every row
    until its work takes as long as the launches do, at `gpu_rows` rows: a small model has half as many slots, of two rows each.
    """
    if gpu_rows is None:
        return max(16, min(64, unit_rows))
    return min(gpu_rows // 2, 2 * unit_rows)


def most_canvases(task: Task, decoder: DecoderSettings, rows: int) -> int:
    """How many canvases these rows may have: one each, or the samples of an estimated score."""
    if not isinstance(task, Score) or not decoder.estimates:
        return rows
    return rows * (task.estimate or Estimate()).samples


def fetch_drafter(decoder: DecoderSettings, s3: S3Options) -> Path | None:
    """The local folder of the drafter model, fetched if necessary; None if there is no separate drafter."""
    drafter = getattr(decoder, "drafter", None)
    if not isinstance(drafter, DrafterPlace | MasksDrafterSettings) or drafter.path is None:
        return None
    return fetch_model(Place(drafter.path, s3), drafter.revision, field=DRAFTER_FIELD)


def check_drafter(
    drafter: Path,
    model: Path,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    place: ModelPlace,
    *,
    decoder: DecoderSettings,
) -> str:
    """Return the drafter's hash; UserError unless it can draft for this model, with the required head.

    `specdiff` needs a masked-diffusion model, `s2d2` a block-diffusion one, `speculative` a causal one, or a head or an adapter
    made for the target model; all need its vocabulary.
    """
    from draftmill.decoders.backbones.checkpoint import inspect_model, read_config
    from draftmill.decoders.backbones.families.table import find_family

    try:
        if isinstance(getattr(decoder, "drafter", None), HeadDrafterSettings):
            check_speculator(drafter, model, info)
            return model_hash(drafter)
        if isinstance(getattr(decoder, "drafter", None), MasksDrafterSettings):
            config = read_config(model)
            read_adapter(drafter, find_family(config, info.family).shape(config))
            return hash_files(drafter, [drafter / name for name in ADAPTER_FILES])
        drafter_info = inspect_model(drafter)
        _check_kind(drafter, drafter_info, decoder)
        if tokenizer_hash(drafter) != tokenizer_hash(model, place.tokenizer):
            _check_vocabulary(drafter, drafter_info, info, tokenizer, place)
        check_heads(decoder, drafter)
        return model_hash(drafter)
    except ValueError as error:  # checks of a checkpoint name model.path
        refusal = user_error(error, DRAFTER_FIELD)
        field = refusal.field if (refusal.field or "").startswith("decoder.") else DRAFTER_FIELD
        raise UserError(refusal.message, field=field) from None


def _check_kind(drafter: Path, drafter_info: ModelInfo, decoder: DecoderSettings) -> None:
    family = f"{drafter} is of family {drafter_info.family!r}, which is not a"
    if not isinstance(decoder, SpecDiffSettings):
        wanted = "block-diffusion" if decoder.runs_on == "blocks" else "causal"
        if drafter_info.kind != ("blocks" if decoder.runs_on == "blocks" else "causal"):
            raise ValueError(f"{family} {wanted} model")
        return
    from draftmill.decoders.backbones.families.table import masked_diffusion_families

    if drafter_info.family not in masked_diffusion_families():
        raise ValueError(f"{family} masked-diffusion model; allowed: {', '.join(masked_diffusion_families())}")
    decoder.check_drafter(drafter_info)


def _check_vocabulary(
    drafter: Path, drafter_info: ModelInfo, info: ModelInfo, tokenizer: Tokenizer | None, place: ModelPlace
) -> None:
    """Check that each id is the same token in both vocabularies, except the mask; other parts of tokenizers may differ.

    MDLM and SEDD have no tokenizer files: only their number of ids is known, and the last id is the mask.
    """
    size, mask_id = drafter_info.vocab_size, drafter_info.mask_id
    if tokenizer is None or (mask_id is not None and not has_tokenizer(drafter)):
        if info.vocab_size not in {size, size - (mask_id == size - 1)}:  # with and without the mask
            raise ValueError(f"{drafter} has {size} ids, the model {info.vocab_size}")
        return
    other = load_tokenizer(drafter, trust_remote_code=place.trust_remote_code)
    assert other is not None
    both = tokenizer.vocabulary().items() ^ other.vocabulary().items()
    differing = sorted(token for token, number in both if number != mask_id)
    if differing:
        raise ValueError(
            f"the vocabularies of {drafter} and of the model differ, for example in the token {differing[0]!r}; "
            "a drafter needs the same tokens under the same ids"
        )
