"""Whole jobs whose drafts a masked-diffusion model fills in: the sequential text, and drafters that can't draft."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from draftmill.decoders.backbones.families.table import find_family
from draftmill.storage.errors import UserError
from tests.conftest import ROOT
from tests.runs.causal_jobs import LONGEST, ROOM, TOKENIZER, World, job_spec, run_here, save_model

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
