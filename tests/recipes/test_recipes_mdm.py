"""The recipe of the builtin masked-diffusion model: masks, the objective, training, measuring, a folder that decoders load."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from recipes import absorbing, absorbing_folder, absorbing_quality, causal, corpus, mdm
from tests.decoders.backbones.masked_models import look_alone
from tests.recipes import recipes_of_tests as shared

CPU = torch.device("cpu")


def trainer_of(start, prepared: corpus.Prepared, steps: int, seed: int = 0) -> absorbing.Trainer:
    return absorbing.Trainer(absorbing.model_from(start), shared.short_schedule(steps, seed), prepared.train, CPU)


def test_the_numbers_of_masks_are_spread_over_all_there_are():
    for seed in range(50):
        counts = np.sort(absorbing.mask_counts(np.random.default_rng(seed), 8, 16))
        assert (np.abs(counts - np.arange(2, 17, 2)) <= 1).all() and counts[0] >= 1 and counts[-1] <= 16
    many = np.concatenate([absorbing.mask_counts(np.random.default_rng(seed), 4, 8) for seed in range(2000)])
    assert np.bincount(many, minlength=9)[1:] == pytest.approx(1000, rel=0.12)


def test_every_window_has_a_mask_of_the_patterns_that_decoders_meet():
    rng = np.random.default_rng(0)
    masked = np.concatenate([absorbing.draw_masks(rng, count=8, length=64) for _ in range(300)])
    assert masked.any(1).all()
    runs = (np.diff(masked.astype(int), axis=1, prepend=0) == 1).sum(1)
    suffixes = masked[(runs == 1) & masked[:, -1]]
    assert set(suffixes.sum(1).tolist()) >= set(range(1, absorbing.LONGEST_SUFFIX + 1))
    assert 0.25 < len(suffixes) / len(masked) < 0.40  # a span may end at the end too
    assert 0.35 < ((runs > 0) & (runs <= 4)).mean() < 0.65
    assert {absorbing.suffix_mask(rng, 6).sum() for _ in range(100)} == {1, 2, 3}


def test_a_masked_token_counts_one_over_the_masked_share_of_its_window():
    masked = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)
    third = 4 / 3
    expected = torch.tensor([[4.0, 0, 0, 0], [third, third, 0, third], [1, 1, 1, 1]])
    assert torch.allclose(absorbing.token_weights(masked), expected)
    assert absorbing.token_weights(masked, heaviest=3.0)[0, 0] == 3.0
    one_of_many = torch.arange(100).unsqueeze(0) == 7
    assert absorbing.token_weights(one_of_many).max() == absorbing.HEAVIEST


def test_the_loss_is_the_weighted_sum_over_masked_tokens_given_the_others(start, prepared):
    model = absorbing.model_from(start).eval()
    ids = torch.from_numpy(prepared.train.ids[:12].reshape(2, 6))
    masked = torch.tensor([[0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    total = 0.0
    for row, weight in ((0, 2.0), (1, 6.0)):
        shown = torch.where(masked[row], corpus.MASK_ID, ids[row]).unsqueeze(0)
        law = model(input_ids=shown, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool)).logits[0].log_softmax(-1)
        total -= weight * sum(law[i, ids[row, i]].item() for i in masked[row].nonzero()[:, 0])
    assert absorbing.weighted_loss(model, ids, masked).item() == pytest.approx(total / 12, rel=0.01)  # bfloat16


def test_the_bound_of_a_law_without_context_is_its_entropy(start, prepared):
    model = absorbing.model_from(start).eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    flat = math.log(shared.SHAPE.vocab_size)
    bound = absorbing_quality.bound(model, prepared, length=64, limit=10)
    assert bound.nats_per_token == pytest.approx(flat, rel=1e-5) and bound.tokens == 640
    num_bytes = corpus.token_bytes(prepared.tokenizer)[absorbing_quality.windows(prepared, 64, 10)].sum()
    assert bound.bits_per_byte == pytest.approx(640 * flat / math.log(2) / num_bytes, rel=1e-5)
    assert absorbing_quality.guesses(model, prepared, share=0.5, limit=3).tokens == 3 * 128
    places = absorbing_quality.suffix(model, prepared, limit=3)
    assert [place.tokens for place in places] == [3] * absorbing_quality.SUFFIX
    with pytest.raises(ValueError, match="no held-out file"):
        absorbing_quality.bound(model, prepared, length=10**6)


def test_the_bound_is_the_mean_over_the_orders_of_decoding(start, prepared, monkeypatch):
    """One token after the other in a random order: the mean of its nats over all orders, here all 6 of 3 tokens."""
    torch.manual_seed(0)
    model = absorbing.model_from(start).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    window = np.array([[30, 400, 77]])

    def nats(seen: tuple[int, ...], place: int) -> float:
        masked = torch.tensor([[i not in seen for i in range(3)]])
        law = absorbing.masked_logits(model, torch.from_numpy(window), masked).log_softmax(-1)
        return -float(law[[i for i in range(3) if i not in seen].index(place), window[0, place]])

    orders = list(itertools.permutations(range(3)))
    with torch.no_grad():
        exact = sum(nats(order[:n], order[n]) for order in orders for n in range(3)) / len(orders)
    monkeypatch.setattr(absorbing_quality, "windows", lambda *_: np.repeat(window, 600, 0))
    assert absorbing_quality.bound(model, prepared, length=3).nats_per_token * 3 == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_training_starts_from_the_causal_weights_and_lowers_the_loss(start, prepared):
    source = causal.load_model(start, CPU).state_dict()
    begun = trainer_of(start, prepared, 30).model.state_dict()
    assert all(torch.equal(tensor, source[name]) for name, tensor in begun.items())
    shared.check_training(lambda: trainer_of(start, prepared, 30))


@pytest.fixture(scope="module")
def written(start, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """What the recipe writes in one go, and in two."""
    flags = ["--start", str(start), "--steps", "3", "--threads", "1", "--batch-tokens", "1024"]
    return shared.written_twice(mdm, flags, tmp_path_factory.mktemp("masked"))


@pytest.mark.slow
def test_the_recipe_writes_a_whole_folder_and_an_interrupted_one_the_same(written):
    shared.check_written(written, shared.MODEL_FILES, "| 512 |", "| 95% at random |", "| suffix, mask 8 |")
    assert shared.has_tokenizer(written[0])


@pytest.mark.slow
def test_the_written_folder_is_a_llada_checkpoint_with_the_trained_weights(written, golden):
    folder = written[0]
    own = {*absorbing_folder.SIZES, "max_sequence_length", "rope_theta", "weight_tying"}
    own |= {"mask_token_id", "eos_token_id", "pad_token_id"}
    shared.check_config(folder, golden / "llada", own, least=16)
    info, backbone = inspect_model(folder), load_backbone(folder, device="cpu")
    assert (info.family, info.mask_id, info.max_length, info.shift) == ("llada", corpus.MASK_ID, causal.MAX_LENGTH, 0)
    assert info.mask_id == PreTrainedTokenizerFast.from_pretrained(folder).mask_token_id
    model = absorbing_folder.load_model(folder, CPU)
    assert isinstance(model, LlamaForCausalLM)
    assert all(torch.equal(tensor, tensor.half().float()) for tensor in model.state_dict().values())
    ids = torch.arange(20, 60)
    masked = ids % 3 == 0
    with torch.no_grad():
        expected = absorbing.masked_logits(model, ids.unsqueeze(0), masked.unsqueeze(0))
    hidden = look_alone(backbone, ids.masked_fill(masked, corpus.MASK_ID).tolist())
    torch.testing.assert_close(backbone.logits(hidden[masked]), expected, atol=1e-5, rtol=1e-5)
