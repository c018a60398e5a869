"""What a worker may use of its device's memory: measured when its models are loaded, from a device that is only pretended."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.job import WorkerResources
from draftmill.actors.loop import memory
from draftmill.actors.loop.loading import free_memory
from draftmill.actors.loop.memory import fit, free_bytes, limit_gpu
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.measuring.measure import MeasureJob
from draftmill.actors.messages import Receipt
from draftmill.actors.metrics.registry import ReadyMetric
from draftmill.actors.metrics.settings import Judge
from draftmill.decoders.backbones import gpus
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone, pick_device
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.engine import cuda_graphs
from draftmill.jobs.config.sections import WorkerShape
from draftmill.jobs.drive.allocation import NodeRoom, allocate
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import make_job, resolve
from draftmill.storage.errors import UserError
from draftmill.storage.runs.metric_files import MeasuredMetric
from draftmill.storage.stores.store import Place, open_store
from tests.actors.fakes import FakeClerk, FakeDecoder, run_all, work
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, engine, token_info
from tests.runs.causal_jobs import job_spec

GIB = 1 << 30
GPU = torch.device("cuda:0")


class Pretended:
    """A GPU of so many bytes, of which others hold some, this process some, and its allocator keeps some for later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, others: int = 0, used: int = 0, kept: int = 0):
        self.fractions: list[float] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - others - used - kept, total))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: used)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: used + kept)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.fractions.append)


def test_what_the_allocator_keeps_for_later_counts_as_free(monkeypatch):
    Pretended(monkeypatch, total=80 * GIB, used=16 * GIB, kept=4 * GIB)
    assert free_bytes(GPU, threads=1) == 64 * GIB


def test_a_fraction_of_a_gpu_is_a_limit_also_before_the_others_have_come(monkeypatch):
    gpu = Pretended(monkeypatch, total=80 * GIB, used=16 * GIB)
    assert free_bytes(GPU, threads=1, gpu_share=0.25) == 4 * GIB
    limit_gpu(0.25)
    limit_gpu(1.0)
    limit_gpu(0.0)
    assert gpu.fractions == [0.25]
    Pretended(monkeypatch, total=80 * GIB, used=16 * GIB, others=60 * GIB)
    assert free_bytes(GPU, threads=1, gpu_share=0.9) == 4 * GIB
    Pretended(monkeypatch, total=8 * GIB, used=7 * GIB)
    assert free_bytes(GPU, threads=1, gpu_share=0.5) == 0


def test_workers_on_cpus_divide_the_memory_as_they_divide_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(memory, "_num_cores", lambda: 16)
    cpu = torch.device("cpu")
    assert free_bytes(cpu, threads=4) == 16 * GIB
    assert free_bytes(cpu, threads=99) == 64 * GIB


def test_a_containers_limit_counts_and_its_file_pages_do_not(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(memory, "_num_cores", lambda: 1)
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {3 * GIB}\n")
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    assert free_bytes(torch.device("cpu"), threads=1) == 6 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu"), threads=1) == 64 * GIB


class Small(TokenTable):
    cell_bytes, row_bytes = 1000, 10


def test_a_decoder_is_fitted_to_its_device_and_the_record_says_how(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, **more: 2_000_000)
    settings = decoder_settings("autoregressive")
    decoder = engine(Small(num_positions=6), token_info(3), settings, rows=64, max_tokens=64 * 512)
    room = fit(decoder, threads=1)
    assert room is not None
    facts = asdict(room)
    assert facts["free_bytes"] == 2_000_000 and facts["max_rows"] == 64 and facts["max_tokens"] == 64 * 512
    assert facts["rows"] == decoder.room(512) == 2 and facts["length"] == 512
    assert decoder.room(6) == 64, "a spec's own bounds stay"
    assert fit(FakeDecoder(), threads=1) is None


def test_workers_of_one_job_hold_as_many_samples_as_each_ones_own_device_allows(monkeypatch):
    def rows_on(total: int, *, gpus: float = 1.0, max_rows: int = 64) -> int:
        Pretended(monkeypatch, total=total)
        decoder = engine(
            Small(num_positions=6),
            token_info(3),
            decoder_settings("autoregressive"),
            rows=max_rows,
            max_tokens=2**20,
        )
        decoder.backbone.device = GPU  # what it has so far is small enough to be anywhere
        room = fit(decoder, threads=1, gpus=gpus)
        assert room is not None and room.device == "cuda:0" and room.free_bytes == int(total * gpus)
        return room.rows

    small = rows_on(4_000_000)
    assert rows_on(12_000_000) in {3 * small, 3 * small + 1, 3 * small + 2}, "three times the memory"
    assert rows_on(12_000_000, gpus=0.5) == rows_on(6_000_000) < rows_on(12_000_000), "a share is a smaller device"
    assert rows_on(12_000_000, max_rows=5) == 5, "a kind's own bound"
    assert rows_on(10**9) == 64, "the bound of the spec"


def test_a_sample_that_the_memory_can_not_hold_is_failed_as_that_and_its_neighbours_are_ok():
    decoder = engine(Small(num_positions=6), token_info(3), decoder_settings("autoregressive"), rows=9, max_tokens=999)
    decoder.fit(8_000)
    assert decoder.most_rows(6) == 0 and decoder.most_rows(3) == 1
    unit_io = FakeClerk({0: [6, 3, 2, 3]})
    made = unit_io.sample

    def prompted(unit, index: int):
        sample = made(unit, index)
        assert sample.canvas is not None
        sample.canvas[0] = np.int32(1)
        return sample

    unit_io.sample = prompted  # type: ignore[method-assign]
    runner = UnitRunner(decoder, unit_io)
    runner.add(work(0, 4))
    (receipt,) = run_all(runner)
    assert isinstance(receipt, Receipt) and (receipt.tally.ok, receipt.tally.failed) == (3, 1)
    (failed,) = [sample for sample in unit_io.closed[0] if sample.error]
    assert failed.index == 0 and failed.error is not None and failed.error.kind == "out_of_memory"
    assert "a canvas of 6 tokens does not fit into memory" in failed.error.message
    assert runner.limit.rows is None, "nothing ran out: the rows of the others are not halved"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["ar-tiny", "xlnet-tiny"])
def test_a_real_models_cache_takes_the_bytes_that_its_account_says(name):
    from draftmill.actors.checkpoints.models import builtin_models, fetch_model

    if name not in builtin_models():
        name = next(one for one in builtin_models() if one.startswith(name.split("-", maxsplit=1)[0]) or "asarm" in one)
    backbone = load_backbone(fetch_model(f"builtin:{name}"), device="cpu")
    backbone.allocate(3, 64)
    cache = backbone.cache
    held = sum(layer.numel() * layer.element_size() for layer in cache.layers_2SKWd)
    held += cache.positions_SW.numel() * cache.positions_SW.element_size()
    assert held == backbone.cell_bytes * cache.num_slots * cache.num_columns
    assert backbone.row_bytes >= 4 * backbone.width
    backbone.resize(0, 0)
    assert (cache.num_slots, cache.num_columns) == (0, 0)


def test_under_ray_a_gpu_by_its_number_is_refused_before_anything_starts():
    nodes = [NodeRoom(8, 2)]
    with pytest.raises(UserError, match=r"model\.device: 'cuda:1' .*CUDA_VISIBLE_DEVICES=1"):
        allocate([WorkerShape()], nodes, units=9, device="cuda:1")
    for device in ("cuda", "cuda:0"):
        assert allocate([WorkerShape()], nodes, units=9, device=device).count == 2
    assert allocate([WorkerShape(gpus=2.0)], nodes, units=9, device="cuda:1").count == 1


def test_a_gpu_that_the_process_does_not_see_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match=r"model\.device: 'cuda:2', .* cuda:0, cuda:1"):
        pick_device("cuda:2")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_builtin_model_on_a_real_gpu_stays_within_what_it_was_given():
    backbone = load_backbone(fetch_model("builtin:ar-tiny"), device="cuda")
    free = free_bytes(backbone.device, threads=1)
    assert 0 < free <= torch.cuda.mem_get_info()[1]
    info = inspect_model(fetch_model("builtin:ar-tiny"))
    decoder = engine(backbone, info, decoder_settings("autoregressive"), rows=256)
    decoder.fit(64 << 20)
    before = torch.cuda.memory_allocated()
    length = min(256, info.max_length or 256)
    canvas = np.array([5] + [HOLE] * (length - 1), dtype=np.int32)
    decoder.admit([Request(index, index, canvas) for index in range(decoder.room(length))])
    decoder.step()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A machine with a GPU and driver 535, and a torch for CUDA 13, which needs driver 580. Returns its /dev."""
    version = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
    )
    (tmp_path / "version").write_text(version)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_gpu_that_torch_can_not_use_is_never_replaced_by_the_cpu(old_driver, device):
    with pytest.raises(ValueError, match=r"model\.device") as caught:
        pick_device(device)
    told = str(caught.value)
    assert "driver is 535.104.05" in told and "CUDA 13.0" in told and "model.device: cpu" in told
    assert f"pip install torch --index-url {gpus.INDEX}/cu126" in told


def test_the_advice_fits_driver_and_torch(old_driver, monkeypatch):
    version = old_driver / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert "the two fit" in gpus.unusable("auto")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"{gpus.INDEX}/cu130" in gpus.unusable("auto") and "built without CUDA" in gpus.unusable("auto")
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed\n")
    assert "install driver 525 or later" in gpus.unusable("auto")
    version.unlink()
    assert "no NVIDIA driver was found" in gpus.unusable("cuda")


def test_the_cpu_is_taken_where_this_process_has_no_gpu(old_driver, monkeypatch):
    """A pod without a GPU sees its node's driver, and a worker of Ray that asked for none has its GPUs hidden."""
    assert pick_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto") == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (old_driver / "nvidia0").unlink()
    (old_driver / "nvidia-uvm").touch()
    assert pick_device("auto") == "cpu"
    (old_driver / "nvidia1").symlink_to(old_driver / "gone")
    assert pick_device("auto") == "cpu", "a device that can't be opened"


def test_ray_and_device_auto_agree_about_gpus(tmp_path):
    """Raylets may show all GPUs to a worker that asked for none; one that has a GPU must not decode on its CPU."""
    spec = job_spec(tmp_path, [{"id": "a", "prompt": "def"}], model={"path": "builtin:ar-tiny"})
    store = open_store(spec.output.path)
    resolved = resolve(spec, store)
    auto = make_job(resolved, make_plan(resolved, store, Display()))
    fixed = replace(auto, model=replace(auto.model, device="cuda:0"))
    assert auto.model.device == "auto"
    found = [auto.on_ray(WorkerResources(1.0, gpus, 1)).model.device for gpus in (0.0, 0.5, 2.0)]
    assert found == ["cpu", "cuda", "cuda"]
    assert fixed.on_ray(WorkerResources(1.0, 1.0, 1)).model.device == "cuda:0"
    judge = ReadyMetric(Judge(kind="judge", model="m"), MeasuredMetric({}, ("judge",)), "metrics.0", place=auto.model)
    judging = MeasureJob(Place("run"), "f", "0", (judge,), {}, 1.0)
    devices = [judging.on_ray(WorkerResources(1.0, gpus, 1)).metrics[0].place for gpus in (0.0, 0.5)]
    assert [place and place.device for place in devices] == ["cpu", "cuda"]
    without = job_spec(tmp_path, [], model={"path": "builtin:ar-tiny"}, workers={"gpus": 0})
    assert without.model_place().device == "cpu", "--local and validate, too"


def test_a_model_on_another_gpu_makes_that_one_current(monkeypatch):
    """Triton starts kernels on the current device, whatever the pointers are of."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("draftmill.decoders.backbones.load.pick_dtype", lambda *_: (_ for _ in ()).throw(KeyError))
    for device in ("cuda:1", "cuda", "cpu"):
        with pytest.raises(KeyError):
            load_backbone(fetch_model("builtin:ar-tiny"), device=device)
    assert chosen == ["cuda:1"]


@pytest.mark.parametrize(("gpus", "device", "notes"), [(8, "auto", 1), (8, "cpu", 0), (1, "auto", 0), (0, "auto", 0)])
def test_a_job_in_one_process_names_the_gpus_it_leaves_idle(gpus, device, notes, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    spec = job_spec(tmp_path, [], model={"path": "builtin:ar-tiny", "device": device})
    backend = LocalBackend()
    found = backend.lacking(spec, backend.allocate(spec, units=1))
    assert found == ["7 GPUs idle: --local uses one; without it each GPU has a worker"] * notes


def test_no_graph_keeps_its_model_when_memory_is_given_back(monkeypatch):
    model = object()
    monkeypatch.setitem(cuda_graphs._LIVING, "graph", model)
    free_memory()
    assert not cuda_graphs._LIVING
