"""When a request ends and what of its text is shown: stop strings, stop tokens, end tokens, limits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pellucid import LLM, InvalidRequestError, SamplingParams
from pellucid.core import CompletionOutput, Request
from pellucid.engine import output_processor
from pellucid.engine.output import OutputBuilder
from pellucid.engine.output_processor import OutputProcessor
from pellucid.engine.step_output import StepOutput
from pellucid.tokenizer.stop_strings import StopAutomaton
from pellucid.tokenizer.tokenizer import Tokenizer
from tests.engine.tiny import MakeLLM

EOS = 1
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_directory(checkpoint("v3"))


@pytest.fixture(scope="session")
def letters(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of letters and spaces, some of several characters: what the model may say here."""
    spelled = {token_id: tokenizer.token_bytes(token_id) for token_id in range(2, tokenizer.vocab_size)}
    return tuple(token_id for token_id, data in spelled.items() if data.replace(b" ", b"a").isalpha())


def run(llm: LLM, params: SamplingParams) -> CompletionOutput:
    return llm.generate(PROMPT, params)[0].outputs[0]


def babble(letters: tuple[int, ...], **arguments: object) -> SamplingParams:
    """The same 40 tokens in every test, as far as they come."""
    return SamplingParams(seed=3, max_tokens=40, allowed_token_ids=letters, ignore_eos=True, **arguments)  # type: ignore[arg-type]


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop string is complete, and the longest one that is complete there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_wherever_the_tokens_cut_it(
    include: bool, letters: tuple[int, ...], tokenizer: Tokenizer, make_llm: MakeLLM
) -> None:
    llm = make_llm(max_num_seqs=64)
    free = run(llm, babble(letters))
    text = free.text
    assert len(text) > 60, "tokens of several characters are needed"
    stops = [(text[at : at + length],) for at in range(0, 36) for length in (1, 2, 5, 9)]
    stops += [(text[20:24], text[18:22], "zzzz"), ("zzzz", text[30:36]), (text[10:16], text[12:15])]
    params = [babble(letters, stop=stop, include_stop_str_in_output=include) for stop in stops]
    for stop, output in zip(stops, llm.generate([PROMPT] * len(params), params), strict=True):
        found = output.outputs[0]
        expected = first_end(text, stop)
        assert expected is not None
        end, matched = expected
        assert found.text == (text[:end] if include else text[: end - len(matched)])
        assert (found.finish_reason, found.stop_reason) == ("stop", matched)
        # It stops with the token that completes the stop string, not later.
        assert found.token_ids == free.token_ids[: len(found.token_ids)]
        assert len(tokenizer.decode(found.token_ids[:-1])) < end <= len(tokenizer.decode(found.token_ids))


def test_streamed_deltas_never_show_what_turns_out_to_be_a_stop_string(
    letters: tuple[int, ...], make_llm: MakeLLM
) -> None:
    llm = make_llm(max_num_seqs=64)
    text = run(llm, babble(letters)).text
    for at in range(5, 40, 3):
        stop = text[at : at + 6]
        whole = run(llm, babble(letters, stop=stop))
        shown = [delta.text for delta in llm.stream(PROMPT, babble(letters, stop=stop))]
        assert "".join(shown) == whole.text
        assert stop not in whole.text


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(letters: tuple[int, ...], make_llm: MakeLLM) -> None:
    llm = make_llm()
    text = run(llm, babble(letters)).text
    found = run(llm, babble(letters, stop=text[-7:] + "!"))
    assert (found.text, found.finish_reason, found.stop_reason) == (text, "length", None)


def test_a_stop_string_in_the_text_of_the_first_min_tokens_tokens_does_not_count(
    letters: tuple[int, ...], tokenizer: Tokenizer, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    free = run(llm, babble(letters))
    early = len(tokenizer.decode(free.token_ids[:10]))
    stop = next(c for c in free.text[:early] if c in free.text[early:])
    found = run(llm, babble(letters, stop=stop, min_tokens=10))
    assert found.text == free.text[: free.text.index(stop, early)]
    assert found.finish_reason == "stop"


def test_a_stop_string_ends_one_sample_and_leaves_the_others(letters: tuple[int, ...], make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(n=4, seed=3, max_tokens=12, allowed_token_ids=letters, ignore_eos=True)
    [free] = llm.generate(PROMPT, params)
    stop = free.outputs[1].text[4:10]
    params = SamplingParams(n=4, seed=3, max_tokens=12, allowed_token_ids=letters, ignore_eos=True, stop=stop)
    [found] = llm.generate(PROMPT, params)
    for before, after in zip(free.outputs, found.outputs, strict=True):
        assert after.text == before.text.partition(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert {one.finish_reason for one in found.outputs} == {"stop", "length"}


def test_the_samples_of_a_request_share_one_automaton_of_its_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        output_processor, "StopAutomaton", lambda stops: made.append(tuple(stops)) or StopAutomaton(stops)
    )
    processor = OutputProcessor(None, shares_prompts=False)
    assert len(processor.add(Request("r", (5,), SamplingParams(n=64, stop=("a", "b"))), None)) == 64
    assert made == [("a", "b")]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a"] * 17, "16 strings"),
        ("a" * 1025, "1024 characters"),
        (["a", "é" * 1025], "1024 characters"),
        (["a", 5], "must be text"),
        (["a", ""], "must not be empty"),
    ],
    ids=["many", "long", "one long", "a number", "empty"],
)
def test_too_many_or_too_long_stop_strings_are_refused(stop: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"


def test_as_many_and_as_long_stop_strings_as_may_be_are_taken() -> None:
    stops = tuple(chr(97 + index) + "é" * 1023 for index in range(16))
    assert SamplingParams(stop=stops).stop == stops


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_with_its_id_and_its_text_is_shown_only_if_asked_for(
    include: bool, letters: tuple[int, ...], tokenizer: Tokenizer, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    free = run(llm, babble(letters))
    stop = free.token_ids[11]
    ids = free.token_ids[: free.token_ids.index(stop) + 1]
    found = run(llm, babble(letters, stop_token_ids=(stop,), include_stop_str_in_output=include))
    assert (found.finish_reason, found.stop_reason, found.token_ids) == ("stop", stop, ids)
    assert found.text == tokenizer.decode(ids if include else ids[:-1])


def test_an_end_token_ends_the_request_from_min_tokens_on_and_is_no_text(make_llm: MakeLLM) -> None:
    llm = make_llm()
    eager = {EOS: 100.0}
    found = run(llm, SamplingParams(temperature=0, logit_bias=eager, max_tokens=9))
    assert (found.token_ids, found.text) == ((EOS,), "")
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    later = run(llm, SamplingParams(temperature=0, logit_bias=eager, min_tokens=4, max_tokens=9))
    assert len(later.token_ids) == 5
    assert later.token_ids[-1] == EOS
    assert EOS not in later.token_ids[:-1]
    never = run(llm, SamplingParams(temperature=0, logit_bias=eager, ignore_eos=True, max_tokens=9))
    assert (never.token_ids, never.finish_reason) == ((EOS,) * 9, "length")
    shown = SamplingParams(temperature=0, logit_bias=eager, ignore_eos=True, max_tokens=2, skip_special_tokens=False)
    assert run(llm, shown).text == "</s></s>"


def test_max_tokens_0_gives_an_empty_output_and_none_goes_on_to_the_context(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=40)
    nothing = run(llm, SamplingParams(max_tokens=0))
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ((), "", "length")
    everything = run(llm, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(everything.token_ids) == 40 - len(PROMPT)
    assert everything.finish_reason == "length"


def test_streamed_text_is_the_decoded_tokens_even_where_they_are_not_utf8(
    tokenizer: Tokenizer, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    params = SamplingParams(seed=8, temperature=1.5, max_tokens=60, ignore_eos=True)
    deltas = list(llm.stream(PROMPT, params))
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    assert text == tokenizer.decode(ids) == run(llm, params).text
    assert "\ufffd" in text
    assert [delta.finish_reason for delta in deltas] == [None] * 59 + ["length"]


# Case C07 of the project's list, through the engine's output: a stop string that straddles deltas.
STRADDLING = [
    (("The quick br", "own f", "ox jumps"), ("own fox",), "The quick br", "stop"),
    (("The quick br", "own f", "inal"), ("own fox",), "The quick brown final", "length"),
    (("a", "\nUs", "er", ":", " hi"), ("\nUser:", "hi"), "a", "stop"),
    (("x", "ab", "abc"), ("abc", "bab"), "xa", "stop"),
]


class Spelling:
    """A tokenizer whose token i is the i-th of the given texts."""

    special_token_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def token_bytes(self, token_id: int) -> bytes:
        return self.texts[token_id].encode()


@pytest.mark.parametrize(("deltas", "stops", "text", "reason"), STRADDLING)
def test_a_stop_string_that_straddles_tokens_is_cut_out_whole(
    deltas: tuple[str, ...], stops: tuple[str, ...], text: str, reason: str
) -> None:
    characters = "".join(deltas)
    cuts = [list(deltas), list(characters), [characters], [characters[:3], characters[3:]]]
    for texts in cuts:
        request = Request("r", (0,), SamplingParams(stop=stops))
        tokenizer: Any = Spelling(texts)
        builder = OutputBuilder(request, 0, tokenizer, stops=StopAutomaton(stops), continues_text=False)
        shown = []
        for token_id in range(len(texts)):
            last = token_id == len(texts) - 1
            delta = builder.push(StepOutput("r", 0, token_id, finish_reason="length" if last else None))
            shown.append(delta.text)
            if delta.finish_reason is not None:
                break
        assert "".join(shown) == builder.result().text == text
        assert builder.finish_reason == reason


def test_times_are_in_order_and_counted_once(make_llm: MakeLLM) -> None:
    metrics = run(make_llm(), SamplingParams(max_tokens=5, ignore_eos=True)).metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finish_time is not None
    for earlier, later in pairwise([metrics.arrival_time, metrics.first_token_time, metrics.finish_time]):
        assert earlier <= later
    assert (metrics.cached_prompt_tokens, metrics.preemptions) == (0, 0)
