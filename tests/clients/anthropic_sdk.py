"""The official Anthropic SDK for Python against /v1/messages. Run by `run`, in its own venv."""

from __future__ import annotations

import json
import unittest
from typing import Any

from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from anthropic.types import Message
from checks import KEY_NOT_CHECKED, MESSAGES, TARGET, main

CLIENT = Anthropic(base_url=TARGET.url, api_key=TARGET.api_key, max_retries=0, timeout=90)
WEATHER = {
    "name": "weather",
    "description": "Tell the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def options(**changes: Any) -> dict[str, Any]:
    """A greedy request of up to 16 tokens. What the SDK no longer names as a parameter goes into `extra_body`."""
    return {"model": TARGET.model, "max_tokens": 16, "messages": MESSAGES, "extra_body": {"temperature": 0}, **changes}


def ask(**changes: Any) -> Message:
    answer = CLIENT.messages.create(**options(**changes))
    assert isinstance(answer, Message)
    return answer


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


class Messages(unittest.TestCase):
    def test_answer_has_every_field_of_a_message(self) -> None:
        answer = ask()
        self.assertEqual((answer.type, answer.role, answer.model), ("message", "assistant", TARGET.model))
        self.assertTrue(answer.id.startswith("msg_"), answer.id)
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("max_tokens", None))
        self.assertEqual(answer.usage.output_tokens, 16)
        self.assertGreater(answer.usage.input_tokens, 4)
        self.assertTrue(text_of(answer))

    def test_system_text_counts_as_string_and_as_blocks(self) -> None:
        plain = ask()
        for system in ("You are brief.", [{"type": "text", "text": "You are brief."}]):
            with self.subTest(system=system):
                self.assertNotEqual(ask(system=system).usage.input_tokens, plain.usage.input_tokens)

    def test_content_blocks_read_as_text(self) -> None:
        blocks = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
        self.assertEqual(text_of(ask(messages=blocks)), text_of(ask()))

    def test_stop_sequence_ends_the_answer_and_is_named(self) -> None:
        whole = text_of(ask())
        word = whole.split()[4]
        answer = ask(stop_sequences=[word])
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("stop_sequence", word))
        self.assertEqual(text_of(answer).rstrip(), whole[: whole.index(word)].rstrip())

    def test_tokens_can_be_counted_beforehand(self) -> None:
        counted = CLIENT.messages.count_tokens(model=TARGET.model, messages=MESSAGES)
        self.assertEqual(counted.input_tokens, ask().usage.input_tokens)


class Streams(unittest.TestCase):
    def test_stream_helper_adds_up_to_the_answer(self) -> None:
        whole = ask()
        with CLIENT.messages.stream(**options()) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        self.assertGreater(len(pieces), 4, "the answer comes in pieces")
        self.assertEqual("".join(pieces), text_of(whole))
        self.assertEqual((text_of(final), final.stop_reason), (text_of(whole), "max_tokens"))
        self.assertEqual(final.usage.output_tokens, 16)

    def test_raw_events_come_in_their_order(self) -> None:
        kinds = [event.type for event in CLIENT.messages.create(**options(stream=True))]
        kinds = [kind for kind in kinds if kind != "ping"]
        self.assertEqual(kinds[:2], ["message_start", "content_block_start"])
        self.assertEqual(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
        self.assertEqual(set(kinds[2:-3]), {"content_block_delta"})

    def test_stream_closed_early_frees_its_place_in_the_engine(self) -> None:
        body = {"temperature": 0, "ignore_eos": True}
        with CLIENT.messages.create(**options(max_tokens=1500, stream=True, extra_body=body)) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    break
        TARGET.wait_until_idle()


class Tools(unittest.TestCase):
    def test_forced_tool_is_used_with_valid_input(self) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            with self.subTest(choice=choice):
                answer = ask(tools=[WEATHER], tool_choice=choice, max_tokens=200)
                uses = [block for block in answer.content if block.type == "tool_use"]
                self.assertTrue(uses, answer.content)
                self.assertEqual((uses[0].name, answer.stop_reason), ("weather", "tool_use"))
                self.check_input(uses[0].input)

    def test_streamed_tool_use_adds_up(self) -> None:
        choice = {"type": "tool", "name": "weather"}
        with CLIENT.messages.stream(**options(tools=[WEATHER], tool_choice=choice, max_tokens=200)) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        [use] = [block for block in final.content if block.type == "tool_use"]
        self.assertEqual(json.loads("".join(parts)), use.input)
        self.check_input(use.input)

    def test_tool_result_goes_back_into_the_conversation(self) -> None:
        asked = ask(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=200)
        [use] = [block for block in asked.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
        conversation = [
            *MESSAGES,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result]},
        ]
        after = ask(messages=conversation, tools=[WEATHER])
        self.assertGreater(after.usage.input_tokens, ask(tools=[WEATHER]).usage.input_tokens)

    def check_input(self, value: Any) -> None:
        self.assertEqual(set(value), {"city", "days"})
        self.assertIn(value["city"], ("Paris", "Oslo"))
        self.assertIn(value["days"], (1, 2, 3))


class Errors(unittest.TestCase):
    def test_errors_keep_their_class_and_anthropics_envelope(self) -> None:
        for wanted, kind, changes in (
            (NotFoundError, "not_found_error", {"model": "no-such-model"}),
            (BadRequestError, "invalid_request_error", {"max_tokens": 10_000_000}),
            (BadRequestError, "invalid_request_error", {"messages": []}),
        ):
            with self.subTest(changes=changes):
                with self.assertRaises(wanted) as caught:
                    ask(**changes)
                body: Any = caught.exception.body
                self.assertEqual((body["type"], body["error"]["type"]), ("error", kind))
                self.assertTrue(body["error"]["message"])

    def test_wrong_key_is_an_authentication_error(self) -> None:
        if TARGET.api_key == KEY_NOT_CHECKED:
            self.skipTest("the server checks no key")
        stranger = Anthropic(base_url=TARGET.url, api_key="wrong", max_retries=0)
        with self.assertRaises(AuthenticationError):
            stranger.messages.create(**options())


if __name__ == "__main__":
    main(Messages, Streams, Tools, Errors)
