"""The served /openapi.json, property by property: what fits it, and what nearly does, never makes the server fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from tests.server.running import RunningServer

EXAMPLES = 50
"""Of each operation in each mode, always the same ones."""

LIMITS = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "n": 3, "best_of": 3}
"""The most that is asked for of what takes time."""

CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


def keep_small(context: schemathesis.HookContext, body: Any) -> Any:
    """A body with its limits lowered, and given where it has none. What is no limit at all stays as it is."""
    if not isinstance(body, dict):
        return body
    for name, limit in LIMITS.items():
        value = body.get(name)
        if isinstance(value, int | float) and value > limit:
            body[name] = limit
    assert context.operation is not None
    name = "max_output_tokens" if context.operation.path == "/v1/responses" else "max_tokens"
    if context.operation.path.startswith("/v1/") and body.get(name) is None:
        body[name] = LIMITS[name]
    return body


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(tiny_server: RunningServer, mode: schemathesis.GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{tiny_server.base_url}/openapi.json")
    schema.hook("map_body")(keep_small)
    engine = tiny_server.engine_pid
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        takes_something = bool(operation.body or operation.path_parameters)
        if mode is schemathesis.GenerationMode.NEGATIVE and not takes_something:
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            response = case.call(headers={"X-Request-Timeout": "5"}, timeout=20)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=list(CHECKS))

        ask()
    assert sum(statuses.values()) > 3 * EXAMPLES
    assert tiny_server.engine_pid == engine
    assert tiny_server.chat().status == 200
