"""LiteLLM, by its `hosted_vllm/` and `openai/` providers. Run by `run`, in its own venv.

`run` sets LITELLM_LOCAL_MODEL_COST_MAP, without which the import asks the network for a price list.
"""

from __future__ import annotations

import asyncio
import unittest
from typing import Any, Literal

import litellm
from checks import KEY_NOT_CHECKED, MESSAGES, TARGET, main
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]


FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": Weather.model_json_schema()}
TOOLS = [{"type": "function", "function": FUNCTION}]


class Provider:
    """The checks of one provider; `name` is what LiteLLM calls it. Mixed into a test case below."""

    name: str

    def options(self, **changes: Any) -> dict[str, Any]:
        """A greedy request of up to 16 tokens."""
        defaults = {"model": f"{self.name}/{TARGET.model}", "api_base": TARGET.v1, "api_key": TARGET.api_key}
        return {**defaults, "messages": MESSAGES, "max_tokens": 16, "temperature": 0, "num_retries": 0, **changes}

    def ask(self, **changes: Any) -> Any:
        return litellm.completion(**self.options(**changes))

    def test_answer_with_usage(self: Any) -> None:
        answer = self.ask()
        self.assertEqual((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 16))
        self.assertTrue(answer.choices[0].message.content)

    def test_stream_adds_up_to_the_answer(self: Any) -> None:
        whole = self.ask()
        chunks = list(self.ask(stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        self.assertEqual(reasons, ["length"])
        self.assertEqual(chunks[-1].usage.total_tokens, whole.usage.total_tokens)
        rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        self.assertEqual(rebuilt.choices[0].message.content, text)

    def test_asynchronous_stream_tells_the_same(self: Any) -> None:
        async def stream() -> str:
            chunks = await litellm.acompletion(**self.options(stream=True))
            return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

        self.assertEqual(asyncio.run(stream()), self.ask().choices[0].message.content)

    def test_required_tool_is_called_with_valid_arguments(self: Any) -> None:
        answer = self.ask(tools=TOOLS, tool_choice="required", max_tokens=200)
        [call, *_] = answer.choices[0].message.tool_calls
        self.assertEqual((call.function.name, answer.choices[0].finish_reason), ("weather", "tool_calls"))
        Weather.model_validate_json(call.function.arguments)

    def test_streamed_tool_call_is_rebuilt(self: Any) -> None:
        chunks = list(self.ask(tools=TOOLS, tool_choice="required", max_tokens=200, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        Weather.model_validate_json(rebuilt.choices[0].message.tool_calls[0].function.arguments)

    def test_response_format_takes_a_class(self: Any) -> None:
        answer = self.ask(response_format=Weather, max_tokens=200)
        Weather.model_validate_json(answer.choices[0].message.content)

    def test_sampling_parameters_of_the_server_pass_through(self: Any) -> None:
        answer = self.ask(temperature=2, extra_body={"top_k": 1})
        self.assertEqual(answer.choices[0].message.content, self.ask().choices[0].message.content)

    def test_errors_keep_their_class(self: Any) -> None:
        with self.assertRaises(litellm.NotFoundError):
            self.ask(model=f"{self.name}/no-such-model")
        with self.assertRaises(litellm.BadRequestError):
            self.ask(max_tokens=10_000_000)

    def test_wrong_key_is_an_authentication_error(self: Any) -> None:
        if TARGET.api_key == KEY_NOT_CHECKED:
            self.skipTest("the server checks no key")
        with self.assertRaises(litellm.AuthenticationError):
            self.ask(api_key="wrong")


class HostedVllm(Provider, unittest.TestCase):
    name = "hosted_vllm"


class OpenAI(Provider, unittest.TestCase):
    name = "openai"


class TextCompletion(unittest.TestCase):
    def test_text_completion(self) -> None:
        answer = litellm.text_completion(
            model=f"text-completion-openai/{TARGET.model}", prompt="The capital of France is", max_tokens=4,
            temperature=0, api_base=TARGET.v1, api_key=TARGET.api_key,
        )  # fmt: skip
        self.assertTrue(answer.choices[0].text)
        self.assertEqual(answer.usage.completion_tokens, 4)


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main(HostedVllm, OpenAI, TextCompletion)
