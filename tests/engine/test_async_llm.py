"""`AsyncLLM`: many callers on one engine. Nobody waits for ever, and nobody's fault becomes somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pellucid import AsyncLLM, InvalidRequestError, PellucidError, SamplingParams
from pellucid.core import RequestOutput
from tests.engine.test_failures import STRICT
from tests.engine.tiny import MakeLLM, engine_arguments

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
PROMPTS: list[str | list[int]] = [[5 + i] * (1 + 9 * i) for i in range(7)] + ["the lazy dog"]
WAIT_S = 20.0
"""Longer than anything here takes on a busy machine: passing it means a hang."""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 2 * WAIT_S))


@pytest.fixture
def path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@asynccontextmanager
async def opened(path: Path, **arguments: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(path, **engine_arguments("llama"), **arguments)
    try:
        yield llm
    finally:
        await asyncio.wait_for(llm.close(), WAIT_S)
        llm.engine.check_conservation()
        stats = llm.engine.stats()
        assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> tuple[str, tuple[int, ...]]:
    deltas = [delta async for delta in llm.generate(prompt, params)]
    assert deltas[-1].finish_reason is not None
    return "".join(delta.text for delta in deltas), tuple(i for delta in deltas for i in delta.token_ids)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come to be so")


def expected_of(outputs: list[RequestOutput]) -> list[tuple[str, tuple[int, ...]]]:
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


def test_eight_callers_get_what_each_would_get_alone(path: Path, make_llm: MakeLLM) -> None:
    llm = make_llm("llama")
    expected = expected_of([llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS])

    async def main() -> None:
        async with opened(path, max_num_batched_tokens=32, max_num_seqs=5) as served:
            for _ in range(2):
                found = await asyncio.gather(*(collect(served, prompt) for prompt in PROMPTS))
                assert found == expected

    run(main())


def test_samples_of_one_prompt_all_come_to_their_end(path: Path, make_llm: MakeLLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    expected = make_llm("llama").generate([5, 6], params)[0].outputs

    async def main() -> None:
        async with opened(path) as llm:
            found: dict[int, tuple[int, ...]] = {}
            async for delta in llm.generate([5, 6], params):
                found[delta.index] = found.get(delta.index, ()) + delta.token_ids
            assert found == {one.index: one.token_ids for one in expected}

    run(main())


def test_a_cancelled_caller_frees_its_pages_within_a_step_and_the_others_go_on(path: Path, make_llm: MakeLLM) -> None:
    expected = expected_of(make_llm("llama").generate([7, 8, 9], GREEDY))[0]

    async def main() -> None:
        async with opened(path) as llm:
            long = asyncio.create_task(collect(llm, [5] * 100, ENDLESS))
            await until(lambda: llm.engine.stats().running == 1)
            other = asyncio.create_task(collect(llm, [7, 8, 9]))
            await until(lambda: llm.engine.stats().running == 2)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            steps = llm.engine.stats().steps
            await until(lambda: llm.engine.stats().running < 2)
            assert await other == expected
            await until(lambda: llm.engine.stats().held_pages == 0)
            # The other caller's steps, and not the two thousand of the cancelled one.
            assert llm.engine.stats().steps <= steps + 25

    run(main())


def test_a_caller_who_is_cancelled_before_being_added_costs_nobody_anything(path: Path) -> None:
    """The engine thread must find the command's future cancelled, and the request it may have added, removed."""

    async def main() -> None:
        async with opened(path) as llm:
            busy = asyncio.create_task(collect(llm, [5, 6]))
            for pauses in (0, 1, 2, 3):
                hasty = [asyncio.create_task(collect(llm, [7] * 50, ENDLESS)) for _ in range(5)]
                for _ in range(pauses):
                    await asyncio.sleep(0)
                for task in hasty:
                    task.cancel()
                results = await asyncio.gather(*hasty, return_exceptions=True)
                assert all(isinstance(one, asyncio.CancelledError) for one in results)
            assert len((await busy)[1]) == 20
            await until(lambda: not llm.engine.has_unfinished())

    run(main())


def test_leaving_the_iteration_early_aborts_the_request(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as llm:
            stream = llm.generate([5, 6], ENDLESS)
            async for delta in stream:
                assert len(delta.token_ids) == 1
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await until(lambda: llm.engine.stats().running == 0)
            async for _ in llm.generate([5, 6], ENDLESS):
                break
            await until(lambda: llm.engine.stats().running == 0)

    run(main())


def test_a_caller_with_a_bad_request_gets_the_error_and_the_others_their_text(path: Path, make_llm: MakeLLM) -> None:
    expected = expected_of(make_llm("llama").generate([5, 6], GREEDY))[0]
    bad: list[tuple[Any, Any]] = [
        ([5, 999], GREEDY),
        ([], GREEDY),
        (None, GREEDY),
        (3.5, GREEDY),
        ([5], SamplingParams(max_tokens=10**6)),
        ([5], SamplingParams(stop_token_ids=(10**9,))),
    ]

    async def main() -> None:
        async with opened(path) as llm:
            for prompt, params in bad:
                healthy = asyncio.create_task(collect(llm, [5, 6]))
                with pytest.raises(InvalidRequestError):
                    await collect(llm, prompt, params)
                assert await healthy == expected
            with pytest.raises(AttributeError):
                await collect(llm, [5], "not parameters")  # type: ignore[arg-type]
            healthy = asyncio.create_task(collect(llm, [5, 6]))
            with pytest.raises(InvalidRequestError, match="no token to choose from"):
                await collect(llm, [7], STRICT)
            assert await healthy == expected

    run(main())


def test_closing_raises_in_every_caller_and_refuses_later_ones(path: Path) -> None:
    async def main() -> None:
        async with opened(path, max_num_seqs=2) as llm:
            callers = [asyncio.create_task(collect(llm, [5 + i], ENDLESS)) for i in range(4)]
            await until(lambda: llm.engine.stats().running == 2)
            await asyncio.wait_for(llm.close(), WAIT_S)
            for caller in callers:
                with pytest.raises(PellucidError, match="closed"):
                    await asyncio.wait_for(caller, WAIT_S)
            for _ in range(2):
                with pytest.raises(PellucidError, match="closed"):
                    await asyncio.wait_for(collect(llm, [5]), WAIT_S)
            await asyncio.wait_for(llm.close(), WAIT_S)

    run(main())


def test_requests_and_close_racing_each_other_all_come_to_an_end(path: Path) -> None:
    async def main() -> None:
        for delay in (0.0, 0.001, 0.004):
            async with opened(path) as llm:
                callers = [asyncio.create_task(collect(llm, [5 + i % 9], GREEDY)) for i in range(30)]
                await asyncio.sleep(delay)
                closing = asyncio.create_task(llm.close())
                callers += [asyncio.create_task(collect(llm, [5 + i % 9], GREEDY)) for i in range(30)]
                results = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), WAIT_S)
                await closing
                assert all(isinstance(one, PellucidError | tuple) for one in results)

    run(main())


def test_a_step_that_fails_for_all_raises_in_every_caller_and_in_later_ones(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as llm:
            callers = [asyncio.create_task(collect(llm, [5 + i], ENDLESS)) for i in range(3)]
            await until(lambda: llm.engine.stats().running == 3)

            def broken(_plan: object) -> None:
                raise PellucidError("the GPU fell off the bus")

            llm.engine._worker._runner.step = broken  # type: ignore[assignment,method-assign]
            for caller in callers:
                with pytest.raises(PellucidError, match="fell off"):
                    await asyncio.wait_for(caller, WAIT_S)
            with pytest.raises(PellucidError, match="fell off"):
                await asyncio.wait_for(collect(llm, [5]), WAIT_S)

    run(main())


def test_the_engine_outlives_an_event_loop_that_was_closed_without_its_leave(path: Path) -> None:
    llm = AsyncLLM(path, **engine_arguments("llama"))
    abandoned = asyncio.new_event_loop()
    try:
        stream = llm.generate([5, 6], ENDLESS)
        abandoned.run_until_complete(stream.__anext__())
    finally:
        abandoned.close()

    async def main() -> None:
        assert len((await collect(llm, [7, 8]))[1]) == 20
        await until(lambda: not llm.engine.has_unfinished())
        await asyncio.wait_for(llm.close(), WAIT_S)

    run(main())
    del stream


def test_an_idle_engine_waits_without_stepping(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as llm:
            await collect(llm, [5])
            steps = llm.engine.stats().steps
            await asyncio.sleep(0.05)
            assert llm.engine.stats().steps == steps

    run(main())
