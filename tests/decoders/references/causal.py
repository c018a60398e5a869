"""Plain references of the causal decoders: one sample, no cache, every random choice made by a chooser (choosers.py).

Written to be compared with the papers and enumerated, like any_subset.py for any-subset models: the batched decoders must
give the same tokens and counts from the same noise, and the exact distribution of this code is summed up.

Sources: Leviathan et al., 2023, Algorithm 1; Chen et al., 2023, Algorithm 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.heads.markov import MarkovHead, distance_index
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.choosers import Rule
from tests.decoders.references.sampling import log_law

Drafting = Callable[[list[int], Rule, int], tuple[list[Tensor], list[int]]]
"""(all tokens, rule, most drafts) -> (distributions q, drafts)."""
Stop = Callable[[list[int]], bool]
"""Whether these generated tokens end the sample."""


@dataclass(slots=True)
class Trail:
    """One sample in progress: its tokens in order, and its counters."""

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


class PlainCausal:
    """A causal model without a cache: every call recomputes all rows. One text at a time."""

    def __init__(self, backbone: Model, *, length: int, sampling: Sampling, suppressed: Sequence[int] = ()) -> None:
        self.backbone, self.length, self.sampling = backbone, length, sampling
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.int64)
        backbone.allocate(1, length)

    def law(self, tokens: Sequence[int]) -> Tensor:
        """Return the warped log-probabilities of the token after `tokens`, [V]."""
        column_N = torch.arange(len(tokens))
        low_IN, high_IN = torch.zeros(1, len(tokens), dtype=torch.int64), (column_N + 1).unsqueeze(0)
        rows = token_rows([0], [len(tokens)], torch.tensor(list(tokens)), column_N, column_N, (low_IN, high_IN))
        logits_1V = self.backbone.logits(self.backbone.forward(rows)[-1:])
        return log_law(logits_1V.index_fill(-1, self._suppressed, -torch.inf), self.sampling)[0]

    def logprob(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Return the log-probability of `tokens` after the prompt."""
        text = [*prompt, *tokens]
        return sum(float(self.law(text[:place])[text[place]]) for place in range(len(prompt), len(text)))


def speculative(
    model: PlainCausal,
    prompt: Sequence[int],
    rule: Rule,
    *,
    k: int,
    draft: Drafting,
    stop: Stop = lambda generated: False,
    calls: Callable[[int], int] = lambda drafts: drafts,
) -> Trail:
    """Draft, verify in one forward, commit accepted drafts and the token after them; `calls` counts drafting forwards."""
    trail = Trail(list(prompt))
    while (n := len(trail.tokens)) < model.length:
        room = min(k, model.length - n - 1)
        laws, drafts = draft(trail.tokens, rule, room) if room else ([], [])
        trail.lookups += calls(len(drafts)) if room else 0
        trail.nfe += 1
        new, accepted = _judged(model, trail.tokens, rule, laws, drafts)
        ends = next((cut for cut in range(1, len(new) + 1) if stop(trail.tokens[len(prompt) :] + new[:cut])), None)
        new = new[:ends]
        trail.tokens += new
        proposed = len(drafts) if ends is None else min(len(drafts), ends)
        trail.close(drafts=proposed, accepted=min(accepted, len(new)), committed=len(new))
        if ends is not None:
            break
    return trail


def _judged(
    model: PlainCausal, tokens: list[int], rule: Rule, laws: list[Tensor], drafts: list[int]
) -> tuple[list[int], int]:
    """What a forward commits: accepted drafts, and the recovered token or the bonus."""
    n, new = len(tokens), list[int]()
    for q_V, draft in zip(laws, drafts, strict=True):
        ok, token = rule.settle(model.law(tokens + new), q_V, draft, n + len(new), n)
        new.append(token)
        if not ok:
            return new, len(new) - 1
    new.append(rule.direct(model.law(tokens + new), n + len(new), n))
    return new, len(drafts)


def by_model(drafter: PlainCausal) -> Drafting:
    """A smaller model drafts, one token after the other."""

    def draft(tokens: list[int], rule: Rule, count: int) -> tuple[list[Tensor], list[int]]:
        laws, drafts = list[Tensor](), list[int]()
        for _ in range(count):
            laws.append(drafter.law(tokens + drafts))
            drafts.append(rule.draft(laws[-1], len(tokens) + len(drafts), len(tokens)))
        return laws, drafts

    return draft


class PlainMasked:
    """A masked-diffusion model without a cache: all rows of a canvas see all of it. One canvas at a time."""

    def __init__(
        self,
        backbone: Model,
        *,
        mask_id: int,
        sampling: Sampling,
        suppressed: Sequence[int] = (),
        shift: int = 0,
        tail: int | None = None,
    ) -> None:
        self.backbone, self.mask_id, self.sampling, self._shift, self._tail = backbone, mask_id, sampling, shift, tail
        self._suppressed = torch.tensor([*suppressed, mask_id], dtype=torch.int64)

    def laws(self, canvas: Sequence[int]) -> Tensor:
        """Warped log-probabilities of every position's token, [L, V]; with a `tail`, masks extend the canvas to that length."""
        return self.laws_of(self.hidden(canvas))

    def laws_of(self, hidden_RD: Tensor) -> Tensor:
        """The warped log-probabilities of the tokens that hidden states speak of, [R, V]."""
        logits_RV = self.backbone.logits(hidden_RD)
        return log_law(logits_RV.index_fill(-1, self._suppressed, -torch.inf), self.sampling)

    def logits(self, canvas: Sequence[int]) -> Tensor:
        """The raw logits of every position's token, [L, V], the mask's included."""
        return self.backbone.logits(self.hidden(canvas))

    def hidden(self, canvas: Sequence[int]) -> Tensor:
        """The hidden state that predicts every position's token, [L, D]."""
        tokens = [*canvas, *[self.mask_id] * ((self._tail or 0) - len(canvas))]
        self.backbone.allocate(1, len(tokens))
        column_N = torch.arange(len(tokens))
        low_IN = torch.zeros(1, len(tokens), dtype=torch.int64)
        all_IN = torch.full_like(low_IN, len(tokens))
        rows = token_rows([0], [len(tokens)], torch.tensor(tokens), column_N, column_N, (low_IN, all_IN))
        return self.backbone.forward(rows).roll(self._shift, 0)


@torch.no_grad()
def corrected(backbone: Model, head: MarkovHead, hidden_1D: Tensor, text: Sequence[int], num_unseen: int) -> Tensor:
    """The hidden state [1, D] of the position after `text`, computed without the last tokens of `text`."""
    rank = len(text)
    embedded_2D = backbone.embed(torch.tensor([text[max(rank - back, 0)] for back in (1, 2)]))
    away_2 = distance_index(torch.tensor(rank), torch.tensor([rank - 1, max(rank - 2, 0)]))
    corrected_1D: Tensor = head(
        hidden_1D,
        prev_RD=embedded_2D[:1],
        prev_distance_R=away_2[:1],
        before_RD=embedded_2D[1:],
        before_distance_R=away_2[1:],
        num_unseen_R=torch.tensor([num_unseen]),
    )
    return corrected_1D


def by_diffusion(
    drafter: PlainMasked,
    *,
    gamma: int,
    steps: int,
    arrange: Callable[[int, int], Sequence[int]] | None = None,
    head: MarkovHead | None = None,
) -> Drafting:
    """A masked-diffusion model drafts in chunks of ceil(gamma / steps), left to right or as `arrange` (decided, count) says.

    Left to right, a `head` may correct each row for the tokens before it, of which those of its own chunk are unseen.
    """

    def draft(tokens: list[int], rule: Rule, count: int) -> tuple[list[Tensor], list[int]]:
        order = range(count) if arrange is None else arrange(len(tokens), count)
        chunk, n = -(-gamma // steps), len(tokens)
        drafts, laws = [drafter.mask_id] * count, dict[int, Tensor]()
        for first in range(0, count, chunk):
            hidden_LD = drafter.hidden([*tokens, *drafts])
            for place in order[first : first + chunk]:
                row_1D = hidden_LD[n + place : n + place + 1]
                if head is not None:
                    row_1D = corrected(drafter.backbone, head, row_1D, [*tokens, *drafts[:place]], place - first)
                laws[place] = drafter.laws_of(row_1D)[0, : drafter.mask_id]
                drafts[place] = rule.draft(laws[place], n + place, n)
        return [laws[place] for place in range(count)], drafts

    return draft


def by_lookup(vocab_size: int, *, max_n: int, min_n: int) -> Drafting:
    """The text so far drafts; each draft is a point mass."""

    def draft(tokens: list[int], rule: Rule, count: int) -> tuple[list[Tensor], list[int]]:
        after = _last_match(tokens, max_n, min_n)
        if after is None:
            return [], []
        text = list(tokens)
        for _ in range(count):
            text.append(text[after])
            after += 1
        drafts = text[len(tokens) :]
        laws = [
            torch.zeros(vocab_size, dtype=torch.float64).index_fill(0, torch.tensor([d]), 1.0).log() for d in drafts
        ]
        return laws, drafts

    return draft


def _last_match(tokens: list[int], max_n: int, min_n: int) -> int | None:
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for after in range(len(tokens) - 1, n - 1, -1):
            if tokens[after - n : after] == tokens[len(tokens) - n :]:
                return after
    return None
