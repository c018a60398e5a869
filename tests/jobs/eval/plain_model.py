"""A slow plain model for lm-evaluation-harness: transformers' forward over whole texts, one at a time, one token at a time."""

from collections.abc import Sequence

import torch
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.references.choosers import CoupledRule


class Plain(LM):  # type: ignore[misc]
    """Answers every request by itself. Sampled repeats draw with the noise of their key, as draftmill promises."""

    def __init__(self, model: str = "builtin:ar-tiny", *, seed: int) -> None:
        super().__init__()
        folder = fetch_model(model)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.seed, self.length = seed, int(self.model.config.max_position_embeddings)

    def law(self, tokens: Sequence[int]) -> torch.Tensor:
        """The log-probabilities of the token after each token, [T, V]."""
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        seen: dict[int, int] = {}
        answers = []
        for one in requests:
            repeat = seen.setdefault(id(one), 0)
            seen[id(one)] += 1
            key = sample_key(self.seed, f"{one.task_name}:{one.doc_id}:{one.idx}:{repeat}")
            answers.append(self.continued(one.args[0], one.args[1], key))
        return answers

    def continued(self, context: str, how: dict, key: int) -> str:
        prompt = self.tokenizer(context)["input_ids"]
        tokens, said = list(prompt), ""
        while len(tokens) - len(prompt) < how["max_gen_toks"]:
            law_V = self.law(tokens)[-1]
            if how.get("do_sample"):
                rule = CoupledRule(key, Sampling(temperature=how["temperature"], top_k=None, top_p=None))
                warped_V = (law_V / how["temperature"]).log_softmax(-1)
                tokens.append(rule.direct(warped_V.float(), len(tokens), len(tokens)))
            else:
                tokens.append(int(law_V.argmax()))
            said = self.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
            if tokens[-1] == self.tokenizer.eos_token_id or any(stop in said for stop in how["until"]):
                break
        for stop in how["until"]:
            said = said.split(stop)[0]
        return said

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [self.scored(*one.args) for one in requests]

    def scored(self, context: str, continuation: str) -> tuple[float, bool]:
        """The continuation's log-probability, and whether it is greedy."""
        if not context:
            ids = self.tokenizer(continuation)["input_ids"]
            return self.score([self.tokenizer.bos_token_id], ids)
        bare = context.rstrip()
        whole = self.tokenizer(context + continuation)["input_ids"]
        before = self.tokenizer(bare)["input_ids"]
        return self.score(before, whole[len(before) :])

    def score(self, before: list[int], ids: list[int]) -> tuple[float, bool]:
        law_TV = self.law([*before, *ids])[len(before) - 1 : -1]
        greedy = bool((law_TV.argmax(-1) == torch.tensor(ids)).all())
        return float(law_TV.gather(1, torch.tensor(ids).unsqueeze(1)).sum()), greedy

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for (text,) in (one.args for one in requests):
            windows = get_rolling_token_windows(
                token_list=self.tokenizer(text)["input_ids"],
                prefix_token=self.tokenizer.bos_token_id,
                max_seq_len=self.length - 1,
                context_len=1,
            )
            totals.append(sum(self.score(*make_disjoint_window(window))[0] for window in windows))
        return totals
