"""`draftmill compare`: figures against plain loops and scipy, real runs, sweeps, refusals, and equal bytes."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from draftmill.jobs.cli import main
from draftmill.jobs.plan.fingerprint import digest
from draftmill.storage.stores.store import Place, open_store
from tests.conftest import ROOT
from tests.jobs.compare.made_runs import failed, fill_store, row, write_metrics, write_run, write_sweep
from tests.runs.jobs_of_tests import write_rows, write_spec


def compared(capsys: pytest.CaptureFixture[str], *places) -> dict:
    assert main(["compare", *map(str, places), "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def numbers(count: int, seed: int) -> list[dict]:
    """Rows with random counts; texts of even rows depend on the seed."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        tokens, nfe = rng.randint(1, 30), rng.randint(1, 30)
        ids = [number, seed if number % 2 == 0 else 0]
        values = {"new_tokens": tokens, "nfe": nfe, "device_s": rng.random(), "tokens": ids, "iterations": nfe}
        rows.append(row(number, **values))
    return rows


def test_ratios_are_those_of_sums_over_the_pairs(tmp_path, capsys):
    first, second = numbers(60, 1), numbers(50, 2)
    second[4] = failed(4)
    first[7] = failed(7)
    second = second[::-1]  # another order of the same rows
    a, b = write_run(tmp_path / "a", first), write_run(tmp_path / "b", second, decoder={"kind": "speculative"})
    found = compared(capsys, a, b)
    (one,) = found["comparisons"]
    assert (one["pairs"], one["only_in_baseline"], one["only_in_run"], one["compared"]) == (50, 10, 0, 48)
    assert one["failed"] == {"baseline": 1, "run": 1, "both": 0}
    kept = [number for number in range(50) if number not in (4, 7)]
    assert one["equal"] == {"count": 24, "share": 0.5, "by": "tokens"}  # the odd rows but row 7, of 48
    there = {entry["id"]: entry for entry in second}
    pairs = [(first[number], there[f"row {number}"]) for number in kept]
    before, after = (
        {name: sum(pair[side][name] for pair in pairs) for name in ("nfe", "new_tokens", "device_s")} for side in (0, 1)
    )
    for name, above in (("nfe_per_token", "nfe"), ("device_s_per_token", "device_s")):
        ratio = one["ratios"][name]
        assert ratio["baseline"] == pytest.approx(before[above] / before["new_tokens"])
        assert ratio["run"] == pytest.approx(after[above] / after["new_tokens"])
        assert ratio["ratio"]["value"] == pytest.approx(ratio["run"] / ratio["baseline"])
        assert ratio["ratio"]["low"] < ratio["ratio"]["value"] < ratio["ratio"]["high"]
    assert one["ratios"]["tokens"]["ratio"]["value"] == pytest.approx(after["new_tokens"] / before["new_tokens"])
    assert one["ratios"]["nfe"]["run"] == after["nfe"]


def test_the_interval_of_a_ratio_is_the_delta_methods(tmp_path, capsys):
    first, second = numbers(60, 3), numbers(60, 4)
    found = compared(capsys, write_run(tmp_path / "a", first), write_run(tmp_path / "b", second))
    ratio = found["comparisons"][0]["ratios"]["nfe_per_token"]["ratio"]
    columns = [[entry[name] for entry in rows] for rows in (first, second) for name in ("nfe", "new_tokens")]
    a, b, c, d = (np.array(column, float) for column in columns)
    ratio_of = c.sum() / d.sum() / (a.sum() / b.sum())
    delta = ratio_of * (c / c.sum() - d / d.sum() - a / a.sum() + b / b.sum())
    half = stats.t.ppf(0.975, 59) * (60 / 59 * (delta**2).sum()) ** 0.5
    assert (ratio["low"], ratio["high"]) == pytest.approx((ratio_of - half, ratio_of + half), abs=0.05 * half)


def test_metrics_of_zeros_and_ones_get_mcnemars_test(tmp_path, capsys):
    """12 rows only right before, 30 only after, 20 both, 38 neither: p is 0.0079159 (statsmodels)."""
    before = [1] * 12 + [0] * 30 + [1] * 20 + [0] * 38
    now = [0] * 12 + [1] * 30 + [1] * 20 + [0] * 38
    rows = [row(number) for number in range(100)]
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", rows)
    write_metrics(a, {"exact_match": before})
    write_metrics(b, {"exact_match": now, "only_here": now})
    metrics = compared(capsys, a, b)["comparisons"][0]["metrics"]
    assert list(metrics) == ["exact_match"]
    found = metrics["exact_match"]
    assert (found["test"], found["only_baseline"], found["only_run"], found["pairs"]) == ("McNemar", 12, 30, 100)
    assert found["p"] == pytest.approx(0.0079159, abs=5e-8)
    assert (found["baseline"], found["run"], found["difference"]["value"]) == pytest.approx((0.32, 0.5, 0.18))
    assert found["difference"]["low"] > 0 and found["verdict"] == "higher"


def test_other_metrics_get_a_permutation_test_and_missing_values_are_left_out(tmp_path, capsys):
    rng = np.random.default_rng(0)
    before, noise = rng.random(80), rng.normal(0, 0.1, 80)
    rows = [row(number) for number in range(80)]
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", rows)
    write_metrics(a, {"rouge": [None, *before[1:]], "same": before, "none": [None] * 80})
    write_metrics(b, {"rouge": before + noise, "same": before, "none": [None] * 80})
    found = compared(capsys, a, b)
    metrics = found["comparisons"][0]["metrics"]
    assert list(metrics) == ["rouge", "same"] == list(found["runs"][0]["metrics"])
    rouge = metrics["rouge"]
    assert rouge["pairs"] == 79 and rouge["test"] == "sign flips" and rouge["only_run"] is None
    assert rouge["difference"]["value"] == pytest.approx(noise[1:].mean())
    theirs = stats.permutation_test(
        (noise[1:], np.zeros(79)),
        lambda x, y, axis: (x - y).mean(axis),
        permutation_type="samples",
        vectorized=True,
        rng=1,
        batch=500,
    ).pvalue
    assert rouge["p"] == pytest.approx(theirs, abs=0.025)
    inside = rouge["difference"]["low"] <= 0 <= rouge["difference"]["high"]
    assert (rouge["verdict"] == "not distinguishable") == (inside or rouge["p"] >= 0.05)
    assert metrics["same"]["verdict"] == "equal" and metrics["same"]["p"] == 1.0


def test_several_samples_of_a_row_are_one_observation(tmp_path, capsys):
    """Four samples a row that always agree: the test sees 12 rows, not 48 pairs, and McNemar's test does not apply."""
    better = {2, 5, 7, 11}
    rows = [row(number, sample=sample) for number in range(12) for sample in range(4)]
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", rows[:-1])
    write_metrics(a, {"pass": [0.0] * 48})
    write_metrics(b, {"pass": [float(number in better) for number in range(12) for _ in range(4)][:-1]})
    (one,) = compared(capsys, a, b)["comparisons"]
    assert (one["pairs"], one["rows"], one["only_in_baseline"]) == (47, 12, 1)
    found = one["metrics"]["pass"]
    assert found["test"] == "sign flips" and found["only_run"] == 15
    assert found["p"] == 2 * 0.5**4, "four rows that moved, all the same way"
    assert found["verdict"] == "not distinguishable"
    assert main(["compare", str(a), str(b)]) == 0
    assert "Rows have several samples" in capsys.readouterr().out


def paired_runs(folder, *, rows: int, samples: int) -> tuple:
    """Two runs with a metric whose pairs have much in common, and one that says nothing."""
    rng = np.random.default_rng(1)
    entries = [
        row(number, sample=sample, key=9 * number + sample) for number in range(rows) for sample in range(samples)
    ]
    shared = np.repeat(rng.normal(size=rows), samples) + rng.normal(size=rows * samples)
    places = folder / "a", folder / "b"
    for number, place in enumerate(places):
        values = shared + number * 0.2 + rng.normal(0, 0.5, rows * samples)
        write_metrics(write_run(place, entries), {"m": values, "same": [number] * (rows * samples)})
    return places


def test_what_pairs_are_worth_is_printed(tmp_path, capsys):
    a, b = paired_runs(tmp_path, rows=50, samples=3)
    (one,) = compared(capsys, a, b)["comparisons"]
    assert one["noise"] == {"pairs": 150, "lost": None}
    found, difference = one["metrics"]["m"]["pairing"], one["metrics"]["m"]["difference"]
    widths = [interval["high"] - interval["low"] for interval in (found["unpaired"], difference)]
    # Welch's degrees of freedom make the two quantiles differ by a few per cent at most
    assert found["worth"] == pytest.approx((widths[0] / widths[1]) ** 2, rel=0.05) and found["worth"] > 3
    assert found["worth"] > found["worth_of_noise"] > 1.5
    assert one["metrics"]["same"]["pairing"]["worth"] is None and one["metrics"]["same"]["sizes"] is None
    for form in ([], ["--markdown"]):
        assert main(["compare", str(a), str(b), *form]) == 0
        printed = capsys.readouterr().out
        assert (
            f"{found['worth']:,.1f} times the samples (common noise alone: {found['worth_of_noise']:,.1f})" in printed
        )
        assert "noise: common to 150 of 150 pairs" in printed and "width" not in printed


def test_two_runs_plan_the_size_of_the_next(tmp_path, capsys):
    a, b = paired_runs(tmp_path, rows=50, samples=3)
    assert main(["compare", str(a), str(b), "--json", "--plan", "0.1"]) == 0
    metrics = json.loads(capsys.readouterr().out)["comparisons"][0]["metrics"]
    sizes = metrics["m"]["sizes"]
    # The differences of samples have the variance 0.5, those of rows none: 4 * 1.96**2 * 0.5 / 0.1**2 is 768.
    assert sizes["rows"]["1"] == pytest.approx(768, rel=0.4) and sizes["rows"]["3"] == pytest.approx(256, rel=0.4)
    assert sizes["samples"] * 50 == pytest.approx(sizes["rows"]["1"], rel=0.2)
    assert metrics["same"]["sizes"]["lacking"] == "the differences do not vary"
    assert main(["compare", str(a), str(b), "--plan", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "width 0.1" in printed
    assert f"{sizes['rows']['1']:,} of 1 sample, {sizes['rows']['3']:,} of 3 samples" in printed


def test_a_pilot_that_can_not_plan_is_refused(tmp_path, capsys):
    a, b = paired_runs(tmp_path, rows=19, samples=2)
    bare = [write_run(tmp_path / name, [row(number) for number in range(30)]) for name in ("c", "d")]
    for places, width, message in [
        (
            (a, b),
            "0.1",
            "--plan: b against a is no pilot: m: 19 rows with it in both runs; allowed: 20 or more; same: 19",
        ),
        (bare, "0.1", "--plan: d against c is no pilot: no metric has numbers in both runs"),
        ((a, b), "0", "--plan: 0.0 is not the width of an interval; allowed: a number above 0"),
        ((a, b), "nan", "--plan: nan is not the width of an interval"),
        ((a,), "0.1", "1 finished run to compare; allowed: two or more"),
    ]:
        assert main(["compare", *map(str, places), "--plan", width]) == 2
        assert message in capsys.readouterr().err


def test_scored_texts_are_compared_by_their_scores(tmp_path, capsys):
    task: dict = {"task": {"kind": "score"}}

    def scored(shift: float) -> list[dict]:
        return [
            row(n, logprob=-n - shift, is_greedy=n % 2 == 0, metrics={"bits_per_byte": n + shift}) for n in range(30)
        ]

    a = write_run(tmp_path / "a", scored(0.0), **task)
    b = write_run(tmp_path / "b", scored(0.5), **task)
    (one,) = compared(capsys, a, b)["comparisons"]
    assert one["equal"] is None
    assert one["metrics"]["logprob"]["difference"] == {"value": -0.5, "low": -0.5, "high": -0.5}
    assert one["metrics"]["bits_per_byte"]["verdict"] == "higher"
    assert one["metrics"]["is_greedy"]["verdict"] == "equal"


def test_texts_are_compared_where_tokenizers_differ(tmp_path, capsys):
    rows = [row(number) for number in range(4)]
    a = write_run(tmp_path / "a", rows)
    b = write_run(tmp_path / "b", [entry | {"tokens": [9]} for entry in rows])
    plan = json.loads((b / "_plan.json").read_text())
    plan["results"]["model"]["tokenizer"] = "other"
    plan["fingerprint"] = digest(plan["results"])
    (b / "_plan.json").write_text(json.dumps(plan))
    assert compared(capsys, a, b)["comparisons"][0]["equal"] == {"count": 4, "share": 1.0, "by": "text"}


def test_a_sweep_stands_for_its_cases(tmp_path, capsys):
    cases = {name: numbers(20, seed) for seed, name in enumerate(("plain", "fast", "faster"))}
    sweep = write_sweep(tmp_path / "sweep", cases, fast={"decoder": {"kind": "speculative"}})
    found = compared(capsys, sweep)
    assert [run["name"] for run in found["runs"]] == ["plain", "fast", "faster"] and found["baselines"] == ["plain"]
    assert [one["run"] for one in found["comparisons"]] == ["fast", "faster"]
    (sweep / "cases" / "fast" / "_manifest.json").unlink()
    alone = write_run(tmp_path / "alone", numbers(20, 8))
    found = compared(capsys, alone, sweep)
    assert [run["name"] for run in found["runs"]] == ["alone", "plain", "faster"] and found["unfinished"] == ["fast"]


@pytest.mark.s3
def test_runs_on_s3_are_compared_with_local_ones(tmp_path, s3_url, s3_options, capsys):
    rows = {name: numbers(30, seed) for seed, name in enumerate("ab")}
    fill_store(open_store(Place(s3_url, s3_options)), rows["b"])
    local = compared(capsys, write_run(tmp_path / "a", rows["a"]), write_run(tmp_path / "b", rows["b"]))
    service = ["--s3-endpoint", str(s3_options.endpoint)]
    assert main(["compare", str(tmp_path / "a"), s3_url, "--json", *service]) == 0
    remote = json.loads(capsys.readouterr().out)
    assert remote["runs"][1]["place"] == s3_url and remote["comparisons"][0]["run"] == "one"
    assert remote["comparisons"][0] | {"run": "b"} == local["comparisons"][0]


def test_a_run_equals_itself_in_one_line(tmp_path, capsys):
    a = write_run(tmp_path / "a", numbers(30, 1))
    write_metrics(a, {"m": [1.0] * 30})
    found = compared(capsys, a, a)
    assert [run["name"] for run in found["runs"]] == [str(a), f"{a} (2)"]
    (one,) = found["comparisons"]
    assert one["equal"]["share"] == 1.0
    assert {figure["verdict"] for figure in [*one["ratios"].values(), *one["metrics"].values()]} == {"equal"}
    assert main(["compare", str(a), str(a)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  equal in both: ")]
    assert line.startswith("  equal in both: NFE (") and line.endswith(", m (1.000)")


def test_a_chosen_baseline_is_that_of_all_others(tmp_path, capsys):
    cases = {name: numbers(20, seed) for seed, name in enumerate(("plain", "fast", "faster"))}
    sweep = write_sweep(tmp_path / "sweep", cases)
    assert main(["compare", str(sweep), "--json", "--baseline", "fast"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(one["run"], one["baseline"]) for one in found] == [("plain", "fast"), ("faster", "fast")]
    assert main(["compare", str(sweep), "--baseline", "slow"]) == 2
    assert "--baseline: 'slow' is none of the finished runs; allowed: plain, fast, faster" in capsys.readouterr().err


def test_what_can_not_be_compared_is_refused(tmp_path, capsys):
    rows = [row(number) for number in range(4)]
    a = write_run(tmp_path / "a", rows)
    longer = write_run(tmp_path / "longer", rows, task={"kind": "complete", "max_new_tokens": 7})
    others = write_run(tmp_path / "others", [row(number) for number in range(9, 12)])
    unfinished = write_run(tmp_path / "unfinished", rows)
    (unfinished / "_manifest.json").unlink()
    for places, message in {
        (
            a,
            longer,
        ): "task.max_new_tokens: longer did not decode the same as a: task.max_new_tokens is 128 in a, 7 in longer",
        (a, others): f"{others} and {a} have no sample in common",
        (a, unfinished): f"{unfinished} is not finished",
        (a, tmp_path / "nowhere"): "nowhere is not a run directory",
        (a,): "1 finished run to compare; allowed: two or more",
    }.items():
        assert main(["compare", *map(str, places)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_the_output_is_the_same_bytes_every_time(tmp_path, capsys, form):
    a, b = write_run(tmp_path / "a", numbers(40, 1)), write_run(tmp_path / "b|", numbers(40, 2))
    write_metrics(a, {"m": list(range(40))})
    write_metrics(b, {"m": list(range(1, 41))})
    outputs = []
    for _ in range(2):
        assert main(["compare", str(a), str(b), *form]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_text_and_markdown_show_the_figures_of_the_json(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", numbers(40, 1)), write_run(tmp_path / "b", numbers(40, 2))
    rng = random.Random(0)
    write_metrics(a, {"m": [rng.random() for _ in range(40)]})
    write_metrics(b, {"m": [rng.random() for _ in range(40)]})
    (one,) = compared(capsys, a, b)["comparisons"]
    figures = [*one["ratios"].values(), *one["metrics"].values()]
    for form in ([], ["--markdown"]):
        assert main(["compare", str(a), str(b), *form]) == 0
        said = capsys.readouterr().out
        assert "40 pairs, 0 only in the baseline, 0 only in the run; 0 failed, 40 compared" in said
        assert "20 of 40 (50.0%)" in said and "not distinguishable" in said
        for figure in figures:
            for value in (figure.get("ratio") or figure["difference"]).values():
                assert f"{value:.4g}"[:4].rstrip("0") in said.replace(",", "")


@pytest.mark.parametrize("form", [[], ["--json"], ["--markdown"]])
def test_runs_without_a_single_good_sample_are_no_error(tmp_path, capsys, form):
    rows = [failed(number) for number in range(4)]
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", [row(number) for number in range(4)])
    empty = write_run(tmp_path / "empty", [row(n, new_tokens=0, tokens=[], nfe=0, iterations=0) for n in range(4)])
    for places in ((a, b), (b, a), (b, empty), (empty, b), (empty, a)):
        assert main(["compare", *map(str, places), *form]) == 0
        said = capsys.readouterr().out
        assert "nan" not in said.lower().replace("nanmean", "") and "Infinity" not in said


def test_real_runs_of_two_decoders_have_equal_texts(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    specs: dict[str, dict] = {
        "sequential": {"decoder": {"kind": "any_subset"}},
        "drafted": {"decoder": {"kind": "assd", "k": 3}},
        "seed 7": {"decoder": {"kind": "any_subset"}, "seed": 7},
    }
    for name, changes in specs.items():
        assert main(["run", str(write_spec(tmp_path, rows=rows, out=name, **changes)), "--local", "--quiet"]) == 0
    capsys.readouterr()
    one, other = compared(capsys, *(tmp_path / name for name in specs))["comparisons"]
    assert one["pairs"] == one["compared"] == 24 and one["equal"]["share"] == 1.0
    assert one["noise"] == {"pairs": 24, "lost": None}
    assert other["noise"] == {"pairs": 0, "lost": "24 have other seeds"} and other["equal"]["share"] < 0.5
    assert one["ratios"]["nfe_per_token"]["baseline"] == 1.0 and one["ratios"]["nfe_per_token"]["verdict"] == "lower"
    assert one["ratios"]["tokens"]["verdict"] == "equal" and one["metrics"] == {}


@pytest.mark.slow
def test_comparing_imports_neither_torch_nor_ray(tmp_path):
    a, b = (write_run(tmp_path / name, numbers(30, 1)) for name in "ab")
    code = (
        "import sys; from draftmill.jobs.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(', '.join({'torch', 'transformers', 'ray', 'datasets', 'matplotlib'} & set(sys.modules)) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", str(a), str(b)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
