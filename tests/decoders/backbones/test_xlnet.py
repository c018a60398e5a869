"""Our two-stream attention against transformers' on random weights, and ASSD's public code on a tiny checkpoint, reproduced.

Deliberate differences, none of which these cases can show: the mask's probability is removed before the softmax, not after
it (here it is e-30); a window of one draft needs no verification (the public code does the same only at the last token).
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import XLNetConfig, XLNetLMHeadModel

from draftmill.decoders.any_subset.settings import AnySubsetSettings, AssdSettings
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.xlnet import xlnet_rules
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.sampling import inverse_cdf_draw
from draftmill.decoders.engine.samples import decoding_order
from draftmill.decoders.engine.setup import Setup
from tests.decoders.backbones.config_changes import GONE, change_config
from tests.decoders.enumeration import decoded, engine_of
from tests.decoders.references.any_subset import PlainModel
from tests.decoders.support import decode, decoder_settings

SMALL: dict = {
    "vocab_size": 61,
    "d_model": 24,
    "n_layer": 3,
    "n_head": 3,
    "d_inner": 40,
    "ff_activation": "gelu",
}


def save_random(folder, *, seed=0, std=0.25, **changes):
    torch.manual_seed(seed)
    config = XLNetConfig(**(SMALL | {"attn_type": "bi"} | changes))
    model = XLNetLMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def theirs(model, tokens, order, num_prompt, queries):
    """Logits of (rank, limit) queries by transformers' own masks; tokens in rank order, unknown ones as 0."""
    length = len(order)
    rank = torch.empty(length, dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(length)
    known = torch.zeros(length, dtype=torch.int64)
    known[torch.tensor(order[: len(tokens)])] = torch.tensor(tokens)
    rows = []
    for query, limit in queries:
        seen = torch.where(rank < limit, rank, length)
        mask = (rank[:, None] <= seen[None, :]) | (seen[None, :] >= limit)
        prompt = rank < num_prompt
        mask[prompt[:, None] & prompt[None, :]] = False
        mapping = torch.zeros(1, 1, length)
        mapping[0, 0, order[query]] = 1.0
        # Only the query's own row of the mask tells what it sees.
        mask[order[query]] = seen >= limit
        with torch.no_grad():
            logits = model(known[None], perm_mask=mask[None].float(), target_mapping=mapping, use_mems=False).logits
        rows.append(logits[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [{}, {"ff_activation": "relu"}, {"clamp_len": 4}, {"n_head": 2, "n_layer": 1}, {"untie_r": False}],
    ids=str,
)
@pytest.mark.slow
def test_logits_agree_with_transformers_to_1e_5(tmp_path, changes):
    model = save_random(tmp_path, **changes)
    backbone = load_backbone(tmp_path, device="cpu")
    rng = np.random.default_rng(0)
    for length, num_prompt in ((1, 1), (9, 4), (17, 1), (40, 20)):
        order = rng.permutation(length).tolist()
        tokens = rng.integers(0, 61, length).tolist()
        plain = PlainModel(backbone, order=order, num_prompt=num_prompt, sampling=Sampling())
        ranks = range(num_prompt, length)
        queries = [(rank, rank) for rank in ranks] + [(rank, num_prompt) for rank in ranks]
        queries += [(rank, max(num_prompt, rank - 3)) for rank in ranks]
        if not queries:
            continue
        ours = backbone.logits(plain.hidden(tokens, queries))
        torch.testing.assert_close(ours, theirs(model, tokens, order, num_prompt, queries), atol=1e-5, rtol=1e-5)


def test_the_first_query_of_an_empty_prompt_sees_nothing(tmp_path):
    save_random(tmp_path)
    backbone = load_backbone(tmp_path, device="cpu")
    plain = PlainModel(backbone, order=[2, 0, 1], num_prompt=0, sampling=Sampling())
    blind = plain.hidden([], [(0, 0)])
    # The same whatever stands in the columns it must not see.
    for tokens in ([3], [3, 9], [5, 60, 1]):
        torch.testing.assert_close(plain.hidden(tokens, [(0, 0)]), blind, atol=1e-6, rtol=1e-6)
        seen = plain.hidden(tokens, [(1, 1)])
        assert not torch.allclose(seen, plain.hidden([tokens[0] + 1], [(1, 1)]), atol=1e-3)
    assert torch.isfinite(blind).all()


def test_the_shape_rules_hold_on_this_machine():
    rules = xlnet_rules((24, 24, 40, 61), 3, torch.float32, torch.get_num_threads())
    assert rules.exact, "no rule makes float32 rows independent of their batch on this machine"


DEFAULTS = ("d_head", "clamp_len", "layer_norm_eps", "ff_activation", "attn_type", "bi_data", "tie_word_embeddings")


def test_fields_that_an_xlnet_leaves_out_have_the_values_of_transformers(tmp_path):
    save_random(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, dict.fromkeys(DEFAULTS, GONE))
    check = find_family(full, "auto").shape
    assert check(json.loads((tmp_path / "config.json").read_text())) == check(full)
    load_backbone(tmp_path, device="cpu")


def test_an_untied_xlnet_needs_its_output_layer(tmp_path):
    save_random(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_loss.weight")
    backbone: Any = load_backbone(tmp_path, device="cpu")
    torch.testing.assert_close(backbone.output_VD, head)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the tensors lm_loss\.weight"):
        inspect_model(tmp_path)


def test_damaged_or_missing_weights_are_a_clear_error(tmp_path):
    save_random(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        inspect_model(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="only safetensors checkpoints are read"):
        inspect_model(tmp_path)


def test_an_order_is_prompt_first_then_holes_from_left_to_right():
    order, num_prompt = decoding_order(np.array([-1, 5, -1, 6], dtype=np.int32))
    assert (order.tolist(), num_prompt) == ([1, 3, 0, 2], 2)


MASK = 6
VARIANTS: list[dict] = [{}, {"drafter": "ngram"}, {"fused": "rows"}, {"fused": "rows", "rows": "ends"}]


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "xlnet_asarm"


@pytest.fixture(scope="module")
def cases(folder):
    return json.loads((folder / "cases.json").read_text())


@pytest.fixture(scope="module")
def arrays(folder):
    return load_file(folder / "arrays.safetensors")


def order_of(case):
    return np.argsort(np.array(case["sigma"])).tolist()


def canvas_of(case):
    canvas = np.array(case["input_ids"], dtype=np.int32)
    canvas[order_of(case)[case["start"] :]] = -1
    return canvas


def request_of(case, index=0, key=0):
    return Request(index, key, canvas_of(case), np.array(order_of(case)[case["start"] :], dtype=np.int64))


def plain_model(folder, case, **sampling):
    backbone = load_backbone(folder, device="cpu")
    order, start = order_of(case), case["start"]
    model = PlainModel(backbone, order=order, num_prompt=start, sampling=Sampling(**sampling), suppressed=[MASK])
    return model, [case["input_ids"][position] for position in order[:start]]


def log_probs(model, tokens, queries):
    return torch.log_softmax(model.backbone.logits(model.hidden(tokens, queries)), -1)


def test_drafts_and_densities_agree_with_the_public_code(folder, cases, arrays):
    for case in cases["cases"]:
        model, _ = plain_model(folder, case)
        order, length = order_of(case), len(case["sigma"])
        by_rank = lambda sequence, order=order: [sequence[position] for position in order]  # noqa: E731
        for draft in case["draft"]:
            n, expected = draft["n"], arrays[draft["log_probs"]["array"]]
            found = log_probs(model, by_rank(draft["sequence"])[:n], [(rank, n) for rank in range(n, length)])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for density in case["oracle"]:
            tokens, ranks = by_rank(density["sequence"]), range(case["start"], length)
            found = log_probs(model, tokens, [(rank, rank) for rank in ranks])
            torch.testing.assert_close(found, arrays[density["log_probs"]["array"]], atol=1e-5, rtol=1e-5)
            own = [float(found[row, tokens[rank]]) for row, rank in enumerate(ranks)]
            assert own == pytest.approx(density["token_log_density"], abs=1e-5)


def test_greedy_infills_are_those_of_the_public_code_for_every_decoder(folder, cases):
    backbone, info = load_backbone(folder, device="cpu"), inspect_model(folder)
    requests = [request_of(case, index) for index, case in enumerate(cases["cases"])]
    tried: list[AnySubsetSettings | AssdSettings] = [
        decoder_settings("any_subset"),
        *(decoder_settings("assd", k=3, **v) for v in VARIANTS),
    ]
    for settings in tried:
        for acceptance in ("coupled", "rejection"):
            sampling = Sampling(temperature=0.0, acceptance=acceptance)
            outcomes = decode(backbone, info, settings, sampling, requests, rows=3)
            for index, case in enumerate(cases["cases"]):
                output = np.array(case["greedy_sequential"]["output"])
                holes = np.flatnonzero(canvas_of(case) < 0)
                assert outcomes[index].tokens.tolist() == output[holes].tolist()
                if settings.kind == "any_subset":
                    assert outcomes[index].nfe == case["greedy_sequential"]["nfe"]


class Replay:
    """Answers with the recorded uniforms, in order, and checks what each is for.

    The public code also tests the first self-draft, whose ratio is 1; our decoder knows that it holds.
    """

    def __init__(self, uniforms, uses):
        self._left = list(zip(uniforms, uses, strict=True))
        self._is_sure, self._judged = False, -1

    def _next(self, *uses):
        uniform, use = self._left.pop(0)
        assert use in uses, f"the public code used this number for {use}, we for {uses}"
        return uniform

    def choose(self, log_law, purpose, position, when):
        self._is_sure = self._is_sure or purpose == keys.DRAFT
        uniform = torch.tensor([self._next("sample")], dtype=torch.float64)
        return int(inverse_cdf_draw(log_law.exp().unsqueeze(0), uniform))

    def accept(self, probability, position, when):
        if self._is_sure and when != self._judged:
            self._next("accept")
        self._is_sure, self._judged = False, when
        return self._next("accept") < probability

    @property
    def used_up(self):
        return not self._left


def replayed(folder, case, chooser, **settings):
    """The outcome of the decoder itself, on the engine, with recorded numbers for its choices; tokens by position."""
    setup = Setup(
        backbone=load_backbone(folder, device="cpu"),
        info=inspect_model(folder),
        sampling=Sampling(acceptance="rejection"),
        max_rows=1,
        max_tokens=1 << 20,
    )
    request = request_of(case)
    outcome = decoded(engine_of(setup, decoder_settings("assd", **settings), {0: chooser}), [request])[0]
    canvas = request.canvas.copy()
    canvas[canvas < 0] = outcome.tokens
    return canvas.tolist(), outcome.nfe


@pytest.mark.slow
def test_self_drafted_assd_replays_the_public_code_number_by_number(folder, cases):
    replays = 0
    for case in cases["cases"]:
        for replay in case["assd_replay"]:
            chooser = Replay(replay["uniforms"], replay["uniform_use"])
            tokens, nfe = replayed(folder, case, chooser, k=replay["k"])
            assert tokens == replay["output"]
            assert nfe == replay["nfe"] and chooser.used_up
            replays += 1
    assert replays >= 10


class NgramReplay(Replay):
    """The public code draws n-grams over candidates in the order in which it first counted them."""

    def __init__(self, replay, case):
        super().__init__(replay["uniforms"], replay["uniform_use"])
        self._output, self._order, self._start = replay["output"], order_of(case), case["start"]
        self._drafted, self._when = {}, -1

    def choose(self, log_law, purpose, position, when):
        if purpose != keys.DRAFT or self._left[0][1] != "ngram":
            return super().choose(log_law, purpose, position, when)
        self._drafted = self._drafted if when == self._when else {}
        self._when = when
        candidates = self._candidates(position, when)
        mass = log_law[candidates].exp()
        uniform = torch.tensor([self._next("ngram")], dtype=torch.float64)
        token = candidates[int(inverse_cdf_draw(mass.unsqueeze(0), uniform))]
        self._drafted[position] = token
        return token

    def _candidates(self, position, when):
        """Tokens in the order of their first count: the prompt by position, then each committed token as it came."""
        decided = self._order[:when]
        seen, pairs, singles = set(self._order[: self._start]), [], []
        for where in sorted(seen):
            singles.append(self._output[where])
            pairs += [(where, where + 1)] if where + 1 in seen else []
        for where in decided[self._start :]:
            seen.add(where)
            singles.append(self._output[where])
            pairs += [pair for pair in ((where - 1, where), (where, where + 1)) if set(pair) <= seen]
        left = self._drafted.get(position - 1, self._output[position - 1] if position - 1 in seen else None)
        follows = [self._output[right] for first, right in pairs if self._output[first] == left]
        return list(dict.fromkeys(follows or singles))


@pytest.mark.slow
def test_ngram_drafted_assd_replays_the_public_code_number_by_number(folder, cases):
    by_name = {case["id"]: case for case in [*cases["cases"], *cases["ngram_extra_prompts"]]}
    for replay in cases["assd_ngram_replay"]:
        case = by_name[replay["case"]]
        chooser = NgramReplay(replay, case)
        tokens, nfe = replayed(folder, case, chooser, k=replay["k"], drafter="ngram")
        assert tokens == replay["output"]
        assert nfe == replay["nfe"] and chooser.used_up


@pytest.mark.slow
def test_nfe_is_distributed_as_in_the_public_code(folder, cases):
    by_name = {case["id"]: case for case in cases["cases"]}
    backbone, info = load_backbone(folder, device="cpu"), inspect_model(folder)
    for known in cases["nfe_statistics"]:
        count = 1500
        requests = [request_of(by_name[known["case"]], i, sample_key(1, str(i))) for i in range(count)]
        settings = decoder_settings("assd", k=known["k"])
        outcomes = decode(backbone, info, settings, Sampling(acceptance="rejection"), requests, rows=256)
        ours = np.bincount([outcome.nfe for outcome in outcomes.values()], minlength=20)
        for nfe, theirs in known["nfe_histogram"].items():
            share, n = theirs / known["samples"], int(nfe)
            # Two-sample comparison of shares at five standard errors: a false alarm in about 2e-6 of such cells.
            error = (share * (1 - share) * (1 / count + 1 / known["samples"])) ** 0.5
            assert abs(ours[n] / count - share) <= 5 * error + 1e-12
