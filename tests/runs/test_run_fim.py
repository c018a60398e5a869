"""Filling in the middle: whole jobs by every causal decoder the same, and the builtin model, its tokens and its example.

`builtin:ar-micro` was not trained to fill in the middle. What it says makes no sense, which is no matter here, and special
tokens of its tokenizer that have no other use ask for a hole.
"""

import re
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.loop.worker import build_parts
from draftmill.actors.rows.fim import Template, template_of
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.draws.keys import hole_key
from draftmill.jobs.config.spec import JobSpec, load_spec
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.plan.resolve import make_job, resolve, resolved_of
from draftmill.storage.errors import UserError
from draftmill.storage.runs.records import TIMING_COLUMNS
from draftmill.storage.stores.store import open_store
from recipes import causal
from tests.runs.causal_jobs import job_spec, run_here

# "Ċ" is how a byte-level vocabulary spells a line end.
FIM = {"prefix": "<cls>", "suffix": "<sep>", "middle": "<eod>", "ends": ["Ċ"]}
LIMIT = 7
TEXTS = [
    "import os\n\ndef size(path):\n    <mask>\n    return total\n",
    "for value in <mask>:\n    <mask>\n",
    "<mask>class A(<mask:3>):\n    def f(self):\n        <mask>\n\n<mask>",
    "<mask>",
    "x = [<mask>]\ny = {<mask:2>}\nz = (<mask>)\n",
]
ROWS = [{"id": f"{n:02}", "text": f"# {n}\n" * (n // 5) + TEXTS[n % 5]} for n in range(15)]
DECODERS: dict[str, dict] = {
    "ngram": {"kind": "speculative", "k": 3},
    "model": {"kind": "speculative", "k": 3, "drafter": {"kind": "model", "path": "builtin:ar-micro"}},
    "specdiff": {"kind": "specdiff", "gamma": 4, "drafter": {"path": "builtin:mdm-tiny"}},
    "jacobi": {"kind": "jacobi", "block_size": 4},
    "multiblock": {"kind": "multiblock_jacobi", "block_size": 4},
}


def spec_of(folder, rows: list[dict], *, fim: dict | None = None, **sections) -> JobSpec:
    folder.mkdir(exist_ok=True)
    task = {"kind": "infill", "mask": {"kind": "marker"}, "max_new_tokens": LIMIT, "fim": FIM | (fim or {})}
    common: dict = {
        "task": task,
        "model": {"path": "builtin:ar-micro", "device": "cpu"},
        "sampling": {"temperature": 0.8},
        "batching": {"max_rows": 4},
    }
    return job_spec(folder, rows, **(common | sections))


@cache
def tokenizer() -> Tokenizer:
    found = load_tokenizer(BUILTIN / "ar-micro")
    assert found is not None
    return found


def without_times(rows: dict[str, dict], *more: str) -> dict[str, dict]:
    left_out = {*TIMING_COLUMNS, "unit", *more}
    return {name: {key: value for key, value in row.items() if key not in left_out} for name, row in rows.items()}


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, dict[str, dict]]:
    spec = spec_of(tmp_path_factory.mktemp("sequential"), ROWS)
    return spec, run_here(spec)


def test_every_row_comes_back_whole(sequential):
    _, rows = sequential
    assert len(rows) == len(ROWS) and {row["status"] for row in rows.values()} == {"ok"}
    assert {row["finish"] for row in rows.values()} == {"eos", "length"}
    for row in ROWS:
        found = rows[row["id"]]
        pieces = re.split(r"<mask(?::\d+)?>", row["text"])
        fills = [fill["text"] for fill in found["fills"]]
        woven = [part for pair in zip(pieces, [*fills, ""], strict=True) for part in pair]
        assert found["text"] == "".join(woven)
        assert (
            found["new_tokens"]
            == len(found["tokens"])
            == sum(n * count for n, count in enumerate(found["accept_hist"]))
        )
        assert found["nfe"] >= found["new_tokens"] and found["truncated_tokens"] == 0
        spans = [fill["end"] - fill["start"] for fill in found["fills"]]
        newline = tokenizer().vocabulary()["Ċ"]
        assert sum(spans) == len(found["tokens"]) - found["tokens"].count(newline)


def test_a_hole_sees_the_fills_before_it_and_has_noise_of_its_own(sequential):
    """Prompts put together here, one hole after the other, decoded one by one, say what the job said."""
    spec, rows = sequential
    store = open_store(spec.output.path)
    plan = load_plan(store)
    assert plan is not None
    decoder, _ = build_parts(make_job(resolved_of(plan), plan), name="w", node="n", threads=1)
    ids, names = tokenizer().encode, tokenizer().vocabulary()
    for row in ROWS:
        parts = re.split(r"<mask(:\d+)?>", row["text"])
        before, tokens = ids(parts[0]), []
        for hole, (length, after) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
            limit = int(length[1:]) if length else LIMIT
            suffix = [token for piece in parts[2 * hole + 2 :: 2] for token in ids(piece)]
            prompt = [names["<cls>"], *before, names["<sep>"], *suffix, names["<eod>"]]
            canvas = np.array([*prompt, *[HOLE] * limit], dtype=np.int32)
            decoder.admit([Request(0, hole_key(rows[row["id"]]["key"], hole), canvas)])
            outcomes: list = []
            while not outcomes:
                outcomes = decoder.step()
            said = outcomes[0].tokens.tolist()
            tokens += said
            before += [token for token in said if token != names["Ċ"]] + ids(after)
        assert tokens == rows[row["id"]]["tokens"], row


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.slow
def test_every_decoder_fills_the_same(kind, sequential, tmp_path):
    found = run_here(spec_of(tmp_path, ROWS, decoder=DECODERS[kind]))
    said = ("tokens", "text", "fills", "finish", "prompt_tokens", "new_tokens", "status")
    for name, row in sequential[1].items():
        assert {key: row[key] for key in said} == {key: found[name][key] for key in said}
        assert found[name]["logprob"] == pytest.approx(row["logprob"], abs=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("max_rows", [1, 16])
def test_rows_do_not_depend_on_slots_or_units(max_rows, sequential, tmp_path):
    output = {"path": str(tmp_path / "run"), "unit_rows": 2 * max_rows}
    found = run_here(spec_of(tmp_path, ROWS, batching={"max_rows": max_rows}, output=output))
    assert without_times(found) == without_times(sequential[1])


def test_a_long_text_is_cut_and_the_row_says_so(tmp_path):
    text = "a = 1\n" * 400 + "<mask>" + "b = 2\n" * 400 + "<mask>"
    (row,) = run_here(spec_of(tmp_path, [{"id": "long", "text": text}])).values()
    before, after = (len(tokenizer().encode(piece * 400)) for piece in ("a = 1\n", "b = 2\n"))
    first, second = row["fills"][0]["end"] - row["fills"][0]["start"], row["prompt_tokens"] - 2 * (512 - LIMIT)
    assert row["status"] == "ok" and second == 0, "both prompts take all that the model has beside the hole"
    assert row["truncated_tokens"] == before + first + after - (512 - 3 - LIMIT)
    assert row["text"].startswith("a = 1\n" * 400) and "b = 2\n" * 400 in row["text"]


def test_a_text_without_holes_comes_back_as_it_is(tmp_path):
    task = {"kind": "infill", "mask": {"kind": "lines"}, "fim": FIM}
    (row,) = run_here(spec_of(tmp_path, [{"id": "blank", "text": "\n \n"}], task=task)).values()
    assert (row["status"], row["text"], row["fills"], row["tokens"], row["finish"]) == ("ok", "\n \n", [], [], "filled")
    assert row["nfe"] == 0


def test_the_tokens_that_ask_are_part_of_the_fingerprint(sequential):
    spec, _ = sequential
    task = spec.task.model_copy(update={"fim": spec.task.fim.model_copy(update={"order": "spm"})})
    with pytest.raises(UserError, match=r"task\.fim\.order was \"psm\", is \"spm\""):
        resolve(spec.model_copy(update={"task": task}), open_store(spec.output.path))


FOLDER = BUILTIN / "fim-tiny"
END = 2
HELD_OUT = ("traceback.py", "html/parser.py", "unittest/signals.py", "sched.py")


@cache
def hidden_lines() -> list[tuple[str, str, str]]:
    """Lines of files that the model has not seen, each with the text before and after it."""
    found = []
    for name in HELD_OUT:
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()
        for start in range(0, len(text) - 900, max(900, len(text) // 8)):
            window = text[start : start + 900]
            begin = window.index("\n", 450) + 1
            end = window.find("\n", begin)
            if window[begin:end].strip():
                found.append((window[:begin], window[begin:end], window[end:]))
    return found


@cache
def model():
    torch.set_num_threads(1)
    return causal.load_model(FOLDER, torch.device("cpu"))


@cache
def builtin_tokenizer() -> Tokenizer:
    found = load_tokenizer(FOLDER)
    assert found is not None
    return found


@cache
def template() -> Template:
    return template_of("auto", builtin_tokenizer(), inspect_model(FOLDER))


def nats(before: str, middle: str, after: str, *, end: bool = True) -> float:
    """How surprised the model is by the middle (and its `end`), when it is asked for what lies between the two texts."""
    prefix, suffix = (np.array(builtin_tokenizer().encode(text), dtype=np.int32) for text in (before, after))
    prompt = template().prompt(prefix, suffix).tolist()
    wanted = [*builtin_tokenizer().encode(middle), *([END] if end else [])]
    with torch.no_grad():
        law = model()(torch.tensor([[*prompt, *wanted]])).logits[0].log_softmax(-1)
    return -sum(float(law[len(prompt) - 1 + place, token]) for place, token in enumerate(wanted))


def test_its_tokenizer_is_ar_tinys_with_three_more_tokens():
    other = load_tokenizer(BUILTIN / "ar-tiny")
    assert other is not None
    more = builtin_tokenizer().vocabulary().items() - other.vocabulary().items()
    assert dict(more) == {"<|fim_prefix|>": 2048, "<|fim_suffix|>": 2049, "<|fim_middle|>": 2050}
    assert other.vocabulary().items() <= builtin_tokenizer().vocabulary().items()
    assert (template().prefix, template().suffix, template().middle) == (2048, 2049, 2050) and template().lead == ()


@pytest.mark.slow
def test_it_reads_what_stands_after_a_hole():
    """The true line surprises it less beside its own text than beside the text that stands after another line."""
    lines = hidden_lines()
    assert len(lines) >= 16
    own = [nats(*line) for line in lines]
    others = [nats(before, middle, lines[n - 5][2]) for n, (before, middle, _) in enumerate(lines)]
    assert sum(own) < 0.95 * sum(others)
    assert sum(one < other for one, other in zip(own, others, strict=True)) > 0.7 * len(lines)


@pytest.mark.slow
def test_it_ends_a_line_where_the_line_ends():
    """The end surprises it less after a whole line than in the middle of one."""

    def end(before: str, said: str, after: str) -> float:
        return nats(before, said, after) - nats(before, said, after, end=False)

    whole = [end(*line) for line in hidden_lines()]
    half = [end(before, middle[: len(middle) // 2], after) for before, middle, after in hidden_lines()]
    assert sum(whole) < 0.5 * sum(half)


@pytest.mark.slow
def test_its_example_fills_every_hole(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    overrides = [f"output.path={tmp_path / 'run'}", "input.limit=6", "batching.max_rows=6"]
    rows = run_here(load_spec("examples/fim.yaml", overrides))
    assert {row["status"] for row in rows.values()} == {"ok"} and len(rows) == 6
    fills = [fill for row in rows.values() for fill in row["fills"]]
    assert 10 <= len(fills) <= 12, "two lines a row; neighbours are one hole"
    assert all(0 < fill["end"] - fill["start"] <= 48 for fill in fills)
    # The rows are sources of this project, so how many depends on the day; without the suffix nothing would end a line.
    assert sum("\n" not in fill["text"] for fill in fills) > len(fills) / 4, (
        "many fills are one line, as the holes were"
    )
    assert all(fill["text"] in row["text"] for row in rows.values() for fill in row["fills"])


def test_its_readme_has_its_quality():
    readme = (FOLDER / "README.md").read_text()
    assert "| this model, text on both sides | " in readme and "python -m recipes.fim" in readme
