"""Conversations become the prompts that transformers makes of them, also where the answer has begun."""

import pytest

from draftmill.actors.rows.chat import ChatTemplate
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Chat
from draftmill.jobs.eval.model import DraftmillLM, render
from draftmill.jobs.eval.spec import EvalSpec
from draftmill.storage.errors import UserError
from tests.actors.rows.test_prompts import chat_folder, chatting
from tests.actors.tokenizers_for_tests import byte_level

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
