"""Checkpoints are found, fetched and known again by their content; a damaged one is refused by name."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from draftmill.actors.checkpoints import models
from draftmill.actors.checkpoints.models import (
    BUILTIN,
    builtin_models,
    fetch_model,
    model_hash,
    tokenizer_hash,
    user_error,
)
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import check_counts, inspect_model
from draftmill.decoders.backbones.heads.files import read_sizes
from draftmill.decoders.backbones.load import load_backbone
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import MemoryStore, Place, S3Options

ASARM = BUILTIN / "asarm-tiny"


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden XLNet that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "xlnet_asarm" / name, folder)
    return folder


def test_builtin_and_local_models_are_folders(checkpoint):
    assert fetch_model("builtin:asarm-tiny") == ASARM and "asarm-tiny" in builtin_models()
    assert fetch_model(str(checkpoint)) == checkpoint


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "builtin:nothing",
            "'builtin:nothing' does not exist; allowed: builtin:ar-micro, builtin:ar-tiny, ",
        ),
        ("/no/such/folder", "is not a folder; allowed: builtin:NAME"),
        ("ftp://host/model", "is not a folder"),
        ("nobody/no-such-model", "neither a local folder nor an accessible hub model"),
        ("ar-tiny", "; did you mean 'builtin:ar-tiny'?"),
    ],
)
def test_a_model_that_is_not_there_is_refused(path, message):
    with pytest.raises(UserError, match=r"^model\.path: ") as caught:
        fetch_model(path)
    assert message in str(caught.value)


def test_a_revision_of_what_has_none_is_refused(checkpoint):
    for path in ("builtin:asarm-tiny", "s3://models/one", str(checkpoint)):
        with pytest.raises(UserError, match=r"^decoder.drafter.revision: 'main' is not allowed for .*no revisions"):
            fetch_model(path, "main", field="decoder.drafter.path")


def test_a_model_on_s3_is_fetched_once_by_version(checkpoint, tmp_path, monkeypatch):
    store = MemoryStore("bucket-of-models")
    monkeypatch.setattr(models, "open_store", lambda place: store)
    for file in checkpoint.iterdir():
        store.put(f"models/a/{file.name}", file.read_bytes())
    store.put("models/a/code.py", b"never fetched")
    store.put("models/ab/config.json", b"another model's")
    folder = fetch_model(Place("s3://bucket/models/a", S3Options()))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert model_hash(folder) == model_hash(checkpoint)
    assert fetch_model("s3://bucket/models/a") == folder
    store.put("models/a/config.json", b"{}")
    assert fetch_model("s3://bucket/models/a") != folder
    with pytest.raises(UserError, match="has no model files"):
        fetch_model("s3://bucket/nothing")


def test_the_hash_is_of_the_content(checkpoint, tmp_path):
    before = model_hash(checkpoint)
    moved = checkpoint.rename(tmp_path / "elsewhere")
    (moved / "README.md").write_text("not part of it")
    assert model_hash(moved) == before
    (moved / "draft_head.json").write_text("{}")
    assert model_hash(moved) != before


def age(folder: Path, *, seconds: float = 60.0) -> None:
    """Set the files' modification times to some seconds ago, all to the same."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_model_is_hashed_once(checkpoint):
    age(checkpoint)
    read: list[int] = []
    first = model_hash(checkpoint, read.append)
    assert sum(read) > 1000
    read.clear()
    assert model_hash(checkpoint, read.append) == first and not read


@pytest.mark.parametrize("how", ["size", "time", "inode", "at once"])
def test_a_changed_model_is_hashed_again(how, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    if how != "at once":
        age(checkpoint)
    before, first = weights.stat(), model_hash(checkpoint)
    data = bytearray(weights.read_bytes() + b" " * (how == "size"))
    data[-1] ^= 1
    if how == "inode":
        (tmp_path / "other").write_bytes(data)
        (tmp_path / "other").rename(weights)
    else:
        weights.write_bytes(data)
    if how != "time":
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model_hash(checkpoint) != first


def test_a_hash_needs_no_cache(checkpoint, tmp_path, monkeypatch):
    age(checkpoint)
    first = model_hash(checkpoint)
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "file"))
    assert model_hash(checkpoint) == first


def test_tokenizers_have_a_hash_and_none_has_none():
    assert tokenizer_hash(ASARM, "none") == "none"
    assert tokenizer_hash(ASARM) == tokenizer_hash(Path("/elsewhere"), str(ASARM)) != tokenizer_hash(ASARM, "none")


def test_a_checkpoint_without_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.path: .* lacks model\.safetensors"):
        model_hash(checkpoint)


def test_the_builtin_tokenizer_round_trips_and_joins(tmp_path):
    tokenizer = load_tokenizer(ASARM)
    assert tokenizer is not None and tokenizer.joins
    text = "def f():\n\treturn '<mask> é 🙂'  \r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(ASARM, "none") is None
    with pytest.raises(UserError, match=r"model\.tokenizer: .* has no tokenizer"):
        load_tokenizer(ASARM, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.tokenizer: the tokenizer in .* can't be loaded"):
        load_tokenizer(ASARM, str(tmp_path))


def test_errors_of_the_decoders_side_keep_their_path():
    assert user_error(ValueError("decoder.k: too large"), "model.path").field == "decoder.k"
    assert str(user_error(ValueError("broken"), "model.path")) == "model.path: broken"


@pytest.mark.parametrize(
    ("model", "key"), [("ar-tiny", "num_hidden_layers"), ("mdm-tiny", "n_layers"), ("asarm-tiny", "n_layer")]
)
def test_a_config_with_a_million_layers_is_refused_before_any_is_built(tmp_path, model, key, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN / model, folder)
    config = json.loads((folder / "config.json").read_text())
    assert key in config
    (folder / "config.json").write_text(json.dumps(config | {key: 1_000_000}))
    monkeypatch.setattr("draftmill.decoders.backbones.checkpoint.describe", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr("draftmill.decoders.backbones.checkpoint.check_names", lambda *_, **__: pytest.fail("built"))
    for read in (inspect_model, load_backbone):
        with pytest.raises(ValueError, match=rf"config.json says {key} = 1,000,000, but the weights have \d+ tensors"):
            read(folder)


def test_numbers_of_layers_and_experts_are_found_at_any_depth():
    shapes = {"a": (4, 2), "b": (3,)}
    check_counts(
        {"num_hidden_layers": 2, "num_experts": 4, "x": {"n_blocks": 1}, "vocab_size": 10**12}, shapes, Path("m")
    )
    for bad in (
        {"x": {"n_blocks": 3}},
        {"num_experts": 5},
        {"attention_types": [[["global"], 10**9]]},
        {"num_layers": 3},
    ):
        with pytest.raises(ValueError, match="too few for that number of"):
            check_counts(bad, shapes, Path("m"))


def test_a_pointer_of_git_lfs_is_named_as_one(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN / "ar-tiny", folder)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match=r"is a pointer of git-lfs, not the file; run `git lfs pull`"):
        inspect_model(folder)
    (folder / "draft_head.safetensors").write_text(pointer)
    (folder / "draft_head.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^decoder.head: .*draft_head.safetensors is a pointer of git-lfs"):
        read_sizes(folder, "assd")
    for name in ("chat_template.jinja", "tokenizer.json"):
        (folder / name).write_text(pointer)
        with pytest.raises(UserError, match=rf"^model.tokenizer: .*{name} is a pointer of git-lfs, not the file"):
            load_tokenizer(folder)
        (folder / name).unlink()
