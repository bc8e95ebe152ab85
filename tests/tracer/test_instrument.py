"""Rewritten code does what it did, and only the modules that decide are rewritten, as they are imported."""

from __future__ import annotations

import argparse
import configparser
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pellucid.tracer.child.imports import after_import
from pellucid.tracer.child.instrument import install
from pellucid.tracer.child.recorder import Recorder
from pellucid.tracer.child.rewrite import Rules, rewrite
from pellucid.tracer.child.values import brief, plain
from tests.tracer.recording import RULES, Run, only


def test_locals_of_a_function_that_looks_at_them_are_its_own(run: Run) -> None:
    run(
        """
        def main(args):
            if args.sm == 100:
                args.backend = "a"
            assert list(locals()) == ["args"], locals()
        """
    )


def test_errors_keep_their_lines(run: Run) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(
            '''
            """Docstring."""
            from __future__ import annotations

            def main(args):
                """Docstring."""
                if args.sm == 100:
                    args.backend, args.page_size = str(1), int(2)
                    return 1 / 0
            '''
        )
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 9


@pytest.fixture(params=[textwrap, shlex, argparse, configparser], ids=lambda module: module.__name__)
def modules(request: pytest.FixtureRequest, recorder: Recorder) -> Iterator[tuple[ModuleType, ModuleType]]:
    """A module of the standard library, and the same one rewritten with common names as its fields."""
    original = request.param
    rules = Rules({"prefix", "width", "state", "token", "dest", "default", "_sections", "value"})
    rewritten = ModuleType(original.__name__)
    rewritten.__dict__.update(__file__=original.__file__, __package__="")
    tree = rewrite(Path(original.__file__).read_text(encoding="utf-8"), original.__file__, recorder, rules)
    exec(compile(tree, original.__file__, "exec"), rewritten.__dict__)
    recorder.start()
    yield original, rewritten
    recorder.on = False


def use(module: ModuleType) -> Any:
    """Something that goes through most of the module."""
    match module.__name__:
        case "textwrap":
            text = "  The quick brown fox jumped over the lazy dog. " * 5
            return module.wrap(text, 30, drop_whitespace=False), module.shorten(text, 40), module.dedent(text)
        case "shlex":
            return module.split('a \'b c\' "d\\"e" # f', comments=True), list(
                module.shlex("x|y; z", punctuation_chars=True)
            )
        case "argparse":
            parser = module.ArgumentParser("prog")
            parser.add_argument("--width", type=int, default=3)
            parser.add_argument("names", nargs="*")
            return parser.format_help(), vars(parser.parse_args(["a", "--width", "7"]))
        case _:
            parser = module.ConfigParser()
            parser.read_string("[DEFAULT]\nx = 1\n[a]\ny = %(x)s2\n\n[b]\nz: multi\n  line\n")
            return {name: dict(parser[name]) for name in parser.sections()}


def test_a_rewritten_module_computes_what_it_did(modules: tuple[ModuleType, ModuleType], recorder: Recorder) -> None:
    original, rewritten = modules
    assert use(rewritten) == use(original)
    assert recorder.assignments


def test_only_the_modules_that_decide_are_rewritten_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    for name in ("deciding_module", "other_module"):
        (tmp_path / f"{name}.py").write_text("def main(args):\n    args.backend = 'a'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    recorder.root = str(tmp_path)
    install(recorder, lambda name: name == "deciding_module", RULES)
    import deciding_module
    import other_module

    recorder.start()
    other_module.main(argparse.Namespace())
    assert recorder.assignments == []
    deciding_module.main(argparse.Namespace())
    assert only(recorder, "backend")["site"]["file"] == "deciding_module.py"


def test_a_module_is_acted_on_once_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[int] = []
    after_import("waited_for", lambda module: seen.append(module.value))
    assert seen == []
    import waited_for

    after_import("waited_for", lambda module: seen.append(module.value + 1))
    assert (waited_for.value, seen) == (1, [1, 2])


def test_values_are_shown_short_and_kept_as_json_without_running_their_code() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("must not be called")

    assert brief([1, "a", Loud()]) == "[1, 'a', <Loud>]"
    assert brief({"k": (1,) * 20}).endswith("...)}")
    assert len(brief("x" * 1000)) <= 160
    assert plain({"a": [Loud(), None, 2.5], 3: {"b": True}}) == {"a": ["<Loud>", None, 2.5], "3": {"b": True}}
