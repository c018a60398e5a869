"""Published draft heads: the logits of the reference implementation, the states that they read, and what is refused.

tests/data/speculators has heads with random weights, as package speculators 0.9.0 (transformers 5.23, torch 2.13, float32, one
thread) wrote them, and what its models gave for random states and tokens (`arrays.safetensors`); and a target of their shape.
`logits_SNV` of an EAGLE-3 head: step s of row n continues s times from the head's own states, with the tokens after the row.
`logits_ABV` of a DFlash head: blocks whose first tokens are at `anchors_A`.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.heads.files import check_speculator, read_speculator
from draftmill.decoders.backbones.heads.published import load_speculator
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from tests.decoders.support import token_info

DATA = Path(__file__).parents[2] / "data" / "speculators"
EAGLE = ("eagle3_llama", "eagle3_qwen3", "eagle3_fc_norm")


def target():
    return load_backbone(DATA / "target", device="cpu")


def rows_of(tokens_N, first, slot=1):
    return causal_rows([slot], [len(tokens_N)], [first], tokens_N)


def drafted(head, logits_RV, arrays):
    """Logits of the ids that the head drafts, by the file's own map."""
    folder_d2t = arrays.get("d2t")
    if folder_d2t is None:
        return logits_RV
    ids = folder_d2t + torch.arange(len(folder_d2t))
    others = torch.ones(logits_RV.shape[1], dtype=torch.bool).index_fill(0, ids, False)
    assert (logits_RV[:, others] == -torch.inf).all()
    return logits_RV[:, ids]


def read(name):
    arrays = load_file(DATA / name / "arrays.safetensors")
    held = load_file(DATA / name / "model.safetensors")
    return arrays | ({"d2t": held["d2t"]} if "d2t" in held else {})


@pytest.mark.parametrize("name", EAGLE)
def test_an_eagle_head_gives_the_references_logits_from_states_and_from_its_own(name):
    head, arrays = load_speculator(DATA / name, target()), read(name)
    tokens_N, logits_SNV = arrays["tokens_N"], arrays["logits_SNV"]
    for last in (2, 5, 7):
        head.forget()
        head.allocate(3, 32)
        rows = rows_of(tokens_N[: last + 1], 0)
        head.read(arrays["states_NF"][: last + 1], rows)
        found = [head.logits(head.forward(replace(rows, position_N=rows.position_N + 1)))[-1:]]
        for step in (1, 2, 3):
            rows = rows_of(tokens_N[last + step :][:1], last + step)
            rows = replace(rows, position_N=rows.position_N + 1, takes_drafts=True)
            found.append(head.logits(head.forward(rows)))
        torch.testing.assert_close(drafted(head, torch.cat(found), arrays), logits_SNV[:, last], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["dflash", "dflash_anchor", "dspark", "dspark_gated"])
def test_a_head_of_blocks_gives_the_references_logits_of_a_block(name):
    model, arrays = target(), read(name)
    # What the file lacks is the target's; of these models the reference's.
    model.embedding_VD.copy_(arrays["embed"])
    model.head = torch.nn.Linear(32, 40, bias=False).requires_grad_(False)
    model.head.weight.copy_(arrays["lm_head"]) if len(arrays["lm_head"]) == 40 else None
    head, config = load_speculator(DATA / name, model), read_speculator(DATA / name)
    for anchor, logits_BV in zip(arrays["anchors_A"].tolist(), arrays["logits_ABV"], strict=True):
        head.forget()
        head.allocate(3, 64)
        head.read(arrays["states_NF"][:anchor], rows_of(arrays["tokens_N"][:anchor], 0))
        block = rows_of(torch.tensor([int(arrays["tokens_N"][anchor]), *[config.mask_id] * 4]), anchor)
        block = replace(block, high_IN=torch.full_like(block.high_IN, anchor + 5))
        hidden_BD = head.forward(block)
        if config.markov_rank:
            # Each row speaks of the token after its own, or of its own; the token before that is known.
            before = (anchor + torch.arange(5) - int(not config.from_anchor)).clamp(min=anchor)
            hidden_BD = head.heads.markov(hidden_BD, prev_RD=head.embed(arrays["tokens_N"][before]))
        found_BV = drafted(head, head.logits(hidden_BD), arrays)
        torch.testing.assert_close(found_BV, logits_BV, atol=2e-5, rtol=1e-4)


def test_a_head_reads_the_states_after_its_layers():
    from transformers import Qwen2ForCausalLM

    model, tokens_N, noted = target(), torch.tensor([3, 9, 27, 1, 30]), []
    reader = SimpleNamespace(
        speculator=SimpleNamespace(layer_ids=(1, 2, 4)), read=lambda states_NF, rows: noted.append(states_NF)
    )
    model.allocate(2, 32)
    model.tap(reader)
    model.forward(rows_of(tokens_N, 0))
    model.tap(None)
    model.forward(rows_of(tokens_N, 0))
    inside = []
    plain = Qwen2ForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32)
    for layer in plain.model.layers:
        layer.register_forward_hook(lambda layer, given, output: inside.append(output[0].detach()))
    plain(tokens_N.unsqueeze(0))
    torch.testing.assert_close(noted[0], torch.cat([inside[0], inside[1], inside[3]], 1), atol=1e-5, rtol=1e-4)
    assert len(noted) == 1


def changed(tmp_path, name, **fields):
    """A head whose config.json says something else."""
    folder = tmp_path / "head"
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= fields.pop("layers", {})
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("eagle3_llama", {"speculators_model_type": "mtp"}, "'mtp'; allowed: eagle3, dflash, dspark"),
        ("eagle3_llama", {"layers": {"model_type": "qwen3_next"}}, "'qwen3_next'; allowed: llama, qwen3"),
        ("eagle3_llama", {"layers": {"vocab_size": 50}}, "is for 50 ids; the model has 40"),
        ("eagle3_llama", {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "allowed here: 1 to 4"),
        ("eagle3_llama", {"eagle_aux_hidden_state_layer_ids": None}, "= None; allowed: a list of different"),
        ("eagle3_llama", {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "allowed: a list of different numbers"),
        ("eagle3_llama", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has shape (32, 96); allowed"),
        ("eagle3_llama", {"layers": {"intermediate_size": 64}}, "mlp.down_proj.weight has shape (32, 48); allowed"),
        ("eagle3_llama", {"layers": {"hidden_act": "gelu"}}, "hidden_act = 'gelu'; allowed: silu"),
        ("eagle3_fc_norm", {"norm_before_fc": True}, "input_norm.weight has shape none; allowed"),
        ("eagle3_qwen3", {"draft_vocab_size": 24}, "lm_head.weight has shape (40, 32)"),
        ("dflash", {"mask_token_id": None}, "mask_token_id = none"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type = 'rnn'; allowed: vanilla, gated"),
        ("dspark", {"markov_rank": 8}, "markov_w1.weight has shape (40, 12)"),
        (
            "dflash",
            {"layers": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}},
            "allowed: full_attention",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_from_its_files_alone(tmp_path, name, fields, message):
    with pytest.raises(ValueError, match=r"^decoder\.drafter\.path: ") as caught:
        check_speculator(changed(tmp_path, name, **fields), DATA / "target", replace(token_info(40), family="qwen2"))
    assert message in str(caught.value)


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path):
    folder = changed(tmp_path, "eagle3_llama", layers={"intermediate_size": 64})
    with pytest.raises(ValueError, match="do not fit its config"):
        load_speculator(folder, target())


def test_a_head_with_a_weight_that_is_not_a_number_is_refused(tmp_path):
    folder = changed(tmp_path, "eagle3_llama")
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"decoder\.drafter\.path: {folder}: norm\.weight has weights that are nan or inf"
    ):
        load_speculator(folder, target())
