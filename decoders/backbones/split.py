"""One model split over several processes: each has a share of the heads and of the inner width, and its own part of the cache.

The split is transformers' own tensor-parallel plan (`base_model_tp_plan`): q, k, v, gate and up by their outputs, o and down by
their inputs, whose partial sums the processes exchange. Norms, embeddings and the output layer are whole in each. A process runs
a network with fewer heads. Rank 0 decodes; it tells the others each call of its backbone, and
they repeat it (`follow`). Partial sums are added in the order of the ranks, so every rank has the same bits in any batch.

A call is told by two messages: a header of JSON, from host to host (gloo), and its arrays as one int64 tensor, from device to
device (NCCL on GPUs). Every length is in the header, so no host waits for its device.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.rotary import RotaryShape
from draftmill.decoders.backbones.families.shares import Share, kind_of
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.rows import TokenRows

# An idle leader says nothing for as long as the driver has no work. A killed process is noticed by its closed connection; by GPUs
# in the middle of a forward it is not: then the actor that watches the group ends it (actors/ray/pool.py).
_PATIENCE: Final = timedelta(days=30)
_TORCH: Any = distributed  # its types leave out TCPStore
# Its second name is the one before torch 2.13.
_all_gather: Any = getattr(_TORCH, "all_gather_single", None) or _TORCH.all_gather_into_tensor
_LOST: Final = "the group of processes of this model is lost"
_MEMORY_CALLS: Final = ("resize", "reserve", "spread", "place", "forget", "copy_prefix", "copy_columns", "clear_slot")
_HEADER: Final = 1024  # bytes; a forward, the longest call, needs some 300


class GroupLostError(RuntimeError):
    """Another process of the model has ended, or the processes disagree: none of them can continue."""


def open_meeting(count: int, port: int = 0) -> Any:
    """Where the processes of a model find each other, on this machine. Rank 0 opens it, at a free `port`; the others give it."""
    return _TORCH.TCPStore("127.0.0.1", port, count, is_master=not port, wait_for_workers=bool(port))


def join(meeting: Any, share: Share) -> None:
    """Connect this process with the others; returns when all have come."""
    if sys.platform == "linux":  # not over the network: all are on one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=meeting, rank=share.rank, world_size=share.count, timeout=_PATIENCE)


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
    """A product split over ranks: the sum of all ranks' results, in the order of the ranks."""

    def __init__(self, product: nn.Module, count: int) -> None:
        super().__init__()
        self.product, self.count = product, count

    def forward(self, rows: Tensor) -> Tensor:
        total, *others = gather(self.product(rows).contiguous(), self.count)
        # Not torch's `sum`: its order depends on the shape.
        for part in others:
            total += part
        return total


def gather(own: Tensor, count: int) -> tuple[Tensor, ...]:
    """The tensors of all ranks, which have one shape, in the order of the ranks; views of one tensor."""
    parts = own.new_empty(count * own.shape[0], *own.shape[1:])
    _all_gather(parts, own)
    return parts.chunk(count)


class SplitBackbone(RotaryBackbone):
    """A rank's part of a causal model; `shape` and `weights` are its shares. On rank 0, after `lead`, it is a backbone like any
    other. The constructor raises RuntimeError if the ranks' self-tests found different shape rules."""

    def __init__(self, shape: RotaryShape, weights: dict[str, Tensor], how: Running, *, share: Share) -> None:
        self._leads = False
        super().__init__(shape, weights, how)
        for parent in list(self.base.modules()):
            for name, child in list(parent.named_children()):
                if kind_of(f".{name}.weight") == "rows":
                    setattr(parent, name, Summed(child, share.count))
        self.bind()
        # A graph is replayed without this module: the other ranks would get no call, and the sums would wait for them for ever.
        self.captures = False
        own = torch.tensor([*astuple(self.rules), self._row_multiple])
        rules = [part.tolist() for part in gather(own, share.count)]
        if any(numbers != rules[0] for numbers in rules):
            raise RuntimeError(f"the processes of this model need different shape rules: {rules}")

    def lead(self) -> None:
        """From now on, send each call to the other ranks; they must `follow`."""
        self._leads = True

    def forward(self, rows: TokenRows) -> Tensor:
        """Run the rows on all ranks; GroupLostError if that fails on one: the others then wait in the middle of it."""
        if not self._leads:
            return super().forward(rows)
        facts, arrays = rows.told()
        tell("forward", *facts, *arrays)
        try:
            return super().forward(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait in the middle of it
            raise GroupLostError(f"{_LOST}: {type(error).__name__}: {error}") from None


def _leading(name: str) -> Callable[..., Any]:
    """A method of the backbone that the leader first sends to the other ranks."""
    plain: Callable[..., Any] = getattr(RotaryBackbone, name)

    def method(self: SplitBackbone, *arguments: Any) -> Any:
        if self._leads:
            tell(name, *arguments)
        return plain(self, *arguments)

    return method


for _name in _MEMORY_CALLS:
    setattr(SplitBackbone, _name, _leading(_name))


def follow(backbone: SplitBackbone) -> None:
    """Repeat rank 0's calls until one is `dismiss`; raises GroupLostError once it is gone."""
    while (call := _hear(backbone.device))[0] != "dismiss":
        name, plain, arrays = call
        if name == "forward":
            backbone.forward(TokenRows.heard(plain, arrays))
        else:
            getattr(backbone, name)(*plain, *arrays)


def tell(name: str, *arguments: Any) -> None:
    """Send the other ranks a call, with what JSON holds and then int64 arrays of one dimension."""
    plain = [one for one in arguments if not isinstance(one, Tensor)]
    arrays = [one for one in arguments if isinstance(one, Tensor)]
    lengths = [len(array) for array in arrays]
    header = json.dumps([name, plain, lengths]).encode().ljust(_HEADER)
    assert len(header) == _HEADER, "a call must fit its header"
    try:
        distributed.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8), src=0)
        if any(lengths):
            distributed.broadcast(torch.cat(arrays), src=0)
    except RuntimeError as error:
        raise GroupLostError(f"{_LOST}: {error}") from None


def _hear(device: torch.device) -> tuple[str, list[Any], tuple[Tensor, ...]]:
    """Wait for rank 0's next call: its name, its plain arguments, and its arrays, which are views of one."""
    header = torch.empty(_HEADER, dtype=torch.uint8)
    try:
        distributed.broadcast(header, src=0)
        name, plain, lengths = json.loads(bytes(header.tolist()))
        held = torch.empty(sum(lengths), dtype=torch.int64, device=device)
        if len(held):
            distributed.broadcast(held, src=0)
    except RuntimeError as error:
        raise GroupLostError(f"{_LOST}: {error}") from None
    return name, plain, held.split(lengths)
