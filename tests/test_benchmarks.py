"""The baselines that the benchmarks run beside ours decode what they should: the same greedy text."""

from pathlib import Path

import numpy as np
import torch

from benchmarks.public_causal import PublicCausal
from decoders.base import Request
from decoders.settings import Autoregressive, Sampling
from decoders.stops import Stops
from tests.decoders.causal_models import load, save_random
from tests.decoders.support import decode, texts, token_info

STOP_IDS = (9, 25, 34, 41)


def test_the_loops_of_today_give_the_greedy_text_and_count_their_forwards(tmp_path: Path) -> None:
    for name, seed in (("target", 1), ("assistant", 2)):
        save_random(tmp_path / name, "qwen2", seed=seed, eos_token_id=None, bos_token_id=None)
    rng, requests = np.random.default_rng(0), []
    for index in range(12):
        canvas = rng.integers(1, 61, 4 + index).astype(np.int32)
        canvas[int(rng.integers(1, len(canvas))) :] = -1
        requests.append(Request(index, index, np.append(canvas, np.full(9, -1, dtype=np.int32))))
    info, stops = token_info(61), Stops(ids=STOP_IDS)
    settings, greedy = Autoregressive(kind="autoregressive"), Sampling(temperature=0.0)
    expected = decode(load(tmp_path / "target"), info, settings, greedy, requests, stops=stops)
    assert {outcome.finish for outcome in expected.values()} == {"length", "eos"}
    loops = PublicCausal(tmp_path / "target", tmp_path / "assistant", device="cpu", dtype=torch.float32)
    loops.stop_ids = list(STOP_IDS)
    found = {
        "alone": loops.generate(requests, rows=1),
        "batches": loops.generate(requests, rows=5),
        "assisted": loops.assisted(requests, num_drafts=3),
        "as it comes": loops.assisted(requests),
        "look-up": loops.lookup(requests, num_drafts=3),
        "jacobi": loops.jacobi(requests, block_size=4),
    }
    for result in found.values():
        assert result.tokens == texts(expected)
    assert found["alone"].forwards == found["alone"].count > found["batches"].forwards > 0
    assert 0 < found["look-up"].forwards <= found["look-up"].count
    # A prefill and at least one token in each forward after it; a block may go on behind a sample's end.
    assert found["jacobi"].forwards <= found["jacobi"].count + len(requests)
