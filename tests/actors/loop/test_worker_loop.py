"""The decode loop: slots stay full, the longest samples first, failures stay with their samples, files are whole."""

import threading

import numpy as np
import pytest

from draftmill.actors.loop.runner import QUIET_STEPS, RowLimit, UnitRunner, in_order
from draftmill.actors.messages import Failure, Receipt, WorkUnit
from draftmill.actors.planning.beginnings import LEAST
from draftmill.actors.rows.samples import Sample
from draftmill.decoders.base import Request
from draftmill.storage.errors import StoreError
from tests.actors.fakes import FakeClerk, FakeDecoder, run_all, work


def begun(decoder, unit_io):
    """A runner that has taken all units."""
    runner = UnitRunner(decoder, unit_io)
    for unit, lengths in unit_io.lengths.items():
        runner.add(work(unit, len(lengths)))
    return runner


def receipt_of(runner):
    (receipt,) = run_all(runner)
    assert isinstance(receipt, Receipt)
    return receipt


def test_a_unit_is_closed_whole_and_its_samples_are_in_row_order():
    unit_io = FakeClerk({0: [3, 1, 2]})
    tally = receipt_of(begun(FakeDecoder(), unit_io)).tally
    assert (tally.rows, tally.ok, tally.new_tokens) == (3, 3, 6)
    assert [sample.index for sample in unit_io.closed[0]] == [0, 1, 2]
    assert [len(sample.outcome.tokens) for sample in unit_io.closed[0] if sample.outcome] == [3, 1, 2]


def test_the_longest_samples_get_slots_first():
    decoder = FakeDecoder(max_rows=1)
    run_all(begun(decoder, FakeClerk({0: [1, 5, 3, 5]})))
    assert decoder.admitted == [5, 5, 3, 1]


def test_samples_that_begin_alike_get_slots_after_one_another():
    class Shots(FakeClerk):
        def open_unit(self, unit):
            samples = super().open_unit(unit)
            for sample, (text, end) in zip(samples, [(1, 2), (2, 9), (1, 5), (2, 3)], strict=True):
                sample.canvas = np.array([text] * 20 + [-1] * end, dtype=np.int32)
            return samples

    decoder = FakeDecoder(max_rows=1)
    receipt = receipt_of(begun(decoder, Shots({0: [1, 1, 1, 1]})))
    assert decoder.admitted == [29, 23, 25, 22]
    assert receipt.tally.new_tokens == 2 + 9 + 5 + 3


def test_slots_are_refilled_from_the_next_unit_before_the_first_has_ended():
    decoder = FakeDecoder(max_rows=2)
    unit_io = FakeClerk({0: [9, 1], 1: [2] * 4})
    both_are_open = threading.Event()
    unit_io.on_open = lambda unit: both_are_open.set() if unit.unit == 1 else None
    runner = begun(decoder, unit_io)
    both_are_open.wait(10)
    runner._thread.submit(int).result(10)  # the unit_io has answered for both
    run_all(runner)
    assert decoder.widths == [2] * 9


def test_a_unit_is_spent_when_at_most_half_of_its_samples_wait():
    unit_io = FakeClerk({0: [3] * 4, 1: [3] * 4})
    runner = UnitRunner(FakeDecoder(max_rows=2), unit_io)
    first, second = work(0, 4), work(1, 4)
    runner.add(first)
    assert list(runner.spent) == []  # its rows are not there yet
    runner._thread.submit(int).result(10)
    runner.step()
    assert list(runner.spent) == [first.lease]
    runner.add(second)
    runner._thread.submit(int).result(10)
    runner.step()
    assert list(runner.spent) == [first.lease]
    run_all(runner)
    assert list(runner.spent) == []


def test_a_row_that_failed_before_decoding_takes_no_slot_and_has_ended():
    runner = begun(FakeDecoder(), FakeClerk({0: [2, -1]}))
    tallies = receipt_of(runner).tally, runner.take_effort()[1]
    assert [(tally.ok, tally.failed) for tally in tallies] == [(1, 1)] * 2


def test_a_unit_without_a_sample_to_decode_is_closed_all_the_same():
    assert [type(item) for item in run_all(begun(FakeDecoder(), FakeClerk({0: [-1, -1]})))] == [Receipt]


def test_the_sample_that_makes_the_decoder_raise_is_found_and_its_neighbours_are_fine(caplog):
    def trouble(requests: list[Request]) -> None:
        if any(len(request.canvas) == 7 for request in requests):
            raise RuntimeError("bad luck")

    unit_io = FakeClerk({0: [3, 7, 2], 1: [4, 4]})
    runner = begun(FakeDecoder(trouble=trouble), unit_io)
    run_all(runner)
    # With its neighbours, then alone.
    assert runner.take_effort()[0].engine.raised == 2
    assert [record.exc_info[0] for record in caplog.records] == [RuntimeError] and "bad luck" in caplog.text
    errors = {(unit, s.index): s.error.kind for unit, samples in unit_io.closed.items() for s in samples if s.error}
    assert errors == {(0, 1): "decode_error"}


def test_when_memory_runs_out_the_rows_are_halved_and_nothing_fails():
    def trouble(requests: list[Request]) -> None:
        if len(requests) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    decoder = FakeDecoder(max_rows=8, trouble=trouble)
    runner = begun(decoder, FakeClerk({0: [2] * 20}))
    assert receipt_of(runner).tally.ok == 20
    assert runner.limit.rows == 2 and max(decoder.widths) <= 3


def test_rows_grow_again_after_some_quiet_and_more_quiet_is_asked_for_each_time():
    limit, grown = RowLimit(), []
    assert limit.room(9, 4) == 9
    for _ in range(2):
        limit.ran_out(16)
        assert (limit.rows, limit.room(9, 5)) == (8, 3)
        limit.count_step(7)
        steps = 0
        while limit.rows == 8:
            limit.count_step(8)
            steps += 1
        grown.append((limit.rows, steps))
    assert grown == [(9, QUIET_STEPS), (9, 2 * QUIET_STEPS)]


def test_a_worker_decodes_more_rows_again_when_the_long_samples_are_through():
    def trouble(requests: list[Request]) -> None:
        if len(requests) > 2 and any(len(request.canvas) > 3 for request in requests):
            raise MemoryError

    decoder = FakeDecoder(max_rows=8, trouble=trouble)
    receipt = receipt_of(begun(decoder, FakeClerk({0: [40] * 4 + [3] * 800})))
    assert receipt.tally.ok == 804
    assert min(decoder.widths[:-9]) <= 2 and max(decoder.widths) > 4


def test_a_decoder_that_raises_without_a_sample_ends_the_worker():
    runner = UnitRunner(FakeDecoder(), FakeClerk({0: [1]}))
    runner.decoder.room = lambda length: 1 // 0  # type: ignore[method-assign]
    runner.add(work(0, 1))
    with pytest.raises(ZeroDivisionError):
        run_all(runner)


def test_a_sample_for_which_memory_never_suffices_is_named():
    def trouble(requests: list[Request]) -> None:
        if any(len(request.canvas) == 9 for request in requests):
            raise MemoryError

    unit_io = FakeClerk({0: [9, 2]})
    run_all(begun(FakeDecoder(trouble=trouble), unit_io))
    assert [sample.error and sample.error.kind for sample in unit_io.closed[0]] == ["out_of_memory", None]


@pytest.mark.parametrize(("error", "kind"), [(StoreError("gone"), "INFRA"), (KeyError("x"), "TASK")])
def test_a_failed_commit_or_a_bug_is_a_failure_of_its_kind(error, kind):
    def fail(unit: WorkUnit) -> None:
        raise error

    unit_io = FakeClerk({0: [1], 1: [1]})
    unit_io.on_close = lambda unit: fail(unit) if unit.unit == 0 else None
    news = {item.unit: item for item in run_all(begun(FakeDecoder(), unit_io))}
    assert isinstance(news[0], Failure) and news[0].kind == kind
    assert isinstance(news[1], Receipt)


def test_a_dropped_unit_says_nothing_and_leaves_no_one_behind():
    unit_io = FakeClerk({0: [50], 1: [2]})
    decoder = FakeDecoder()
    runner = UnitRunner(decoder, unit_io)
    runner.add(work(0, 1))
    while not decoder.active:
        runner.step()
    runner.drop(0)
    assert (runner.held, decoder.active) == (0, 0)
    runner.add(work(1, 1))
    assert [item.unit for item in run_all(runner)] == [1]


def test_effort_is_reported_as_differences():
    runner = UnitRunner(FakeDecoder(max_rows=2), FakeClerk({0: [2, 2], 1: [3]}))
    runner.add(work(0, 2))
    run_all(runner)
    effort, tally = runner.take_effort()
    assert (effort.engine.steps, effort.engine.active_slot_steps, effort.engine.slot_steps) == (2, 4, 4)
    assert (tally.rows, tally.new_tokens) == (2, 4) and 0 <= effort.tail_s <= effort.wall_s
    runner.add(work(1, 1))
    run_all(runner)
    effort, tally = runner.take_effort()
    assert (effort.engine.steps, effort.engine.slot_steps, tally.rows) == (3, 6, 1)
    assert np.isclose(effort.tail_s / effort.wall_s, 0.5, atol=0.5)


def test_a_workers_time_is_divided_among_its_units_and_none_is_left_over():
    decoder = FakeDecoder(max_rows=2)
    runner = begun(decoder, FakeClerk({0: [9, 1], 1: [2] * 4, 2: [-1, 3]}))
    receipts = [item for item in run_all(runner) if isinstance(item, Receipt)]
    assert len(receipts) == 3 and all(receipt.spent_s > 0 for receipt in receipts)
    effort, _ = runner.take_effort()
    assert sum(receipt.spent_s for receipt in receipts) == pytest.approx(effort.wall_s)


def test_time_on_a_unit_that_is_revoked_is_not_counted_for_another():
    decoder = FakeDecoder(max_rows=4)
    runner = begun(decoder, FakeClerk({0: [50, 50], 1: [60, 60]}))
    runner._thread.submit(int).result(10)  # the unit_io has read both
    runner.step()
    assert decoder.active == 4
    runner.drop(0)
    while decoder.active > 2:  # the samples of the revoked unit end in their slots
        runner.step()
    receipt = receipt_of(runner)
    effort, _ = runner.take_effort()
    assert receipt.unit == 1
    assert 0 < receipt.spent_s < effort.wall_s
    assert not runner._resident


def samples_of(*canvases):
    return [Sample(index, canvas=np.array(canvas, dtype=np.int32)) for index, canvas in enumerate(canvases)]


def order(*canvases):
    return [sample.index for sample in in_order(samples_of(*canvases))]


def words(count, seed):
    return np.random.default_rng(seed).integers(0, 999, count).tolist()


def test_texts_that_differ_come_longest_first_and_equally_long_ones_in_their_order():
    assert order(*[words(length, seed) for seed, length in enumerate((20, 50, 30, 50, 9))]) == [1, 3, 2, 0, 4]
    assert order() == [] and order([1, 2]) == [0]


def test_texts_that_begin_alike_follow_each_other_wherever_they_stood():
    one, two = words(40, 1), words(40, 2)
    texts = [[*one, *words(5, 3)], [*two, *words(8, 4)], [*one, *words(9, 5)], words(43, 6), [*two, *words(2, 7)]]
    # The groups by their longest ones, 49, 48 and 43 tokens; in a group the longest first.
    assert order(*texts) == [2, 0, 1, 4, 3]


def test_inside_of_a_group_those_come_together_that_have_more_in_common():
    shots, questions = words(100, 1), [words(30, seed) for seed in (2, 3, 4)]
    # The ends of a question differ in length, so that by length alone they would be far apart.
    texts = [[*shots, *question, *words(end, 50 + end)] for end in (2, 6, 4) for question in questions]
    found = order(*texts)
    assert found == [3, 6, 0, 4, 7, 1, 5, 8, 2]


def test_a_few_common_words_or_less_than_half_of_a_text_are_no_beginning():
    few, shared = words(LEAST - 1, 1), words(LEAST, 2)
    texts = [[*few, *words(5, 3)], [*words(30, 4)], [*few, *words(9, 5)]]
    assert order(*texts) == [1, 2, 0]
    texts = [[*shared, *words(LEAST + 9, 3)], words(38, 4), [*shared, *words(LEAST + 1, 5)]]
    assert order(*texts) == [0, 1, 2]


def test_holes_and_equal_canvases_are_in_order_too():
    prompt = words(30, 1)
    assert order([*prompt, -1, -1], words(31, 2), [*prompt, -1, -1], [*prompt, -1, -1, -1]) == [3, 0, 2, 1]


def test_long_completions_of_prompts_that_begin_alike_are_a_group():
    """What they have in common is half of each prompt, and a small part of each canvas."""
    shots, room = words(40, 1), [-1] * 200
    texts = [[*shots, *words(9, seed), *room] for seed in (2, 3)]
    assert order(texts[0], [*words(45, 4), *room], texts[1]) == [0, 2, 1]


def test_beginnings_in_beginnings_without_end_are_no_trouble():
    text = [7] * (LEAST * 600)
    found = order(*[text[: LEAST * (1 + number)] for number in range(600)])
    assert sorted(found) == list(range(600))
