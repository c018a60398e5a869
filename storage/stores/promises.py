"""Asking a store for many things: in order, while the next ones are on their way.

A request to an object store takes some tens of milliseconds, however little it asks for: ten thousand unit files, read one
after the other, are a quarter of an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from storage.errors import StoreError
from storage.stores.verbs import Store

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 16
"""Requests under way at once, and the most answers that wait to be taken."""


def promised(store: Store, items: Iterable[T], ask: Callable[[T], R]) -> Iterator[tuple[T, Future[R]]]:
    """Yield each item, in order, with the promise of `ask(item)`, whose `result()` is waited for, or raises what `ask` raised.

    `ask` is called in threads where the store is far away; elsewhere when its turn has come.
    """
    if store.url.startswith("s3://"):
        yield from side_by_side(items, ask, threads=AHEAD, ahead=AHEAD)
        return
    for item in items:
        yield item, _kept(ask, item)


def side_by_side(
    items: Iterable[T], ask: Callable[[T], R], *, threads: int, ahead: int
) -> Iterator[tuple[T, Future[R]]]:
    """The same in so many threads, wherever the answers come from. Items are taken by the caller's, `ahead` of them at most
    before the first answer is.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="promises") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(ask, item)))
                if len(waiting) == ahead:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:  # whoever takes no more does not wait for what has not begun
            for _, promise in waiting:
                promise.cancel()


def _kept(ask: Callable[[T], R], item: T) -> Future[R]:
    promise: Future[R] = Future()
    try:
        promise.set_result(ask(item))
    except StoreError as error:
        promise.set_exception(error)
    return promise
