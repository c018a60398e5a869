"""Runs many store requests in parallel and yields the answers in order.

A request to an object store takes some tens of milliseconds, even for few bytes: ten thousand unit files, read one after the
other, take a quarter of an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from draftmill.storage.errors import StoreError
from draftmill.storage.stores.verbs import Store

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 16
"""Parallel requests, and the most answers that wait for the caller."""


def promised(store: Store, items: Iterable[T], ask: Callable[[T], R]) -> Iterator[tuple[T, Future[R]]]:
    """Yield each item, in order, with the promise of `ask(item)`; its `result()` waits, or raises what `ask` raised.

    For a remote store `ask` runs in threads; otherwise when the item's turn comes.
    """
    if store.url.startswith("s3://"):
        yield from side_by_side(items, ask, threads=AHEAD, ahead=AHEAD)
        return
    for item in items:
        yield item, _kept(ask, item)


def side_by_side(
    items: Iterable[T], ask: Callable[[T], R], *, threads: int, ahead: int
) -> Iterator[tuple[T, Future[R]]]:
    """The same in `threads` threads, for any store. Items are pulled in the caller's thread, at most `ahead` of the results."""
    with ThreadPoolExecutor(threads, thread_name_prefix="promises") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(ask, item)))
                if len(waiting) == ahead:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:  # if the caller stops early, cancel the requests that have not started
            for _, promise in waiting:
                promise.cancel()


def _kept(ask: Callable[[T], R], item: T) -> Future[R]:
    promise: Future[R] = Future()
    try:
        promise.set_result(ask(item))
    except StoreError as error:
        promise.set_exception(error)
    return promise
