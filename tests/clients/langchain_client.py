"""LangChain's `ChatOpenAI`: invoke, stream, batch, structured output, tools. Run by `run`, in its own venv."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any, Literal

from checks import QUESTION, TARGET, main
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=24)
    age: int = Field(ge=0, le=130)


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather in a city."""
    return f"18 degrees in {city}"


def chat_model(**changes: Any) -> ChatOpenAI:
    """A greedy model with answers of up to 16 tokens."""
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 90}
    return ChatOpenAI(base_url=TARGET.v1, api_key=TARGET.api_key, model=TARGET.model, **{**defaults, **changes})


class LangChain(unittest.TestCase):
    def test_invoke_tells_the_reason_of_its_end_and_the_usage(self) -> None:
        answer = chat_model().invoke([SystemMessage("You are brief."), HumanMessage(QUESTION)])
        self.assertTrue(answer.content)
        self.assertEqual(answer.response_metadata["finish_reason"], "length")
        self.assertEqual(answer.response_metadata["model_name"], TARGET.model)
        assert answer.usage_metadata is not None
        self.assertEqual(answer.usage_metadata["output_tokens"], 16)

    def test_stream_adds_up_with_usage(self) -> None:
        model = chat_model(stream_usage=True)
        whole, chunks = model.invoke(QUESTION), list(model.stream(QUESTION))
        self.assertGreater(len(chunks), 6)
        self.assertEqual("".join(str(chunk.content) for chunk in chunks), whole.content)
        total = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        self.assertEqual(total.usage_metadata, whole.usage_metadata)
        self.assertEqual(total.response_metadata["finish_reason"], "length")

    def test_batch_and_async_stream_give_the_same_answers(self) -> None:
        async def stream() -> str:
            return "".join([str(chunk.content) async for chunk in chat_model().astream(QUESTION)])

        first, second = chat_model().batch([QUESTION, QUESTION])
        self.assertEqual(first.content, second.content)
        self.assertEqual(asyncio.run(stream()), first.content)

    def test_structured_output_by_each_method(self) -> None:
        for method in ("json_schema", "function_calling"):
            with self.subTest(method=method):
                model = chat_model(max_tokens=300).with_structured_output(Person, method=method)
                self.assertIsInstance(model.invoke("Describe Ada Lovelace."), Person)

    def test_bound_tool_is_called_and_its_result_goes_back(self) -> None:
        question = HumanMessage("What is the weather in Paris?")
        answer = chat_model(max_tokens=200).bind_tools([weather], tool_choice="any").invoke([question])
        assert isinstance(answer, AIMessage)
        self.assertEqual(answer.invalid_tool_calls, [])
        self.assertEqual(answer.response_metadata["finish_reason"], "tool_calls")
        results = [weather.invoke(call) for call in answer.tool_calls]
        self.assertTrue(results)
        self.assertTrue(all(isinstance(r, ToolMessage) and str(r.content).startswith("18 degrees") for r in results))
        after = chat_model().bind_tools([weather], tool_choice="none").invoke([question, answer, *results])
        self.assertTrue(after.content)

    def test_streamed_tool_call_is_put_together(self) -> None:
        chunks = list(chat_model(max_tokens=200).bind_tools([weather], tool_choice="any").stream("The weather?"))
        total = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        self.assertTrue(total.tool_calls)
        self.assertEqual(total.tool_calls[0]["name"], "weather")
        self.assertIn(total.tool_calls[0]["args"]["city"], ("Paris", "Oslo"))

    def test_logprobs(self) -> None:
        answer = chat_model(max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
        self.assertEqual(len(answer.response_metadata["logprobs"]["content"]), 4)


if __name__ == "__main__":
    main(LangChain)
