"""`speculative` with a published draft head: the sequential text whatever the head, and drafts that no neighbour changes."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.heads.published import load_speculator
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import HeadDrafterSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.cuda_graphs import drop_all
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.replaying import use_graphs, use_references
from tests.decoders.support import decode, decoder_settings, ragged_prompts, run_all, texts, token_info

DATA = Path(__file__).parents[2] / "data" / "speculators"
VOCAB = 40
INFO = token_info(VOCAB)
AR = decoder_settings("autoregressive")
DRAFTER = HeadDrafterSettings(kind="head", path="head")
OF_THE_BATCH = {"batch_rows", "pad_fraction", "index"}
HEADS = ("eagle3_llama", "eagle3_qwen3", "dflash", "dflash_anchor", "dspark", "dspark_gated")


def target():
    return load_backbone(DATA / "target", device="cpu")


@cache
def pair(name):
    """A target and a head for it."""
    model = target()
    return model, load_speculator(DATA / name, model)


def spec(k):
    return decoder_settings("speculative", k=k, drafter=DRAFTER)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_autoregressive_one_for_any_slots_and_lengths(name, temperature):
    requests, sampling = ragged_prompts(9, vocab_size=VOCAB), Sampling(temperature=temperature)
    expected = texts(decode(target(), INFO, AR, sampling, requests))
    proposed = accepted = 0
    for k, rows in ((1, 1), (3, 4), (8, 16), ("auto", 3)):
        model, head = pair(name)
        found = decode(model, INFO, spec(k), sampling, requests, rows=rows, drafter=head, heads=head.heads)
        assert texts(found) == expected
        proposed += sum(one.proposed for one in found.values())
        accepted += sum(one.accepted for one in found.values())
    # Random heads are rarely right, and at temperature 0 some never.
    assert proposed > accepted and (accepted > 0 or temperature == 0.0)


@pytest.mark.parametrize("name", ["eagle3_llama", "dflash", "dspark"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("prompt_rows", [None, 7])
def test_prompts_that_are_shared_or_cut_change_no_result(name, acceptance, prompt_rows):
    """Whether a prompt's columns are in place before a sample's first forward depends on the batch; its drafts do not."""
    prompt = np.random.default_rng(5).integers(0, VOCAB, 24)
    requests = [Request(index, index, np.append(prompt, [-1] * 14).astype(np.int32)) for index in range(6)]
    requests += ragged_prompts(3, vocab_size=VOCAB, seed=5, shared=20)[:2]
    requests = [replace(request, index=index) for index, request in enumerate(requests)]
    model, head = pair(name)
    setup = Setup(
        backbone=model,
        info=INFO,
        sampling=Sampling(acceptance=acceptance),
        max_rows=8,
        max_tokens=1 << 20,
        drafter=head,
        heads=head.heads,
        trace=True,
    )
    alone = {one.index: run_all(build_decoder(setup, spec(3)), [one])[one.index] for one in requests}
    together = build_decoder(replace(setup, prompt_rows=prompt_rows), spec(3))
    found = run_all(together, requests)
    assert {index: what_is_exact(one) for index, one in found.items()} == {
        index: what_is_exact(one) for index, one in alone.items()
    }
    assert together.stats.prompt_rows_shared > 0


def what_is_exact(outcome):
    """All fields of an outcome but times and what its batches were."""
    names = [name for name in outcome.__dataclass_fields__ if name not in OF_THE_BATCH and not name.endswith("_s")]
    return {
        name: np.asarray(getattr(outcome, name)).tolist() if name == "tokens" else getattr(outcome, name)
        for name in names
    }


@pytest.mark.parametrize("name", ["eagle3_llama", "dflash", "dspark", "dspark_gated"])
def test_drafts_are_the_choices_of_plain_forwards_of_the_head(name):
    """At temperature 0, over the target's states of all text before the last token; also after drafts that were refused."""
    model, head = pair(name)
    request = Request(0, 1, np.array([5, 6, 7, 8, *[-1] * 32], dtype=np.int32))
    outcome = decode(
        model, INFO, spec(4), Sampling(temperature=0.0), [request], drafter=head, heads=head.heads, trace=True
    )[0]
    prompt, drafted = request.canvas[request.canvas >= 0].tolist(), 0
    for step in outcome.trace[1:]:
        text = [*prompt, *outcome.tokens.tolist()][: step.positions[0]]
        if step.proposed:
            assert step.proposed == plain_drafts(model, head, text, len(step.proposed))
            drafted += len(step.proposed)
    assert drafted > 20 and outcome.nfe_draft >= drafted / 4


def plain_drafts(model, head, text, count):
    """What the head chooses after a text, in an empty cache."""
    n, tokens, config = len(text), torch.tensor(text), head.speculator
    for one in (model, head):
        one.forget()
        one.allocate(1, n + 16)
    model.tap(head)
    model.forward(causal_rows([0], [n - 1], [0], tokens[:-1]))
    if config.kind != "eagle3":
        masks = torch.full((config.block_size - 1,), config.mask_id)
        rows = causal_rows([0], [config.block_size], [n - 1], torch.cat([tokens[-1:], masks]))
        rows = replace(rows, high_IN=torch.full_like(rows.high_IN, n - 1 + config.block_size))
        hidden_BD, first = head.forward(rows), not config.from_anchor
        if not config.markov_rank:
            return head.logits(hidden_BD).argmax(1)[first : count + first].tolist()
        chain = [text[-1]]
        for row in range(first, count + first):
            wide_1D = head.heads.markov(hidden_BD[row : row + 1], prev_RD=head.embed(torch.tensor(chain[-1:])))
            chain.append(int(head.logits(wide_1D).argmax()))
        return chain[1:]
    rows, drafts = causal_rows([0], [n - 1], [0], tokens[1:]), list[int]()
    while len(drafts) < count:
        rows = replace(rows, position_N=rows.position_N + 1, takes_drafts=bool(drafts))
        drafts.append(int(head.logits(head.forward(rows)[-1:]).argmax()))
        rows = causal_rows([0], [1], [n - 2 + len(drafts)], torch.tensor(drafts[-1:]))
    return drafts


@pytest.mark.parametrize("name", ["eagle3_llama", "dflash", "dspark_gated"])
def test_captured_forwards_draft_what_others_draft(name, monkeypatch):
    requests = ragged_prompts(6, vocab_size=VOCAB, seed=6)

    def found():
        model = load_backbone(DATA / "target", dtype="float64", device="cpu")
        setup = Setup(
            backbone=model,
            info=INFO,
            sampling=Sampling(temperature=0.5),
            max_rows=3,
            max_tokens=1 << 20,
            drafter=(head := load_speculator(DATA / name, model)),
            heads=head.heads,
        )
        engine: Any = build_decoder(setup, spec(3))
        outcomes = run_all(engine, requests)
        counts = [(one.nfe, one.nfe_draft, one.accepted) for one in outcomes.values()]
        return texts(outcomes), counts, [one.graphs.num_replayed for one in engine.models if one.graphs is not None]

    drop_all()
    with pytest.MonkeyPatch.context() as patch:
        use_references(patch)
        expected = found()
    use_graphs(monkeypatch, watches=True)
    captured = found()
    drop_all()
    assert captured[:2] == expected[:2]
    # A block whose drafts are drawn one after the other samples nothing in its own forward, and such forwards are not captured.
    assert not expected[2] and len(captured[2]) == 2 and captured[2][0] > 0
    assert captured[2][1] > 0 or name == "dspark_gated"
    assert expected[0] == texts(decode(target(), INFO, AR, Sampling(temperature=0.5), requests))


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "gpt2"])
def test_a_head_reads_models_that_run_by_the_code_of_transformers(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "pad_token_id": None,
    }
    more = {} if family == "gpt2" else {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **sizes, **more, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, requests = load_backbone(tmp_path, device="cpu"), ragged_prompts(4, vocab_size=VOCAB, seed=2)
    head, sampling = load_speculator(DATA / "eagle3_llama", model), Sampling(temperature=0.7)
    expected = decode(model, INFO, AR, sampling, requests)
    found = decode(model, INFO, spec(3), sampling, requests, drafter=head)
    alone = decode(model, INFO, spec(3), sampling, requests, rows=1, drafter=head)
    assert texts(found) == texts(expected) == texts(alone)
    assert sum(one.proposed for one in found.values()) > 10
    assert {index: one.accepted for index, one in found.items()} == {
        index: one.accepted for index, one in alone.items()
    }


def test_a_model_that_is_kept_gives_its_states_to_no_head_of_an_earlier_job():
    model, head = pair("eagle3_llama")
    decode(model, INFO, spec(3), Sampling(), ragged_prompts(2, vocab_size=VOCAB), drafter=head)
    assert model.reader is head
    decode(model, INFO, AR, Sampling(), ragged_prompts(2, vocab_size=VOCAB))
    assert model.reader is None
