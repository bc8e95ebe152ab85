"""Files that a verb writes at the end of its work: refused before it begins where they can't be written."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pellucid.bench.outputs import writable
from pellucid.bench.server import main as bench_server
from pellucid.cli.main import COMMANDS, main
from pellucid.core import PellucidError

FILE_OPTIONS = {"--save", "--svg", "--html"}


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*words, name))
    else:
        yield words, command


def every_command() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for verb, (where, _) in COMMANDS.items():
        module, _, name = where.partition(":")
        yield from commands(getattr(importlib.import_module(module), name), (verb,))


WRITING = [
    (words, option)
    for words, command in every_command()
    for parameter in command.params
    for option in FILE_OPTIONS.intersection(parameter.opts)
]


def test_the_verbs_that_write_a_file_are_known() -> None:
    saving = {" ".join(words) for words, option in WRITING if option == "--save"}
    assert saving == {"bench choices", "bench http", "bench kernels", "bench offline"}
    assert {words[0] for words, option in WRITING if option != "--save"} == {"explain", "profile", "trace"}


@pytest.mark.parametrize(("words", "option"), WRITING, ids=lambda value: value if isinstance(value, str) else value[-1])
def test_a_file_in_no_folder_is_refused_before_the_model_is_looked_at(
    words: tuple[str, ...], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "no-such-model", option, str(tmp_path / "none" / "x")])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"error: {option} {tmp_path}/none/x: can't be written: there is no folder {tmp_path}/none")
    assert error.count("\n") == 1


def test_the_bench_of_the_server_refuses_it_alike(tmp_path: Path) -> None:
    file = tmp_path / "none" / "x"
    command = [sys.executable, "-m", "pellucid.bench.server", "--save", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"error: --save {file}: can't be written: there is no folder {file.parent}\n"


def test_a_folder_and_a_file_that_may_not_be_written_are_refused_and_others_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (option,) = [p for p in bench_server.params if p.name == "save"]
    context = click.Context(bench_server)
    file = tmp_path / "x.jsonl"
    assert writable(context, option, None) is None
    assert writable(context, option, file) == file and not file.exists()
    with pytest.raises(PellucidError, match="it is a folder"):
        writable(context, option, tmp_path)
    file.touch()
    assert writable(context, option, file) == file
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    for path, looked_at in ((file, file), (tmp_path / "new", tmp_path)):
        with pytest.raises(PellucidError, match=f"--save {path}: can't be written: permission denied"):
            writable(context, option, path)
        assert asked[-1] == (looked_at, os.W_OK)
