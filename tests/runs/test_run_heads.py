"""Whole jobs whose drafts a published head, masks or a masked-diffusion model make: the sequential rows, and refusals."""

import json
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.families.table import find_family
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.conftest import ROOT
from tests.runs.causal_jobs import LONGEST, ROOM, TOKENIZER, World, job_spec, run_here, save_model

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


ROWS: list[dict] = [
    {"id": "one", "prompt": "def f(x):\n    return x\n"},
    {"id": "two", "prompt": "import os\n\n\nclass Path:\n"},
    {"id": "empty", "prompt": ""},
    {"id": "tight", "prompt": "for value in values:\n    total = total + value\n" * 3 + "print(total)\n"},
]


def save_masked(folder, family: str, **changes) -> None:
    """Save random weights of a family after its golden checkpoint's config."""
    folder.mkdir()
    config = json.loads((ROOT / "tests" / "data" / family / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    shapes = find_family(config, "auto").weight_shapes(config)
    save_file(
        {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )


def save_llada(folder) -> None:
    """With the target's tokenizer, whose mask is one of its tokens."""
    sizes = {"vocab_size": 2048, "embedding_size": 2048, "max_sequence_length": LONGEST}
    save_masked(folder, "llada", mask_token_id=6, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def spec_of(world: World, folder, decoder: dict, **sections):
    model = {"path": str(world.folder / "model"), "device": "cpu"}
    task = {"kind": "complete", "max_new_tokens": ROOM, "stop": ["e", "  "]}
    output = {"path": str(folder / decoder["kind"]), "unit_rows": 8}
    sections = {"sampling": {"temperature": 0.8, "top_p": 0.95}, "output": output} | sections
    return job_spec(folder, ROWS, task=task, model=model, decoder=decoder, **sections)


@pytest.mark.parametrize(
    ("save", "settings"),
    [
        (save_llada, {"gamma": "auto", "order": "native"}),
        # MDLM without a tokenizer, with the mask behind the target's ids; SEDD is conditioned on the noise, and has a
        # window of 16 tokens.
        (
            partial(save_masked, family="mdlm", vocab_size=2049, model_length=32),
            {"gamma": 5, "steps": 3, "window": "full"},
        ),
        (partial(save_masked, family="sedd", tokens=2048), {"gamma": 3, "steps": 3}),
    ],
)
@pytest.mark.slow
def test_a_job_with_a_diffusion_drafter_writes_the_sequential_text(world, tmp_path, save, settings):
    save(tmp_path / "masked")
    decoder = {"kind": "specdiff", "drafter": {"path": str(tmp_path / "masked")}} | settings
    expected = run_here(spec_of(world, tmp_path, {"kind": "autoregressive"}))
    found = run_here(spec_of(world, tmp_path, decoder))
    assert {row["finish"] for row in expected.values()} >= {"stop"}
    for name, row in expected.items():
        said = {key: (row[key], found[name][key]) for key in ("tokens", "text", "finish", "status")}
        assert all(mine == theirs for mine, theirs in said.values()), said
        assert found[name]["nfe"] <= row["nfe"]
    assert {row["drafter"] for row in found.values()} == {decoder["drafter"]["path"]}
    if settings["gamma"] != "auto":
        assert all(row["nfe_draft"] for row in found.values() if row["new_tokens"] > 1)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (
            partial(save_model, ends=[2]),
            "is of family 'qwen2', which is not a masked-diffusion model; allowed: dream, llada, llada_moe, mdlm, sedd",
        ),
        (partial(save_masked, family="mdlm", vocab_size=2047), "has 2047 ids, the model 2048"),
        (lambda folder: folder.symlink_to(TOKENIZER), "is of family 'xlnet', which is not a masked-diffusion model"),
    ],
)
def test_a_drafter_that_can_not_draft_is_refused_at_the_start(world, tmp_path, save, message):
    save(tmp_path / "masked")
    with pytest.raises(UserError) as caught:
        run_here(spec_of(world, tmp_path, {"kind": "specdiff", "drafter": {"path": str(tmp_path / "masked")}}))
    assert caught.value.field == "decoder.drafter.path" and message in str(caught.value)
