"""Errors, cancellation and many requests at once through the OpenAI SDK. Part of `openai_sdk`."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

from checks import KEY_NOT_CHECKED, MESSAGES, TARGET, wait_for
from openai import APITimeoutError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from openai_chat import CLIENT, ask, text_of

ENDLESS: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
"""Options of an answer that takes far longer than any check waits."""


def async_client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=TARGET.v1, api_key=TARGET.api_key, max_retries=0, timeout=90)


class Errors(unittest.TestCase):
    def refused(self, **options: Any) -> BadRequestError:
        with self.assertRaises(BadRequestError) as caught:
            ask(**options)
        self.assertEqual(caught.exception.type, "invalid_request_error", caught.exception.body)
        return caught.exception

    def test_unknown_model_is_not_found_and_the_right_name_is_told(self) -> None:
        with self.assertRaises(NotFoundError) as caught:
            ask(model="no-such-model")
        error = caught.exception
        self.assertEqual((error.status_code, error.param), (404, "model"))
        self.assertTrue(error.code)
        self.assertIn("no-such-model", error.message)
        self.assertIn(TARGET.model, error.message)

    def test_max_tokens_over_the_context_is_refused_with_both_numbers(self) -> None:
        length = next(iter(CLIENT.models.list())).model_extra["max_model_len"]  # type: ignore[index]
        error = self.refused(max_tokens=10_000_000)
        self.assertEqual(error.param, "max_tokens")
        self.assertIn(str(length), error.message.replace(",", ""))

    def test_prompt_over_the_context_is_refused(self) -> None:
        length = next(iter(CLIENT.models.list())).model_extra["max_model_len"]  # type: ignore[index]
        error = self.refused(messages=[{"role": "user", "content": "word " * (length + 10)}])
        self.assertIn(str(length), error.message.replace(",", ""))

    def test_bad_values_are_refused_by_name(self) -> None:
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("temperature", {"temperature": -1}),
            ("top_p", {"top_p": 1.5}),
            ("max_tokens", {"max_tokens": -1}),
            ("max_tokens", {"max_tokens": "many"}),
            ("n", {"n": 0}),
            ("messages", {"messages": []}),
            ("stream_options", {"stream_options": {"include_usage": True}}),
            ("tool_choice", {"tool_choice": "required"}),
            (
                "response_format",
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}},
            ),
            ("guided_json", {"extra_body": {"guided_json": {"type": "object"}}}),
            ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "("}}}),
        )
        for param, options in cases:
            with self.subTest(options=options):
                error = self.refused(**options)
                self.assertIn(param, error.param or "", error.body)

    def test_wrong_key_is_an_authentication_error(self) -> None:
        if TARGET.api_key == KEY_NOT_CHECKED:
            self.skipTest("the server checks no key")
        with self.assertRaises(AuthenticationError) as caught:
            OpenAI(base_url=TARGET.v1, api_key="wrong", max_retries=0).models.list()
        self.assertEqual(caught.exception.status_code, 401)
        self.assertTrue(caught.exception.code)

    def test_unknown_path_has_an_error_the_sdk_can_read(self) -> None:
        with self.assertRaises(NotFoundError) as caught:
            CLIENT.get("/no-such-path", cast_to=dict[str, Any])
        self.assertTrue(caught.exception.type, caught.exception.body)

    def test_unknown_field_is_answered_and_named_in_a_header(self) -> None:
        raw = CLIENT.chat.completions.with_raw_response.create(
            model=TARGET.model, messages=MESSAGES, max_tokens=1, extra_body={"no_such_field": 1}
        )
        self.assertIn("no_such_field", raw.headers.get("x-ignored-fields", ""))

    def test_server_answers_after_all_these_errors(self) -> None:
        self.assertTrue(text_of(ask()))


class Lifecycle(unittest.TestCase):
    def test_stream_closed_early_frees_its_place_in_the_engine(self) -> None:
        async def leave_early() -> None:
            stream = await async_client().chat.completions.create(
                model=TARGET.model, messages=MESSAGES, stream=True, **ENDLESS
            )
            count = 0
            async for _ in stream:
                count += 1
                if count > 5:
                    break
            await asyncio.to_thread(wait_for, lambda: TARGET.requests_in_engine() >= 1, 3, "the request is not counted")
            await stream.close()

        TARGET.wait_until_idle()
        asyncio.run(leave_early())
        TARGET.wait_until_idle()

    def test_client_that_times_out_frees_its_place(self) -> None:
        with self.assertRaises(APITimeoutError):
            CLIENT.with_options(timeout=0.5).chat.completions.create(model=TARGET.model, messages=MESSAGES, **ENDLESS)
        TARGET.wait_until_idle()

    def test_cancelled_task_frees_its_place(self) -> None:
        async def cancel() -> None:
            request = async_client().chat.completions.create(model=TARGET.model, messages=MESSAGES, **ENDLESS)
            task = asyncio.ensure_future(request)
            await asyncio.to_thread(wait_for, lambda: TARGET.requests_in_engine() >= 1, 5, "the request is not counted")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(cancel())
        TARGET.wait_until_idle()

    def test_answers_do_not_depend_on_what_else_runs(self) -> None:
        questions = [[{"role": "user", "content": f"Tell me about the number {i}."}] for i in range(8)]

        async def all_at_once() -> list[str]:
            client = async_client()

            async def one(messages: Any) -> str:
                stream = await client.chat.completions.create(
                    model=TARGET.model, messages=messages, max_tokens=16, temperature=0, stream=True
                )
                pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
                return "".join(pieces)

            return list(await asyncio.gather(*(one(messages) for messages in questions)))

        together = asyncio.run(all_at_once())
        alone = [text_of(ask(messages=messages, max_tokens=16)) for messages in questions]
        self.assertEqual(together, alone)
