"""The backbones of the block-diffusion families against the public code's golden outputs, and against themselves in company."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from draftmill.decoders.backbones import moe
from draftmill.decoders.backbones.families.rotary import MixtureShape
from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.moe import Mixture
from draftmill.decoders.backbones.network import Norm
from draftmill.decoders.backbones.packed import PackedLinear, replace_products
from draftmill.decoders.backbones.self_test import check_masking
from tests.decoders.backbones.causal_models import ROTARY, in_a_row, play, random_tokens
from tests.decoders.backbones.masked_models import load

FAMILIES = ("sdar", "fast_dllm_v2", "llada2")
MASK = 95


def cases_of(folder, name, kind):
    return [case for case in json.loads((folder / f"{name}.json").read_text()) if case["kind"] == kind]


def in_blocks(tokens, block_size, first=0):
    """Rows that see all finished blocks and their own block, as far as it goes."""
    last = first + len(tokens)
    ends = [min((first + index) // block_size * block_size + block_size, last) for index in range(len(tokens))]
    return [(token, first + i, first + i, range(end)) for i, (token, end) in enumerate(zip(tokens, ends, strict=True))]


def exact_norm(norm, rows):
    return norm.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.eps))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_under_block_causal_masks_are_those_of_the_public_code(golden, family):
    backbone, arrays = load(golden / family), load_file(golden / family / "logits.safetensors")
    cases = cases_of(golden / family, "logits", "logits")
    assert len({case["block_size"] for case in cases}) >= 4
    backbone.allocate(len(cases), 64)
    hidden = play(backbone, {i: in_blocks(case["input_ids"], case["block_size"]) for i, case in enumerate(cases)})
    for slot, case in enumerate(cases):
        name = f"logits.{slot}.logits"
        expected = arrays[name if name in arrays else f"logits.{slot}"][0].float()
        # Of the public code's own float32 run the largest error of a family was 1.2e-4.
        close = max(1e-4, 2 * case["max_abs_f32_minus_f64"])
        torch.testing.assert_close(backbone.logits(hidden[slot]), expected, atol=close, rtol=0)


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
def test_in_float64_logits_are_the_public_code_s_to_the_last_digits(golden, monkeypatch, family):
    """SDAR's own norm keeps float64, ours computes in float32 as transformers'; without that nothing is left."""
    if family == "sdar":
        monkeypatch.setattr(Norm, "forward", exact_norm)
    backbone, arrays = load(golden / family, "float64"), load_file(golden / family / "logits.safetensors")
    backbone.allocate(1, 64)
    for index, case in enumerate(cases_of(golden / family, "logits", "logits")):
        hidden = play(backbone, {0: in_blocks(case["input_ids"], case["block_size"])})
        torch.testing.assert_close(backbone.logits(hidden[0]), arrays[f"logits.{index}.logits"][0], atol=1e-9, rtol=0)


def test_a_block_after_cached_blocks_is_read_both_ways_by_one_fast_dllm(golden):
    backbone = load(golden / "fast_dllm_v2", "float64")
    arrays = load_file(golden / "fast_dllm_v2" / "logits.safetensors")
    (case,) = cases_of(golden / "fast_dllm_v2", "logits", "cached_logits")
    before, block, size = case["prefill_ids"], case["block_ids"], case["block_size"]
    backbone.allocate(1, 64)
    prefix = play(backbone, {0: in_blocks(before, size)})[0]
    torch.testing.assert_close(backbone.logits(prefix), arrays["cached.prefill_logits"][0], atol=1e-9, rtol=0)
    # Both write the same columns: what the first one left there is no part of what the second one sees.
    drafted = play(backbone, {0: in_blocks(block, size, len(before))})[0]
    torch.testing.assert_close(backbone.logits(drafted), arrays["cached.logits"][0], atol=1e-9, rtol=0)
    verified = play(backbone, {0: in_a_row(block, len(before))})[0]
    torch.testing.assert_close(backbone.logits(verified), arrays["cached.verify_logits"][0], atol=1e-9, rtol=0)


def two_copies(block, first):
    """S2D2's verifier: the block, causal, then as many masks at the same positions, each of which sees what is before it."""
    size = len(block)
    drafted = in_a_row(block, first)
    copies = [(MASK, first + i, first + size + i, [*range(first + i), first + size + i]) for i in range(size)]
    return drafted + copies


def test_the_verifier_of_two_copies_gives_the_laws_of_the_public_s2d2(golden):
    folder = golden / "sdar"
    backbone, arrays = load(folder), load_file(folder / "verifier.safetensors")
    cases = cases_of(folder, "verifier", "verifier_2L")
    assert {case["cache_is_causal"] for case in cases} == {False, True}
    backbone.allocate(len(cases), 64)
    for slot, case in enumerate(cases):
        before, block = case["cache_ids"], case["block_ids"]
        prefix = in_a_row(before) if case["cache_is_causal"] else in_blocks(before, case["block_length"])
        if before:
            play(backbone, {slot: prefix})
        rows = two_copies(block, len(before))
        seen = [[column in list(see) for column in range(rows[-1][2] + 1)] for _, _, _, see in rows]
        assert torch.equal(torch.tensor(seen), arrays[case["name"] + ".mask"][0])
        assert [position for _, position, _, _ in rows] == arrays[case["name"] + ".position_ids"][0].tolist()
    hidden = play(backbone, {i: two_copies(case["block_ids"], len(case["cache_ids"])) for i, case in enumerate(cases)})
    for slot, case in enumerate(cases):
        expected = arrays[case["name"] + ".logits"][0].float()
        torch.testing.assert_close(backbone.logits(hidden[slot]), expected, atol=1e-4, rtol=0)


def test_llada2_routes_its_rows_as_the_public_code_does(golden):
    backbone, arrays = load(golden / "llada2"), load_file(golden / "llada2" / "logits.safetensors")
    mixtures = [part for part in backbone.model.modules() if isinstance(part, Mixture)]
    given = {}
    for layer, mixture in enumerate(mixtures):
        mixture.register_forward_pre_hook(lambda part, inputs, layer=layer: given.update({layer: inputs[0]}))
    backbone.allocate(1, 64)
    for index, case in enumerate(cases_of(golden / "llada2", "logits", "logits")):
        play(backbone, {0: in_blocks(case["input_ids"], case["block_size"])})
        for layer, mixture in enumerate(mixtures):
            rows, name = given[layer][: len(case["input_ids"])], f"logits.{index}.router{layer}."
            torch.testing.assert_close(mixture.gate(rows), arrays[name + "logits"], atol=1e-4, rtol=0)
            expert, weight = mixture.choose(rows)
            expert, order = expert.sort(dim=1)
            assert torch.equal(expert, arrays[name + "topk_idx"])
            torch.testing.assert_close(weight.gather(1, order), arrays[name + "topk_weight"], atol=1e-5, rtol=0)
    assert len(mixtures) == 2


def test_what_a_row_of_llada2_may_not_see_is_hidden_where_the_public_code_adds_ones(golden):
    """Differs on purpose: S2D2's code adds its mask of zeros and ones to the scores, which hides nothing; ours, as dLLM's log of
    that mask, hides what is not to be seen."""
    backbone, arrays = load(golden / "llada2"), load_file(golden / "llada2" / "logits.safetensors")
    (case,) = cases_of(golden / "llada2", "logits", "mask_surprise")
    backbone.allocate(1, 64)
    logits = backbone.logits(play(backbone, {0: in_blocks(case["input_ids"], case["block_size"])})[0])
    torch.testing.assert_close(logits, arrays["mask_surprise.block_causal_logits"][0], atol=1e-4, rtol=0)
    assert float((logits - arrays["mask_surprise.one_zero_mask_logits"][0]).abs().max()) > 10


# ---- SDAR's mixtures of experts against transformers' own ------------------------------------------------------------------

EXPERTS = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}


def save_moe(folder, **changes):
    """Save a random checkpoint in SDAR-MoE's layout; returns transformers' own model with these weights."""
    config = ROTARY | {"vocab_size": 96, "head_dim": 12} | EXPERTS | changes
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "sdar_moe", "mask_token_id": MASK}))
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": False, "mlp_only_layers": [1]}, {"decoder_sparse_step": 2, "num_experts_per_tok": 1}],
)
def test_sdar_moe_is_qwen3_moe_under_a_block_causal_mask(tmp_path, changes):
    model = save_moe(tmp_path, **changes)
    backbone = load(tmp_path)
    mixed = sum(isinstance(part, Mixture) for part in backbone.model.modules())
    assert mixed == {(): 3, ("norm_topk_prob", "mlp_only_layers"): 2}.get(tuple(changes), 1)
    backbone.allocate(3, 64)
    tokens = {slot: random_tokens(length, seed=slot, vocab_size=96) for slot, length in enumerate((13, 4, 22))}
    hidden = play(backbone, {slot: in_blocks(text, 4) for slot, text in tokens.items()})
    for slot, text in tokens.items():
        block = torch.arange(len(text)) // 4
        mask = (block[:, None] >= block)[None, None]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([text]), attention_mask=mask, use_cache=False).logits[0]
        torch.testing.assert_close(backbone.logits(hidden[slot]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [*FAMILIES, "sdar_moe"])
def test_a_sample_has_the_same_bits_alone_and_among_others(golden, tmp_path, family):
    """Blocks of any progress beside prefills and verifiers, so that experts get any number of rows."""
    if family == "sdar_moe":
        save_moe(tmp_path)
    backbone = load(tmp_path if family == "sdar_moe" else golden / family)
    assert backbone.rules.exact
    texts = {
        slot: random_tokens(length, seed=slot, vocab_size=96) for slot, length in enumerate((30, 7, 21, 1, 64, 12))
    }
    work = {slot: [in_blocks(text, 8), two_copies(text, 0), in_a_row(text)][slot % 3] for slot, text in texts.items()}
    backbone.allocate(len(work), 128)
    together = play(backbone, work)
    for slots in ([0], [1], [3], [2, 3], [5, 0, 1]):
        backbone.forget()
        backbone.allocate(len(work), 128)
        apart = play(backbone, {slot: work[slot] for slot in slots})
        for slot in slots:
            assert torch.equal(apart[slot], together[slot])
            assert torch.equal(backbone.logits(apart[slot]), backbone.logits(together[slot]))


def mixture_of(width=16, inner=24, **changes):
    torch.manual_seed(3)
    shape = MixtureShape(inner=inner, num_experts=8, num_chosen=3, groups=(4, 2), scale=2.5, shared=24)
    mixture = Mixture(width, replace(shape, **changes))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    return mixture.requires_grad_(False)


def choose_by_hand(scores, bias, groups, kept, chosen):
    """DeepSeek-V3's rule for one row, in plain numbers."""
    biased = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    best = [sum(sorted(biased[size * group : size * (group + 1)])[-2:]) for group in range(groups)]
    alive = sorted(range(groups), key=best.__getitem__)[-kept:]
    ranked = sorted((e for e in range(len(scores)) if e // size in alive), key=biased.__getitem__, reverse=True)[
        :chosen
    ]
    total = sum(scores[expert] for expert in ranked) if chosen > 1 else 1.0
    return ranked, [2.5 * scores[expert] / total for expert in ranked]


@pytest.mark.parametrize(("shift", "groups", "chosen"), [(0.0, (4, 2), 3), (-5.0, (4, 2), 3), (0.0, (2, 1), 1)])
def test_a_row_chooses_the_best_experts_of_its_best_groups_even_where_every_biased_score_is_negative(
    shift, groups, chosen
):
    mixture, rows = mixture_of(groups=groups, num_chosen=chosen), torch.randn(40, 16)
    mixture.expert_bias += shift
    expert, weight = mixture.choose(rows)
    for row, scores in enumerate(torch.sigmoid(rows @ mixture.gate.weight.T).tolist()):
        experts, weights = choose_by_hand(scores, mixture.expert_bias.tolist(), groups[0], groups[1], chosen)
        assert expert[row].tolist() == experts
        assert weight[row].tolist() == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("shared", [0, 24])
def test_a_mixture_is_the_weighted_sum_of_its_experts_and_the_shared_ones(shared):
    mixture, rows = mixture_of(shared=shared), torch.randn(40, 16)
    expert, weight = mixture.choose(rows)
    expected = [
        sum(w * mixture.experts[e](row) for e, w in zip(*each, strict=True))
        for each, row in zip(zip(expert.tolist(), weight, strict=True), rows, strict=True)
    ]
    sums = torch.stack(expected) + (mixture.shared_experts(rows) if shared else 0)
    torch.testing.assert_close(mixture(rows.unsqueeze(0)), sums.unsqueeze(0), atol=1e-4, rtol=1e-4)


def test_an_expert_answers_a_row_alike_whatever_number_of_rows_asks_it():
    """All rows ask all experts, so that an expert's rows are as many as the forward's."""
    mixture = mixture_of(64, 96, num_experts=32, num_chosen=32, groups=(1, 1), shared=0)
    replace_products(mixture, PackedLinear)
    mixture.padded = lambda count: -(-count // 8) * 8
    rows = torch.randn(300, 64)
    whole = mixture(rows)
    for count in (1, 2, 3, 8, 9, 31, 77, 255):
        assert torch.equal(mixture(rows[:count]), whole[:count])


def test_a_mixture_in_half_precision_routes_and_sums_in_float32():
    mixture = mixture_of(shared=0)
    rows = torch.randn(40, 16).bfloat16()
    exact = mixture(rows.float())
    for part in (*mixture.experts,):
        part.bfloat16()
    expert, weight = mixture.choose(rows)
    assert weight.dtype == mixture.gate.weight.dtype == torch.float32
    assert torch.equal(expert, mixture.choose(rows.float())[0])
    mixed = mixture(rows)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0.05)


# ---- the self-test where no rules make bits hold -----------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llada2", "sdar"])
def test_the_self_test_bears_rounding_of_experts_on_a_gpu_and_nothing_else(golden, family, monkeypatch):
    """A GPU's products round by their numbers of rows: in a mixture they follow the neighbours, in other layers they don't."""
    backbone = load(golden / family)
    padded = at_least_rows

    def rounding(min_rows, expert, rows):
        return padded(min_rows, expert, rows) * (1 + 1e-5 * len(rows))

    monkeypatch.setattr(moe, "at_least_rows", rounding)
    mixes = family == "llada2"
    if mixes:
        with pytest.raises(RuntimeError, match="masked columns or other slots change"):
            check_masking(backbone)
    backbone.rules = replace(backbone.rules, exact=False)
    check_masking(backbone)
    forward = backbone.forward

    def leaking(rows):
        # What stands in a dead column changes all rows a little, in equal shapes.
        return forward(rows) + 1e-6 * backbone.cache.layers_2SKWd[0][0, 0, 0, 9].sum()

    monkeypatch.setattr(backbone, "forward", leaking)
    with pytest.raises(RuntimeError, match="masked columns or other slots change"):
        check_masking(backbone)
    monkeypatch.setattr(backbone, "forward", forward)
    if not mixes:
        by_neighbour = lambda rows: forward(rows) * (1 + 1e-6 * int(rows.token_N[0]) * (len(rows.slots_G) > 1))  # noqa: E731
        monkeypatch.setattr(backbone, "forward", by_neighbour)
        with pytest.raises(RuntimeError, match="masked columns or other slots change"):
            check_masking(backbone)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_passes_on_a_real_gpu(golden, family):
    load_backbone(golden / family, dtype="bfloat16", device="cuda")
