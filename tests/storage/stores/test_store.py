"""The verbs, the same over local disk, memory and S3."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftmill.storage.errors import StoreError, StoreFull, StoreRefused, UserError
from draftmill.storage.failpoints import FailpointError
from draftmill.storage.stores import local
from draftmill.storage.stores.block_cache import BLOCK_BYTES, open_object
from draftmill.storage.stores.store import AlreadyExists, Conflict, MemoryStore, NotFound, Stat, open_store, probe


def test_what_is_created_is_read_back(store):
    stat = store.create("data/a.bin", b"0123456789", metadata={"unit": "3"})
    assert (stat.name, stat.size) == ("data/a.bin", 10)
    assert store.get("data/a.bin") == b"0123456789"
    assert store.get_range("data/a.bin", 2, 3) == b"234"
    assert store.get_range("data/a.bin", 8, 100) == b"89"
    assert store.get_range("data/a.bin", 10, 5) == b""
    assert store.exists("data/a.bin")
    again = store.stat("data/a.bin")
    assert again is not None and (again.size, again.etag) == (10, stat.etag)


def test_the_second_creation_is_refused_and_changes_nothing(store):
    first = store.create("data/a", b"first")
    with pytest.raises(AlreadyExists) as refused:
        store.create("data/a", b"second")
    assert refused.value.stat.etag == first.etag
    assert store.get("data/a") == b"first"


def test_of_many_creators_exactly_one_wins(store):
    def create(index: int) -> bool:
        try:
            store.create("data/raced", b"%d" % index)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        winners = [index for index, won in enumerate(pool.map(create, range(8))) if won]
    assert len(winners) == 1
    assert store.get("data/raced") == b"%d" % winners[0]


def test_put_overwrites_and_an_empty_object_is_one(store):
    store.put("a", b"old")
    store.put("a", b"")
    assert store.get("a") == b""
    assert store.exists("a")


def test_replace_needs_the_version_that_was_read(store):
    first = store.create("lease", b"1")
    second = store.replace("lease", b"2", etag=first.etag)
    assert second.etag != first.etag
    with pytest.raises(Conflict):
        store.replace("lease", b"3", etag=first.etag)
    assert store.get("lease") == b"2"
    with pytest.raises(Conflict):
        store.replace("absent", b"3", etag=first.etag)
    assert not store.exists("absent")


def test_of_many_replacers_of_one_version_exactly_one_wins(store):
    version = store.create("lease", b"0")
    for turn in range(3):
        found = version

        def replace(index: int, found: Stat = found) -> Stat | None:
            try:
                return store.replace("lease", b"by %d" % index + found.etag.encode(), etag=found.etag)
            except Conflict:
                return None

        with ThreadPoolExecutor(8) as pool:
            won = [stat for stat in pool.map(replace, range(8)) if stat]
        assert len(won) == 1, f"turn {turn}"
        (version,) = won
    assert [stat.name for stat in store.list()] == ["lease"]


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as some clusters have."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_a_disk_without_locks_replaces_too(tmp_path):
    store = open_store(str(tmp_path))
    probe(store)
    test_replace_needs_the_version_that_was_read(store)
    store.delete("lease")
    test_of_many_replacers_of_one_version_exactly_one_wins(store)
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_a_replacer_killed_before_it_renamed_leaves_a_version_to_replace(tmp_path):
    store = open_store(str(tmp_path))
    first = store.create("lease", b"1")
    code = "import sys\nfrom draftmill.storage.stores.store import open_store\n"
    code += "open_store(sys.argv[1]).replace('lease', b'killed', etag=sys.argv[2])"
    environment = os.environ | {"DRAFTMILL_FAILPOINTS": "local.before_rename=kill"}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path), first.etag], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL and store.get("lease") == b"1"
    with pytest.raises(Conflict):
        store.replace("lease", b"2", etag=first.etag)
    version = store.stat("lease")
    assert version is not None and store.get("lease") == b"killed", "the other one has won, a little later"
    store.replace("lease", b"3", etag=version.etag)
    assert store.get("lease") == b"3"


def test_a_replacer_whose_link_another_renames_has_won(tmp_path, monkeypatch):
    """Between the link and the rename of one writer another comes, which loses; the first one has an etag of its own version."""
    store, plain, found = open_store(str(tmp_path)), local.link_new, list[str]()
    first = store.create("lease", b"1")

    def link_new(temporary, path) -> bool:
        is_new = plain(temporary, path)
        if not found:
            found.append("another")
            with pytest.raises(Conflict):
                store.replace("lease", b"another", etag=first.etag)
        return is_new

    monkeypatch.setattr(local, "link_new", link_new)
    won = store.replace("lease", b"ours", etag=first.etag)
    assert (store.get("lease"), won.size) == (b"ours", 4)
    assert store.replace("lease", b"next", etag=won.etag).size == 4 and found


def test_list_gives_finished_objects_in_order_of_names(store):
    for name in ("data/b", "data/a", "data/c/d", "data-x", "other"):
        store.create(name, b"x" * len(name))
    assert [(stat.name, stat.size) for stat in store.list("data/")] == [("data/a", 6), ("data/b", 6), ("data/c/d", 8)]
    assert [stat.name for stat in store.list()] == ["data-x", "data/a", "data/b", "data/c/d", "other"]
    assert list(store.list("nothing/")) == []


def test_what_is_absent_is_absent(store):
    assert not store.exists("a")
    assert store.stat("a") is None
    with pytest.raises(NotFound):
        store.get("a")
    store.delete("a")


def test_deleting_frees_the_name(store):
    store.create("a", b"1")
    store.delete("a")
    store.create("a", b"2")
    assert store.get("a") == b"2"


def test_the_probe_trusts_these_stores_and_leaves_nothing(store):
    probe(store)
    assert list(store.list()) == []


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_the_probe_refuses_a_store_that_ignores_either_condition(verb, monkeypatch):
    store = MemoryStore(f"ignores-{verb}")
    monkeypatch.setattr(store, verb, lambda name, data, **_: store.put(name, data))
    with pytest.raises(StoreRefused, match=r"^output\.path: memory://.* ignores conditional writes .*; use a store"):
        probe(store)
    assert list(store.list()) == []


def test_an_object_is_a_seekable_file(store):
    data = hashlib.shake_128(b"seed").digest(BLOCK_BYTES + 1000)
    store.create("large", data)
    with open_object(store, "large") as file:
        file.seek(BLOCK_BYTES - 10)
        assert file.read(20) == data[BLOCK_BYTES - 10 : BLOCK_BYTES + 10]
        file.seek(-5, 2)
        assert file.read() == data[-5:]
        file.seek(0)
        assert file.read() == data
    with pytest.raises(NotFound):
        open_object(store, "absent")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a\\b", "a\0b", "."])
def test_a_name_never_leaves_its_store(name, tmp_path):
    with pytest.raises(ValueError):
        open_store(str(tmp_path)).create(name, b"x")


def test_an_unknown_url_is_the_users_error():
    with pytest.raises(UserError, match="gs://bucket"):
        open_store("gs://bucket")


def test_an_unwritable_folder_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreRefused, match="file"):
        probe(open_store(str(tmp_path / "file" / "run")))


@pytest.mark.parametrize("write", ["create", "put", "replace"])
def test_a_folder_in_the_place_of_a_file_is_the_users_error(write, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="a is a folder, and a file is needed there; move it away"):
        getattr(open_store(str(tmp_path)), write)("a", b"x", **({"etag": "1-2-3"} if write == "replace" else {}))


def test_an_interrupted_creation_shows_nothing_and_leaves_nothing(tmp_path, monkeypatch, failpoints):
    store = open_store(str(tmp_path))
    monkeypatch.setenv("DRAFTMILL_FAILPOINTS", "local.before_link=raise")
    with pytest.raises(FailpointError):
        store.create("data/a", b"x")
    assert list(store.list()) == []
    assert list((tmp_path / "data").iterdir()) == []
    store.create("data/a", b"x")


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.create("data/a", b"kept")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store.create("data/b", b"x")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]
    with pytest.raises(StoreFull, match=r"^output\.path: .*No space left"):
        probe(store)


def test_a_link_whose_answer_was_lost_is_a_success(tmp_path, monkeypatch):
    link = os.link

    def lost(source, target) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr("os.link", lost)
    assert open_store(str(tmp_path)).create("data/a", b"x").size == 1


def test_a_file_system_without_links_is_the_users_error(tmp_path, monkeypatch):
    def refuse(source, target) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StoreRefused, match=r"^output\.path: .*can't link"):
        probe(open_store(str(tmp_path)))


def test_a_temporary_file_that_a_killed_writer_left_is_not_listed(tmp_path):
    store = open_store(str(tmp_path))
    store.create("data/a", b"x")
    (tmp_path / "data" / ".tmp-123-abc").write_bytes(b"half")
    assert [stat.name for stat in store.list("data/")] == ["data/a"]


def test_what_killed_writers_left_is_swept_when_nobody_can_still_write_it(tmp_path):
    store = open_store(str(tmp_path))
    store.create("data/a", b"x")
    old, new = tmp_path / "data" / ".tmp-123-abc", tmp_path / "data" / ".tmp-124-def"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.delete_strays()
    assert not old.exists() and new.exists() and store.get("data/a") == b"x"
    open_store(str(tmp_path / "nowhere")).delete_strays()
