"""The fences: import order, sizes, no architecture names, no lower bounds on hardware, light imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pellucid"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own folder and from lower rows only. `selection` knows no backend family: it finds
# them by name.
ROWS = {
    "core": 0, "utils": 1, "step_plan": 1,
    "traits": 2, "hardware": 3, "selection": 4, "kernels": 3,
    "quantization": 5, "kvcache": 5,
    "attention": 6, "moe": 6,
    "layers": 7, "models": 8, "runner": 9, "scheduler": 10, "tokenizer": 11, "tuning": 11, "engine": 12, "server": 13,
    "bench": 14, "tracer": 14, "doctor": 14, "cli": 15,
}  # fmt: skip

PURE = ("core", "step_plan", "utils", "traits", "hardware", "selection", "scheduler", "tokenizer")
MAX_FILE_LINES = 400
LABORATORY = ("bench", "doctor", "tracer", "tuning")
MAX_ENGINE_LINES, MAX_LABORATORY_LINES = 37_000, 15_000

ARCHITECTURE = re.compile(
    r"For(CausalLM|ConditionalGeneration)\b|deepseek_?v?[23]|kimi_|moonlight|glm4|glm_moe|qwen[23]|\bllama\b(?![.-]cpp)|mistral_",
)
# GGUF names tokenizers, and the field names tool-call formats, by the model they came from: names of formats, chosen
# by what is in the file or the vocabulary.
NAMES_ALLOWED = {
    "models/registry.py",
    "tokenizer/pre_tokenizers.py",
    "tokenizer/from_gguf.py",
    "server/parsers/choice.py",
    "server/parsers/forced_calls.py",
    "server/parsers/history.py",
}


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported pellucid module, whether at module level outside TYPE_CHECKING)."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) not in lazy
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "pellucid" and len(parts) > 1 else None


def test_every_folder_has_a_row() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert found <= set(ROWS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    for module, _ in imports_of(path):
        other = folder_of(module)
        if other is not None and other != own:
            assert ROWS[other] < ROWS[own], f"{path.relative_to(ROOT)} (row {ROWS[own]}) imports {module}"


def test_files_and_package_stay_small() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    print(f"package: {sum(sizes.values())} lines; largest: {largest[:5]}")  # noqa: T201 - shown with -s
    assert largest[0][1] <= MAX_FILE_LINES, largest[:5]
    laboratory = sum(size for name, size in sizes.items() if Path(name).parts[1] in LABORATORY)
    assert laboratory <= MAX_LABORATORY_LINES
    assert sum(sizes.values()) - laboratory <= MAX_ENGINE_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_architecture_names_in_code(path: Path) -> None:
    """In code and in strings that code compares or prints; prose (docstrings, comments) may name models."""
    relative = str(path.relative_to(PACKAGE))
    if relative in NAMES_ALLOWED:
        return
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            assert not ARCHITECTURE.search(node.value), f"{relative}:{node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_lower_bound_on_compute_capability(path: Path) -> None:
    """SM 12.0 is not a better SM 10.0: hardware is a set of facts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE) for op in node.ops
        ):
            text = ast.unparse(node)
            assert not re.search(r"\b(sm|capability|compute_capability)\b", text), f"{path}:{node.lineno}: {text}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.relative_to(PACKAGE).parts[0].removesuffix(".py") in PURE], ids=str
)
def test_pure_folders_never_import_torch(path: Path) -> None:
    heavy = {"torch", "transformers", "triton"}
    assert not [module for module, _ in imports_of(path) if module.split(".")[0] in heavy]


def test_trait_discovery_and_the_command_line_load_nothing_heavy() -> None:
    code = (
        "import sys, pellucid, pellucid.cli.main, pellucid.cli.explain, pellucid.cli.trace, pellucid.tracer.run;"
        "from pellucid.selection.registry import discover; discover();"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'gguf', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_module_says_what_lives_here() -> None:
    for path in FILES:
        text = path.read_text()
        if text.strip():
            docstring = ast.get_docstring(ast.parse(text))
            assert docstring, f"{path.relative_to(ROOT)} has no docstring"
