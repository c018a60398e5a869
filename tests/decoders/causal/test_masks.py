"""`speculative` whose drafts come from the model's own masks (I-DLM): the sequential text, its law, and the public schedule."""

import copy
import json
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import one_hot

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.adapter import adapt_masks
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.rows import causal_rows, seen_columns
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from draftmill.decoders.settings import check_model
from tests.decoders.backbones.causal_models import plain_layer, save_random
from tests.decoders.enumeration import fills, law_of, left_over, total_variation
from tests.decoders.references.causal import PlainCausal
from tests.decoders.references.choosers import enumerate_law
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode, decoder_settings, ragged_prompts, random_lengths, run_all, texts, token_info

AR = decoder_settings("autoregressive")
MASK = 60
GREEDY = Sampling(temperature=0.0)


def spec(k, **drafter):
    return decoder_settings("speculative", k=k, drafter={"kind": "masks"} | drafter)


@pytest.fixture(scope="module")
def idlm(tmp_path_factory):
    """Random weights in the layout of I-DLM's checkpoints; transformers' own Qwen3 with them."""
    folder = tmp_path_factory.mktemp("idlm")
    model = save_random(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    more = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 3, "mask_token_id": MASK}
    (folder / "config.json").write_text(json.dumps(config | more))
    info = inspect_model(folder, family="idlm")
    return SimpleNamespace(folder=folder, model=model, info=info, load=cache(lambda: loaded(folder)))


def loaded(folder):
    return load_backbone(folder, family="idlm", device="cpu")


def test_the_family_is_named_by_the_user_and_causal(idlm):
    assert (idlm.info.kind, idlm.info.mask_id, idlm.info.shift) == ("causal", MASK, 1)
    assert idlm.info.suppressed == (MASK,)
    sdar = inspect_model(idlm.folder)
    assert (sdar.family, sdar.kind, sdar.block_size) == ("sdar", "blocks", 3)
    with pytest.raises(ValueError, match=r"does not run on models of family 'sdar'; .*model\.family: idlm"):
        check_model(spec(3), sdar)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_text_is_the_autoregressive_one_in_any_batch(idlm, temperature, monkeypatch):
    requests, sampling = ragged_prompts(12, vocab_size=MASK, longest=48), Sampling(temperature=temperature)
    expected = decode(idlm.load(), idlm.info, AR, sampling, requests)
    for k, rows in ((1, 1), (3, 1), (3, 5), (8, 16)):
        found = decode(idlm.load(), idlm.info, spec(k), sampling, requests, rows=rows)
        assert texts(found) == texts(expected)
        assert [one.logprob for one in found.values()] == [expected[index].logprob for index in found]
        assert all(one.nfe <= expected[index].nfe and one.nfe_draft == 0 for index, one in found.items())
    monkeypatch.setattr(AutoLength, "__call__", random_lengths)
    assert texts(decode(idlm.load(), idlm.info, spec("auto"), sampling, requests, rows=5)) == texts(expected)


@torch.no_grad()
def public(model, prompt, length, masks):
    """IDLMBlockN at temperature 0, without a cache: the text, and its forwards after the one that runs the prompt. `prompt` ends
    with the token that its first cold start runs."""
    text, drafts, forwards = list(prompt), list[int](), 0
    while len(text) < length:
        logits_LV = model(torch.tensor([[*text, *drafts, *[MASK] * masks]])).logits[0]
        logits_LV[:, MASK] = -torch.inf
        says, forwards = logits_LV.argmax(-1).tolist()[len(text) - 1 :], forwards + 1
        judged = len(drafts) + 1
        held = next((place for place, draft in enumerate(drafts) if draft != says[place]), len(drafts))
        text += says[: held + 1]
        drafts = says[judged:] if held == len(drafts) else []
    return text[:length], forwards


@pytest.mark.parametrize("masks", [1, 2, 4])
def test_at_temperature_0_it_is_the_public_code(idlm, masks):
    """Tokens and forwards are equal, from a cold start of the same token on: the public code runs the prompt before its first
    one, ours in it. With guesses after refusals, which coupled acceptance adds, there are fewer forwards."""
    requests, spent = ragged_prompts(10, vocab_size=MASK, longest=48, seed=3), np.zeros(2, dtype=int)
    exact = decode(idlm.load(), idlm.info, spec(masks), Sampling(temperature=0.0, acceptance="rejection"), requests)
    guessing = decode(idlm.load(), idlm.info, spec(masks), GREEDY, requests)
    for request in requests:
        prompt, index = request.canvas[request.canvas >= 0].tolist(), request.index
        text, forwards = public(idlm.model, prompt, len(request.canvas), masks)
        for found in (exact, guessing):
            assert [*prompt, *found[index].tokens.tolist()] == text
        assert exact[index].nfe == forwards
        spent += guessing[index].nfe, forwards
    assert spent[0] < spent[1] < sum(len(one.tokens) for one in exact.values())


VOCAB, LENGTH = 3, 5
INFO = ModelInfo("table", VOCAB + 1, VOCAB, None, "causal", 0, (VOCAB,))
CUTS = [Sampling(), Sampling(temperature=0.7), Sampling(top_k=2), Sampling(top_p=0.7)]


def table(seed=5):
    return TokenTable(vocab_size=VOCAB + 1, num_positions=LENGTH, seed=seed)


def plain(sampling=Sampling()):  # noqa: B008
    return PlainCausal(table(), length=LENGTH + 2, sampling=sampling, suppressed=[VOCAB])


def setup(sampling, acceptance, *, rows=1, stops=None):
    warp = sampling.model_copy(update={"acceptance": acceptance})
    return Setup(backbone=table(), info=INFO, sampling=warp, max_rows=rows, max_tokens=99, stops=stops)


def request(prompt, index=0, length=LENGTH):
    canvas = np.array([*prompt, *[-1] * (length - len(prompt))], dtype=np.int32)
    return Request(index, sample_key(0, str(index)), canvas)


def chain_rule(prompt, sampling=Sampling()):  # noqa: B008
    model = plain(sampling)
    return {fill: math.exp(model.logprob(prompt, fill)) for fill in fills(VOCAB, LENGTH - len(prompt))}


def public_law(prompt, masks, sampling, *, draws):
    """The law of IDLMBlockN's texts: clean tokens come from the cut distribution; a draft is the maximum of its mask's row, with
    `draws` one drawn from it, and is judged and replaced by whole distributions, as if it had been drawn."""
    cut, whole = (cache(plain(one).law) for one in (sampling, Sampling(temperature=sampling.temperature)))
    prompt = tuple(prompt)

    def run(chooser):
        text, drafts = (*prompt, chooser.choose(cut(prompt), keys.TARGET, 0, 0)), list[Any]()
        while len(text) < LENGTH:
            for draft, q_V in drafts:
                p_V = whole(text)
                if not chooser.accept(float((p_V[draft] - q_V[draft]).exp()), 0, 0):
                    text, drafts = (*text, chooser.choose(left_over(p_V, q_V).log(), keys.RESIDUAL, 0, 0)), []
                    break
                text = (*text, draft)
            else:
                rows = range(1, min(masks, LENGTH - len(text)) + 1)
                laws = [whole((*text, *[VOCAB] * row)) for row in rows]
                text = (*text, chooser.choose(cut(text), keys.BONUS, 0, 0))
                drafts = [(chooser.choose(q_V, keys.DRAFT, 0, 0) if draws else int(q_V.argmax()), q_V) for q_V in laws]
        return tuple(text[len(prompt) : LENGTH])

    return enumerate_law(run)


@pytest.mark.parametrize(
    ("cuts", "draws", "distance"),
    [({}, False, 0.173), ({}, True, 0.0), ({"top_p": 0.9}, False, 0.160), ({"top_p": 0.9}, True, 0.059)],
    ids=str,
)
def test_the_public_sampler_has_another_law_above_temperature_0(cuts, draws, distance):
    """It judges by q a draft that was not drawn from q, and both by distributions without the cuts of its clean tokens."""
    law, expected = public_law([1], 2, Sampling(**cuts), draws=draws), chain_rule([1], Sampling(**cuts))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, expected) == pytest.approx(distance, abs=5e-4)
    ours = law_of(setup(Sampling(**cuts), "coupled"), spec(2), [request([1])], 0)
    assert total_variation(ours, expected) < 1e-12


class Counting(TokenTable):
    """A toy that counts: a row that is d places behind the last token it sees, masks apart, expects that token + d + 1."""

    def forward(self, rows):
        noise_NV = super().forward(rows)
        tokens_NW, positions_NW = self.tokens_SW[rows.slot_N], self.positions_SW[rows.slot_N]
        seen_NW = seen_columns(rows.low_IN, rows.high_IN, tokens_NW.shape[1])
        last_N, column_N = torch.where(seen_NW & (tokens_NW != VOCAB), positions_NW, -1).max(1)
        said_N = tokens_NW.gather(1, column_N.unsqueeze(1)).squeeze(1) + rows.position_N - last_N + 1
        return noise_NV + 4.0 * one_hot(said_N % VOCAB, VOCAB + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_hold_where_masks_foretell(acceptance, temperature):
    requests = [request([index % VOCAB], index, 8) for index in range(60)]
    model = Counting(vocab_size=VOCAB + 1, num_positions=8, spread=0.5)
    sampling = Sampling(temperature=temperature, acceptance=acceptance)
    found = decode(model, INFO, spec(3), sampling, requests, rows=4)
    proposed, accepted = (sum(getattr(one, name) for one in found.values()) for name in ("proposed", "accepted"))
    nfe, tokens = (sum(count) for count in zip(*((one.nfe, len(one.tokens)) for one in found.values()), strict=True))
    assert tokens == 420 and nfe == tokens - accepted < 0.5 * tokens and accepted > 0.7 * proposed


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_prompts_that_are_shared_or_cut_change_no_result(idlm, acceptance):
    prompt = np.random.default_rng(5).integers(0, MASK, 24)
    requests = [Request(index, index, np.append(prompt, [-1] * 14).astype(np.int32)) for index in range(6)]
    made = Setup(
        backbone=idlm.load(),
        info=idlm.info,
        sampling=Sampling(acceptance=acceptance),
        max_rows=8,
        max_tokens=1 << 20,
        trace=True,
    )
    alone = {one.index: run_all(build_decoder(made, spec(3)), [one])[one.index] for one in requests}
    together = build_decoder(replace(made, prompt_rows=7), spec(3))
    for index, found in run_all(together, requests).items():
        expected = alone[index]
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert (found.logprob, found.nfe, found.trace) == (expected.logprob, expected.nfe, expected.trace)
    assert together.stats.prompt_rows_shared > 0


def save_adapter(folder, model, *, seed=0, **changes):
    """Random LoRA weights for all products of a model but the last layer's `o_proj`; returns what they add to each."""
    generator, held, parts = torch.Generator().manual_seed(seed), dict[str, Any](), {}
    for name, product in model.named_modules():
        if isinstance(product, torch.nn.Linear) and name != "lm_head" and not name.endswith("2.self_attn.o_proj"):
            sizes = (4, product.in_features), (product.out_features, 4)
            down, up = (torch.randn(size, generator=generator) * 0.3 for size in sizes)
            held |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
            parts[name] = 2.0 * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held | changes.pop("tensors", {}), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return parts


def test_an_adapter_of_masks_changes_drafts_and_no_bit_of_the_text(idlm, tmp_path):
    """Its drafts are those of a plain forward whose mask rows have other weights than the rest."""
    parts = save_adapter(tmp_path / "adapter", idlm.model)
    adapted = adapt_masks(loaded(idlm.folder), tmp_path / "adapter", MASK)
    requests, settings = ragged_prompts(8, vocab_size=MASK, longest=48, seed=6), spec(3, path=str(tmp_path / "adapter"))
    for sampling in (GREEDY, Sampling(temperature=0.8)):
        expected = decode(idlm.load(), idlm.info, AR, sampling, requests)
        found = decode(adapted, idlm.info, settings, sampling, requests, rows=4)
        assert texts(found) == texts(expected)
        assert [one.logprob for one in found.values()] == [expected[index].logprob for index in found]
    plain_schedule = Sampling(temperature=0.0, acceptance="rejection")
    traced = decode(adapted, idlm.info, settings, plain_schedule, requests, trace=True)
    bare = decode(idlm.load(), idlm.info, spec(3), plain_schedule, requests, trace=True)
    given = SimpleNamespace(tokens=torch.zeros(0))

    def change(name):
        def hook(product, arguments, out):
            return out + (given.tokens == MASK)[..., None] * torch.nn.functional.linear(arguments[0], parts[name])

        return hook

    model = copy.deepcopy(idlm.model)
    for name, product in model.named_modules():
        if name in parts:
            product.register_forward_hook(change(name))
    checked = 0
    for request in requests:
        prompt, steps = request.canvas[request.canvas >= 0].tolist(), traced[request.index].trace
        whole = [*prompt, *traced[request.index].tokens.tolist()]
        for step in steps:
            if step.proposed:
                # The masks that drafted stood behind the text without its last token.
                given.tokens = torch.tensor([[*whole[: step.positions[0] - 1], *[MASK] * len(step.proposed)]])
                with torch.no_grad():
                    logits_LV = model(given.tokens).logits[0, -len(step.proposed) :]
                logits_LV[:, MASK] = -torch.inf
                assert step.proposed == logits_LV.argmax(-1).tolist()
                checked += 1
    assert checked > 20
    assert [one.trace for one in traced.values()] != [bare[index].trace for index in traced]


def test_an_adapter_fits_a_network_with_turned_states(idlm, tmp_path):
    save_adapter(tmp_path / "adapter", save_random(tmp_path, "qwen3", head_dim=16))
    plain, turned = (load_backbone(tmp_path, dtype="float64", device="cpu") for _ in range(2))
    assert isinstance(turned, RotaryBackbone)
    turned.base.turn(plain_layer)
    assert turned.base.is_turned
    found = []
    for backbone in (plain, turned):
        adapt_masks(backbone, tmp_path / "adapter", MASK)
        backbone.allocate(1, 8)
        found.append(backbone.forward(causal_rows([0], [5], [0], torch.tensor([3, 9, MASK, 4, MASK]))))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_prompt_with_the_mask_is_refused_beside_an_adapter(idlm, tmp_path):
    save_adapter(tmp_path / "adapter", idlm.model)
    adapted = adapt_masks(loaded(idlm.folder), tmp_path / "adapter", MASK)
    made = Request(0, 1, np.array([3, MASK, 4, -1, -1], dtype=np.int32))
    with pytest.raises(ValueError, match=f"the prompt has the model's mask, id {MASK}"):
        decode(adapted, idlm.info, spec(2, path="adapter"), GREEDY, [made])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; supported: 'LORA'"),
        ({"use_dora": True}, "use_dora = true; supported: false"),
        ({"alpha_pattern": {"q_proj": 4}}, 'alpha_pattern = {"q_proj": 4}; supported: none'),
        ({"r": 8}, r"has shape \(4, \d+\); its r and the model's sizes say \(8, \d+\)"),
        (
            {"tensors": {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}},
            "lm_head.* is no part of a product",
        ),
    ],
    ids=["IA3", "DoRA", "pattern", "rank", "output layer"],
)
def test_adapters_that_are_no_plain_lora_of_the_layers_are_refused(idlm, tmp_path, changes, message):
    save_adapter(tmp_path / "adapter", idlm.model, **changes)
    with pytest.raises(ValueError, match=rf"decoder\.drafter\.path: .*{message}"):
        adapt_masks(loaded(idlm.folder), tmp_path / "adapter", MASK)


@pytest.mark.parametrize(
    ("factor", "message"), [(None, "has no tensors"), (0.0, "changes nothing"), (torch.nan, "nan or inf")]
)
def test_an_adapter_that_changes_nothing_is_refused(idlm, tmp_path, factor, message):
    save_adapter(tmp_path, idlm.model)
    path = tmp_path / "adapter_model.safetensors"
    changed = {
        name: part * (factor if "lora_B" in name else 1.0)
        for name, part in load_file(path).items()
        if factor is not None
    }
    save_file(changed, path)
    with pytest.raises(ValueError, match=rf"decoder\.drafter\.path: {tmp_path}.*{message}"):
        adapt_masks(loaded(idlm.folder), tmp_path, MASK)


def test_a_model_without_a_mask_is_refused():
    with pytest.raises(
        ValueError, match=r"decoder\.drafter\.kind: 'masks', but models of family 'token_table' have no mask"
    ):
        decode(table(), token_info(VOCAB), spec(2), GREEDY, [request([1])])
