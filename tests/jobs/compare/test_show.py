"""`draftmill show`: pieces join to the result's text, marks and colours name what the model wrote, and a page holds it all."""

import json
from pathlib import Path

import pytest

import draftmill
from draftmill.jobs.cli import main
from draftmill.jobs.compare.show import SampleReplay, ShownRow, chosen_rows
from draftmill.jobs.results.passes import passes_of
from draftmill.storage.stores.store import open_store
from tests.jobs.compare.pages import Page
from tests.jobs.test_api import MODEL, job_of

TEXTS = ["def add(a, b):\n    return a + b\n", "import os\n\nprint('café \u2603')\n", "for x in y:\n    x += 1\n"]
HOLES = {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}}
ROWS: list[dict] = [
    {"id": "good", "prompt": "def is_prime(n):", "level": "<easy>"},
    {"id": "long", "prompt": "x = 1\n" * 2000, "level": "hard"},
    {"id": "odd", "prompt": "print('\x1b[31m<b>é')\n", "level": None},
]


def infill_of(folder: Path, **changes) -> Path:
    """A finished run over TEXTS with a trace; returns its directory."""
    rows = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    spec = job_of(folder, rows, task=HOLES, model={"path": "builtin:asarm-tiny", "device": "cpu"})
    spec |= {"decoder": {"kind": "assd"}, "output": {"path": str(folder / "run"), "trace": "steps", "unit_rows": 2}}
    spec["input"] = {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "text": "text"}}
    return Path(draftmill.run(spec | changes, local=True).path)


@pytest.fixture(scope="module")
def infilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return infill_of(tmp_path_factory.mktemp("infilled"))


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two completions of each row of ROWS, one of which is too long."""
    folder = tmp_path_factory.mktemp("completed")
    spec = job_of(folder, ROWS, sampling={"n": 2}, errors={"max_rate": 0.5})
    return Path(draftmill.run(spec, local=True).path)


def shown(run: Path, *ids: str) -> tuple[list[ShownRow], str | None]:
    """The rows as they are shown, and what is said to be missing."""
    passes = passes_of(open_store(str(run)))
    remaking = SampleReplay(passes)
    return list(remaking.shown(chosen_rows(passes, ids, failed=False))), remaking.problem


def printed(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["show", str(run), *options]) == 0
    return capsys.readouterr().out


def plain(text: str) -> str:
    """Without white space and broken characters: a hole's own text may lack those at its edges, which the whole text has."""
    return "".join(text.replace("\ufffd", "").split())


def test_the_pieces_of_an_infill_join_to_its_text_and_its_holes_are_marked(infilled):
    rows, problem = shown(infilled)
    assert problem is None and len(rows) == 3
    for row in rows:
        assert "".join(piece.text for piece in row.pieces) == row.row["text"]
        made = "".join(piece.text for piece in row.pieces if piece.made)
        assert plain(made) == plain("".join(fill["text"] for fill in row.row["fills"]))


def test_the_trace_tells_the_forward_of_each_piece(infilled):
    rows, _ = shown(infilled)
    for row in rows:
        forwards = [piece.forward for piece in row.pieces if piece.made and piece.forward is not None]
        assert forwards and forwards == sorted(forwards), "this decoder fills holes from left to right"
        assert forwards[0] >= 1 and forwards[-1] <= row.row["nfe"]
        assert all((piece.forward is not None) == piece.made for piece in row.pieces)


def test_a_completion_follows_its_prompt_and_a_failed_row_has_its_reason(completed, capsys):
    rows, _ = shown(completed, "good")
    assert [row.name for row in rows] == ["good", "good (1)"]
    assert [piece.made for piece in rows[0].pieces] == [False, True]
    assert rows[0].pieces[0].text == ROWS[0]["prompt"] and rows[0].pieces[1].text == rows[0].row["text"]
    out = printed(completed, capsys)
    assert "long  failed (too_long, tokenize): a prompt of 8000 tokens leaves no room" in out
    logprob = f"{rows[0].row['logprob']:.2f}"
    head = f"good  6 tokens in 6 forwards, length, log-probability {logprob}"
    assert f"{head}\n{ROWS[0]['prompt']}⌈{rows[0].row['text']}⌋\n" in out


def test_control_characters_are_spelled_out(completed, capsys):
    assert "\x1b" not in printed(completed, capsys) and r"\x1b[31m<b>é" in printed(completed, capsys)


def test_colours_stand_for_marks_on_a_terminal_unless_no_color_is_set(infilled, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = printed(infilled, capsys, "--limit", "1")
    assert "\x1b[1;32m" in out and "⌈" not in out and "a colour is a forward" in out
    monkeypatch.setenv("NO_COLOR", "1")
    out = printed(infilled, capsys, "--limit", "1")
    assert "⌈2:" in out and "\x1b[1;32m" not in out


def test_a_long_prompt_is_printed_without_its_middle_unless_its_row_is_asked_for(tmp_path, capsys):
    prompt = "# " + "import " * 200
    run = Path(draftmill.run(job_of(tmp_path, [{"id": "a", "prompt": prompt, "level": 0}]), local=True).path)
    assert f"{prompt[:600]}[... 202 characters ...]{prompt[-600:]}" in printed(run, capsys)
    assert prompt in printed(run, capsys, "--id", "a")


def test_options_choose_rows(completed, capsys):
    assert printed(completed, capsys, "--failed").count("too_long") == 2
    assert "1 of 6 samples" in printed(completed, capsys, "--limit", "1")
    assert "  finish  " in " ".join(printed(completed, capsys, "--id", "odd").split("\n")).replace("          ", " ")
    assert main(["show", str(completed), "--id", "good", "--id", "none"]) == 2
    assert "--id: no sample has the id 'none'" in capsys.readouterr().err
    assert main(["show", str(completed), "--id", "good", "--failed"]) == 2
    assert "--id: no failed sample has the id 'good'" in capsys.readouterr().err


def test_without_the_inputs_texts_are_shown_and_it_is_said(tmp_path, capsys):
    run = infill_of(tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    rows, problem = shown(run)
    assert problem is not None and "rows.jsonl" in problem
    assert all([piece.text for piece in row.pieces] == [row.row["text"]] for row in rows)
    assert main(["show", str(run)]) == 0
    assert capsys.readouterr().err.startswith("draftmill: without prompts and marks: ")


def test_an_unfinished_run_shows_its_finished_units(tmp_path, capsys):
    run = infill_of(tmp_path)
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000001.parquet"):
        (run / name).unlink()
    assert "2 of 3 samples" in printed(run, capsys)


def test_a_causal_model_that_fills_holes_one_after_another_is_shown_with_its_holes(tmp_path):
    rows = [{"id": "a", "text": "x = 1\ny = <mask>\nz = <mask>\n"}]
    task = {"kind": "infill", "mask": {"kind": "marker"}, "max_new_tokens": 5}
    spec = job_of(tmp_path, rows, task=task, model={"path": "builtin:fim-tiny", "device": "cpu"})
    spec["input"] = {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id", "text": "text"}}
    [row], _ = shown(Path(draftmill.run(spec, local=True).path))
    assert [piece.made for piece in row.pieces] == [False, True, False, True, False]
    assert "".join(piece.text for piece in row.pieces) == row.row["text"]


def test_token_ids_are_shown_without_a_tokenizer(tmp_path):
    rows = [{"id": "a", "tokens": [40, 41, 42]}]
    spec = job_of(tmp_path, rows, model=MODEL | {"tokenizer": "none"})
    spec["input"] = {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id", "tokens": "tokens"}}
    [row], _ = shown(Path(draftmill.run(spec, local=True).path))
    assert [piece.text.split() for piece in row.pieces] == [["40", "41", "42"], list(map(str, row.row["tokens"]))]


def test_a_page_has_every_row_with_its_marks_and_no_addresses(infilled, tmp_path, capsys):
    rows, _ = shown(infilled)
    out = printed(infilled, capsys, "--html", str(tmp_path / "page.html"))
    page = Page((tmp_path / "page.html").read_text())
    assert out.endswith("3 of 3 samples\n") and page.addresses == [] and len(page.articles) == 3
    made = [piece for row in rows for piece in row.pieces if piece.made]
    assert [(mark, text) for mark, text in page.marks if mark] == [(str(piece.forward), piece.text) for piece in made]
    assert all(row.row["text"] in article for row, article in zip(rows, page.articles, strict=True))


def test_a_page_escapes_texts_and_shows_kept_columns(completed, tmp_path, capsys):
    printed(completed, capsys, "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;" in text and "<b>" not in text and "level: &lt;easy&gt;" in text and "\x1b" not in text
    assert len(Page(text).articles) == 6


def test_a_page_replaces_a_page_of_ours_and_no_other_file(infilled, tmp_path, capsys):
    page = str(tmp_path / "page.html")
    printed(infilled, capsys, "--html", page)
    printed(infilled, capsys, "--html", page, "--limit", "1")
    assert len(Page(Path(page).read_text()).articles) == 1
    Path(page).write_text(json.dumps({}))
    assert main(["show", str(infilled), "--html", page]) == 2
    assert "exists and is not a page of draftmill" in capsys.readouterr().err
    printed(infilled, capsys, "--html", page, "--overwrite")
