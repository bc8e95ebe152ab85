"""What one client may do to a server, and how its request ends: disconnects, deadlines, queue, keys, sizes, headers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Answer, RunningServer, run_server, wait_until
from tests.server.streams import BULKY, LONG, kill_socket, open_stream, request_bytes

SHORT = {**LONG, "max_tokens": 4}
KEYS = ("first-key", "ключ-é")


@pytest.fixture(scope="module")
def strict_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One sequence at a time and one behind it, small bodies, small heads, keys, one origin."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\n".join(["", f"  {KEYS[0]}  ", KEYS[1], ""]))
    flags = {
        "--api-key-file": str(file),
        "--max-num-seqs": "1",
        "--max-num-queued-reqs": "1",
        "--max-body-mb": "0.01",
        "--max-header-kb": "4",
        "--cors-origin": "https://page.example",
        "--log-level": "warning",
    }
    arguments = [part for pair in flags.items() for part in pair]
    with run_server(tiny_model, "--threads", "1", *arguments, PELLUCID_API_KEY="key-of-the-environment") as server:
        yield server
        assert server.stop() == 0


def assert_idle(server: RunningServer) -> None:
    """Nothing runs within a second, and no page is held."""
    wait_until(lambda: server.get("/health/ready").json["running"] == 0, 1, "the request still runs")
    assert server.get("/health/ready").json["waiting"] == 0
    pages = server.post("/reset_prefix_cache", {}).json["pages"]
    assert (pages["held"], pages["cached"], pages["free"]) == (0, 0, pages["total"])


def assert_error(answer: Answer, status: int, kind: str) -> None:
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)


# Clients that go away ------------------------------------------------------------------------------------------------


def test_a_stream_whose_client_is_killed_ends_and_frees_its_pages(tiny_server: RunningServer) -> None:
    aborted = tiny_server.metric("pellucid:request_aborted_total", reason="client_disconnected")
    with open_stream(tiny_server) as stream:
        stream.next()
        wait_until(lambda: tiny_server.metric("pellucid:num_requests_running") == 1)
        stream.kill()
        assert_idle(tiny_server)
    assert tiny_server.metric("pellucid:request_aborted_total", reason="client_disconnected") == aborted + 1
    wait_until(lambda: tiny_server.metric("pellucid:num_requests_running") == 0, 1)


@pytest.mark.parametrize("hard", [True, False], ids=["killed", "closed"])
def test_a_request_that_is_not_streamed_ends_with_its_client_too(tiny_server: RunningServer, hard: bool) -> None:
    for path, body in (
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "prompt": [[1, 2], [3, 4]], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000}),
    ):
        client = socket.create_connection(("127.0.0.1", tiny_server.port))
        client.sendall(request_bytes(path, {"ignore_eos": True, **body}))
        wait_until(lambda: tiny_server.get("/health/ready").json["running"] >= 1, 3)
        if hard:
            kill_socket(client)
        client.close()
        assert_idle(tiny_server)


def test_a_stream_that_nobody_reads_ends_at_its_deadline(tiny_server: RunningServer) -> None:
    timeouts = tiny_server.metric("pellucid:request_aborted_total", reason="request_timeout")
    tokens = tiny_server.metric("pellucid:generation_tokens_total")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", tiny_server.port))
        client.sendall(request_bytes("/v1/chat/completions", {**BULKY, "max_tokens": 1000}, "X-Request-Timeout: 6"))
        wait_until(lambda: tiny_server.metric("pellucid:generation_tokens_total") > tokens + 2400)
        # The engine must not get to the end before the deadline does.
        os.kill(tiny_server.engine_pid, signal.SIGSTOP)
        try:
            wait_until(
                lambda: tiny_server.metric("pellucid:request_aborted_total", reason="request_timeout") == timeouts + 1
            )
        finally:
            os.kill(tiny_server.engine_pid, signal.SIGCONT)
        assert_idle(tiny_server)


def test_an_id_that_a_client_uses_again_does_not_join_two_requests(tiny_server: RunningServer) -> None:
    """The first answer is stuck in its socket though the engine is done with it; then its client goes away."""
    done = tiny_server.metric("pellucid:request_success_total", finished_reason="length")
    with socket.socket() as first, socket.create_connection(("127.0.0.1", tiny_server.port), timeout=20) as second:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        first.connect(("127.0.0.1", tiny_server.port))
        first.sendall(request_bytes("/v1/chat/completions", {**BULKY, "request_id": "mine"}))
        wait_until(lambda: tiny_server.metric("pellucid:request_success_total", finished_reason="length") == done + 8)
        again = {"messages": BULKY["messages"], "max_tokens": 500, "ignore_eos": True, "request_id": "mine"}
        second.sendall(request_bytes("/v1/chat/completions", again))
        wait_until(lambda: tiny_server.get("/health/ready").json["running"] == 1)
        kill_socket(first)
        response = http.client.HTTPResponse(second)
        response.begin()
        answer = json.loads(response.read())
    assert answer["id"] == "chatcmpl-mine"
    assert answer["usage"]["completion_tokens"] == 500


# Time ----------------------------------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_a_408(tiny_server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}),
    ):
        begin = time.monotonic()
        answer = tiny_server.post(path, {**body, "max_tokens": 2000}, headers={"X-Request-Timeout": "0.05"})
        assert time.monotonic() - begin < 1
        assert_error(answer, 408, "timeout_error")
        assert_idle(tiny_server)


def test_a_stream_that_takes_too_long_ends_with_an_error_event(tiny_server: RunningServer) -> None:
    with open_stream(tiny_server, headers={"X-Request-Timeout": "0.5"}) as stream:
        *deltas, error, done = stream.rest()
    assert len(deltas) > 1
    assert (error["error"]["type"], done) == ("timeout_error", "[DONE]")
    assert_idle(tiny_server)


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "soon", ""])
def test_a_deadline_that_makes_no_sense_is_a_400(tiny_server: RunningServer, asked: str) -> None:
    answer = tiny_server.post("/v1/completions", SHORT, headers={"X-Request-Timeout": asked})
    assert_error(answer, 400, "invalid_request_error")
    assert answer.json["error"]["param"] == "X-Request-Timeout"


# Admission -----------------------------------------------------------------------------------------------------------


def test_what_is_over_the_queue_is_refused_at_once_and_the_queued_are_served(strict_server: RunningServer) -> None:
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {**LONG, "max_tokens": 500}
    with open_stream(strict_server, body, key) as first:
        first.next()
        with socket.create_connection(("127.0.0.1", strict_server.port), timeout=20) as second:
            second.sendall(request_bytes("/v1/completions", body, f"x-api-key: {KEYS[0]}"))
            wait_until(lambda: strict_server.get("/health/ready").json["waiting"] == 1)
            refused = strict_server.post("/v1/completions", SHORT, headers=key)
            assert_error(refused, 503, "server_error")
            assert refused.headers["Retry-After"] == "1"
            assert "--max-num-queued-reqs" in refused.json["error"]["message"]
            assert first.rest()[-1] == "[DONE]"
            response = http.client.HTTPResponse(second)
            response.begin()
            assert json.loads(response.read())["usage"]["completion_tokens"] == 500
    assert strict_server.metric("pellucid:admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert strict_server.post("/v1/completions", SHORT, headers=key).status == 200


def latin1(key: str) -> str:
    """The key's UTF-8 bytes as a header value: http.client writes text as Latin-1."""
    return key.encode().decode("latin-1")


def test_any_key_opens_by_either_header(strict_server: RunningServer) -> None:
    for key in (*KEYS, "key-of-the-environment"):
        for headers in (
            {"Authorization": f"Bearer {latin1(key)}"},
            {"Authorization": f"bearer   {latin1(key)} "},
            {"x-api-key": latin1(key)},
            {"x-api-key": latin1(key), "Authorization": "Bearer of-another-service"},
        ):
            assert strict_server.get("/v1/models", headers=headers).status == 200, headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": KEYS[0]},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": "Bearer \xff\xfe\xe9"},
        {"x-api-key": ""},
        {"x-api-key": "\xff\xfe"},
        {"x-api-key": f"{KEYS[0]}\t{latin1(KEYS[1])}"},
    ],
    ids=str,
)
def test_without_a_right_key_only_probes_and_metrics_answer(
    strict_server: RunningServer, headers: dict[str, str]
) -> None:
    answer = strict_server.get("/v1/models", headers=headers)
    assert_error(answer, 401, "authentication_error")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert_error(strict_server.post("/v1/completions", SHORT, headers=headers), 401, "authentication_error")
    assert strict_server.get("/no/such/path", headers=headers).status == 401
    for path in ("/health", "/health/live", "/health/ready", "/ready", "/metrics", "/version"):
        assert strict_server.get(path, headers=headers).status == 200, path


def test_keys_are_in_no_answer(strict_server: RunningServer) -> None:
    told = strict_server.get("/server_info", headers={"x-api-key": KEYS[0]}).body.decode()
    assert '"api_key"' in told
    assert not any(key in told for key in (*KEYS, "key-of-the-environment"))


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_a_413_announced_or_in_chunks(strict_server: RunningServer) -> None:
    key = f"x-api-key: {KEYS[0]}"
    announced = request_bytes("/v1/completions", {}, key).replace(b"Content-Length: 2", b"Content-Length: 10001")
    # The answer does not wait for what was announced.
    assert_error(exchange(strict_server, announced), 413, "invalid_request_error")
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    head = request_bytes("/v1/completions", {}, key).partition(b"Content-Length")[0]
    chunked = head + f"Transfer-Encoding: chunked\r\n{key}\r\n\r\n".encode() + chunk * 3
    assert_error(exchange(strict_server, chunked), 413, "invalid_request_error")
    fitting = {**SHORT, "user": "x" * 9000}
    assert strict_server.post("/v1/completions", fitting, headers={"x-api-key": KEYS[0]}).status == 200


def exchange(server: RunningServer, data: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(data)
        response = http.client.HTTPResponse(client)
        response.begin()
        return Answer(response.status, response.headers, response.read())


def test_a_head_over_the_limit_is_a_431(strict_server: RunningServer) -> None:
    headers = {"x-api-key": KEYS[0], "X-Fill": "x" * 3000}
    assert strict_server.get("/v1/models", headers=headers).status == 200
    answer = exchange(strict_server, request_bytes("/v1/models", {}, "X-Fill: " + "x" * 4000, method="GET"))
    assert_error(answer, 431, "invalid_request_error")


# Headers -------------------------------------------------------------------------------------------------------------


def test_pages_of_other_origins_may_call_only_where_they_are_named(
    tiny_server: RunningServer, strict_server: RunningServer
) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    named, other = {"Origin": "https://page.example"}, {"Origin": "https://other.example"}
    for method, headers in (("OPTIONS", {**named, **preflight}), ("GET", named)):
        assert "Access-Control-Allow-Origin" not in tiny_server.request(method, "/version", headers=headers).headers
    answer = strict_server.request("OPTIONS", "/v1/completions", headers={**named, **preflight})
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
    assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
    # An error must be readable to the page as well.
    refused = strict_server.post("/v1/completions", SHORT, headers=named)
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://page.example")
    for method, headers in (("OPTIONS", {**other, **preflight}), ("GET", other)):
        assert "Access-Control-Allow-Origin" not in strict_server.request(method, "/version", headers=headers).headers


def test_head_of_the_metrics_is_their_head(tiny_server: RunningServer) -> None:
    whole, head = tiny_server.get("/metrics"), tiny_server.request("HEAD", "/metrics")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]


@pytest.mark.parametrize("clean", ["abc-123", "0" * 128, "trace:4bf9/7=@+."])
def test_a_clean_request_id_comes_back(tiny_server: RunningServer, clean: str) -> None:
    assert tiny_server.get("/version", headers={"X-Request-Id": clean}).headers["X-Request-Id"] == clean
    refused = tiny_server.post("/v1/completions", {"prompt": []}, headers={"X-Request-Id": clean})
    assert (refused.status, refused.headers["X-Request-Id"]) == (400, clean)


@pytest.mark.parametrize("unclean", ["", "0" * 129, "two words", "a;b", "\xe9", 'quote"'])
def test_any_other_request_id_is_replaced(tiny_server: RunningServer, unclean: str) -> None:
    given = [tiny_server.get("/version", headers={"X-Request-Id": unclean}).headers["X-Request-Id"] for _ in range(2)]
    assert all(len(one) == 32 and one.isalnum() for one in given)
    assert given[0] != given[1]
