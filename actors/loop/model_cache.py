"""The networks that a worker has in memory, kept for its next job as far as that job needs the same ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ModelCache:
    """Networks by name (`model`, `drafter`, `heads`), each with a key of everything that its loading depends on.

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
    """Give memory that nothing uses any more back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
