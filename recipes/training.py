"""Trains the two-stream model: the any-subset joint loss, a warm-up/stable/decay schedule, checkpoints without pickle.

A step is a function of the weights, the optimiser's moments and (seed, step), so a run that was interrupted and resumed
from a checkpoint ends with the same bits as one that was not (same machine, thread count and flags).

Loss: mean cross-entropy over the masked positions, each under its own rank's visibility, in one two-stream forward
(Guo and Ermon, "Reviving Any-Subset Autoregressive Models", the joint training loss).
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from recipes.corpus import TokenStream
from recipes.masking import MaskSchedule, Windows, decoding_ranks, training_batch
from recipes.two_stream import Canvas, QueryRows, TwoStream

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Plan:
    """How to train: lengths in tokens with their shares of the steps, the learning rate's schedule in steps."""

    steps: int
    seed: int = 0
    batch_tokens: int = 4096
    lengths: tuple[int, ...] = (128, 256, 512)
    length_shares: tuple[float, ...] = (0.76, 0.20, 0.04)
    learning_rate: float = 2e-3
    warmup: int = 300
    decay_share: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    masks: MaskSchedule = field(default_factory=MaskSchedule)

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, constant, linear decay to zero over the last `decay_share`."""
        decay = max(1, round(self.steps * self.decay_share))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup), max(0, self.steps - step) / decay)

    def length(self, step: int) -> int:
        """Window length of a step."""
        return int(np.random.default_rng([self.seed, step, 1]).choice(self.lengths, p=self.length_shares))


def reuse_freed_memory() -> None:
    """Keep freed blocks in the process instead of returning them to the system. No effect outside glibc.

    A step frees and asks for the same hundreds of megabytes, and page faults on them cost up to ten times the
    arithmetic. Blocks above glibc's largest threshold still go back, or the heap would fragment without end.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def autocast(device: torch.device, *, enabled: bool = True) -> AbstractContextManager[object]:
    """bfloat16 matrix products over float32 weights."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


def to_rows(windows: Windows, device: torch.device) -> tuple[Canvas, QueryRows, Tensor]:
    """The model's inputs for a batch and the true tokens [N] of its query rows, one row per masked position."""
    masked = torch.from_numpy(windows.masked).to(device)
    ids = torch.from_numpy(windows.ids).to(device)
    rank = torch.from_numpy(decoding_ranks(windows.masked)).to(device)
    index = masked.flatten().nonzero().squeeze(1)
    query = QueryRows(index, torch.from_numpy(windows.limit).to(device))
    return Canvas(ids, rank, (~masked).sum(1)), query, ids.flatten().index_select(0, index)


def joint_loss(model: TwoStream, windows: Windows, device: torch.device) -> Tensor:
    """Mean cross-entropy in nats over every masked position of the batch."""
    canvas, query, targets = to_rows(windows, device)
    with autocast(device):
        logits = model.logits(model.read(canvas, model.context(canvas), query))
    return functional.cross_entropy(logits.float(), targets)


class Trainer:
    """The weights, the optimiser and the number of steps done."""

    def __init__(self, model: TwoStream, plan: Plan, stream: TokenStream, device: torch.device) -> None:
        self.model, self.plan, self.stream, self.device = model.to(device), plan, stream, device
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0  # of training, over all the processes that took part
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = dict(named)
        decayed = [p for _, p in named if p.dim() > 1]
        plain = [p for _, p in named if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)

    def advance(self) -> float:
        """Do one step; returns its loss in nats per token. FloatingPointError where the loss is not finite."""
        length = self.plan.length(self.step)
        count = max(1, self.plan.batch_tokens // length)
        windows = training_batch(
            self.stream, self.plan.masks, seed=self.plan.seed, step=self.step, count=count, length=length
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step)
        loss = joint_loss(self.model, windows, self.device)
        value = float(loss.detach())
        if not np.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {self.step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += count * length
        return value

    def save(self, folder: Path) -> None:
        """Write `checkpoint.safetensors` (weights, moments) and then `checkpoint.json`, each replaced in one move."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.parameters.items():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = tensor
        state = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        # The step also travels with the tensors: the two files are replaced one after the other.
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "checkpoint.new",
            metadata={key: str(value) for key, value in state.items()},
        )
        os.replace(folder / "checkpoint.new", folder / "checkpoint.safetensors")
        write_json(folder / "checkpoint.json", state)

    def restore(self, folder: Path) -> bool:
        """Continue from `folder` where it has a checkpoint; says whether it had one."""
        path = folder / "checkpoint.safetensors"
        if not path.exists():
            return False
        tensors = load_file(path)
        state = checkpoint_state(path)
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), state.get("seconds", 0.0)
        self.model.load_state_dict(with_prefix(tensors, "weight."))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            for name, tensor in with_prefix(tensors, f"{key}.").items():
                # The step counter stays where AdamW keeps it; the moments live with their parameter.
                parameter = self.parameters[name]
                self.optimizer.state[parameter][key] = tensor.to(parameter.device)
        return True


def checkpoint_state(path: Path) -> dict[str, float]:
    """Steps, tokens and seconds so far, from the checkpoint's header (its length in 8 bytes, then JSON)."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {key: float(value) for key, value in header["__metadata__"].items()}


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_json(path: Path, value: object) -> None:
    """Replace `path` in one move."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(new, path)


@dataclass
class Pace:
    """When to log, to checkpoint and to stop; minutes count from the start of this process's training."""

    log_every: int = 50
    checkpoint_minutes: float = 3.0
    minutes: float | None = None


def run(trainer: Trainer, folder: Path | None, pace: Pace, report: Callable[[int, float, float], None]) -> bool:
    """Train to the plan's last step; False where the minutes ran out first. `report(step, mean loss, tokens/s)`."""
    start = last_save = last_log = now = time.monotonic()
    losses: list[float] = []
    tokens = trainer.tokens
    while trainer.step < trainer.plan.steps:
        losses.append(trainer.advance())
        trainer.seconds += time.monotonic() - now
        now = time.monotonic()
        if trainer.step % pace.log_every == 0:
            report(trainer.step, float(np.mean(losses)), (trainer.tokens - tokens) / (now - last_log))
            losses, tokens, last_log = [], trainer.tokens, now
        out_of_time = pace.minutes is not None and now - start > 60 * pace.minutes
        if folder is not None and (out_of_time or now - last_save > 60 * pace.checkpoint_minutes):
            trainer.save(folder)
            last_save = now
        if out_of_time:
            return trainer.step >= trainer.plan.steps
    if folder is not None:
        trainer.save(folder)
    return True
