"""One level of a store: the folders and objects directly below a folder, without a listing of all that is below them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftmill.storage.stores.interface import Stat, Store


@dataclass(frozen=True, slots=True)
class Level:
    """What is directly below a folder: names of folders, and objects by their last name. A Stat has its whole name."""

    folders: tuple[str, ...]
    files: dict[str, Stat]


@runtime_checkable
class HasLevels(Protocol):
    """A store that can list one level by itself."""

    def level(self, folder: str) -> Level:
        """See `level_of`."""
        ...


def level_of(store: Store, folder: str = "") -> Level:
    """The level below `folder` (a name without a slash at its end; "" is the store itself). Nothing there is an empty level."""
    if isinstance(store, HasLevels):
        return store.level(folder)
    prefix = f"{folder}/" if folder else ""
    folders: dict[str, None] = {}
    files: dict[str, Stat] = {}
    for stat in store.list(prefix):
        name, slash, _ = stat.name.removeprefix(prefix).partition("/")
        if slash:
            folders[name] = None
        else:
            files[name] = stat
    return Level(tuple(folders), files)
