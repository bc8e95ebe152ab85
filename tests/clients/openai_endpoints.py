"""Models, completions and responses through the OpenAI SDK. Part of `openai_sdk`."""

from __future__ import annotations

import math
import unittest
from typing import Any

from checks import QUESTION, TARGET
from openai import NotFoundError
from openai.types import Completion
from openai.types.responses import Response
from openai_chat import CLIENT, tokenize
from openai_structured import GetTime, Person

PROMPT = "The capital of France is"


def complete(**options: Any) -> Completion:
    """One greedy completion of up to 8 tokens, unless the options say otherwise."""
    defaults = {"model": TARGET.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = CLIENT.completions.create(**{**defaults, **options})
    assert isinstance(answer, Completion)
    return answer


class Models(unittest.TestCase):
    def test_served_model_is_listed_with_its_length_and_can_be_retrieved(self) -> None:
        models = {model.id: model for model in CLIENT.models.list()}
        self.assertIn(TARGET.model, models)
        self.assertGreater((models[TARGET.model].model_extra or {}).get("max_model_len", 0), 0)
        self.assertEqual(CLIENT.models.retrieve(TARGET.model).id, TARGET.model)
        with self.assertRaises(NotFoundError):
            CLIENT.models.retrieve("no-such-model")


class Completions(unittest.TestCase):
    def test_completion_has_every_field(self) -> None:
        answer = complete()
        self.assertEqual((answer.object, answer.model), ("text_completion", TARGET.model))
        self.assertTrue(answer.id.startswith("cmpl-"), answer.id)
        [choice] = answer.choices
        self.assertEqual((choice.index, choice.finish_reason, choice.logprobs), (0, "length", None))
        assert answer.usage is not None
        self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens), (len(tokenize(PROMPT)), 8))

    def test_max_tokens_is_16_by_default(self) -> None:
        answer = CLIENT.completions.create(model=TARGET.model, prompt=PROMPT, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        self.assertEqual(answer.usage.completion_tokens, 16)

    def test_echo_scores_the_prompt(self) -> None:
        text, ids = complete().choices[0].text, tokenize(PROMPT)
        answer = complete(echo=True, logprobs=2)
        self.assertEqual(answer.choices[0].text, PROMPT + text)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
        self.assertEqual("".join(logprobs.tokens), PROMPT + text)
        self.assertEqual(len(logprobs.tokens), len(ids) + 8)
        self.assertIsNone(logprobs.token_logprobs[0])
        self.assertTrue(all(value <= 0 and math.isfinite(value) for value in logprobs.token_logprobs[1:]))
        offsets = logprobs.text_offset or []
        self.assertEqual((offsets[0], offsets[1]), (0, len(logprobs.tokens[0])))
        alternatives = logprobs.top_logprobs or []
        self.assertEqual(len(alternatives), len(logprobs.tokens))
        # The token that was there is told besides the two most likely ones.
        self.assertTrue(all(2 <= len(each) <= 3 for each in alternatives[1:]), alternatives)

    def test_echo_alone_returns_the_prompt(self) -> None:
        self.assertTrue(complete(echo=True).choices[0].text.startswith(PROMPT))

    def test_token_ids_are_a_prompt_alone_and_in_a_list(self) -> None:
        text, ids = complete().choices[0].text, tokenize(PROMPT)
        self.assertEqual(complete(prompt=ids).choices[0].text, text)
        both = complete(prompt=[ids, tokenize(QUESTION)])
        self.assertEqual([choice.index for choice in both.choices], [0, 1])
        self.assertEqual(both.choices[0].text, text)
        self.assertEqual(both.choices[1].text, complete(prompt=QUESTION).choices[0].text)

    def test_list_of_texts_with_n_gives_n_choices_each_in_order(self) -> None:
        answer = complete(prompt=[PROMPT, QUESTION], n=2, temperature=1, seed=1)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1, 2, 3])

    def test_scoring_as_an_evaluation_harness_does(self) -> None:
        ids = [tokenize(PROMPT + " Paris"), tokenize(PROMPT + " cheese")]
        answer = complete(prompt=ids, max_tokens=1, logprobs=1, echo=True, seed=1234)
        scores = []
        for choice, prompt in zip(answer.choices, ids, strict=True):
            assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
            self.assertEqual(len(choice.logprobs.token_logprobs), len(prompt) + 1)
            scores.append(choice.logprobs.token_logprobs[len(prompt) - 1])
        self.assertGreater(scores[0], scores[1], "Paris is likelier than cheese")

    def test_stream_adds_up_to_the_completion(self) -> None:
        whole = complete()
        chunks = list(
            CLIENT.completions.create(
                model=TARGET.model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        told = [choice for chunk in chunks for choice in chunk.choices]
        self.assertEqual("".join(choice.text for choice in told), whole.choices[0].text)
        self.assertEqual([choice.finish_reason for choice in told if choice.finish_reason], ["length"])
        self.assertEqual([i for i, chunk in enumerate(chunks) if not chunk.choices], [len(chunks) - 1])
        assert chunks[-1].usage is not None and whole.usage is not None
        self.assertEqual(chunks[-1].usage.total_tokens, whole.usage.total_tokens)

    def test_stop_string(self) -> None:
        whole = complete(max_tokens=24).choices[0].text
        word = whole.split()[4]
        answer = complete(max_tokens=24, stop=[word]).choices[0]
        self.assertEqual((answer.text, answer.finish_reason), (whole[: whole.index(word)], "stop"))


class Responses(unittest.TestCase):
    def respond(self, **options: Any) -> Response:
        defaults = {"model": TARGET.model, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
        answer = CLIENT.responses.create(**{**defaults, **options})
        assert isinstance(answer, Response)
        return answer

    def test_response_is_cut_at_its_limit_and_says_so(self) -> None:
        answer = self.respond(instructions="You are brief.")
        self.assertEqual((answer.object, answer.model, answer.status), ("response", TARGET.model, "incomplete"))
        assert answer.incomplete_details is not None and answer.usage is not None
        self.assertEqual(answer.incomplete_details.reason, "max_output_tokens")
        self.assertTrue(answer.output_text)
        self.assertEqual(answer.usage.output_tokens, 16)

    def test_input_messages_read_like_a_chat(self) -> None:
        messages = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
        self.assertEqual(self.respond(input=messages).output_text, self.respond().output_text)

    def test_stream_has_its_events_in_order_and_adds_up(self) -> None:
        whole = self.respond()
        events = list(
            CLIENT.responses.create(
                model=TARGET.model, input=QUESTION, max_output_tokens=16, temperature=0, stream=True
            )
        )
        kinds = [event.type for event in events]
        self.assertEqual(kinds[0], "response.created")
        self.assertIn(kinds[-1], ("response.completed", "response.incomplete"))
        wanted = ("response.output_item.added", "response.content_part.added", "response.output_text.delta",
                  "response.output_text.done", "response.content_part.done", "response.output_item.done")  # fmt: skip
        places = [kinds.index(kind) for kind in wanted]
        self.assertEqual(places, sorted(places))
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual(told, whole.output_text)
        self.assertEqual(events[-1].response.output_text, whole.output_text)

    def test_parse_gives_an_object_of_the_class(self) -> None:
        answer = CLIENT.responses.parse(
            model=TARGET.model, input="Describe Ada Lovelace as a JSON object.", text_format=Person, temperature=0
        )
        self.assertIsInstance(answer.output_parsed, Person)
        self.assertEqual(answer.status, "completed")

    def test_function_call_and_its_result(self) -> None:
        schema = GetTime.model_json_schema()
        tools = [{"type": "function", "name": "GetTime", "parameters": schema, "strict": True}]
        answer = self.respond(input="What time is it?", tools=tools, tool_choice="required", max_output_tokens=200)
        calls = [item for item in answer.output if item.type == "function_call"]
        self.assertTrue(calls, answer.output)
        GetTime.model_validate_json(calls[0].arguments)
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "12:30"}
        conversation = [{"role": "user", "content": "What time is it?"}, calls[0], result]
        after = self.respond(input=conversation, tools=tools, tool_choice="none")
        self.assertTrue(after.output_text)
