"""Kinds of damage: from a sound file to many odd ones, the same for a seed.

A damage is a name and what takes the place of the file: bytes, or a function that puts something else there.
"""

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

Content = bytes | Callable[[Path], None]
Damage = tuple[str, Content]

LONG: Final = 200_000
DEEP: Final = 100_000
LFS: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"


class Raw(str):
    """JSON text that stands for itself: `json.dumps` could not write it."""


VALUES: Final[dict[str, Any]] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "a fraction": 0.5,
    "2**40": 2**40,
    "10**30": 10**30,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "1e300": 1e300,
    "no text": "",
    "a text": "odd",
    "a long text": "x" * LONG,
    "a lone surrogate": "\ud800",
    "no list": [],
    "a list": [1, "a", None],
    "no object": {},
    "an object": {"a": {"b": [1]}},
    "deep lists": Raw("[" * DEEP + "]" * DEEP),
}


def of_any_file(data: bytes, seed: int, *, cuts: int = 6, flips: int = 8) -> Iterator[Damage]:
    rng = random.Random(seed)
    yield "empty", b""
    yield "gone", lambda path: None
    yield "a folder", Path.mkdir
    yield "a link to itself", lambda path: path.symlink_to(path.name)
    yield "a pointer of git-lfs", LFS
    yield "zeros appended", data + bytes(100)
    yield "twice", data + data
    yield "all zeros", bytes(len(data))
    yield "random bytes", rng.randbytes(len(data))
    yield "first byte gone", data[1:]
    for at in sorted({1, len(data) - 1, *(rng.randrange(1, len(data)) for _ in range(cuts))}):
        yield f"cut after {at} bytes", data[:at]
    for at in sorted(rng.randrange(len(data)) for _ in range(flips)):
        yield f"bit flipped in byte {at}", data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def of_text(data: bytes) -> Iterator[Damage]:
    half = len(data) // 2
    yield "a byte order mark", b"\xef\xbb\xbf" + data
    yield "UTF-16", data.decode().encode("utf-16")
    yield "not UTF-8", data[:half] + b"\xff\xfe" + data[half:]
    yield "a NUL inside", data[:half] + b"\0" + data[half:]
    yield "line ends of Windows", data.replace(b"\n", b"\r\n")


def of_json(data: bytes, seed: int, *, skip: Iterable[str] = (), most: int | None = None) -> Iterator[Damage]:
    """A JSON file: each value of each key replaced by each odd one, keys gone and keys twice. `most`: of so many a share."""
    yield from of_text(data)
    whole = json.loads(data)
    for name, value in VALUES.items():
        yield f"only {name}", _dumped(value)
    yield "deep objects", b'{"a":' * DEEP + b"1" + b"}" * DEEP
    yield "not JSON", b"{'a': 1,}"
    changes = list(_changed(whole, frozenset(skip)))
    if most is not None and len(changes) > most:
        changes = random.Random(seed).sample(changes, most)
    for name, make in changes:
        yield name, make()


def _changed(whole: Any, skip: frozenset[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for path, held in _places(whole, skip):
        spoken = ".".join(map(str, path))
        for name, value in VALUES.items():
            if type(value) is not type(held) or value != held:
                yield f"{spoken} = {name}", partial(_with_value, whole, path, value)
        if isinstance(held, bool) or not isinstance(held, int):
            continue
        for value in (held - 1, held + 1, held * 2):
            yield f"{spoken} = {value}", partial(_with_value, whole, path, value)
    for path, _ in _places(whole, skip):
        if isinstance(path[-1], str):
            yield f"no {'.'.join(map(str, path))}", partial(_without, whole, path)
            yield f"{'.'.join(map(str, path))} twice", partial(_twice, whole, path[-1])


def _places(held: Any, skip: frozenset[str], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The places of values; of a list the first alone."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(held, dict):
        items = held.items()
    elif isinstance(held, list):
        items = list(enumerate(held))[:1]
    for key, value in items:
        yield (*path, key), value
        if key not in skip:
            yield from _places(value, skip, (*path, key))


def _with_value(whole: Any, path: tuple[Any, ...], value: Any) -> bytes:
    changed = place = copy.deepcopy(whole)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return _dumped(changed)


def _without(whole: Any, path: tuple[Any, ...]) -> bytes:
    changed = place = copy.deepcopy(whole)
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return _dumped(changed)


def _twice(whole: Any, key: str) -> bytes:
    return _dumped(whole).replace(
        json.dumps(key).encode(), json.dumps(key).encode() + b": null, " + json.dumps(key).encode(), 1
    )


def _dumped(value: Any) -> bytes:
    """JSON text in which `Raw` texts stand as they are."""
    raw: list[Raw] = []

    def marked(held: Any) -> Any:
        if isinstance(held, Raw):
            raw.append(held)
            return f"<raw {len(raw) - 1}>"
        if isinstance(held, dict):
            return {key: marked(value) for key, value in held.items()}
        return [marked(value) for value in held] if isinstance(held, list) else held

    text = json.dumps(marked(value), indent=1)
    for number, found in enumerate(raw):
        text = text.replace(f'"<raw {number}>"', found)
    return text.encode()


def of_safetensors(data: bytes, seed: int, *, most: int = 60) -> Iterator[Damage]:
    """A safetensors file: the length of its header, and what the header says of its tensors."""
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]

    def with_header(text: bytes, size: int | None = None) -> bytes:
        return (len(text) if size is None else size).to_bytes(8, "little") + text + numbers

    for size in (0, 1, length - 1, length + 1, len(data), 2**31, 2**63 - 1, 2**64 - 1):
        yield f"header of {size} bytes", size.to_bytes(8, "little") + data[8:]
    names = [name for name in header if name != "__metadata__"]
    first, second = names[0], names[-1]
    changes: dict[str, Any] = {
        "a tensor less": {key: value for key, value in header.items() if key != second},
        "a tensor more": header | {"odd": header[first]},
        "another name": {("odd" if key == first else key): value for key, value in header.items()},
        "tensors swapped": header | {first: header[second], second: header[first]},
    }
    for dtype in ("BF16", "F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "odd"):
        changes[f"dtype {dtype}"] = header | {first: header[first] | {"dtype": dtype}}
    for shape in ([], [0], [2**40], [2**32, 2**32], [-1], header[first]["shape"][::-1], [*header[first]["shape"], 1]):
        changes[f"shape {shape}"] = header | {first: header[first] | {"shape": shape}}
    for begin, end in ((0, 0), (0, len(data)), (-1, 4), (4, 0), (2**62, 2**62 + 4)):
        changes[f"offsets {begin}, {end}"] = header | {first: header[first] | {"data_offsets": [begin, end]}}
    for name, changed in changes.items():
        yield name, with_header(json.dumps(changed).encode())
    for name, content in of_json(json.dumps({first: header[first]} | header).encode(), seed, most=most):
        assert isinstance(content, bytes)
        yield f"header: {name}", with_header(content)
    for name, number in (("NaN", b"\xff\xff\xff\xff"), ("infinity", b"\0\0\x80\x7f"), ("1e38", b"\x99\x76\x96\x7e")):
        yield f"weights of {name}", data[: 8 + length] + number * (len(numbers) // 4)
        yield f"the last weight {name}", data[:-4] + number


def put(path: Path, content: Content) -> None:
    """Let the damage take the file's place; a file that others link to stays as it is."""
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
