"""How a server starts, stops and dies: what docs/operate.md promises of each, at real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.server.running import Answer, RunningServer, run_server, wait_until
from tests.server.streams import BULKY, LONG, open_stream, request_bytes

TINY = ("--served-model-name", "tiny", "--threads", "1", "--log-level", "warning")
SHORT = {**LONG, "max_tokens": 4}


@pytest.fixture
def log() -> Iterator[Path]:
    """A file for standard error, to be read as text."""
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        yield Path(file.name)


def completion(server: RunningServer, **arguments: object) -> Answer:
    return server.post("/v1/completions", SHORT, **arguments)  # type: ignore[arg-type]


def exists(pid: int) -> bool:
    """A process that runs, or is stopped: a zombie has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# Stopping ------------------------------------------------------------------------------------------------------------


def test_sigterm_lets_running_streams_finish_and_takes_no_new_request(tiny_model: Path) -> None:
    with run_server(tiny_model, *TINY) as server:
        body = {**LONG, "max_tokens": 1200}
        whole = server.post("/v1/completions", body).json["choices"][0]
        with open_stream(server, body) as stream:
            first = stream.next()
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/health/ready").json["status"] == "draining")
            refused = completion(server)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
            assert "shutting down" in refused.json["error"]["message"]
            assert server.get("/health/live").status == 200
            assert server.metric("pellucid:admission_rejections_total", reason="draining") == 1
            events = [first, *stream.rest()]
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["text"]
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_both_processes_while_the_engine_starts_is_an_orderly_end(
    tiny_model: Path, log: Path, number: signal.Signals
) -> None:
    """A terminal's Ctrl-C goes to the process group, a service manager's SIGTERM to all processes of a service."""
    command = [sys.executable, "-m", "pellucid", "serve", str(tiny_model), *TINY, "--port", "0"]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, start_new_session=True) as process:
        server = RunningServer(process, 0)
        try:
            wait_until(lambda: has_engine(server), 30)
            if number is signal.SIGTERM:
                os.kill(server.engine_pid, number)
            os.killpg(process.pid, number)
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert log.read_text() == ""


def test_a_slow_reader_gets_all_of_its_answer_before_the_server_ends(tiny_model: Path) -> None:
    with run_server(tiny_model, *TINY) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(20)
        client.sendall(request_bytes("/v1/chat/completions", BULKY))
        wait_until(lambda: server.metric("pellucid:request_success_total", finished_reason="length") == 8)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(3)
        assert server.process.poll() is None
        answer = client.makefile("rb").read()
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(5) == 0


def test_what_outlasts_the_drain_gets_an_error_event_and_the_exit_code_is_0(tiny_model: Path) -> None:
    with run_server(tiny_model, *TINY, "--drain-timeout", "1") as server, open_stream(server) as stream:
        stream.next()
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        *_, error, done = stream.rest()
        assert 0.9 < time.monotonic() - asked < 4
        assert done == "[DONE]"
        assert "shutting down" in error["error"]["message"]
        # The engine is hung as well: it is given 5 s to end, and killed.
        assert server.process.wait(20) == 0


def test_a_second_sigterm_ends_at_once(tiny_model: Path) -> None:
    with run_server(tiny_model, *TINY, "--drain-timeout", "60") as server, open_stream(server) as stream:
        stream.next()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health/ready").json["status"] == "draining")
        server.process.send_signal(signal.SIGTERM)
        *_, error, done = stream.rest()
        assert done == "[DONE]"
        assert "shutting down" in error["error"]["message"]
        assert server.process.wait(4) == 0


# Dying ---------------------------------------------------------------------------------------------------------------


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_exit_code_3(
    tiny_model: Path, log: Path
) -> None:
    with run_server(tiny_model, *TINY, stderr=log.open("wb")) as server, open_stream(server) as stream:
        stream.next()
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: server.get("/health/ready").status == 503, 2)
        assert server.get("/health/ready").json["status"] == "dead"
        refused = completion(server)
        assert (refused.status, refused.json["error"]["code"]) == (503, "engine_dead")
        assert refused.headers["Retry-After"] == "10"
        assert server.metric("pellucid:engine_up") == 0
        *_, error, done = stream.rest()
        assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")
        assert server.process.wait(10) == 3
        assert time.monotonic() - killed < 10
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "killed by signal 9" in errors[0]


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_engine_does_not_outlive_a_killed_api_process(tiny_model: Path, stopped: bool) -> None:
    with run_server(tiny_model, *TINY) as server, open_stream(server) as stream:
        stream.next()
        engine = server.engine_pid
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not exists(engine), 2, "the engine process is still there")


# Hanging: case C14 ---------------------------------------------------------------------------------------------------


def test_a_hung_engine_is_alive_but_not_ready(tiny_model: Path) -> None:
    with run_server(tiny_model, *TINY, "--health-timeout", "2") as server:
        assert (server.get("/health/live").status, server.get("/health/ready").status) == (200, 200)
        assert completion(server).status == 200
        with open_stream(server, headers={"X-Request-Timeout": "6"}) as stream:
            stream.next()
            wait_until(lambda: server.metric("pellucid:num_requests_running") == 1)
            os.kill(server.engine_pid, signal.SIGSTOP)
            time.sleep(3)
            assert server.get("/health/live").status == 200
            assert server.get("/v1/models").status == 200
            ready = server.get("/health/ready")
            assert (ready.status, ready.json["status"]) == (503, "unresponsive")
            assert ready.json["last_step"] > SHORT["max_tokens"]
            assert ready.json["last_step_age_s"] > 3
            assert (ready.json["running"], ready.json["waiting"]) == (1, 0)
            refused = completion(server)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert server.metric("pellucid:admission_rejections_total", reason="unresponsive") == 1
            assert server.metric("pellucid:engine_step_age_seconds") > 3
            # The running stream is not silent past its own deadline either, engine or no engine.
            *_, error, done = stream.rest()
            assert (error["error"]["type"], done) == ("timeout_error", "[DONE]")
        os.kill(server.engine_pid, signal.SIGCONT)
        wait_until(lambda: server.get("/health/ready").status == 200, 5)
        assert completion(server).status == 200
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.get("/health/ready").json["status"] == "dead", 2)
        # Not for a blink only: whoever sends traffic here must have a chance to see it.
        time.sleep(0.5)
        assert server.get("/health/ready").status == 503
        assert server.process.wait(10) == 3


# Logs that can't be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["full disk", "closed pipe"])
def test_a_log_that_takes_nothing_costs_lines_and_nothing_else(tiny_model: Path, where: str) -> None:
    if where == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        with run_server(tiny_model, *TINY[:-1], "info", stderr=descriptor) as server:
            before = server.metric("pellucid:log_lines_dropped_total")
            for _ in range(5):
                assert completion(server).status == 200
            wait_until(lambda: server.metric("pellucid:log_lines_dropped_total") >= before + 5, 3)
            assert server.stop() == 0
    finally:
        os.close(descriptor)


# Starting ------------------------------------------------------------------------------------------------------------


def failed_start(*command: str) -> tuple[int, list[str]]:
    """Exit code and lines of standard error of a server that can't start."""
    result = subprocess.run(
        [sys.executable, "-m", "pellucid", "serve", *command], stderr=subprocess.PIPE, timeout=60, check=False
    )
    return result.returncode, result.stderr.decode().splitlines()


def test_a_port_in_use_is_one_line_before_anything_is_loaded(tiny_model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        # Not the model either is looked at: its path need not exist.
        code, lines = failed_start("nowhere/at-all", "--port", port)
    assert (code, len(lines)) == (2, 1)
    assert f"127.0.0.1:{port}" in lines[0]
    assert "--port" in lines[0]


def test_of_two_servers_that_start_on_one_port_at_once_one_ends(tiny_model: Path) -> None:
    command = (sys.executable, "-m", "pellucid", "serve", str(tiny_model), *TINY)
    with run_server(tiny_model, *TINY, wait=False) as server:
        other = subprocess.Popen([*command, "--port", str(server.port)], stderr=subprocess.PIPE)
        try:
            wait_until(lambda: server.process.poll() == 2 or other.poll() == 2, 30, "both go on, or one fell")
            wait_until(lambda: is_ready(server), 30)
            assert [server.process.poll(), other.poll()].count(None) == 1
        finally:
            other.kill()
            other.wait()


def is_ready(server: RunningServer) -> bool:
    """Whichever process answers at its port."""
    with suppress(OSError):
        return server.get("/health/ready").status == 200
    return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, lines = failed_start(str(tmp_path / "no-model"), "--port", "0")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("error: ")
    assert "no-model" in lines[0]


def test_a_truncated_checkpoint_is_one_line_of_its_own_words(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "short"))
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    code, lines = failed_start(str(model), "--port", "0", *TINY)
    assert (code, len(lines)) == (2, 1)
    assert "model.safetensors" in lines[0]


def test_weights_that_do_not_make_the_model_are_the_engines_one_line(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "wrong"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 16}))
    code, lines = failed_start(str(model), "--port", "0", *TINY)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("error: ")
    assert "mlp" in lines[0]


def test_a_loading_server_says_how_far_it_is_and_refuses_with_a_time(smollm2_path: Path) -> None:
    with run_server(smollm2_path, "--log-level", "warning", wait=False) as server:
        wait_until(lambda: listens(server.port) and has_engine(server), 30)
        engine = server.engine_pid

        def slice_of_loading() -> bool:
            """Let the engine run for a moment, so that it is stopped while it loads however fast it is."""
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.02)
            os.kill(engine, signal.SIGSTOP)
            return bool(server.get("/health/ready").json["bytes_total"])

        wait_until(slice_of_loading, 60)
        ready = server.get("/health/ready")
        assert (ready.status, ready.json["status"], ready.json["phase"]) == (503, "loading", "loading weights")
        assert 0 <= ready.json["bytes_done"] <= ready.json["bytes_total"]
        assert ready.json["bytes_total"] > 90e6
        assert (server.get("/health/live").status, server.get("/v1/models").status) == (200, 200)
        for refused in (server.chat(), completion(server)):
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        assert server.metric("pellucid:admission_rejections_total", reason="loading") == 2
        # Nothing runs that could be drained, and what loads need not be asked.
        assert server.stop(4) == 0
        assert not exists(engine)


def has_engine(server: RunningServer) -> bool:
    with suppress(AssertionError, OSError):
        return server.engine_pid > 0
    return False
