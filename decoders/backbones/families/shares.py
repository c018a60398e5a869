"""Which models can be split over several processes, and each process's share of their sizes; from config.json alone.

transformers' plan (`base_model_tp_plan`) for the modules of these families, whose names they all share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from draftmill.decoders.backbones.families.rotary import RotaryShape

COLUMNS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Products split by their outputs (transformers: colwise)."""
ROWS: Final = ("o_proj", "down_proj")
"""Products split by their inputs (transformers: rowwise); the ranks' results are added."""
SPLIT_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose transformers module has exactly this plan."""
_SPLIT: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
FIELD: Final = "workers.gpus_per_model"


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal parts of a model."""

    rank: int
    count: int


def kind_of(name: str) -> Literal["columns", "rows", "whole"]:
    """How the plan splits the tensor with this name."""
    product = name.rsplit(".", 2)[-2]
    return "columns" if product in COLUMNS else "rows" if product in ROWS else "whole"


def check_shares(name: str, shape: Any, count: int) -> None:
    """ValueError, with the field's path, if a model of family `name` can't be split into `count` parts."""
    if count == 1:
        return
    if name not in SPLIT_FAMILIES:
        raise ValueError(
            f"{FIELD}: {count}, but models of family {name!r} can't be split; allowed: 1 "
            f"(families with a tensor-parallel plan: {', '.join(SPLIT_FAMILIES)})"
        )
    sizes = {key: getattr(shape, key) for key in _SPLIT}
    uneven = [f"{key} = {size}" for key, size in sizes.items() if size % count]
    if uneven:
        allowed = [n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
        raise ValueError(
            f"{FIELD}: {count} does not divide this model's {', '.join(uneven)}; allowed: {', '.join(map(str, allowed))}"
        )


def share_of_shape(shape: RotaryShape, share: Share) -> RotaryShape:
    """The sizes of a process's part: fewer heads of the same width, a smaller inner width."""
    return replace(shape, **{key: getattr(shape, key) // share.count for key in _SPLIT})
