"""`ServeArgs`: what the operator asked of the server. The CLI makes its options from these fields; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pellucid.core import PlanError
from pellucid.selection.args import flag_name
from pellucid.server.telemetry.logs import LogFormat


def _flag(
    default: Any, kind: type, text: str, *choices: str, repeated: bool = False, variable: str | None = None
) -> Any:
    metadata = {"type": kind, "help": text, "choices": choices, "repeated": repeated, "variable": variable}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ServeArgs:
    """The server beside its engine.

    Raises:
        PlanError: a value outside its range.
    """

    host: str = _flag("127.0.0.1", str, "Address to listen on; 0.0.0.0 for all.")
    port: int = _flag(8000, int, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = _flag(
        (),
        str,
        "Key that clients must send; may be repeated. ps shows flags: better --api-key-file, or PELLUCID_API_KEY.",
        repeated=True,
        variable="PELLUCID_API_KEY",
    )
    api_key_file: str | None = _flag(None, str, "File with one key a line, read again when it changes.")
    max_num_queued_reqs: int = _flag(1024, int, "Requests that may wait beyond --max-num-seqs; more get 503.")
    max_body_mb: float = _flag(8.0, float, "Largest request body, in MB.")
    max_header_kb: float = _flag(64.0, float, "Largest request head, in KB.")
    request_timeout: float = _flag(3600.0, float, "Seconds a request may take; X-Request-Timeout may ask for less.")
    drain_timeout: float = _flag(30.0, float, "Seconds that running requests get to finish after SIGTERM.")
    health_timeout: float = _flag(10.0, float, "Seconds of silence after which the engine counts as unresponsive.")
    sse_keep_alive_interval: float = _flag(15.0, float, "Seconds between comments on a stream without news; 0 is off.")
    cors_origin: tuple[str, ...] = _flag(
        (), str, "Origin of pages that may call the API; may be repeated, * for any. Off when not given.", repeated=True
    )
    metrics_prefix: str = _flag("pellucid", str, "First part of the metrics' names; vllm for its dashboards.")
    tool_call_parser: str | None = _flag(None, str, "Parser of tool calls instead of the detected one; none for none.")
    reasoning_parser: str | None = _flag(None, str, "Parser of reasoning instead of the detected one; none for none.")
    generation_config: str = _flag(
        "auto",
        str,
        "Sampling defaults: of the model's generation_config.json, or none.",
        "auto",
        "none",
    )
    log_format: LogFormat = _flag("text", str, "Form of log lines.", "text", "json")  # noqa: RUF009
    log_level: str = _flag("info", str, "Least important log lines.", "debug", "info", "warning", "error")
    otlp_traces_endpoint: str | None = _flag(None, str, "Send an OpenTelemetry span of each request there.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise PlanError(f"--port must be in 0..65535, got {self.port}")
        for name in ("max_body_mb", "max_header_kb", "request_timeout", "health_timeout"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{flag_name(name)} must be above 0, got {getattr(self, name)}")
        for name in ("max_num_queued_reqs", "drain_timeout", "sse_keep_alive_interval"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{flag_name(name)} must be 0 or more, got {getattr(self, name)}")
        for item in fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value not in choices:
                raise PlanError(f"{flag_name(item.name)} must be one of {', '.join(choices)}, got {value!r}")
