"""Chat completions through the OpenAI SDK: answers, sampling parameters, streams. Part of `openai_sdk`."""

from __future__ import annotations

import json
import unittest
import urllib.request
from typing import Any

from checks import MESSAGES, QUESTION, TARGET
from openai import OpenAI
from openai.types.chat import ChatCompletion

CLIENT = OpenAI(base_url=TARGET.v1, api_key=TARGET.api_key, max_retries=0, timeout=90)


def ask(**options: Any) -> ChatCompletion:
    """One answer of up to 24 tokens, greedy unless the options say otherwise."""
    defaults = {"model": TARGET.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    answer = CLIENT.chat.completions.create(**{**defaults, **options})
    assert isinstance(answer, ChatCompletion)
    return answer


def text_of(answer: ChatCompletion, choice: int = 0) -> str:
    return answer.choices[choice].message.content or ""


def tokenize(text: str) -> list[int]:
    body = json.dumps({"model": TARGET.model, "prompt": text, "add_special_tokens": False}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TARGET.api_key}"}
    request = urllib.request.Request(f"{TARGET.url}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


class Chat(unittest.TestCase):
    def test_answer_has_every_field_of_a_chat_completion(self) -> None:
        answer = ask(max_tokens=8)
        self.assertEqual((answer.object, answer.model), ("chat.completion", TARGET.model))
        self.assertTrue(answer.id.startswith("chatcmpl-"), answer.id)
        [choice] = answer.choices
        self.assertEqual((choice.index, choice.finish_reason, choice.message.role), (0, "length", "assistant"))
        self.assertTrue(choice.message.content)
        self.assertIsNone(choice.logprobs)
        assert answer.usage is not None
        self.assertEqual(answer.usage.completion_tokens, 8)
        self.assertGreater(answer.usage.prompt_tokens, len(tokenize(QUESTION)))
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_max_completion_tokens_is_the_same_as_max_tokens(self) -> None:
        self.assertEqual(text_of(ask(max_tokens=None, max_completion_tokens=8)), text_of(ask(max_tokens=8)))

    def test_request_id_is_told_and_a_given_one_is_kept(self) -> None:
        self.assertTrue(ask(max_tokens=1)._request_id)
        raw = CLIENT.chat.completions.with_raw_response.create(
            model=TARGET.model, messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "check-7"}
        )
        self.assertEqual(raw.headers["x-request-id"], "check-7")

    def test_message_content_in_parts_reads_as_one_text(self) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        self.assertEqual(text_of(ask(messages=parts)), text_of(ask()))

    def test_system_message_counts(self) -> None:
        longer = ask(messages=[{"role": "system", "content": "You are a pirate. " * 8}, *MESSAGES])
        shorter = ask(messages=[{"role": "system", "content": "Be brief."}, *MESSAGES])
        assert longer.usage is not None and shorter.usage is not None
        self.assertGreater(longer.usage.prompt_tokens, shorter.usage.prompt_tokens)

    def test_reasoning_fields_are_there_though_empty(self) -> None:
        extra = ask(max_tokens=2).choices[0].message.model_extra or {}
        self.assertEqual({extra.get("reasoning_content", ""), extra.get("reasoning", "")}, {None}, extra)


class Sampling(unittest.TestCase):
    def test_logprobs_have_alternatives_in_order_and_bytes_that_spell_the_answer(self) -> None:
        answer = ask(logprobs=True, top_logprobs=3)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and answer.usage is not None
        self.assertEqual(len(logprobs.content), answer.usage.completion_tokens)
        for token in logprobs.content:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            ranked = [other.logprob for other in token.top_logprobs]
            self.assertEqual(ranked, sorted(ranked, reverse=True))
            self.assertEqual(token.top_logprobs[0].token, token.token, "a greedy token is the most likely one")
            self.assertAlmostEqual(token.top_logprobs[0].logprob, token.logprob, places=5)
        spelled = b"".join(bytes(token.bytes or []) for token in logprobs.content)
        self.assertEqual(spelled.decode(errors="replace").strip(), text_of(answer).strip())

    def test_logprobs_without_alternatives(self) -> None:
        logprobs = ask(logprobs=True, max_tokens=3).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        self.assertEqual([token.top_logprobs for token in logprobs.content], [[], [], []])

    def test_stop_string_ends_the_answer_before_itself(self) -> None:
        whole = text_of(ask())
        word = whole.split()[6]
        for stop in (word, [word, "never written"]):
            with self.subTest(stop=stop):
                answer = ask(stop=stop)
                self.assertEqual(text_of(answer), whole[: whole.index(word)])
                self.assertEqual(answer.choices[0].finish_reason, "stop")
                self.assertEqual((answer.choices[0].model_extra or {}).get("stop_reason"), word)

    def test_seed_gives_the_same_answer_again_and_another_seed_another(self) -> None:
        def sample(seed: int) -> str:
            return text_of(ask(temperature=1, seed=seed))

        self.assertEqual(sample(7), sample(7))
        self.assertGreater(len({sample(seed) for seed in range(4)}), 1)

    def test_n_gives_numbered_choices_and_the_same_ones_for_the_same_seed(self) -> None:
        first, again = (ask(n=2, temperature=1, seed=3, max_tokens=12) for _ in range(2))
        self.assertEqual([choice.index for choice in first.choices], [0, 1])
        self.assertNotEqual(text_of(first, 0), text_of(first, 1))
        self.assertEqual([text_of(first, i) for i in (0, 1)], [text_of(again, i) for i in (0, 1)])
        assert first.usage is not None and first.usage.completion_tokens is not None
        self.assertLessEqual(first.usage.completion_tokens, 24)
        self.assertGreater(first.usage.completion_tokens, 12)

    def test_logit_bias_forces_and_bans_a_token(self) -> None:
        [token] = tokenize(" yes")
        self.assertEqual(text_of(ask(max_tokens=3, logit_bias={str(token): 100})).strip(), "yes yes yes")
        whole = text_of(ask(max_tokens=4))
        [first, *_] = tokenize(whole)
        self.assertNotEqual(text_of(ask(max_tokens=4, logit_bias={str(first): -100})), whole)

    def test_top_k_1_and_min_p_1_are_greedy_at_any_temperature(self) -> None:
        whole = text_of(ask())
        for extra in ({"top_k": 1}, {"min_p": 1.0}):
            with self.subTest(extra=extra):
                self.assertEqual(text_of(ask(temperature=2, extra_body=extra)), whole)

    def test_ignore_eos_and_min_tokens_go_on_past_the_end(self) -> None:
        short = [{"role": "user", "content": "Say only the word yes."}]
        answer = ask(messages=short, max_tokens=80, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        self.assertEqual((answer.usage.completion_tokens, answer.choices[0].finish_reason), (80, "length"))
        answer = ask(messages=short, max_tokens=80, extra_body={"min_tokens": 60})
        assert answer.usage is not None
        self.assertGreaterEqual(answer.usage.completion_tokens, 60)

    def test_penalties_change_an_answer_that_repeats(self) -> None:
        messages = [{"role": "user", "content": "Write the word dog again and again: dog dog dog dog dog"}]
        whole = text_of(ask(messages=messages, max_tokens=32))
        for options in ({"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}):
            with self.subTest(options=options):
                self.assertNotEqual(text_of(ask(messages=messages, max_tokens=32, **options)), whole)


class Streaming(unittest.TestCase):
    def stream(self, **options: Any) -> list[Any]:
        defaults = {"model": TARGET.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "stream": True}
        return list(CLIENT.chat.completions.create(**{**defaults, **options}))

    def assert_one_choice(self, chunks: list[Any], index: int) -> str:
        """Check the order of one choice's chunks; its text."""
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        self.assertEqual((choices[0].delta.role, choices[0].delta.content), ("assistant", ""))
        self.assertEqual([choice.delta.role for choice in choices[1:]], [None] * (len(choices) - 1))
        reasons = [choice.finish_reason for choice in choices]
        self.assertEqual(reasons[:-1], [None] * (len(reasons) - 1))
        self.assertIn(reasons[-1], ("stop", "length"))
        return "".join(choice.delta.content or "" for choice in choices)

    def test_deltas_add_up_to_the_answer_and_usage_comes_once_at_the_end(self) -> None:
        whole = ask()
        chunks = self.stream(stream_options={"include_usage": True})
        self.assertEqual(self.assert_one_choice(chunks, 0), text_of(whole))
        self.assertGreater(len(chunks), 8, "the answer comes in pieces")
        self.assertEqual(len({(chunk.id, chunk.model, chunk.object) for chunk in chunks}), 1)
        self.assertEqual([i for i, chunk in enumerate(chunks) if chunk.usage is not None], [len(chunks) - 1])
        self.assertEqual([i for i, chunk in enumerate(chunks) if not chunk.choices], [len(chunks) - 1])
        counted, expected = chunks[-1].usage, whole.usage
        assert expected is not None
        self.assertEqual(
            (counted.prompt_tokens, counted.completion_tokens, counted.total_tokens),
            (expected.prompt_tokens, expected.completion_tokens, expected.total_tokens),
        )

    def test_every_delta_has_the_reasoning_field(self) -> None:
        deltas = [choice.delta for chunk in self.stream(max_tokens=4) for choice in chunk.choices]
        self.assertEqual([getattr(delta, "reasoning_content", "") for delta in deltas], [None] * len(deltas))

    def test_no_usage_unless_asked(self) -> None:
        chunks = self.stream(max_tokens=4)
        self.assertEqual([chunk.usage for chunk in chunks], [None] * len(chunks))
        self.assertTrue(all(chunk.choices for chunk in chunks))

    def test_continuous_usage_counts_up(self) -> None:
        chunks = self.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        self.assertEqual((counts[0], counts[-1]), (0, 24))
        self.assertEqual(counts, sorted(counts))

    def test_n_choices_in_one_stream_add_up_to_those_of_an_answer(self) -> None:
        options: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 12}
        whole, chunks = ask(**options), self.stream(**options)
        for index in (0, 1):
            self.assertEqual(self.assert_one_choice(chunks, index), text_of(whole, index))

    def test_logprobs_of_a_stream_are_those_of_the_answer(self) -> None:
        whole = ask(logprobs=True, top_logprobs=2).choices[0].logprobs
        chunks = self.stream(logprobs=True, top_logprobs=2)
        assert whole is not None and whole.content is not None
        told = [token for chunk in chunks for c in chunk.choices if c.logprobs for token in c.logprobs.content or []]
        self.assertEqual([token.token for token in told], [token.token for token in whole.content])
        for mine, theirs in zip(told, whole.content, strict=True):
            self.assertAlmostEqual(mine.logprob, theirs.logprob, places=4)

    def test_stop_string_never_shows_in_a_stream(self) -> None:
        whole = text_of(ask())
        stop = " ".join(whole.split()[5:8])
        chunks = self.stream(stop=stop)
        self.assertEqual(self.assert_one_choice(chunks, 0), whole[: whole.index(stop)])

    def test_stream_helper_ends_with_the_whole_completion(self) -> None:
        # The helper refuses an answer that was cut at its limit, so a string ends this one.
        stop = text_of(ask()).split()[12]
        whole = ask(stop=stop)
        with CLIENT.chat.completions.stream(
            model=TARGET.model, messages=MESSAGES, temperature=0, stop=stop, stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        self.assertEqual(kinds.count("content.done"), 1)
        self.assertGreater(kinds.count("content.delta"), 4)
        self.assertEqual(final.choices[0].message.content, text_of(whole))
        self.assertEqual(final.choices[0].finish_reason, "stop")
        assert final.usage is not None and whole.usage is not None
        self.assertEqual(final.usage.total_tokens, whole.usage.total_tokens)
