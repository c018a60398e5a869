"""What docs/guarantees.md says of trust: no secret in an object or message, no write outside, nothing unpacked or run unasked."""

import ast
import gzip
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from draftmill.actors.rows.makers import maker_for
from draftmill.actors.rows.text import load_tokenizer
from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.actors.task import Complete
from draftmill.jobs.cli import main
from draftmill.jobs.drive.log import shown
from draftmill.jobs.drive.progress import Display
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs import sources
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.secrets import HIDDEN, redacted
from draftmill.storage.stores import s3 as s3_module
from draftmill.storage.stores.store import Place, S3Options, open_store
from tests.actors.tokenizers_for_tests import model_info, recipe_of
from tests.runs.causal_jobs import TOKENIZER
from tests.runs.jobs_here import without_ray
from tests.runs.jobs_of_tests import GOLDEN, write_rows, write_spec
from tests.storage.stores.s3_server import S3Server

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jobs", "actors", "decoders", "storage", "infra")

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED01",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+key/0123456789abcdefghij",
    "AWS_SESSION_TOKEN": "planted-session-token-0123456789",
    "HF_TOKEN": "hf_plantedplantedplanted",
    "MY_SERVICE_PASSWORD": "planted password with spaces",
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch):
    """An environment full of secrets, and S3 clients made of it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    s3_module._client.cache_clear()
    yield SECRETS
    s3_module._client.cache_clear()


def leaks(text: str) -> list[str]:
    return [name for name, value in SECRETS.items() if value in text]


@pytest.fixture
def stage(s3_url: str, s3_server: S3Server, s3_options: S3Options) -> tuple[str, S3Server, S3Options]:
    return s3_url, s3_server, s3_options


@pytest.mark.slow
@pytest.mark.s3
def test_no_object_of_a_run_and_no_word_of_it_holds_a_secret(tmp_path, planted, stage, capfd, caplog):
    """A run on S3 with rows that fail, units that fail, a store that stumbles, a rerun, and every command that reads it.

    What goes wrong says every secret there is, as a careless library might.
    """
    s3_url, s3_server, s3_options = stage
    said = " and ".join(planted.values())
    place = {"endpoint": s3_options.endpoint, "region": s3_options.region}
    spec = write_spec(
        tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 12), output={"path": s3_url, "unit_rows": 4}, s3=place
    )
    options = ["--s3-endpoint", str(s3_options.endpoint)]
    canvas, close = RowUnitIO._canvas, RowUnitIO.close_unit
    failures = iter([True])

    def failing_row(self: RowUnitIO, sample, values):
        if sample.note.planned.id in {"row-1", "row-5"}:
            raise ValueError(f"the tokenizer could not reach https://user:{said}@host: {said}")
        return canvas(self, sample, values)

    def failing_unit(self: RowUnitIO, *arguments):
        if next(failures, False):
            raise RuntimeError(f"could not write with {said}")
        return close(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        patch.setattr(RowUnitIO, "_canvas", failing_row)
        patch.setattr(RowUnitIO, "close_unit", failing_unit)
        s3_server.fail("503", part="unit-0000", times=2)
        assert main(["run", str(spec)]) == 3
        assert main(["rerun", s3_url, *options, "--failed"]) == 3
    out = tmp_path / "out"
    for command in (["status"], ["verify"], ["export", "--format", "jsonl", "--out", str(out)]):
        assert main([command[0], s3_url, *options, *command[1:]]) in {0, 3}
    (tmp_path / "broken.yaml").write_text(f"s3: {{secret: {planted['AWS_SECRET_ACCESS_KEY']}}}\nname: 'open")
    assert main(["run", str(tmp_path / "broken.yaml")]) == 2
    store = open_store(Place(s3_url, s3_options))
    names = [stat.name for stat in store.list()]
    assert {name.partition("/")[0] for name in names} >= {"_plan.json", "data", "attempts", "passes"}
    texts = {name: f"{store.stat(name)} {readable(store.get(name), name)}" for name in names}
    texts["out"] = out.read_text()
    texts["output"] = "".join(capfd.readouterr()) + caplog.text
    assert {name: leaks(text) for name, text in texts.items() if leaks(text)} == {}
    assert HIDDEN in texts["out"] and "retrying" in texts["output"]
    logged = "".join(text for name, text in texts.items() if name.startswith("attempts/"))
    assert "could not write with" in logged and HIDDEN in logged


def readable(data: bytes, name: str) -> str:
    """The object as text; a Parquet file, which is packed, with everything in it."""
    text = data.decode("latin-1")
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq

        table = pq.read_table(pa.BufferReader(data))
        text += f"{table.schema.metadata} {table.to_pylist()}"
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no secret in here, test", "no secret in here, test"),
        (f"key {SECRETS['HF_TOKEN']}.", f"key {HIDDEN}."),
        ("at https://user:pass@host/x", f"at https://{HIDDEN}@host/x"),
        ("get s3://bucket/a@b", "get s3://bucket/a@b"),
        ("?X-Amz-Signature=abc&X-Amz-Date=1", f"?X-Amz-Signature={HIDDEN}&X-Amz-Date=1"),
        ("token=abc def", f"token={HIDDEN} def"),
    ],
)
def test_a_text_is_shown_without_its_secrets(planted, text, expected):
    assert redacted(text) == expected


def test_what_goes_wrong_is_told_without_secrets_and_without_escape_sequences(planted, monkeypatch, capsys):
    def careless() -> int:
        raise RuntimeError(f"\x1b[2J denied: {' '.join(planted.values())}")

    monkeypatch.setattr("draftmill.actors.checkpoints.models.builtin_models", careless)
    assert main(["models"]) == 1
    with shown(), shown(as_json=True):
        Display().note(f"worker died: {planted['HF_TOKEN']}\x1b[31m")
        logging.getLogger("draftmill.storage").warning("retrying: %s\x1b[31m", planted["HF_TOKEN"])
    said = capsys.readouterr().err
    assert "denied" in said and said.count("worker died") == said.count("retrying") == 2
    assert not leaks(said) and all(line.isprintable() for line in said.splitlines())


WRITER = """
import os, sys
sys.path.insert(0, {root!r})
allowed, strangers = [os.path.realpath(place) for place in {allowed!r}], []
WRITES = {{"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.truncate": 0, "os.remove": 0, "os.rmdir": 0}}

def hook(event, arguments):
    place = None
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        mode, flags = arguments[1], arguments[2] or 0
        if (isinstance(mode, str) and set(mode) & set("wxa+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            place = arguments[0]
    elif event in WRITES and isinstance(arguments[WRITES[event]], (str, bytes)):
        place = arguments[WRITES[event]]
        if event in ("os.mkdir", "os.remove", "os.rmdir") and arguments[-1] >= 0:  # a name in an open folder
            place = os.path.join(os.readlink("/proc/self/fd/%d" % arguments[-1]), os.fsdecode(place))
    if place is not None:
        place = os.path.realpath(os.fsdecode(place))
        if not any(place == one or place.startswith(one + os.sep) for one in allowed):
            strangers.append((event, place))

sys.addaudithook(hook)
import pytest
from tests.runs.jobs_here import without_ray
from draftmill.jobs.cli import main
patch = pytest.MonkeyPatch()
without_ray(patch)
code = main(["run", {spec!r}, "--quiet"])
assert code == 3, code
assert main(["rerun", {run!r}, "--failed", "--quiet"]) == 3
assert not strangers, strangers
"""

HOSTILE_IDS = [
    "../../escaped",
    "/etc/passwd",
    "a/b/c",
    "..",
    ".",
    "a\\b",
    "con",
    "x" * 3000,
    "~",
    "%2e%2e%2f",
    "$(touch x)",
]


@pytest.mark.slow
def test_a_job_writes_inside_its_output_alone_whatever_its_ids_are(tmp_path):
    """Every file that a process opens for writing, makes, moves or deletes is seen by an audit hook."""
    rows = [{"id": name, "tokens": [7, None, 8, 9]} for name in HOSTILE_IDS]
    rows.append({"id": "fails/../here", "tokens": [10**9]})
    inputs = tmp_path / "in"
    inputs.mkdir()
    (inputs / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "out" / "run"
    spec = write_spec(tmp_path, rows=inputs / "rows.jsonl", output={"path": str(run), "unit_rows": 4})
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    cache = tmp_path / "home" / ".cache" / "draftmill"  # hashes of models; the folders above it are made with it
    allowed = [str(tmp_path / "out"), str(temporary), str(cache), "/dev/null", "/dev/shm", "/proc/self"]
    cache.mkdir(parents=True)
    before.append("home")
    code = WRITER.format(root=str(ROOT), allowed=allowed, spec=str(spec), run=str(run))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=inputs,
        env={"PATH": "", "HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1",
             "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "out"])
    assert [path.name for path in inputs.iterdir()] == ["rows.jsonl"]
    names = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    shape = re.compile(
        r"(passes/0002/)?(_plan\.json|_lease\.json|_manifest\.json|_SUCCESS|plan/part-[\d-]+\.parquet|data/unit-\d+\.parquet|"
        r"attempts/epoch-\d+-[a-z]+(-\d+)?\.jsonl)"
    )
    assert names and all(shape.fullmatch(name) for name in names), names


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(sources, "UNPACKED_BYTES", 2**20)
    monkeypatch.setattr(sources, "BUFFER_BYTES", 2**12)
    rows = 2**10
    data = (b'{"text": "' + b"same" * 500 + b'"}\n') * rows
    packed = gzip.compress(data) if ending == "gz" else pa.compress(data, "zstd", asbytes=True)
    assert len(data) > 256 * len(packed)
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed)
    (file,) = list_inputs(str(tmp_path / f"a.jsonl.{ending}"))
    with pytest.raises(UserError, match="if that is intended, unpack the file first"):
        for _ in iterate(file):
            pass
    monkeypatch.setattr(sources, "UNPACKED_BYTES", len(data))
    assert sum(1 for _ in iterate(file)) == rows, "up to the bound any ratio is fine"


@pytest.mark.parametrize(
    "name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.7z", "a.jsonl.zip", "a.pkl", "a.npy", "a.pt"]
)
def test_an_archive_or_a_pickle_is_no_input(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(UserError, match="format is not known"):
        list_inputs(str(tmp_path / name))


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = {
    ("os", "system"), ("os", "popen"), ("torch", "load"), ("torch", "save"), ("yaml", "unsafe_load"), ("yaml", "full_load"),
    ("np", "load"), ("numpy", "load"), ("shutil", "unpack_archive"), ("marshal", "loads"),
}  # fmt: skip
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tarfile", "zipfile", "subprocess"}
# Starts this project's own modules, by their names and never through a shell, to convert checkpoints.
# The sandbox starts the programs of pass@k, also without a shell.
ALLOWED = {
    "actors/checkpoints/made_folders.py": "subprocess",
    "actors/sandbox/sandbox.py": "subprocess",
    "jobs/drive/notify.py": "subprocess",  # starts the commands of `notify`, as the spec has them, without a shell
}


def test_the_sources_load_no_pickle_run_no_string_and_unpack_no_archive():
    found = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            what = forbidden(node)
            if what and ALLOWED.get(str(path.relative_to(ROOT))) != what:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {what}")
    assert found == []


def forbidden(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import):
        return next((one.name for one in node.names if one.name.partition(".")[0] in FORBIDDEN_MODULES), None)
    if isinstance(node, ast.ImportFrom):
        return node.module if (node.module or "").partition(".")[0] in FORBIDDEN_MODULES else None
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
        return called.id
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        pair = (called.value.id, called.attr)
        if pair == ("yaml", "load"):
            loader = [keyword.value for keyword in node.keywords if keyword.arg == "Loader"]
            return None if [getattr(one, "id", "") for one in loader] == ["_Loader"] else "yaml.load"
        return ".".join(pair) if pair in FORBIDDEN_NAMES else None
    return None


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from zipfile import ZipFile", "eval('1')", "torch.load(f)", "yaml.load(f)", "os.system('x')"],
)
def test_the_search_finds_what_it_looks_for(line):
    assert any(forbidden(node) for node in ast.walk(ast.parse(line)))


def test_a_checkpoint_in_pickles_is_refused_unread(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((GOLDEN / "config.json").read_text())
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors.pkl"):
        (model / name).write_bytes(evil)
    spec = write_spec(
        tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 2), model={"path": str(model), "tokenizer": "none"}
    )
    assert main(["run", str(spec)]) == 2
    assert "safetensors" in capsys.readouterr().err and not (tmp_path / "owned").exists()


def test_code_beside_a_tokenizer_or_a_model_is_not_run(tmp_path, capsys):
    """`auto_map` asks for it; only `trust_remote_code: true` would grant it, and to a tokenizer alone."""
    model = tmp_path / "model"
    model.mkdir()
    code = f"open({str(tmp_path / 'owned')!r}, 'w').close()\n"
    for name in ("tokenization_evil", "modeling_evil", "configuration_evil"):
        (model / f"{name}.py").write_text(code)
    maps = {"AutoTokenizer": ["tokenization_evil.Evil", None], "AutoModelForCausalLM": "modeling_evil.Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": maps, "tokenizer_class": "Evil"}))
    (model / "vocab.txt").write_text("a\nb\n")
    config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "configuration_evil.Evil", **{"AutoModel": "modeling_evil.Evil"}},
    }
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        load_tokenizer(model)
    for trusted in (False, True):
        rows = write_rows(tmp_path / "rows.jsonl", 2)
        place = {"path": str(model), "tokenizer": "none", "trust_remote_code": trusted}
        assert main(["run", str(write_spec(tmp_path, rows=rows, model=place))]) == 2
    assert not (tmp_path / "owned").exists()
    capsys.readouterr()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch OWNED') }}",
    "{{ messages.append(1) }}{% for x in range(10**9) %}{% endfor %}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_stays_in_its_sandbox(tmp_path, template):
    """A template is a program of the checkpoint's author, and runs for every row: what it may not do fails the row."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((TOKENIZER / name).read_text())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = template.replace("OWNED", str(tmp_path / "owned"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    task = Complete(kind="complete", chat=True)
    make = maker_for(recipe_of(task), tokenizer, model_info(vocab_size=2048))
    with pytest.raises(RowError) as caught:
        make.make({"messages": [{"role": "user", "content": "x"}]}, 0)
    assert caught.value.kind == "bad_messages" and not (tmp_path / "owned").exists()
