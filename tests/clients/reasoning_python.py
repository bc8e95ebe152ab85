"""Reasoning as Python clients read it: LiteLLM, and the OpenAI SDK that came with it. Run by `run`.

The server must take all output for reasoning, as `--reasoning-parser deepseek_r1` does for a model that knows none.
"""

from __future__ import annotations

import unittest
from typing import Any

import litellm
from checks import MESSAGES, TARGET, main
from openai import OpenAI

CLIENT = OpenAI(base_url=TARGET.v1, api_key=TARGET.api_key, max_retries=0, timeout=90)
REQUEST: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def complete(**options: Any) -> Any:
    model = f"hosted_vllm/{TARGET.model}"
    return litellm.completion(model=model, api_base=TARGET.v1, api_key=TARGET.api_key, **REQUEST, **options)


class OpenAISdk(unittest.TestCase):
    def test_both_names_of_the_field_have_the_reasoning_and_content_is_empty(self) -> None:
        answer = CLIENT.chat.completions.create(model=TARGET.model, **REQUEST)
        message = answer.choices[0].message
        extra = message.model_extra or {}
        self.assertTrue(extra["reasoning_content"])
        self.assertEqual(extra["reasoning"], extra["reasoning_content"])
        self.assertFalse(message.content)
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        self.assertEqual(answer.usage.completion_tokens_details.reasoning_tokens, 12)

    def test_streamed_reasoning_adds_up_in_both_fields(self) -> None:
        answer: Any = CLIENT.chat.completions.create(model=TARGET.model, **REQUEST).choices[0].message
        deltas: list[Any] = [
            choice.delta
            for chunk in CLIENT.chat.completions.create(model=TARGET.model, stream=True, **REQUEST)
            for choice in chunk.choices
        ]
        for name in ("reasoning_content", "reasoning"):
            told = "".join(getattr(delta, name, None) or "" for delta in deltas)
            self.assertEqual(told, getattr(answer, name), name)
        self.assertEqual("".join(delta.content or "" for delta in deltas), "")

    def test_reasoning_can_be_left_out(self) -> None:
        answer = CLIENT.chat.completions.create(model=TARGET.model, extra_body={"include_reasoning": False}, **REQUEST)
        self.assertFalse((answer.choices[0].message.model_extra or {}).get("reasoning_content"))


class LiteLLM(unittest.TestCase):
    def test_reasoning_is_read_from_an_answer_and_from_a_stream(self) -> None:
        told = complete().choices[0].message.reasoning_content
        self.assertTrue(told)
        chunks = complete(stream=True)
        pieces = [
            getattr(choice.delta, "reasoning_content", None) or "" for chunk in chunks for choice in chunk.choices
        ]
        self.assertEqual("".join(pieces), told)


if __name__ == "__main__":
    main(OpenAISdk, LiteLLM)
