"""Whole jobs that score texts on a tiny random model: the scores are transformers' own law."""

import math

import pytest
import torch

from tests.runs.causal_jobs import World, run_here

TEXTS: list[dict] = [
    {"id": "whole", "text": "import os\nimport sys\n"},
    {"id": "behind", "prompt": "def f(x):", "completion": "\n    return é\n"},
    {"id": "alone", "completion": "x = 1"},
    {"id": "nothing", "text": ""},
    {"id": "long", "text": "the quick brown fox " * 40},
]


@pytest.fixture(scope="module")
def scored(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("scores")
    return folder, run_here(world.spec(folder, TEXTS, task={"kind": "score"}))


def law_of(world: World, ids: list[int], first: int) -> list[float]:
    """transformers' log-probabilities of ids[first:], each given all ids before it."""
    with torch.no_grad():
        laws = world.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(laws[place - 1, ids[place]]) for place in range(first, len(ids))]


def test_scores_are_the_models_law(world, scored):
    for row in TEXTS[:3]:
        found = scored[1][row["id"]]
        before, text = row.get("prompt", ""), str(row.get("completion", row.get("text")))
        prompt, ids = world.ids(before), world.tokenizer.encode(text)
        expected = law_of(world, [*prompt, *ids], len(prompt))
        assert found["tokens"] == ids and found["text"] == text and found["finish"] == "filled"
        assert (found["prompt_tokens"], found["new_tokens"], found["nfe"]) == (len(prompt), len(ids), 1)
        assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert found["logprob"] == pytest.approx(sum(expected), abs=1e-3)
        bits = -sum(expected) / math.log(2) / len(text.encode())
        assert dict(found["metrics"]) == {"bits_per_byte": pytest.approx(bits, rel=1e-5)}
        assert found["fills"] is None and found["drafter"] is None


def test_texts_that_can_not_be_scored_fail_alone(scored):
    kinds = {name: row["error_kind"] for name, row in scored[1].items() if row["status"] == "failed"}
    assert kinds == {"nothing": "empty_text", "long": "too_long"}
