"""Promises: in order, side by side, and each error in its place."""

from threading import Barrier, Event, Lock

import pytest

from draftmill.storage.errors import StoreError
from draftmill.storage.stores.parallel import AHEAD, parallel_map, thread_pool

PATIENCE_S = 60.0


@pytest.mark.parametrize("count", [0, 1, AHEAD, 5 * AHEAD + 3])
def test_answers_come_in_order_and_each_error_in_its_place(count):
    def ask(item: int) -> int:
        if item % 3 == 1:
            raise StoreError(f"no {item}")
        return item * item

    found: list[tuple[int, int | str]] = []
    for item, promise in parallel_map(range(count), ask):
        try:
            found.append((item, promise.result()))
        except StoreError as error:
            found.append((item, str(error)))
    assert found == [(item, f"no {item}" if item % 3 == 1 else item * item) for item in range(count)]


def test_all_is_asked_side_by_side_and_never_for_more_than_a_few_answers_ahead():
    barrier, lock = Barrier(AHEAD), Lock()
    asked: list[int] = []

    def ask(item: int) -> int:
        with lock:
            asked.append(item)
        if item < AHEAD:
            barrier.wait(PATIENCE_S)  # else nobody gets an answer
        return item

    taken = 0
    for item, promise in parallel_map(range(10 * AHEAD), ask):
        assert promise.result() == item
        taken += 1
        with lock:
            assert len(asked) <= taken + AHEAD
    assert taken == len(asked) == 10 * AHEAD


def test_who_takes_no_more_has_nothing_more_asked_for():
    asked: list[int] = []
    answers = parallel_map(range(1000), asked.append)
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
        for _ in parallel_map(range(3), ask):
            assert begun.wait(PATIENCE_S)
            raise KeyboardInterrupt
    assert not answered
    with pytest.raises(KeyboardInterrupt), thread_pool(1, "silent") as pool:
        later = [pool.submit(ask, item) for item in (4, 5)]
        raise KeyboardInterrupt
    assert not answered and later[1].cancelled()
    comes.set()
