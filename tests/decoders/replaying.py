"""Graphs on a CPU: what was captured is done again by the same Python code, with the same tensors for input and output.

As with a CUDA graph, nothing that the first forward knew on the host may differ in a later one: a number that was not sent gives
another result here too, and memory that has moved is found. References stand in for the kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftmill.decoders.draws.sampling import sample
from draftmill.decoders.engine.cuda_graphs import Recorder, Work
from draftmill.decoders.kernels.find import Attend
from draftmill.decoders.kernels.seen import Seen
from tests.decoders.references import kernels as reference


class Externals(TorchDispatchMode):
    """Collects in `read` the memory that operations use and have not made, by its address, in the order in which they first do;
    and in `numbers` each operation with the numbers that the host gives it.

    A graph has these addresses and numbers for ever. What is a view of something is that memory too. What stands for a kernel
    reads memory as the kernel does, but its own operations have numbers that the kernel does not get (`as_a_kernel`).
    """

    inside_kernel = False

    def __init__(self) -> None:
        super().__init__()
        self.read = dict[int, Tensor]()
        self.numbers = list[tuple]()
        self._made = dict[int, Tensor]()  # kept, so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note the operation's inputs, then what it makes."""
        self._note((args, kwargs or {}), self.read)
        if not Externals.inside_kernel:
            given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, int | float)]
            self.numbers.append((str(func), *given))
        found = func(*args, **(kwargs or {}))
        self._note(found, self._made)
        return found

    def _note(self, tree, among: dict[int, Tensor]) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                place = tensor.untyped_storage().data_ptr()
                if place not in self._made:
                    among.setdefault(place, tensor)


class Replaying(Recorder):
    """Repeats the work, and counts what it captured. With `watches` a replay must use the memory that the capture used."""

    def __init__(self, *, watches: bool = False) -> None:
        super().__init__()
        self._watches = watches
        self.num_captured = self.num_dropped = 0

    def capture(self, work: Callable[[], Work]) -> tuple[Callable[[], None], Work]:
        self.num_captured += 1
        found, used = self._watched(work)

        def replay() -> None:
            again, now = self._watched(work)
            assert again.num_computed == found.num_computed
            new = [one for one, other in zip(now.numbers, used.numbers, strict=True) if one != other]
            assert not new, f"a graph would use a number that is no longer what it was: {new[:3]}"
            assert list(now.read) == list(used.read), "a graph would use memory that is no longer what it was"
            found.hidden_ND.copy_(again.hidden_ND)
            found.record.copy_(again.record)

        return replay, found

    def drop_pool(self) -> None:
        self.num_dropped += 1

    def _watched(self, work: Callable[[], Work]) -> tuple[Work, Externals]:
        """What the work gives, and the memory that it uses; the capture keeps this, so that nothing else comes to its place."""
        externals = Externals()
        if not self._watches:
            return work(), externals
        with externals:
            return work(), externals


def as_a_kernel(plain: Callable) -> Callable:
    """A function that stands for a kernel: the numbers of its operations are none of the host's."""

    @wraps(plain)
    def launched(*args, **more):
        Externals.inside_kernel = True
        try:
            return plain(*args, **more)
        finally:
            Externals.inside_kernel = False

    return launched


def by_slots(layer_2SKWd: Tensor, seen: Seen) -> tuple[Tensor, Seen]:
    """As `rows_of_pool`, but rows of a slot share its copy."""
    if seen.start_N is None:
        return layer_2SKWd, seen
    start_S, slot_N = seen.start_N.unique(return_inverse=True)
    low_IS = high_IS = seen.low_IN[:, : len(start_S)]
    slots = replace(seen, start_N=start_S, slot_N=start_S, low_IN=low_IS, high_IN=high_IS)
    layer_2SKWd, slots = reference.rows_of_pool(layer_2SKWd, slots)
    return layer_2SKWd, replace(seen, slot_N=slot_N, positions_SW=slots.positions_SW)


def attend_by_slots(query_NHd: Tensor, layer_2SKWd: Tensor, seen: Seen, *, scaling: float, **more) -> Tensor:
    """What reference_attend gives, but for rounding: it computes each row for all slots, where the reference copies a slot's
    keys and values for each row. The tests of captured forwards take a third of the time with it."""
    layer_2SKWd, seen = by_slots(layer_2SKWd, seen)
    num_groups, num_rows = layer_2SKWd.shape[2], len(query_NHd)
    wide = torch.promote_types(query_NHd.dtype, torch.float32)
    key_SKWd, value_SKWd = layer_2SKWd.to(wide)
    row_N = torch.arange(num_rows, device=query_NHd.device)

    def of_own_slot(all_SKRx: Tensor) -> Tensor:
        """Each row's numbers in its own slot, [N, H, x]."""
        return all_SKRx.unflatten(2, (num_rows, -1)).movedim(2, 0)[row_N, seen.slot_N].flatten(1, 2)

    query_KRd = query_NHd.to(wide).unflatten(1, (num_groups, -1)).transpose(0, 1).flatten(1, 2)
    score_NHW = of_own_slot(query_KRd @ key_SKWd.transpose(2, 3)) * scaling
    weight_NHW = reference.weights_of(score_NHW, seen, **more)
    weight_KRW = weight_NHW.unflatten(1, (num_groups, -1)).transpose(0, 1).flatten(1, 2)
    return of_own_slot(weight_KRW @ value_SKWd).to(query_NHd.dtype)


def find_reference(device: torch.device, dtype: torch.dtype, **heads) -> Attend:
    """The attention for a model of this dtype: in float32 a row has the same bits in any batch only by the reference."""
    return as_a_kernel(attend_by_slots if dtype == torch.float64 else reference.attend)


def use_references(monkeypatch) -> None:
    """Let models and draws use the references of the kernels, as they use the kernels on a GPU."""
    for module in ("transformer", "xlnet"):
        monkeypatch.setattr(f"draftmill.decoders.backbones.{module}.find_attention", find_reference)
    monkeypatch.setattr("draftmill.decoders.backbones.network.find_layers", lambda *_, **__: reference.LAYERS)
    monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: sample)


def use_graphs(monkeypatch, *, watches: bool = False) -> Replaying:
    """Capture and replay on this CPU, or on a pretended GPU."""
    use_references(monkeypatch)
    if watches:  # as on a device, where nothing looks at data to decide what to do
        monkeypatch.setattr("draftmill.decoders.draws.sampling._looks", lambda law_RV: False)
    recorder = Replaying(watches=watches)
    monkeypatch.setattr("draftmill.decoders.engine.cuda_graphs.find_recorder", lambda device: recorder)
    return recorder
