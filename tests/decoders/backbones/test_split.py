"""A model in two processes: the same texts as in one, half of the cache, and refusals of what can't be split."""

import multiprocessing
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from draftmill.decoders.backbones import split
from draftmill.decoders.backbones.checkpoint import check_split, read_config
from draftmill.decoders.backbones.families.shares import Share
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import TokenRows, causal_rows, token_rows
from draftmill.decoders.backbones.split import (
    GroupLostError,
    SplitBackbone,
    Summed,
    follow,
    join,
    open_meeting,
    tell,
)
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.backbones.causal_models import load, save_random
from tests.decoders.references import kernels as reference
from tests.decoders.support import decode, decoder_settings, texts, token_info, toy_prompts
from tests.device.pretend import as_one_launch, pretending

AR = decoder_settings("autoregressive")
MODELS = {
    "llama": {},
    "llama-3": {"num_attention_heads": 8},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 2},
}
"""Models of causal_models.py, with other sizes where theirs can't be halved."""


def follower(port: int, folders: list, end: bool) -> None:
    """Rank 1: follows the first one for each model; ends itself in the middle of the last one if asked to."""
    join(open_meeting(2, port), Share(1, 2))
    for folder in folders:
        backbone = load_backbone(folder, device="cpu", share=Share(1, 2))
        assert isinstance(backbone, SplitBackbone)
        if end:
            return
        follow(backbone)


@pytest.fixture
def second_process():
    """Starts rank 1 and makes this process rank 0; ends both."""
    started = []

    def start(folders, end=False):
        meeting = open_meeting(2)
        process = multiprocessing.get_context("spawn").Process(target=follower, args=(meeting.port, folders, end))
        process.start()
        started.append(process)
        join(meeting, Share(0, 2))

    yield start
    distributed.destroy_process_group()
    for process in started:
        process.join(10)
        process.kill()


def leader(folder):
    backbone = load_backbone(folder, device="cpu", share=Share(0, 2))
    assert isinstance(backbone, SplitBackbone)
    backbone.lead()
    return backbone


@pytest.mark.slow
def test_every_family_with_a_plan_writes_the_same_texts_split(tmp_path, second_process):
    folders = [tmp_path / name for name in MODELS]
    for folder in folders:
        save_random(folder, folder.name, **MODELS[folder.name])
    second_process(folders)
    requests = toy_prompts(12, vocab_size=61, longest=12)
    for folder in folders:
        settings = token_info(61), AR, Sampling(), requests
        split, whole = leader(folder), load_backbone(folder, device="cpu")
        assert split.exact
        assert split.cell_bytes - 8 == (whole.cell_bytes - 8) // 2, "8 bytes are the cell's position"
        found = texts(decode(split, *settings, rows=12))
        assert found == texts(decode(whole, *settings, rows=5))
        tell("dismiss")


@pytest.mark.slow
def test_a_slot_that_held_nan_is_cleared_in_both_processes(tmp_path, second_process):
    save_random(tmp_path, "llama")
    second_process([tmp_path])
    split, info = leader(tmp_path), token_info(61, suppressed=(60,))
    split.embedding_VD[60] = torch.nan  # here alone; by sums over both processes it gets into both caches
    sick = Request(100, 1, np.array([5, 60, 7, *[8] * 20, -1], dtype=np.int32))
    requests = toy_prompts(4, vocab_size=60, longest=12)
    found = decode(split, info, AR, Sampling(), [sick, *requests], rows=1)
    assert found.pop(100).error_kind == "nan_logits"
    assert texts(found) == texts(decode(load(tmp_path), info, AR, Sampling(), requests, rows=1))
    tell("dismiss")


@pytest.mark.slow
def test_without_its_second_process_a_model_raises_and_says_why(tmp_path, second_process):
    save_random(tmp_path, "llama")
    second_process([tmp_path], end=True)
    backbone = leader(tmp_path)
    with pytest.raises(GroupLostError, match="the group of processes of this model is lost"):
        decode(backbone, token_info(61), AR, Sampling(), toy_prompts(2, vocab_size=61, longest=24))


class Wire:
    """Stands for the connection of two ranks, one after the other in this process: what the first has sent reaches the second.
    Each has the same part of a sum."""

    def __init__(self, monkeypatch, *, on_gpu=False):
        self.sent, self.kinds, self.gathers = [], [], 0
        self.is_second = False
        monkeypatch.setattr(distributed, "broadcast", self.broadcast)
        monkeypatch.setattr(split, "_all_gather", as_one_launch(self.gather) if on_gpu else self.gather)

    def broadcast(self, tensor, src):
        assert src == 0
        if self.is_second:
            tensor.copy_(self.sent.pop(0))
        else:
            self.sent.append(tensor)
            self.kinds.append((tensor.device.type, len(tensor)))

    def gather(self, parts, own):
        self.gathers += 1
        for part in parts.chunk(2):
            part.copy_(own)


class Heard:
    """A backbone that notes what it is asked to do."""

    def __init__(self):
        self.device, self.calls = torch.device("cpu"), []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, plain(arguments)))


def plain(value):
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, TokenRows):
        return tuple(plain(getattr(value, field.name)) for field in fields(value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def heard(wire):
    found: Any = Heard()
    wire.is_second = True
    follow(found)
    assert not wire.sent
    return found.calls


TOKENS = torch.tensor([5, 9, 8, 7, 6])
CAUSAL = causal_rows([1, 2], [3, 2], [4, 0], TOKENS)
COLUMNS_N = torch.tensor([4, 5, 6, 0, 1])
SIGHT = torch.tensor([[0], [3]]).expand(2, 5), torch.stack([torch.full((5,), 2), COLUMNS_N + 1])


@pytest.mark.parametrize(
    "rows",
    [
        CAUSAL,
        replace(CAUSAL, sigma_G=None),
        replace(CAUSAL, sigma_G=torch.tensor([0.1, 3.0], dtype=torch.float64)),
        replace(CAUSAL, shape=replace(CAUSAL.shape, num_positions=7)),
        causal_rows([2, 0], [3, 2], [4, 0], TOKENS),
        token_rows([0, 1], [3, 2], TOKENS, COLUMNS_N + 1, COLUMNS_N, SIGHT),
        replace(CAUSAL, few_T=torch.tensor([0, 3]), tile_lines=(16,)),
        replace(CAUSAL, few_T=torch.tensor([3, 5, 5]), many_U=torch.tensor([0]), tile_lines=(16, 64)),
        replace(CAUSAL, takes_drafts=True),
        CAUSAL.changed(lambda array: array[..., :0]),
    ],
    ids=[
        "causal",
        "no noise",
        "noise",
        "positions",
        "slots apart",
        "two intervals",
        "tiles",
        "tiles of two kinds",
        "drafts",
        "none",
    ],
)
def test_a_second_process_gets_the_rows_of_the_first_from_two_messages(rows, monkeypatch):
    wire = Wire(monkeypatch)
    facts, arrays = rows.told()
    split.tell("forward", *facts, *arrays)
    assert len(wire.sent) == (2 if rows.num_rows else 1)
    tell("dismiss")
    assert heard(wire) == [("forward", (plain(rows),))]


def test_a_second_process_repeats_every_call_of_the_backbone_in_order(tmp_path, monkeypatch):
    save_random(tmp_path, "llama")
    wire = Wire(monkeypatch)
    first = leader(tmp_path)
    first.allocate(3, 9)
    first.forward(CAUSAL)
    first.copy_prefix(1, 0, 2)
    columns = torch.tensor([[1, 2], [4, 0], [7, 3]])
    first.copy_columns(*columns)
    first.copy_columns(*columns[:, :0])
    first.clear_slot(2)
    first.forget()
    tell("dismiss")
    assert heard(wire) == [
        ("resize", (3, 9)),
        ("forward", (plain(CAUSAL),)),
        ("copy_prefix", (1, 0, 2)),
        ("copy_columns", ([1, 2], [4, 0], [7, 3])),
        ("copy_columns", ([], [], [])),
        ("clear_slot", (2,)),
        ("forget", ()),
    ]


def test_on_a_gpu_a_forward_is_told_by_one_kernel_and_nothing_waits_or_comes_back(tmp_path, monkeypatch):
    save_random(tmp_path, "llama")
    kernel = as_one_launch(reference.attend)
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_attention", lambda *_, **__: kernel)
    with pretending() as counts:
        wire = Wire(monkeypatch, on_gpu=True)
        backbone = load_backbone(tmp_path, device="cuda", dtype="float32", share=Share(0, 2))
        assert isinstance(backbone, SplitBackbone) and not backbone.captures
        backbone.allocate(3, 9)
        rows = causal_rows([1, 2], [3, 2], [4, 0], TOKENS.to("cuda"))
        noise_B = torch.ones(2, dtype=torch.float64, device="cuda")
        lines, tiles = backbone.tiling.tables(rows.line_N)  # as the engine has them
        rows = replace(rows, sigma_G=noise_B, few_T=tiles[0], tile_lines=lines)

        def counted():
            counts.clear()
            wire.gathers = 0
            backbone.forward(rows)
            return counts.state() | {"gathers": wire.gathers}

        alone = counted()
        backbone.lead()
        assert counted() == alone | {"launches": alone["launches"] + 1}
    assert (alone["down"], alone["up"], alone["waits"], alone["shapes"]) == (0, 0, 0, 0)
    assert alone["gathers"] == 2 * len(backbone.windows)
    assert wire.kinds == [("cpu", 1024), ("cuda", 2 + 6 * 5 + 2 * 5 + 2 + 2)]


def test_on_a_gpu_a_sum_of_two_parts_is_two_kernels(monkeypatch):
    with pretending() as counts:
        Wire(monkeypatch, on_gpu=True)
        part = torch.ones(1, 5, 4, device="cuda")
        counts.clear()
        assert Summed(torch.nn.Identity(), 2)(part).shape == part.shape
        assert (counts.launches, counts.waits, counts.up, counts.down) == (2, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "family", "count", "message"),
    [
        ("gpt2", "gpt2", 2, "workers.gpus_per_model: 2, but models of family 'gpt2' can't be split; allowed: 1 "),
        ("llama", "llama", 3, "workers.gpus_per_model: 3 does not divide this model's num_attention_heads = 4, "),
        ("llama", "llama", 4, "4 does not divide this model's num_key_value_heads = 2; allowed: 1, 2$"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name_from_the_config(name, family, count, message, tmp_path):
    save_random(tmp_path, name)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert read_config(tmp_path)
    check_split(family, tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        check_split(family, tmp_path, count)
