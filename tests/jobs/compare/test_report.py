"""`draftmill report`: figures of made-up runs, one self-contained file, and equal bytes."""

import datetime
import json
import random
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from draftmill.actors.messages import Effort, Receipt, Tally, TurnReport
from draftmill.actors.metrics.settings import better_of
from draftmill.jobs.cli import main
from draftmill.jobs.compare.report import (
    RunStatistics,
    acceptance_by_position,
    add_histograms,
    by_length,
    courses_of,
    frontier,
    quality_plots,
    ticks,
)
from draftmill.jobs.compare.runs import find_runs, open_run
from draftmill.jobs.drive.totals import Totals
from draftmill.storage.stores.store import Place, open_store
from tests.conftest import ROOT
from tests.jobs.compare.made_runs import START, failed, row, write_metrics, write_run, write_sweep
from tests.jobs.compare.pages import Page
from tests.jobs.drive.test_metrics import Hand, log_in
from tests.runs.jobs_of_tests import write_rows, write_spec


def drafted(count: int, seed: int, **values) -> list[dict]:
    """Rows of a decoder that drafts: iterations commit one to three tokens."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        ones, threes = rng.randint(1, 20), rng.randint(1, 10)
        counts = {"iterations": ones + threes, "nfe": ones + threes, "accept_hist": [0, ones, 0, threes]}
        counts |= {"new_tokens": ones + 3 * threes, "proposed": 2 * (ones + threes), "accepted": 2 * threes}
        moment = START + datetime.timedelta(seconds=rng.random() * 60)
        rows.append(row(number, started_at=moment, device_s=rng.random(), **counts | values))
    return rows


def written(place, out, *options: str) -> str:
    assert main(["report", str(place), "--out", str(out), *options]) == 0
    return out.read_text()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory):
    """Three cases with metrics; one has failed rows and many samples."""
    cases = {
        "plain": [row(number) for number in range(40)],
        "drafts & more <k=3>": [*drafted(38, 1), failed(38), failed(39, "bad_json", error="<script>alert(1)</script>")],
        "crowd": drafted(2500, 2),
    }
    place = tmp_path_factory.mktemp("reports") / "sweep"
    styles = {"drafts & more <k=3>": {"decoder": {"kind": "speculative"}}, "crowd": {"decoder": {"kind": "jacobi"}}}
    write_sweep(place, cases, **styles)
    rng = random.Random(0)
    for name, rows in cases.items():
        values = [rng.random() for _ in rows]
        write_metrics(
            place / "cases" / name, {"exact_match": [float(v > 0.4) for v in values], "bits_per_byte": values}
        )
    return place


@pytest.fixture(scope="module")
def sweep_page(sweep) -> str:
    return written(sweep, sweep.parent / "sweep.html")


def check_self_contained(text: str) -> None:
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "http" not in text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "ids are unique"
    for tag, attributes in page.tags:
        for one in (attributes.get("aria-labelledby") or "").split():
            assert one in ids, (tag, one)
        if (attributes.get("href") or "").startswith("#"):
            assert str(attributes["href"])[1:] in ids


@pytest.mark.slow
def test_a_report_is_one_file_without_scripts_and_addresses(sweep_page):
    check_self_contained(sweep_page)


@pytest.mark.slow
def test_a_report_is_the_same_bytes_every_time(sweep, sweep_page, tmp_path):
    code = "import sys; from draftmill.jobs.cli import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "again.html"
    command = [sys.executable, "-c", code, "report", str(sweep), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == sweep_page


@pytest.mark.slow
def test_a_report_says_what_was_run_and_what_came_of_it(sweep_page):
    words = Page(sweep_page).text
    for said in (
        "Sweep: sweep",
        "3 cases, 2,580 samples.",
        "drafts & more <k=3>",
        "fingerprint ",
        "draftmill version 0.1.0, result schema",
        "builtin:ar-tiny (llama, weights wwwwwwwwwwww)",
        "kind: speculative",
        "inputs rows.jsonl (10 bytes)",
        "The grey line joins",
        "too_long 1 ",
        "<script>alert(1)</script>",
    ):
        assert said in words, said


def test_a_report_can_be_read_aloud(sweep_page):
    page = Page(sweep_page)
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 8 and all(one["role"] == "img" and one["aria-label"] for one in drawings)
    counts = {
        tag: sum(one == tag for one, _ in page.tags)
        for tag in ("table", "caption", "figure", "figcaption", "h1", "svg")
    }
    assert counts["table"] == counts["caption"] and counts["figure"] == counts["figcaption"] == counts["svg"]
    assert counts["h1"] == 1 and ("html", {"lang": "en"}) in page.tags
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels)), "no level is skipped"
    assert "@media print" in sweep_page


def test_the_figures_of_a_case_are_sums_over_its_rows(tmp_path):
    rows = [*drafted(30, 3), failed(30), failed(31, "bad_json"), failed(32)]
    case = RunStatistics(open_run(Place(str(write_run(tmp_path / "run", rows, units=3)))))
    good = rows[:30]
    assert case.sums.errors == {"too_long": 2, "bad_json": 1} and case.sums.examples["too_long"][0][1] == "row 30"
    assert case.accept_hist.tolist() == [sum(one["accept_hist"][j] for one in good) for j in range(4)]
    tokens, iterations = (sum(one[name] for one in good) for name in ("new_tokens", "iterations"))
    assert case.figures.tokens == tokens and case.figures.tokens_per_iteration == pytest.approx(tokens / iterations)
    assert sum(j * count for j, count in enumerate(case.accept_hist)) == tokens
    assert case.times["device time"] == pytest.approx(np.quantile([one["device_s"] for one in good], [0.5, 0.95]))
    assert case.rates[1].sum() * np.diff(case.rates[0])[0] == pytest.approx(tokens)
    resident = sum(one["prefill_s"] + one["decode_s"] for one in good)
    assert case.active[1].sum() * np.diff(case.active[0])[0] == pytest.approx(resident, rel=1e-6)


@pytest.mark.parametrize(("kind", "low"), [("exact_match", 0.7225), ("length", 1.0), ("file", 1.0)])
def test_only_proportions_have_intervals_of_proportions(kind, low, tmp_path):
    place = write_run(tmp_path / "run", [row(number) for number in range(10)])
    write_metrics(place, {"words": [1.0] * 10}, kind=kind)
    assert RunStatistics(open_run(Place(str(place)))).metrics["words"].low == pytest.approx(low, abs=1e-4)


def test_histograms_of_lists_add_up_position_by_position():
    column = pa.chunked_array([[[0, 2], None, []], [[1, 0, 5], [7]]], type=pa.list_(pa.int32()))
    assert add_histograms(np.array([1, 1], np.int64), column).tolist() == [9, 3, 5]
    assert add_histograms(np.zeros(0, np.int64), pa.chunked_array([[None]], type=pa.list_(pa.int32()))).tolist() == []
    places, shares = acceptance_by_position(np.array([1, 2, 0, 1]))
    assert shares.tolist() == [0.75, 0.25, 0.25] and places.tolist() == [1, 2, 3]
    assert [len(curve) for curve in acceptance_by_position(np.zeros(0, np.int64))] == [0, 0]


def test_tokens_over_time_are_those_of_the_time_and_do_not_wait_for_the_end_of_their_sample():
    start, end = np.array([0.0, 0.0, 2.0]), np.array([10.0, 10.0, 10.0])
    (middles, rates), _ = courses_of(start + 1e9, end + 1e9, np.array([100, 100, 80], np.int32))
    ends = middles + np.diff(middles)[0] / 2
    expected, at_two = np.where(ends <= 2.0, 20.0, 30.0), np.searchsorted(ends, 2.0)
    expected[at_two] = rates[at_two]
    assert rates == pytest.approx(expected) and rates.max() < 31


GRID = {
    f"decoder-{decoder}{extra}_temperature-{temperature}": (
        {"decoder": {"kind": decoder, **settings}, "sampling.temperature": temperature},
        {"decoder": {"kind": decoder, **settings}, "sampling": {"temperature": temperature}},
    )
    for decoder, extra, settings in (
        ("autoregressive", "", {}),
        ("speculative", "-k-auto", {"k": "auto"}),
        ("jacobi", "", {}),
    )
    for temperature in (0, 0.8)
}
"""The cases of a sweep over decoders and temperatures, as draftmill names and records them, with their specs."""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("grid") / "sweep"
    rows = {name: drafted(30, 1 + (number % 2)) for number, name in enumerate(GRID)}
    write_sweep(place, rows, **{name: spec for name, (_, spec) in GRID.items()})
    cases = [{"name": name, "changes": changes} for name, (changes, _) in GRID.items()]
    (place / "sweep.json").write_text(json.dumps({"cases": cases}))
    for number, name in enumerate(GRID):
        write_metrics(place / "cases" / name, {"exact_match": [float((n + number) % 3 > 0) for n in range(30)]})
    return place


@pytest.mark.slow
def test_the_cases_of_a_grid_have_short_names_and_are_compared_with_what_differs_in_one_key(grid, tmp_path):
    text = written(grid, tmp_path / "grid.html")
    words = Page(text).text
    for pair in (
        "autoregressive 0.8 against autoregressive 0:",
        "speculative 0 against autoregressive 0:",
        "speculative 0.8 against autoregressive 0.8:",
        "jacobi 0 against autoregressive 0:",
        "jacobi 0.8 against autoregressive 0.8:",
    ):
        assert words.count(pair) == 1
    assert words.count(" against ") - words.count("against cost") - words.count("NFE against") >= 5
    assert words.count("The same in all cases") == 1 and words.count("rows and passes") == 1
    assert "How the spec of jacobi 0.8 differs" in words and "sampling.temperature: 0.8" in words
    assert words.count("max_new_tokens: 128") <= 2, (
        "the task is in the facts that all cases share, and in one whole spec"
    )
    against = written(grid, tmp_path / "two.html", "--baseline", "decoder-jacobi_temperature-0")
    assert "autoregressive 0.8 against jacobi 0:" in Page(against).text
    assert main(["report", str(grid), "--out", str(tmp_path / "no.html"), "--baseline", "x"]) == 2


def test_ticks_are_round_and_hold_all_values():
    for low, high in ((0.0, 0.0), (0.0, 1.0), (0.3, 0.31), (-2.0, 7.0), (0.0, 12345.0), (5.0, 5.0), (0.0, 3e-7)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7 and found[0] <= low + 1e-9 and found[-1] >= high * (1 - 1e-9), (low, high)
        assert len({f"{value:,.6g}" for value in found}) == len(found), "each has a text of its own"


def test_what_is_drawn_is_inside_of_its_plot(grid):
    cases = [RunStatistics(run) for run in find_runs([Place(str(grid))])[0]]
    plots = list(quality_plots(cases))
    assert len(plots) == 2
    for case in cases:
        case.metrics = {}
    for plot in plots + list(quality_plots(cases)):
        points = [point for line in plot.lines for point in (*line.points, *line.interval)] + plot.grey
        assert all(52 <= x <= 406 and 10 <= y <= 200 for x, y in map(plot.at, points))
        bounded = [[plot.at(point)[1] for point in (*line.points, *line.interval)] for line in plot.lines]
        assert all(low >= middle >= high for middle, low, high in filter(lambda ys: len(ys) == 3, bounded))


def test_pauses_are_cut_out_of_the_time():
    start = np.array([0.0, 1.0, 5000.0, 5001.0]) + 1e9
    (middles, rates), _ = courses_of(start, start + 4, np.array([10, 20, 30, 40], np.int32))
    width = np.diff(middles)[0]
    assert middles[-1] + width / 2 == pytest.approx(10.0) and rates.sum() * width == pytest.approx(100)
    assert [len(curve[0]) for curve in courses_of(np.zeros(0), np.zeros(0), np.zeros(0, np.int32))] == [0, 0]


def test_forwards_by_length_are_means_of_the_samples_of_a_bin():
    rng = np.random.default_rng(0)
    tokens, nfe = rng.integers(0, 240, 500).astype(np.int32), rng.integers(1, 99, 500).astype(np.int32)
    lengths, means = by_length(tokens, nfe)
    first = tokens < (tokens.max() + 1) / 24
    assert (lengths[0], means[0]) == pytest.approx((tokens[first].mean(), nfe[first].mean()))
    assert len(lengths) == 24 and (np.diff(lengths) > 0).all()
    assert [len(found) for found in by_length(tokens[:0], nfe[:0])] == [0, 0]


def test_a_frontier_has_the_cases_that_no_other_beats():
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.4), (2.5, 0.7), (3.0, 0.95), (4.0, 0.95)]
    expected = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)]
    assert frontier(points, "higher") == sorted(expected)
    assert frontier([(x, -y) for x, y in points], "lower") == [(x, -y) for x, y in sorted(expected)]


def test_a_metric_says_which_values_are_better():
    assert [better_of(kind, "mine") for kind in ("rouge", "exact_match", "distinct", "length")] == [
        "higher",
        "higher",
        None,
        None,
    ]
    assert better_of("judge", "judge_perplexity") == "lower" and better_of("judge", "j_logprob") == "higher"
    assert [better_of("file", name) for name in ("accuracy", "bits_per_byte", "colour")] == ["higher", "lower", None]


def test_what_can_not_be_reported_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", [row(0)])
    (tmp_path / "mine.html").write_text("mine")
    for place, out, message in (
        (tmp_path / "nowhere", "a.html", "is not a run directory"),
        (run, "mine.html", "exists and is not a page of draftmill"),
        (run, ".", "is a folder"),
        (run, "none/a.html", "No such file or directory"),
    ):
        assert main(["report", str(place), "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", str(run), "--out", "s3://b/a.html"]) == 2
    assert main(["report", str(run), "--out", "~nobody-of-this-name/a.html"]) == 2
    assert (tmp_path / "mine.html").read_text() == "mine"
    (run / "_manifest.json").unlink()
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 2
    assert not (tmp_path / "a.html").exists() and "is not finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rows",
    [
        [failed(number) for number in range(3)],
        [row(0)],
        [row(n, new_tokens=0, tokens=[], nfe=0, iterations=0, accept_hist=[], started_at=None) for n in range(3)],
        [row(n, accept_hist=[0, 0, 0, 0, 1], iterations=1, device_s=0.0, wait_s=0.0) for n in range(5)],
    ],
    ids=["all failed", "one row", "no tokens", "no times"],
)
@pytest.mark.slow
def test_small_and_empty_runs_have_a_report(rows, tmp_path):
    run = write_run(tmp_path / "run", rows, units=1)
    text = written(run, tmp_path / "a.html")
    check_self_contained(text)
    assert "nan" not in Page(text).text.lower()
    place = write_sweep(tmp_path / "sweep", {"a": rows * 1, "b": [row(number) for number in range(4)]})
    check_self_contained(written(place, tmp_path / "b.html"))


@pytest.mark.slow
def test_cases_of_different_tasks_are_compared_only_with_their_like(tmp_path):
    rows = [row(number) for number in range(4)]
    task = {"task": {"kind": "complete", "max_new_tokens": 7}}
    place = write_sweep(tmp_path / "sweep", {"a": rows, "b": rows, "c": rows, "d": rows}, c=task, d=task)
    words = Page(written(place, tmp_path / "a.html")).text
    assert "b against a: 4 pairs" in words and "d against c: 4 pairs" in words and "c against a" not in words


@pytest.mark.slow
def test_a_report_on_a_real_run(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    assert main(["run", str(write_spec(tmp_path, rows=rows)), "--local", "--quiet"]) == 0
    text = written(tmp_path / "run", tmp_path / "a.html")
    check_self_contained(text)
    words = Page(text).text
    manifest = json.loads((tmp_path / "run" / "_manifest.json").read_text())
    assert f"fingerprint {manifest['fingerprint']}" in words
    assert "NFE against length" in words and "1 on CPU, float32, torch" in words and "No sample failed." in words
    assert "exact true: results are bit-identical in any batch" in words
    assert written(tmp_path / "run", tmp_path / "a.html") == text, "an earlier report is replaced"


def spend(place) -> None:
    """The record of a session with 2.5 worker hours: 2 of decoding, a quarter each of loading and idle time."""
    store, clock = open_store(str(place)), Hand()
    totals = Totals(units=1, rows=1, clock=clock)
    totals.worker_up("w0", {"load_s": 900.0})
    clock.now_s += 8100.0
    totals.add_report("w0", TurnReport((), Effort(wall_s=7200.0), Tally()))
    totals.add_receipt(Receipt(0, 0, "w0", "node", None, Tally(), spent_s=7200.0))
    totals.stop()
    log_in(store).write_out(totals)


def test_a_run_s_report_says_what_it_cost(tmp_path):
    run = write_run(tmp_path / "run", [row(number, new_tokens=50) for number in range(100)])
    spend(run)
    text = Page(written(run, tmp_path / "one.html")).text
    assert "device time 2.5 h (2 h decoding, 900 s loading, 900 s idle, 0 s wasted)" in text
    assert "estimate" not in text


@pytest.mark.slow
def test_a_sweep_s_report_has_a_table_of_device_times(sweep, sweep_page, tmp_path):
    assert "Device time" not in Page(sweep_page).text
    rows = [row(number, new_tokens=50) for number in range(100)]
    place = write_sweep(tmp_path / "sweep", {"one": rows, "other": rows})
    spend(place / "cases" / "one")
    text = Page(written(place, tmp_path / "two.html")).text
    assert "case device time decoding loading idle wasted one 2.5 h 2 h 900 s 900 s 0 s other 0 s" in text
