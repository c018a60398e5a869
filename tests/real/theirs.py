"""What transformers says of the same checkpoint: greedy continuations, scores, how near a tie was."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

BATCH = 8
TIE = 1e-3
"""A difference of two logits below which float32 in another order of sums may choose either token."""


class Theirs:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def chat_ids(self, prompt: str) -> list[int]:
        """The prompt in the form of the chat template, up to where the answer begins."""
        talk = [{"role": "user", "content": prompt}]
        return list(self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True)["input_ids"])

    @torch.no_grad()
    def greedy(self, prompts: Mapping[str, list[int]], new_tokens: int, ends: Sequence[int]) -> dict[str, list[int]]:
        """`generate` without sampling, prompts of like lengths together: each one's new tokens, its end token included."""
        found: dict[str, list[int]] = {}
        keys = sorted(prompts, key=lambda key: len(prompts[key]))
        for start in range(0, len(keys), BATCH):
            group = keys[start : start + BATCH]
            width = max(len(prompts[key]) for key in group)
            gaps = [width - len(prompts[key]) for key in group]
            given = torch.tensor([[0] * gap + prompts[key] for gap, key in zip(gaps, group, strict=True)])
            mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
            out = self.model.generate(
                given,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=list(ends),
                pad_token_id=ends[0],
            )
            for key, row in zip(group, out[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                found[key] = row[:end]
        return found

    @torch.no_grad()
    def logits(self, ids: Sequence[int], new: Sequence[int]) -> Tensor:
        """Logits [N, V], float32, from which each of the new tokens was chosen."""
        found = self.model(torch.tensor([[*ids, *new]])).logits[0].float()
        return found[len(ids) - 1 : len(ids) - 1 + len(new)]

    def score(self, ids: Sequence[int], text: Sequence[int]) -> float:
        log_p = self.logits(ids, text).double().log_softmax(-1)
        return float(log_p.gather(1, torch.tensor(list(text)).unsqueeze(1)).sum())

    def is_tie(self, ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether two continuations part where the two tokens were as good as equally likely."""
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if first is None:
            return False
        row = self.logits(ids, theirs)[first]
        return float((row[ours[first]] - row[theirs[first]]).abs()) < TIE
