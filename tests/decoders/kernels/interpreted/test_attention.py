"""Attention by intervals over the slot cache equals its reference."""

from dataclasses import replace

import pytest
import torch

from draftmill.decoders.kernels import attention
from draftmill.decoders.kernels.seen import Seen, Tables, Tiling, power_of_two
from tests.decoders.references import kernels as reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def case(slots, *, columns, key_heads, group, width, low, high, dtype=torch.float32, rows_at_once=1, seed=0):
    """Random queries of these rows, a layer of a cache with 3 slots, intervals [I, N], and positions out of order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    def intervals(numbers):
        rows = numbers if not numbers or isinstance(numbers[0], list) else [numbers]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), len(slots))

    query = normal(len(slots), key_heads * group, width)
    layer = normal(2, 3, key_heads, columns, width)
    positions = torch.stack([torch.randperm(columns, generator=generator) for _ in range(3)])
    seen = Seen(
        torch.tensor(slots, dtype=torch.int64),
        intervals(low),
        intervals(high),
        position_N=torch.randint(0, columns, (len(slots),), generator=generator),
        positions_SW=positions,
        tables=Tiling(group, max(16, power_of_two(rows_at_once * group)), few=()).tables(torch.tensor(lines_of(slots))),
    )
    return query, layer, seen


def lines_of(slots):
    """The number of each row among those of its slot that it follows."""
    lines: list[int] = []
    for row, slot in enumerate(slots):
        lines.append(lines[-1] + 1 if row and slots[row - 1] == slot else 0)
    return lines


def check(query, layer, seen, **more):
    shares = more.pop("shares", None)
    found = attention.attend(query, layer, seen, scaling=0.3, shares=shares, **more)
    expected = reference.attend(query, layer, seen, scaling=0.3, **more)
    assert found.dtype == query.dtype and found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[query.dtype])
    return found


@pytest.mark.parametrize(
    ("dtype", "group", "width"),
    [
        (torch.float32, 1, 20),
        (torch.float32, 3, 20),
        (torch.float32, 8, 64),
        (torch.float16, 3, 20),
        (torch.bfloat16, 8, 64),
    ],
)
def test_ragged_rows_of_several_slots(dtype, group, width):
    # Slot 2 comes twice, one row of slot 0 sees nothing, and no number of columns is a multiple of a tile.
    slots, low = [2, 2, 2, 0, 0, 1, 2], [0, 0, 5, 9, 0, 66, 0]
    high = [67, 1, 40, 9, 33, 67, 12]
    found = check(
        *case(slots, columns=67, key_heads=2, group=group, width=width, low=low, high=high, dtype=dtype, rows_at_once=4)
    )
    assert not found[3].any() and found[[0, 1, 2, 4, 5, 6]].any(2).all()


@pytest.mark.parametrize("shares", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cap", "has_sinks"), [(0.4, False), (None, True), (3.0, True)])
def test_scores_that_are_capped_and_sinks(cap, has_sinks, dtype, shares):
    slots, low, high = [2, 2, 0, 0, 1], [0, 5, 9, 0, 66], [1200, 40, 9, 33, 1300]
    query, layer, seen = case(
        slots, columns=1300, key_heads=2, group=3, width=20, low=low, high=high, dtype=dtype, rows_at_once=4
    )
    sink_H = torch.linspace(-2, 9, 6).to(dtype) if has_sinks else None
    found = check(query, layer, seen, cap=cap, sink_H=sink_H, shares=shares)
    plain = reference.attend(query, layer, seen, scaling=0.3)
    assert not found[2].any() and ((found - plain).abs().amax((1, 2))[[0, 1, 3, 4]] > 0.02).all()


def test_tiles_may_run_in_any_order():
    # The last tile to run covers places of rows of other slots.
    slots, high = [0, 1, 1, 2, 0, 0], [9, 40, 3, 20, 30, 8]
    query, layer, seen = case(slots, columns=40, key_heads=2, group=3, width=20, low=[0] * 6, high=high, rows_at_once=4)
    lines, (first_T,) = seen.tables
    check(query, layer, replace(seen, tables=Tables(lines, (first_T.flip(0),))))


def test_rows_of_few_and_of_many_tiles_and_dead_ones():
    """Each row is in one tile; dead rows see nothing and get zeros; a place without a tile does nothing."""
    slots, numbers = [0] * 9 + [1, 2, 2] + [0, 0], [*range(9), 0, 0, 1, -1, -1]
    high = [*range(20, 29), 5, 6, 7, 0, 0]
    query, layer, seen = case(slots, columns=40, key_heads=2, group=3, width=20, low=[0] * 14, high=high)
    tiling = Tiling(group=3, most=32, few=(16,))
    lines, first_T = tiling.tables(torch.tensor(numbers))
    assert lines == (16, 32) and [first.tolist() for first in first_T] == [[9, 10, 12], [0]]
    padded = Tables(lines, (torch.cat([first_T[0], torch.full((4,), 14)]), first_T[1]))
    found = check(query, layer, replace(seen, tables=padded))
    assert not found[12:].any()
    after = replace(seen, tables=padded).after(9)
    assert torch.equal(check(query[9:], layer, after), found[9:])


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shares", [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_two_kinds_of_tiles_each_with_its_shares(poisoned, monkeypatch, shares, has_sinks, is_reversed):
    """Whichever kind comes first, and however many shares either has; some rows see nothing."""
    slots, high = [0] * 9 + [1, 2, 2], [*range(120, 128), 0, 70, 0, 90]
    query, layer, seen = case(slots, columns=130, key_heads=2, group=3, width=20, low=[0] * 12, high=high)
    tables = Tiling(group=3, most=32, few=(16,)).tables(torch.tensor(lines_of(slots)))
    by_tiles = {2 * len(first_T): count for first_T, count in zip(tables.first_T, shares, strict=True)}
    assert len(by_tiles) == 2, "two kinds, of unequal numbers of tiles"
    monkeypatch.setattr(attention, "_shares", lambda num_programs, num_columns: by_tiles[num_programs])
    if is_reversed:
        tables = Tables(tables.lines[::-1], tables.first_T[::-1])
    check(query, layer, replace(seen, tables=tables), sink_H=torch.linspace(-2, 9, 6) if has_sinks else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_numbers_depend_on_no_other_row_of_its_tile(dtype):
    """The tile's other rows see other columns, before and behind: the row has the same bits as alone."""
    slots = [1] * 4
    query, layer, seen = case(
        slots, columns=150, key_heads=2, group=2, width=20, low=[60, 0, 90, 0], high=[99, 150, 140, 3], dtype=dtype,
        rows_at_once=4,
    )  # fmt: skip
    together = check(query, layer, seen)
    for row in range(4):
        alone = Seen(
            seen.slot_N[row : row + 1],
            seen.low_IN[:, row : row + 1].contiguous(),
            seen.high_IN[:, row : row + 1].contiguous(),
            tables=Tables(seen.tables.lines, (torch.tensor([0]),)),
        )
        assert torch.equal(
            attention.attend(query[row : row + 1], layer, alone, scaling=0.3, shares=1)[0], together[row]
        )


def test_slots_may_begin_anywhere_in_a_pool_of_cells():
    slots, low, high = [2, 2, 0, 1], [0, 4, 9, 0], [30, 20, 33, 40]
    query, layer, seen = case(slots, columns=40, key_heads=2, group=3, width=20, low=low, high=high, rows_at_once=2)
    pool = torch.zeros(2, 200, 2, 20)
    starts = torch.tensor([150, 7, 60])
    positions = torch.zeros(200, dtype=torch.int64)
    for slot, start in enumerate(starts.tolist()):
        pool[:, start : start + 40] = layer[:, slot].transpose(1, 2)
        positions[start : start + 40] = seen.positions_SW[slot]
    view = pool[:, :180].view(2, 3, 60, 2, 20).transpose(2, 3)
    inside = replace(seen, start_N=starts[seen.slot_N], positions_SW=positions.unsqueeze(0))
    for window in (None, 12):
        found = attention.attend(query, view, inside, scaling=0.3, window=window, shares=1)
        assert torch.equal(found, attention.attend(query, layer, seen, scaling=0.3, window=window, shares=1))


def test_one_row_and_no_row():
    check(*case([1], columns=5, key_heads=1, group=1, width=20, low=[0], high=[5]))
    assert check(*case([], columns=5, key_heads=1, group=3, width=20, low=[[]], high=[[]])).shape == (0, 3, 20)


def test_no_intervals_show_nothing():
    found = check(*case([0, 1], columns=40, key_heads=1, group=3, width=20, low=[], high=[]))
    assert not found.any()


def test_a_column_of_several_intervals_counts_once():
    # Overlapping, equal, apart and empty intervals.
    low = [[0, 3, 10, 0], [5, 3, 60, 9], [90, 0, 0, 70], [40, 50, 0, 20], [60, 70, 98, 97]]
    high = [[20, 30, 20, 0], [33, 30, 64, 9], [100, 1, 0, 95], [45, 60, 0, 25], [61, 90, 99, 100]]
    arguments = case([0, 0, 2, 2], columns=100, key_heads=2, group=3, width=20, low=low, high=high, rows_at_once=2)
    check(*arguments)
    check(*arguments, shares=4)


@pytest.mark.parametrize("shares", [2, 8])
def test_shares_of_the_columns_are_added(shares):
    # Row 1 sees fewer columns than there are shares, row 2 none.
    arguments = case([0, 1, 2], columns=200, key_heads=1, group=8, width=20, low=[0, 7, 0], high=[200, 9, 0])
    assert not check(*arguments, shares=shares)[2].any()


@pytest.mark.parametrize(("rows_at_once", "shares"), [(1, 2), (4, 1)])
def test_a_window_hides_far_positions(rows_at_once, shares):
    low, high = [[0, 0, 30, 0, 0]], [[90, 90, 90, 3, 90]]
    arguments = case(
        [0, 0, 0, 1, 2], columns=90, key_heads=1, group=3, width=20, low=low, high=high, rows_at_once=rows_at_once
    )
    check(*arguments, window=25, shares=shares)
    check(*arguments, window=1, shares=shares)


@pytest.mark.parametrize(("columns", "rows_at_once"), [(70, 4), (33, 1)])
def test_relative_scores_are_gathered_by_distance(columns, rows_at_once):
    slots, low, high = [2, 2, 2, 1, 2], [0, 0, 4, 0, 0], [columns, 9, 4, 20, 30]
    query, layer, seen = case(
        slots, columns=columns, key_heads=3, group=1, width=20, low=low, high=high, rows_at_once=rows_at_once
    )
    # The second table is too short for all distances: they are cut.
    for distances in (2 * columns, 40):
        relative = torch.randn(len(slots), 3, distances, generator=torch.Generator().manual_seed(1)) * 2
        check(query, layer, seen, relative_NHP=relative)
        check(query, layer, seen, relative_NHP=relative, shares=2)


def test_strided_queries_are_read_in_place():
    query, layer, seen = case([0, 1, 1], columns=40, key_heads=2, group=3, width=20, low=[0, 0, 0], high=[40, 9, 30])
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not heads_first.is_contiguous()
    assert torch.equal(check(heads_first, layer, seen), check(query, layer, seen))


def test_other_dtypes_are_refused():
    query, layer, seen = case([0], columns=5, key_heads=1, group=1, width=20, low=[0], high=[5])
    with pytest.raises(AssertionError, match="float64 is computed by torch"):
        attention.attend(query.double(), layer, seen, scaling=1.0)
