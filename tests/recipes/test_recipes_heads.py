"""Recipes of draft heads: rows and laws are those that decoders draft from, training accepts more, the folder decodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.files import read_speculator
from draftmill.decoders.backbones.heads.markov import DraftHeads, load_heads
from draftmill.decoders.backbones.heads.published import load_speculator
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.causal.settings import SpecDiffSettings
from draftmill.decoders.common_settings import DrafterPlace, Sampling
from draftmill.decoders.registry import find_heads
from recipes import (
    absorbing,
    absorbing_folder,
    ar,
    block,
    block_folder,
    block_head,
    block_training,
    causal,
    causal_folder,
    corpus,
    draft_report,
    eagle_head,
    frozen_pair,
    specdiff_head,
)
from recipes.eagle_head import HeadPlan, Target, Trainee
from recipes.frozen_pair import Pair, Windows
from recipes.head_training import acceptance, fit_heads
from tests.decoders.references.blocks import PlainBlocks
from tests.decoders.references.causal import PlainCausal, PlainMasked, corrected
from tests.decoders.references.fused_blocks import at_size_one, masks_after
from tests.decoders.support import decoder_settings
from tests.recipes.recipes_of_tests import SHAPE

PLAN = specdiff_head.HeadPlan(steps=60, rows=400, batch_rows=64, markov_hidden=32, warmup=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A target and a drafter of random weights, large enough to have opinions."""
    place = tmp_path_factory.mktemp("pair")
    causal_model, masked_model = causal.new_model(SHAPE, 3), absorbing.empty_model(SHAPE)
    torch.manual_seed(4)
    for model in (causal_model, masked_model):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.6)
    causal_folder.save_model(place / "target", causal_model, SHAPE, ar.TOKENIZER)
    absorbing_folder.save_model(place / "masked", masked_model, SHAPE, ar.TOKENIZER)
    return place / "target", place / "masked"


@pytest.fixture(scope="module")
def pair(folders: tuple) -> Pair:
    return frozen_pair.load_pair(*folders)


def tokens(count: int) -> np.ndarray:
    """Tokens of which each is mostly followed by the next one."""
    rng = np.random.default_rng(0)
    return np.cumsum(rng.random(count) < 0.9) % 200 + 50


def random_heads(width: int) -> DraftHeads:
    torch.manual_seed(1)
    heads = DraftHeads(width=width, markov_hidden=16).requires_grad_(False)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def test_rows_are_what_the_decoders_see_of_a_text_and_its_masks(pair):
    """Every law is that of the references, the head's included: a text of so many tokens, and masks behind it."""
    text, num_masks, heads = tokens(24).reshape(2, 12), np.array([5, 1]), random_heads(SHAPE.hidden_size)
    rows = frozen_pair.read_rows(pair, text, num_masks)
    assert rows.place.tolist() == [0, 1, 2, 3, 4, 0]
    never = pair.never()
    assert never == [corpus.MASK_ID]
    bare, headed = (frozen_pair.draft_law(pair, rows, head) for head in (None, heads.markov))
    truth = frozen_pair.target_law(pair, rows)
    sampling, row = Sampling(), 0
    masked = PlainMasked(pair.drafter.model, mask_id=corpus.MASK_ID, sampling=sampling)
    target = PlainCausal(pair.target.model, length=12, sampling=sampling, suppressed=never)
    for ids, count in zip(text.tolist(), num_masks.tolist(), strict=True):
        known = len(ids) - count
        hidden_LD = masked.hidden([*ids[:known], *[corpus.MASK_ID] * count])
        for place in range(count):
            assert (rows.prev[row], rows.before[row]) == (ids[known + place - 1], ids[known + place - 2])
            plain_1D = hidden_LD[known + place : known + place + 1]
            told_1D = corrected(masked.backbone, heads.markov, plain_1D, ids[: known + place], place)
            for found, expected in (
                (bare[row], masked.laws_of(plain_1D)[0]),
                (headed[row], masked.laws_of(told_1D)[0]),
                (truth[row], target.law(ids[: known + place])),
            ):
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            row += 1
    assert acceptance(bare, headed).max() < 0.99, "the head says nothing"


def test_windows_depend_on_seed_and_step_only_and_keep_a_token_of_the_text():
    windows, ids = Windows(batch_tokens=64, lengths=(8, 20), length_shares=(0.5, 0.5)), tokens(100)
    drawn = [windows.draw(ids, seed=0, step=step) for step in range(60)]
    again, counts = windows.draw(ids, seed=0, step=7)
    assert np.array_equal(again, drawn[7][0]) and np.array_equal(counts, drawn[7][1])
    assert {pieces.shape for pieces, _ in drawn} == {(8, 8), (3, 20)}
    short = {int(count) for pieces, counts in drawn for count in counts if pieces.shape[1] == 8}
    long = {int(count) for pieces, counts in drawn for count in counts if pieces.shape[1] == 20}
    assert short == set(range(1, 8)) and long <= set(range(1, 17)) and 16 in long


def test_models_that_are_no_pair_are_refused(folders, tmp_path):
    target, masked = folders
    with pytest.raises(ValueError, match="a causal model and a masked-diffusion model are needed, not llada, qwen2"):
        frozen_pair.load_pair(masked, target)
    other = type(SHAPE)(32, 1, 2, 1, 64, vocab_size=2049)
    absorbing_folder.save_model(tmp_path / "other", absorbing.empty_model(other), other, ar.TOKENIZER)
    with pytest.raises(ValueError, match=r"target has 2048 ids, .*other 2049"):
        frozen_pair.load_pair(target, tmp_path / "other")


def test_a_step_takes_each_row_once_before_any_twice():
    drawn = torch.cat([PLAN.batch(150, step) for step in range(7)]).tolist()
    assert sorted(drawn[:150]) == sorted(drawn[150:300]) == list(range(150))
    assert drawn[:150] != drawn[150:300]


def test_training_is_deterministic_and_more_is_accepted_on_other_text(pair):
    windows = Windows(batch_tokens=256)
    rows = frozen_pair.collect_rows(
        lambda step: frozen_pair.read_step(pair, tokens(600), windows, 0, step), count=PLAN.rows
    )
    assert len(rows) >= PLAN.rows and rows.drafter.dtype == torch.float16
    trained, runs = [], []
    for _ in range(2):
        losses: dict[int, float] = {}
        trained.append(specdiff_head.train_head(pair, rows, PLAN, losses.__setitem__))
        runs.append(losses)
    assert runs[0] == runs[1] and len(runs[0]) == PLAN.steps
    assert all(torch.equal(a, b) for a, b in zip(trained[0].parameters(), trained[1].parameters(), strict=True))
    other = frozen_pair.read_rows(pair, (tokens(400) + 3).reshape(10, 40), np.full(10, 8))
    bare, headed = (np.mean(draft_report.acceptance_by_place(pair, other, heads)) for heads in (None, trained[0]))
    assert headed > bare + 0.05


@pytest.fixture
def small_corpus(monkeypatch):
    train, held_out = corpus.split(corpus.standard_library())
    few = train[:4] + [file for file in held_out if 6_000 < len(file.text) < 20_000][:1]
    monkeypatch.setattr(corpus, "standard_library", lambda: few)
    monkeypatch.setattr(draft_report, "LENGTH", 24)
    monkeypatch.setattr(draft_report, "NUM_PROMPT", 12)


@pytest.mark.slow
def test_the_recipe_writes_a_head_that_specdiff_finds(folders, small_corpus, tmp_path):
    target, masked = folders
    out = tmp_path / "masked"
    out.mkdir()
    for file in masked.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    flags = ["--target", str(target), "--rows", "300", "--steps", "3", "--threads", "1", "--samples", "2"]
    assert specdiff_head.main(["--drafter", str(out), *flags]) == 0
    stored = load_heads(out, "specdiff")
    assert stored is not None and stored.sizes() == {"width": SHAPE.hidden_size, "markov_hidden": 384}
    settings = SpecDiffSettings(kind="specdiff", drafter=DrafterPlace(path=str(out)))
    assert find_heads(settings, out, frozen_pair.load_pair(target, out).drafter.model) is not None
    text = (out / "README.md").read_text()
    assert "For `specdiff` with target `target`" in text and "| 1 | rejection | 2 |" in text
    assert PreTrainedTokenizerFast.from_pretrained(out).mask_token == "<mask>"


FUSED = decoder_settings("s2d2", block_size=3, causal_cache=True, fused=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A block-diffusion model of random weights, large enough to have opinions."""
    place, model = tmp_path_factory.mktemp("model"), block_training.empty_model(SHAPE)
    torch.manual_seed(4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    block_folder.save_model(place, model, SHAPE, ar.TOKENIZER)
    return place


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_rows_are_what_the_decoder_sees_of_a_text_and_its_masks(golden, family):
    """Their distributions are those of the plain references, the head's included."""
    model = frozen_pair.load_frozen(golden / family, inspect_model(golden / family, mask_id=95), "float32")
    pair, heads = frozen_pair.Pair(model, model), random_heads(model.model.width)
    plain, num_masks = PlainBlocks(pair.target.model, pair.target.info, FUSED, Sampling()), 4
    text, known = np.arange(24).reshape(2, 12) * 3 % 90, np.array([[2, 8], [5, 3]])
    rows = block_head.read_rows(pair, text, known, num_masks)
    bare, headed = (frozen_pair.draft_law(pair, rows, head) for head in (None, heads.markov))
    truth, row = frozen_pair.target_law(pair, rows), 0
    for ids, firsts in zip(text.tolist(), known.tolist(), strict=True):
        for first in firsts:
            for place in range(first + 1, first + num_masks):
                assert rows.place[row] == place - first
                where = masks_after(plain, ids[:first], place, first + plain.size + 1)
                for found, expected in (
                    (bare[row], plain.law(*where)),
                    (headed[row], plain.headed(*where, heads.markov, ids[:place], place - first)),
                    (truth[row], at_size_one(plain, ids, place)),
                ):
                    torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=0)
                row += 1
    assert row == len(rows) and acceptance(bare, headed).max() < 0.99, "the head says nothing"


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="a block-diffusion model is needed, not qwen2"):
        block_head.load_model(block.START)


def test_training_accepts_more_on_other_text(folder):
    pair = block_head.load_model(folder)
    rows = frozen_pair.collect_rows(lambda step: block_head.read_step(pair, tokens(600), 0, step), count=PLAN.rows)
    heads = specdiff_head.train_head(pair, rows, PLAN, lambda step, loss: None)
    other = block_head.read_step(pair, tokens(500) + 3, 1, 0)
    bare, headed = (np.mean(draft_report.acceptance_by_place(pair, other, which)) for which in (None, heads))
    assert headed > bare + 0.05


@pytest.mark.slow
def test_the_recipe_writes_a_head_that_s2d2_finds(folder, small_corpus):
    flags = ["--rows", "300", "--steps", "3", "--threads", "1", "--samples", "2"]
    assert block_head.main(["--model", str(folder), *flags]) == 0
    stored = load_heads(folder, "s2d2")
    assert stored is not None and stored.sizes() == {"width": SHAPE.hidden_size, "markov_hidden": 384}
    model = block_head.load_model(folder).target.model
    assert find_heads(FUSED, folder, model) is not None
    assert find_heads(FUSED.model_copy(update={"head": "none"}), folder, model) is None
    assert "| 1 | rejection |" in (folder / "README.md").read_text()


MICRO = Path(__file__).parents[2] / "decoders" / "builtin" / "ar-micro"
EAGLE = HeadPlan(steps=12, windows=2, length=16, warmup=2, layer_ids=(1, 2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainee, list[float]]:
    """A head of a few steps on text that repeats itself, and its losses."""
    out = tmp_path_factory.mktemp("heads") / "head"
    config = eagle_head.config_of(MICRO, EAGLE.layer_ids)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    trainee = Trainee(Target(MICRO, EAGLE.layer_ids), read_speculator(out), EAGLE)
    ids, losses = np.resize(np.random.default_rng(0).integers(10, 2000, 24), 400), list[float]()
    fit_heads(trainee.stack, EAGLE, lambda step: trainee.loss(ids, step), lambda step, loss: losses.append(loss))
    trainee.save(out, config)
    return out, trainee, losses


def test_training_lowers_the_loss(trained):
    _, _, losses = trained
    assert losses[7] < losses[0]  # the last third has another loss


@torch.no_grad()
def test_training_gives_the_laws_that_the_head_drafts_by(trained, monkeypatch):
    """Row by row: from the target's states, and after one and two steps from the head's own; weights are stored in halves."""
    out, trainee, _ = trained
    monkeypatch.setattr("recipes.loop.torch.autocast", lambda *_, **__: torch.no_grad())
    tokens_L = torch.tensor(np.random.default_rng(1).integers(10, 2000, 12))
    laws = trainee.laws(tokens_L.unsqueeze(0))
    target = cast("Any", load_backbone(MICRO, dtype="float32", device="cpu"))
    head = load_speculator(out, target)
    for last in (0, 4, 8):
        for one in (target, head):
            one.allocate(1, 32)
        target.tap(head)
        target.forward(causal_rows([0], [last + 1], [0], tokens_L[: last + 1]))
        rows = causal_rows([0], [last + 1], [0], tokens_L[1 : last + 2])
        for step in range(3):
            rows = replace(rows, position_N=rows.position_N + 1, takes_drafts=step > 0)
            log_q_V = head.logits(head.forward(rows))[-1].log_softmax(-1)
            torch.testing.assert_close(log_q_V, laws[step][1][last], atol=0.05, rtol=0.05)
            place = last + 1 + step
            rows = causal_rows([0], [1], [place], tokens_L[place + 1 :][:1])
