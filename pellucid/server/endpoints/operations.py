"""What operators and load balancers ask: health, metrics, plan, versions, models, cache resets."""

from __future__ import annotations

import logging
import time
from dataclasses import fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pellucid import __version__
from pellucid.engine.client import EngineDeadError, EngineState
from pellucid.engine.messages import Reply
from pellucid.selection.plan_html import plan_html
from pellucid.server.context import DRAINING_RETRY_S, LOADING_RETRY_S, ServerContext, context_of
from pellucid.server.errors import engine_dead, internal, overloaded
from pellucid.server.http.responding import JSONResponse
from pellucid.server.protocol.models import ModelCard, ModelList

logger = logging.getLogger(__name__)


async def health_live(request: Request) -> JSONResponse:
    """200 as long as this process answers at all: a restart would not help a model that loads or a long step."""
    return JSONResponse({"status": "live"})


async def health_ready(request: Request) -> JSONResponse:
    """200 when a request sent now would be served; else 503 and the reason. Pings the engine loop."""
    context = context_of(request)
    engine = context.engine
    status = engine.state.value
    if engine.state is EngineState.READY:
        status = "draining" if context.lifecycle.draining else await _ping(context)
    loads = engine.state is EngineState.LOADING
    body: dict[str, Any] = {"status": status, "phase": engine.progress.phase if loads else None}
    if loads:
        progress = engine.progress
        body |= {"bytes_done": progress.done_bytes, "bytes_total": progress.total_bytes, "eta_s": progress.eta_s}
    elif engine.state is EngineState.DEAD:
        body["message"] = str(engine.failure)
    stats = engine.stats
    body |= {
        "last_step": engine.last_step,
        "last_step_age_s": round(time.monotonic() - engine.last_step_time, 3),
        "last_heard_age_s": round(engine.silence_s(), 3),
        # The engine's own counts may be as old as its silence; how many are in flight this process knows itself.
        "in_flight": engine.running,
        "running": 0 if stats is None else stats.running,
        "waiting": 0 if stats is None else stats.waiting,
    }
    if status == "ready":
        return JSONResponse(body)
    retry_s = DRAINING_RETRY_S if status == "draining" else LOADING_RETRY_S
    return JSONResponse(body, status_code=503, headers={"Retry-After": str(retry_s)})


async def _ping(context: ServerContext) -> str:
    try:
        await context.engine.call("ping", context.args.health_timeout)
    except TimeoutError:
        return "unresponsive"
    except EngineDeadError:
        return "dead"
    return "ready"


async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics where the scraper accepts it."""
    data, content_type = context_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(data, media_type=None, headers={"Content-Type": content_type})


async def list_models(request: Request) -> JSONResponse:
    return JSONResponse(ModelList([_card(context_of(request))]))


async def get_model(request: Request) -> JSONResponse:
    context = context_of(request)
    context.check_model(request.path_params["model"])
    return JSONResponse(_card(context))


def _card(context: ServerContext) -> ModelCard:
    return ModelCard(context.model_name, context.started, context.max_model_len, context.model_root)


async def plan(request: Request) -> Response:
    """The plan that the engine runs on: the object itself, or the page that `explain --html` writes to a browser."""
    context = context_of(request)
    engine = context.engine
    if engine.plan is None:
        raise _not_ready(context)
    headers = {"Vary": "Accept"}
    accepted = request.headers.get("accept", "")
    if "text/html" in accepted and "application/json" not in accepted:
        page = plan_html(engine.plan, engine.notes, f"Plan of {context.model_name}")
        return Response(page, media_type="text/html", headers=headers)
    return JSONResponse({"plan": engine.plan.to_json(), "notes": engine.notes}, headers=headers)


async def version(request: Request) -> JSONResponse:
    return JSONResponse({"version": __version__})


async def server_info(request: Request) -> JSONResponse:
    """Every setting with where it came from, parsers with what showed them, and the state of the engine."""
    context = context_of(request)
    engine = context.engine
    decided = {} if engine.plan is None else {d.key: {"value": d.value, "source": d.how} for d in engine.plan.decisions}
    return JSONResponse(
        {
            "version": __version__,
            "model": context.model_root,
            "served_model_name": context.model_name,
            "max_model_len": context.max_model_len,
            "status": engine.state.value,
            "load_s": round(engine.load_s, 3),
            "engine_args": {name: getattr(context.engine_args, name) for name in context.engine_args.asked()},
            "server_args": _server_args(context),
            "decisions": decided,
            "parsers": {
                "tool_call_parser": context.parsers.tool_parser,
                "reasoning_parser": context.parsers.reasoning_parser,
                "because": context.parsers.because,
            },
            "sampling_defaults": context.defaults.given(),
            "notes": engine.notes,
            # What sglang.bench_serving looks at: no speculation yet, so no accept length.
            "internal_states": [{}],
        }
    )


def _server_args(context: ServerContext) -> dict[str, Any]:
    """The server's flags with their source; keys are counted, never shown."""
    shown = {}
    for item in fields(context.args):
        value = getattr(context.args, item.name)
        source = "asked" if value != item.default else "default"
        shown[item.name] = {"value": len(value) if item.name == "api_key" else value, "source": source}
    return shown


async def reset_prefix_cache(request: Request) -> JSONResponse:
    """Forget every cached prefix; running requests keep the pages that they read.

    The engine checks its page accounts first: free + cached + held pages are all pages, or this is a 500.
    """
    reply = await _call(context_of(request), "reset_prefix_cache")
    if reply.error is not None:
        logger.error("%s", reply.error)
        raise internal()
    stats = reply.stats
    pages = {"free": stats.free_pages, "cached": stats.cached_pages, "held": stats.held_pages}
    return JSONResponse({"status": "ok", "pages": {**pages, "total": stats.total_pages}})


async def _call(context: ServerContext, verb: str) -> Reply:
    if context.engine.state is not EngineState.READY:
        raise _not_ready(context)
    try:
        return await context.engine.call(verb, context.args.health_timeout)
    except TimeoutError:
        raise overloaded("the engine does not answer; see /health/ready", LOADING_RETRY_S, "unresponsive") from None
    except EngineDeadError:
        raise engine_dead() from None


def _not_ready(context: ServerContext) -> Exception:
    engine = context.engine
    if engine.state is EngineState.DEAD:
        return engine_dead()
    message = f"the model is not ready yet ({engine.progress.phase}); see /health/ready"
    return overloaded(message, LOADING_RETRY_S, "loading")
