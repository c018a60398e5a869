"""Fetches checkpoints into local folders, and computes the hashes that identify them in a job.

A path is `builtin:NAME`, a local folder, `s3://bucket/prefix` or a hub id; or a `*.gguf` file in one of the last three, which is
converted. A LoRA adapter of PEFT is merged into its checkpoint. Both happen once, in another process, into a cached folder. Only
weights in safetensors or GGUF, JSON and tokenizer files are fetched, never code. Reads no tensor, and does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from draftmill.actors.checkpoints.gguf_files import gguf_folder, is_gguf
from draftmill.actors.checkpoints.made_folders import (
    cache_folder,
    make_once,
    make_whole,
    read_source,
    remember,
    run_maker,
)
from draftmill.storage.errors import UserError
from draftmill.storage.json_text import read_object
from draftmill.storage.stores.store import Place, Stat, Store, about, is_local, open_store

FIELD = "model.path"
BUILTIN = Path(__file__).resolve().parents[2] / "decoders" / "builtin"
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "vocab.txt", "merges.txt", "*.jinja")

ADAPTER_FIELD = "model.adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MERGER = 1
"""Version of the merging, a part of the adapter's hash; increase it when merging gives other numbers."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")
_HEAD_FILES = ("draft_head.json", "draft_head.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_CHUNK_BYTES = 2**22


def fetch_model(
    place: Place | str, revision: str | None = None, *, adapter: str | None = None, field: str = FIELD
) -> Path:
    """Return the local folder of a checkpoint; fetches it if necessary, and caches it.

    With an adapter, returns the folder of the merged checkpoint. Raises UserError for `field` if there is no such model.
    """
    place = Place(place) if isinstance(place, str) else place
    folder = _model(place, revision, field)
    return folder if adapter is None else _with_adapter(folder, place, adapter)


def _model(place: Place, revision: str | None, field: str) -> Path:
    path, folder = place.url, Path(place.url).expanduser()
    is_here = path.startswith(("builtin:", "s3://")) or folder.is_dir() or (is_gguf(path) and folder.is_file())
    if is_here and revision is not None:
        raise UserError(
            f"{revision!r} is not allowed for {path!r}, which has no revisions; allowed: null, or a hub id as path",
            field=field.removesuffix("path") + "revision",
        )
    if path.startswith("builtin:"):
        name, known = path.removeprefix("builtin:"), builtin_models()
        if name not in known:
            allowed = ", ".join(f"builtin:{other}" for other in known) or "none are installed"
            raise UserError(f"{path!r} does not exist; allowed: {allowed}", field=field)
        return BUILTIN / name
    if is_gguf(path) and not folder.is_dir():
        return gguf_folder(_gguf_file(place, revision, field), field)
    return _folder(place, revision, field, "builtin:NAME, a folder, s3://..., or a hub id")


def _folder(place: Place, revision: str | None, field: str, allowed: str) -> Path:
    """A folder on this machine, or a copy of one on S3 or on the hub."""
    path, folder = place.url, Path(place.url).expanduser()
    if path.startswith("s3://"):
        return _from_s3(place, field)
    if folder.is_dir():
        return folder.resolve()
    if not is_local(path) or not _HUB_ID.fullmatch(path) or folder.exists():
        raise UserError(f"{path!r} is not a folder; allowed: {allowed}", field=field)
    return _from_hub(path, revision, field)


def adapter_hash(folder: Path) -> str | None:
    """SHA-256 of the adapter that is merged into the checkpoint in this folder; None if there is none."""
    digest = (read_source(folder) or {}).get("adapter")
    return None if digest is None else str(digest)


def builtin_models() -> list[str]:
    """Names of the models that ship with the project."""
    return sorted(place.name for place in BUILTIN.iterdir() if (place / "config.json").is_file())


def model_hash(folder: Path, hashed: Callable[[int], None] | None = None) -> str:
    """SHA-256 over config.json, the weight files and the draft head, if any; depends on the content, not on the path.

    For a folder made from a GGUF file, it is a hash of that file; for one with a merged adapter, the hash of the checkpoint
    without it. Raises UserError if the checkpoint is incomplete. `hashed` as in hash_files.
    """
    source = read_source(folder)
    if source is not None:
        return str(source["weights"])
    from draftmill.decoders.backbones.checkpoint import weight_files

    try:
        weights = weight_files(folder)
    except (ValueError, KeyError, OSError) as error:
        raise user_error(error, FIELD) from None
    heads = [folder / name for name in _HEAD_FILES if (folder / name).is_file()]
    return hash_files(folder, [folder / "config.json", *weights, *heads], hashed)


def tokenizer_hash(folder: Path, setting: str = "auto") -> str:
    """SHA-256 over the tokenizer's files, or `none` if `setting` (as in model.tokenizer) is `none`."""
    if setting == "none":
        return "none"
    place = folder if setting == "auto" else Path(setting).expanduser()
    return hash_files(place, [place / name for name in TOKENIZER_FILES if (place / name).is_file()])


def hash_files(folder: Path, files: Iterable[Path], hashed: Callable[[int], None] | None = None) -> str:
    """SHA-256 over the relative names, sizes and contents of files; remembered, since models are large.

    Calls `hashed` with each number of bytes read, and not at all if the files are known.
    """
    ordered = sorted(files)
    names = [str(file.relative_to(folder)) for file in ordered]

    def compute() -> str:
        digest = hashlib.sha256()
        for file, name in zip(ordered, names, strict=True):
            with file.open("rb") as stream:
                digest.update(f"{name}\0{file.stat().st_size}\0".encode())
                while data := stream.read(_CHUNK_BYTES):
                    digest.update(data)
                    if hashed is not None:
                        hashed(len(data))
        return digest.hexdigest()

    try:
        return remember("\0".join(["files", *names]), ordered, compute)
    except OSError as error:
        raise UserError(f"{error.filename or folder} can't be read: {error.strerror}", field=FIELD) from None


def user_error(error: Exception, field: str) -> UserError:
    """Turn an error of `decoders`, whose message may start with a field path, into a UserError."""
    path, colon, message = str(error).partition(": ")
    if colon and re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", path):
        return UserError(message, field=path)
    return UserError(str(error), field=field)


def _gguf_file(place: Place, revision: str | None, field: str) -> Path:
    """The local path of a GGUF file, of a copy of an S3 object, or of `owner/repository/FILE.gguf` from the hub."""
    path = place.url
    if path.startswith("s3://"):
        folder, _, name = path.rpartition("/")
        return _from_s3(place.at(folder), field, only=name) / name
    file = Path(path).expanduser()
    if file.is_file():
        return file.resolve()
    match = _HUB_FILE.fullmatch(path)
    if match is None or file.parent.is_dir():
        allowed = "a local GGUF file, s3://..., or owner/repository/FILE.gguf"
        raise UserError(f"{path!r} is not a file; allowed: {allowed}", field=field)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(match["repository"], match["file"], revision=revision))
    except (OSError, ValueError) as error:
        message = f"{path} is neither a local file nor a file on the hub: {_first_line(error)}"
        raise UserError(message, field=field) from None


def _from_hub(path: str, revision: str | None, field: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError) as error:  # the hub's own errors, including connection errors, are OSErrors
        hint = f"; did you mean 'builtin:{path}'?" if path in builtin_models() else ""
        message = f"{path!r} is neither a local folder nor an accessible hub model: {_first_line(error)}{hint}"
        raise UserError(message, field=field) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _from_s3(place: Place, field: str, *, only: str | None = None) -> Path:
    """A copy in the cache, named by the objects' etags, so each version has its own folder. `only` selects a single file."""
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    with about(field):
        store = open_store(place.at(f"s3://{bucket}"))
        names = (only,) if only is not None else PATTERNS
        found = ((stat, stat.name.removeprefix(prefix)) for stat in store.list(prefix))
        stats = [stat for stat, name in found if "/" not in name and any(fnmatchcase(name, known) for known in names)]
        if not stats:
            raise UserError(f"{place.url!r} has no model files ({', '.join(names)})", field=field)
        version = hashlib.sha256(repr([(stat.name, stat.etag, stat.size) for stat in stats]).encode()).hexdigest()[:16]
        target = cache_folder() / "models" / f"{bucket}-{version}"
        if not target.is_dir():
            make_whole(target, partial(_download, store, prefix, stats))
        return target


def _download(store: Store, prefix: str, stats: list[Stat], folder: Path) -> None:
    for stat in stats:
        with (folder / stat.name.removeprefix(prefix)).open("wb") as file:
            for start in range(0, stat.size, 2**26):
                file.write(store.get_range(stat.name, start, 2**26, etag=stat.etag))


# ---- adapters


def _with_adapter(base: Path, model: Place, adapter: str) -> Path:
    """The cache folder of the model with the adapter merged into it; creates it if necessary. The adapter may be a local folder,
    on S3 or on the hub. UserError if they can't be merged, or PEFT is missing."""
    place = _folder(model.at(adapter), None, ADAPTER_FIELD, "a folder, s3://..., or a hub id")
    _check_adapter(place, adapter, model.url)
    base_hash, digest = model_hash(base), hash_files(place, [place / name for name in ADAPTER_FILES])
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "merging an adapter needs the package peft: pip install peft (the extra `adapter` of this project); or merge it "
            "yourself (PeftModel.from_pretrained(model, adapter).merge_and_unload()), save the model, and set model.path to "
            "its folder",
            field=ADAPTER_FIELD,
        )
    versions = [importlib.metadata.version(name) for name in ("transformers", "peft")]
    name = hashlib.sha256(repr((MERGER, base_hash, digest, versions)).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        module, what = "draftmill.actors.checkpoints.merge_adapter", "merging the adapter into the model"
        run_maker(module, [str(base), base_hash, str(place), digest, str(folder)], field=ADAPTER_FIELD, what=what)

    return make_once(cache_folder() / "models" / f"adapted-{name}", make)


def _check_adapter(adapter: Path, named: str, model: str) -> None:
    """Raise UserError unless the folder has an adapter in safetensors, for this model as far as the names show.

    `model` is the model's path from the spec. Names are compared only if both are hub ids.
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(f"{named!r} is not an adapter: it has no {ADAPTER_CONFIG}", field=ADAPTER_FIELD)
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        reason = f"{named!r} has no {ADAPTER_WEIGHTS}; other formats (.bin) are not supported"
        raise UserError(reason, field=ADAPTER_FIELD)
    from draftmill.decoders.backbones.checkpoint import pointer_problem

    if problem := pointer_problem(adapter / ADAPTER_WEIGHTS) or pointer_problem(adapter / ADAPTER_CONFIG):
        raise UserError(problem, field=ADAPTER_FIELD)
    try:
        config = read_object(adapter / ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise UserError(f"{named!r}: {ADAPTER_CONFIG} can't be read: {error}", field=ADAPTER_FIELD) from None
    base = str(config.get("base_model_name_or_path") or "")
    if _is_hub_id(base) and _is_hub_id(model) and base.lower() != model.lower():
        raise UserError(
            f"{named!r} was trained on {base!r}, not on {model!r}; allowed: an adapter of that model (to merge it anyway, "
            "set model.path to a local folder)",
            field=ADAPTER_FIELD,
        )


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()
