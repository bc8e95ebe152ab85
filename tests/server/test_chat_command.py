"""`pellucid chat --url` against the real server."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.server.running import RunningServer


def test_a_conversation_in_the_terminal_is_the_servers(demo_server: RunningServer) -> None:
    command = [sys.executable, "-m", "pellucid", "chat", "--url", demo_server.base_url]
    flags = ["--temperature", "0", "--max-tokens", "8"]
    ended = subprocess.run(
        [*command, *flags],
        input="What is gravity?\n" + "word " * 9000 + "\nWhat is mass?\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PELLUCID_API_KEY"},
    )
    first = demo_server.chat("What is gravity?").json["choices"][0]["message"]["content"]
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{first}\n")
    assert len(ended.stdout) > len(first) + 8
    served, refused = ended.stderr.splitlines()
    assert served == f"demo at {demo_server.base_url}"
    assert refused.startswith("error: HTTP 400: ")
    assert "max_model_len" in refused
