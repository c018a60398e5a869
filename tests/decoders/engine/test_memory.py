"""Slots within the memory that there is: allocation by need, growth that fails half way, logits in parts, bounded noise."""

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.cache import SlotCache
from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine import memory, model_runner
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.memory import MemoryPlan
from draftmill.decoders.engine.model_runner import ModelRunner
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.samples import SlotTable
from draftmill.decoders.engine.setup import Setup
from tests.decoders.causal.jacobi_settings import jacobi, multi
from tests.decoders.references.table import TableBackbone
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode, decoder_settings, engine, run_all, texts, token_info, toy_prompts

VOCAB, LENGTH = 3, 7
INFO = token_info(VOCAB)
AR = decoder_settings("autoregressive")


class Cached(TokenTable):
    """A toy whose cache is counted as a real one's: `cell_bytes` a column, and it can be made smaller."""

    cell_bytes, row_bytes = 100, 10

    def __init__(self, **more) -> None:
        super().__init__(vocab_size=VOCAB, num_positions=LENGTH, **more)
        self.shapes: list[tuple[int, int]] = []

    def allocate(self, num_slots: int, num_columns: int) -> None:
        super().allocate(num_slots, num_columns)
        self.shapes.append((self.tokens_SW.shape[0], self.tokens_SW.shape[1]))

    def resize(self, num_slots: int, num_columns: int) -> None:
        tokens, positions = self.tokens_SW, self.positions_SW
        self.tokens_SW, self.positions_SW = (torch.zeros(0, 0, dtype=torch.int64) for _ in range(2))
        super().allocate(num_slots, num_columns)
        both = min(num_slots, tokens.shape[0]), min(num_columns, tokens.shape[1])
        self.tokens_SW[: both[0], : both[1]] = tokens[: both[0], : both[1]]
        self.positions_SW[: both[0], : both[1]] = positions[: both[0], : both[1]]
        self.shapes.append((num_slots, num_columns))


def finish(decoder) -> None:
    while decoder.active:
        decoder.step()


def prompt(index: int, length: int) -> Request:
    return Request(index, index, np.array([1] + [HOLE] * (length - 1), dtype=np.int32))


@pytest.mark.parametrize("gib", [1, 8, 80])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_purposes_together_take_no_more_than_is_free(device, gib):
    free = gib << 30
    plan = MemoryPlan.of(torch.device(device), free, row_bytes=10**5)
    assert plan.slots is not None and plan.prompt_rows is not None
    assert plan.slots > free // 2, "most of it is for slots"
    assert plan.slots + 8 * plan.logits + plan.noise + plan.prompt_rows * 10**5 <= free * 9 // 10


def test_graphs_take_memory_of_their_own_and_only_a_cpu_keeps_noise():
    device, free = torch.device("cuda"), 80 << 30
    plain, captured = (MemoryPlan.of(device, free, row_bytes=10**5, captures=captures) for captures in (False, True))
    assert plain.slots is not None and captured.slots is not None
    assert plain.slots - captured.slots == 8 * plain.logits
    assert (plain.noise, MemoryPlan.of(torch.device("cpu"), free, row_bytes=1).noise) == (0, 256 << 20)


def test_an_8b_model_on_an_80_gib_card_gets_the_slots_that_fit_instead_of_69_gb():
    cache = SlotCache(32, 8, 128, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.cell_bytes == 32 * 2 * 8 * 128 * 2 + 8
    free = (80 << 30) - 2 * 8_000_000_000
    plan = MemoryPlan.of(torch.device("cuda"), free, row_bytes=(8 * 4096 + 3 * 14336) * 2)
    assert plan.slots is not None
    assert 256 * 2048 * cache.cell_bytes > 68e9 > plan.slots
    assert 100 < plan.slots // (2048 * cache.cell_bytes) < 256


def runner_of(*, vocab: int = VOCAB, plan: MemoryPlan = MemoryPlan(1 << 20, 1 << 20)):  # noqa: B008
    info = ModelInfo("table", vocab, None, None, "any_subset", 0)
    backbone = TableBackbone(vocab_size=2, num_positions=2)
    sampling = Sampling(acceptance="rejection")
    setup = Setup(backbone=backbone, info=info, sampling=sampling, max_rows=4, max_tokens=100)
    algorithm = Algorithm(decode=iter, window=5, keeps_laws=True)
    sampler = Sampler(setup, algorithm, SlotTable(sampling, 4), plan)
    return ModelRunner(setup, algorithm, sampler, is_target=True, hides_host=False)


def test_parts_cover_all_rows_once_and_are_no_smaller_than_the_least_product():
    wide, narrow = (runner_of(vocab=vocab, plan=MemoryPlan(2000, 0)) for vocab in (50, 2))
    for num_rows in (0, 1, 63, 64, 65, 1000):
        parts = list(wide.parts(num_rows))
        assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
        assert parts and all(part.stop - part.start == 64 for part in parts)
    assert [part.stop for part in narrow.parts(300)] == [125, 250, 375], "of 16 bytes a row"
    assert [part.stop for part in narrow.parts(300, by_kernel=True)] == [250, 500], "without copies"


def test_a_cache_has_no_more_slots_than_samples_and_a_few_ahead():
    table = Cached()
    decoder = engine(table, INFO, AR, rows=1000)
    decoder.admit([prompt(0, 5)])
    assert table.tokens_SW.shape[0] <= 8
    decoder.admit([prompt(index, 5) for index in range(1, 40)])
    assert 40 <= table.tokens_SW.shape[0] <= 60


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [AR, jacobi(3), multi(2, 2, pool=8)], ids=str)
@pytest.mark.parametrize("max_tokens", [7, 30, 100])
def test_slots_times_columns_stay_within_max_tokens_in_what_is_allocated(settings, max_tokens):
    table = Cached(seed=3)
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH, seed=5)
    expected = decode(TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3), INFO, AR, Sampling(), requests)
    decoder = engine(table, INFO, settings, rows=9, max_tokens=max_tokens)
    outcomes = run_all(decoder, requests)
    assert texts(outcomes) == texts(expected)
    alone = decoder.columns(LENGTH)
    assert table.shapes and max(slots * columns for slots, columns in table.shapes) <= max(max_tokens, alone)


def test_columns_that_nobody_needs_any_more_are_given_up_for_slots():
    table = Cached()
    decoder = engine(table, INFO, AR, rows=50, max_tokens=28)
    decoder.admit([prompt(0, 7)])
    assert decoder.room(7) == 3 and decoder.room(2) == 3
    finish(decoder)
    room = [decoder.room(2)]
    decoder.admit([prompt(index, 2) for index in range(14)])
    assert tuple(table.tokens_SW.shape) == (14, 2)
    finish(decoder)
    assert [*room, decoder.room(7)] == [14, 4]
    decoder.admit([prompt(0, 7)])
    assert table.tokens_SW.numel() <= 28


def test_a_canvas_that_would_cost_the_highest_slot_waits_for_its_sample():
    table = Cached()
    decoder = engine(table, INFO, AR, rows=50, max_tokens=28)
    decoder.admit([*(prompt(index, 3) for index in range(6)), prompt(6, 4)])
    while decoder.active > 1:
        assert decoder.room(7) == 0, "four slots of seven columns"
        decoder.step()
    assert [sample.slot for sample in decoder.samples] == [6] and decoder.room(7) == 0 and decoder.room(4) == 6
    finish(decoder)
    assert decoder.room(7) == 4
    assert run_all(decoder, [prompt(7, 7)])[7].error_kind is None
    assert all(slots * columns <= 28 for slots, columns in table.shapes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [AR, jacobi(3), multi(2, 2, pool=8)], ids=str)
def test_texts_are_the_same_in_whatever_memory_there_is(settings):
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=9)
    expected = texts(decode(Cached(), INFO, AR, Sampling(), requests))
    for num_bytes in (6_000, 20_000, 100_000):
        table = Cached()
        decoder = engine(table, INFO, settings, rows=50)
        decoder.fit(num_bytes)
        assert decoder.plan.slots is not None
        outcomes = run_all(decoder, requests)
        assert texts(outcomes) == expected
        largest = max(slots * columns for slots, columns in table.shapes)
        assert largest * table.cell_bytes <= decoder.plan.slots < num_bytes
        assert decoder.room(LENGTH) == decoder.most_rows(LENGTH) <= 50


def test_a_sample_that_can_not_fit_fails_by_name_and_the_next_one_is_decoded():
    table = Cached()
    decoder = engine(table, INFO, AR, rows=50)
    decoder.fit(1_100)
    assert decoder.most_rows(7) == 0 and decoder.most_rows(2) > 0
    assert decoder.room(7) == 1, "it has to be admitted to fail"
    with pytest.raises(MemoryError, match=r"a canvas of 7 tokens does not fit into memory: .* bytes"):
        decoder.admit([prompt(0, 7)])
    decoder.clear()
    outcomes = run_all(decoder, [prompt(1, 2)])
    assert len(outcomes[1].tokens) == 1


def test_what_is_kept_for_a_draft_counts():
    info = ModelInfo("table", 1000, None, None, "any_subset", 0)
    one, backbone = {}, TableBackbone(vocab_size=3, num_positions=3)
    acceptances: tuple = ("coupled", "rejection")
    for acceptance in acceptances:
        decoder = engine(
            backbone, info, decoder_settings("assd", k=5), Sampling(acceptance=acceptance), rows=4, max_tokens=100
        )
        one[acceptance] = decoder.slot_bytes(10)
    assert one["rejection"] - one["coupled"] == 2 * 5 * (backbone.width + 1) * 8


def test_the_nodes_of_a_self_speculative_decoder_count_as_slots_of_their_own():
    settings = decoder_settings("ssd", draft_length=3)
    info = ModelInfo("table", 3, 2, None, "masked", 0, (2,))
    decoder = engine(Cached(), info, settings, rows=50)
    assert decoder.slot_bytes(decoder.columns(7)) == 4 * 7 * (Cached.cell_bytes + Cached.row_bytes)
    decoder.fit(100_000)
    decoder.admit([Request(0, 0, np.full(7, HOLE, dtype=np.int32))])
    cells = decoder.backbone.tokens_SW.numel()
    assert decoder.plan.slots is not None and cells * Cached.cell_bytes <= decoder.plan.slots


def test_prompts_that_do_not_fit_one_forward_go_into_several(monkeypatch):
    table = Cached()
    widths: list[int] = []
    forward = table.forward

    def counted(rows) -> torch.Tensor:
        widths.append(len(rows.slots_G))
        return forward(rows)

    monkeypatch.setattr(table, "forward", counted)
    decoder = engine(table, INFO, AR, rows=9)
    decoder.plan = MemoryPlan(logits=1 << 20, noise=1 << 20, slots=1 << 20, prompt_rows=2)
    requests = [prompt(index, 5) for index in range(5)]
    decoder.admit(requests)
    done = [outcome for _ in range(12) for outcome in decoder.step()]
    assert widths[:3] == [2, 2, 5] and len(done) == 5, "the last prompt goes along with the others' next rows"
    assert {outcome.nfe for outcome in done} == {4}


def filled() -> SlotCache:
    cache = SlotCache(3, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    cache.resize(2, 5)
    for index, layer in enumerate(cache.layers_2SKWd):
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + index)
    cache.positions_SW.copy_(torch.arange(10).view(2, 5))
    return cache


@pytest.mark.parametrize("failing", range(4))
def test_a_cache_that_runs_out_of_memory_half_way_is_empty_and_can_be_used(failing, monkeypatch):
    cache, calls = filled(), []
    zeros = torch.Tensor.new_zeros

    def refuse(tensor: torch.Tensor, *shape, **more) -> torch.Tensor:
        calls.append(shape)
        if len(calls) == failing + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(tensor, *shape, **more)

    monkeypatch.setattr(torch.Tensor, "new_zeros", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        cache.resize(4, 9)
    assert (cache.num_slots, cache.num_columns) == (0, 0)
    cache.resize(4, 9)
    assert all(layer.shape == (2, 4, 2, 9, 4) and not layer.any() for layer in cache.layers_2SKWd)


def test_a_cache_that_is_made_larger_keeps_its_content():
    cache = filled()
    before = [layer.clone() for layer in cache.layers_2SKWd]
    cache.resize(4, 9)
    assert (cache.num_slots, cache.num_columns) == (4, 9)
    for layer, old in zip(cache.layers_2SKWd, before, strict=True):
        assert torch.equal(layer[:, :2, :, :5], old) and int((layer != 0).sum()) == int((old != 0).sum())
    assert torch.equal(cache.positions_SW[:2, :5], torch.arange(10).view(2, 5))


def test_a_cache_that_is_made_smaller_keeps_what_lies_within(monkeypatch):
    cache = filled()
    before = [layer.clone() for layer in cache.layers_2SKWd]
    cache.resize(1, 3)
    assert all(torch.equal(a, b[:, :1, :, :3]) for a, b in zip(cache.layers_2SKWd, before, strict=True))
    cache.resize(0, 0)
    assert sum(layer.numel() for layer in cache.layers_2SKWd) == cache.positions_SW.numel() == 0


def test_kept_drafts_that_run_out_of_memory_half_way_are_what_they_were(monkeypatch):
    held, zeros, made = runner_of()._sampler, torch.Tensor.new_zeros, list[int]()
    held.resize(1)
    before = held._states_CD, held._log_q_C
    assert [len(one) for one in before] == [6, 6]

    def refuse(tensor: torch.Tensor, *shape, **more) -> torch.Tensor:
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError("full")
        return zeros(tensor, *shape, **more)

    monkeypatch.setattr(torch.Tensor, "new_zeros", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        held.resize(3)
    assert (held._states_CD, held._log_q_C) == before
    held.resize(3)
    assert [len(one) for one in (held._states_CD, held._log_q_C)] == [16, 16]


def test_what_a_decoder_held_is_freed_although_memory_ran_out_half_way(monkeypatch):
    table = Cached()
    decoder = engine(table, INFO, AR, rows=50)
    decoder.admit([prompt(index, 5) for index in range(10)])
    held = tuple(table.tokens_SW.shape)
    monkeypatch.setattr(table, "resize", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        decoder.admit([prompt(index, 5) for index in range(10, 40)])
    assert tuple(table.tokens_SW.shape) == held and held[0] >= 10
    monkeypatch.undo()
    assert len(decoder.clear()) == 10
    assert table.tokens_SW.numel() == 0
    assert len(run_all(decoder, [prompt(0, 5)])[0].tokens) == 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_window_that_is_judged_in_parts_is_judged_the_same(acceptance, temperature, monkeypatch):
    sampling = Sampling(acceptance=acceptance, temperature=temperature, top_p=0.9)
    settings = [jacobi(3), multi(2, 2, pool=8)] if acceptance == "coupled" else []
    settings += [decoder_settings("speculative", k=3, drafter={"kind": "ngram"})]
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=13)

    def found(setting):
        outcomes = decode(Cached(seed=2), INFO, setting, sampling, requests, rows=6)
        return {i: (o.tokens.tolist(), o.logprob, o.nfe, o.proposed, o.accepted) for i, o in outcomes.items()}

    whole = [found(setting) for setting in settings]
    monkeypatch.setattr(model_runner, "_LEAST_ROWS", 1)
    monkeypatch.setattr(memory, "_CPU_LOGITS", 2 * VOCAB * 8)
    assert [found(setting) for setting in settings] == whole


def test_no_more_logits_than_the_bound_are_ever_held(monkeypatch):
    table, held = Cached(), list[int]()
    logits = table.logits

    def counted(hidden_RD: torch.Tensor) -> torch.Tensor:
        held.append(len(hidden_RD))
        return logits(hidden_RD)

    monkeypatch.setattr(table, "logits", counted)
    monkeypatch.setattr(model_runner, "_LEAST_ROWS", 1)
    monkeypatch.setattr(memory, "_CPU_LOGITS", 4 * VOCAB * 8)
    run_all(
        engine(table, INFO, jacobi(5), rows=20),
        toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=17),
    )
    assert max(held) == 4


def test_noise_never_takes_more_than_its_bytes():
    table = Cached()
    decoder = engine(table, INFO, jacobi(4), rows=50)
    decoder.fit(20_000)
    run_all(decoder, toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=17))
    decoder.admit([prompt(index, 3) for index in range(decoder.room(3))])
    noise = decoder.sampler._noise
    assert len(noise._held_SC) < len(decoder.samples), "some slots keep none"
    assert 0 < noise._noise_CV.numel() * 4 <= decoder.plan.noise == 20_000 // 16


def filled_pool(num_slots: int, num_columns: int) -> SlotCache:
    """A pooled cache of 100 cells whose columns hold their own numbers."""
    cache = SlotCache(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"), pooled=True)
    cache.reserve(100)
    cache.resize(num_slots, num_columns)
    for slot, column in np.ndindex(num_slots, num_columns):
        starts, cells = cache.cells(torch.tensor([slot]), torch.tensor([column]))
        assert starts.tolist() == [slot * num_columns]
        cache.positions_SW[0, cells] = 100 * slot + column
        for layer in range(2):
            cache.write(layer, cells, torch.full((1, 6, 4), 1000.0 * layer + 100 * slot + column))
    return cache


@pytest.mark.parametrize(("slots", "columns"), [(5, 20), (3, 30), (8, 7), (2, 12), (9, 12)])
def test_a_pool_shows_its_content_in_another_shape_without_moving(slots, columns):
    cache = filled_pool(4, 12)
    places = [pool.data_ptr() for pool in cache.pools_2CKd]
    fits = slots * columns <= 100
    assert cache.stays(slots, columns) == (fits and slots <= 4), "the table of slots grows, too"
    assert not cache.stays(0, 0)
    cache.resize(slots, columns)
    assert ([pool.data_ptr() for pool in cache.pools_2CKd] == places) == fits
    for slot, column in np.ndindex(min(slots, 4), min(columns, 12)):
        _, cell = cache.cells(torch.tensor([slot]), torch.tensor([column]))
        assert cache.positions_SW[0, cell].tolist() == [100 * slot + column]
        for layer in range(2):
            assert (cache.pools_2CKd[layer][:, cell] == 1000 * layer + 100 * slot + column).all()
    assert torch.equal(cache.cells(torch.tensor([1]), torch.tensor([3]))[1], torch.tensor([columns + 3]))
    cache.reserve(1000)
    assert cache.pools_2CKd[0].shape[1] == max(100, slots * columns) + 1, "a pool that holds something stays"
    cache.resize(0, 0)
    assert not cache.pools_2CKd[0].numel() and cache.positions_SW.shape == (0, 0)


def test_slots_that_were_placed_are_laid_out_side_by_side_again():
    """Two engines in turn may use a model: slots as wide as their canvases, and equally wide ones."""
    cache = filled_pool(3, 10)
    cache.spread(3, 10)
    for slot, start in enumerate((40, 0, 20)):
        cache.place(slot, start, 10)
        places = torch.arange(start, start + 10)
        cache.positions_SW[0, places] = 100 * slot + torch.arange(10)
    cache.resize(3, 10)
    for slot in range(3):
        _, cells = cache.cells(torch.full((10,), slot), torch.arange(10))
        assert cells.tolist() == list(range(10 * slot, 10 * slot + 10))
        assert cache.positions_SW[0, cells].tolist() == list(range(100 * slot, 100 * slot + 10))
