"""Promises: in order, side by side where the store is far away, and each error in its place."""

from threading import Barrier, Event, Lock

import pytest

from draftmill.storage.errors import StoreError
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.parallel import AHEAD, parallel_map, thread_pool
from draftmill.storage.stores.store import MemoryStore

PATIENCE_S = 60.0


def far(name: str) -> MemoryStore:
    """A store in memory that says it is on S3."""
    store = MemoryStore(name)
    store.url = "s3://far"
    return store


@pytest.mark.parametrize("store", [MemoryStore("near"), far("far")])
@pytest.mark.parametrize("count", [0, 1, AHEAD, 5 * AHEAD + 3])
def test_answers_come_in_order_and_each_error_in_its_place(store, count):
    def ask(item: int) -> int:
        if item % 3 == 1:
            raise StoreError(f"no {item}")
        return item * item

    found: list[tuple[int, int | str]] = []
    for item, promise in parallel_map(store, range(count), ask):
        try:
            found.append((item, promise.result()))
        except StoreError as error:
            found.append((item, str(error)))
    assert found == [(item, f"no {item}" if item % 3 == 1 else item * item) for item in range(count)]


def test_a_far_store_is_asked_side_by_side_and_never_for_more_than_a_few_answers_ahead():
    barrier, lock = Barrier(AHEAD), Lock()
    asked: list[int] = []

    def ask(item: int) -> int:
        with lock:
            asked.append(item)
        if item < AHEAD:
            barrier.wait(PATIENCE_S)  # else nobody gets an answer
        return item

    taken = 0
    for item, promise in parallel_map(far("side by side"), range(10 * AHEAD), ask):
        assert promise.result() == item
        taken += 1
        with lock:
            assert len(asked) <= taken + AHEAD
    assert taken == len(asked) == 10 * AHEAD


def test_what_reads_whole_files_is_side_by_side_on_a_disk_too(tmp_path):
    barrier = Barrier(AHEAD)
    answers = parallel_map(LocalStore(tmp_path), range(AHEAD), lambda item: barrier.wait(PATIENCE_S) >= 0, reads=True)
    assert [promise.result() for _, promise in answers] == [True] * AHEAD


def test_a_store_that_is_near_is_asked_when_its_turn_has_come():
    asked: list[int] = []
    for item, promise in parallel_map(MemoryStore("near"), range(5), asked.append):
        assert promise.done() and asked == list(range(item + 1))


def test_who_takes_no_more_has_nothing_more_asked_for():
    asked: list[int] = []
    answers = parallel_map(far("left"), range(1000), asked.append)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert len(asked) <= AHEAD


def test_after_a_signal_nobody_waits_for_an_answer_that_does_not_come():
    comes, begun, answered = Event(), Event(), list[int]()

    def ask(item: int) -> None:
        begun.set()
        comes.wait(PATIENCE_S)
        answered.append(item)

    with pytest.raises(KeyboardInterrupt):
        for _ in parallel_map(far("silent"), range(3), ask):
            assert begun.wait(PATIENCE_S)
            raise KeyboardInterrupt
    assert not answered
    with pytest.raises(KeyboardInterrupt), thread_pool(1, "silent") as pool:
        later = [pool.submit(ask, item) for item in (4, 5)]
        raise KeyboardInterrupt
    assert not answered and later[1].cancelled()
    comes.set()
