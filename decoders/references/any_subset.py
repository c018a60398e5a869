"""Plain references of the any-subset decoders: one sample, no cache, every random choice made by a chooser (choosers.py).

Written to be compared with the papers and enumerated, not to be fast: the batched decoders must give the same tokens from
the same noise, and the exact distribution of this code is summed up.

Sources: Guo and Ermon, ASSD, Algorithms 1 and 2; one_pass.py for the one-pass variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoders.any_subset.drafters import ngram_counts
from decoders.backbones.base import Backbone, Rows
from decoders.backbones.heads import ChainHead, DraftHeads, distance_index
from decoders.backbones.visibility import content_limits
from decoders.common_settings import Sampling
from decoders.draws.sampling import log_law
from decoders.references.choosers import Rule


class PlainModel:
    """An any-subset model without a cache: every call recomputes all content rows. One canvas at a time."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        order: Sequence[int],
        num_prompt: int,
        sampling: Sampling,
        suppressed: Sequence[int] = (),
    ) -> None:
        self.backbone, self.order, self.num_prompt, self.sampling = backbone, list(order), num_prompt, sampling
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.int64)
        backbone.allocate(1, len(self.order))
        backbone.set_order(0, torch.tensor(self.order))

    def hidden(self, tokens: Sequence[int], queries: Sequence[tuple[int, int]]) -> Tensor:
        """Return the hidden states [Q, D] of (rank, limit) queries, given the tokens at ranks 0, 1, .. ."""
        columns = torch.arange(len(tokens)).unsqueeze(0)
        pairs = torch.tensor(list(queries), dtype=torch.int64).reshape(-1, 2)
        limits = content_limits(columns, torch.tensor([self.num_prompt]))
        rows = Rows(
            slots_B=torch.tensor([0]),
            content_tokens_BC=torch.tensor([list(tokens)], dtype=torch.int64),
            content_columns_BC=columns,
            content_limits_BC=limits,
            content_valid_BC=torch.ones_like(columns, dtype=torch.bool),
            query_columns_BQ=pairs[None, :, 0],
            query_limits_BQ=pairs[None, :, 1],
            query_valid_BQ=torch.ones(1, len(pairs), dtype=torch.bool),
            num_columns=max(int(limits.max()) if len(tokens) else 0, int(pairs[:, 1].max())),
            num_positions=len(self.order),
        )
        return self.backbone.forward(rows)[0]

    def law(self, hidden_D: Tensor) -> Tensor:
        """Return the warped log-probabilities of one hidden state, [V]."""
        return self.law_of_logits(self.backbone.logits(hidden_D.unsqueeze(0)))

    def law_of_logits(self, logits_1V: Tensor) -> Tensor:
        """Suppress and warp, [V]."""
        suppressed = logits_1V.index_fill(-1, self._suppressed, -torch.inf)
        return log_law(suppressed, self.sampling)[0]


@dataclass(slots=True)
class Trail:
    """One sample in progress: its tokens by rank, and its counters."""

    tokens: list[int]
    nfe: int = 0
    lookups: int = 0
    proposed: int = 0
    accepted: int = 0
    committed: list[int] = field(default_factory=list)

    def close(self, *, drafts: int, accepted: int, committed: int) -> None:
        """End one iteration."""
        self.proposed += drafts
        self.accepted += accepted
        self.committed.append(committed)


def sequential(model: PlainModel, prompt: Sequence[int], rule: Rule) -> Trail:
    """One token a forward, in order."""
    trail = Trail(list(prompt))
    while (n := len(trail.tokens)) < len(model.order):
        p_V = model.law(model.hidden(trail.tokens, [(n, n)])[0])
        trail.nfe += 1
        trail.tokens.append(rule.direct(p_V, model.order[n], n))
        trail.close(drafts=0, accepted=0, committed=1)
    return trail


def assd(
    model: PlainModel,
    prompt: Sequence[int],
    rule: Rule,
    *,
    k: int,
    ngram: bool = False,
    heads: DraftHeads | None = None,
) -> Trail:
    """ASSD with the model itself (Algorithm 1) or the context n-gram (Algorithm 2) as drafter."""
    trail = Trail(list(prompt))
    while (n := len(trail.tokens)) < len(model.order):
        count = min(k, len(model.order) - n)
        by_ngram = ngram and model.order[n] > 0
        if by_ngram:
            laws, drafts = _ngram_drafts(model, trail, rule, count)
            trail.lookups += count
        else:
            hidden_QD = model.hidden(trail.tokens, [(n + offset, n) for offset in range(count)])
            trail.nfe += 1
            laws, drafts = _markov_drafts(model, trail.tokens, rule, hidden_QD, [n] * count, heads)
        if count == 1 and not by_ngram:
            # The draft's row is the target's row: there is nothing to verify.
            trail.tokens.append(drafts[0])
            trail.close(drafts=1, accepted=1, committed=1)
            continue
        _verify(model, trail, rule, laws, drafts, first_is_sure=not by_ngram)
    return trail


def _verify(
    model: PlainModel, trail: Trail, rule: Rule, laws: list[Tensor], drafts: list[int], *, first_is_sure: bool
) -> None:
    n, count = len(trail.tokens), len(drafts)
    hidden_QD = model.hidden(trail.tokens + drafts, [(n + offset, n + offset) for offset in range(count)])
    trail.nfe += 1
    accepted = 0
    for offset, draft in enumerate(drafts):
        # The same row twice: the ratio is 1 exactly, whatever the arithmetic of the second forward.
        p_V = laws[0] if first_is_sure and offset == 0 else model.law(hidden_QD[offset])
        ok, token = rule.settle(p_V, laws[offset], draft, model.order[n + offset], n)
        trail.tokens.append(token)
        accepted += ok
        if not ok:
            break
    trail.close(drafts=count, accepted=accepted, committed=len(trail.tokens) - n)


def _ngram_drafts(model: PlainModel, trail: Trail, rule: Rule, count: int) -> tuple[list[Tensor], list[int]]:
    n, num_positions = len(trail.tokens), len(model.order)
    canvas = torch.zeros(1, num_positions, dtype=torch.int64)
    decided = torch.zeros(1, num_positions, dtype=torch.bool)
    for token, position in zip(trail.tokens, model.order, strict=False):
        canvas[0, position], decided[0, position] = token, True
    known = {position: int(canvas[0, position]) for position in model.order[:n]}
    laws, drafts = [], []
    for offset in range(count):
        position = model.order[n + offset]
        left, has_left = known.get(position - 1, 0), position - 1 in known
        counts = ngram_counts(
            canvas, decided, torch.tensor([left]), torch.tensor([has_left]), model.backbone.vocab_size
        )
        counts = counts if float(counts.sum()) > 0 else torch.ones_like(counts)
        laws.append(model.law_of_logits(counts.log()))
        drafts.append(rule.draft(laws[-1], position, n))
        known[position] = drafts[-1]
    return laws, drafts


def one_pass(
    model: PlainModel,
    prompt: Sequence[int],
    rule: Rule,
    *,
    k: int,
    rows: str = "all",
    chain: bool = False,
    heads: DraftHeads | None = None,
) -> Trail:
    """One forward an iteration: verify the drafts, and propose the next window from stale rows or the chain head."""
    trail, laws, drafts = Trail(list(prompt)), list[Tensor](), list[int]()
    while (n := len(trail.tokens)) < len(model.order):
        end = len(model.order)
        checks = [(n + offset, n + offset) for offset in range(len(drafts) + 1) if n + offset < end]
        # Every stale row that might be asked for; the reference may compute more than the batched decoder does.
        stale = {
            (rank, n + cut): len(checks) + number
            for number, (cut, rank) in enumerate(
                (cut, rank) for cut in range(len(drafts) + 1) for rank in range(n + cut + 1, min(end, n + 2 * k + 1))
            )
        }
        hidden_QD = model.hidden(trail.tokens + drafts, checks + list(stale))
        trail.nfe += 1
        accepted = _settle_window(model, trail, rule, laws, drafts, hidden_QD)
        decided = len(trail.tokens)
        count = min(k, end - decided)
        if count <= 0:
            break
        if chain:
            assert heads is not None and heads.chain is not None, "the chain variant drafts with a head"
            laws, drafts = _chain_drafts(model, trail.tokens, rule, hidden_QD[accepted], count, heads.chain)
            continue
        cut = accepted if rows == "all" or accepted == len(drafts) else 0
        chosen = [hidden_QD[stale[(decided + offset, n + cut)]] for offset in range(count)]
        laws, drafts = _markov_drafts(model, trail.tokens, rule, torch.stack(chosen), [n + cut] * count, heads)
    return trail


def _settle_window(
    model: PlainModel, trail: Trail, rule: Rule, laws: list[Tensor], drafts: list[int], hidden_QD: Tensor
) -> int:
    n, accepted = len(trail.tokens), 0
    for offset, draft in enumerate(drafts):
        ok, token = rule.settle(model.law(hidden_QD[offset]), laws[offset], draft, model.order[n + offset], n)
        trail.tokens.append(token)
        accepted += ok
        if not ok:
            break
    if accepted == len(drafts) and len(trail.tokens) < len(model.order):
        rank = len(trail.tokens)
        trail.tokens.append(rule.direct(model.law(hidden_QD[accepted]), model.order[rank], n))
    trail.close(drafts=len(drafts), accepted=accepted, committed=len(trail.tokens) - n)
    return accepted


def _markov_drafts(
    model: PlainModel, tokens: list[int], rule: Rule, hidden_QD: Tensor, limits: list[int], heads: DraftHeads | None
) -> tuple[list[Tensor], list[int]]:
    when, known = len(tokens), list(tokens)
    laws, drafts = [], []
    for hidden_D, limit in zip(hidden_QD, limits, strict=True):
        rank = len(known)
        if heads is not None and rank > limit:
            hidden_D = _corrected(model, heads, hidden_D, known, rank, limit)  # noqa: PLW2901
        laws.append(model.law(hidden_D))
        drafts.append(rule.draft(laws[-1], model.order[rank], when))
        known.append(drafts[-1])
    return laws, drafts


def _corrected(
    model: PlainModel, heads: DraftHeads, hidden_D: Tensor, known: list[int], rank: int, limit: int
) -> Tensor:
    embed, order = model.backbone.embed, torch.tensor(model.order)
    prev, before = max(rank - 1, 0), max(rank - 2, 0)
    token = torch.tensor(known)
    with torch.no_grad():
        result: Tensor = heads.markov(
            hidden_D.unsqueeze(0),
            prev_RD=embed(token[prev : prev + 1]),
            prev_distance_R=distance_index(order[rank], order[prev]).reshape(1),
            before_RD=embed(token[before : before + 1]),
            before_distance_R=distance_index(order[rank], order[before]).reshape(1),
            num_unseen_R=torch.tensor([rank - limit]),
        )
    return result[0]


def _chain_drafts(
    model: PlainModel, tokens: list[int], rule: Rule, start_D: Tensor, count: int, head: ChainHead
) -> tuple[list[Tensor], list[int]]:
    when, known = len(tokens), list(tokens)
    laws, drafts, state_1D = [], [], start_D.unsqueeze(0)
    for _ in range(count):
        rank = len(known)
        by_position = dict(zip(model.order, known, strict=False))
        position, prev = model.order[rank], model.order[rank - 1]

        def neighbour(where: int, table: dict[int, int] = by_position) -> tuple[Tensor, Tensor]:
            embedded = model.backbone.embed(torch.tensor([table.get(where, 0)]))
            return embedded, torch.tensor([where in table])

        left, right = neighbour(position - 1), neighbour(position + 1)
        with torch.no_grad():
            state_1D = head(
                state_1D,
                prev_RD=model.backbone.embed(torch.tensor([known[-1]])),
                distance_R=distance_index(torch.tensor([position]), torch.tensor([prev])),
                left_RD=left[0],
                has_left_R=left[1],
                right_RD=right[0],
                has_right_R=right[1],
            )
        laws.append(model.law(state_1D[0]))
        drafts.append(rule.draft(laws[-1], position, when))
        known.append(drafts[-1])
    return laws, drafts
