"""The driver itself: what a client fails at must show, whatever way it fails. No client and no server is run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from tests.clients import environments, load_clients
from tests.clients.all_clients import CLIENTS
from tests.clients.client import OUTPUT, Client, Result, Run
from tests.clients.environments import Environment
from tests.clients.run import format_table
from tests.clients.script_clients import read_tap
from tests.clients.served import Server

PYTHON_TAP = """\
ok 1 - Chat: answers
not ok 2 - Chat: counts
# Traceback (most recent call last):
# AssertionError: 7 != 8
ok 3 - Chat: refuses # SKIP the server checks no key
1..3
"""
NODE_TAP = """\
TAP version 13
# Subtest: openai: answers
ok 1 - openai: answers
  ---
  duration_ms: 1.5
  ...
# Subtest: openai: aborts
not ok 2 - openai: aborts
  ---
  error: 'requests are still in the engine after 5 s'
  ...
1..2
# tests 2
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "result").mkdir()
    environment = Environment(tmp_path, tmp_path / "bin", "1.0")
    return Run(environment, Server("http://127.0.0.1:1", "demo", "key"), tmp_path, tmp_path / "tokenizer")


def make_client(code: str, limit_s: float = 20) -> Client:
    return Client(
        "probe", lambda: pytest.fail("not asked for"), lambda run: [sys.executable, "-c", code], read_tap, limit_s
    )


@pytest.mark.parametrize(("tap", "reason"), [(PYTHON_TAP, "7 != 8"), (NODE_TAP, "still in the engine")])
def test_failed_check_is_told_with_its_reason(run: Run, tap: str, reason: str) -> None:
    (run.folder / OUTPUT).write_text(tap)
    result = read_tap(run, 1)
    assert result.did == "1 of 2 checks"
    [said] = result.failed.values()
    assert reason in said
    assert "ok" not in said


@pytest.mark.parametrize(("tap", "status"), [("", 0), ("ok 1 - answers\n1..1\n", 1), ("Traceback: no module", 1)])
def test_script_that_ends_badly_or_checks_nothing_has_failed(run: Run, tap: str, status: int) -> None:
    (run.folder / OUTPUT).write_text(tap)
    assert read_tap(run, status).failed


def test_script_whose_checks_all_hold_has_passed(run: Run) -> None:
    (run.folder / OUTPUT).write_text("ok 1 - answers\nok 2 - refuses # SKIP no key\n1..2\n")
    assert read_tap(run, 0) == Result("1 of 1 checks", {}, ("refuses",))


def test_client_over_its_limit_has_failed(run: Run) -> None:
    slow = make_client("import time; print('ok 1 - begins', flush=True); time.sleep(60)", limit_s=1)
    result, seconds = slow.execute(Run(run.environment, run.server, run.folder / "slow", run.tokenizer))
    assert "not finished" in result.failed["probe"]
    assert seconds < 10


def test_clients_see_no_accounts_of_the_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    probe = make_client("import os; print('not ok 1 - clean' if 'OPENAI_API_KEY' in os.environ else 'ok 1 - clean')")
    result, _ = probe.execute(Run(run.environment, run.server, run.folder / "probe", run.tokenizer))
    assert not result.failed


@pytest.mark.parametrize("client", [client for client in CLIENTS if client.read is not read_tap], ids=lambda c: c.name)
def test_client_that_leaves_no_result_file_has_failed(run: Run, client: Client) -> None:
    idle = Client(client.name, client.prepare, lambda run: [sys.executable, "-c", "print('gone')"], client.read)
    result, _ = idle.execute(Run(run.environment, run.server, run.folder / "idle", run.tokenizer))
    assert "gone" in result.failed[client.name]


@pytest.mark.parametrize(
    ("completed", "errors", "lengths"),
    [(12, 1, [16] * 12), (11, 0, [16] * 11), (12, 0, [16] * 11 + [15]), (12, 0, [16] * 11), (13, 0, [16] * 13)],
)
def test_lost_failed_and_short_requests_show(run: Run, completed: int, errors: int, lengths: list[int]) -> None:
    write_guidellm(run, completed, errors, lengths)
    assert load_clients.read_guidellm(run, 0).failed


def test_load_client_whose_requests_all_succeed_has_passed(run: Run) -> None:
    write_guidellm(run, 12, 0, [16] * 12)
    assert not load_clients.read_guidellm(run, 0).failed
    assert load_clients.read_guidellm(run, 1).failed


def write_guidellm(run: Run, completed: int, errors: int, lengths: list[int]) -> None:
    benchmark = {
        "metrics": {"request_totals": {"successful": completed, "total": completed + errors}},
        "requests": {"successful": [{"output_tokens": length} for length in lengths]},
    }
    (run.folder / "result.json").write_text(json.dumps({"benchmarks": [benchmark]}))


def test_environment_is_made_again_only_when_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pretend(command: list[str], folder: Path, name: str) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)

    requirements = tmp_path / "requirements"
    requirements.mkdir()
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    monkeypatch.setattr(environments, "_run", pretend)
    (requirements / "probe.txt").write_text("torch==2.13.0\nprobe[api]==1.0\n")
    first = environments.prepare_venv("probe", "probe")
    assert first.version == "1.0"
    assert "torch==2.13.0" in commands[1], "torch goes first, by its pin"
    assert environments.prepare_venv("probe", "probe") == first
    assert len(commands) == 3
    (requirements / "probe.txt").write_text("probe==2.0\n")
    assert environments.prepare_venv("probe", "probe").folder != first.folder
    assert len(commands) == 5


def test_requirement_without_a_pin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    (tmp_path / "probe.txt").write_text("probe>=1.0\n")
    with pytest.raises(PellucidError, match="pinned"):
        environments.prepare_venv("probe", "probe")


def test_columns_of_the_table_line_up() -> None:
    assert format_table(("a", "long"), [("wider", "x"), ("y", "z")]) == "a      long\nwider  x\ny      z"
