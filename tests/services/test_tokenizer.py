"""Texts and conversations to ids: one BOS, templates as models ship them, errors that name their cause."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scheduler.chat_template import ChatTemplate, ChatTemplateError, Message
from scheduler.tokenizer import Tokenizer, TokenizerError
from tests.services.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama_style, reference

HELLO = [Message("user", "Hello")]


def render(template: str, messages: list[Message] | None = None, **special: str) -> str:
    return ChatTemplate(template).render(messages or HELLO, special, add_generation_prompt=True)


def test_a_text_gets_one_bos() -> None:
    tokenizer = Tokenizer(llama_style())
    assert tokenizer.encode("Hello") == reference(llama_style()).encode("Hello").ids
    assert tokenizer.encode("Hello").count(1) == 1


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    assert Tokenizer(llama_style()).encode("<s>Hello").count(1) == 1


def test_no_special_tokens_are_added_when_none_are_wanted() -> None:
    assert 1 not in Tokenizer(llama_style()).encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize("template", ["{{ bos_token }}Hello", "Hello"])
def test_a_conversation_gets_one_bos_whether_the_template_has_it_or_not(template: str) -> None:
    ids = Tokenizer(llama_style(template)).encode_chat(HELLO)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_the_configuration_can_ask_for_bos() -> None:
    plain, asked = Tokenizer(byte_level()), Tokenizer(byte_level(add_bos_token=True))
    assert asked.encode("Hello")[1:] == plain.encode("Hello")


def test_a_conversation_is_rendered_by_the_template() -> None:
    tokenizer = Tokenizer(byte_level(CHAT_TEMPLATE))
    assert tokenizer.render_chat(HELLO) == "<|user|>Hello<|end|><|assistant|>"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<|user|>Hello<|end|>"


def test_a_template_is_compiled_once_and_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile it costs a thousand times what a short conversation's rendering does, and the event loop waits."""
    template = ChatTemplate("{% set seen = seen | default('') ~ messages[0].content %}{{ seen }}")
    assert template.render([Message("user", "one")], {}, add_generation_prompt=True) == "one"
    monkeypatch.setattr("jinja2.Environment.compile", None)
    assert template.render([Message("user", "two")], {}, add_generation_prompt=True) == "two"


def test_the_template_may_stand_in_the_configuration_alone_or_named() -> None:
    alone = Tokenizer(byte_level(chat_template="{{ messages[0].content }}!"))
    several = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    named = Tokenizer(byte_level(chat_template=several))
    assert (alone.render_chat(HELLO), named.render_chat(HELLO)) == ("Hello!", "yes")


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(HELLO)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}\n    {% if m.role == 'user' %}\nx\n    {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% if tools %}tools{% endif %}{{ messages[0]['content'] | trim }}", "Hello"),
    ],
)
def test_templates_find_what_they_expect(template: str, text: str) -> None:
    assert render(template, bos_token="<s>", eos_token="</s>") == text


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{% if %}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_one_kind_of_error(template: str, why: str) -> None:
    with pytest.raises(ChatTemplateError, match=why):
        render(template)


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{"}, {"tokenizer.json": b"{}"}])
def test_files_that_cannot_be_used_are_an_error_of_their_own(files: Mapping[str, bytes]) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer(files)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": [{}]}', "'name'"),
        ("chat_template.jinja", b"\xff", "can't decode byte 0xff"),
    ],
)
def test_nothing_in_an_executors_files_ends_the_scheduler(file: str, content: bytes, why: str) -> None:
    """They were other errors than a TokenizerError, for which the process stopped."""
    with pytest.raises(TokenizerError, match=f"the tokenizer's files cannot be read: .*{why}"):
        Tokenizer(byte_level() | {file: content})


def test_the_demo_model_renders_its_conversation(smollm2_files: Mapping[str, bytes]) -> None:
    tokenizer = Tokenizer(smollm2_files)
    rendered = tokenizer.render_chat([Message("user", "Hi")])
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat([Message("user", "Hi")])
    assert ids == reference(smollm2_files).encode(rendered, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_no_text_of_more_bytes_than_the_bound_has_so_few_tokens() -> None:
    tokenizer = Tokenizer(byte_level())
    longest = tokenizer.max_text_bytes(1)
    assert max(len(tokenizer.decode([token_id]).encode()) for token_id in range(256, 300)) <= longest
    for text in ("Hello", "x" * 100, "héllo wörld " * 9):
        assert len(text.encode()) <= tokenizer.max_text_bytes(len(tokenizer.encode(text)))
