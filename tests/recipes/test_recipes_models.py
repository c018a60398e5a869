"""Recipes of the any-subset and the causal models that ship: corpus, tokenizer, orders, packing, training, heads, folders."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, XLNetConfig, XLNetLMHeadModel

from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from recipes import (
    ar,
    asarm,
    causal,
    causal_folder,
    corpus,
    draft_heads,
    evaluation,
    folder,
    head_training,
    masking,
    training,
)
from recipes.two_stream import Canvas, QueryRows, Shape, TwoStream
from tests.recipes import recipes_of_tests as shared

MICRO = Shape(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=320)


@pytest.fixture(scope="module")
def files() -> list[corpus.SourceFile]:
    return corpus.standard_library()


@pytest.fixture(scope="module")
def tokenizer(files: list[corpus.SourceFile]) -> PreTrainedTokenizerFast:
    return corpus.train_tokenizer(files[:40], MICRO.vocab_size)


@pytest.fixture(scope="module")
def stream(files: list[corpus.SourceFile], tokenizer: PreTrainedTokenizerFast) -> corpus.TokenStream:
    return corpus.tokenise(tokenizer, files[:20])


def random_model(shape: Shape, scale: float = 0.2) -> TwoStream:
    generator = torch.Generator().manual_seed(1)
    model = TwoStream(shape, generator)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return model.requires_grad_(False)


def canvas_of(ids: np.ndarray, masked: np.ndarray) -> tuple[Canvas, QueryRows]:
    rank = torch.from_numpy(masking.decoding_ranks(masked))
    index = torch.from_numpy(masked).flatten().nonzero().squeeze(1)
    return Canvas(torch.from_numpy(ids), rank, torch.from_numpy((~masked).sum(1))), QueryRows(index, rank)


def test_the_split_is_stable_and_no_text_is_on_both_sides(files):
    train, held_out = corpus.split(files)
    assert len(train) + len(held_out) == len(files)
    assert not {file.text for file in train} & {file.text for file in held_out}
    assert not {file.path for file in train} & {file.path for file in held_out}
    assert 0.02 < len(held_out) / len(files) < 0.10
    # Known answers: the split must never change, or a shipped model has seen what it is measured on.
    assert [corpus.is_held_out(path) for path in ("traceback.py", "sched.py", "ast.py", "os.py")] == [
        True,
        True,
        False,
        False,
    ]


def test_the_corpus_has_no_tests_and_no_generated_tables(files):
    assert files == sorted(files, key=lambda file: file.path)
    for file in files:
        assert not corpus.EXCLUDED_FOLDERS & set(file.path.split("/")[:-1])
        assert not file.path.startswith("_sysconfigdata")


def test_the_tokenizer_round_trips_any_text(tokenizer):
    draw = random.Random(0)
    texts = ["", " ", "\n\n  \t\r\n x ,  'n't . !", "a <mask> b</s><eod>", "\x00\x7f", "日本語 é \U0001f600"]
    ranges = ((0, 127), (0, 0xD7FF), (0xE000, 0x10FFFF), (9, 32))
    for _ in range(300):
        texts.append("".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 40))))
    for text in texts:
        ids = corpus.encode(tokenizer, text)
        assert tokenizer.decode(ids) == text
        assert all(index >= len(corpus.SPECIAL_TOKENS) for index in ids)


def test_special_ids_are_xlnets_and_every_byte_has_a_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(list(range(9))) == list(corpus.SPECIAL_TOKENS)
    assert tokenizer.mask_token_id == corpus.MASK_ID
    single = [piece for piece in tokenizer.convert_ids_to_tokens(list(range(9, len(tokenizer)))) if len(piece) == 1]
    assert len(set(single)) == 256
    assert len(tokenizer) == MICRO.vocab_size


def test_line_starts_follow_newlines_and_file_starts(stream, tokenizer):
    assert stream.line_starts[stream.bounds[:-1]].all()
    place = int(np.flatnonzero(stream.line_starts)[5])
    assert "\n" in tokenizer.decode([int(stream.ids[place - 1])])


def test_ranks_put_the_prompt_first_and_then_go_left_to_right():
    masked = np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=bool)
    assert masking.decoding_ranks(masked).tolist() == [[0, 2, 3, 1, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("pattern", masking.PATTERNS)
def test_every_pattern_masks_exactly_what_it_was_asked_to(pattern):
    rng = np.random.default_rng(0)
    line_starts = rng.random(64) < 0.1
    for num_masked in (1, 2, 31, 63, 64):
        for _ in range(20):
            masked = masking.draw_mask(rng, line_starts, num_masked, pattern)
            assert masked.shape == (64,)
            assert masked.sum() == num_masked
    with pytest.raises(ValueError, match="unknown mask pattern"):
        masking.draw_mask(rng, line_starts, 3, "nothing")


def test_a_batch_depends_on_seed_and_step_only_and_covers_the_prompt_shares(stream):
    schedule = masking.MaskSchedule(low=0.0, high=1.0, warmup=0)
    first, again, other = (
        masking.training_batch(stream, schedule, seed=0, step=step, count=16, length=32) for step in (7, 7, 8)
    )
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.limit, again.limit)
    assert not np.array_equal(first.ids, other.ids)
    shares = np.sort(1 - first.masked.mean(1))
    assert np.all(np.abs(shares - (np.arange(16) + 0.5) / 16) <= 1 / 16)  # one window in each stratum
    prompt = (~first.masked).sum(1, keepdims=True)
    assert np.all(first.limit[first.masked] <= masking.decoding_ranks(first.masked)[first.masked])
    assert np.all((first.limit >= prompt)[first.masked])


def test_windows_stay_inside_one_file(stream):
    index = masking.draw_windows(stream, np.random.default_rng(0), count=200, length=48)
    owner = np.searchsorted(stream.bounds, index, side="right")
    assert (owner[:, :1] == owner).all()


@pytest.mark.parametrize("length", [2, 17])
def test_the_model_is_transformers_xlnet(length):
    shape = Shape(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=64)
    model = random_model(shape)
    config = XLNetConfig(**{key: value for key, value in folder.xlnet_config(shape).items() if key != "torch_dtype"})
    reference = XLNetLMHeadModel(config).eval()
    missing = reference.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys and missing.missing_keys in ([], ["lm_loss.weight"])  # the weight is tied
    rng = np.random.default_rng(0)
    ids, masked = rng.integers(9, 64, (3, length)), rng.random((3, length)) < 0.6
    masked[:, 0] = False  # an empty context is our own rule, transformers has another
    canvas, query = canvas_of(ids, masked)
    ours = model.logits(model.read(canvas, model.context(canvas), query))
    prompt = ~masked
    rank = canvas.rank.numpy()
    hidden = (rank[:, :, None] <= rank[:, None, :]) & ~(prompt[:, :, None] & prompt[:, None, :])
    theirs = reference(
        canvas.ids,
        perm_mask=torch.from_numpy(hidden).float(),
        target_mapping=torch.eye(length).expand(3, length, length),
        use_mems=False,
    ).logits.flatten(0, 1)[query.index]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_row_without_context_attends_to_nothing():
    model = random_model(MICRO)
    masked = np.ones((2, 6), dtype=bool)
    rng = np.random.default_rng(0)
    one, query = canvas_of(rng.integers(9, 320, (2, 6)), masked)
    two, _ = canvas_of(rng.integers(9, 320, (2, 6)), masked)
    first, second = (model.read(c, model.context(c), query).view(2, 6, -1)[:, 0] for c in (one, two))
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])
    alone, only = canvas_of(np.array([[7]]), np.ones((1, 1), dtype=bool))
    assert model.read(alone, model.context(alone), only).isfinite().all()


def test_a_query_row_sees_only_the_ranks_below_its_limit():
    model = random_model(MICRO)
    rng = np.random.default_rng(0)
    ids, masked = rng.integers(9, 320, (1, 12)), rng.random((1, 12)) < 0.7
    canvas, query = canvas_of(ids, masked)
    stale = QueryRows(query.index, draft_heads.stale_limit(canvas, 2))
    before = model.read(canvas, model.context(canvas), stale)
    changed = canvas.ids.clone()
    last = int(canvas.rank.argmax())
    second_to_last = int((canvas.rank == canvas.rank.max() - 1).flatten().nonzero())
    changed[0, [last, second_to_last]] = 11
    other = Canvas(changed, canvas.rank, canvas.num_prompt)
    assert torch.equal(before, model.read(other, model.context(other), stale))
    fresh = model.read(canvas, model.context(canvas), query)
    assert not torch.equal(fresh, model.read(other, model.context(other), query))


def test_the_rate_warms_up_stays_and_falls_to_zero():
    plan = training.Plan(steps=100, warmup=10, decay_share=0.2, learning_rate=1.0)
    assert [plan.rate(step) for step in (0, 9, 50, 80, 90, 100)] == pytest.approx([0.1, 1, 1, 1, 0.5, 0])


@pytest.mark.slow
def test_training_is_deterministic_and_lowers_the_loss(stream):
    plan = training.Plan(steps=30, batch_tokens=256, lengths=(16, 32), length_shares=(0.5, 0.5), warmup=2)

    def trainer() -> training.Trainer:
        return training.Trainer(TwoStream(MICRO, torch.Generator().manual_seed(3)), plan, stream, torch.device("cpu"))

    shared.check_training(trainer)


def test_acceptance_and_both_losses_of_a_draft_law():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log()
    q = torch.tensor([[0.2, 0.3, 0.5, 0.0]]).log()
    assert head_training.acceptance(p, q).item() == pytest.approx(0.7)
    divergence = 0.5 * np.log(2.5) + 0.2 * np.log(0.4)
    assert head_training.head_loss(p, q, by_acceptance=False).item() == pytest.approx(divergence, abs=1e-6)
    assert head_training.head_loss(p, q, by_acceptance=True).item() == pytest.approx(-np.log(0.7), abs=1e-6)


def test_rows_know_their_neighbours_once_these_are_of_an_earlier_rank():
    ids = np.array([[10, 11, 12, 13, 14]])
    masked = np.array([[True, False, True, True, False]])
    windows = masking.Windows(ids, masked, masking.decoding_ranks(masked))
    rows = draft_heads.rows_of(windows, torch.device("cpu"))
    assert rows.token.tolist() == [10, 12, 13]
    assert rows.offset.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_heads_learn_and_training_them_is_deterministic(stream):
    model = random_model(MICRO, scale=0.3)
    plan = draft_heads.HeadPlan(steps=40, count=4, length=24, markov_hidden=32, warmup=4)
    losses: list[list[float]] = [[], []]
    trained = []
    for run in range(2):

        def report(step: int, loss: float, kept: list[float] = losses[run]) -> None:
            kept.append(loss)

        trained.append(draft_heads.train_heads(model, stream, plan, report))
    assert losses[0] == losses[1]
    assert np.mean(losses[0][20:26]) < np.mean(losses[0][:4])
    for one, two in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_bits_per_byte_of_a_uniform_model_are_known(stream, tokenizer):
    model = random_model(MICRO, scale=0.0)
    sizes = corpus.token_bytes(tokenizer)
    score = evaluation.quality(model, stream, sizes, length=64, revealed=0.5, limit=20)
    assert score.nats_per_token == pytest.approx(np.log(MICRO.vocab_size - 1), rel=1e-5)  # all but the mask token
    assert score.tokens == 20 * 32
    with pytest.raises(ValueError, match="no held-out file"):
        evaluation.quality(model, stream, sizes, length=10**6, revealed=0.5)


def test_the_folder_loads_in_transformers_and_back(tokenizer, tmp_path):
    model = random_model(MICRO)
    folder.save_model(tmp_path, model, tokenizer)
    heads = DraftHeads(width=MICRO.d_model, markov_hidden=16)
    folder.save_draft_heads(tmp_path, heads)
    loaded = folder.load_model(tmp_path, torch.device("cpu"))
    reference = XLNetLMHeadModel.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].half().float())
        assert torch.equal(tensor, reference.state_dict()[name])
    stored = load_heads(tmp_path)
    assert stored is not None
    assert torch.equal(stored.markov.up.weight, heads.markov.up.weight.half().float())
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, PreTrainedTokenizerFast)
    text = "def f(x):\n\n        return '<mask>'  # é\t\n"
    assert corpus.encode(again, text) == corpus.encode(tokenizer, text)
    assert again.decode(corpus.encode(again, text)) == text


@pytest.mark.slow
def test_the_recipe_writes_a_whole_folder_and_an_interrupted_one_the_same(tmp_path):
    flags = ["--size", "micro", "--steps", "2", "--head-steps", "2", "--threads", "1", "--batch-tokens", "1024"]
    files = ("model.safetensors", "draft_head.safetensors", "tokenizer.json", "config.json")
    shared.check_written(shared.written_twice(asarm, flags, tmp_path), files, "| 128 | 50% |", "| 5% | markov |")


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
    model = causal.new_model(shared.SHAPE, 0)
    ids = torch.from_numpy(prepared.train.ids[:12].reshape(2, 6))
    with torch.no_grad():
        law = model(ids).logits.double().log_softmax(-1)
    expected = -torch.stack([law[b, t - 1, ids[b, t]] for b in range(2) for t in range(1, 6)]).mean()
    assert causal.next_token_loss(model, ids).item() == pytest.approx(expected.item(), abs=0.02)  # bfloat16 products


@pytest.mark.slow
def test_training_of_causal_models_is_deterministic_and_lowers_the_loss(prepared):
    plan, device = dataclasses.replace(shared.short_schedule(30, 0), batch_tokens=256), torch.device("cpu")
    shared.check_training(lambda: causal.Trainer(causal.new_model(shared.SHAPE, 0), plan, prepared.train, device))


def test_perplexity_of_a_uniform_model_is_known(prepared):
    model = causal.new_model(shared.SHAPE, 0)
    for parameter in model.parameters():
        parameter.data.zero_()
    score = causal_folder.quality(model, prepared, length=64, limit=20)
    assert score.nats_per_token == pytest.approx(np.log(shared.SHAPE.vocab_size), rel=1e-5)
    assert score.tokens == 20 * 63
    with pytest.raises(ValueError, match="no held-out file"):
        causal_folder.quality(model, prepared, length=10**6)


@pytest.mark.slow
def test_the_causal_recipe_writes_a_whole_folder_and_an_interrupted_one_the_same(tmp_path):
    flags = ["--size", "micro-test", "--steps", "3", "--threads", "1", "--batch-tokens", "1024"]
    whole, resumed = shared.written_twice(ar, flags, tmp_path)
    shared.check_written((whole, resumed), shared.MODEL_FILES, "| 512 |")
    assert shared.has_tokenizer(whole)
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
