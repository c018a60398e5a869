"""The layers of rotary models without transformers' wrappers: the same bits, or transformers' code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from draftmill.decoders.backbones import rotary
from draftmill.decoders.backbones.packed import PackedLinear, can_pack
from draftmill.decoders.backbones.rotary import can_join, join_products, lean_layers
from draftmill.decoders.backbones.rotary_modules import RotaryModel
from tests.decoders.backbones.causal_models import (
    MODELS,
    decode_with_rejections,
    load,
    random_tokens,
    save_random,
)

LEAN = ("llama", "llama-3", "mistral", "qwen2", "qwen2-sliding", "qwen3")
EVEN = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this build of torch does not pack weights"
)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are transformers' modules, also where ours would do."""
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.is_plain", lambda parsed: False)


def decoded(backbone):
    """Hidden states of two ragged texts, with rejected drafts between, and what they leave in the cache."""
    texts = {0: random_tokens(23, seed=1), 1: random_tokens(14, seed=2)}
    found = decode_with_rejections(backbone, texts, prompts={0: 9, 1: 3})
    held = [layer[:, :2, :, :14].clone() for layer in backbone.cache.layers_2SKWd]
    backbone.forget()
    return [*found.values(), *held]


def both_ways(folder, monkeypatch, name, **changes):
    """A model as it is loaded, and one that runs by transformers' code."""
    save_random(folder, name, **changes)
    lean = load(folder)
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.is_plain", lambda parsed: False)
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.lean_layers", lambda backbone: "unwanted")
    return lean, load(folder)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("changes", [{}, EVEN], ids=["odd widths", "even widths"])
@pytest.mark.parametrize("name", LEAN)
def test_a_lean_model_gives_the_bits_of_transformers_code(
    name: str, changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, plain = both_ways(tmp_path, monkeypatch, name, **changes)
    assert lean.lean is not None and plain.lean is None
    assert isinstance(lean.model, RotaryModel) == (name != "llama-3")
    assert not isinstance(plain.model, RotaryModel)
    for one, other in zip(decoded(lean), decoded(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.one_in(2)
@needs_packing
@pytest.mark.parametrize("name", LEAN)
def test_products_of_the_same_rows_become_one_and_memory_holds_one_form(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, name, **EVEN)
    backbone = load(tmp_path)
    assert backbone.lean is not None
    for layer, module in zip(backbone.lean.layers, backbone.base.layers, strict=True):
        assert layer.heads.joined is not None and layer.inner.joined is not None
        assert not layer.heads.products and not layer.inner.products
        names = {name for name, _ in module.named_modules()}
        assert not names & {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
        assert {"self_attn.o_proj", "mlp.down_proj"} <= names


@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(LEAN)))
def test_other_families_run_by_transformers_code(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, name)
    assert load(tmp_path).lean is None


def test_another_dtype_runs_by_transformers_code(tmp_path: Path) -> None:
    save_random(tmp_path)
    assert load(tmp_path, "float64").lean is None


def slightly_more(function):
    return lambda *arguments, **options: function(*arguments, **options) * (1 + 2**-20)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("what", ["rms_norm", "attend_rows"])
def test_layers_with_other_bits_are_not_used(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path)
    expected = decoded(load(tmp_path))
    owner = functional if what == "rms_norm" else rotary
    monkeypatch.setattr(owner, what, slightly_more(getattr(owner, what)))
    backbone = load(tmp_path)
    assert backbone.lean is None
    assert all(torch.equal(one, other) for one, other in zip(expected, decoded(backbone), strict=True))


@pytest.mark.usefixtures("foreign")
def test_a_version_with_other_parts_runs_by_transformers_code(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2", **EVEN)
    backbone = load(tmp_path)
    del backbone.base.layers[1].self_attn.o_proj
    assert "has no attribute" in str(lean_layers(backbone))


STAND_IN = {
    "__init__.py": "import torch._dynamo.utils\n",
    "transforms/__init__.py": "class InterpolationMode: NEAREST_EXACT, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = range(6)\n",
    "io.py": "",
    "transforms/functional.py": "def pil_to_tensor(image): ...\n",
}
JOB = """
import sys
from draftmill.jobs.cli import main
assert main(["run", sys.argv[1], "--local"]) == 0
loaded = {name for name in ("transformers", "torch._dynamo", "torchvision") if name in sys.modules}
sys.exit(f"imported {loaded}" if loaded != set(sys.argv[2:]) else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_job_runs_where_torchvision_imports_the_compilers(name: str, tmp_path: Path) -> None:
    save_random(tmp_path / "model", name)
    for file, text in STAND_IN.items():
        path = tmp_path / "packages" / "torchvision" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = tmp_path / "packages" / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    spec = {
        "task": {"kind": "complete", "max_new_tokens": 2},
        "input": {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id", "tokens": "tokens"}},
        "model": {"path": str(tmp_path / "model"), "device": "cpu", "tokenizer": "none"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(tmp_path / "run")},
    }
    (tmp_path / "job.json").write_text(json.dumps(spec))
    expected = {"gpt2": ["transformers", "torch._dynamo", "torchvision"], "qwen2": []}[name]
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "job.json"), *expected],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def packed(*shape: int, seed: int, bias: bool = False) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    return PackedLinear(
        torch.randn(*shape, generator=generator), torch.randn(shape[0], generator=generator) if bias else None
    )


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
def test_a_joined_product_is_its_parts_side_by_side(bias: bool) -> None:
    parts = [packed(width, 40, seed=width, bias=bias) for width in (64, 32, 32)]
    assert can_join(parts)
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(9))
    assert torch.equal(join_products(parts)(rows), torch.cat([part(rows) for part in parts], 1))


@needs_packing
def test_products_that_would_differ_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_join([packed(32, 40, seed=1), packed(32, 40, seed=2, bias=True)])
    assert not can_join([packed(32, 40, seed=1), packed(20, 40, seed=2)])
    assert not can_join([packed(32, 40, seed=1), torch.nn.Linear(40, 32)])
    monkeypatch.setattr(rotary, "join_products", lambda products: packed(64, 40, seed=3))
    assert not can_join([packed(32, 40, seed=1), packed(32, 40, seed=2)])


@needs_packing
def test_layers_whose_products_are_not_joined_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(tmp_path, "qwen3", **EVEN)
    expected = decoded(load(tmp_path))
    monkeypatch.setattr(rotary, "can_join", lambda products: False)
    backbone = load(tmp_path)
    assert backbone.lean is not None and backbone.lean.layers[0].heads.joined is None
    assert all(torch.equal(one, other) for one, other in zip(expected, decoded(backbone), strict=True))
