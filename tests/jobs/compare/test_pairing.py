"""Pairs of samples: by (id, sample), whatever the order, with a count of everything that has no partner."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pytest

from draftmill.jobs.compare.pairing import pair
from draftmill.jobs.compare.rows import RunRows, columns_in


def rows(keys: list[tuple[str, int]], failed: Collection[tuple[str, int]] = ()) -> RunRows:
    """A run with these (id, sample), whose digests number them by hash."""
    ids = [name for name, _ in keys]
    cut = len(ids) // 3  # several chunks, as from several unit files
    return RunRows(
        ids=pa.chunked_array([ids[:cut], ids[cut:]], type=pa.string()),
        sample_N=np.array([sample for _, sample in keys], np.int32),
        ok_N=np.array([key not in failed for key in keys], bool),
        key_N=np.arange(len(keys), dtype=np.uint64),
        digest_N=np.array([hash(key) % 2**64 for key in keys], np.uint64),
        counts={},
        device_s_N=np.zeros(len(keys)),
        metrics={},
    )


def expected(first: list, second: list, failed: set, other_failed: set) -> list:
    return [key for key in first if key in set(second) and key not in failed | other_failed]


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_those_of_a_plain_loop(seed: int) -> None:
    rng = random.Random(seed)
    every = [(f"row {number}", sample) for number in range(12) for sample in range(rng.randint(1, 3))]
    first, second = rng.sample(every, rng.randint(0, len(every))), rng.sample(every, rng.randint(0, len(every)))
    failed = set(rng.sample(first, len(first) // 4))
    other_failed = set(rng.sample(second, len(second) // 4))
    found = pair(one := rows(first, failed), other := rows(second, other_failed))
    kept = expected(first, second, failed, other_failed)
    assert [first[place] for place in found.first_P] == kept == [second[place] for place in found.second_P]
    assert (one.digest_N[found.first_P] == other.digest_N[found.second_P]).all()
    both = set(first) & set(second)
    assert found.both == len(both) and found.num_compared == len(kept)
    assert (found.only_first, found.only_second) == (len(set(first) - both), len(set(second) - both))
    assert found.failed_first == len(both & failed - other_failed)
    assert found.failed_second == len(both & other_failed - failed)
    assert found.failed_both == len(both & failed & other_failed)
    names = [name for name, _ in kept]
    assert found.num_rows == len(set(names)) and found.clustered == (len(set(names)) < len(names))
    assert len(set(zip(names, found.row_P, strict=True))) == found.num_rows


def test_metrics_of_a_struct_column_become_columns() -> None:
    column = pa.array([{"a": 1.0}, None, {"a": None}, {"a": -3.0}], pa.struct([("a", pa.float64())]))
    found = columns_in(column.slice(1))
    np.testing.assert_array_equal(found.pop("a"), [np.nan, np.nan, -3.0])
    assert not found
