"""`pellucid chat --url`: any server's answers as a user meets them, and every way they fail told in one line."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pellucid.cli.main import main
from tests.cli.scripted_server import Reply, ScriptedServer, Send, scripted_server

DONE = b"data: [DONE]\n\n"
MODELS = Reply.json({"object": "list", "data": [{"id": "tiny"}]})
Chat = Callable[..., tuple[int, str, str]]


def chunk(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}, ensure_ascii=False).encode() + b"\n\n"


def finish(reason: str = "stop") -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def says(text: str) -> Reply:
    return Reply([chunk(role="assistant"), chunk(content=text), finish(), DONE])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def chat(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `pellucid chat --url` with lines piped in: exit code, standard output, standard error."""
    monkeypatch.delenv("PELLUCID_API_KEY", raising=False)

    def run(*flags: object, stdin: str = "hello\n", url: str = server.url) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--url", url, *map(str, flags)])
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


def error_of(result: tuple[int, str, str], code: int = 2) -> str:
    """The one line on standard error of a command that must fail."""
    assert result[0] == code, result
    assert result[2].startswith("error: "), result
    assert result[2].count("\n") == 1, result
    return result[2]


def test_the_conversation_goes_to_the_server_with_its_own_model_and_reset_begins_anew(
    server: ScriptedServer, chat: Chat
) -> None:
    server.replies = [MODELS, says("one"), says("two"), says("three")]
    code, out, err = chat("--system", "be quick", stdin="a\n\nb\n/reset\nc\n")
    assert (code, out) == (0, "one\ntwo\nthree\n")
    assert err == f"tiny at {server.url}\n"
    system = {"role": "system", "content": "be quick"}
    turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "one"), ("user", "b"))]
    assert [body["messages"] for body in server.bodies] == [
        [system, turns[0]],
        [system, *turns],
        [system, {"role": "user", "content": "c"}],
    ]
    assert all((body["model"], body["stream"]) == ("tiny", True) for body in server.bodies)


def test_only_sampling_flags_that_were_typed_are_sent(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [says("x"), says("x")]
    chat("--model", "m")
    assert set(server.bodies[0]) == {"model", "messages", "stream"}
    chat("--model", "m", "--temperature", 0, "--min-tokens", 20, "--stop", "a", "--stop", "b", "--ignore-eos")
    sent = {name: value for name, value in server.bodies[1].items() if name not in ("model", "messages", "stream")}
    assert sent == {"temperature": 0, "min_tokens": 20, "stop": ["a", "b"], "ignore_eos": True}


def test_a_sampling_flag_out_of_range_is_refused_before_anything_is_sent(server: ScriptedServer, chat: Chat) -> None:
    assert "temperature" in error_of(chat("--temperature", -1))
    assert server.asked == []


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_the_key_is_sent_as_a_bearer_token(
    source: str, server: ScriptedServer, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [MODELS, says("x")]
    if source == "environment":
        monkeypatch.setenv("PELLUCID_API_KEY", "sk-1\n")
    chat(*(("--api-key", "sk-1") if source == "flag" else ()))
    assert [asked.headers["Authorization"] for asked in server.asked] == ["Bearer sk-1"] * 2


def test_without_a_key_no_authorization_is_sent(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [says("x")]
    chat("--model", "m")
    assert "Authorization" not in server.asked[0].headers


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(end: str, server: ScriptedServer, chat: Chat) -> None:
    server.replies = [MODELS, says("x")]
    assert chat(url=server.url + end)[0] == 0
    assert chat(url=server.url.removeprefix("http://") + "/some/prefix" + end)[0] == 2
    paths = [asked.path for asked in server.asked]
    assert paths == ["/v1/models", "/v1/chat/completions", "/some/prefix/v1/models"]


def test_the_first_of_several_models_is_taken_and_the_others_are_named(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [Reply.json({"data": [{"id": f"m{i}"} for i in range(9)]}), says("x")]
    _, _, err = chat()
    assert err == f"m0 at {server.url} (--model: or m1, m2, m3, m4, m5 and 3 more)\n"
    assert server.bodies[0]["model"] == "m0"


# What servers send.


@pytest.mark.parametrize("framing", ["chunked", "close"])
@pytest.mark.parametrize("width", [1, 2, 3, 1000])
def test_an_answer_is_the_same_however_its_bytes_are_cut(
    framing: str, width: int, server: ScriptedServer, chat: Chat
) -> None:
    stream = b": hello\r\n\r\n" + (chunk(content="né 水") + chunk(content=" 🙂\n") + finish()).replace(b"\n", b"\r\n")
    stream += b": ping\r\n\r\n" + DONE
    pieces: list[Any] = [stream[start : start + width] for start in range(0, len(stream), width)]
    server.replies = [Reply(pieces, framing=framing)]
    assert chat("--model", "m")[:2] == (0, "né 水 🙂\n\n")


SPARSE: dict[str, list[Any]] = {
    "nulls, and usage without choices": [
        b'data: {"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}],"error":null}\n\n',
        b'data: {"choices":[{"delta":{"content":"ok"},"logprobs":null}]}\n\n',
        b'data: {"choices":[{"delta":{"content":null},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n',
        b'data: {"usage":{"completion_tokens":1}}\n\n',
        DONE,
    ],
    "no delta with the finish reason": [chunk(content="ok"), b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', DONE],
    "no finish reason": [chunk(content="ok"), DONE],
    "no [DONE]": [chunk(content="ok"), finish()],
    "no blank line after [DONE]": [chunk(content="ok"), b"data: [DONE]"],
    "no spaces": [b'data:{"choices":[{"delta":{"content":"ok"}}]}\n\ndata:[DONE]\n\n'],
}


@pytest.mark.parametrize("kind", SPARSE)
def test_servers_that_send_only_some_fields_are_understood(kind: str, server: ScriptedServer, chat: Chat) -> None:
    server.replies = [Reply(SPARSE[kind])]
    assert chat("--model", "m") == (0, "ok\n", "")


def test_an_answer_in_one_piece_is_understood(server: ScriptedServer, chat: Chat) -> None:
    """A server that does not stream."""
    server.replies = [Reply.json({"choices": [{"message": {"role": "assistant", "content": "ok"}}]})]
    assert chat("--model", "m") == (0, "ok\n", "")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_left_out_of_a_pipe_and_of_the_next_turn(field: str, server: ScriptedServer, chat: Chat) -> None:
    answer = Reply([chunk(**{field: "hmm"}), chunk(content="ok"), finish(), DONE])
    server.replies = [answer, says("x")]
    assert chat("--model", "m", stdin="a\nb\n")[1] == "ok\nx\n"
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "ok"}


# How it fails.


def test_a_server_that_is_not_there(chat: Chat) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    error = error_of(chat(url=url))
    assert url in error
    assert "refused" in error


REFUSALS: dict[str, tuple[Reply, tuple[str, ...]]] = {
    "401": (Reply.json({"error": {"message": "no key"}}, 401), ("401", "no key", "--api-key", "PELLUCID_API_KEY")),
    "503 with a time": (
        Reply.json({"error": {"message": "Loading model"}}, 503, Retry_After="7"),
        ("503", "Loading model", "try again in 7 s"),
    ),
    "503 without": (Reply.json({"detail": "busy"}, 503), ("503", "busy", "try again later")),
    "500 as a page": (
        Reply([b"<h1>\nInternal \x1b[31m error</h1>"], 500, {"Content-Type": "text/html"}),
        ("500", "<h1> Internal [31m error</h1>"),
    ),
    "moved": (Reply([], 308, {"Location": "https://elsewhere/v1"}), ("308", "https://elsewhere/v1")),
    "nothing said": (Reply([], 502, {}), ("502", "no reason given")),
}


@pytest.mark.parametrize("named", [True, False], ids=["chat", "models"])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_told_with_its_remedy(kind: str, named: bool, server: ScriptedServer, chat: Chat) -> None:
    reply, words = REFUSALS[kind]
    server.replies = [reply]
    error = error_of(chat(*(("--model", "m") if named else ())))
    for word in (server.url, *words):
        assert word in error


def test_a_model_that_is_not_served_is_told_with_those_that_are(server: ScriptedServer, chat: Chat) -> None:
    missing = Reply.json({"object": "error", "message": "The model `m` does not exist.", "code": 404}, 404)
    server.replies = [missing, MODELS]
    error = error_of(chat("--model", "m"))
    assert "The model `m` does not exist." in error
    assert "--model may be: tiny" in error


def test_what_is_no_openai_server_is_told(server: ScriptedServer, chat: Chat) -> None:
    server.replies = [Reply.json({"detail": "Not Found"}, 404)]
    assert "OpenAI-compatible" in error_of(chat())
    server.replies = [Reply([b"<html>"], 200, {"Content-Type": "text/html"})]
    assert "--model" in error_of(chat())


def test_a_request_that_is_refused_costs_only_its_turn(server: ScriptedServer, chat: Chat) -> None:
    too_long = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages"}}
    server.replies = [Reply.json(too_long, 400), says("ok")]
    code, out, err = chat("--model", "m", stdin="long\nshort\n")
    assert (code, out) == (0, "ok\n")
    assert err == "error: HTTP 400: too long\n"
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "short"}]


BROKEN: dict[str, tuple[list[Any], str, tuple[str, ...]]] = {
    "cut between events": ([chunk(content="par")], "cut", ("cut off",)),
    "cut in an event": ([chunk(content="par"), chunk(content="tial")[:20]], "close", ("cut off", "JSON")),
    "closed in order": ([chunk(content="par")], "chunked", ("cut off",)),
    "an error": ([chunk(content="par"), b'data: {"error":{"message":"it died"}}\n\n', DONE], "cut", ("it died",)),
    "an error event": ([chunk(content="par"), b"event: error\ndata: out of memory\n\n"], "chunked", ("out of memory",)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_answer_that_breaks_off_is_never_taken_for_whole(kind: str, server: ScriptedServer, chat: Chat) -> None:
    steps, framing, words = BROKEN[kind]
    server.replies = [Reply(steps, framing=framing)]
    result = chat("--model", "m")
    assert result[1] == "par\n"
    for word in words:
        assert word in error_of(result)


def test_nothing_but_http_is_told(chat: Chat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(2):
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        error_of(chat(url=f"http://{address}"))
        error_of(chat(url=f"https://{address}"))
        thread.join()


def test_https_to_a_server_that_speaks_http_is_told(server: ScriptedServer, chat: Chat) -> None:
    assert "http://" in error_of(chat(url=server.url.replace("http:", "https:")))


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://h:port", "http://[::1", "http://h/a b", "http://u:p@h"]
)
def test_a_url_that_cannot_be_is_refused(url: str, chat: Chat) -> None:
    assert "--url" in error_of(chat(url=url))


def test_a_password_in_the_url_is_not_repeated(chat: Chat) -> None:
    assert "secret" not in error_of(chat(url="http://user:secret@host"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", 64), ("--max-model-len", "--url")),
        (("--no-enable-prefix-caching",), ("enable-prefix-caching", "--url")),
        (("some/model",), ("MODEL", "--model")),
    ],
)
def test_what_a_server_would_never_learn_of_is_refused(
    flags: tuple[object, ...], words: tuple[str, ...], server: ScriptedServer, chat: Chat
) -> None:
    error = error_of(chat(*flags))
    for word in words:
        assert word in error
    assert server.asked == []


@pytest.mark.parametrize("flag", ["--model", "--api-key"])
def test_a_servers_flag_without_a_server_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", flag, "x"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert flag in err
    assert "--url" in err


# Ctrl-C, and the terminal.


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """SIGINT reaches the program: a shell that started the tests in its background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def keep_sending(send: Send) -> None:
    for _ in range(500):
        send(b": still here\n\n")
        time.sleep(0.01)
    raise AssertionError("the client never hung up")


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("before", [[], [chunk(content="par")]], ids=["waiting", "answering"])
def test_ctrl_c_closes_the_connection_and_the_conversation_goes_on(
    before: list[Any], server: ScriptedServer, chat: Chat
) -> None:
    def interrupt(_: Send) -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    server.replies = [Reply([*before, interrupt, keep_sending]), says("ok")]
    code, out, err = chat("--model", "m", stdin="a\nb\n")
    assert (code, err) == (0, " [stopped]")
    assert out == ("par\nok\n" if before else "\nok\n")
    assert server.hung_up.wait(5)
    partial = {"role": "assistant", "content": "par" if before else ""}
    assert server.bodies[1]["messages"][1] == partial


def test_on_a_terminal_reasoning_is_dimmed_and_a_failure_costs_only_its_turn(server: ScriptedServer) -> None:
    steps = [chunk(reasoning_content="hmm"), chunk(content="o\x1b]0;title\x07k"), finish(), DONE]
    server.replies = [MODELS, Reply.json({}, 503), Reply(steps)]
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-m", "pellucid", "chat", "--url", server.url]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=subprocess.PIPE, env=environment) as process:
        os.close(inner)
        os.write(outer, b"one\ntwo\n/quit\n")
        assert process.stderr is not None
        err = process.stderr.read().decode()
        shown = b""
        while True:
            try:
                shown += os.read(outer, 4096)
            except OSError:
                break
        os.close(outer)
        assert process.wait(10) == 0
    assert err.count("error: ") == 1
    assert b"\x1b[2mhmm\x1b[0m\r\no]0;titlek\r\n" in shown
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": c}] for c in ("one", "two")]
