"""Runs many store requests in parallel and yields the answers in order.

A request to an object store takes some tens of milliseconds, even for few bytes: ten thousand unit files, read one after the
other, take a quarter of an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 16
"""Parallel requests, and the most answers that wait for the caller."""


def parallel_map(
    items: Iterable[T], ask: Callable[[T], R], *, threads: int = AHEAD, ahead: int = AHEAD
) -> Iterator[tuple[T, Future[R]]]:
    """Yield each item, in order, with the promise of `ask(item)`; its `result()` waits, or raises what `ask` raised.

    `ask` runs in threads, also for a store on a disk, which may be a network's. Items are pulled in the caller's thread, at most
    `ahead` of the results.
    """
    with thread_pool(threads, "promises") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(ask, item)))
            if len(waiting) == ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


@contextmanager
def thread_pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads for the block, which are waited for at its end.

    If it ends by an exception, as of a signal, or because the caller takes no more, nothing more is started, and what has been
    started is not waited for: it may take for ever, such as a request without an answer or a chat template without an end.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
