from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pellucid.server.endpoints import tokenize as endpoint
from pellucid.server.errors import ApiError
from pellucid.server.protocol.body import decode_body
from pellucid.server.protocol.tokenize import MAX_TOKENS, DetokenizeRequest, TokenizeRequest

USER = {"role": "user", "content": "hi"}


def tokenize(**fields: Any) -> TokenizeRequest:
    request, unknown = decode_body(json.dumps(fields).encode(), TokenizeRequest)
    assert unknown == ()
    return request


def refused_param(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as raised:
        tokenize(**fields)
    assert raised.value.status == 400
    return raised.value.param


def test_a_text_gets_special_tokens_and_a_chat_has_them_from_its_template() -> None:
    assert tokenize(prompt="hi").adds_special_tokens
    assert not tokenize(messages=[USER]).adds_special_tokens
    assert not tokenize(prompt="hi", add_special_tokens=False).adds_special_tokens
    assert tokenize(messages=[USER], add_special_tokens=True).adds_special_tokens


def test_it_is_either_a_text_or_a_chat() -> None:
    assert tokenize(prompt="").prompt == ""
    assert refused_param() == "prompt"
    assert refused_param(prompt="hi", messages=[USER]) == "prompt"
    assert refused_param(messages=[]) == "messages"


def test_a_chat_is_rendered_as_the_chat_endpoint_renders_it() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = tokenize(messages=[USER], tools=[tool], chat_template_kwargs={"thinking": True})
    assert request.template_messages() == [USER]
    assert request.template_tools() == [tool]
    assert request.adds_generation_prompt
    assert not tokenize(messages=[USER], add_generation_prompt=False).adds_generation_prompt
    assert refused_param(messages=[USER], chat_template_kwargs={"messages": []}) == "chat_template_kwargs"
    assert refused_param(messages=[USER], continue_final_message=True) == "continue_final_message"
    assert refused_param(prompt="hi", continue_final_message=True) == "continue_final_message"


def test_detokenize_takes_ids() -> None:
    request, _ = decode_body(b'{"tokens": [1, 2]}', DetokenizeRequest)
    assert request.tokens == [1, 2]
    for tokens in ("[-1]", "[1.5]", '"1"', "null", "[99999999999999999999]", f"[1{',1' * MAX_TOKENS}]"):
        with pytest.raises(ApiError) as raised:
            decode_body(f'{{"tokens": {tokens}}}'.encode(), DetokenizeRequest)
        assert raised.value.status == 400 and str(raised.value.param).startswith("tokens")


def test_long_texts_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def note(result: Any) -> Any:
        threads.add(threading.get_ident())
        return result

    tokenizer = SimpleNamespace(
        encode=lambda *_, **__: note([1]), token_bytes=lambda _: note(b"a"), decode=lambda *_, **__: note("a")
    )
    context = SimpleNamespace(
        tokenizer=tokenizer, encoder=SimpleNamespace(vocab_size=9), engine=SimpleNamespace(plan=1), max_model_len=9,
        check_model=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(endpoint, "context_of", lambda _: context)

    async def read(_: Any, __: Any, type: Any) -> Any:
        return (
            tokenize(prompt="a", return_token_strs=True) if type is TokenizeRequest else DetokenizeRequest(tokens=[1])
        )

    monkeypatch.setattr(endpoint, "read_request", read)
    for serve in (endpoint.tokenize, endpoint.detokenize):
        asyncio.run(serve(SimpleNamespace()))  # type: ignore[arg-type]
    assert threads and threading.get_ident() not in threads
