"""Parts of S3 objects: fetched once, ahead of use and in parallel, with a bound on what is kept."""

from collections import Counter
from threading import Barrier, Thread

import pytest

from draftmill.storage.errors import StoreError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import fetch_ahead, read_rows
from draftmill.storage.stores.block_cache import (
    AHEAD,
    AHEAD_BYTES,
    BLOCK_BYTES,
    ENTRY_BYTES,
    Block,
    BlockCache,
    RangeFile,
    ahead,
)
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import MemoryStore, Place

PATIENCE_S = 60.0


class Counting(MemoryStore):
    """Counts what is read; where there is a `barrier`, so many have to read at once before any of them gets an answer."""

    def __init__(self, name: str, barrier: Barrier | None = None) -> None:
        super().__init__(name)
        self.reads: Counter[str] = Counter()
        self.barrier = barrier
        self.broken = 0

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        self.reads[name] += 1
        if self.barrier is not None:
            self.barrier.wait(PATIENCE_S)
        if self.broken:
            self.broken -= 1
            raise StoreError("not now")
        return super().get_range(name, start, length)


def filled(store: Counting, count: int, size: int = 10) -> list[Block]:
    for number in range(count):
        store.put(f"{number}", bytes([number % 256]) * size)
    return [Block(store, f"{number}", None, size, 0) for number in range(count)]


def test_many_who_ask_for_one_block_cause_one_request():
    store, blocks = Counting("one"), BlockCache()
    (block,) = filled(store, 1)
    found: list[bytes] = []
    threads = [Thread(target=lambda: found.append(blocks.get(block))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [b"\0" * 10] * 20 and store.reads == {"0": 1}


def test_what_the_next_items_need_is_fetched_side_by_side():
    store, blocks = Counting("side", Barrier(4)), BlockCache(threads=4)
    wanted = filled(store, 8)
    # Each request waits for three others: one after the other none would ever be answered.
    assert [blocks.get(block)[0] for block in ahead(wanted, lambda block: [block], blocks=blocks)] == [*range(8)]
    assert set(store.reads.values()) == {1}


def test_no_more_is_kept_than_allowed_and_what_was_used_last_stays():
    store, blocks = Counting("kept"), BlockCache(kept_bytes=3 * (10 + ENTRY_BYTES))
    wanted = filled(store, 5)
    for number in (0, 1, 2, 0, 3, 0, 4, 0):
        blocks.get(wanted[number])
    assert store.reads == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
    blocks.get(wanted[1])
    assert store.reads["1"] == 2
    for block in wanted:
        blocks.get(block)
    assert len(blocks._futures) == 3


def test_a_block_that_could_not_be_read_is_tried_again_by_the_next_one():
    store, blocks = Counting("broken"), BlockCache()
    (block,) = filled(store, 1)
    store.broken = 1
    with pytest.raises(StoreError, match="not now"):
        blocks.get(block)
    assert blocks.get(block) == b"\0" * 10


def test_items_come_in_order_and_no_more_is_under_way_than_allowed():
    class Watched(BlockCache):
        def fetch(self, block: Block) -> None:
            under_way.append(block)

    under_way: list[Block] = []
    store = Counting("order")
    sizes = [BLOCK_BYTES] * 20 + [0] * 300 + [10] * 300 + [100 * BLOCK_BYTES, 10]
    items = [
        [Block(store, f"{number}", None, size, index) for index in range(-(-size // BLOCK_BYTES))]
        for number, size in enumerate(sizes)
    ]

    def drawn():
        for item in items:
            drawn_so_far.append(item)
            yield item

    drawn_so_far: list[list[Block]] = []
    found = []
    for item in ahead(drawn(), lambda item: item, blocks=Watched()):
        found.append(item)
        assert len(under_way) <= AHEAD + 1 and sum(block.size for block in under_way) <= AHEAD_BYTES + BLOCK_BYTES
        assert len(drawn_so_far) <= len(found) + AHEAD + 1
        under_way = [block for block in under_way if block not in item]
    assert found == items, "what is too large to be fetched ahead comes all the same"


def test_many_small_files_on_s3_are_fetched_once_each(s3_server, s3_options, tmp_path):
    store = S3Store(f"s3://{s3_server.new_bucket()}", s3_options)
    for number in range(30):
        store.put(f"in/{number:02d}.txt", f"text {number}\n".encode())
    files = list_inputs(Place(f"{store.url}/in", s3_options))
    before = len(s3_server.app.requests)
    found = [
        row.values
        for file, places in fetch_ahead([(file, [(0, 0)]) for file in files])
        for row in read_rows(file, places)
    ]
    assert [str(values) for values in found] == [str({"text": f"text {number}"}) for number in range(30)]
    asked = [path for method, path in s3_server.app.requests[before:] if method == "GET"]
    assert len(asked) == len(set(asked)) == 30


@pytest.fixture
def object_of_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[Counting, BlockCache, bytes]:
    """An object of nine blocks of a hundred bytes and a half one."""
    data = bytes(number % 251 for number in range(950))
    store, blocks = Counting("object"), BlockCache()
    store.put("object", data)
    monkeypatch.setattr("draftmill.storage.stores.block_cache.BLOCK_BYTES", 100)
    monkeypatch.setattr("draftmill.storage.stores.block_cache.BLOCKS", blocks)
    return store, blocks, data


def test_who_reads_one_block_after_the_other_has_the_next_ones_fetched_side_by_side(object_of_blocks):
    store, _, data = object_of_blocks
    file = RangeFile(store, "object", None, len(data))
    assert file.read(100) == data[:100] and store.reads["object"] == 1
    store.barrier = Barrier(3)  # this one, and the two behind it: else nobody gets an answer
    assert file.read(100) == data[100:200]
    store.barrier = None
    assert b"".join(iter(lambda: file.read(70), b"")) == data[200:]
    assert store.reads["object"] == 10, "each block once, and none behind the end"


def test_a_file_that_is_read_at_two_places_at_once_is_fetched_ahead_at_both(object_of_blocks):
    store, _, data = object_of_blocks
    file = RangeFile(store, "object", None, len(data))
    for start in (0, 500):
        file.seek(start)
        assert file.read(100) == data[start : start + 100]
    for start in (100, 600):
        store.barrier = Barrier(3)
        file.seek(start)
        assert file.read(100) == data[start : start + 100]


def test_of_a_file_that_is_read_here_and_there_nothing_is_fetched_that_was_not_asked_for(object_of_blocks):
    store, _, data = object_of_blocks
    file = RangeFile(store, "object", None, len(data))
    for start in (810, 430, 10, 655, 220):
        file.seek(start)
        assert file.read(20) == data[start : start + 20]
    assert store.reads["object"] == 5
