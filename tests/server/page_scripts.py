"""What `ScriptedApp` answers: a real plan, and a script of a chat for each thing that the page must show."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from starlette.responses import Response, StreamingResponse

from pellucid.cli.main import cli
from pellucid.selection.plan import Decision, ExecutionPlan, Measured
from tests.server.scripted_app import delta, finish, refusal

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
MARKUP = "<img src=x onerror=alert(1)><b>not bold</b>"
ANSWER = f"One **two** `three` {MARKUP}\n\n```python\nfor x in y:\n    pass\n```\nlast"


def real_plan() -> ExecutionPlan:
    """A real plan with everything that the page shows: backends by bucket, rejections, remedies, a bill."""
    shown = CliRunner().invoke(cli, ["explain", str(CONFIGS / "DeepSeek-V2-Lite.json"), "--hardware", "h200", "--json"])
    assert shown.exit_code == 0, shown.output
    found = ExecutionPlan.from_json(json.loads(shown.output))
    return replace(found, decisions=tuple(map(_measured, found.decisions)))


def _measured(decision: Decision) -> Decision:
    """Small steps of the experts as measured, with other figures at each bucket."""
    if decision.op != "moe" or (decision.bucket or 99) > 8:
        return decision
    times = {"triton_fused": 30 + decision.bucket, "reference": 900 + decision.bucket}
    measured = tuple(Measured(name, us * 1e-6, 0.5e-6) for name, us in times.items())
    verdict = f"measured {times['triton_fused']}.0 us"
    return replace(decision, how="measured", because=(decision.because[0], verdict), measured=measured)


async def answer(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield delta(role="assistant", content="")
    yield delta(reasoning_content="Let me ")
    yield delta(reasoning_content="think.")
    for start in range(0, len(ANSWER), 7):
        await asyncio.sleep(0.002)
        yield delta(content=ANSWER[start : start + 7])
    yield finish(body.get("finish", "stop"))
    usage = {"prompt_tokens": 1234, "completion_tokens": 4321, "prompt_tokens_details": {"cached_tokens": 1024}}
    yield {"choices": [], "usage": usage}


async def forever(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for number in itertools.count():
        yield delta(content=f"word{number} ")
        await asyncio.sleep(0.01)


async def tools(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "weather", "arguments": ""}}])
    for part in ('{"city":', ' "Oslo"}'):
        yield delta(tool_calls=[{"index": 0, "function": {"arguments": part}}])
    yield finish("tool_calls")


async def broken(_: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield delta(content="partial")
    yield {"error": {"message": "The engine died.", "type": "internal_error"}}


def cut(_: dict[str, Any]) -> Response:
    whole = b"data: " + json.dumps(delta(content="partial")).encode() + b"\r\n\r\n"
    return StreamingResponse(iter([whole, whole[:20]]), media_type="text/event-stream")


def split(_: dict[str, Any]) -> Response:
    """Single bytes, CRLF, no [DONE]."""
    events = [delta(content="né 水 🙂"), finish()]
    data = b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\r\n\r\n" for e in events)

    async def single() -> AsyncIterator[bytes]:
        for start in range(len(data)):
            yield data[start : start + 1]

    return StreamingResponse(single(), media_type="text/event-stream")


def too_long(_: dict[str, Any]) -> Response:
    return refusal(400, "The prompt is too long.")


SCRIPTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "forever": forever, "tools": tools, "broken": broken, "cut": cut, "split": split, "too long": too_long,
}  # fmt: skip
