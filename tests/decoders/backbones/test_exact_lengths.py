"""A row's bits don't depend on its neighbours, at any length: products whose order of summation is ours, and their self-test.

The library splits long sums in ways that depend on their length. So the sums over columns are cut into blocks (invariance.py),
and the self-test at start looks at lengths on both sides of whatever edges there may be.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.any_subset.settings import AnySubsetSettings, AssdSettings
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.invariance import INEXACT_RULES, weigh_values
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.self_test import model_rules
from draftmill.decoders.backbones.xlnet import xlnet_rules
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.backbones.causal_models import MODELS, in_a_row, load, play, random_tokens, save_random
from tests.decoders.backbones.masked_models import FAMILIES, VOCAB, copy_changed, look, random_canvas
from tests.decoders.backbones.masked_models import load as load_masked
from tests.decoders.backbones.test_xlnet import save_random as save_random_xlnet
from tests.decoders.support import decode, texts

CPU = torch.device("cpu")
HEADS = (2, 2, 16)
LENGTHS = (16, 90, 128, 185, 250, 300, 383, 700, 1500)
LONG: dict[str, dict[str, int]] = {"gpt2": {"n_positions": 2048}, "gpt2-scales": {"n_positions": 2048}}


def differing_counts(rules):
    """Counts of visible columns, of 1 to 2048, at which more columns change the weighted sum under these rules."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, rules.min_queries, 2304, generator=generator)
    value = torch.randn(3, 2304, 16, generator=generator)
    found = []
    for visible in range(1, 2049):
        hidden = scores.clone()
        hidden[..., visible:] = -torch.inf
        tight = rules.columns(visible, 2304)
        more = rules.columns(tight + 32 * (visible % 61), 2304)
        alone, among = (
            weigh_values(hidden[..., :columns].softmax(-1), value[:, :columns], rules.sum_columns)
            for columns in (tight, more)
        )
        if not torch.equal(alone, among):
            found.append(visible)
    return found


def probe_xlnet():
    """The rules of a small XLNet, searched again."""
    return xlnet_rules.__wrapped__((24, 24, 40, 61), 3, torch.float32, 1)


def test_weighted_sums_have_the_same_bits_at_every_count_against_any_number_of_columns():
    assert differing_counts(model_rules([], HEADS, Running(torch.float32, CPU))) == []


def test_weighted_sums_are_the_plain_product():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 5, 700, generator=generator, dtype=torch.float64).softmax(-1)
    value = torch.randn(3, 700, 16, generator=generator, dtype=torch.float64)
    for block in (32, 128, 1 << 30):
        torch.testing.assert_close(weigh_values(weights, value, block), weights @ value, atol=1e-12, rtol=1e-12)


def split_beyond(limit):
    """A library that splits sums of more than `limit` numbers in halves, as some do."""
    plain = torch.bmm

    def halves(count):
        return [slice(0, count // 2 + 1), slice(count // 2 + 1, count)] if count > limit else [slice(0, count)]

    def bmm(left, right):
        first, *rest = halves(left.shape[2])
        total = plain(left[..., first], right[:, first])
        for part in rest:
            total = total + plain(left[..., part], right[:, part])
        return total

    def baddbmm_(total, left, right):
        return total.add_(bmm(left, right))

    return bmm, baddbmm_


@pytest.mark.parametrize("limit", [100, 60])
@pytest.mark.slow
def test_the_self_test_sees_a_library_that_splits_sums_and_finds_rules_that_hold_there(monkeypatch, limit):
    usual = model_rules([], HEADS, Running(torch.float32, CPU))
    bmm, baddbmm_ = split_beyond(limit)
    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(torch.Tensor, "baddbmm_", baddbmm_)
    rules = model_rules([], HEADS, Running(torch.float32, CPU))
    assert rules.exact and rules != usual
    assert differing_counts(rules) == [] != differing_counts(usual)
    assert probe_xlnet().exact


def test_the_self_test_fails_where_no_rule_helps(monkeypatch):
    """A library that sums from the other end where there are more slots."""
    plain = torch.bmm

    def bmm(left, right):
        turned = left.shape[0] > 3
        return plain(left.flip(2), right.flip(1)) if turned else plain(left, right)

    monkeypatch.setattr(torch, "bmm", bmm)
    # Products that agree are padded to no more rows than they need.
    assert model_rules([], HEADS, Running(torch.float32, CPU)) == replace(INEXACT_RULES, min_rows=1)
    assert not probe_xlnet().exact


def test_the_self_test_looks_as_far_as_the_model_reads(monkeypatch):
    """A softmax that goes wrong beyond 5000 columns spoils a model of 8192 positions and no model of 2048."""
    plain = torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda rows, dim: plain(rows, dim) * (1.0 + 1e-6 * (rows.shape[-1] > 5000))
    )
    assert model_rules([], HEADS, Running(torch.float32, CPU), 2048).exact
    assert not model_rules([], HEADS, Running(torch.float32, CPU), 8192).exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_never_called_exact(dtype):
    assert not model_rules([], HEADS, Running(dtype, CPU)).exact


def grown(text, at):
    """The rows of a prefill up to `at`, and of one step behind it."""
    return in_a_row(text[:at]), in_a_row(text[at : at + 3], at)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_causal_row_has_the_same_bits_beside_any_longer_one(tmp_path, name):
    save_random(tmp_path, name, **LONG.get(name, {"max_position_embeddings": 2048}))
    backbone = load(tmp_path)
    assert backbone.rules.exact
    texts = {slot: random_tokens(length + 3, seed=slot) for slot, length in enumerate(LENGTHS)}

    def decode(slots):
        backbone.forget()
        backbone.allocate(len(LENGTHS), max(len(texts[slot]) for slot in slots))
        parts = {slot: grown(texts[slot], LENGTHS[slot]) for slot in slots}
        prefill = play(backbone, {slot: rows for slot, (rows, _) in parts.items()})
        step = play(backbone, {slot: rows for slot, (_, rows) in parts.items()})
        return {slot: torch.cat([prefill[slot], step[slot]]) for slot in slots}

    together = decode(range(len(LENGTHS)))
    for slots in ([0], [1, 3], [4], [5, 7], [6], [8]):
        apart = decode(slots)
        for slot in slots:
            assert torch.equal(apart[slot], together[slot]), f"{LENGTHS[slot]} tokens"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_canvas_has_the_same_bits_beside_any_longer_one(golden, family):
    backbone = load_masked(golden / family)
    assert backbone.rules.exact
    lengths = (16, 90, 185, 250, 700)
    canvases = {slot: random_canvas(n, seed=slot, vocab_size=VOCAB[family]) for slot, n in enumerate(lengths)}
    backbone.allocate(len(lengths), 704)

    def seen(slots):
        sigmas = dict.fromkeys(slots, 0.5) if family in ("mdlm", "sedd") else None
        return look(backbone, {slot: canvases[slot] for slot in slots}, sigmas=sigmas)

    together = seen(range(len(lengths)))
    for slots in ([0], [1], [2, 0], [3]):
        apart = seen(slots)
        for slot in slots:
            assert torch.equal(apart[slot], together[slot]), f"{lengths[slot]} tokens"


@pytest.mark.slow
def test_any_subset_samples_have_the_same_bits_beside_any_longer_one(tmp_path):
    save_random_xlnet(tmp_path)
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, device="cpu")
    rng = np.random.default_rng(0)
    requests = []
    for index, length in enumerate((16, 90, 130, 185, 250, 400, 700)):
        canvas = rng.integers(7, 61, length).astype(np.int32)
        canvas[rng.choice(length, 5, replace=False)] = HOLE
        requests.append(Request(index, 1000 + index, canvas))
    plain, drafted = AnySubsetSettings(kind="any_subset"), AssdSettings(kind="assd", k=3)
    expected = decode(backbone, info, plain, Sampling(), requests, rows=16)
    for settings, rows in ((plain, 1), (plain, 3), (drafted, 1), (drafted, 16)):
        # A fresh cache, so that a sample alone has a narrow one.
        fresh = load_backbone(tmp_path, device="cpu")
        found = decode(fresh, info, settings, Sampling(), requests, rows=rows)
        assert texts(found) == texts(expected)
        assert all(found[i].logprob == expected[i].logprob for i in expected), settings.kind


def with_condition(width):
    """For `copy_changed`: random weights for a condition of this width."""

    def changed(tensors):
        generator, found = torch.Generator().manual_seed(width), {}
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            if "sigma_map" in name:
                shape = [width if number == 32 else number for number in shape]
            elif "adaLN_modulation.weight" in name:
                shape[1] = width
            same = shape == list(tensor.shape)
            found[name] = tensor if same else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return found

    return changed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [1, 8, 12, 24, 31, 40, 72, 128, 200])
def test_a_condition_of_any_width_has_the_same_bits_beside_any_other_noise(golden, tmp_path, width):
    changed = {"time_conditioning": True, "cond_dim": width}
    folder = copy_changed(golden / "mdlm", tmp_path, config=changed, weights=with_condition(width))
    backbone = load_masked(folder)
    assert backbone.rules.exact
    canvases = {slot: random_canvas(9 + slot % 5, seed=slot) for slot in range(40)}
    sigmas = {slot: 0.01 + 0.13 * slot for slot in canvases}
    backbone.allocate(len(canvases), 32)
    together = look(backbone, canvases, sigmas=sigmas)
    for slots in ([0], [1, 2], [3, 4, 5], [6, 9, 11, 39, 17], range(8, 31)):
        apart = look(backbone, {slot: canvases[slot] for slot in slots}, sigmas=sigmas)
        for slot in slots:
            assert torch.equal(apart[slot], together[slot]), f"{len(slots)} canvases"
