"""Resolves `input.path` to a sorted list of files, each with its format and version.

Knows the places (local, buckets, Hugging Face, the interpreter's own sources) and the file endings; opens no file.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.huggingface import list_dataset
from draftmill.storage.inputs.rows import FIELD, InputFile
from draftmill.storage.stores.fsspec_store import DRIVERS, UNSEEN, FsspecStore
from draftmill.storage.stores.store import Place, ReadStore, Stat, about, is_local, open_store

STDLIB = "builtin:python-stdlib"
STDLIB_CHUNK_CHARS = 384
"""The default piece size for the standard library: pieces that fit a small model's canvas."""

COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
TABLE_FORMATS = frozenset({"parquet", "arrow", "hf"})

_SOURCE_ENDINGS = re.findall(
    r"\S+",
    ".py .pyi .md .rst .c .h .cc .hh .cpp .hpp .cxx .hxx .cu .cuh .java .js .mjs .cjs .ts .tsx .jsx .go .rs .rb .php .pl "
    ".pm .lua .sh .bash .zsh .ps1 .sql .r .jl .scala .kt .kts .swift .cs .fs .ml .mli .hs .ex .exs .erl .clj .el .lisp "
    ".html .htm .css .scss .xml .svg .yaml .yml .toml .ini .cfg .conf .tex .vue .dart .zig .nim .v .sv .vhd .asm .s "
    ".cmake .mk .proto .graphql .tf .nix .log .diff .patch",
)
_ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonlines", ".json-lines", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "csv": (".csv", ".tsv"),
    "txt": (".txt",),
    "text": tuple(_SOURCE_ENDINGS),
}
FORMATS = {ending: name for name, endings in _ENDINGS.items() for ending in endings}
_KNOWN = (
    "known are .jsonl .parquet .arrow .csv .tsv .txt and source files such as .py .md .c; "
    "all but .parquet and .arrow may also end in .gz or .zst"
)
_ROW_FORMATS = ("jsonl", "parquet", "arrow", "csv")
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_ABOUT_DATA = re.compile(r"(readme|license|licence|copying|notice|changelog|citation|dataset_info)", re.IGNORECASE)
_WILD = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")  # the innermost ones
MOST_ALTERNATIVES = 1000


def list_inputs(*places: Place | str, delimiter: str | None = None) -> list[InputFile]:
    """Return the inputs at a place, sorted by name, never an empty list; for several places one after the other.

    A place is a file, a folder, a glob (`**` for any depth, `{a,b}` for either), the same in a bucket, `hf://DATASET` or
    `builtin:python-stdlib`. A file or folder of exactly that name comes before the meaning as a glob. In a folder hidden files,
    names with a leading `_` and unknown endings are skipped. A file found at several places is listed once, and names are
    relative to the places' common part. `delimiter` is stored with each csv file. Raises UserError if nothing matches, or a
    file's format is unknown.
    """
    files = _join([_list_any(Place(place) if isinstance(place, str) else place) for place in places])
    if delimiter is None:
        return files
    if not any(file.format == "csv" for file in files):
        reason = f"{delimiter!r} is for csv files, of which there are none; allowed: null"
        raise UserError(reason, field="input.delimiter")
    return [replace(file, delimiter=delimiter) if file.format == "csv" else file for file in files]


def _list_any(place: Place) -> list[InputFile]:
    """The files at one place; an existing file or folder with braces in its name takes precedence over expansion."""
    alternatives = expand_braces(place.url)
    if len(alternatives) == 1 or _exists(place):
        return _list_one(place)
    groups = []
    for alternative in alternatives:
        try:
            groups.append(_list_one(place.at(alternative)))
        except NothingThere:  # of the four patterns in `{a,b}/*.{jsonl,csv}` not all must match
            if not _WILD.search(alternative):
                raise
    if not groups:
        raise NothingThere(f"nothing is at {place.url!r}", field=FIELD)
    return sorted(_join(groups), key=lambda file: file.name)


def _exists(place: Place) -> bool:
    """Whether a file or folder of exactly this name exists."""
    path = place.url
    if is_local(path):
        return os.path.exists(os.path.expanduser(path))
    if path.startswith("hf://") or _BRACES.search(path.split("/")[2]):
        return False
    with about(FIELD):
        bucket, key = open_bucket(place)
        found = bucket.list(key.rstrip("/"))
        return any(f"{stat.name}/".startswith(f"{key.rstrip('/')}/") for stat in found)


def _list_one(place: Place) -> list[InputFile]:
    path = place.url
    if path == STDLIB:
        return _list_stdlib()
    if path.startswith("builtin:"):
        raise UserError(f"{path!r} is not a builtin input; allowed: {STDLIB}", field=FIELD)
    if path.startswith("hf://"):
        return list_dataset(path, list_inputs)
    return _list_local(os.path.expanduser(path)) if is_local(path) else _list_bucket(place)


class NothingThere(UserError):
    """No file exists at a path."""


def expand_braces(pattern: str) -> list[str]:
    """`a.{csv,tsv}` -> `a.csv`, `a.tsv`, in that order, also nested; braces without a comma are literal."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    choices = (f"{before}{choice}{after}" for choice in match[1].split(","))
    paths = dict.fromkeys(path for choice in choices for path in expand_braces(choice))
    if len(paths) > MOST_ALTERNATIVES:
        raise UserError(f"{pattern[:80]!r} expands to more than {MOST_ALTERNATIVES} paths", field=FIELD)
    return list(paths)


def _join(groups: list[list[InputFile]]) -> list[InputFile]:
    """The files of several places without duplicates; names are relative to the places' common part."""
    if len(groups) == 1:
        return groups[0]
    unique: dict[str, InputFile] = {}
    for group in groups:
        for file in group:
            unique.setdefault(file.uri, file)
    files = list(unique.values())
    roots = [_root(file).split("/")[:-1] for file in files]
    levels = enumerate(zip(*roots, strict=False))
    shared = next((level for level, parts in levels if len(set(parts)) > 1), min(map(len, roots)))
    return [replace(file, name="/".join([*root[shared:], file.name])) for file, root in zip(files, roots, strict=True)]


def _root(file: InputFile) -> str:
    """The prefix that names are relative to, with a slash at its end."""
    return file.uri.removesuffix(file.name) if file.uri.endswith(f"/{file.name}") else f"{file.uri}/"


def format_of(name: str) -> tuple[str, str | None]:
    """Return (format, compression) by a file's endings; the format is empty if unknown. Columnar files aren't compressed."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    known = FORMATS.get(suffixes[-1], "") if suffixes else ""
    return ("", None) if not known or (compression and known in TABLE_FORMATS) else (known, compression)


def _list_local(path: str) -> list[InputFile]:
    if os.path.isdir(path):
        return _data_files(path, list(_local_files(path, _walk(path))))
    if os.path.isfile(path):
        return _sorted(path, list(_local_files(os.path.dirname(path), [path])))
    return _sorted(path, list(_local_files(_fixed_part(path), glob.glob(path, recursive=True))))


def _local_files(root: str, paths: Iterable[str]) -> Iterator[InputFile]:
    for path in paths:
        if not os.path.isfile(path):
            continue  # a dangling link, a socket
        stat = os.stat(path)
        name = os.path.relpath(path, root or ".").replace(os.sep, "/")
        name = name.encode("utf-8", "backslashreplace").decode("utf-8")  # row ids contain names
        yield InputFile(os.path.abspath(path), name, stat.st_size, None, stat.st_mtime, *format_of(path))


def _walk(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        yield from (os.path.join(place, name) for name in names if not _is_hidden(name))


def _refuse(error: OSError) -> None:
    # os.walk would skip an unreadable folder, and its rows would be lost silently.
    raise UserError(f"{error.filename}: {error.strerror}", field=FIELD)


def open_bucket(place: Place) -> tuple[ReadStore, str]:
    """The bucket of a URL, and the name in it. UserError if its scheme is not one of those that inputs may have."""
    scheme, _, rest = place.url.partition("://")
    if scheme not in {"s3", *DRIVERS}:
        allowed = ", ".join(f"{name}://..." for name in ("s3", "hf", *DRIVERS))
        raise UserError(f"{scheme}:// is not allowed; allowed: a local path, {allowed}{UNSEEN}", field=FIELD)
    bucket, _, key = rest.partition("/")
    return _open(place.at(f"{scheme}://{bucket}")), key


@lru_cache(maxsize=4)
def _open(bucket: Place) -> ReadStore:
    return open_store(bucket) if bucket.url.startswith("s3://") else FsspecStore(bucket.url)


def is_object(file: InputFile) -> bool:
    """Whether an input is an object in a bucket."""
    return file.format != "hf" and not is_local(file.uri)


def _list_bucket(place: Place) -> list[InputFile]:
    path = place.url
    with about(FIELD):
        bucket, key = open_bucket(place)
        wild, folder = bool(_WILD.search(key)), f"{key.rstrip('/')}/" if key else ""
        root = _fixed_part(key) if wild else key
        objects = _without_markers(bucket.list(root))
    if exact := [stat for stat in objects if stat.name == key]:
        return _sorted(path, [_object_file(place, os.path.dirname(key), stat) for stat in exact])
    inside = [stat for stat in objects if stat.name.startswith(folder)]
    if inside or not wild:
        files = [_object_file(place, folder, stat) for stat in inside]
        return _data_files(path, [file for file in files if not any(map(_is_hidden, file.name.split("/")))])
    pattern = glob_pattern(key)
    return _sorted(path, [_object_file(place, root, stat) for stat in objects if pattern.fullmatch(stat.name)])


def _without_markers(objects: Iterable[Stat]) -> list[Stat]:
    """The objects without those that only stand for a folder: `in/`, and empty ones named `in` or `in_$folder$`."""
    files = [stat for stat in objects if not stat.name.endswith("/")]
    empty = {stat.name for stat in files if not stat.size}
    folders = {str(folder) for stat in files for folder in PurePosixPath(stat.name).parents} if empty else set()
    empty = {name for name in empty if name in folders or name.endswith("_$folder$")}
    return [stat for stat in files if stat.name not in empty]


def _object_file(place: Place, root: str, stat: Stat) -> InputFile:
    uri = "/".join([*place.url.split("/")[:3], stat.name])
    name = stat.name.removeprefix(root).lstrip("/")
    return InputFile(uri, name, stat.size, stat.etag, stat.mtime_s, *format_of(stat.name), s3=place.s3)


def _list_stdlib() -> list[InputFile]:
    """The interpreter's own Python sources without their tests; the uri is the same on every machine."""
    root = sysconfig.get_path("stdlib")
    # The date of installation does not identify the content; the size does, roughly.
    files = [
        replace(file, uri=f"{STDLIB}/{file.name}", mtime_s=None)
        for file in _local_files(root, _walk(root))
        if file.name.endswith(".py") and not _NOT_STDLIB.intersection(file.name.split("/")[:-1]) and file.size
    ]
    return _sorted(STDLIB, files)


def local_path(file: InputFile) -> Path:
    """The path of a local or builtin input on this machine."""
    if file.uri.startswith(f"{STDLIB}/"):
        return Path(sysconfig.get_path("stdlib"), file.uri.removeprefix(f"{STDLIB}/"))
    return Path(file.uri)


def _data_files(path: str, files: list[InputFile]) -> list[InputFile]:
    """A folder's known files; UserError if it mixes data files and text files, since one kind is probably a mistake."""
    known = [file for file in files if file.format and not _is_private(file)]
    known = [file for file in known if not file.name.lower().endswith(".json")]  # settings, more often than rows
    rows = [file for file in known if file.format in _ROW_FORMATS]
    if rows:
        known = [file for file in known if not _ABOUT_DATA.match(PurePosixPath(file.name).name)]
    texts = [file for file in known if file.format not in _ROW_FORMATS]
    if rows and texts:
        raise UserError(
            f"{path} holds both data files ({rows[0].name}) and text files ({texts[0].name}): "
            f"name one kind with a glob, for example {path.rstrip('/')}/**/*{PurePosixPath(rows[0].name).suffix}",
            field=FIELD,
        )
    if files and not known:
        raise UserError(f"{path} holds no file of a known format, only {files[0].name} ...; {_KNOWN}", field=FIELD)
    return _sorted(path, known)


def _sorted(path: str, files: list[InputFile]) -> list[InputFile]:
    """The files by name; UserError if there are none, or if the format of one is unknown."""
    if not files:
        hint = "; in a glob, [[] stands for the character [" if "[" in path else ""
        raise NothingThere(f"nothing is at {path!r}{hint}", field=FIELD)
    for file in files:
        if not file.format:
            raise UserError(f"{file.uri}: the format is not known by its ending; {_KNOWN}", field=FIELD)
    return sorted(files, key=lambda file: file.name)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_private(file: InputFile) -> bool:
    """Whether a leading `_` marks metadata (`_SUCCESS`, `_delta_log/`); in source folders it is an ordinary name."""
    return file.format != "text" and any(part.startswith("_") for part in file.name.split("/"))


def _fixed_part(pattern: str) -> str:
    """The folder in front of a glob's first wildcard."""
    wild = _WILD.search(pattern)
    return pattern[: wild.start()].rpartition("/")[0] if wild else os.path.dirname(pattern)


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob over whole object names as a regular expression; it matches what `glob.glob` finds on a disk.

    `*`, `?` and `[a-z]` stay inside a part, `**` as a part is any depth, and none of them matches a hidden name.
    """
    *parts, last = pattern.split("/")
    any_depth = r"(?:(?!\.)[^/]+/)*"
    folders = [any_depth if part == "**" else f"{_part_pattern(part)}/" for part in parts]
    return re.compile("".join(folders) + (rf"{any_depth}(?!\.)[^/]+" if last == "**" else _part_pattern(last)))


def _part_pattern(part: str) -> str:
    tokens = re.findall(r"\[!?\]?[^\]]*\]|.", part, re.DOTALL)
    shown = "" if part.startswith(".") else r"(?!\.)"
    special = {"*": "[^/]*", "?": "[^/]"}
    # fnmatch knows what sets mean, among them such as [2024-11]; [:-2] removes its end of the text.
    sets = (f"(?!/){fnmatch.translate(token)[:-2]}" if len(token) > 1 else special.get(token) for token in tokens)
    return shown + "".join(found or re.escape(token) for found, token in zip(sets, tokens, strict=True))
