"""`Accounting`: every sequence and token that the engine gives, into the metrics. One place, so that counts add up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.core import RequestMetrics
from pellucid.engine.messages import Outputs
from pellucid.engine.output import TextDelta
from pellucid.server.telemetry.metrics import ServerMetrics


@dataclass(slots=True)
class _Account:
    """One sequence that runs."""

    arrival: float
    prompt_tokens: int
    output_tokens: int = 0
    first_token: float | None = None
    last_token: float = 0.0


class Accounting:
    """The sequences that run, by request id and sample. `on_step` is the engine client's callback."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._accounts: dict[str, dict[int, _Account]] = {}

    def begin(self, request_id: str, prompt_tokens: int, samples: int, arrival: float) -> None:
        """The engine was given a request, which arrived at `arrival` (monotonic seconds)."""
        self._accounts[request_id] = {index: _Account(arrival, prompt_tokens) for index in range(samples)}
        for _ in range(samples):
            self._metrics.request_started(prompt_tokens)

    def on_step(self, message: Outputs, deltas: Sequence[TextDelta]) -> None:
        metrics, accounts = self._metrics, self._accounts
        metrics.engine_stats(message.stats, message.step_tokens)
        now = time.monotonic()
        gaps = []
        for delta in deltas:
            account = accounts[delta.request_id][delta.index]
            if delta.token_ids:
                account.output_tokens += 1
                if account.first_token is None:
                    account.first_token = now
                    metrics.request_first_token(now - account.arrival)
                else:
                    gaps.append(now - account.last_token)
                account.last_token = now
            if delta.finish_reason is not None:
                assert delta.metrics is not None
                reason = "error" if delta.error is not None else delta.finish_reason
                self._finish(delta.request_id, delta.index, reason, delta.metrics)
        if gaps:
            metrics.observe_tokens(gaps)

    def abort(self, request_id: str, reason: str) -> None:
        """The server gave up what still runs of a request; `reason` is one of `metrics.ABORTS`."""
        if request_id not in self._accounts:
            return
        self._metrics.request_aborted(reason)
        for index, account in list(self._accounts[request_id].items()):
            # No finish time: how long a request ran that was given up says nothing of the engine.
            self._finish(request_id, index, "abort", RequestMetrics(account.arrival))

    def _finish(self, request_id: str, index: int, reason: str, times: RequestMetrics) -> None:
        accounts = self._accounts[request_id]
        account = accounts.pop(index)
        if not accounts:
            del self._accounts[request_id]
        self._metrics.request_finished(reason, times, account.prompt_tokens, account.output_tokens)
