"""Checkpoints of the block-diffusion families: names, configs, ids; what does not fit is refused by name."""

import json

import pytest

from draftmill.decoders.backbones.checkpoint import bos_id, inspect_model, stop_ids
from draftmill.decoders.backbones.families.table import describe, find_family, masked_diffusion_families
from draftmill.decoders.settings import check_model
from tests.decoders.backbones.masked_models import PUBLIC, copy_changed
from tests.decoders.support import decoder_settings

FAMILIES = ("sdar", "fast_dllm_v2", "llada2")


@pytest.mark.parametrize(
    ("config", "family", "millions", "mask", "block", "shift"),
    [
        (PUBLIC["SDAR_4B"], "sdar", 4411.424, 151669, 4, 0),
        (PUBLIC["SDAR_30B"], "sdar_moe", 30532.123, 151669, 4, 0),
        (PUBLIC["FAST_DLLM_7B"], "fast_dllm_v2", 7615.617, 151665, 32, 1),
        (PUBLIC["LLADA2_MINI"], "llada2", 16255.643, 156895, 32, 0),
    ],
)
def test_public_configs_are_recognised_and_give_the_published_sizes(config, family, millions, mask, block, shift):
    found = find_family(config, "auto")
    info = describe(found, config, mask_id=None)
    assert (found.name, info.mask_id, info.block_size, info.shift) == (family, mask, block, shift)
    assert info.num_parameters / 1e6 == pytest.approx(millions, abs=1e-3)
    assert info.max_length == 32768
    assert info.suppressed == (mask,)
    assert info.kind == "blocks"
    # config.json comes before the family's table.
    config = config | {"num_hidden_layers": 2}
    key = "bd_size" if family == "fast_dllm_v2" else "block_size"
    info = describe(found, config | {key: 16, "mask_token_id": 7, "draftmill": {"max_length": 64}}, mask_id=None)
    assert (info.mask_id, info.block_size, info.max_length) == (7, 16, 64)
    assert describe(found, config | {"mask_id": 7}, mask_id=9).mask_id == 9


def test_nemotrons_config_gives_the_published_size_and_a_length_at_which_no_query_is_scaled():
    found = find_family(PUBLIC["NEMOTRON_3B"], "auto")
    info = describe(found, PUBLIC["NEMOTRON_3B"], mask_id=None)
    assert (info.kind, info.mask_id, info.block_size, info.max_length) == ("blocks", 100, 32, 4096)
    assert (info.shift, info.left_shift, info.prompt_block) == (0, 1, True)
    assert info.num_parameters / 1e6 == pytest.approx(3831.660, abs=1e-3)
    assert len(found.weight_shapes(PUBLIC["NEMOTRON_3B"])) == 237
    long = PUBLIC["NEMOTRON_3B"] | {"max_position_embeddings": 262144}
    assert describe(found, long, mask_id=None).max_length == 16384
    with pytest.raises(ValueError, match=r"draftmill.max_length = 20000; the model's positions end at 16384"):
        describe(found, long | {"draftmill": {"max_length": 20000}}, mask_id=None)


@pytest.mark.parametrize(("family", "block_size"), [("sdar", 4), ("fast_dllm_v2", 8), ("llada2", 32)])
def test_a_golden_checkpoint_is_described(golden, family, block_size):
    # The vocabularies have 96 ids, the mask is 95; Fast-dLLM v2's and LLaDA2's configs don't name it.
    info = inspect_model(golden / family, mask_id=None if family == "sdar" else 95)
    assert (info.vocab_size, info.mask_id, info.suppressed, info.max_length) == (96, 95, (95,), 2048)
    assert info.block_size == block_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 of 128 experts"),
        ({"hidden_act": "gelu"}, "family 'sdar_moe': it has hidden_act = 'gelu'; supported: 'silu'"),
    ],
)
def test_a_mixture_that_is_not_built_is_refused(change, message):
    config = PUBLIC["SDAR_30B"] | change
    with pytest.raises(ValueError, match=message):
        describe(find_family(config, "auto"), config, mask_id=None)


def test_a_mask_outside_of_the_vocabulary_is_to_be_named(golden):
    """The public id, where a checkpoint is too small for it: nothing else tells what its mask is."""
    with pytest.raises(ValueError, match=r"model.mask_id: 151665 is outside the vocabulary; allowed: 0 .. 95"):
        inspect_model(golden / "fast_dllm_v2")


MASKS = {"sdar": "<|MASK|>", "fast_dllm_v2": "|<MASK>|", "llada2": "<|mask|>"}
ENDS = {"sdar": "<|im_end|>", "fast_dllm_v2": "<|im_end|>", "llada2": "<|role_end|>"}


def write_tokenizer(folder, family):
    """88 tokens, then the end of a turn, the mask, and some ids without a token; what Qwen3 keeps at Qwen2's id is no mask."""
    added = {ENDS[family]: 89, MASKS[family]: 90, "<tool_response>": 92}
    tokenizer = {
        "model": {"type": "BPE", "vocab": {f"t{index}": index for index in range(88)}},
        "added_tokens": [{"id": index, "content": token} for token, index in added.items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_names_the_mask_unless_config_json_or_the_user_does(golden, tmp_path, family):
    silent = copy_changed(golden / family, tmp_path / "silent", config={"mask_token_id": None})
    says = copy_changed(golden / family, tmp_path / "says", config={"mask_token_id": None, "mask_id": 93})
    for folder in (silent, says):
        write_tokenizer(folder, family)
    assert inspect_model(silent).mask_id == 90
    assert inspect_model(silent, mask_id=91).mask_id == 91
    assert inspect_model(says).mask_id == 93
    assert inspect_model(silent).suppressed == (88, 90, 91, 93, 94, 95)


@pytest.mark.parametrize(("family", "eos"), [("sdar", 93), ("fast_dllm_v2", 93), ("llada2", 92)])
def test_a_text_ends_where_generation_config_or_a_turn_of_a_chat_ends(golden, tmp_path, family, eos):
    folder = copy_changed(golden / family, tmp_path)
    assert stop_ids(folder) == (eos,)
    write_tokenizer(folder, family)
    assert stop_ids(folder) == (eos, 89)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [91, 89]}))
    assert stop_ids(folder) == (91, 89)
    assert bos_id(folder) == {"sdar": 93, "fast_dllm_v2": 92, "llada2": None}[family]


def test_block_diffusion_runs_no_decoder_of_whole_texts_and_drafts_for_none(golden):
    info = inspect_model(golden / "sdar")
    with pytest.raises(
        ValueError, match="'stepwise' does not run on models of family 'sdar'; allowed: block_diffusion, s2d2"
    ):
        check_model(decoder_settings("stepwise"), info)
    assert not {"sdar", "sdar_moe", "fast_dllm_v2", "llada2"} & set(masked_diffusion_families())
