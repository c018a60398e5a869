"""Hugging Face datasets, on disk (`save_to_disk`) or from the hub: `hf://DATASET?split=train&config=main&revision=v1`.

The library `datasets` is imported only here, and only for a dataset of the hub (or a folder that it must prepare). Such a
dataset is prepared once on each machine, memory-mapped, and read by row number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.rows import FIELD, InputFile

_OPTIONS = ("split", "config", "revision")


def list_dataset(path: str, list_folder: Callable[[str], list[InputFile]]) -> list[InputFile]:
    """Return the inputs of `hf://...`: the Arrow files of a saved dataset, or one input for a split of the hub's.

    A dataset with several splits needs `?split=`. Raises UserError if it can't be found or loaded.
    """
    name, options = _parse(path)
    folder = Path(name).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        return _list_saved(path, list_folder, folder / _choose_split(path, options.get("split"), splits))
    if (folder / "state.json").is_file():
        return _list_saved(path, list_folder, folder)
    if folder.is_dir():
        name = str(folder.resolve())
    return [_list_hub(path, name, options)]


def load(file: InputFile) -> Any:
    """Return the split as a memory-mapped dataset whose slices are Arrow tables."""
    name, options = _parse(file.uri)
    return _load(name, options["split"], options.get("config"), options.get("revision"))


def _parse(path: str) -> tuple[str, dict[str, str]]:
    name, _, query = path.removeprefix("hf://").partition("?")
    options = dict(parse_qsl(query))
    for key in options:
        if key not in _OPTIONS:
            raise UserError(f"{path}: {key!r} is not an option; allowed are {', '.join(_OPTIONS)}", field=FIELD)
    return name, options


def _list_saved(path: str, list_folder: Callable[[str], list[InputFile]], folder: Path) -> list[InputFile]:
    files = [file for file in list_folder(str(folder)) if file.format == "arrow"]
    if not files:
        raise UserError(f"{path} holds no Arrow files", field=FIELD)
    return files


def _choose_split(path: str, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        reason = "it has several splits" if split is None else f"it has no split {split!r}"
        raise UserError(f"{path}: {reason}; add ?split=NAME, one of {', '.join(splits)}", field=FIELD)
    return split


def _list_hub(path: str, name: str, options: dict[str, str]) -> InputFile:
    import datasets

    try:
        splits = datasets.get_dataset_split_names(name, options.get("config"), revision=options.get("revision"))
    except Exception as error:  # noqa: BLE001 - its errors have no common class; each means that the dataset is unavailable
        raise UserError(f"{path} can't be loaded: {type(error).__name__}: {error}", field=FIELD) from None
    options = options | {"split": _choose_split(path, options.get("split"), splits)}
    revision = options.get("revision") or _commit(name)
    if revision:
        options["revision"] = revision
    query = urlencode({key: options[key] for key in _OPTIONS if key in options})
    file = InputFile(f"hf://{quote(name)}?{query}", options["split"], None, revision, None, "hf")
    return replace(file, size=len(load(file)))


def _commit(name: str) -> str | None:
    """The dataset's current commit, so that every machine reads the same version; None for a folder, or without the hub."""
    if os.path.isdir(name) or os.environ.get("HF_HUB_OFFLINE") == "1":
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        sha = HfApi().dataset_info(name).sha
    except (HfHubHTTPError, OSError):
        return None
    return str(sha) if sha else None


@lru_cache(maxsize=4)
def _load(name: str, split: str, config: str | None, revision: str | None) -> Any:
    import datasets

    try:
        dataset = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 - as above: the library's, Arrow's, the hub's, or those of a file's parser
        raise UserError(f"hf://{name} can't be loaded: {type(error).__name__}: {error}", field=FIELD) from None
    return dataset.with_format("arrow")
