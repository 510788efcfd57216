"""Chat templates: the conventions templates rely on, and refusals that say why."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.tiny_model import CHAT_TEMPLATE
from tpu_engine.errors import InvalidModel, InvalidRequest
from tpu_engine.text.chat_template import ChatTemplate, choose_template

USER = [{"role": "user", "content": "hi <b>"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **options)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "S"}, *USER]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi <b><|im_end|>\n"
    assert render(CHAT_TEMPLATE, messages, add_generation_prompt=False) == text
    assert render(CHAT_TEMPLATE, messages) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi <b></s>"),
        ("{% if true %}\n  {% if true %}\nx\n{% endif %}\n{% endif %}\n", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b>"}]'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi <b>"),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2031"),
        ("{% if tools is defined and tools %}T{% endif %}", "T"),
        ("{{ messages[0].missing }}", ""),
    ],
)
def test_conventions(source: str, text: str) -> None:
    assert render(source, now=datetime(2031, 3, 5), variables={"tools": [1]}) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ missing.deeper }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ strftime_now('%Y') }}", "none was given"),
    ],
)
def test_refusals_give_the_templates_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"messages must be accepted.*{reason}") as caught:
        render(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([*USER, {"role": 3, "content": "x"}], r"messages\[1\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
    ],
)
def test_messages_are_checked(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        render(CHAT_TEMPLATE, messages)


def test_no_template_and_bad_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, {}).render(USER)
    with pytest.raises(InvalidModel, match="chat template: not valid"):
        ChatTemplate("{% for %}", {})


def test_choosing_among_named_templates() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert choose_template(named, "here") == "D"
    assert choose_template("X", "here") == "X"
    assert choose_template(None, "here") is None
    with pytest.raises(InvalidModel, match="here: chat_template"):
        choose_template(named[:1], "here")
