"""The options of lm-evaluation-harness that `draftmill eval` passes on."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from draftmill.storage.errors import UserError
from draftmill.storage.json_text import parse_as

Seeds = tuple[int | None, int | None, int | None, int | None]
"""Seeds of Python's `random`, of numpy, of torch and of the choice of few-shot examples; None leaves one as it is."""

SEEDS: Final[Seeds] = (0, 1234, None, 1234)
"""The defaults of lm-evaluation-harness, except torch's: nothing here draws from it, and setting it imports torch."""

HINT: Final = (
    " (what lm_eval has for models, batches, devices and outputs is in SPEC: model.path, batching.max_rows, model.device, "
    "output.path; finished requests are always kept there)"
)
"""Said of an option that is not known here."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate and how prompts are made; the meaning of each option is that of lm-evaluation-harness.

    `limit` is a number of documents per task, or a share below 1. `samples` maps a task to the indices of its documents.
    `gen_kwargs` replace values in the tasks' generation_kwargs.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    samples: dict[str, list[int]] | None = None
    include_path: str | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    system_instruction: str | None = None
    seeds: Seeds = SEEDS
    confirm_run_unsafe_code: bool = False
    predict_only: bool = False
    write_out: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    bootstrap_iters: int = 100_000

    def __post_init__(self) -> None:
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UserError("it needs --apply_chat_template, too", field="--fewshot_as_multiturn")

    @property
    def multiturn(self) -> bool:
        """Whether few-shot examples are turns of a conversation: by default wherever there is a chat template."""
        return self.apply_chat_template if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn


def require_lm_eval() -> None:
    """UserError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise UserError("draftmill eval needs lm-evaluation-harness: pip install 'draftmill[lm-eval]'")


def parse_settings(values: Sequence[str], option: str) -> dict[str, Any]:
    """Read `a=1,b=[2,3]` (in one value or several), or a JSON object, as lm_eval does. UserError for anything else."""
    text = ",".join(values)
    if not text or text.lstrip().startswith("{"):
        return _object(text or "{}", option)
    require_lm_eval()
    from lm_eval._cli.utils import key_val_to_dict

    try:
        settings = {key.strip(): value for key, value in key_val_to_dict(text).items()}
    except ValueError:
        settings = {"": text}
    if "" in settings:
        raise UserError(f"{text!r} is not allowed; allowed: KEY=VALUE,KEY=VALUE, or a JSON object", field=option)
    return settings


def documents(text: str | None) -> dict[str, list[int]] | None:
    """The documents of each task, from JSON (`{"task": [0, 5]}`) or from a file that holds it; None without text."""
    if text is None:
        return None
    field = "--samples"
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{text!r} is neither JSON nor a file: {error.strerror}", field=field) from None
    chosen = _object(text, field)
    for task, numbers in chosen.items():
        good = isinstance(numbers, list) and all(type(number) is int for number in numbers)
        if not good or not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
            raise UserError(f"{task}: {numbers!r} is not allowed; allowed: a list of different indices", field=field)
    return chosen


def seeds(text: str) -> Seeds:
    """Read one number, or four, with None for none; three leave the default for few-shot examples."""
    parts = [part.strip().lower() for part in text.split(",")]
    parts = {1: parts * 4, 3: [*parts, str(SEEDS[3])]}.get(len(parts), parts)
    try:
        random, numpy, torch, fewshot = (None if part == "none" else int(part) for part in parts)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a whole number, or four, separated by commas"
        ) from None
    return random, numpy, torch, fewshot


def truth(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ArgumentTypeError(f"{text!r} is not allowed; allowed: true, false (templates have no names here)")
    return text.lower() == "true"


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        return parse_as(dict[str, Any], text)
    except ValueError as error:
        raise UserError(f"not a JSON object: {error}", field=option) from None
