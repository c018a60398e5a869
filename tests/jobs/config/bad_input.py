"""Generated nonsense: specs as YAML text, rows as lines of JSON, tables of odd types, files that are torn or wrongly encoded."""

import datetime
import decimal
import gzip
import json
import string

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

# ---- specs

SPEC = """\
seed: 0
task: {kind: infill, mask: {kind: given}}
input: {path: rows.jsonl, columns: {id: id, tokens: tokens}}
model: {path: MODEL, tokenizer: none, device: cpu}
decoder: {kind: assd, k: 3}
output: {path: run}
"""
KEYS = (
    "name", "seed", "task", "task.kind", "task.mask", "task.mask.kind", "task.mask.rate", "task.stop", "task.chat",
    "task.max_new_tokens", "input", "input.path", "input.columns", "input.columns.id", "input.columns.text",
    "input.limit", "input.chunk_chars", "model", "model.path", "model.family", "model.revision", "model.mask_id",
    "model.tokenizer", "model.dtype", "model.device", "decoder", "decoder.kind", "decoder.k", "decoder.head",
    "decoder.drafter", "decoder.drafter.path", "sampling", "sampling.temperature", "sampling.top_p",
    "sampling.acceptance", "batching.max_rows", "batching.window", "workers.count", "workers.gpus", "errors.max_rate",
    "errors.max_count", "output", "output.path", "output.trace", "output.unit_rows", "s3", "s3.endpoint", "s3.region",
    "x", "decoder.kk", "task.mask.mask", "a.b.c", "s3.secret_access_key",
)  # fmt: skip
VALUES = (
    "null", "true", "0", "-1", "3", "1e308", "1e999", ".inf", ".nan", "-0.0", "1_000", "0x" + "f" * 5000, "9" * 5000,
    str(2**63), str(-(2**63) - 1), "''", '"\\ud800"', '"\\0"', '"a\\nb"', '"\\x1b[31m"', "x" * 300, "x/" * 3000, "'é'",
    "../../nope", "~nobody/x", "s3://", "s3://bucket@user/x", "hf://x?bad=1", "builtin:nope", "https://a.b/c?d=e",
    "file:///etc/passwd", "'**/*'", "'['", "/dev/null/x", "[]", "{}", "[1, 2]", "[[[[]]]]", "{a: {b: {c: d}}}", "{1: 2}",
    "{null: 3}", "{[1]: 2}", "[" * 400 + "]" * 400, "2001-01-01", "!!binary aGVsbG8=", "!!set {a, b}", "!!omap [a: 1]",
    "!!python/object:os.system x", "!!bool x", "!!timestamp x", "!!int x", "!!float x", "!foo bar", "*nope", "&a [*a]",
    "&a {k: *a}", "{<<: 5}", "{<<: {kind: infill}}", "infill", "complete", "score", "auto", "none", "any_subset",
    "{kind: random}", "{kind: spans, count: 2, length: 3}", "{kind: ngram, max_n: 2, min_n: 9}", "cuda:99", "http://[::1",
)  # fmt: skip


@st.composite
def spec_texts(draw: st.DrawFn, model: str) -> bytes:
    """A spec that runs, with a few keys set to something else, now and then cut, bent or wrongly encoded."""
    lines = SPEC.replace("MODEL", model).splitlines()
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        section, *inner = key.split(".")
        value = draw(st.sampled_from(VALUES))
        for name in reversed(inner):
            value = f"{{{name}: {value}}}"
        if draw(st.booleans()):
            lines = [line for line in lines if not line.startswith(f"{section}:")]
        lines.append(f"{section}: {value}")
    data = "\n".join(lines).encode()
    damage = draw(st.sampled_from(["none", "none", "none", "none", "cut", "bent", "utf-16"]))
    return data.decode().encode("utf-16") if damage == "utf-16" else draw(damaged(data, damage))


@st.composite
def damaged(draw: st.DrawFn, data: bytes, damage: str) -> bytes:
    """The data cut somewhere, with some bytes changed, or with something behind it."""
    if damage == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if damage == "longer":
        return data + draw(st.binary(min_size=1, max_size=30))
    changed = bytearray(data)
    if damage == "bent" and changed:
        for place in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
            changed[place] = draw(st.integers(0, 255))
    return bytes(changed)


# ---- rows

GOOD: dict = {
    "text": "x = <mask:2>\nb. c. d",
    "prompt": "p",
    "completion": "c",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [7, None, 9, 10],
    "prefix": "aa",
    "suffix": "bb",
    "sentences": ["A.", "B.", "C."],
    "spans": [[0, 2]],
    "seed": 5,
}
"""Something for every task to read."""

NAMES = (*GOOD, "id", "custom_id", "body", "role", "content", "", "ключ")
ODD = (
    None, True, 0, -1, 7, 2**31, 2**63, 2**64, 10**30, 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "a",
    "x = <mask:2>", "<mask:0>", "<mask:999999999999>", "<mask>" * 50, "é", "\U0001f600", "\0", "a\nb\n", "...!?", "\ud800",
    "\u202e", "A" * 3000, "../../etc/passwd", [1, 2], [None, 3], [None], [[0, 1]], [[5, 1]], [{"start": 0, "end": 1}],
    [{"role": "user", "content": [{"type": "text", "text": "t"}]}], [{"role": "user", "content": {}}], [10**30], [True],
)  # fmt: skip
ODD_VALUES = st.recursive(
    st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bad_lines(draw: st.DrawFn) -> bytes:
    """A line that should be a row of JSON: odd values, another shape, too deep, torn, bent, or in another encoding."""
    kind = draw(
        st.sampled_from(["odd", "odd", "odd", "shape", "batch", "deep", "long number", "cut", "bent", "utf-16"])
    )
    name = f"bad-{draw(st.integers(0, 10**9))}"
    row = {**GOOD, "id": name}
    if kind == "odd":
        row |= draw(st.dictionaries(st.sampled_from(NAMES), ODD_VALUES, min_size=1, max_size=3))
    elif kind == "shape":
        return json.dumps(draw(ODD_VALUES)).encode()
    elif kind == "batch":
        row = {"custom_id": draw(st.just(name) | st.sampled_from(ODD)), "body": draw(ODD_VALUES)}
    elif kind == "deep":
        depth = draw(st.sampled_from([100, 480, 900, 950, 970, 980, 990, 3000, 100_000]))
        return f'{{"id": "{name}", "text": "a", "x": {"[" * depth}{"]" * depth}}}'.encode()
    elif kind == "long number":
        return f'{{"id": "{name}", "text": {"9" * draw(st.sampled_from([100, 4000, 5000]))}}}'.encode()
    data = json.dumps(row).encode()
    if kind == "utf-16":
        return data.decode().encode("utf-16").replace(b"\n", b" ")
    return draw(damaged(data, kind)).replace(b"\n", b" ")


# ---- tables and files

SMALL = st.integers(0, 9)
NANOS = st.integers(-(2**63), 2**63 - 1)
COLUMNS: tuple[tuple[st.SearchStrategy, pa.DataType], ...] = (
    (st.none(), pa.null()),
    (st.sampled_from(["x = <mask:2>", "é" * 50, ""]), pa.string()),
    (st.just("x"), pa.large_string()),
    (st.just("x"), pa.string_view()),
    (st.sampled_from("abc"), pa.dictionary(pa.int8(), pa.string())),
    (st.binary(max_size=5), pa.binary()),
    (st.just(b"abcd"), pa.binary(4)),
    (st.integers(0, 2**64 - 1), pa.uint64()),
    (st.integers(-128, 127), pa.int8()),
    (st.booleans(), pa.bool_()),
    (st.floats(width=16), pa.float16()),
    (st.floats(), pa.float64()),
    (st.just(decimal.Decimal("1.5")), pa.decimal128(38, 5)),
    (st.just(decimal.Decimal("1.5")), pa.decimal256(76, 5)),
    (NANOS, pa.timestamp("ns")),
    (NANOS, pa.timestamp("s", "Europe/Berlin")),
    (st.integers(-(2**31), 2**31 - 1), pa.date32()),
    (NANOS, pa.date64()),
    (NANOS, pa.duration("s")),
    (NANOS, pa.time64("ns")),
    (st.just(datetime.time(1, 2)), pa.time32("s")),
    (st.just((1, 2, 3)), pa.month_day_nano_interval()),
    (st.lists(st.none() | SMALL, max_size=4), pa.list_(pa.int32())),
    (st.just([1, 2]), pa.list_(pa.int32(), 2)),
    (st.lists(st.just(b"\xff"), max_size=2), pa.large_list(pa.binary())),
    (st.just([[["x"], None]]), pa.list_(pa.list_(pa.list_(pa.string())))),
    (st.just([None, {"role": "user", "content": "x"}]), pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))),
    (st.just([("a", 1)]), pa.map_(pa.string(), pa.int64())),
    (st.just({}), pa.struct([])),
)  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A few columns of odd types under names that tasks read; now and then strings that are no UTF-8."""
    rows = draw(st.integers(1, 6))
    columns = {"id": pa.array([f"row-{number}" for number in range(rows)])}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        values, kind = draw(st.sampled_from(COLUMNS))
        column = pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)
        if pa.types.is_binary(kind) and draw(st.booleans()):
            column = pa.Array.from_buffers(pa.string(), rows, column.buffers(), column.null_count)
        columns[name] = column
    return pa.table(columns)


@st.composite
def table_files(draw: st.DrawFn) -> tuple[str, bytes] | None:
    """Name and content of a columnar file, whole or not; None where Arrow can't write such a table."""
    table, name = draw(tables()), draw(st.sampled_from(["a.parquet", "a.arrow", "b.arrow"]))
    sink = pa.BufferOutputStream()
    try:
        if name == "a.parquet":
            pq.write_table(table, sink, row_group_size=draw(st.sampled_from([1, 2, 100])))
        else:
            make = pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream
            with make(sink, table.schema) as writer:
                writer.write_table(table)
    except (pa.ArrowException, NotImplementedError):
        return None
    damage = draw(st.sampled_from(["none", "none", "cut", "bent", "longer"]))
    return name, draw(damaged(sink.getvalue().to_pybytes(), damage))


@st.composite
def text_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """Name and content of a file of lines or records, plain or packed, whole or not."""
    name = draw(st.sampled_from(["a.jsonl", "a.csv", "a.tsv", "a.txt", "a.py"]))
    if name == "a.jsonl":
        data = b"\n".join(json.dumps({**GOOD, "id": f"row-{number}"}).encode() for number in range(5))
    elif name in {"a.csv", "a.tsv"}:
        records = st.sampled_from(
            ["a,x <mask>", 'b,"x\ny"', "c", '"open,d', "e,", "\0,f", 'g,"""é"', "h,i,j", "", "k\tl"]
        )
        data = "\n".join(["id,text", *draw(st.lists(records, max_size=8))]).encode()
    else:
        data = draw(st.text(string.ascii_letters + "\n\r .<mask>é\0", max_size=200)).encode()
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-32"]))
    data = draw(damaged(data.decode().encode(encoding), draw(st.sampled_from(["none", "cut", "bent"]))))
    packed = draw(st.sampled_from(["", "", ".gz", ".zst"])) if name != "a.py" else ""
    if packed:
        data = gzip.compress(data) if packed == ".gz" else pa.compress(data, "zstd", asbytes=True)
        data = draw(damaged(data, draw(st.sampled_from(["none", "cut", "bent", "longer"]))))
    return name + packed, data
