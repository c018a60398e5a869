"""The recipe of the builtin block-diffusion model: the doubled sequence against public code, masks, bound, training, folder."""

import itertools
import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from recipes import absorbing_quality, block, block_folder, block_quality, block_training, causal, corpus, loop
from recipes.block_layout import (
    BLOCK,
    BLOCK_SHARES,
    BLOCKS,
    CAUSAL_SHARE,
    SUFFIX_SHARE,
    Layout,
    draw_layouts,
    draw_mask,
    visibility,
)
from tests.decoders.backbones.masked_models import look_alone
from tests.recipes import recipes_of_tests as shared

CPU = torch.device("cpu")
CASES = [Layout(1, True), Layout(4, False), Layout(4, True), Layout(16, False)]


def trainer_of(start, prepared: corpus.Prepared, steps: int, seed: int = 0) -> block_training.Trainer:
    return block_training.Trainer(start, shared.short_schedule(steps, seed), prepared.train, CPU)


def random_model(seed: int = 0) -> Qwen3ForCausalLM:
    """A model whose law depends on all that it sees."""
    model, generator = block_training.empty_model(shared.SHAPE).eval(), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def test_sequence_mask_and_loss_are_the_public_codes(golden):
    """Two samples side by side, the second with a short last block, prompts unmasked."""
    folder = golden / "sdar"
    case = json.loads((folder / "train_layout.json").read_text())
    arrays = load_file(folder / "train_layout.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3", "attn_implementation": "sdpa"}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(fields)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    clean = torch.tensor(case["clean_ids"]).split(case["sample_lengths"])
    masked = torch.tensor(case["masked"], dtype=torch.bool).split(case["sample_lengths"])
    seen = [visibility(len(ids), Layout(case["block_size"], causal=False)) for ids in clean]
    assert torch.equal(torch.block_diag(*seen).bool(), arrays["train.mask"][0])
    shown = [ids.masked_fill(hidden, case["mask_id"]) for ids, hidden in zip(clean, masked, strict=True)]
    packed = [copy for pair in zip(shown, clean, strict=True) for copy in pair]
    assert torch.cat(packed).tolist() == case["packed_ids"]
    with torch.no_grad():
        states = [
            block_training.noisy_states(model, noisy[None], ids[None], visible[None])[0]
            for noisy, ids, visible in zip(shown, clean, seen, strict=True)
        ]
        laws = model.lm_head(torch.cat(states)[torch.cat(masked)]).log_softmax(-1)
    nats = -laws.gather(1, torch.cat(clean)[torch.cat(masked), None])[:, 0].double()
    torch.testing.assert_close(nats, arrays["train.ce"], atol=1e-4, rtol=1e-5)
    chance = torch.tensor(case["p_mask_per_token"])[torch.cat(masked)]
    num_answer = len(case["is_prompt"]) - sum(case["is_prompt"])
    assert float((nats / chance).sum() / num_answer) == pytest.approx(case["loss"], rel=1e-5)


@pytest.mark.parametrize("layout", CASES)
def test_a_masked_token_is_scored_as_in_a_forward_of_the_text_before_its_block_and_the_block(layout):
    model, rng = random_model(), np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(20, 2000, (1, 16)))
    masked = torch.from_numpy(rng.random((1, 16)) < 0.6)
    masked[0, [0, 15]] = True
    expected = []
    for first in range(0, 16, layout.block):
        last = first + layout.block
        rows = torch.cat([ids[:, :first], ids[:, first:last].masked_fill(masked[:, first:last], corpus.MASK_ID)], 1)
        place = torch.arange(last)
        unit = torch.where(place < first, place if layout.causal else place // layout.block, 10**6)
        seen = (unit[:, None] >= unit)[None, None]
        with torch.no_grad():
            law = model(input_ids=rows, attention_mask=seen).logits[0, first:]
        expected.append(law[masked[0, first:last]])
    with torch.no_grad():
        logits = block_training.masked_logits(model, ids, masked, visibility(16, layout)[None])
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_sizes_of_blocks_and_clean_copies_come_in_their_shares():
    rng = np.random.default_rng(0)
    layouts = [layout for _ in range(500) for layout in draw_layouts(rng, 8)]
    shares = [np.mean([layout.block == block for layout in layouts]) for block in BLOCKS]
    assert shares == pytest.approx(BLOCK_SHARES, abs=0.02) and BLOCK in BLOCKS
    assert np.mean([layout.causal for layout in layouts if layout.block > 1]) == pytest.approx(CAUSAL_SHARE, abs=0.03)
    assert all(layout.causal for layout in layouts if layout.block == 1)
    assert all(sum(layout.block == BLOCK for layout in draw_layouts(rng, 8)) in (3, 4) for _ in range(50))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_block_has_a_uniform_number_of_masks_and_a_token_counts_one_on_average(size):
    rng = np.random.default_rng(0)
    drawn = [draw_mask(rng, 32, size) for _ in range(3000)]
    masked = np.stack([mask for mask, _ in drawn]).reshape(-1, size)
    weight = np.stack([weight for _, weight in drawn]).reshape(-1, size)
    counts = masked.sum(1)
    assert np.bincount(counts, minlength=size + 1)[1:] / len(counts) == pytest.approx(1 / size, rel=0.12)
    assert weight.sum(1) == pytest.approx(size, rel=1e-5)
    assert not weight[~masked].any() and (weight[masked] > 0).all()
    few = min(3, size)
    suffixes = masked[counts == few][:, -few:].all(1).mean()
    assert suffixes == pytest.approx(SUFFIX_SHARE + (1 - SUFFIX_SHARE) / math.comb(size, few), abs=0.06)


def test_windows_without_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"windows of 12 tokens .* multiples of 8"):
        draw_mask(np.random.default_rng(0), 12, 8)


@pytest.mark.slow
def test_the_loss_is_the_weighted_sum_over_masked_tokens(start, prepared):
    trainer = trainer_of(start, prepared, 9)
    trainer.model, trainer.teach_from = random_model(), 1
    batch = trainer.batch(0)
    with torch.no_grad():
        logits = block_training.masked_logits(trainer.model, batch.ids, batch.masked, batch.visible)
    nats = -logits.log_softmax(-1).gather(1, batch.ids[batch.masked][:, None])[:, 0]
    expected = float((nats * batch.weight[batch.masked]).sum()) / 512
    assert trainer.batch_loss(0)[0].item() == pytest.approx(expected, rel=0.01)  # bfloat16
    assert trainer.batch_loss(0)[1] == 512
    taught = block_training.weighted_loss(trainer.model, batch, trainer.teacher).item()
    trainer.teach_from = 0
    assert trainer.batch_loss(0)[0].item() == taught != pytest.approx(expected, rel=1e-3)


def test_the_causal_model_teaches_blocks_of_one_token_all_but_the_first(start, prepared, monkeypatch):
    monkeypatch.setattr(loop, "autocast", lambda *_: nullcontext())
    trainer, flat = trainer_of(start, prepared, 9), math.log(shared.SHAPE.vocab_size)
    teacher, batch = trainer.teacher, trainer.batch(0)
    teacher.lm_head.weight.data *= 20  # far from flat, so that it says something
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(int(batch.masked.sum()), shared.SHAPE.vocab_size, generator=generator)
    nats = torch.nn.functional.cross_entropy(logits, batch.ids[batch.masked], reduction="none")
    found = block_training.token_nats(logits, batch, teacher)
    assert torch.equal(block_training.token_nats(logits, batch, None), nats)
    assert 0 < batch.single.sum() < len(batch.single)
    law = teacher(input_ids=batch.ids).logits.detach().softmax(-1)
    assert float(torch.special.entr(law).sum(-1).mean()) < flat / 2
    for row, (window, place) in enumerate(batch.masked.nonzero().tolist()):
        expected = nats[row]
        if batch.single[window] and place > 0:
            soft = -(law[window, place - 1] * logits[row].log_softmax(-1)).sum()
            expected = block_training.TAUGHT * soft + (1 - block_training.TAUGHT) * expected
        assert float(found[row]) == pytest.approx(float(expected), abs=1e-4), (window, place)
    assert not found.requires_grad and all(not key.startswith("teacher") for key in trainer.parameters)


def test_queries_and_keys_have_their_mean_size_in_the_causal_model(start, prepared):
    ids = torch.from_numpy(prepared.train.ids[:60].reshape(2, 30))
    source, model = causal.load_model(start, CPU), block_training.model_from(start, ids)
    own, weights = model.state_dict(), source.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items() if not name.endswith("proj.bias"))
    layer = source.model.layers[0]
    seen = layer.input_layernorm(source.model.embed_tokens(ids))
    heads = layer.self_attn.k_proj(seen).reshape(-1, shared.SHAPE.hidden_size // shared.SHAPE.num_attention_heads)
    size = torch.stack([head.square().mean().sqrt() for head in heads]).mean()
    assert torch.allclose(own["model.layers.0.self_attn.k_norm.weight"], size.expand(heads.shape[1]))
    assert own.keys() - weights.keys() == {f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk"}


def test_the_bound_of_a_law_without_context_is_its_entropy(prepared):
    model = block_training.empty_model(shared.SHAPE).eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    flat = math.log(shared.SHAPE.vocab_size)
    num_bytes = corpus.token_bytes(prepared.tokenizer)[absorbing_quality.windows(prepared, 256, 3)].sum()
    for layout in (Layout(1, True), Layout(16, False)):
        bound = block_quality.bound(model, prepared, layout, limit=3)
        assert bound.nats_per_token == pytest.approx(flat, rel=1e-5) and bound.tokens == 768
        assert bound.bits_per_byte == pytest.approx(768 * flat / math.log(2) / num_bytes, rel=1e-5)
    following = block_quality.next_token(model, prepared, length=64, limit=3)
    assert following.nats_per_token == pytest.approx(flat, rel=1e-5) and following.tokens == 3 * 63


def test_the_bound_is_the_mean_over_the_orders_of_decoding_each_block(prepared, monkeypatch):
    """Two blocks of 3 tokens: the mean of a block's nats over all 6 orders, one token after the other."""
    model, window, layout = random_model(), np.array([[30, 400, 77, 900, 41, 5]]), Layout(3, False)
    ids, visible = torch.from_numpy(window), visibility(6, layout)[None]

    def nats(block_start: int, seen: tuple[int, ...], place: int) -> float:
        hidden = [block_start + i for i in range(3) if i not in seen]
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[0, hidden] = True
        law = block_training.masked_logits(model, ids, masked, visible).log_softmax(-1)
        return -float(law[hidden.index(block_start + place), window[0, block_start + place]])

    orders = list(itertools.permutations(range(3)))
    with torch.no_grad():
        exact = sum(nats(s, order[:n], order[n]) for s in (0, 3) for order in orders for n in range(3)) / len(orders)
    monkeypatch.setattr(block_quality, "windows", lambda *_: np.repeat(window, 300, 0))
    monkeypatch.setattr(block_quality, "WINDOW", 6)
    assert block_quality.bound(model, prepared, layout).nats_per_token * 6 == pytest.approx(exact, rel=0.02)


def test_greedy_decoding_reveals_one_token_a_forward_or_a_block_or_what_is_likelier_than_tau():
    model, layout = random_model(), Layout(4, False)
    ids = torch.randint(20, 2000, (2, 8), generator=torch.Generator().manual_seed(0))
    visible = visibility(8, layout)[None]

    def reveal(tau: float) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            return block_quality.reveal(model, ids, visible, block=4, tau=tau)

    (one, slow), (block_at_once, fast) = reveal(1.0), reveal(-1.0)
    assert (slow, fast) == (16, 4) and not (one == corpus.MASK_ID).any()
    hidden = torch.ones(1, 4, dtype=torch.bool)
    found = torch.full((1, 4), corpus.MASK_ID)
    while hidden.any():
        with torch.no_grad():
            law = model(input_ids=found, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)).logits[0].softmax(-1)
        law[:, corpus.MASK_ID] = 0
        place = int(law.amax(-1).masked_fill(~hidden[0], -1).argmax())
        if hidden.all():
            assert block_at_once[0, :4].tolist() == law.argmax(-1).tolist()
        found[0, place], hidden[0, place] = law[place].argmax(), False
    assert one[0, :4].tolist() == found[0].tolist()
    assert 4 <= reveal(0.05)[1] <= 16


@pytest.mark.slow
def test_training_lowers_the_loss_and_is_repeatable(start, prepared):
    shared.check_training(lambda: trainer_of(start, prepared, 30))


@pytest.fixture(scope="module")
def written(start, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"DRAWS": 1, "PACE_WINDOWS": 1, "LAYOUTS": CASES[:3]}.items():
            patch.setattr(block_quality, name, value)
        flags = ["--start", str(start), "--steps", "3", "--threads", "1"]
        return shared.written_twice(block, flags, tmp_path_factory.mktemp("blocks"))


@pytest.mark.slow
def test_the_recipe_writes_a_whole_folder_and_an_interrupted_one_the_same(written):
    shared.check_written(written, shared.MODEL_FILES, "| 512 |", "| 4 | token by token |", "| 16 | 0.9 |")
    assert shared.has_tokenizer(written[0])


@pytest.mark.slow
def test_the_written_folder_is_an_sdar_checkpoint_with_the_trained_weights(written, golden):
    folder, own = written[0], {"max_position_embeddings", "max_window_layers", "head_dim", "rope_theta", "block_size"}
    own |= {"tie_word_embeddings", "mask_token_id", "bos_token_id", "eos_token_id", "torch_dtype"}
    shared.check_config(folder, golden / "sdar", own | shared.SHAPE.__dataclass_fields__.keys(), least=10)
    info, backbone = inspect_model(folder), load_backbone(folder, device="cpu")
    assert (info.family, info.mask_id, info.shift, info.block_size) == ("sdar", corpus.MASK_ID, 0, BLOCK)
    assert info.max_length == causal.MAX_LENGTH
    model = block_folder.load_model(folder, CPU)
    assert all(torch.equal(tensor, tensor.half().float()) for tensor in model.state_dict().values())
    ids = torch.arange(20, 36)
    masked = ids % 3 == 0
    with torch.no_grad():
        seen = visibility(16, Layout(16, False))[None]
        expected = block_training.masked_logits(model, ids.unsqueeze(0), masked.unsqueeze(0), seen)
    hidden = look_alone(backbone, ids.masked_fill(masked, corpus.MASK_ID).tolist())
    torch.testing.assert_close(backbone.logits(hidden[masked]), expected, atol=1e-5, rtol=1e-5)
