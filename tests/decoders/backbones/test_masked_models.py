"""The masked-diffusion families: checkpoints, refusals by name, the public code's golden outputs, rows in other company."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.families.table import FAMILIES as OFFERED
from draftmill.decoders.backbones.families.table import describe, find_family, masked_diffusion_families
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.draws.schedule import log_scale, noise_of_share, noise_rate, total_noise
from draftmill.decoders.settings import check_model
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.backbones.masked_models import (
    FAMILIES,
    PUBLIC,
    VOCAB,
    copy_changed,
    load,
    look,
    look_alone,
    random_canvas,
)
from tests.decoders.references.absorbing import masked_share, subs_log_law
from tests.decoders.references.rows import intervals_of
from tests.decoders.support import decoder_settings

SIGMAS = {
    "mdlm": None,
    "llada": None,
    "llada_moe": None,
    "dream": None,
    "sedd": {0: 6.9, 1: 0.3, 2: 1.7, 3: 0.3, 5: 0.02},
}


def cases_of(folder):
    return json.loads((folder / "cases.json").read_text())


def in_slots(arrays_BL):
    """Rows of several [B, L] arrays as the canvases of one ragged batch."""
    rows = [row.tolist() for array in arrays_BL for row in array]
    return dict(enumerate(rows))


@pytest.mark.parametrize(
    ("family", "field"), [("llada", "logits"), ("llada_moe", "logits"), ("dream", "logits_unshifted")]
)
def test_logits_are_those_of_the_public_llada_and_dream(golden, family, field):
    backbone, arrays = load(golden / family), load_file(golden / family / "arrays.safetensors")
    cases = [case for case in cases_of(golden / family)["logits"] if "attention_mask" not in case]
    canvases = in_slots(arrays[case["input_ids"]["array"]] for case in cases)
    backbone.allocate(len(canvases), 64)
    hidden = look(backbone, canvases)
    expected = [row for case in cases for row in arrays[case[field]["array"]]]
    assert len(expected) >= 5
    for slot, logits in enumerate(expected):
        torch.testing.assert_close(backbone.logits(hidden[slot]), logits, atol=1e-4, rtol=1e-5)


def test_padding_of_dream_is_no_row_and_its_position_is_no_position(golden):
    """Differs on purpose: the public code puts left padding into the batch and counts positions from it, which only rotates all
    rows alike; what it computes at the padding itself has no counterpart here."""
    backbone, arrays = load(golden / "dream"), load_file(golden / "dream" / "arrays.safetensors")
    mask, tokens = arrays["pad.attention_mask"].bool(), arrays["pad.input_ids"]
    canvases = {row: tokens[row, mask[row]].tolist() for row in range(len(tokens))}
    assert len({len(canvas) for canvas in canvases.values()}) == 2
    backbone.allocate(2, 16)
    hidden = look(backbone, canvases)
    for row in canvases:
        expected = arrays["pad.logits"][row, mask[row]]
        torch.testing.assert_close(backbone.logits(hidden[row]), expected, atol=1e-4, rtol=1e-5)


def test_llada_rows_outside_of_a_forward_are_read_as_they_were_when_written(golden):
    backbone, arrays = load(golden / "llada"), load_file(golden / "llada" / "arrays.safetensors")
    (case,) = cases_of(golden / "llada")["cache_forward"]
    (start, end), canvas = case["block"], case["canvas_later"]
    backbone.allocate(2, 32)
    look(backbone, {0: case["canvas_at_cache_init"], 1: case["canvas_at_cache_init"]})
    key, value = backbone.cache.layers_2SKWd[0][:, 0, :, : len(canvas)]
    torch.testing.assert_close(value, arrays["cache.v0"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(key[:, 0], arrays["cache.k0"][0, :, 0], atol=1e-5, rtol=1e-5)  # rotated by nothing
    # Slot 0 has the dual cache (all outside of the block is stale), slot 1 the prefix cache (only what is before it).
    hidden = look(backbone, {0: canvas, 1: canvas}, run={0: range(start, end), 1: range(start, len(canvas))})
    for slot, name in enumerate(("cache.dual_logits", "cache.prefix_logits")):
        torch.testing.assert_close(backbone.logits(hidden[slot]), arrays[name][0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("conditioned", [False, True])
def test_logits_are_those_of_the_public_mdlm(golden, tmp_path, conditioned):
    folder = copy_changed(golden / "mdlm", tmp_path, config={"time_conditioning": conditioned})
    backbone, arrays = load(folder), load_file(golden / "mdlm" / "laws.safetensors")
    cases, mode = cases_of(golden / "mdlm")["log_probs"], "time_cond" if conditioned else "no_time_cond"
    canvases = in_slots(arrays[case["x"]["array"]] for case in cases)
    sigmas = dict(enumerate(sigma.item() for case in cases for sigma in arrays[case["sigma"]["array"]]))
    assert len(set(sigmas.values())) >= 4
    backbone.allocate(len(canvases), 32)
    hidden = look(backbone, canvases, sigmas=sigmas)
    expected = [row for case in cases for row in arrays[case[mode]["backbone_logits"]["array"]]]
    for slot, logits in enumerate(expected):
        torch.testing.assert_close(backbone.logits(hidden[slot]), logits, atol=1e-4, rtol=1e-5)


def test_mdlm_laws_are_those_of_subs_where_the_public_code_has_numbers(golden):
    """Differs on purpose: the public code takes 1e6 from the mask's logit and writes -1e6 where no token can be, we -inf."""
    arrays = load_file(golden / "mdlm" / "laws.safetensors")
    for case in cases_of(golden / "mdlm")["log_probs"]:
        for mode in ("no_time_cond", "time_cond"):
            logits = arrays[case[mode]["backbone_logits"]["array"]].flatten(0, 1)
            expected = arrays[case[mode]["subs_log_probs"]["array"]].flatten(0, 1)
            ours = subs_log_law(logits, arrays[case["x"]["array"]].flatten(), 64)
            possible = expected > -1e5
            torch.testing.assert_close(ours[possible], expected[possible], atol=1e-5, rtol=1e-5)
            assert bool((ours[~possible] == -torch.inf).all())
            torch.testing.assert_close(ours.exp().sum(1), torch.ones(len(ours)))


def test_scores_are_those_of_the_public_sedd(golden):
    backbone, arrays = load(golden / "sedd"), load_file(golden / "sedd" / "laws.safetensors")
    cases = cases_of(golden / "sedd")["score"]
    canvases = in_slots(arrays[case["x"]["array"]] for case in cases)
    sigmas = dict(enumerate(sigma.item() for case in cases for sigma in arrays[case["sigma"]["array"]]))
    backbone.allocate(len(canvases), 32)
    hidden = look(backbone, canvases, sigmas=sigmas)
    expected = [row for case in cases for row in arrays[case["log_score"]["array"]]]
    for slot, scores in enumerate(expected):
        logits_RV, tokens_R = backbone.logits(hidden[slot]), torch.tensor(canvases[slot])
        ours = (logits_RV - log_scale(sigmas[slot], logits_RV.shape[1])).scatter(1, tokens_R.unsqueeze(1), 0.0)
        torch.testing.assert_close(ours, scores, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["mdlm", "sedd"])
def test_the_noise_of_a_time_is_that_of_the_public_schedules(golden, family):
    noise = cases_of(golden / family)["noise"]
    assert [total_noise(time) for time in noise["t"]] == pytest.approx(noise["total_noise"], abs=1e-7, rel=1e-4)
    assert [noise_rate(time) for time in noise["t"]] == pytest.approx(noise["rate_noise"], abs=0.0, rel=1e-3)
    for share in (0.0, 0.25, 0.999):
        assert masked_share(torch.tensor(noise_of_share(share))).item() == pytest.approx(share, abs=1e-6)
    assert masked_share(torch.tensor(total_noise(0.5))).item() == pytest.approx(0.4995)
    assert noise_of_share(1.0) == pytest.approx(6.9078, abs=1e-3), "a canvas of masks alone is not beyond time 1"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_of_a_block_reads_what_the_cache_holds_of_the_rest(golden, family):
    """Against one forward over both states of the canvas: the old one sees itself, the new block sees the old rest and itself."""
    backbone, length, block = load(golden / family, "float64"), 14, range(5, 9)
    old = random_canvas(length, seed=3, vocab_size=VOCAB[family])
    new = [3 if position in block else token for position, token in enumerate(old)]
    noise = None if SIGMAS[family] is None else {1: 2.0}
    backbone.allocate(2, 64)
    first = look(backbone, {1: old}, sigmas=noise)[1]
    before = backbone.cache.layers_2SKWd[1][:, 1].clone()
    later = look(backbone, {1: new}, run={1: block}, sigmas=noise and {1: 0.4})[1]
    after = backbone.cache.layers_2SKWd[1][:, 1]
    changed = (before != after).any(3).any(1).any(0).nonzero().flatten().tolist()
    assert changed == list(block), "a forward writes its own columns and no others"

    seen = torch.zeros(length + 4, length + 4, dtype=torch.bool)
    seen[:length, :length] = True
    seen[length:, :] = True
    seen[length:, list(block)] = False
    rows = torch.arange(length + 4)
    positions = torch.cat([torch.arange(length), torch.tensor(list(block))])
    tokens = torch.tensor(old + [3] * 4)
    backbone.forget()
    backbone.allocate(1, 64)
    # One slot twice: the rows of each half have a noise of their own.
    counts, sigma_G = [length, 4], torch.tensor([2.0, 0.4])
    both = backbone.forward(token_rows([0, 0], counts, tokens, positions, rows, intervals_of(seen), sigma_G=sigma_G))
    # transformers' norms pass through float32.
    torch.testing.assert_close(first, both[:length], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(later, both[length:], atol=1e-6, rtol=1e-6)


def test_sigma_is_each_rows_own_and_counts_where_the_network_was_trained_with_it(golden):
    sedd, mdlm = load(golden / "sedd"), load(golden / "mdlm")
    canvas = random_canvas(9, seed=1)
    low, high = (look_alone(sedd, canvas, sigma=sigma) for sigma in (0.1, 3.0))
    assert (low - high).abs().max() > 0.1
    sedd.allocate(2, 16)
    together = look(sedd, {0: canvas, 1: canvas}, sigmas={0: 3.0, 1: 0.1})
    assert torch.equal(together[0], high)
    assert torch.equal(together[1], low)
    assert torch.equal(look_alone(mdlm, canvas, sigma=3.0), look_alone(mdlm, canvas))
    assert (sedd.takes_sigma, mdlm.takes_sigma) == (True, False)
    with pytest.raises(AssertionError, match="its rows need sigma_G"):
        look_alone(sedd, canvas)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(golden, family, dtype):
    exact, half = load(golden / family), load(golden / family, dtype)
    canvas = random_canvas(17, seed=2, vocab_size=VOCAB[family])
    sigma = None if SIGMAS[family] is None else 1.0
    expected, ours = (look_alone(backbone, canvas, sigma=sigma) for backbone in (exact, half))
    assert ours.dtype == half.dtype == half.embed(torch.tensor([1])).dtype
    assert half.logits(ours).dtype == torch.float32
    assert (ours.float() - expected).norm() < 0.1 * expected.norm()
    if hasattr(half, "takes_sigma"):
        assert half.base.output_layer.norm_final.weight.dtype == torch.float32


SMALL = {"hidden_size": 768, "cond_dim": 128, "n_blocks": 12, "n_heads": 12, "length": 1024, "scale_by_sigma": True}
TOKENS = {"<|endoftext|>": 88, "<|eot_id|>": 89, "<|im_end|>": 92, "<|mask|>": 91}


@pytest.mark.parametrize(
    ("config", "family", "millions", "mask", "length", "shift"),
    [
        (PUBLIC["LLADA_8B"], "llada", 8015.581, 126336, 4096, 0),
        (PUBLIC["LLADA_MOE_7B"], "llada_moe", 7356.881, 156895, 8192, 0),
        # The config's own length is that of the model which Dream was made from.
        (PUBLIC["DREAM_7B"], "dream", 7615.617, 151666, 2048, 1),
        (PUBLIC["MDLM_OWT"], "mdlm", 169.627, 50257, 1024, 0),
        ({"parameterization": "subs", "backbone": "dit", "model": SMALL}, "mdlm", 169.627, 50257, 1024, 0),
        (PUBLIC["SEDD_SMALL"], "sedd", 169.627, 50257, 1024, 0),
    ],
)
def test_public_configs_are_recognised_and_give_the_published_sizes(config, family, millions, mask, length, shift):
    found = find_family(config, "auto")
    info = describe(found, config, mask_id=None)
    assert (found.name, info.mask_id, info.max_length, info.shift) == (family, mask, length, shift)
    assert info.num_parameters / 1e6 == pytest.approx(millions, abs=1e-3)
    assert mask in info.suppressed
    if family in {"llada", "llada_moe", "dream"}:
        without = {key: value for key, value in config.items() if key != "mask_token_id"}
        assert describe(found, without, mask_id=None).mask_id == mask
        assert describe(found, config, mask_id=5).mask_id == 5
    else:
        with pytest.raises(ValueError, match=f"model.mask_id: 5 given, but .* {family!r} it is the last id, {mask}"):
            describe(found, config, mask_id=5)


def test_causal_rows_predict_the_next_position_too(tmp_path):
    save_random(tmp_path)
    assert inspect_model(tmp_path).shift == 1


def test_mdlm_is_read_as_the_hub_and_as_its_own_training_name_it(golden, tmp_path):
    nested = {
        "parameterization": "subs",
        "backbone": "dit",
        "diffusion": "absorbing_state",
        "vocab_size": 65,
        "model": {"hidden_size": 48, "cond_dim": 32, "n_blocks": 2, "n_heads": 4, "length": 16},
        **dict.fromkeys(("model_type", "hidden_dim", "cond_dim", "n_blocks", "n_heads", "model_length")),
    }

    def bare(tensors):
        return {name.removeprefix("backbone."): t for name, t in tensors.items() if not name.endswith("inv_freq")}

    folder = copy_changed(golden / "mdlm", tmp_path, config=nested, weights=bare)
    assert inspect_model(folder) == inspect_model(golden / "mdlm")
    canvas = random_canvas(11, seed=0)
    # Not to the bit: where a tensor lies in its file decides how it is aligned in memory.
    ours, hubs = look_alone(load(folder), canvas), look_alone(load(golden / "mdlm"), canvas)
    torch.testing.assert_close(ours, hubs, atol=1e-4, rtol=1e-4)


def write_tokenizer(folder, form):
    vocab = {f"t{index}": index for index in range(88)}
    added = [{"id": index, "content": token} for token, index in TOKENS.items()]
    if form == "fast":
        tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 92}))
        rest = {str(token["id"]): {"content": token["content"]} for token in added if token["id"] != 92}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rest}))


@pytest.mark.parametrize("form", ["fast", "slow"])
@pytest.mark.parametrize(("family", "mask", "turn_end"), [("llada", 90, 89), ("dream", 91, 92)])
def test_ids_without_a_token_are_suppressed_a_turn_ends_a_text(golden, tmp_path, form, family, mask, turn_end):
    folder = copy_changed(golden / family, tmp_path)
    assert inspect_model(folder).suppressed == (mask,)
    assert stop_ids(folder) == (88,)
    write_tokenizer(folder, form)
    assert inspect_model(folder).suppressed == tuple(sorted({mask, 90, 93, 94, 95}))
    assert stop_ids(folder) == (88, turn_end)


def test_a_decoder_that_a_family_does_not_run_is_refused_by_name(golden):
    assert set(FAMILIES) == set(masked_diffusion_families()) < set(OFFERED)
    for family in ("llada", "dream"):
        with pytest.raises(
            ValueError, match=f"'parallel' does not run on models of family '{family}'; allowed: stepwise,"
        ):
            check_model(decoder_settings("parallel"), inspect_model(golden / family))
    with pytest.raises(ValueError, match="'parallel' does not run on models of family 'mdlm'; allowed: ancestral"):
        check_model(decoder_settings("parallel"), inspect_model(golden / "mdlm"))
    with pytest.raises(
        ValueError,
        match=r"known families: d2f_dream, .*llada, .*qwen3, .*sedd, xlnet, and the causal models of transformers",
    ):
        find_family({"model_type": "clip"}, "auto")
