"""Benchmarks: the baselines decode the same greedy text, and the simulated cluster gives the last units to fast workers."""

import csv
from collections import deque

import numpy as np
import pytest
import torch

from benchmarks import block_diffusion
from benchmarks.block_diffusion import ONE, TWO
from benchmarks.block_runs import decoders_of, load, measure, one_by_one, quality
from benchmarks.cluster import LOAD_S, Machine, lower_bound, simulate
from benchmarks.public_causal import PublicCausal
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.backbones import causal_models
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.support import decode, engine, prompts, run_all, texts, token_info

STOP_IDS = (9, 25, 34, 41)


@pytest.mark.slow
def test_the_loops_of_today_give_the_greedy_text_and_count_their_forwards(tmp_path):
    for name, seed in (("target", 1), ("assistant", 2)):
        save_random(tmp_path / name, "qwen2", seed=seed, eos_token_id=None, bos_token_id=None)
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(1, 4 + index)), 13 + index) for index in range(12)]
    requests = prompts(lengths, vocab_size=61, least=1)
    info, stops = token_info(61), Stops(ids=STOP_IDS)
    settings, greedy = AutoregressiveSettings(kind="autoregressive"), Sampling(temperature=0.0)
    expected = decode(causal_models.load(tmp_path / "target"), info, settings, greedy, requests, stops=stops)
    assert {outcome.finish for outcome in expected.values()} == {"length", "eos"}
    loops = PublicCausal(tmp_path / "target", tmp_path / "assistant", device="cpu", dtype=torch.float32)
    loops.stop_ids = list(STOP_IDS)
    found = {
        "alone": loops.generate(requests, rows=1),
        "batches": loops.generate(requests, rows=5),
        "assisted": loops.with_assistant(requests, num_drafts=3),
        "as it comes": loops.with_assistant(requests),
        "look-up": loops.lookup(requests, num_drafts=3),
        "jacobi": loops.jacobi(requests, block_size=4),
    }
    for result in found.values():
        assert result.tokens == texts(expected)
    assert found["alone"].forwards == found["alone"].count > found["batches"].forwards > 0
    assert 0 < found["look-up"].forwards <= found["look-up"].count
    # A prefill and at least one token in each forward after it; a block may go on behind a sample's end.
    assert found["jacobi"].forwards <= found["jacobi"].count + len(requests)


def block_requests(count: int, *, new: int) -> list[Request]:
    """Completions of random prompts of 1 to 2 * count tokens."""
    return prompts([(length, length + new) for length in range(1, 2 * count, 2)], vocab_size=90, seed=1, least=1)


@pytest.mark.slow
def test_the_block_diffusion_loop_of_today_gives_the_text_of_ours_and_one_commit_more(golden):
    folder, requests = golden / "sdar", block_requests(6, new=9)
    flags = block_diffusion.parse(["--model", str(folder), "--device", "cpu", "--taus", "0.6"])
    bench = block_diffusion.bench_of(flags, requests, None)
    for name, size, theirs, settings in block_diffusion._pairs(bench, requests):
        ours = measure(bench.model, settings, requests, rows=4, temperature=0.0)
        assert ours.texts == theirs.tokens, (name, size)
        # It fills the last block to its end, and commits it though nothing follows.
        assert 0 < theirs.forwards - ours.nfe <= len(requests) * (1 + size)


def test_a_text_is_worth_what_block_size_1_says_of_it_token_by_token(golden):
    model, requests = load(golden / "sdar", "cpu", decoder="s2d2"), block_requests(3, new=7)
    law = measure(model, one_by_one(fused=False), requests, rows=2, temperature=0.0)
    assert quality(model, requests, law.texts).agreement == 1.0
    drawn = run_all(engine(model.backbone, model.info, one_by_one(fused=False), rows=2), requests)
    found = quality(model, requests, texts(drawn))
    logprobs = [outcome.logprob for outcome in drawn.values()]
    assert found.nats == pytest.approx(-sum(value for value in logprobs if value is not None) / 21, abs=1e-4)
    assert found.agreement < 1.0


@pytest.mark.slow
def test_the_block_diffusion_benchmark_prints_its_tables_and_writes_its_points(golden, tmp_path, capsys):
    command = f"--quick --temperatures 0 --device cpu --model {golden / 'sdar'} --points {tmp_path / 'points.csv'}"
    flags = block_diffusion.parse(command.split())
    block_diffusion.run(block_diffusion.bench_of(flags, block_requests(3, new=6), None), flags)
    lines = capsys.readouterr().out.splitlines()
    tables = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert len({len(cells) for cells in tables}) == 2, "rows as long as their headers"
    lossless = [
        cells for cells in tables if cells[0] in {"| s2d2, always", "| s2d2, always, fused", f"| {TWO}", f"| {ONE}"}
    ]
    assert len(lossless) == 6 and all(cells[-1] == "100% |" for cells in lossless)
    points = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert len(points) == 2 + len(decoders_of(4, flags.taus))
    assert {point["decoder"] for point in points} == {TWO, ONE, *decoders_of(4, flags.taus)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_fifty_unequal_and_failing_workers_end_at_about_the_same_time(seed):
    found = simulate(50, 100_000, 64, seed)
    assert found["committed"] == list(range(found["units"])), "every unit once"
    assert 1.0 <= found["makespan_s"] / found["bound_s"] <= 1.03


def test_the_lower_bound_is_what_the_machines_can_do_at_best():
    steady = [Machine(speed, 0.0, deque(), np.inf, np.inf) for speed in (100.0, 300.0)]
    assert lower_bound(steady, 4000) == pytest.approx(LOAD_S + 10)
    late = Machine(100.0, 5.0, deque(), np.inf, np.inf)
    assert lower_bound([steady[1], late], 4000) == pytest.approx(LOAD_S + 5 + (4000 - 1500) / 400)
    failing = Machine(100.0, 0.0, deque([LOAD_S + 10]), np.inf, np.inf)  # it is up again 60 s later
    assert lower_bound([failing], 1500) == pytest.approx(LOAD_S + 10 + LOAD_S + 5)
    leaving = Machine(300.0, 0.0, deque(), np.inf, LOAD_S + 2)
    assert lower_bound([steady[0], leaving], 1600) == pytest.approx(LOAD_S + 10)
