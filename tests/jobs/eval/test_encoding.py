"""Texts and conversations become the ids and prompts that lm_eval's own models and transformers make of them."""

from dataclasses import replace

import pytest

from draftmill.actors.rows.chat import ChatTemplate
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Chat
from draftmill.jobs.eval.model import DraftmillLM, render
from draftmill.jobs.eval.requests import Encoder, ScoredTokens
from draftmill.jobs.eval.spec import EvalSpec
from draftmill.storage.errors import UserError
from tests.actors.rows.test_prompts import beginning, chat_folder, chatting
from tests.actors.tokenizers_for_tests import byte_level, model_info

BEGIN, END = 1, 2


def encoder(tokenizer=None, most: int = 64) -> Encoder:
    return Encoder(tokenizer or beginning(), replace(model_info(max_length=most), kind="causal"))


def test_a_context_follows_the_tokenizers_begin_token_unless_it_spells_it():
    plain = tuple(beginning().encode("def f"))
    assert encoder().context("def f") == encoder().context("<s>def f") == (BEGIN, *plain)
    assert encoder().context("def f</s>") == (BEGIN, *plain, END)
    assert encoder().context("") == (BEGIN,)


def test_a_pair_is_cut_where_lm_eval_cuts_it():
    """TemplateLM's own code over the same tokenizer."""
    from lm_eval.api.model import TemplateLM

    class Theirs(TemplateLM):  # type: ignore[misc]
        eot_token_id = END

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            return [*(() if add_special_tokens is False else (BEGIN,)), *beginning().parse(string)]

        def _loglikelihood_tokens(self, requests, **_):
            raise NotImplementedError

        loglikelihood_rolling = generate_until = _loglikelihood_tokens

    for context, continuation in (("a b", " c"), ("a b ", "c"), ("a\n  ", "c d"), ("re", "turn x"), ("x", "\n")):
        before, after = Theirs()._encode_pair(context, continuation)
        assert encoder().pair(context, continuation) == ScoredTokens(tuple(before), tuple(after))


def test_without_a_context_the_prefix_token_comes_first():
    ids = tuple(beginning().encode("abc"))
    assert encoder().pair("", "abc") == ScoredTokens((BEGIN,), ids)
    assert encoder().pair("", "<s>abc") == ScoredTokens((BEGIN,), ids)
    spaced = tuple(beginning().encode("  abc"))
    assert encoder().pair("  ", "abc") == ScoredTokens((BEGIN,), spaced)
    filling = Encoder(beginning(), model_info())
    assert filling.pair("", "abc") == ScoredTokens((), ids)
    assert filling.context("abc") == (BEGIN, *ids)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20, 64])
def test_windows_are_lm_evals_of_one_token_less(length):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    text = "0123456789" * 7
    ids = beginning().encode(text[:length])
    assert len(ids) == length
    windows = get_rolling_token_windows(token_list=ids, prefix_token=BEGIN, max_seq_len=8 - 1, context_len=1)
    theirs = [ScoredTokens(tuple(before), tuple(after)) for before, after in map(make_disjoint_window, windows)]
    ours = list(encoder(most=8).windows(text[:length]))
    assert ours == theirs
    assert [token for one in ours for token in one.scored] == ids
    assert all(len(one.context) + len(one.scored) == 8 for one in ours[1:])


def test_an_empty_text_has_no_window():
    assert list(encoder().windows("")) == []


__all__ = ["chat_folder", "chatting"]

TALK = [{"role": "user", "content": "Is 7 odd?"}, {"role": "assistant", "content": "The answer is "}]


def test_a_conversation_ends_where_the_answer_begins_or_goes_on(chat_folder, chatting):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    assert chatting.chat is not None
    asked = theirs.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    begun = theirs.apply_chat_template(TALK, tokenize=False, continue_final_message=True)
    assert render(chatting.chat, TALK[:1], begun=False) == asked
    assert render(chatting.chat, TALK, begun=True) == begun and begun.endswith("The answer is ")


def test_the_arguments_of_the_spec_reach_the_template():
    template = ChatTemplate("{{ messages[0].content }}{% if thinking is false %} at once{% endif %}", {})
    model = DraftmillLM.__new__(DraftmillLM)
    model._spec = EvalSpec({}, {}, Chat(template_kwargs={"thinking": False}))
    model._tokenizer = Tokenizer(byte_level()._core, chat=template)
    assert model.apply_chat_template(TALK[:1]) == "Is 7 odd? at once"


def test_a_template_that_trims_gets_no_trailing_space():
    def chat(messages: list[dict[str, str]]) -> str:
        return "".join(f"[{one['role']}]{one['content'].strip()}!" for one in messages)

    assert render(chat, TALK, begun=True) == "[user]Is 7 odd?![assistant]The answer is"


def test_a_template_without_system_messages_gets_none_and_other_refusals_are_said(chatting):
    def chat(messages: list[dict[str, str]]) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system")
        return messages[0]["content"]

    assert render(chat, [{"role": "system", "content": "s"}, *TALK[:1]], begun=False) == "Is 7 odd?"
    assert chatting.chat is not None
    with pytest.raises(
        UserError, match="--apply_chat_template: the tokenizer's chat template refuses a conversation: no such"
    ):
        render(chatting.chat, [{"role": "odd", "content": "x"}], begun=False)
