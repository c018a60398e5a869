"""`ssd` beside `stepwise`: decode with traces, and compare everything that does not say how the text was arrived at."""

import pytest

from tests.decoders.support import engine, run_all


def decode(backbone, info, settings, sampling, requests, *, rows, **more):
    return run_all(engine(backbone, info, settings, sampling, rows=rows, **{"trace": True} | more), requests)


def reveals(outcome):
    return [pair for step in outcome.trace or () for pair in zip(step.positions, step.committed, strict=True)]


def same(outcomes, expected):
    """Everything that does not say how the text was arrived at is that of stepwise, and nothing took longer."""
    assert outcomes.keys() == expected.keys()
    for index, outcome in outcomes.items():
        baseline = expected[index]
        assert outcome.error_kind is None
        assert outcome.tokens.tolist() == baseline.tokens.tolist()
        assert reveals(outcome) == reveals(baseline)
        assert outcome.finish == baseline.finish
        assert outcome.logprob == pytest.approx(baseline.logprob, abs=1e-4)
        assert outcome.nfe <= baseline.nfe
        assert outcome.iterations == outcome.nfe == sum(outcome.accept_hist)
        assert sum(size * count for size, count in enumerate(outcome.accept_hist)) == len(reveals(outcome))
