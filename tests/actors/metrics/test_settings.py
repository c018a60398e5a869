"""How metrics are named: short names, files, mappings; unknown names get the nearest one; what covers what."""

import pytest
from pydantic import TypeAdapter

from draftmill.actors.metrics.settings import Metrics, clashing, expand_metrics, needs_reference

PARSED = TypeAdapter(Metrics)


def parsed(*values):
    return PARSED.validate_python(list(values), strict=True)


@pytest.mark.parametrize(
    ("word", "columns"),
    [
        ("exact_match", ("exact_match",)),
        ("number_match", ("number_match",)),
        ("rouge", ("rouge1", "rouge2", "rougeL")),
        ("rougeL", ("rougeL",)),
        ("distinct_3", ("distinct_3",)),
        ("length", ("length_tokens", "length_characters", "length_words")),
        ("pass@10", ("passed", "pass@10")),
        ("pass@k", ("passed", "pass@1")),
        ("my_metric.py", ("my_metric",)),
        ({"kind": "rouge", "types": ["rouge1", "rougeL"], "name": "short"}, ("short_rouge1", "short_rougeL")),
        ({"kind": "exact_match", "name": "same"}, ("same",)),
        ({"kind": "judge", "model": "m", "name": "big"}, ("big_logprob", "big_perplexity", "big_tokens")),
        ({"kind": "pass_at_k", "k": [1, 5], "name": "code"}, ("code_passed", "code_pass@1", "code_pass@5")),
        ({"kind": "file", "path": "a.py", "values": ["x", "y"]}, ("x", "y")),
    ],
)
def test_a_metric_names_its_columns(word, columns):
    [metric] = parsed(word)
    assert metric.columns() == columns


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("exakt_match", "'exakt_match' is not a metric; did you mean exact_match?"),
        ("rougel", "did you mean rouge"),
        ("pass@0", "did you mean pass@"),
        ({"kind": "roug"}, "metrics.0.kind: 'roug' is not a metric; did you mean rouge?"),
        ({"model": "m"}, "metrics.0.kind: missing"),
        (7, "7 is not a metric"),
        ({"kind": "file", "path": "s3://bucket/evil.py"}, "the path of a Python file"),
        ({"kind": "rouge", "types": ["rouge1", "rouge1"]}, "listed twice"),
        ({"kind": "pass_at_k", "program": "no place"}, "does not contain {text}"),
    ],
)
def test_what_is_no_metric_is_refused_with_the_nearest_name(word, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("{", r"\{").replace(".", r"\.")):
        parsed(word)


def test_metrics_with_a_value_per_column_are_split_and_repeated_ones_dropped():
    parts = [part.columns() for _, part in expand_metrics(parsed("rouge", "rougeL", "distinct", "length"))]
    assert parts[:5] == [("rouge1",), ("rouge2",), ("rougeL",), ("distinct_1",), ("distinct_2",)] and len(parts) == 6


def test_two_metrics_of_one_column_are_found():
    assert clashing(parsed("exact_match", {"kind": "bleu", "name": "exact_match"})) == (1, "exact_match")
    assert clashing(parsed("exact_match", "bleu")) is None


def test_only_comparing_metrics_need_references():
    own = {"kind": "file", "path": "a.py"}
    needed = [
        needs_reference(one)
        for one in parsed("exact_match", "rouge", "length", own, own | {"path": "b.py", "reference": True})
    ]
    assert needed == [True, True, False, False, True]
