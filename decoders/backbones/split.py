"""One model split over several processes: each has a share of the heads and of the inner width, and its own part of the cache.

The split is transformers' own tensor-parallel plan (`base_model_tp_plan`): q, k, v, gate and up by their outputs, o and down by
their inputs, whose partial sums the processes exchange. Norms, embeddings and the output layer are whole in each. A process runs
transformers' unmodified module for a config with fewer heads. Rank 0 decodes; it tells the others each call of its backbone, and
they repeat it (`follow`). Partial sums are added in the order of the ranks, so every rank has the same bits in any batch.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

from draftmill.decoders.backbones.families.causal import CausalFamily
from draftmill.decoders.backbones.families.shares import Share, kind_of, share_of_config
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.backbones.transformer import TransformerBackbone

# An idle leader says nothing for as long as the driver has no work. A killed process is noticed by its closed connection.
_PATIENCE: Final = timedelta(days=30)
_HERE: Final = "127.0.0.1"
_TORCH: Any = distributed  # its types leave out TCPStore


class GroupLostError(RuntimeError):
    """Another process of the model has ended, or the processes disagree: none of them can continue."""


def open_meeting(count: int) -> Any:
    """On rank 0: the place where the processes of a model find each other, on this machine only; its `port` is free."""
    return _TORCH.TCPStore(_HERE, 0, count, is_master=True, wait_for_workers=False)


def find_meeting(port: int, count: int) -> Any:
    """On the other ranks: the place that rank 0 has opened."""
    return _TORCH.TCPStore(_HERE, port, count, is_master=False)


def join(meeting: Any, share: Share) -> None:
    """Connect this process with the others; returns when all have come."""
    if sys.platform == "linux":  # not over the network: all are on one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=meeting,
        rank=share.rank,
        world_size=share.count,
        timeout=_PATIENCE,
    )


def share_of_weight(name: str, tensor: Tensor, share: Share) -> Tensor:
    """This rank's part of a tensor with a full name; the whole tensor where the plan does not split it."""
    kind = kind_of(name)
    if kind == "columns":
        return tensor.chunk(share.count, 0)[share.rank].contiguous()
    if kind == "rows":
        if name.endswith(".bias"):  # added once
            return tensor if share.rank == 0 else torch.zeros_like(tensor)
        return tensor.chunk(share.count, 1)[share.rank].contiguous()
    return tensor


class Summed(nn.Module):
    """A product of which each rank computes a part: the sum of all ranks' results, in the order of the ranks."""

    def __init__(self, product: nn.Module, count: int) -> None:
        super().__init__()
        self.product, self.count = product, count

    def forward(self, rows: Tensor) -> Tensor:
        """Return the sum, the same bits on every rank."""
        own = self.product(rows).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(parts, own)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total


class SplitBackbone(TransformerBackbone):
    """A rank's part of a causal model; `weights` are its shares. On rank 0, after `lead`, it is a backbone like any other. The
    constructor raises RuntimeError if the ranks' self-tests found different shape rules."""

    may_be_lean = False  # sums of all ranks take the place of some products

    def __init__(
        self,
        family: CausalFamily,
        config: Mapping[str, Any],
        weights: dict[str, Tensor],
        *,
        share: Share,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._leads = False
        super().__init__(family, share_of_config(family, config, share), weights, dtype=dtype, device=device)
        for parent in list(self.base.modules()):
            for name, child in list(parent.named_children()):
                if kind_of(f".{name}.weight") == "rows":
                    setattr(parent, name, Summed(child, share.count))
        rules: list[Any] = [None] * share.count
        distributed.all_gather_object(rules, (self.rules, self._row_multiple))
        if any(own != rules[0] for own in rules):
            raise RuntimeError(f"the processes of this model need different shape rules: {rules}")

    def lead(self) -> None:
        """From now on, tell the other ranks each call; they must `follow`."""
        self._leads = True

    def forward(self, rows: TokenRows) -> Tensor:
        """See ModuleBackbone. GroupLostError if it fails on any rank: the others then wait in the middle of it."""
        if not self._leads:
            return super().forward(rows)
        self.send_call("forward", rows)
        try:
            return super().forward(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait in the middle of it
            raise GroupLostError(f"{_LOST}: {type(error).__name__}: {error}") from None

    def send_call(self, name: str, *arguments: Any) -> None:
        """If this rank leads, tell the others a call, which they repeat."""
        if self._leads:
            _broadcast((name, [_move(argument, torch.device("cpu")) for argument in arguments]))


def _leading(name: str) -> Callable[..., None]:
    """A method of the backbone that the leader tells the other ranks before it does the same."""
    plain: Callable[..., None] = getattr(TransformerBackbone, name)

    def method(self: SplitBackbone, *arguments: Any) -> None:
        self.send_call(name, *arguments)
        plain(self, *arguments)

    return method


for _name in ("resize", "forget", "copy_prefix", "copy_columns", "clear_slot"):
    setattr(SplitBackbone, _name, _leading(_name))


_LOST: Final = "the group of processes of this model is lost"


def follow(backbone: SplitBackbone) -> None:
    """Repeat rank 0's calls until it says that it ends (`dismiss`); raises GroupLostError once it is gone."""
    while True:
        box: list[Any] = [None]
        try:
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        except RuntimeError as error:
            raise GroupLostError(f"{_LOST}: {error}") from None
        if box[0] is None:
            return
        name, arguments = box[0]
        method: Callable[..., Any] = getattr(backbone, name)
        method(*(_move(argument, backbone.device) for argument in arguments))


def dismiss() -> None:
    """Let the other ranks' `follow` return."""
    _broadcast(None)


def _broadcast(message: Any) -> None:
    try:
        distributed.broadcast_object_list([message], src=0, device=torch.device("cpu"))
    except RuntimeError as error:
        raise GroupLostError(f"{_LOST}: {error}") from None


def _move(value: Any, device: torch.device) -> Any:
    """The same argument with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, TokenRows):
        return TokenRows(**{field.name: _move(getattr(value, field.name), device) for field in fields(value)})
    return value
