"""Structured output and tools through the OpenAI SDK. Part of `openai_sdk`.

A model of 135M parameters writes no valid object by itself: what is checked here is that decoding is constrained.
"""

from __future__ import annotations

import json
import re
import unittest
from typing import Any, Literal

from checks import MESSAGES, TARGET
from openai import pydantic_function_tool
from openai_chat import CLIENT, ask, text_of
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=24)
    age: int = Field(ge=0, le=130)
    mood: Literal["calm", "happy", "sad"]
    tags: list[Literal["a", "b"]] = Field(min_length=1, max_length=3)


class GetWeather(BaseModel):
    """Tell the weather in a city."""

    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]


class GetTime(BaseModel):
    """Tell the time in a zone."""

    zone: Literal["UTC", "CET", "EST"]


DESCRIBE: list[Any] = [{"role": "user", "content": "Describe Ada Lovelace as a JSON object."}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [pydantic_function_tool(GetWeather), pydantic_function_tool(GetTime)]
NAMED: Any = {"type": "function", "function": {"name": "GetTime"}}


class StructuredOutput(unittest.TestCase):
    def test_parse_gives_an_object_of_the_class_at_any_temperature(self) -> None:
        for temperature, seed in ((0, 0), (1, 1), (1, 2)):
            with self.subTest(temperature=temperature, seed=seed):
                answer = CLIENT.chat.completions.parse(
                    model=TARGET.model, messages=DESCRIBE, response_format=Person, temperature=temperature, seed=seed
                )
                self.assertIsInstance(answer.choices[0].message.parsed, Person)
                self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_streamed_parse_gives_the_same_object(self) -> None:
        options: dict[str, Any] = {"model": TARGET.model, "messages": DESCRIBE, "response_format": Person}
        whole = CLIENT.chat.completions.parse(**options, temperature=0)
        with CLIENT.chat.completions.stream(**options, temperature=0) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        self.assertIn("content.delta", kinds)
        self.assertEqual(final.choices[0].message.parsed, whole.choices[0].message.parsed)

    def test_json_object_is_one(self) -> None:
        # The end may lie past any limit on tokens: what there is must then be the beginning of an object.
        answer = ask(messages=DESCRIBE, response_format={"type": "json_object"}, max_tokens=200)
        text = text_of(answer)
        self.assertTrue(text.lstrip().startswith("{"), text)
        if answer.choices[0].finish_reason == "stop":
            self.assertIsInstance(json.loads(text), dict)

    def test_regex_and_choice_hold(self) -> None:
        pattern = r"[A-Z][a-z]{2,8}-\d{4}"
        for extra, holds in (
            ({"structured_outputs": {"regex": pattern}}, lambda text: re.fullmatch(pattern, text)),
            ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ):
            with self.subTest(extra=extra):
                answer = ask(temperature=1, seed=5, max_tokens=40, extra_body=extra)
                self.assertTrue(holds(text_of(answer)), text_of(answer))
                self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_constrained_and_free_requests_share_a_batch(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        free = text_of(ask())
        choice = {"structured_outputs": {"choice": ["red", "green"]}}
        with ThreadPoolExecutor(4) as pool:
            constrained = [pool.submit(ask, extra_body=choice) for _ in range(2)]
            others = [pool.submit(ask) for _ in range(2)]
            self.assertTrue(all(text_of(future.result()) in ("red", "green") for future in constrained))
            self.assertEqual([text_of(future.result()) for future in others], [free, free])


class Tools(unittest.TestCase):
    def test_required_gives_a_call_with_valid_arguments(self) -> None:
        for temperature, seed in ((0, 0), (1, 1)):
            with self.subTest(temperature=temperature, seed=seed):
                answer = ask(
                    messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=300, temperature=temperature,
                    seed=seed, parallel_tool_calls=False,
                )  # fmt: skip
                [call] = answer.choices[0].message.tool_calls or []
                self.assertEqual((call.type, answer.choices[0].finish_reason), ("function", "tool_calls"))
                self.assertTrue(call.id)
                kind = {"GetWeather": GetWeather, "GetTime": GetTime}[call.function.name]
                kind.model_validate_json(call.function.arguments)

    def test_named_tool_is_the_one_that_is_called(self) -> None:
        answer = ask(messages=WEATHER, tools=TOOLS, tool_choice=NAMED, max_tokens=100)
        [call] = answer.choices[0].message.tool_calls or []
        self.assertEqual(call.function.name, "GetTime")
        GetTime.model_validate_json(call.function.arguments)
        # OpenAI's own server says "stop" here, others "tool_calls".
        self.assertIn(answer.choices[0].finish_reason, ("stop", "tool_calls"))

    def test_parse_reads_the_arguments_of_a_call(self) -> None:
        answer = CLIENT.chat.completions.parse(
            model=TARGET.model, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, temperature=0
        )
        [call] = answer.choices[0].message.tool_calls or []
        self.assertIsInstance(call.function.parsed_arguments, GetTime)

    def test_none_and_auto_answer_without_failing(self) -> None:
        self.assertFalse(ask(messages=WEATHER, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls)
        answer = ask(messages=WEATHER, tools=TOOLS, tool_choice="auto")
        self.assertTrue(answer.choices[0].message.content or answer.choices[0].message.tool_calls)

    def test_streamed_call_comes_in_pieces_that_add_up(self) -> None:
        options: dict[str, Any] = {"messages": WEATHER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
        [call, *_] = ask(**options).choices[0].message.tool_calls or [None]
        assert call is not None
        with CLIENT.chat.completions.stream(model=TARGET.model, temperature=0, **options) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        kinds = [event.type for event in events]
        self.assertIn("tool_calls.function.arguments.delta", kinds)
        self.assertIn("tool_calls.function.arguments.done", kinds)
        [told, *_] = final.choices[0].message.tool_calls or [None]
        assert told is not None
        self.assertEqual((told.function.name, told.function.arguments), (call.function.name, call.function.arguments))
        self.assertEqual(final.choices[0].finish_reason, "tool_calls")

    def test_first_delta_of_a_call_names_it_and_later_ones_only_add_arguments(self) -> None:
        chunks = CLIENT.chat.completions.create(
            model=TARGET.model, messages=WEATHER, tools=TOOLS, tool_choice=NAMED, temperature=0, stream=True
        )
        deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        first, *later = deltas
        assert first.function is not None
        self.assertEqual((first.index, first.type, first.function.name), (0, "function", "GetTime"))
        self.assertTrue(first.id)
        self.assertEqual({(delta.index, delta.id) for delta in later} - {(0, None)}, set())
        self.assertEqual({delta.function.name for delta in later if delta.function} - {None}, set())
        arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
        GetTime.model_validate_json(arguments)

    def test_result_of_a_call_goes_back_into_the_conversation(self) -> None:
        asked = ask(messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=300).choices[0].message
        calls = asked.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"} for call in calls]
        alone, after = ask(messages=WEATHER, tools=TOOLS), ask(messages=[*WEATHER, asked, *results], tools=TOOLS)
        assert alone.usage is not None and after.usage is not None
        self.assertGreater(after.usage.prompt_tokens, alone.usage.prompt_tokens)
        self.assertIn(after.choices[0].finish_reason, ("stop", "length", "tool_calls"))

    def test_same_question_without_tools_is_answered_in_text(self) -> None:
        self.assertIsNone(ask(messages=MESSAGES).choices[0].message.tool_calls)
