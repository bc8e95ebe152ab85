from __future__ import annotations

import re

import pytest

from pellucid.core import CheckpointError, InvalidRequestError
from pellucid.tokenizer.chat_template import ChatTemplate

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
QUOTES_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
COPIES_ARGUMENTS = QUOTES_ARGUMENTS.replace(" | tojson", "")


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def called(arguments: str) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def test_named_tokens_generation_prompt_tools_and_kwargs_reach_the_template() -> None:
    source = "{{ bos_token }}{{ tools | length }}{{ messages[0].content }}{{ add_generation_prompt }}{{ thinking }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([user("hi")], [{"name": "f"}], False, thinking="on") == "<s>1hiFalseon"


def test_no_tools_is_none_not_an_empty_list() -> None:
    template = ChatTemplate("{{ 'none' if tools is none else 'some' }}")
    assert template.render([user("hi")], []) == "none"


def test_tojson_writes_neither_html_nor_ascii_escapes() -> None:
    template = ChatTemplate("{{ messages[0].extra | tojson }} {{ messages[0].extra | tojson(separators=(',', ':')) }}")
    assert template.render([{**user(""), "extra": {"é": "<a>&'"}}]) == '{"é": "<a>&\'"} {"é":"<a>&\'"}'


def test_loop_controls_generation_blocks_and_dates_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source).render([user("a"), user("b")]) == "a4"


def test_block_tags_leave_no_line_behind() -> None:
    assert ChatTemplate("  {% if true %}\nx\n  {% endif %}\n").render([user("")]) == "x\n"


def test_a_refusal_of_the_template_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render([user("a")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ nothing.there }}", "{{ 1 // 0 }}", "{{ messages.append(1) }}"],
)
def test_whatever_goes_wrong_inside_the_template_is_a_request_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template refuses these messages"):
        ChatTemplate(source).render([user("a")])


def test_the_sandbox_keeps_python_out_of_reach() -> None:
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequestError, match="unsafe"):
        ChatTemplate(source).render([user("a")])


def test_a_template_that_does_not_compile_is_a_checkpoint_error_with_its_line() -> None:
    with pytest.raises(CheckpointError, match=r"line 2.*--chat-template"):
        ChatTemplate("fine\n{% for %}")


def test_text_parts_are_joined_where_the_template_expects_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(CHATML).render([user(parts)]) == "<|user|>one\ntwo<|end|>"


def test_text_parts_go_through_where_the_template_reads_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}]
    assert ChatTemplate(READS_PARTS).render([user(parts)]) == "[one][]"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (user([{"type": "image_url", "image_url": {}}]), "part of type 'image_url'"),
        (user([7]), "part of type 'int'"),
        (user(7), "content must be text"),
        ({"content": "x"}, "must be an object with a role"),
    ],
)
def test_malformed_messages_are_refused_by_index(message: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[1\].*{reason}"):
        ChatTemplate(CHATML).render([user("fine"), message])


def test_arguments_become_objects_where_the_template_would_quote_them_twice() -> None:
    assert ChatTemplate(QUOTES_ARGUMENTS).render([user(""), called('{"x": "é"}')]) == 'None{"x": "é"}'


def test_arguments_stay_text_where_the_template_copies_them() -> None:
    assert ChatTemplate(COPIES_ARGUMENTS).render([user(""), called('{"x":1}')]) == 'None{"x":1}'


def test_arguments_that_are_not_json_do_not_fail_the_chat() -> None:
    assert ChatTemplate(QUOTES_ARGUMENTS).render([user(""), called("{oops")]) == 'None"{oops"'


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("<|end|>", "<|end|>"),
        ("\n<|end|>x", "<|end|>"),
        ("<|end|><|end|>", "<|end|>"),
        ("text<|end|>", None),
        ("", None),
    ],
)
def test_the_end_of_turn_is_what_the_template_writes_after_an_assistant(after: str, expected: str | None) -> None:
    template = ChatTemplate("{% for m in messages %}<|turn|>{{ m.content }}" + after + "{% endfor %}")
    assert template.find_end_of_turn(["<|end|>", "<|turn|>"]) == expected


def test_of_tokens_that_begin_alike_the_longest_is_the_end_of_turn() -> None:
    assert ChatTemplate("{{ messages[-1].content }}<end><2>").find_end_of_turn(["<end>", "<end><2>"]) == "<end><2>"


def test_a_template_that_refuses_the_probe_has_no_known_end_of_turn() -> None:
    assert ChatTemplate("{{ raise_exception('no') }}").find_end_of_turn(["<|end|>"]) is None


CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ 'A' + m.content + 'B' }}{% endfor %}", "AB"),
        ("{% for m in messages %}{{ 'none' if m.content is none else 'text' }}{% endfor %}", "none"),
        # Joins the arguments as text, and tells None from "": as DeepSeek's do.
        (
            "{% for m in messages %}{% if m.content is none %}{{ 'N' + m.tool_calls[0].function.arguments }}{% endif %}"
            "{% endfor %}",
            "N{}",
        ),
    ],
)
def test_calls_without_content_come_as_the_template_can_take_them(source: str, expected: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert ChatTemplate(source).render([message]) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", "developer=x;"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}system={{ m.content }};{% endif %}{% endfor %}",
            "system=x;",
        ),
    ],
)
def test_developers_are_heard_by_templates_that_know_system_messages_only(source: str, expected: str) -> None:
    assert ChatTemplate(source).render([{"role": "developer", "content": "x"}]) == expected


AS_IT_IS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMS = AS_IT_IS.replace("m.content", "m.content | trim")
TRIMS_NEWLINES = AS_IT_IS.replace("m.content", "m.content.rstrip('\\n')")
HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def unfinished(source: str, content: object) -> str:
    return ChatTemplate(source).render_unfinished([user("q"), {"role": "assistant", "content": content}])


@pytest.mark.parametrize("content", ["end", "im", "m", "<|", "|>", "assistant", "q", ""])
def test_an_unfinished_message_ends_with_its_text_also_where_markers_are_spelled_alike(content: str) -> None:
    assert unfinished(AS_IT_IS, content) == HEAD + content


@pytest.mark.parametrize("content", ["```python\n", "One, two, ", "a\n \n", " ", "a"])
def test_white_space_at_the_end_of_an_unfinished_message_stays_as_far_as_the_template_writes_it(content: str) -> None:
    assert unfinished(AS_IT_IS, content) == HEAD + content
    assert unfinished(TRIMS_NEWLINES, content + " \n\n") == HEAD + content + " "
    # What it trims at the beginning can be gone as well.
    assert unfinished(TRIMS, content) == HEAD + content.strip()


def test_an_unfinished_message_may_be_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    assert unfinished(AS_IT_IS, parts[:1]) == HEAD + "one"
    assert unfinished(AS_IT_IS, parts) == HEAD + "one\ntwo "
    assert unfinished(READS_PARTS, parts) == "q[one][two "


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[-1].content[:3] }}"])
def test_an_unfinished_message_that_the_template_does_not_write_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="whose text the chat template writes as it is"):
        unfinished(source, "Hello ")


def test_an_unfinished_message_that_is_written_otherwise_before_white_space_is_refused() -> None:
    source = "{{ 'x' if messages[-1].content == 'Hello ' else messages[-1].content }}"
    with pytest.raises(InvalidRequestError, match="whose text the chat template writes as it is"):
        unfinished(source, "Hello ")


@pytest.mark.parametrize("content", [None, []])
def test_a_message_without_text_cannot_be_unfinished(content: object) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape("needs a last message that has text")):
        unfinished(READS_PARTS, content)


def test_no_message_cannot_be_unfinished() -> None:
    with pytest.raises(InvalidRequestError, match="needs a last message"):
        ChatTemplate(AS_IT_IS).render_unfinished([])
