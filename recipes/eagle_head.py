"""Trains an EAGLE-3 draft head for a causal model and writes its folder in the `speculators` format.

    python -m recipes.eagle_head --out DIR [--target DIR] [--steps N]

The target is frozen, and runs as it decodes: its states after some layers are what the head will read. The head learns to predict
like the target, first from the target's states, then from its own, as often as it will draft (training-time test, EAGLE-3,
section 3). It has the target's embeddings and output layer, so its file holds neither. DIR then holds config.json,
model.safetensors and a README with acceptances on held-out files. The same seed, flags, thread count and Python give the same
head.

Legend: B windows, L tokens of a window, N = B x L rows, S steps from the head's own states.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftmill.decoders.backbones.attention import Scores
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.files import SpeculatorConfig, read_speculator
from draftmill.decoders.backbones.heads.published import DraftStack, load_speculator, shape_of
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.network import Rotation
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import HeadDrafterSettings, SpeculativeSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from recipes import causal, corpus, folder, loop
from recipes.head_training import HeadSchedule, acceptance, fit_heads, head_loss

TARGET = Path(__file__).parent.parent / "decoders" / "builtin" / "ar-tiny"
DRAFTS = 4


@dataclass(frozen=True)
class HeadPlan(HeadSchedule):
    """How to train the head: windows of so many tokens a step, and how often it continues from its own states."""

    steps: int = 1200
    windows: int = 4
    length: int = 256
    own_steps: int = 2
    layer_ids: tuple[int, ...] = (1, 2, 4)


class Target:
    """A frozen causal model: what it says of windows, and the states of its layers."""

    def __init__(self, place: Path, layer_ids: tuple[int, ...]) -> None:
        self.backbone = cast("Any", load_backbone(place, dtype="float32", device="cpu"))
        self.backbone.tap(SimpleNamespace(speculator=SimpleNamespace(layer_ids=layer_ids), read=self._read))
        self._states_NF = torch.zeros(0)

    def _read(self, states_NF: Tensor, rows: Any) -> None:
        self._states_NF = states_NF

    def run(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """The states after the layers, [N, F], and the log-probabilities of the next token, [N, V]."""
        count, length = tokens_BL.shape
        self.backbone.allocate(count, length)
        hidden_ND = self.backbone.forward(causal_rows(range(count), [length] * count, [0] * count, tokens_BL.flatten()))
        # What a lean forward gives takes no part in training as it is.
        return self._states_NF.clone(), self.backbone.logits(hidden_ND).log_softmax(-1).clone()


def config_of(target: Path, layer_ids: tuple[int, ...], drafts: int = DRAFTS) -> dict[str, Any]:
    """The head's whole config.json: one layer of Llama, as wide as the target's."""
    model = json.loads((target / "config.json").read_text())
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
        "rope_parameters", "max_position_embeddings", "hidden_act",
    )  # fmt: skip
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    layer = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": head_dim, "attention_bias": False}
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": model["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
        "norm_before_residual": True,
        "transformer_layer_config": {**layer, **{name: model[name] for name in kept if name in model}},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": model["architectures"]},
        },
        "torch_dtype": "float16",
    }


class Attention:
    """The attention of windows: to the columns up to a row's own, and to what the row itself made in earlier steps."""

    def __init__(self, count: int, length: int) -> None:
        self._shape = count, length
        self._held = dict[int, list[Tensor]]()

    def __call__(self, layer: int, query_NHd: Tensor, held_NXd: Tensor, *, scores: Scores) -> Tensor:
        """Mix the values of a layer, [N, H, d]; called once a step."""
        group = query_NHd.shape[1] // (held_NXd.shape[1] // 2)
        steps = self._held.setdefault(layer, [])
        steps.append(held_NXd)
        (key_NHd, value_NHd), *own = [[part.repeat_interleave(group, 1) for part in each.chunk(2, 1)] for each in steps]
        query_BHLd, key_BHLd, value_BHLd = (
            each.unflatten(0, self._shape).transpose(1, 2) for each in (query_NHd, key_NHd, value_NHd)
        )
        hidden_LL = torch.ones(self._shape[1], self._shape[1], dtype=torch.bool).triu(1)
        seen = [(query_BHLd @ key_BHLd.transpose(2, 3) * scores.scaling).masked_fill(hidden_LL, -torch.inf)]
        for key, _ in own:
            near_NH = (query_NHd * key).sum(-1) * scores.scaling
            seen.append(near_NH.unflatten(0, self._shape).transpose(1, 2).unsqueeze(3))
        weights = torch.cat(seen, 3).softmax(3)
        mixed_BHLd = weights[..., : self._shape[1]] @ value_BHLd
        for step, (_, value) in enumerate(own):
            share_BHL1 = weights[..., self._shape[1] + step].unsqueeze(3)
            mixed_BHLd = mixed_BHLd + share_BHL1 * value.unflatten(0, self._shape).transpose(1, 2)
        return mixed_BHLd.transpose(1, 2).flatten(0, 1)


class Trainee:
    """A head in training, its target, and the draws of windows."""

    def __init__(self, target: Target, head: SpeculatorConfig, plan: HeadPlan) -> None:
        backbone, self.target, self.plan = target.backbone, target, plan
        shape = shape_of(head, target_vocab=backbone.vocab_size, num_read=len(head.layer_ids) * backbone.width)
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            self.stack = DraftStack(shape)
        self.stack.word_embeddings.weight = torch.nn.Parameter(backbone.embedding_VD.float(), requires_grad=False)
        output = backbone.head
        self._output_VD: Tensor = output.weight_MK() if hasattr(output, "weight_MK") else output.weight
        sizes = shape.head_dim, shape.head_dim, shape.max_position_embeddings
        self._rotation = Rotation(shape.rope, *sizes, torch.float32, backbone.device)

    def laws(self, tokens_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(log p, log q) of the rows [M, V] whose next tokens are in the windows, for each step."""
        states_NF, log_p_NV = self.target.run(tokens_BL)
        with loop.autocast(tokens_BL.device):
            return self._steps(tokens_BL, states_NF, log_p_NV)

    def _steps(self, tokens_BL: Tensor, states_NF: Tensor, log_p_NV: Tensor) -> list[tuple[Tensor, Tensor]]:
        (count, length), found = tokens_BL.shape, list[tuple[Tensor, Tensor]]()
        states_ND, attend = self.stack.join(states_NF).float(), Attention(count, length)
        places = torch.arange(length).expand(count, -1)
        for step in range(1 + self.plan.own_steps):
            # The row of column c reads the token after it, and speaks of the one after that.
            ahead_BL = torch.roll(tokens_BL, -1 - step, 1)
            turn = self._rotation.at((places + 1 + step).flatten()).unsqueeze(2)
            normed_ND, states_ND = self.stack(ahead_BL.flatten(), states_ND, turn, attend)
            is_inside_BL = places < length - 1 - step
            log_q_MV = (normed_ND[is_inside_BL.flatten()] @ self._output_VD.T).float().log_softmax(-1)
            log_p_MV = log_p_NV.unflatten(0, (count, length))[:, 1 + step :].flatten(0, 1)
            found.append((log_p_MV, log_q_MV))
        return found

    def loss(self, ids: NDArray[np.int64], step: int) -> Tensor:
        """The mean loss of one optimiser step over all steps of drafting."""
        plan = self.plan
        windows = causal.training_windows(ids, seed=plan.seed, step=step, count=plan.windows, length=plan.length)
        laws = self.laws(torch.from_numpy(windows[:, :-1]))
        by_acceptance = plan.by_acceptance(step)
        losses = [head_loss(log_p, log_q, by_acceptance=by_acceptance) for log_p, log_q in laws]
        return torch.stack(losses).mean()

    def save(self, out: Path, config: dict[str, Any]) -> None:
        """Write config.json and model.safetensors, without the embeddings."""
        out.mkdir(parents=True, exist_ok=True)
        loop.write_json(out / "config.json", config)
        tensors = {name: part for name, part in self.stack.state_dict().items() if "word_embeddings" not in name}
        folder.write_half(tensors, out / "model.safetensors")


@torch.no_grad()
def acceptances(trainee: Trainee, ids: NDArray[np.int64], count: int = 16) -> list[float]:
    """Mean of sum_v min(p, q) at temperature 1 on windows of held-out text, for each draft."""
    windows = causal.training_windows(ids, seed=1, step=0, count=count, length=trainee.plan.length)
    laws = trainee.laws(torch.from_numpy(windows[:, :-1]))
    return [float(acceptance(log_p, log_q).mean()) for log_p, log_q in laws]


def tokens_a_forward(out: Path, target: Path, ids: NDArray[np.int64], temperature: float, count: int = 24) -> float:
    """Generated tokens a forward of the target, for held-out prompts of 64 tokens and 96 new ones."""
    backbone: Any = load_backbone(target, dtype="float32", device="cpu")
    settings = SpeculativeSettings(
        kind="speculative", k=DRAFTS, drafter=HeadDrafterSettings(kind="head", path=str(out))
    )
    decoder = build_decoder(
        Setup(
            backbone=backbone,
            info=inspect_model(target),
            sampling=Sampling(temperature=temperature),
            max_rows=count,
            max_tokens=1 << 20,
            drafter=load_speculator(out, backbone),
        ),
        settings,
    )
    starts = np.random.default_rng(2).integers(0, len(ids) - 64, count)
    canvases = [np.concatenate([ids[start : start + 64], np.full(96, -1)]).astype(np.int32) for start in starts]
    decoder.admit([Request(index, sample_key(0, str(index)), canvas) for index, canvas in enumerate(canvases)])
    outcomes = list[Any]()
    while decoder.active:
        outcomes += decoder.step()
    return sum(len(one.tokens) for one in outcomes) / sum(one.nfe for one in outcomes)


def readme(name: str, settings: dict[str, str], figures: dict[str, str], held_out: list[str]) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A draft head in the form of EAGLE-3 for `ar-tiny`, in the `speculators` format. Trained by",
            "`python -m recipes.eagle_head` on the standard library of CPython, which is under the PSF license. It has the",
            "embeddings and the output layer of `ar-tiny`, which are not in its file. Use it with `decoder.kind: speculative`,",
            f"`drafter: {{kind: head, path: builtin:{name}}}`.",
            "",
            "## Held-out quality",
            "",
            *(f"- {what}: {figure}" for what, figure in figures.items()),
            "",
            *folder.provenance(settings, held_out, "neither the model nor the head"),
        ]
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.eagle_head", description="Train an EAGLE-3 draft head.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--target", type=Path, default=TARGET, help="the causal model's folder")
    parser.add_argument("--steps", type=int, default=HeadPlan.steps, help="optimiser steps")
    parser.add_argument("--windows", type=int, default=HeadPlan.windows, help="windows of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def report(step: int, loss: float) -> None:
    if step % 25 == 0:
        Console().print(f"step {step}  loss {loss:.4f}")


def main(arguments: list[str] | None = None, notify: Callable[[int, float], None] = report) -> int:
    """Run the recipe; 0 when the folder is complete."""
    flags = parse(arguments)
    torch.set_num_threads(flags.threads)
    loop.reuse_freed_memory()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.target)
    prepared = corpus.prepare(*corpus.split(corpus.standard_library()), tokenizer)
    plan, started = HeadPlan(steps=flags.steps, windows=flags.windows, seed=flags.seed), time.process_time()
    config = config_of(flags.target, plan.layer_ids)
    flags.out.mkdir(parents=True, exist_ok=True)
    loop.write_json(flags.out / "config.json", config)
    trainee = Trainee(Target(flags.target, plan.layer_ids), read_speculator(flags.out), plan)
    ids, held_out = causal.pack(prepared.train, plan.seed), causal.pack(prepared.held_out, plan.seed)
    fit_heads(trainee.stack, plan, lambda step: trainee.loss(ids, step), notify)
    minutes = (time.process_time() - started) / 60
    trainee.save(flags.out, config)
    shares = ", ".join(f"{share:.3f}" for share in acceptances(trainee, held_out))
    figures = {"share of drafts accepted at temperature 1, by draft, each after true tokens": shares}
    for temperature in (0.0, 1.0):
        rate = tokens_a_forward(flags.out, flags.target, held_out, temperature)
        figures[f"tokens a forward with {DRAFTS} drafts, temperature {temperature:g}"] = f"{rate:.2f}"
    settings = {
        **prepared.describe(),
        "head": f"{plan.steps} steps of {plan.windows} windows of {plan.length} tokens, {1 + plan.own_steps} drafts each, "
        f"AdamW at {plan.learning_rate}, KL, in the last third the acceptance, layers {list(plan.layer_ids)}, seed {plan.seed}",
        "stored as": "float16",
        "time": f"{minutes:.0f} CPU min",
        **loop.describe_machine(flags.threads),
    }
    (flags.out / "README.md").write_text(readme(flags.out.name, settings, figures, prepared.held_out_paths))
    Console().print(f"wrote {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
