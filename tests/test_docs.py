"""Docs are tested: every `path::symbol` exists, every flag is listed, the README's commands are the Makefile's.

Docstrings too: the modules that they name exist.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click
import pytest

from pellucid.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SYMBOL = re.compile(r"`(pellucid/[\w/]+)\.py::([\w.]+)`")
PACKAGE = ROOT / "pellucid"
FOLDERS = "|".join(sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
MODULE = re.compile(rf"`(?:pellucid\.)?((?:{FOLDERS})\.[a-z_]\w*(?:\.\w+)*)`")
# Begin like modules, and are a file's name and keys of GGUF.
NOT_MODULES = ("tokenizer.json", "tokenizer.ggml.")
FLAGS_PAGE = ROOT / "docs" / "flags.md"


def symbols() -> list[tuple[str, str, str]]:
    return [(page.name, *match) for page in PAGES for match in SYMBOL.findall(page.read_text())]


@pytest.mark.parametrize(("page", "path", "symbol"), symbols())
def test_symbol_exists(page: str, path: str, symbol: str) -> None:
    value = importlib.import_module(path.replace("/", "."))
    for name in symbol.split("."):
        value = getattr(value, name)


def test_there_are_symbols_to_check() -> None:
    assert len(symbols()) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def exists(name: str) -> bool:
    """Is it a module or folder of the package, or a top-level name in one? Found without importing: some need a GPU."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:length])
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if source.exists():
            rest = parts[length:]
            return not rest or bool(re.search(rf"^(?:def |class |async def )?{rest[0]}\b", source.read_text(), re.M))
    return False


def named_modules() -> list[tuple[str, str]]:
    """(file, dotted name) of every module that a module's docstring names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = MODULE.findall(ast.get_docstring(ast.parse(path.read_text())) or "")
        found += [(str(path.relative_to(ROOT)), name) for name in names if not name.startswith(NOT_MODULES)]
    return found


def test_modules_that_docstrings_name_exist() -> None:
    named = named_modules()
    assert len(named) > 30
    assert {found for found in named if not exists(found[1])} == set()


def render_command(name: str, meaning: str, command: click.Command) -> list[str]:
    lines = [f"## pellucid {name}", "", meaning, "", "| flag | meaning |", "|---|---|"]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = " / ".join((*parameter.opts, *parameter.secondary_opts))
            lines.append(f"| `{names}` | {parameter.help} |")
        else:
            lines.append(f"| `{parameter.name.upper() if parameter.name else ''}` | argument |")
    return [*lines, ""]


def render_flags() -> str:
    """docs/flags.md, from the commands themselves. `python tests/test_docs.py` writes it."""
    lines = [
        "# Every flag of every verb",
        "",
        "Made from the commands by `python tests/test_docs.py`; a test compares.",
        "",
    ]
    for verb in sorted(COMMANDS):
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        if isinstance(command, click.Group):
            for name in sorted(command.commands):
                one = command.commands[name]
                lines += render_command(f"{verb} {name}", one.get_short_help_str(limit=200), one)
        else:
            lines += render_command(verb, COMMANDS[verb][1], command)
    return "\n".join(lines)


def test_flags_page_is_current() -> None:
    assert FLAGS_PAGE.read_text() == render_flags(), "run: python tests/test_docs.py"


def test_readme_commands_are_makefile_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


if __name__ == "__main__":
    FLAGS_PAGE.write_text(render_flags())
