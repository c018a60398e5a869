"""The recipe of the builtin causal models: packing, training, the folder, and that it is the any-subset model's corpus."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes import ar, causal, causal_folder, corpus
from tests.recipes.recipes_of_tests import (
    MODEL_FILES,
    SHAPE,
    check_training,
    check_written,
    has_tokenizer,
    short_schedule,
    written_twice,
)


@pytest.fixture(scope="module")
def prepared() -> corpus.Prepared:
    train, held_out = corpus.split(corpus.standard_library())
    return corpus.prepare(train[:20], held_out[:4], PreTrainedTokenizerFast.from_pretrained(ar.TOKENIZER))


@pytest.mark.slow
def test_packed_files_are_all_there_between_their_ends(prepared):
    stream = prepared.train
    ids = causal.pack(stream, seed=0)
    starts, ends = np.flatnonzero(ids == corpus.BOS_ID), np.flatnonzero(ids == corpus.EOS_ID)
    assert (ids[starts[1:] - 1] == corpus.EOS_ID).all()
    found = sorted(ids[a + 1 : b].tolist() for a, b in zip(starts, ends, strict=True))
    files = sorted(stream.ids[a:b].tolist() for a, b in zip(stream.bounds[:-1], stream.bounds[1:], strict=True))
    assert found == files
    assert np.array_equal(ids, causal.pack(stream, seed=0))
    assert not np.array_equal(ids, causal.pack(stream, seed=1))


def test_windows_depend_on_seed_and_step_only_and_reach_both_ends():
    ids = np.arange(40)
    draws = [causal.training_windows(ids, seed=0, step=step, count=8, length=36) for step in range(30)]
    assert np.array_equal(draws[7], causal.training_windows(ids, seed=0, step=7, count=8, length=36))
    assert draws[0].shape == (8, 37)
    assert (np.diff(draws[0]) == 1).all()
    assert {int(row[0]) for draw in draws for row in draw} == set(range(4))


@pytest.mark.slow
def test_the_loss_is_that_of_each_token_given_those_before(prepared):
    model = causal.new_model(SHAPE, 0)
    ids = torch.from_numpy(prepared.train.ids[:12].reshape(2, 6))
    with torch.no_grad():
        law = model(ids).logits.double().log_softmax(-1)
    expected = -torch.stack([law[b, t - 1, ids[b, t]] for b in range(2) for t in range(1, 6)]).mean()
    assert causal.next_token_loss(model, ids).item() == pytest.approx(expected.item(), abs=0.02)  # bfloat16 products


@pytest.mark.slow
def test_training_is_deterministic_and_lowers_the_loss(prepared):
    plan, device = dataclasses.replace(short_schedule(30, 0), batch_tokens=256), torch.device("cpu")
    check_training(lambda: causal.Trainer(causal.new_model(SHAPE, 0), plan, prepared.train, device))


def test_perplexity_of_a_uniform_model_is_known(prepared):
    model = causal.new_model(SHAPE, 0)
    for parameter in model.parameters():
        parameter.data.zero_()
    score = causal_folder.quality(model, prepared, length=64, limit=20)
    assert score.nats_per_token == pytest.approx(np.log(SHAPE.vocab_size), rel=1e-5)
    assert score.tokens == 20 * 63
    with pytest.raises(ValueError, match="no held-out file"):
        causal_folder.quality(model, prepared, length=10**6)


@pytest.mark.slow
def test_the_recipe_writes_a_whole_folder_and_an_interrupted_one_the_same(tmp_path):
    flags = ["--size", "micro-test", "--steps", "3", "--threads", "1", "--batch-tokens", "1024"]
    whole, resumed = written_twice(ar, flags, tmp_path)
    check_written((whole, resumed), MODEL_FILES, "| 512 |")
    assert has_tokenizer(whole)
    loaded = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    assert loaded.generation_config.eos_token_id == corpus.EOS_ID
    assert json.loads((whole / "config.json").read_text())["draftmill"] == {"max_length": 512}
    trained = causal.load_model(whole, torch.device("cpu"))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
        assert torch.equal(tensor, tensor.half().float()), name


@pytest.mark.slow
def test_a_later_checkpoint_begins_with_the_weights_of_the_earlier_one(tmp_path):
    flags = ["--threads", "1", "--batch-tokens", "1024", "--steps"]
    assert ar.main(["--out", str(tmp_path / "old"), "--size", "micro-test", *flags, "2"]) == 0
    assert ar.main(["--out", str(tmp_path / "new"), "--start", str(tmp_path / "old"), *flags, "1"]) == 0
    assert "the weights of `old`" in (tmp_path / "new" / "README.md").read_text()
    old, new = (causal.load_model(tmp_path / name, torch.device("cpu")).state_dict() for name in ("old", "new"))
    moved = max(float((new[name] - old[name]).abs().max()) for name in old)
    assert 0.0 < moved < 0.01
