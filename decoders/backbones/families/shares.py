"""Which models can be split over several processes, and each process's share of their sizes; from config.json alone.

transformers' plan (`base_model_tp_plan`) for the modules of these families, whose names they all share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from draftmill.decoders.backbones.families.causal import CausalFamily, head_width, key_value_heads, read_config

Config = Mapping[str, Any]

COLUMNS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Products split by their outputs (transformers: colwise)."""
ROWS: Final = ("o_proj", "down_proj")
"""Products split by their inputs (transformers: rowwise); the ranks' results are added."""
SPLIT_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose transformers module has exactly this plan."""
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


def check_shares(family: CausalFamily | None, name: str, config: Config, count: int) -> None:
    """ValueError, with the field's path, if a model of this family can't be split into so many parts."""
    if count == 1:
        return
    if family is None or name not in SPLIT_FAMILIES:
        raise ValueError(
            f"{FIELD}: {count}, but models of family {name!r} can't be split; allowed: 1 "
            f"(families with a tensor-parallel plan: {', '.join(SPLIT_FAMILIES)})"
        )
    parsed = read_config(family, config)
    sizes = {
        "num_attention_heads": parsed.num_attention_heads,
        "num_key_value_heads": key_value_heads(parsed),
        "intermediate_size": parsed.intermediate_size,
    }
    uneven = [f"{key} = {size}" for key, size in sizes.items() if size % count]
    if uneven:
        allowed = [n for n in range(1, min(sizes.values()) + 1) if not any(size % n for size in sizes.values())]
        raise ValueError(
            f"{FIELD}: {count} does not divide this model's {', '.join(uneven)}; allowed: {', '.join(map(str, allowed))}"
        )


def share_of_config(family: CausalFamily, config: Config, share: Share) -> dict[str, Any]:
    """config.json of a rank's part: fewer heads of the same width, a smaller inner width."""
    parsed = read_config(family, config)
    return dict(config) | {
        "num_attention_heads": parsed.num_attention_heads // share.count,
        "num_key_value_heads": key_value_heads(parsed) // share.count,
        "head_dim": head_width(parsed),
        "intermediate_size": parsed.intermediate_size // share.count,
    }
