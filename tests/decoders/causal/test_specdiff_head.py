"""The Markov draft head of `specdiff`: what it accepts and costs, and its files. Its texts and counts are in test_specdiff.py."""

import json
import time

import pytest
import torch
from safetensors.torch import save_file

from draftmill.decoders.backbones.heads.markov import DraftHeads, MarkovHead, load_heads
from draftmill.decoders.backbones.invariance import rows_exact
from draftmill.decoders.registry import find_heads
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.diffusion_tables import (
    LENGTH,
    PLACE,
    TARGET_INFO,
    VOCAB,
    drafter,
    mask_info,
    specdiff,
    target,
)
from tests.decoders.support import (
    decoder_settings,
    engine,
    run_all,
    toy_heads,
    toy_prompts,
)

WIDTH = VOCAB + 1


def test_the_seconds_of_the_head_are_those_of_the_drafters_forwards(monkeypatch):
    slow_s, calls = 0.002, []

    def slow(self, hidden_RD, **_):
        calls.append(len(hidden_RD))
        time.sleep(slow_s)
        return hidden_RD

    monkeypatch.setattr(MarkovHead, "forward", slow)
    requests = toy_prompts(12, vocab_size=VOCAB, longest=LENGTH, seed=8)
    decoder = engine(
        target(),
        TARGET_INFO,
        specdiff(3, 1),
        rows=3,
        max_tokens=99,
        drafter=drafter(),
        drafter_info=mask_info(),
        heads=toy_heads(WIDTH),
    )
    outcomes = run_all(decoder, requests)
    assert sum(o.device_s for o in outcomes.values()) == pytest.approx(decoder.stats.forward_s)
    assert decoder.stats.forward_s > slow_s * len(calls) > 0
    assert sum(calls) == sum(o.proposed for o in outcomes.values()), "one row for each draft, no more"


def save(folder, heads, *, dtype=torch.float16, **config):
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in heads.state_dict().items()}
    save_file(weights, folder / "draft_head.safetensors")
    (folder / "draft_head.json").write_text(json.dumps(heads.sizes() | config))
    return folder


def test_a_file_holds_the_heads_that_it_names(tmp_path):
    heads = DraftHeads(width=8, markov_hidden=6)
    alone = load_heads(save(tmp_path / "one", heads, kind="specdiff"), "specdiff")
    assert alone is not None
    assert torch.equal(alone.markov.up.weight, heads.markov.up.weight.half().float())
    assert load_heads(tmp_path) is None


def test_a_head_with_an_infinite_weight_is_refused(tmp_path):
    heads = DraftHeads(width=8, markov_hidden=6)
    heads.markov.up.weight.data[2, 3] = -torch.inf
    with pytest.raises(
        ValueError, match=r"decoder\.head: .*draft_head\.safetensors: markov\.up\.weight has weights that"
    ):
        load_heads(save(tmp_path / "head", heads))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "draft_head.json: it has kind = none; supported: 'specdiff'"),
        ({"width": "8"}, r"draft_head.json: it has width = '8'; allowed: whole numbers >= 1"),
        ({"kind": "specdiff", "markov_hidden": 5}, r"does not fit .*markov"),
        ({"kind": "specdiff", "depth": 2}, "it has depth; allowed: kind, width, markov_hidden"),
    ],
)
def test_a_head_of_another_kind_or_size_is_refused(tmp_path, config, message):
    folder = save(tmp_path / "head", DraftHeads(width=8, markov_hidden=6), **config)
    with pytest.raises(ValueError, match=r"(?s)decoder\.head: .*" + message):
        load_heads(folder, "specdiff")


def test_the_drafters_own_head_is_found_and_a_named_one_goes_before_it(tmp_path):
    own = save(tmp_path / "own", DraftHeads(width=WIDTH, markov_hidden=5), kind="specdiff")
    other = save(tmp_path / "other", DraftHeads(width=WIDTH, markov_hidden=7), kind="specdiff")
    wide = save(tmp_path / "wide", DraftHeads(width=9, markov_hidden=7), kind="specdiff")
    (tmp_path / "bare").mkdir()

    def found(head, folder=own, **more):
        heads = find_heads(decoder_settings("specdiff", drafter=PLACE, head=str(head), **more), folder, drafter())
        return None if heads is None else heads.sizes()["markov_hidden"]

    assert (found("auto"), found(other), found("none")) == (5, 7, None)
    assert found("auto", tmp_path / "bare") is None
    assert found("auto", order="native") is None
    with pytest.raises(ValueError, match=r"decoder\.head: .*bare has no draft_head\.json and draft_head\.safetensors"):
        found(tmp_path / "bare")
    with pytest.raises(ValueError, match=rf"decoder\.head: made for models of width 9, but this model has {WIDTH}"):
        found(wide)
    with pytest.raises(ValueError, match="kind = 'specdiff'; supported: 'assd', none"):
        find_heads(decoder_settings("assd"), own, drafter())


def test_a_row_of_a_real_drafters_head_keeps_its_bits_in_any_company(golden, tmp_path):
    backbone = load(golden / "llada")
    heads = DraftHeads(width=backbone.width, markov_hidden=32).requires_grad_(False)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    settings = decoder_settings("specdiff", drafter=PLACE, head=str(save(tmp_path, heads, kind="specdiff")))
    found, stored = find_heads(settings, tmp_path, backbone), load_heads(tmp_path, "specdiff")
    assert found is not None and stored is not None

    def corrected(head, rows_RD):
        one_R = torch.ones(len(rows_RD), dtype=torch.int64)
        places = {"prev_distance_R": one_R, "before_distance_R": one_R, "num_unseen_R": 2 * one_R}
        with torch.no_grad():
            return head(rows_RD, prev_RD=rows_RD.flip(1), before_RD=-rows_RD, **places)

    rows_RD = torch.randn(300, backbone.width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(corrected(found.markov, rows_RD), corrected(stored.markov, rows_RD))
    if backbone.rules.exact:
        assert rows_exact(lambda rows: corrected(found.markov, rows), rows_RD, backbone.min_rows)


def test_the_native_order_has_no_head():
    assert decoder_settings("specdiff", drafter=PLACE, order="native", head="none").head == "none"
    with pytest.raises(ValueError, match=r"decoder\.head: 'heads/mine'.*'native'.*allowed with it: auto, none"):
        decoder_settings("specdiff", drafter=PLACE, order="native", head="heads/mine")
