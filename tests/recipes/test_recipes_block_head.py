"""The recipe of a block-diffusion model's draft head: rows as the decoder has them, training, the folder."""

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.markov import load_heads
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.registry import find_heads
from recipes import ar, block, block_folder, block_head, block_training, corpus, draft_report, frozen_pair
from recipes.head_training import acceptance
from recipes.specdiff_head import HeadPlan, train_head
from tests.decoders.references.blocks import PlainBlocks
from tests.decoders.references.fused_blocks import at_size_one, masks_after
from tests.decoders.support import decoder_settings
from tests.recipes.recipes_of_tests import SHAPE
from tests.recipes.test_recipes_specdiff_head import random_heads, tokens

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
    pair, plan = block_head.load_model(folder), HeadPlan(steps=60, rows=400, batch_rows=64, markov_hidden=32, warmup=5)
    rows = frozen_pair.collect_rows(lambda step: block_head.read_step(pair, tokens(600), 0, step), count=plan.rows)
    heads = train_head(pair, rows, plan, lambda step, loss: None)
    other = block_head.read_step(pair, tokens(500) + 3, 1, 0)
    bare, headed = (np.mean(draft_report.acceptance_by_place(pair, other, which)) for which in (None, heads))
    assert headed > bare + 0.05


@pytest.mark.slow
def test_the_recipe_writes_a_head_that_s2d2_finds(folder, monkeypatch):
    train, held_out = corpus.split(corpus.standard_library())
    few = train[:4] + [file for file in held_out if 6_000 < len(file.text) < 20_000][:1]
    monkeypatch.setattr(corpus, "standard_library", lambda: few)
    monkeypatch.setattr(draft_report, "LENGTH", 24)
    monkeypatch.setattr(draft_report, "NUM_PROMPT", 12)
    flags = ["--rows", "300", "--steps", "3", "--threads", "1", "--samples", "2"]
    assert block_head.main(["--model", str(folder), *flags]) == 0
    stored = load_heads(folder, "s2d2")
    assert stored is not None and stored.sizes() == {"width": SHAPE.hidden_size, "markov_hidden": 384}
    model = block_head.load_model(folder).target.model
    assert find_heads(FUSED, folder, model) is not None
    assert find_heads(FUSED.model_copy(update={"head": "none"}), folder, model) is None
    assert "| 1 | rejection |" in (folder / "README.md").read_text()
