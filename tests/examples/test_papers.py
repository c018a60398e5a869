"""The papers in small: sweep files are sound, claims name cases that exist, figures and verdicts are right, and the page."""

import json
from pathlib import Path

import numpy as np
import pytest

from draftmill.jobs.compare.statistics import Interval
from draftmill.jobs.config.sweep_spec import load_sweep
from examples.papers import __main__ as command
from examples.papers import inputs
from examples.papers.claims import ABOVE_ONE, ALL, BELOW_ONE, PAPERS, REPORT, SAME, Claim, Expect, Paper
from examples.papers.figures import Forwards, Mean, Metric, Ratio, Results, SameText, WithinTokens
from examples.papers.page import page
from tests.jobs.compare.made_runs import row, write_metrics, write_run, write_sweep

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "papers").glob("*.yaml"))
PRESETS = [preset for paper in PAPERS for preset in paper.presets]


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_sweep_file_parses_and_all_its_cases_are_sound(path):
    sweep = load_sweep(path)
    assert [str(case.error) for case in sweep.cases if case.error] == []
    assert sweep.path == f"runs/papers/{sweep.name}"
    assert command.file_of(sweep.name) == path
    assert sweep.name in PRESETS


def test_every_preset_has_a_file_and_a_command_that_runs_it():
    assert sorted(command.file_of(preset) for preset in PRESETS) == FILES
    assert set(command.CUT_DOWN) <= set(PRESETS)
    settings = command.settings_of("pcllm", full=False, runs=command.RUNS)
    assert command.command_of("pcllm", settings) == (
        f"draftmill sweep examples/papers/pcllm.yaml --set input.limit={command.CUT_DOWN['pcllm']}"
    )
    assert command.settings_of("pcllm", full=True, runs=command.RUNS) == []


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_claim_names_cases_of_a_preset_of_its_paper(paper):
    cases = {preset: {case.name for case in load_sweep(command.file_of(preset)).cases} for preset in paper.presets}
    for claim in paper.claims:
        assert set(claim.figure.cases) <= cases[claim.figure.preset], claim.says
        assert claim.what and (claim.place or claim.says.startswith("(ours)")), claim.says


@pytest.mark.parametrize(
    ("expect", "found", "verdict"),
    [
        (BELOW_ONE, Interval(0.9, 0.8, 0.95), "holds"),
        (BELOW_ONE, Interval(0.9, 0.8, 1.05), "not decided"),
        (BELOW_ONE, Interval(1.0, 1.0, 1.0), "does not hold"),
        (ABOVE_ONE, Interval(0.9, 0.8, 0.95), "does not hold"),
        (ALL, Interval(1.0, 0.9, 1.0), "holds"),
        (ALL, Interval(0.99, 0.9, 1.0), "does not hold"),
        (SAME, Interval(0.1, -0.1, 0.3), "holds"),
        (SAME, Interval(0.2, 0.1, 0.3), "does not hold"),
        (Expect("near", 1.0), Interval(1.0, 0.97, 1.04), "holds"),
        (Expect("near", 1.0), Interval(1.0, 0.9, 1.04), "not decided"),
        (Expect("near", 1.0), Interval(1.1, 1.04, 1.2), "does not hold"),
        (REPORT, Interval(0.2, 0.1, 0.3), "reported"),
    ],
)
def test_a_verdict_is_about_the_whole_interval(expect, found, verdict):
    assert expect.judge(found) == verdict


def made_results(tmp_path: Path) -> Results:
    """Two cases of 40 rows: the second takes fewer forwards, and another text in every tenth row."""
    rng = np.random.default_rng(0)
    nfe = rng.integers(1, 4, 40)
    cases = {"a": [row(n) for n in range(40)]}
    cases["b"] = [
        row(
            n,
            nfe=int(nfe[n]),
            iterations=int(nfe[n]),
            proposed=8,
            accepted=4 - int(nfe[n]),
            tokens=[n, 1, 2, 9 if n % 10 == 0 else 3],
        )
        for n in range(40)
    ]
    write_sweep(tmp_path / "p", cases)
    scores = [float(n % 3) for n in range(40)]
    write_metrics(tmp_path / "p" / "cases" / "a", {"score": scores})
    better = {"score": [score + 1.0 for score in scores], "passed": [float(n % 4 == 0) for n in range(40)]}
    write_metrics(tmp_path / "p" / "cases" / "b", better)
    return Results(tmp_path)


def test_figures_are_those_of_the_rows(tmp_path):
    results = made_results(tmp_path)
    nfe = np.random.default_rng(0).integers(1, 4, 40)
    assert results.cases("p") == ["a", "b"]
    assert Forwards("p", "a", "b").of(results).value == pytest.approx(nfe.sum() / 160)
    assert SameText("p", "a", "b").of(results).value == pytest.approx(0.9)
    assert Metric("p", "a", "b", "score").of(results).value == pytest.approx(1.0)
    assert Mean("p", "b", "score").of(results).value == pytest.approx(1 + np.mean(np.arange(40) % 3))
    assert WithinTokens("p", "b").of(results).value == 1.0
    passed = Mean("p", "b", "passed").of(results)
    assert passed.value == 0.25
    assert passed.low == pytest.approx(0.1419, abs=1e-4)  # Wilson's interval of 10 in 40
    accepted = Ratio("p", "accepted", "proposed", "b").of(results)
    assert accepted.value == pytest.approx((160 - nfe.sum()) / 320)
    drawn = np.random.default_rng(7).integers(0, 40, (4000, 40))
    low, high = np.quantile((4 - nfe)[drawn].sum(1) / 320, [0.025, 0.975])
    assert accepted.low == pytest.approx(low, rel=0.05) and accepted.high == pytest.approx(high, rel=0.05)
    assert Ratio("p", "new_tokens", "nfe", "b", "a").of(results).value == pytest.approx(160 / nfe.sum())


def test_cases_that_decoded_other_samples_are_not_compared(tmp_path):
    made_results(tmp_path)
    write_run(tmp_path / "p" / "cases" / "c", [row(n, id=f"other {n}") for n in range(40)])
    with pytest.raises(ValueError, match="did not decode the same samples"):
        Ratio("p", "new_tokens", "nfe", "c", "a").of(Results(tmp_path))


def test_a_paper_is_answered_from_what_has_run(tmp_path):
    results = made_results(tmp_path)
    claims = (
        Claim("it is fast", "table 9", "", "forwards", Forwards("p", "a", "b"), BELOW_ONE),
        Claim("it was not run", "table 9", "", "forwards", Forwards("q", "a", "b"), BELOW_ONE),
    )
    section = command.section_of(Paper("X", "On X", "", ("p", "q"), claims), results, ["p"], [])
    assert [answer.verdict for answer in section.answers] == ["holds", "not run"]
    assert [(case.case, case.samples, case.tokens) for case in section.cases] == [("a", 40, 160), ("b", 40, 160)]
    assert section.cases[0].nfe_per_token == 1.0
    text = page([section], "Run here.")
    assert "| it is fast | table 9 |" in text and "forwards; below 1 | **holds** |" in text and "**not run**" in text
    assert "| p/a | 40 | 1.000 |" in text and "| X | 1 | 1 |" in text and "Run here." in text


def test_each_humaneval_row_hides_one_line_of_the_solution_and_keeps_its_test(tmp_path):
    path = tmp_path / "inputs" / "lines.jsonl"
    inputs.write_humaneval_lines(path)
    written = path.stat().st_mtime_ns
    inputs.write_humaneval_lines(path)
    assert path.stat().st_mtime_ns == written
    rows = {one["id"]: one for one in map(json.loads, path.read_text().splitlines())}
    assert 100 < len(rows) <= 164
    for problem in inputs.problems():
        if problem["task_id"] in rows:
            found = rows[problem["task_id"]]
            ((start, end),) = found["line"]
            assert found["program"] == problem["prompt"] + problem["canonical_solution"]
            hidden = found["program"][start:end]
            assert hidden in [line.strip() for line in problem["canonical_solution"].splitlines()] and hidden
            assert start >= len(problem["prompt"]) and found["check"].endswith(f"check({problem['entry_point']})\n")
