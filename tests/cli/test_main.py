"""How the command ends: one line for what the user can mend, and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "abc"], ("--temperature", "abc", "pellucid generate --help")),
        (["generate", "x", "--no-such-flag"], ("--no-such-flag",)),
        (["no-such-verb"], ("no-such-verb",)),
        (["explain"], ("MODEL",)),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words)


def test_help_is_no_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0


def test_without_the_engine_extra_running_names_what_to_install_and_explaining_works() -> None:
    # An entry of None makes an import fail as it does where the package is not installed.
    bare = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'gguf', 'tokenizers', 'jinja2']));"
    run = bare + "from pellucid.cli.main import main; main(sys.argv[1:])"

    def pellucid(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", run, *arguments], capture_output=True, text=True, check=False)

    refused = pellucid("generate", "smollm2", "--prompt", "x")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("error: running a model needs ")
    assert "pip install 'pellucid[engine]'" in refused.stderr
    config = Path(__file__).parents[1] / "fixtures" / "configs" / "Kimi-K2.5.json"
    explained = pellucid("explain", str(config), "--hardware", "h200")
    assert (explained.returncode, explained.stderr) == (0, "")
    assert "kv_lora_rank 512" in explained.stdout


@pytest.mark.parametrize("stderr", ["/dev/full", None], ids=["full", "closed"])
def test_the_exit_code_stands_where_the_message_can_not_be_written(stderr: str | None) -> None:
    command = f"{sys.executable} -m pellucid generate x --no-such-flag 2>{stderr or '&-'}"
    assert subprocess.run(command, shell=True, check=False).returncode == 2
