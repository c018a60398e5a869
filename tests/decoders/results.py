"""What results are: a digest of everything that a sample's outcome says, for each decoder over a wide matrix of settings.

`python -m tests.decoders.results` writes results.txt anew, for a change that is meant to change results; the commit says why.
A line of it holds the settings, digests of the fields below, and a weighted sum of all log-probabilities, which are floats and
therefore compared with a tolerance. Models are exact tables in float64, so that digests are the same on every machine.

    text       tokens, finish, whether a score is greedy
    nfe        forwards of the model, by kind
    counts     forwards of the drafter, iterations, drafts, acceptances, histogram
    trace      every iteration
    totals     tokens that were committed, prompts and what of them was shared
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import TypeAdapter

from draftmill.decoders.base import JOB_SETTINGS, ModelInfo, Outcome, Request, RowSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, build_scorer
from draftmill.decoders.settings import DecoderSettings
from tests.decoders.references.table import TableBackbone
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import run_all, toy_heads

PLACE: Final = Path(__file__).with_name("results.txt")
FIELDS: Final = ("text", "nfe", "counts", "trace", "totals")
VOCAB: Final = 3
LENGTH: Final = 6
_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter(DecoderSettings)

COUPLED: Final = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(top_k=2),
)
REJECTION: Final = (Sampling(acceptance="rejection"), Sampling(acceptance="rejection", temperature=0.8, top_p=0.9))
OWN: Final = (RowSettings(temperature=0.0, token_logprobs=True), RowSettings(temperature=1.3, top_p=0.6), JOB_SETTINGS)


class EndsWith:
    """A stop string of two tokens."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """The text up to its first 2, 1."""
        found = (place + 2 for place in range(len(tokens) - 1) if tuple(tokens[place : place + 2]) == (2, 1))
        return next((keep for keep in found if keep > num_checked), None)


ENDS: Final = (None, Stops((1,)), Stops((0,), EndsWith()))


@dataclass(frozen=True)
class Case:
    """One line: settings of a decoder, its model, and all that it is run over."""

    settings: dict[str, Any]
    shift: int = 0
    samplings: tuple[Sampling, ...] = COUPLED
    slots: tuple[int, ...] = (1, 4)
    ends: tuple[Stops | None, ...] = (None,)
    head: bool = False
    estimate: Estimate | None = None

    @property
    def name(self) -> str:
        words = [str(self.settings["kind"])]
        if self.estimate is not None:
            words.append(f"score by {self.estimate.kind} of {self.estimate.samples}")
        words += [f"{name}={_short(value)}" for name, value in self.settings.items() if name != "kind"]
        words += ["head"] * self.head + [f"shift={self.shift}"] * bool(self.shift)
        rejects = any(one.acceptance == "rejection" for one in self.samplings)
        return " ".join(words + ["rejection"] * rejects)

    @property
    def family(self) -> str:
        return str(_ADAPTER.validate_python(self.settings).baseline.runs_on)


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "")


MASKS: Final = {"kind": "masks"}
RUN: Final = {"kind": "run", "path": ["earlier"], "k": 3}


# ---- the matrix ----------------------------------------------------------------------------------------------------


def causal_cases() -> Iterator[Case]:
    """With drafts of every kind; suffix drafts excepted, which depend on neighbours."""
    model = {"kind": "model", "path": "drafter"}
    drafted: list[dict[str, Any]] = [{"kind": "autoregressive"}]
    for k in (1, 3):
        drafted += [
            {"kind": "speculative", "k": k, "drafter": {"kind": "ngram", "max_n": 2}},
            {"kind": "speculative", "k": k, "drafter": model},
            {"kind": "speculative", "k": k, "drafter": MASKS},
        ]
    drafted += [{"kind": "speculative", "drafter": RUN}]
    for gamma, steps, order in ((1, 1, "left_to_right"), (3, 1, "native"), (3, 2, "left_to_right"), (4, 2, "native")):
        given = {"kind": "specdiff", "gamma": gamma, "steps": steps, "order": order, "drafter": {"path": "drafter"}}
        drafted.append(given | {"head": "none"})
    for settings in drafted:
        for samplings in (COUPLED, REJECTION):
            yield Case(settings, samplings=samplings, ends=ENDS)
    for sampling in (COUPLED, REJECTION):
        head = {"kind": "specdiff", "gamma": 3, "steps": 2, "drafter": {"path": "drafter"}}
        yield Case(head, samplings=sampling, head=True)
        yield Case(head | {"window": "full"}, samplings=sampling, head=True)
    for size, window in itertools.product((1, 3), ("fixed", "running")):
        yield Case({"kind": "jacobi", "block_size": size, "window": window}, ends=ENDS)
    for size, blocks, verify, pool in ((2, 2, 3, 4), (1, 3, 1, 0), (3, 2, 2, 4)):
        given = {"kind": "multiblock_jacobi", "block_size": size, "blocks": blocks, "verify_size": verify}
        yield Case(given | {"pool_size": pool, "spawn_ratio": 0.5}, ends=ENDS)


def any_subset_cases() -> Iterator[Case]:
    """With the model's own drafts, of a head, of an n-gram; in two forwards or one."""
    yield Case({"kind": "any_subset"}, samplings=(*COUPLED, *REJECTION))
    yield Case({"kind": "parallel"}, samplings=(*COUPLED, *REJECTION))
    for samplings in (COUPLED, REJECTION):
        yield Case({"kind": "assd", "drafter": RUN}, samplings=samplings)
    for k, (drafter, head, fused) in itertools.product(
        (1, 2, 4),
        (
            ("self", False, "none"),
            ("self", True, "none"),
            ("ngram", False, "none"),
            ("self", False, "rows"),
            ("self", True, "rows"),
        ),
    ):
        settings = {"kind": "assd", "k": k, "drafter": drafter, "fused": fused}
        settings |= {"head": "auto" if head else "none", "rows": "ends" if k == 2 and fused == "rows" else "all"}
        for samplings in (COUPLED, REJECTION):
            yield Case(settings, samplings=samplings, head=head)


def masked_cases() -> Iterator[Case]:
    """Every way to choose with every cache; what is left turns with them."""
    caches: list[dict[str, Any]] = [
        {"cache": "none"},
        {"cache": "prefix"},
        {"cache": "dual_strict"},
        {"cache": "dual_strict", "refresh": 2},
        {"cache": "prefix", "refresh": 3},
    ]
    relaxed: list[dict[str, Any]] = [{"cache": "dual_relaxed"}, {"cache": "dual_relaxed", "refresh": 2}]
    ways: list[dict[str, Any]] = [
        {"kind": "stepwise"},
        {"kind": "stepwise", "tokens_per_step": 2},
        {"kind": "stepwise", "steps": 3},
        {"kind": "stepwise", "steps": 3, "schedule": "dream"},
        {"kind": "threshold", "tau": 0.5},
        {"kind": "factor", "factor": 1.0},
        {"kind": "ssd", "draft_length": 1},
        {"kind": "ssd", "draft_length": 3},
        {"kind": "ssd", "draft_length": 3, "tree": "mixed"},
        {"kind": "ssd", "draft_length": 5, "tree": "mixed"},
    ]
    number = 0
    for way, confidence in itertools.product(ways, ("top1", "margin", "entropy", "random")):
        if way["kind"] in ("threshold", "factor") and confidence in ("entropy", "random"):
            continue
        for life in caches + relaxed * (way["kind"] == "ssd"):
            number += 1
            shape: dict[str, Any] = {"block_length": None if way.get("schedule") else (None, 2, 3)[number % 3]}
            shape |= {"draws": "kept" if number % 5 == 0 else "fresh"}
            several = COUPLED[number % 2 :: 2]  # two of the four, in turn
            yield Case(
                way | {"confidence": confidence} | life | shape,
                shift=number % 2,
                samplings=several,
                slots=(1, 3) if number % 4 == 0 else (3,),
                ends=ENDS[:2] if number % 4 == 1 else (None,),
            )

    for tree, shift in itertools.product(("chain", "mixed"), (0, 1)):
        given = {"kind": "ssd", "draft_length": 3, "tree": tree, "drafter": {"kind": "run", "path": ["earlier"]}}
        yield Case(given, shift=shift, slots=(3,), ends=ENDS[:2])


def ancestral_cases() -> Iterator[Case]:
    """Steps fewer and more than masks."""
    for predictor, steps in itertools.product(("ddpm", "analytic", "euler"), (2, 8)):
        yield Case({"kind": "ancestral", "predictor": predictor, "steps": steps})


def block_cases() -> Iterator[Case]:
    """Every schedule, router and estimator over every size; editing, sub-blocks, one forward for two."""
    schedules: list[dict[str, Any]] = [
        {"schedule": "static"},
        {"schedule": "dynamic", "tau": 0.6},
        {"schedule": "sequential"},
        {"schedule": "entropy", "tau": 0.9},
    ]
    verified: list[dict[str, Any]] = [
        {},
        {"router": {"kind": "min_span", "span": 2}},
        {"router": {"kind": "score", "tau": 0.1}, "estimator": {"kind": "confidence"}},
        {"router": {"kind": "score", "tau": 0.1}, "estimator": {"kind": "margin"}, "cost": {"kind": "dynamic"}},
        {"router": {"kind": "hysteresis", "on": 0.3, "off": -0.1}},
        {"router": {"kind": "hysteresis", "on": 0.3, "off": -0.1}, "estimator": {"kind": "linear_margin"}},
        {"router": {"kind": "bandit"}, "estimator": {"kind": "renyi"}},
        {"router": {"kind": "score", "tau": 0.1}, "estimator": {"kind": "hard_entropy"}, "steps": 2},
        {"causal_draft": True},
        {"router": {"kind": "min_span", "span": 2}, "draws": "kept"},
    ]
    parts: list[dict[str, Any]] = [
        {"block_size": 4, "sub_block": 2},
        {"block_size": 3, "tau_edit": 0.5, "post_steps": 2},
        {"block_size": 3, "steps": 2, "draws": "kept"},
    ]
    block, ours = {"kind": "block_diffusion"}, {"kind": "s2d2"}
    for shift, size, causal in itertools.product((0, 1), (1, 2, 3), (False, True)):
        shape = {"block_size": size, "causal_cache": causal}
        more: dict[str, Any] = {"shift": shift, "slots": (3,), "ends": ENDS[:2]}
        for schedule in schedules:
            yield Case(block | shape | schedule, **more, samplings=COUPLED[:3])
        if not shift:
            yield Case(block | shape | {"fused": True}, **more, samplings=(*COUPLED[:3], *REJECTION))
        for one in verified:
            samplings = COUPLED[:3] if one.get("draws") else (*COUPLED[:2], REJECTION[0])
            yield Case(ours | shape | one, **more, samplings=samplings)
        if causal:
            for head in (False, True):
                yield Case(ours | shape | {"fused": True}, **more, samplings=(*COUPLED[:2], *REJECTION), head=head)
            yield Case(ours | shape | {"drafter": RUN}, **more, samplings=(*COUPLED[:2], *REJECTION))
    for one, shift in itertools.product(parts, (0, 1)):
        for kind in (block, ours):
            verifies = {"router": {"kind": "min_span", "span": 2}} if kind is ours else {}
            yield Case(kind | one | verifies, shift=shift, samplings=COUPLED[:3], ends=ENDS[:2])
    for temper in (1.0, 0.5):
        yield Case(ours | {"block_size": 3, "temper": temper}, samplings=REJECTION)
        yield Case(ours | {"block_size": 3, "temper": temper, "paper_compat": True}, samplings=COUPLED[:1])


def scores() -> Iterator[Case]:
    """Exact ones, and both estimators."""
    for kind in ("autoregressive", "any_subset"):
        yield Case({"kind": kind}, estimate=Estimate())
    for kind, (samples, by), shift in itertools.product(
        ("stepwise", "ancestral"), ((8, "llada"), (8, "mdlm"), (64, "auto")), (0, 1)
    ):
        if (kind, shift) != ("ancestral", 1):
            yield Case({"kind": kind}, shift=shift, estimate=Estimate.model_validate({"kind": by, "samples": samples}))
    for size, causal, shift in itertools.product((1, 2, 3), (False, True), (0, 1)):
        given = {"kind": "block_diffusion", "block_size": size, "causal_cache": causal}
        yield Case(given, shift=shift, estimate=Estimate(samples=16))


def cases() -> list[Case]:
    parts = (causal_cases(), any_subset_cases(), masked_cases(), ancestral_cases(), block_cases(), scores())
    return list(itertools.chain.from_iterable(parts))


# ---- what is run ---------------------------------------------------------------------------------------------------


@cache
def _table(vocab_size: int, seed: int) -> TokenTable:
    return TokenTable(vocab_size=vocab_size, num_positions=LENGTH, seed=seed)


@cache
def _two_streams() -> TableBackbone:
    return TableBackbone(vocab_size=VOCAB, num_positions=LENGTH)


@cache
def _ancestral() -> TokenTable:
    made = TokenTable(vocab_size=VOCAB + 1, num_positions=LENGTH, seed=2)
    made.table_PXV -= 0.5  # as large as the scores of a trained model
    return made


MODELS: Final[dict[str, Callable[[], Any]]] = {
    # Copies share the table and nothing else: the cache is allocated in each.
    "causal": lambda: copy(_table(VOCAB, 1)),
    "any_subset": lambda: copy(_two_streams()),
    "masked": lambda: copy(_table(VOCAB + 1, 4)),
    "ancestral": lambda: copy(_ancestral()),
    "blocks": lambda: copy(_table(VOCAB + 1, 1)),
}


def _info(family: str, shift: int = 0) -> ModelInfo:
    if family in ("causal", "any_subset"):
        return ModelInfo("table", VOCAB, None, None, family, 0)  # type: ignore[arg-type]
    return ModelInfo("table", VOCAB + 1, VOCAB, LENGTH, family, 0, (VOCAB,), shift)  # type: ignore[arg-type]


def requests_of(case: Case, *, with_rows: bool = False) -> list[Request]:
    """Ragged texts, of which some have the beginning of others or the same canvas; more than there are slots."""
    rng, found = np.random.default_rng(11), list[Request]()
    family, first = case.family, rng.integers(0, VOCAB, LENGTH).astype(np.int32)
    from_left = family in ("causal", "blocks")
    for index in range(9):
        length = int(rng.integers(2, LENGTH + 1))
        canvas = (first[:length] if index % 3 else rng.integers(0, VOCAB, length)).astype(np.int32)
        scored = order = None
        if case.estimate is not None:
            scored = np.arange(int(rng.integers(0 if family == "masked" else 1, length)), length)
            if not from_left:
                scored = np.sort(rng.permutation(length)[: len(scored)])
        elif from_left:
            canvas[int(rng.integers(1, length)) :] = -1
        else:
            canvas[rng.random(length) < 0.7] = -1
            if index == 4:
                canvas[:] = -1
            if family == "any_subset" and index % 2:
                order = rng.permutation(np.flatnonzero(canvas < 0))
        settings = OWN[index % 3] if with_rows else JOB_SETTINGS
        if case.settings["kind"] in ("stepwise", "threshold", "factor", "ssd", "ancestral"):
            settings = replace(settings, token_logprobs=False)
        found.append(Request(index, sample_key(1, str(index)), canvas, order, settings=settings, scored=scored))
    if (
        case.settings.get("drafter") == RUN
    ):  # other texts of the rows, of which some end early; some rows have none, or two
        texts = [rng.integers(0, VOCAB, int(rng.integers(0, LENGTH + 1))).astype(np.int32) for _ in range(18)]
        found = [replace(one, earlier=tuple(texts[2 * n : 2 * n + n % 3])) for n, one in enumerate(found)]
    # n = 3 samples of one row, and one with a key of its own beside its like.
    copies = [replace(found[5], index=9 + copy_, key=sample_key(1, f"5#{copy_}")) for copy_ in range(2)]
    return found + copies


def engine_of(case: Case, sampling: Sampling, slots: int, stops: Stops | None = None) -> Any:
    """What decodes or scores with these settings; its models have empty caches."""
    settings, family = _ADAPTER.validate_python(case.settings), case.family
    diffuses = settings.name() == "specdiff"
    drafts = isinstance(given := case.settings.get("drafter"), dict) and "path" in given and given.get("kind") != "run"
    drafter = (MODELS["masked"]() if diffuses else copy(_table(VOCAB, 2))) if drafts else None
    info = _info(family, case.shift)
    if given == MASKS:
        family, info = "blocks", replace(info, vocab_size=VOCAB + 1, mask_id=VOCAB, suppressed=(VOCAB,))
    backbone = MODELS[family]()
    setup = Setup(
        backbone=backbone,
        info=info,
        sampling=sampling,
        max_rows=slots,
        max_tokens=1 << 20,
        stops=stops,
        heads=toy_heads((drafter or backbone).width) if case.head else None,
        drafter=drafter,
        drafter_info=_info("masked" if diffuses else "causal") if drafts else None,
        trace=True,
    )
    return build_decoder(setup, settings) if case.estimate is None else build_scorer(setup, settings, case.estimate)


def outcomes_of(case: Case) -> Iterator[tuple[Outcome, Any]]:
    """Every outcome of the case, and after each run's last one the totals of the engine."""
    settings = _ADAPTER.validate_python(case.settings)
    by_row = settings.draws_by_row and case.estimate is None and case.samplings[0].acceptance == "coupled"
    for sampling, slots, stops in itertools.product(case.samplings, case.slots, case.ends):
        for with_rows in (False, True) if by_row and sampling.temperature == 1.0 and not sampling.top_k else (False,):
            decoder = engine_of(case, sampling, slots, stops)
            found = run_all(decoder, requests_of(case, with_rows=with_rows))
            totals = (decoder.stats.committed, decoder.stats.prompt_rows, decoder.stats.prompt_rows_shared)
            for index in sorted(found):
                yield found[index], totals


def _told(outcome: Outcome, totals: Any) -> dict[str, Any]:
    return {
        "text": (outcome.tokens.tolist(), outcome.finish, outcome.is_greedy, outcome.error),
        "nfe": (outcome.nfe, sorted((outcome.nfe_kinds or {}).items())),
        "counts": (
            outcome.nfe_draft, outcome.iterations, outcome.proposed, outcome.accepted, outcome.accept_hist
        ),
        "trace": [
            (one.iteration, one.nfe, one.proposed, one.committed, one.positions) for one in outcome.trace or []
        ],
        "totals": totals,
    }  # fmt: skip


def line_of(case: Case) -> tuple[dict[str, str], float]:
    """The digests of a case, and the sum of its log-probabilities."""
    digests = {name: hashlib.blake2b(digest_size=4) for name in FIELDS}
    total, number = 0.0, 0
    for outcome, totals in outcomes_of(case):
        for name, value in _told(outcome, totals).items():
            digests[name].update(json.dumps(value).encode())
        floats = [outcome.logprob, outcome.logprob_stderr]
        floats += [] if outcome.token_logprobs is None else outcome.token_logprobs.tolist()
        for value in floats:
            number += 1
            total += 0.0 if value is None else value * (1 + number % 7 / 8)
    return {name: one.hexdigest() for name, one in digests.items()}, total


def read() -> dict[str, tuple[dict[str, str], float]]:
    """The committed digests, by the names of their cases."""
    found = {}
    for line in PLACE.read_text().splitlines()[1:]:
        name, _, told = line.partition(" | ")
        *digests, total = told.split()
        found[name] = (dict(zip(FIELDS, digests, strict=True)), float(total))
    return found


def main() -> None:
    """Write the digests anew; says which lines changed, and in which fields."""
    torch.set_num_threads(1)  # as in the tests, which is also faster beside other work
    before, lines = read() if PLACE.exists() else {}, ["settings | " + " ".join(FIELDS) + " log_probs"]
    for case in cases():
        digests, total = line_of(case)
        lines.append(f"{case.name} | {' '.join(digests.values())} {total:.5f}")
        if case.name in before:
            old, old_total = before[case.name]
            changed = [name for name in FIELDS if old[name] != digests[name]]
            changed += ["log_probs"] * (abs(total - old_total) > 1e-3)
            if changed:
                print(f"{case.name}: {', '.join(changed)}", file=sys.stderr)
    PLACE.write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 1} lines", file=sys.stderr)


if __name__ == "__main__":
    main()
