"""Many streams at once, of which some go away at random: nothing is left of them, and the others are undisturbed."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer, run_server, wait_until
from tests.server.streams import request_bytes

ROUNDS = 10
STREAMS = 200
LEAVING = 0.3
PROMPTS = 25
MAX_TOKENS = 32

SETTLED = 3
"""Rounds until every cache, pool and buffer has its size."""

API_SLACK_MB, ENGINE_SLACK_MB = 3, 8
"""How far resident memory may wander after that: the allocators give back what they like. 1400 streams come by then,
so that 2 KB of the API process or 6 KB of the engine left by each would be found."""


@dataclass(frozen=True)
class Leftovers:
    """What a server holds when nothing runs."""

    tasks: float
    open_files: float
    api_mb: float
    engine_mb: float


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """Its KV pool is too small for what runs at once, so that streams wait and are preempted. Its log stays clean."""
    small = ("--max-model-len", "256", "--max-num-seqs", "64", "--block-size", "4", "--num-kv-pages", "400")
    log = tmp_path / "log"
    with log.open("wb") as file, run_server(tiny_model, "--threads", "1", *small, stderr=file) as running:
        yield running
        assert running.stop() == 0
    unexpected = [line for line in log.read_text().splitlines() if "Z INFO " not in line]
    assert unexpected == []


def bodies() -> list[dict[str, Any]]:
    """Greedy completions, every other one with a prompt that begins like the one before it."""
    random_ids = random.Random(1)
    prompts = [[random_ids.randrange(2, 300) for _ in range(random_ids.randrange(1, 60))] for _ in range(PROMPTS)]
    prompts[1::2] = [first + second for first, second in zip(prompts, prompts[1::2], strict=False)]
    return [{"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True} for prompt in prompts]


def leftovers(server: RunningServer) -> Leftovers:
    pids = server.process.pid, server.engine_pid
    api, engine = (
        int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024 for pid in pids
    )
    return Leftovers(server.metric("pellucid:api_tasks"), server.metric("process_open_fds"), api, engine)


async def read_stream(port: int, body: dict[str, Any], leaves_after: int | None) -> str | None:
    """The text of a streamed completion; None for a client that leaves after so many bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/completions", {**body, "stream": True}, "Connection: close"))
    if leaves_after is not None:
        if leaves_after:
            await reader.read(leaves_after)
        else:
            await asyncio.sleep(0)
        writer.transport.abort()
        return None
    data = await reader.read()
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:300]
    # The chunked encoding's own lines are no events.
    events = re.findall(rb"^data: (.*)$", data, re.MULTILINE)
    assert events.pop().strip() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def run_round(port: int, asked: list[dict[str, Any]], chance: random.Random) -> list[tuple[int, str | None]]:
    """(prompt, text) of each stream."""
    numbers = [chance.randrange(len(asked)) for _ in range(STREAMS)]
    whole = MAX_TOKENS * 190
    leaving = [chance.randrange(whole) if chance.random() < LEAVING else None for _ in numbers]
    leaving = [0 if size is not None and chance.random() < 0.2 else size for size in leaving]
    streams = [read_stream(port, asked[number], size) for number, size in zip(numbers, leaving, strict=True)]
    return list(zip(numbers, await asyncio.gather(*streams), strict=True))


def test_nothing_is_left_of_streams_that_go_away_and_the_others_are_undisturbed(server: RunningServer) -> None:
    chance, asked = random.Random(0), bodies()
    alone = [server.post("/v1/completions", body).json["choices"][0]["text"] for body in asked]
    idle = leftovers(server)
    after: list[Leftovers] = []
    survivors = 0
    for _ in range(ROUNDS):
        for number, text in asyncio.run(run_round(server.port, asked, chance)):
            survivors += text is not None
            assert text in (alone[number], None)
        wait_until(lambda: leftovers(server).tasks == idle.tasks, 2, "tasks are left over")
        wait_until(lambda: leftovers(server).open_files == idle.open_files, 2, "files are left open")
        ready = server.get("/health/ready").json
        assert (ready["running"], ready["waiting"]) == (0, 0)
        pages = server.post("/reset_prefix_cache", {}).json["pages"]
        assert (pages["held"], pages["cached"], pages["free"]) == (0, 0, pages["total"])
        after.append(leftovers(server))
    assert 0.6 * ROUNDS * STREAMS < survivors < 0.8 * ROUNDS * STREAMS
    assert server.metric("pellucid:request_aborted_total", reason="client_disconnected") > 0.1 * ROUNDS * STREAMS
    assert server.metric("pellucid:num_preemptions_total") > ROUNDS
    settled = after[SETTLED - 1]
    for one in after[SETTLED:]:
        assert one.api_mb < settled.api_mb + API_SLACK_MB
        assert one.engine_mb < settled.engine_mb + ENGINE_SLACK_MB
