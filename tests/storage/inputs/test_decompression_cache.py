"""Random access to compressed files: the same bytes, unpacked once, with a bound on what is kept."""

import errno
import gzip
import io
import random

import pytest

from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs import sources
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import DecompressionCache, open_stream

WHOLE = random.Random(0).randbytes(200_000)


class Unpackings:
    """How often a file was unpacked from its front."""

    def __init__(self) -> None:
        self.count = 0

    def open_stream(self, file: InputFile) -> io.BufferedReader:
        self.count += 1
        return open_stream(file)


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> Unpackings:
    """Small rooms, so that a file has more than fits."""
    for name, size in {"MEMORY_BYTES": 9_999, "HEAD_BYTES": 500, "READ_BYTES": 3_000, "SEEK_BUFFER_BYTES": 700}.items():
        monkeypatch.setattr(sources, name, size)
    counter = Unpackings()
    monkeypatch.setattr(sources, "open_stream", counter.open_stream)
    return counter


def packed(folder, data: bytes, name: str = "a.txt.gz") -> InputFile:
    (folder / name).write_bytes(gzip.compress(data, 1))
    (file,) = list_inputs(str(folder / name))
    return file


@pytest.mark.parametrize("kept", [30_000, 10**9])
def test_whatever_is_sought_is_what_stands_there(tmp_path, unpackings, kept):
    stream = DecompressionCache(kept).open(packed(tmp_path, WHOLE))
    rng = random.Random(1)
    for _ in range(300):
        start = rng.choice([rng.randrange(len(WHOLE) + 100), rng.randrange(600)])
        size = rng.choice([1, 50, 5_000, 30_000])
        stream.seek(start)
        assert stream.read(size) == WHOLE[start : start + size]
    assert (unpackings.count == 1) == (kept == 10**9)


def test_a_file_is_unpacked_once_by_windows_that_follow_each_other_however_large_it_is(tmp_path, unpackings):
    files = DecompressionCache(60_000)
    file = packed(tmp_path, WHOLE)
    for window in range(0, len(WHOLE), 20_000):
        for unit in range(4):
            stream = files.open(file)
            for start in sorted(random.Random(window + unit).sample(range(window, window + 20_000), 20)):
                stream.seek(start)
                assert stream.read(9) == WHOLE[start : start + 9]
            stream.seek(0)
            assert stream.read(300) == WHOLE[:300], "a csv's header"
            assert files.num_bytes <= 33_000
    assert unpackings.count == 1
    stream = files.open(file)
    stream.seek(1000)
    assert stream.read(5) == WHOLE[1000:1005] and unpackings.count == 2


def test_files_that_were_not_read_for_long_are_let_go(tmp_path, unpackings):
    files = DecompressionCache(50_000)
    places = [packed(tmp_path, WHOLE[:20_000], f"{number}.txt.gz") for number in range(3)]
    for _ in range(2):
        for file in places[:2]:
            assert files.open(file).read() in {WHOLE[:20_000], b""}
    assert unpackings.count == 3, (
        "two do not fit: the second one's reading let go of the first, which is read once more"
    )
    assert files.num_bytes <= 50_000


@pytest.mark.parametrize("room", [0, 25_000])
def test_a_full_disk_ends_nothing(tmp_path, unpackings, monkeypatch, room):
    class Full(io.BytesIO):
        def write(self, data) -> int:
            nonlocal room
            room -= len(data)
            if room < 0:
                raise OSError(errno.ENOSPC, "no space left on device")
            return super().write(data)

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **options: Full())
    stream = DecompressionCache(10**9).open(packed(tmp_path, WHOLE))
    for start in (5, 30_000, 31_000, 90_000, 89_000, 199_990, 400):
        stream.seek(start)
        assert stream.read(100) == WHOLE[start : start + 100]


def test_damage_is_told_each_time(tmp_path, unpackings):
    whole = gzip.compress(WHOLE, 1)
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])
    (file,) = list_inputs(str(tmp_path / "a.txt.gz"))
    stream = DecompressionCache().open(file)
    for _ in range(3):
        stream.seek(len(WHOLE) - 1)
        with pytest.raises(UserError, match="damaged"):
            stream.read(1)


def test_a_store_that_does_not_answer_for_a_while_is_asked_again(tmp_path, unpackings, monkeypatch):
    files = DecompressionCache(30_000)
    stream = files.open(packed(tmp_path, WHOLE))
    stream.seek(150_000)
    assert stream.read(5) == WHOLE[150_000:150_005]
    with monkeypatch.context() as patch:
        patch.setattr(sources, "open_stream", refused)
        for _ in range(2):
            stream.seek(90_000)
            with pytest.raises(StoreError, match="not now"):
                stream.read(5)
    stream.seek(90_000)
    assert stream.read(5) == WHOLE[90_000:90_005]


def refused(file: InputFile) -> io.BufferedReader:
    raise StoreError("not now")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "txt"])
def test_rows_of_a_compressed_file_are_the_same_singly(tmp_path, unpackings, ending):
    lines = {
        "csv": "a,b\n" + "".join(f'{n},"x{n}\ny"\n' for n in range(3000)),
        "jsonl": "".join(f'{{"n": {n}}}\n' for n in range(3000)),
        "txt": "".join(f"line {n}\n" for n in range(3000)),
    }[ending]
    file = packed(tmp_path, lines.encode(), f"a.{ending}.gz")
    rows = list(iterate(file))
    wanted = sorted(random.Random(0).sample(range(3000), 200))
    again = list(read_rows(file, [(rows[n].row, rows[n].offset) for n in wanted]))
    assert [row.values for row in again] == [rows[n].values for n in wanted]
    assert unpackings.count == 1
