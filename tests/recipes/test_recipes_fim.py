"""The recipe of the model that fills in the middle: rows with a hole, what they count, the start, training, the folder."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftmill.actors.rows.fim import template_of
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model
from recipes import absorbing, causal, corpus, fim, fim_folder, fim_quality, fim_windows, loop
from recipes.fim_windows import text_of
from tests.recipes.recipes_of_tests import few_files, no_report, short_schedule, small_causal_model

TEXT = "import os\n\ndef size(path):\n    found = os.stat(path)\n    return found.st_size\n"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory):
    torch.set_num_threads(1)
    return small_causal_model(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def prepared(start) -> corpus.Prepared:
    files = few_files()
    return corpus.prepare(files[:-2], files[-2:], fim_folder.extend_tokenizer(start))


def test_a_row_is_prefix_suffix_middle_and_only_text_counts(prepared):
    tokenizer = prepared.tokenizer
    start = TEXT.index("    found")
    hole = (start, start + len("    found = os.stat(path)"))
    ids, weights = fim_windows.fim_row(tokenizer, TEXT, hole, 200)
    before, middle, after = TEXT[: hole[0]], TEXT[slice(*hole)], TEXT[hole[1] :]
    assert text_of(tokenizer, ids) == f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>{middle}</s>"
    assert len(weights) == len(ids)
    for token, weight in zip(ids, weights, strict=True):
        assert (weight == 0) == (token in fim_windows.fim_ids(tokenizer))
    said = len(corpus.encode(tokenizer, middle)) + 1
    assert weights[-said:] == [fim_windows.MIDDLE_WEIGHT] * said and set(weights[:-said]) == {0.0, 1.0}


def test_a_row_that_is_too_long_loses_the_far_ends(prepared):
    tokenizer = prepared.tokenizer
    text = "a = 1\n" * 40 + "HOLE" + "\nb = 2" * 40
    whole, _ = fim_windows.fim_row(tokenizer, text, (240, 244), 10_000)
    ids, weights = fim_windows.fim_row(tokenizer, text, (240, 244), 60)
    assert len(ids) == len(weights) == 60 < len(whole)
    assert text_of(tokenizer, ids).endswith("<|fim_middle|>HOLE</s>")
    before, after = (
        text_of(tokenizer, ids).removeprefix("<|fim_prefix|>").split("<|fim_middle|>")[0].split("<|fim_suffix|>")
    )
    assert text[:240].endswith(before) and text[244:].startswith(after)
    assert abs(len(corpus.encode(tokenizer, before)) - len(corpus.encode(tokenizer, after))) <= 1


def test_holes_are_lines_ends_of_lines_and_spans():
    rng = np.random.default_rng(0)
    found = [TEXT[slice(*fim_windows.draw_hole(rng, TEXT))] for _ in range(300)]
    assert all(found)
    lines = [line for line in TEXT.splitlines() if line.strip()]
    assert set(lines[1:-1]) <= set(found), "whole lines, with what they are indented by"
    assert any(text not in lines and any(line.endswith(text) for line in lines) for text in found)
    assert any("\n" in text for text in found)


def test_a_step_has_plain_windows_and_rows_with_a_hole(start, prepared):
    model = fim.model_from(start, len(prepared.tokenizer))
    trainer = fim.Trainer(model, short_schedule(30), prepared, torch.device("cpu"))
    prefix, *_ = fim_windows.fim_ids(prepared.tokenizer)
    holes = rows = 0
    for step in range(30):
        batch = trainer.batch(step)
        assert batch.ids.shape == batch.weights.shape and not batch.weights[batch.ids == corpus.PAD_ID].any()
        holes += int((batch.ids[:, 0] == prefix).sum())
        rows += len(batch.ids)
    assert 0.5 < holes / rows < 0.7
    again = trainer.batch(7)
    assert np.array_equal(again.ids, trainer.batch(7).ids)
    assert not np.array_equal(again.ids[:8, :16], trainer.batch(8).ids[:8, :16])


def test_the_loss_counts_each_token_by_its_weight(start):
    model = causal.load_model(start, torch.device("cpu"))
    ids = torch.tensor([[1, 50, 60, 70], [1, 80, 90, 5]])
    weights = torch.tensor([[0.0, 1.0, 0.0, 4.0], [0.0, 1.0, 4.0, 0.0]])
    with torch.no_grad():
        law = model(ids).logits.double().log_softmax(-1)
        nats = sum(-law[b, t - 1, ids[b, t]] * weights[b, t] for b in range(2) for t in range(1, 4))
        assert fim.weighted_loss(model, ids, weights).item() == pytest.approx((nats / 10).item(), abs=0.02)


def test_new_tokens_begin_as_the_mean_of_the_others_and_nothing_else_changes(start):
    old = causal.load_model(start, torch.device("cpu"))
    new = fim.model_from(start, old.config.vocab_size + 3)
    before, after = old.model.embed_tokens.weight, new.model.embed_tokens.weight
    assert torch.equal(after[:-3], before) and torch.allclose(after[-3:], before.mean(0).expand(3, -1))
    assert new.lm_head.weight is new.model.embed_tokens.weight
    ids = torch.tensor([[1, 50, 60]])
    with torch.no_grad():
        assert torch.allclose(new(ids).logits[..., :-3], old(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_training_makes_a_folder_that_the_decoders_can_fill_with(start, prepared, tmp_path):
    plan = short_schedule(40)

    def trained() -> fim.Trainer:
        trainer = fim.Trainer(
            fim.model_from(start, len(prepared.tokenizer)).train(), plan, prepared, torch.device("cpu")
        )
        assert loop.run(trainer, None, loop.Pace(), no_report)
        return trainer

    one, two = trained(), trained()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters.values(), two.parameters.values(), strict=True))
    rows = one.batch(3)
    batch = torch.from_numpy(rows.ids), torch.from_numpy(rows.weights)
    first, last = (fim.weighted_loss(model, *batch).item() for model in (fim.model_from(start, 2051), one.model))
    assert last < first
    fim_folder.save_model(
        tmp_path, one.model, causal.Shape(**shape_of(start) | {"vocab_size": 2051}), prepared.tokenizer
    )
    info, tokenizer = inspect_model(tmp_path), load_tokenizer(tmp_path)
    assert info.vocab_size == 2051 and tokenizer is not None
    template = template_of("auto", tokenizer, info)
    assert (template.prefix, template.suffix, template.middle) == fim_windows.fim_ids(prepared.tokenizer)
    report = fim_quality.measure(causal.load_model(tmp_path, torch.device("cpu")), one.model.eval(), prepared, 4)
    text = fim_folder.readme("x", {"a": "b"}, ["f.py"], report)
    assert "| this model, text on both sides | " in text and "`f.py`" in text


@pytest.mark.slow
def test_a_line_counts_where_it_comes_back_to_the_character(start, prepared):
    lines = fim_quality.held_out_lines(prepared, 6)
    assert 3 <= len(lines) <= 6
    for line in lines:
        assert "\n" not in line.middle and line.before.endswith("\n") and line.after.startswith("\n")
        assert any(line.before + line.middle + line.after in file.text for file in few_files()[-2:])
    tokenizer = prepared.tokenizer
    model = fim.model_from(start, len(tokenizer)).eval()
    said = fim_quality.greedy(model, fim_quality.fim_prompt(tokenizer, lines[0], 100), lambda ids: False)
    found = fim_quality.Line(lines[0].before, text_of(tokenizer, said), lines[0].after)
    if len(said) < fim_quality.MOST_NEW:
        assert fim_quality.exact_infill(model, tokenizer, [found]).hits == 1
    wrong = fim_quality.Line(lines[0].before, text_of(tokenizer, said) + "x", lines[0].after)
    assert fim_quality.exact_infill(model, tokenizer, [wrong]).hits == 0


def shape_of(start) -> dict[str, int]:
    return dict(vars(absorbing.shape_of(start)))


def test_matrices_in_int8_are_within_half_a_step_of_what_was_trained(start, tmp_path):
    before = causal.load_model(start, torch.device("cpu"))
    fim_folder.save_model(tmp_path, before, absorbing.shape_of(start), fim_folder.extend_tokenizer(start))
    stored = load_file(tmp_path / "model.safetensors")
    after = causal.load_model(tmp_path, torch.device("cpu")).state_dict()
    for name, weight in before.state_dict().items():
        is_matrix = name.endswith("_proj.weight")
        assert (stored[name].dtype == torch.int8) == is_matrix if name in stored else name == "lm_head.weight"
        step = stored[f"{name}_scale"].float() if is_matrix else torch.tensor(0.0)
        assert bool(((after[name] - weight.half().float()).abs() <= 0.501 * step).all()), name
