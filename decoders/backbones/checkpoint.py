"""Reads a checkpoint folder without its weights: config.json, safetensors headers, and special token ids.

Knows the file layout of Hugging Face checkpoints: one model.safetensors, or shards with an index; config.json,
generation_config.json and tokenizer.json. Imports no torch: a driver needs no more of a model. load.py reads the weights.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors import SafetensorError, safe_open

from draftmill.decoders.backbones.families.config import refused
from draftmill.decoders.backbones.families.family import MASK_KEYS, Family
from draftmill.decoders.backbones.families.shares import check_shares
from draftmill.decoders.backbones.families.table import describe, find_family, turn_ends
from draftmill.decoders.backbones.quantized import find_form
from draftmill.decoders.base import ModelInfo

T = TypeVar("T")
_COUNT: Final = re.compile(r"attention_types|(num_|n_)?(hidden_|local_|routed_|shared_)?(layers?|blocks|experts)")
GENERATION_FILE: Final = "generation_config.json"
# The text model of a multimodal one: what its tensors' names begin with, and the fields of the whole config that are its own.
_TEXT_PART: Final = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=.)")
_OF_ALL_PARTS: Final = (
    "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config", "draftmill", "tie_word_embeddings",
)  # fmt: skip
_SHARD: Final = re.compile(r"[^/\\]+\.safetensors")
_LFS: Final = b"version https://git-lfs"
# Levels of objects and lists in a JSON file. Deeper ones could end any walk through them with a RecursionError.
_MOST_LEVELS: Final = 100


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, of a multimodal model the part of its text model; ValueError if it is missing or no JSON object."""
    config = read_object(folder / "config.json")
    if config is None:
        raise ValueError(f"model.path: {folder} has no config.json")
    text = config.get("text_config")
    if isinstance(text, dict) and "model_type" in text:
        return {key: value for key, value in config.items() if key in _OF_ALL_PARTS} | text
    return config


def read_generation(folder: Path) -> dict[str, Any]:
    """Return generation_config.json as a dict, empty if there is none; ValueError if it is not a JSON object."""
    return read_object(folder / GENERATION_FILE) or {}


def read_object(path: Path, field: str = "model.path") -> dict[str, Any] | None:
    """Return a JSON object; None if there is no such file. ValueError, with the spec's `field`, if it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{field}: {pointer_problem(path) or f'{path} is not JSON: {error}'}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{field}: {path} is not a JSON object")
    inner = list[Any](content.values())
    for _ in range(_MOST_LEVELS):
        parts = (one.values() if isinstance(one, dict) else one for one in inner if isinstance(one, dict | list))
        inner = [value for part in parts for value in part]
    if inner:
        raise ValueError(f"{field}: {path} nests objects and lists too deeply; allowed: {_MOST_LEVELS} levels")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, sorted; ValueError where there are none or the index names a missing one. As
    in transformers, a single file takes precedence over an index."""
    path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    index = None if single.exists() else read_object(path)
    files = [single]
    if index is not None:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"model.path: {path} has no weight_map from names of tensors to names of files")
        if strange := sorted(name for name in set(shards.values()) if not _SHARD.fullmatch(name)):
            raise ValueError(f"model.path: {path} has {strange[0]!r} in its weight_map; allowed: NAME.safetensors")
        files = [folder / name for name in sorted(set(shards.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ValueError(f"model.path: {folder} lacks {', '.join(missing)}; only safetensors checkpoints are read")
    return files


def inspect_model(folder: Path, *, family: str = "auto", mask_id: int | None = None) -> ModelInfo:
    """Describe a checkpoint from config.json and the headers of its weight files. Raises ValueError, with the field path, where
    the family is unknown, the config does not fit it, a file is damaged, or a tensor is missing, unexpected, or of another
    shape."""
    config = read_config(folder)
    bos_id(folder), stop_ids(folder)
    entry = find_family(config, family)
    check_weights(entry, config, folder)
    # The tokenizer names the mask where config.json has no id of it.
    if mask_id is None and entry.mask_token and all(config.get(key) is None for key in MASK_KEYS):
        mask_id = _added_tokens(folder).get(entry.mask_token)
    info = describe(entry, config, mask_id=mask_id)
    if entry.rows_are_tokens:
        without = ids_without_token(folder, info.vocab_size)
        info = dataclasses.replace(info, suppressed=tuple(sorted({*info.suppressed, *without})))
    return info


def stored_shape(file: Any, name: str) -> tuple[int, ...]:
    return tuple(file.get_slice(name).get_shape())


def check_weights(family: Family, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless the tensors in the weight files, once unpacked, are those that config.json describes."""
    form, shapes = find_form(config), each_tensor(folder, stored_shape, "np")
    shapes = shapes if form is None else form.dense_shapes(shapes)
    check_counts(config, shapes, folder)
    check_names(family, config, shapes, folder)


def check_split(family: str, folder: Path, count: int) -> None:
    """ValueError, with the field's path, if a model can't be split over `count` processes."""
    config = read_config(folder)
    check_shares(family, find_family(config, family).shape(config), count)


def each_tensor(folder: Path, take: Callable[[Any, str], T], framework: str) -> dict[str, T]:
    """Call `take` for every tensor of the checkpoint, opened for `framework`; ValueError where a file is damaged. Of a multimodal
    one only the text model's tensors, by their names in a checkpoint of that model alone."""
    taken: dict[str, T] = {}
    for path in weight_files(folder):
        taken |= file_tensors(path, take, framework)
    if not any(_TEXT_PART.match(name) for name in taken):
        return taken
    named = {name: _TEXT_PART.sub("" if "lm_head." in name else "model.", name, count=1) for name in taken}
    return {named[name]: value for name, value in taken.items() if named[name] != name or name.startswith("lm_head.")}


def file_tensors(path: Path, take: Callable[[Any, str], T], framework: str, field: str = "model.path") -> dict[str, T]:
    """Call `take` for every tensor of a safetensors file; ValueError, with the spec's `field`, where it is damaged."""
    try:
        with safe_open(path, framework=framework) as file:
            return {name: take(file, name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        problem = pointer_problem(path) or f"{path} is damaged or not a safetensors file: {error}"
        raise ValueError(f"{field}: {problem}") from error


def pointer_problem(path: Path) -> str | None:
    """The problem of a file that is a pointer of git-lfs; None if it is not one."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
    except OSError:
        return None
    return f"{path} is a pointer of git-lfs, not the file; run `git lfs pull` in its repository" if is_pointer else None


def check_counts(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ValueError if config.json asks for more layers or experts than the file has tensors for, before any is built. Each
    layer has a tensor of its own; experts may share one, as its first dimension."""
    num_tensors, sizes = len(shapes), {size for shape in shapes.values() for size in shape}
    for key, value in _counts(config):
        part, most = ("experts", max({num_tensors, *sizes})) if "expert" in key else ("layers", num_tensors)
        if isinstance(value, int) and value > most:
            raise ValueError(
                f"model.path: {folder}: config.json says {key} = {value:,}, but the weights have {num_tensors:,} tensors, "
                f"too few for that number of {part}"
            )


def _counts(held: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of layers and experts in a config, at any depth; GPT-Neo's attention_types repeats its lists by numbers."""
    if isinstance(held, dict):
        for name, value in held.items():
            yield from _counts(value, "attention_types" if key == "attention_types" else name)
    elif isinstance(held, list) and key == "attention_types":
        for value in held:
            yield from _counts(value, key)
    elif _COUNT.fullmatch(key):
        yield key, held


def check_names(family: Family, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ValueError where a tensor is missing, unexpected, or of another shape than config.json says."""
    expected, full = family.weight_shapes(config), family.full_names(shapes)
    optional = {family.theirs(name) for name in family.shape(config).optional()}
    shapes = {full[name]: shape for name, shape in shapes.items()}
    missing = sorted(expected.keys() - shapes.keys())
    surplus = sorted(name for name in shapes.keys() - expected.keys() - optional if not family.is_unread(name))
    wrong = sorted(name for name in expected.keys() & shapes.keys() if shapes[name] != expected[name])
    for names, problem in ((missing, "lacks the tensors"), (surplus, "has tensors unknown to the family:")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"model.path: {folder} (family {family.name!r}) {problem} {', '.join(names[:5])}{more}")
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"model.path: {folder}: {name} has shape {shapes[name]}, but config.json says {expected[name]}"
        )


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text: those of generation_config.json if it has any, else those of config.json. transformers'
    `generate` uses none if generation_config.json exists and has none. If the family's chats end a turn with another token,
    that one ends a text too. The tokenizer may add another. ValueError if an id is not a number."""
    ids, ends = _special_ids(folder, "eos_token_id"), turn_ends(read_object(folder / "config.json") or {})
    added = _added_tokens(folder) if ends else {}
    return tuple(dict.fromkeys([*ids, *(added[end] for end in ends if end in added)]))


def bos_id(folder: Path) -> int | None:
    """Return the id that begins a text, from generation_config.json or config.json; None if neither has one."""
    return next(iter(_special_ids(folder, "bos_token_id")), None)


def _special_ids(folder: Path, key: str) -> list[int]:
    """The ids under a key of generation_config.json, else of config.json; only a text's ends may be several."""
    for path in (folder / GENERATION_FILE, folder / "config.json"):
        held = read_object(path) or {}
        text, value = held.get("text_config"), held.get(key)
        value = text.get(key) if value is None and isinstance(text, dict) else value
        if value is not None:
            ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
            for token in ids:
                if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                    raise ValueError(f"model.path: {path} has {key} = {token!r}; allowed: token ids >= 0")
            return ids
    return []


def ids_without_token(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below `vocab_size` that the tokenizer gives no token, such as padding of the embedding table. The
    tokenizer is tokenizer.json, or the older vocab.json; without either the result is empty."""
    tokenizer, vocab = read_object(folder / "tokenizer.json"), read_object(folder / "vocab.json")
    with _of_tokenizer(folder):
        listed = (vocab or {}) if tokenizer is None else (tokenizer.get("model") or {}).get("vocab") or {}
        held = set(listed.values() if isinstance(listed, dict) else range(len(listed)))
    if held or tokenizer is not None:
        held |= set(_added_tokens(folder).values())
    return tuple(sorted(set(range(vocab_size)) - held)) if held else ()


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return a tokenizer's added tokens with their ids, from every place where they may be stored."""
    files = (read_object(folder / name) for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"))
    fast, slow, older = (held or {} for held in files)
    with _of_tokenizer(folder):
        added = {token["content"]: int(token["id"]) for token in fast.get("added_tokens") or []}
        slower = (slow.get("added_tokens_decoder") or {}).items()
        added |= {token["content"]: int(index) for index, token in slower}
        return added | {token: int(index) for token, index in older.items()}


def _of_tokenizer(folder: Path) -> AbstractContextManager[None]:
    problem = f"model.path: the files of the tokenizer in {folder} can't be read"
    return refused(problem, AttributeError, KeyError, TypeError, ValueError)
