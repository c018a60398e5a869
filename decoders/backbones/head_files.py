"""The files of a draft head: sizes, the decoder that it serves, and the tensors that it must hold.

Imports no torch; decoders/backbones/heads.py loads the network. `draft_head.json` holds the sizes and the kind,
`draft_head.safetensors` the weights. Legend: H = hidden width of the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, cast

from safetensors import SafetensorError, safe_open

from draftmill.decoders.backbones.checkpoint import pointer_problem, read_object
from draftmill.decoders.common_settings import DecoderChoice

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
MAX_DISTANCE: Final = 16
MAX_UNSEEN: Final = 8

HeadKind = Literal["assd", "specdiff"]
"""The decoder that a head was trained for; it is useless for the other."""


def read_sizes(folder: Path, kind: HeadKind) -> dict[str, int] | None:
    """The sizes of the heads in a folder; None if it has none. Raises ValueError if one of the two files is missing, or the
    heads are of another kind."""
    path, weights = folder / CONFIG, folder / WEIGHTS
    if not path.exists() and not weights.exists():
        return None
    if not (path.exists() and weights.exists()):
        raise ValueError(f"decoder.head: {folder} needs both {CONFIG} and {WEIGHTS}")
    if problem := pointer_problem(weights):
        raise ValueError(f"decoder.head: {problem}")
    sizes = read_object(path, "decoder.head") or {}
    # The files of the first heads don't name their kind, since there was only one.
    own_kind = sizes.pop("kind", "assd")
    if own_kind != kind:
        raise ValueError(f"decoder.head: {path} is of kind {own_kind!r}; allowed here: {kind}")
    missing = {"width", "markov_hidden"} - sizes.keys()
    unknown = sizes.keys() - {"width", "markov_hidden"}
    if missing or unknown:
        raise ValueError(f"decoder.head: {path}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ValueError(f"decoder.head: {path}: {sizes}; allowed: whole numbers from 1 on")
    return sizes


def check_files(folder: Path, kind: HeadKind) -> bool:
    """Whether a folder has heads; ValueError, as `read_sizes`, and where the weights do not fit the sizes."""
    sizes = read_sizes(folder, kind)
    if sizes is None:
        return False
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"decoder.head: {path} is damaged or not a safetensors file: {error}") from error
    if shapes != head_shapes(sizes):
        raise ValueError(f"decoder.head: {path} does not fit {folder / CONFIG}")
    return True


def head_shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of heads of these sizes."""
    width, hidden = sizes["width"], sizes["markov_hidden"]
    distances = (2 * MAX_DISTANCE + 1, width)
    return {
        "markov.distance_prev.weight": distances,
        "markov.distance_before.weight": distances,
        "markov.age.weight": (MAX_UNSEEN + 1, width),
        "markov.norm.weight": (3 * width,),
        "markov.norm.bias": (3 * width,),
        "markov.up.weight": (hidden, 3 * width),
        "markov.up.bias": (hidden,),
        "markov.down.weight": (width, hidden),
        "markov.down.bias": (width,),
    }


def head_place(settings: DecoderChoice, folder: Path) -> tuple[Path, HeadKind] | None:
    """The folder and kind of the draft head that the settings name; None without one. 'auto' is the one in `folder`. Raises
    ValueError if the named folder has none."""
    head = settings.draft_head
    if head == "none":
        return None
    kind = cast("HeadKind", settings.name())
    if head == "auto":
        return folder, kind
    place = Path(head).expanduser()
    if read_sizes(place, kind) is None:
        raise ValueError(f"decoder.head: {head} has no {CONFIG} and {WEIGHTS}")
    return place, kind


def check_heads(settings: DecoderChoice, folder: Path) -> None:
    """Raise ValueError if the named draft head, or the one in `folder`, does not fit the decoder."""
    place = head_place(settings, folder)
    if place is not None:
        check_files(*place)
