"""Whole jobs that fill holes with a causal model: every decoder the same rows, holes from left to right, any batch.

`builtin:ar-micro` was not trained to fill in the middle. What it says makes no sense, which is no matter here, and special
tokens of its tokenizer that have no other use ask for a hole.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.actors.loop.worker import build_parts
from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.draws.keys import hole_key
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.plan.resolve import resolve, resolved_of
from draftmill.jobs.plan.worker_job import make_job
from draftmill.jobs.results.verify import decode_alone
from draftmill.storage.errors import UserError
from draftmill.storage.runs.records import TIMING_COLUMNS
from draftmill.storage.stores.store import open_store
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
DECODERS: dict[str, dict[str, Any]] = {
    "ngram": {"kind": "speculative", "k": 3},
    "model": {"kind": "speculative", "k": 3, "drafter": {"kind": "model", "path": "builtin:ar-micro"}},
    "specdiff": {"kind": "specdiff", "gamma": 4, "drafter": {"path": "builtin:mdm-tiny"}},
    "jacobi": {"kind": "jacobi", "block_size": 4},
    "multiblock": {"kind": "multiblock_jacobi", "block_size": 4},
}


def spec_of(folder: Path, rows: list[dict[str, Any]], *, fim: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    folder.mkdir(exist_ok=True)
    task = {"kind": "infill", "mask": {"kind": "marker"}, "max_new_tokens": LIMIT, "fim": FIM | (fim or {})}
    common: dict[str, Any] = {
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


def without_times(rows: dict[str, dict[str, Any]], *more: str) -> dict[str, dict[str, Any]]:
    left_out = {*TIMING_COLUMNS, "unit", *more}
    return {name: {key: value for key, value in row.items() if key not in left_out} for name, row in rows.items()}


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, dict[str, dict[str, Any]]]:
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
            outcomes: list[Any] = []
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


def test_a_sample_decoded_alone_is_the_same(sequential):
    spec, rows = sequential
    plan = load_plan(open_store(spec.output.path))
    assert plan is not None
    job = make_job(resolved_of(plan), plan)
    decoder, unit_io = build_parts(job, name="verify", node="", threads=1)
    for index, planned in enumerate(plan.unit_rows(0)):
        (sample,) = unit_io.open_unit(WorkUnit(0, 0, 8, 0, 1, 1, index, index + 1, probe=True))
        assert decode_alone(decoder, sample).tokens.tolist() == rows[planned.id]["tokens"]


def test_one_hole_is_a_completion_of_its_prompt(tmp_path):
    """The same tokens as `complete` says them behind the same prompt, at temperature 0.8."""
    pieces = [("def f(", "):\n"), ("", "x = 1\n"), ("import sys\n", ""), ("a = 5\n" * 9, "b = a")]
    names, ids = tokenizer().vocabulary(), tokenizer().encode
    rows: list[dict[str, Any]] = [{"id": str(n), "p": p, "s": s} for n, (p, s) in enumerate(pieces)]
    prompts = [
        {"id": str(n), "ids": [names["<sep>"], *ids(s), names["<cls>"], *ids(p)]} for n, (p, s) in enumerate(pieces)
    ]
    fim: dict[str, Any] = {"order": "spm", "middle": None, "ends": []}
    columns = {"path": str(tmp_path / "a" / "rows.jsonl"), "columns": {"prefix": "p", "suffix": "s"}}
    filled = run_here(spec_of(tmp_path / "a", rows, fim=fim, input=columns))
    columns = {"path": str(tmp_path / "b" / "rows.jsonl"), "columns": {"tokens": "ids"}}
    task = {"kind": "complete", "max_new_tokens": LIMIT}
    completed = run_here(spec_of(tmp_path / "b", prompts, task=task, input=columns))
    for name, row in completed.items():
        assert filled[name]["tokens"] == row["tokens"] and filled[name]["prompt_tokens"] == row["prompt_tokens"]
        assert filled[name]["fills"][0]["text"] == row["text"]


def test_a_long_text_is_cut_and_the_row_says_so(tmp_path):
    text = "a = 1\n" * 400 + "<mask>" + "b = 2\n" * 400 + "<mask>"
    (row,) = run_here(spec_of(tmp_path, [{"id": "long", "text": text}])).values()
    before, after = (len(tokenizer().encode(piece * 400)) for piece in ("a = 1\n", "b = 2\n"))
    first, second = row["fills"][0]["end"] - row["fills"][0]["start"], row["prompt_tokens"] - 2 * (512 - LIMIT)
    assert row["status"] == "ok" and second == 0, "both prompts take all that the model has beside the hole"
    assert row["truncated_tokens"] == before + first + after - (512 - 3 - LIMIT)
    assert row["text"].startswith("a = 1\n" * 400) and "b = 2\n" * 400 in row["text"]


def test_rows_that_do_not_fit_fail_alone(tmp_path):
    rows: list[dict[str, Any]] = [
        {"id": "good", "text": "a<mask>b"},
        {"id": "none", "text": "ab"},
        {"id": "null", "text": None},
        {"id": "zero", "text": "<mask:0>"},
    ]
    found = run_here(spec_of(tmp_path, rows))
    assert {name: row["error_kind"] for name, row in found.items()} == {
        "good": None,
        "none": "marker_absent",
        "null": "missing_column",
        "zero": "bad_mask",
    }
    assert found["good"]["status"] == "ok"


def test_a_text_without_holes_comes_back_as_it_is(tmp_path):
    task = {"kind": "infill", "mask": {"kind": "lines"}, "fim": FIM}
    (row,) = run_here(spec_of(tmp_path, [{"id": "blank", "text": "\n \n"}], task=task)).values()
    assert (row["status"], row["text"], row["fills"], row["tokens"], row["finish"]) == ("ok", "\n \n", [], [], "filled")
    assert row["nfe"] == 0


def test_a_model_without_the_tokens_is_refused_before_anything_is_written(tmp_path):
    spec = spec_of(tmp_path, ROWS, task={"kind": "infill", "mask": {"kind": "marker"}})
    with pytest.raises(UserError, match=r"task\.fim: 'auto': a causal model fills holes only if it was trained to"):
        resolve(spec, open_store(spec.output.path))
    assert not (tmp_path / "run").exists()


def test_the_tokens_that_ask_are_part_of_the_fingerprint(sequential):
    spec, _ = sequential
    task = spec.task.model_copy(update={"fim": spec.task.fim.model_copy(update={"order": "spm"})})
    with pytest.raises(UserError, match=r"task\.fim\.order was \"psm\", is \"spm\""):
        resolve(spec.model_copy(update={"task": task}), open_store(spec.output.path))
