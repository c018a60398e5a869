"""The training loop of every recipe: a warm-up/stable/decay schedule, AdamW, checkpoints without pickle, a clock.

A step is a function of the weights, the optimiser's moments and (seed, step), so a run that was interrupted and resumed
from a checkpoint ends with the same bits as one that was not (same machine, thread count and flags). What a step's batch
and loss are, a recipe defines by deriving from `Trainer`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Schedule:
    """Lengths of the windows in tokens with their shares of the steps, and the learning rate in steps."""

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

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, constant, linear decay to zero over the last `decay_share`."""
        decay = max(1, round(self.steps * self.decay_share))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup), max(0, self.steps - step) / decay)

    def length(self, step: int) -> int:
        """Window length of a step."""
        return int(np.random.default_rng([self.seed, step, 1]).choice(self.lengths, p=self.length_shares))

    def describe(self) -> str:
        """The schedule in words, for a model's README."""
        lengths = ", ".join(f"{n} ({p:.0%})" for n, p in zip(self.lengths, self.length_shares, strict=True))
        return (
            f"{self.steps} steps of {self.batch_tokens} tokens, windows of {lengths} tokens, "
            f"AdamW at {self.learning_rate} (linear decay over the last {self.decay_share:.0%}), bfloat16 products, "
            f"seed {self.seed}"
        )


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


ModelT = TypeVar("ModelT", bound=nn.Module)


class Trainer(ABC, Generic[ModelT]):
    """The weights, the optimiser and the number of steps done."""

    def __init__(self, model: ModelT, plan: Schedule, device: torch.device) -> None:
        self.model: ModelT = model.to(device)
        self.schedule, self.device = plan, device
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0  # of training, over all the processes that took part
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = dict(named)
        decayed = [p for _, p in named if p.dim() > 1]
        plain = [p for _, p in named if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)

    @abstractmethod
    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The loss of a step's batch in nats per token, a function of (seed, step) and the weights, and its tokens."""

    def more_state(self) -> dict[str, Tensor]:
        """What else a step depends on and changes, by name; the tensors are saved and, on the CPU, written in place."""
        return {}

    def advance(self) -> float:
        """Do one step; returns its loss in nats per token. FloatingPointError where the loss is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        loss, tokens = self.batch_loss(self.step)
        value = float(loss.detach())
        if not np.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {self.step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.schedule.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += tokens
        return value

    def save(self, folder: Path) -> None:
        """Write `checkpoint.safetensors` (weights, moments) and then `checkpoint.json`, each replaced in one move."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{name}": tensor for name, tensor in distinct_tensors(self.model).items()}
        for name, parameter in self.parameters.items():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = tensor
        tensors |= {f"more.{name}": tensor for name, tensor in self.more_state().items()}
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
        """Continue from `folder` if it has a checkpoint; returns whether it had one."""
        path = folder / "checkpoint.safetensors"
        if not path.exists():
            return False
        tensors = load_file(path)
        state = checkpoint_state(path)
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), state.get("seconds", 0.0)
        weights = distinct_tensors(self.model)
        for name, tensor in with_prefix(tensors, "weight.").items():
            weights[name].copy_(tensor)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            for name, tensor in with_prefix(tensors, f"{key}.").items():
                # The step counter stays where AdamW keeps it; the moments live with their parameter.
                parameter = self.parameters[name]
                self.optimizer.state[parameter][key] = tensor.to(parameter.device)
        more = self.more_state()
        for name, tensor in with_prefix(tensors, "more.").items():
            more[name].copy_(tensor)
        return True


def distinct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's state, each tensor under its first name only: safetensors refuses tied weights."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor
    return state


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
    """When to log, to checkpoint and to stop; minutes count from the start of training in this process."""

    log_every: int = 50
    checkpoint_minutes: float = 3.0
    minutes: float | None = None


def run(trainer: Trainer[ModelT], folder: Path | None, pace: Pace, report: Callable[[int, float, float], None]) -> bool:
    """Train to the plan's last step; False where the minutes ran out first. `report(step, mean loss, tokens/s)`."""
    start = last_save = last_log = now = time.monotonic()
    losses: list[float] = []
    tokens = trainer.tokens
    while trainer.step < trainer.schedule.steps:
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
            return trainer.step >= trainer.schedule.steps
    if folder is not None:
        trainer.save(folder)
    return True


def run_visibly(trainer: Trainer[ModelT], folder: Path | None, pace: Pace) -> bool:
    """Restore what `folder` has and train to the plan's last step under a progress bar; False where time ran out."""
    if folder is not None and trainer.restore(folder):
        Console().print(f"continuing after step {trainer.step}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console()) as progress:
        task = progress.add_task("training", total=trainer.schedule.steps, completed=trainer.step)

        def report(step: int, loss: float, rate: float) -> None:
            progress.update(task, completed=step)
            progress.console.print(f"step {step}  loss {loss:.4f} nats  {rate:,.0f} tokens/s")

        done = run(trainer, folder, pace, report)
        progress.update(task, completed=trainer.step)
    if not done:
        Console().print("stopped before the last step; run again with the same --checkpoint-dir to continue")
    return done


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every recipe has; those without a default here take that of the chosen size."""
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, help="optimiser steps of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--decay-share", type=float, default=0.3, help="share of the steps over which the rate falls")
    parser.add_argument("--checkpoint-dir", type=Path, help="keep the training's state here, and continue from it")
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0)
    parser.add_argument("--minutes", type=float, help="stop (resumably) after this many minutes of training")
    parser.add_argument("--log-every", type=int, default=50)


def describe_machine(threads: int) -> dict[str, str]:
    """The hardware and software of the training, for a model's README."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads} cores"
    return {"hardware": hardware, "versions": f"torch {torch.__version__}"}


def schedule_of(flags: argparse.Namespace, *, steps: int, batch_tokens: int, learning_rate: float) -> Schedule:
    """The schedule of a model that starts from a causal one: most of its steps have windows of 256 tokens or more.

    Flags that are given override these numbers.
    """
    return Schedule(
        steps=flags.steps or steps,
        seed=flags.seed,
        batch_tokens=flags.batch_tokens or batch_tokens,
        length_shares=(0.40, 0.45, 0.15),
        learning_rate=flags.learning_rate or learning_rate,
        decay_share=flags.decay_share,
    )


def set_up(flags: argparse.Namespace) -> tuple[torch.device, Pace]:
    """Give torch its threads and memory; the device to train on and the pace that the flags ask for."""
    torch.set_num_threads(flags.threads)
    reuse_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, Pace(flags.log_every, flags.checkpoint_minutes, flags.minutes)
