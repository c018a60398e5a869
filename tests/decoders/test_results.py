"""Results are what they were: digests of every field of every outcome, over a wide matrix (results.py says how to renew them)."""

from collections import Counter

import pytest

from draftmill.decoders.settings import DECODERS
from tests.decoders import results
from tests.runs.jobs_of_tests import soak

PARTS = 16
"""Parts of the matrix, each with all decoders: one is enough for `make test`, two for `make test-all`; `make soak` has all."""


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow), *soak(range(2, PARTS))])
def test_every_field_of_every_result_is_what_it_was(part):
    expected, changed = results.read(), list[str]()
    for case in results.cases()[part::PARTS]:
        (digests, total), (known, known_total) = results.line_of(case), expected[case.name]
        wrong = [name for name in results.FIELDS if digests[name] != known[name]]
        wrong += ["log_probs"] * (abs(total - known_total) > 1e-3)
        if wrong:
            changed.append(f"{case.name}: {', '.join(wrong)}")
    assert not changed, "\n".join(changed)


def test_the_matrix_has_every_decoder_and_each_case_once():
    cases = results.cases()
    assert {case.settings["kind"] for case in cases} == set(DECODERS) - {"fastest"}, "whose counts depend on time"
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    assert list(results.read()) == [case.name for case in cases]
