"""What a worker says of its device, and how it is told; the GPU is only pretended."""

import json
import secrets
from types import SimpleNamespace

import pytest
import torch

from draftmill.actors.loop import device_facts as facts
from draftmill.decoders.backbones.small_weights import SmallLinear
from draftmill.decoders.engine.cuda_graphs import Graphs
from draftmill.decoders.engine.engine import Engine
from draftmill.jobs.drive.run_log import read_sessions, session_record
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.formatting import device_text
from draftmill.storage.stores.store import MemoryStore
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, engine, token_info


@pytest.fixture
def decoder() -> Engine:
    made = engine(TokenTable(vocab_size=4), token_info(4), decoder_settings("autoregressive"), rows=2, max_tokens=64)
    assert isinstance(made, Engine)
    return made


@pytest.fixture
def on_gpu(decoder: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The decoder as if it were on an H100 with driver 580.65.06."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(decoder.backbone, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(facts, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(decoder.sampler, "found", {"sampling": "off: fails here: AssertionError: libcuda.so"})
    return decoder


def test_the_facts_of_a_cpu(decoder):
    found = facts.device_facts(decoder)
    assert found["name"] == "CPU" and found["torch"] == torch.__version__ and "kernels" not in found
    assert device_text(found) == f"CPU, {found['dtype']}, torch {torch.__version__}, capability {found['capability']}"


def test_the_facts_of_a_gpu_say_why_kernels_and_graphs_are_off(on_gpu):
    found = facts.device_facts(on_gpu)
    assert json.loads(json.dumps(found)) == found
    assert (found["name"], found["capability"], found["driver"]) == ("NVIDIA H100 80GB HBM3", "9.0", "580.65.06")
    told = device_text(found)
    assert "kernels sampling off: fails here: AssertionError: libcuda.so" in told and "capability 9.0" in told
    assert told.endswith("graphs off: this model's forwards are not captured: it is split, or runs without the kernels")


def test_graphs_are_off_with_their_reason_once_they_were_stopped(on_gpu):
    runner = on_gpu.target
    graphs = runner.graphs = Graphs(None, torch.device("cpu"))  # type: ignore[arg-type]
    assert on_gpu.graphs == "on"
    graphs._stop("a captured step gave another result")
    assert on_gpu.graphs == "off: a captured step gave another result"


def test_what_workers_started_on_is_in_the_sessions_of_a_run():
    totals = Totals(units=1, rows=1)
    for device in ({"name": "CPU", "dtype": "float32", "torch": "2.13.0"}, {"name": "H100", "dtype": "bfloat16"}, None):
        totals.worker_up("w0", {"device": device})
    store = MemoryStore(secrets.token_hex(8))
    for epoch in (1, 2):
        store.put(f"attempts/epoch-{epoch:04d}-session.jsonl", json.dumps(session_record(totals)).encode())
    assert read_sessions(store).started_on == {"CPU, float32, torch 2.13.0": 2, "H100, bfloat16": 2}


def test_the_facts_say_what_runs_the_layers_of_each_model(on_gpu, monkeypatch):
    found = {"layers_by": "own network", "kernels": {"attention": "off: slow"}}
    drafter = SimpleNamespace(device=torch.device("cuda:0"), captures=False, **found)
    monkeypatch.setattr(on_gpu, "models", [on_gpu.target, SimpleNamespace(backbone=drafter, graphs=None)])
    monkeypatch.setattr(on_gpu.backbone, "layers_by", "transformers' code (kernels are off)", raising=False)
    monkeypatch.setattr(on_gpu.backbone, "kernels", {"attention": "on"}, raising=False)
    told = device_text(facts.device_facts(on_gpu))
    assert "; layers by transformers' code (kernels are off); kernels sampling off: fails here" in told
    assert told.endswith("; drafter: layers by own network, kernels attention off: slow")


def test_the_facts_say_where_int8_has_no_instructions(monkeypatch):
    for one_code, kind in ((False, "int8"), (True, "w8a8")):
        model = torch.nn.Sequential(SmallLinear(torch.ones(8, 16), None, "int8", one_code=one_code))
        backbone = SimpleNamespace(model=model, device=torch.device("cpu"), dtype=torch.float32)
        for adds, more in ((True, ""), (False, " by slower float32 products (no VNNI)")):
            monkeypatch.setattr(facts, "adds_exactly", lambda adds=adds: adds)
            assert facts.small_weights(backbone, 128)["weights"] == kind + more


HALF, SHORT = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtype", "half_s", "found"),
    [
        (HALF, 5.2, {"times_float32": 5.2}),
        (SHORT, 0.5, {}),
        (torch.float32, 9.0, {}),
        (torch.float32, 0.6, {"bfloat16_times": 0.6}),
        (torch.float64, 0.5, {}),
    ],
)
def test_half_precision_is_priced_by_measurement(decoder, monkeypatch, dtype, half_s, found):
    """The clock is a stand-in: a product in float32 takes a second."""
    monkeypatch.setattr(decoder.backbone, "dtype", dtype)
    monkeypatch.setattr(facts, "can_pack", lambda given, _: given != SHORT)
    monkeypatch.setattr(facts, "PackedLinear", lambda *_: None)
    monkeypatch.setattr(facts, "_seconds", lambda product, rows: 1.0 if rows.dtype == torch.float32 else half_s)
    told = facts.device_facts(decoder)
    assert {name: told[name] for name in ("times_float32", "bfloat16_times") if name in told} == found
    monkeypatch.undo()
    assert facts._seconds(torch.nn.Linear(4, 16), torch.ones(2, 4)) > 0
