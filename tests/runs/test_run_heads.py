"""Whole jobs whose drafts a published head or masks make: the sequential rows, and refusals before anything runs."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.runs.causal_jobs import job_spec, run_here

BUILTIN = Path(__file__).parents[2] / "decoders" / "builtin"
HEAD = "builtin:ar-tiny-eagle3"


def job(folder: Path, name: str, *, head: str | None = HEAD, model: str = "builtin:ar-tiny", masks=None, **more):
    """A job of six pieces of real source, which end in the middle of a line; a head drafts, or `masks`."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    rows = [{"id": f"{n}", "prompt": text[700 * n : 700 * n + 20 + 60 * n]} for n in range(6)]
    decoder: dict = {"kind": "autoregressive"}
    if head is not None:
        decoder = {"kind": "speculative", "k": 3, "drafter": masks or {"kind": "head", "path": head}}
    sections = {
        "model": {"path": model, "device": "cpu"} | more.pop("facts", {}),
        "decoder": decoder,
        "sampling": {"temperature": 0.6},
    }
    output = {"path": str(folder / name), "unit_rows": 3}
    return job_spec(folder, rows, task={"kind": "complete", "max_new_tokens": 24}, output=output, **sections, **more)


def hash_of_head(spec) -> str | None:
    """What the fingerprint has of the drafter."""
    return resolve(spec, open_store(spec.output.path)).results["decoder"]["drafter"]["weights"]


def test_the_weights_of_a_head_are_in_the_fingerprint_and_its_place_is_not(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(BUILTIN / "ar-tiny-eagle3", other)
    before = hash_of_head(job(tmp_path, "run"))
    assert hash_of_head(job(tmp_path, "run", head=str(other))) == before
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] * 1.5}, other / "model.safetensors")
    assert hash_of_head(job(tmp_path, "run", head=str(other))) != before


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ({}, "builtin:ar-micro", r"fc.weight has shape \(256, 768\); allowed by .*: \(256, 256\)"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "builtin:ar-tiny", r"\[1, 2, 5\]; allowed here: 1 to 4"),
        (
            {"speculators_model_type": None},
            "builtin:ar-tiny",
            "speculators_model_type = none; allowed: eagle3, dflash, dspark",
        ),
    ],
)
def test_a_head_of_another_model_is_refused_before_the_run(tmp_path, change, model, message):
    other = tmp_path / "other"
    shutil.copytree(BUILTIN / "ar-tiny-eagle3", other)
    config = json.loads((other / "config.json").read_text()) | change
    if model.endswith("micro"):
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as refused:
        hash_of_head(job(tmp_path, "run", head=str(other), model=model))
    assert refused.value.field == "decoder.drafter.path"


# ---- masks, and an adapter that their rows alone take --------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Random LoRA weights for ar-tiny, saved by PEFT."""
    import peft
    import transformers

    folder = tmp_path_factory.mktemp("peft") / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN / "ar-tiny")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(str(folder))
    return folder


def test_a_job_whose_masks_draft_writes_the_sequential_rows(tmp_path, adapter):
    """The same with an adapter of masks, which is in the fingerprint by its content."""
    rows = {}
    masks: dict = {
        "plain": None,
        "masks": {"kind": "masks"},
        "adapted": {"kind": "masks", "path": str(adapter)},
    }
    for name, drafter in masks.items():
        spec = job(tmp_path, name, head=drafter and HEAD, masks=drafter, facts={"mask_id": 6})
        rows[name] = run_here(spec)
        assert {row["drafter"] for row in rows[name].values()} == {drafter and "masks"}
    for name in ("masks", "adapted"):
        for key, row in rows[name].items():
            assert (row["tokens"], row["logprob"]) == (rows["plain"][key]["tokens"], rows["plain"][key]["logprob"])
            assert row["proposed"] > 0 and row["nfe_draft"] == 0
    assert hash_of_head(job(tmp_path, "adapted", masks=masks["adapted"], facts={"mask_id": 6})) is not None


def test_masks_without_a_mask_token_and_other_adapters_are_refused_before_the_run(tmp_path, adapter):
    with pytest.raises(UserError, match="models of family 'qwen2' have no mask token") as refused:
        hash_of_head(job(tmp_path, "run", masks={"kind": "masks"}))
    assert refused.value.field == "decoder.drafter.kind"
    with pytest.raises(UserError, match="2 is an end token of the model, and a mask is never generated") as refused:
        hash_of_head(job(tmp_path, "run", masks={"kind": "masks"}, facts={"mask_id": 2}))
    assert refused.value.field == "model.mask_id"
    given: dict = {"masks": {"kind": "masks", "path": str(adapter)}, "facts": {"mask_id": 6}}
    with pytest.raises(UserError, match="is no part of a product in the model's layers") as refused:
        hash_of_head(job(tmp_path, "run", model="builtin:ar-micro", **given))
    assert refused.value.field == "decoder.drafter.path"
