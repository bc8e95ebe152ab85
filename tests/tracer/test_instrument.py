"""Rewritten code does what it did, and tells which conditions and lines gave a field its value."""

from __future__ import annotations

import argparse
import builtins
import configparser
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pellucid.tracer.child.imports import after_import
from pellucid.tracer.child.instrument import install
from pellucid.tracer.child.recorder import Recorder
from pellucid.tracer.child.rewrite import RECORDER, Rules, rewrite
from pellucid.tracer.child.values import brief, plain

FIELDS = frozenset({"backend", "page_size", "quantization", "kernel"})
RULES = Rules(FIELDS, declarers={"declare"}, returns={"choose_kernel": "kernel"})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder("/engine/")
    monkeypatch.setattr(builtins, RECORDER, made, raising=False)
    return made


Run = Callable[[str], Recorder]


@pytest.fixture
def run(recorder: Recorder) -> Run:
    def execute(source: str) -> Recorder:
        """Define what `source` defines, then record what its `main(args)` does."""
        text = textwrap.dedent(source)
        names: dict[str, Any] = {"__name__": "engine"}
        exec(compile(rewrite(text, "/engine/args.py", recorder, RULES), "/engine/args.py", "exec"), names)
        recorder.start()
        names["main"](argparse.Namespace(backend=None, page_size=1, quantization=None, sm=100, arch="SomeForCausalLM"))
        recorder.on = False
        return recorder

    return execute


def guards(assignment: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(one["site"]["source"], one["taken"]) for one in assignment["guards"]]


def only(recorder: Recorder, field: str) -> dict[str, Any]:
    (found,) = (one for one in recorder.assignments if one["field"] == field)
    return found


def test_a_line_tells_its_value_its_object_and_the_operands_of_the_conditions_around_it(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            if args.arch in ["OtherForCausalLM", "SomeForCausalLM"]:
                if args.sm == 100 and args.backend is None:
                    args.backend = "trtllm_mla"
        """
    )
    found = only(recorder, "backend")
    assert (found["value"], found["owner"]) == ("trtllm_mla", "Namespace")
    assert found["site"] == {
        "file": "args.py",
        "line": 5,
        "source": 'args.backend = "trtllm_mla"',
        "function": "main",
    }
    names, sm = found["guards"]
    assert [(one["expression"], one["value"], one["truth"]) for one in names["terms"] + sm["terms"]] == [
        ('args.arch in ["OtherForCausalLM", "SomeForCausalLM"]', "'SomeForCausalLM'", True),
        ("args.sm == 100", "100", True),
        ("args.backend is None", "None", True),
    ]


def test_the_value_of_a_membership_test_on_a_literal_is_the_list_that_was_searched(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            if "SomeForCausalLM" in [args.arch]:
                args.backend = "a"
        """
    )
    (guard,) = only(recorder, "backend")["guards"]
    assert guard["terms"][0]["value"] == "['SomeForCausalLM']"


def test_an_operand_that_was_not_evaluated_has_neither_value_nor_truth(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            if args.sm == 100 or args.sm == 90:
                args.backend = "a"
        """
    )
    terms = only(recorder, "backend")["guards"][0]["terms"]
    assert [(one["value"], one["truth"]) for one in terms] == [("100", True), (None, None)]


def test_branches_that_leave_are_conditions_on_what_follows_and_else_is_the_opposite(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            if args.sm == 90:
                return
            elif args.sm == 80:
                return
            if args.sm == 120:
                args.backend = "never"
            elif args.sm == 110:
                args.backend = "never"
            else:
                args.backend = "triton"
        """
    )
    assert guards(only(recorder, "backend")) == [
        ("args.sm == 90", False),
        ("args.sm == 80", False),
        ("args.sm == 120", False),
        ("args.sm == 110", False),
    ]


def test_a_ternary_and_an_operator_in_the_value_are_conditions_of_the_line(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            args.page_size = 64 if args.sm == 100 else 1
            args.quantization = args.quantization or "fp8"
        """
    )
    assert guards(only(recorder, "page_size")) == [("args.sm == 100", True)]
    assert guards(only(recorder, "quantization")) == [('args.quantization or "fp8"', True)]


def test_a_nested_ternary_that_was_not_reached_is_no_condition(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            args.page_size = 64 if args.sm == 100 else 32 if args.sm == 90 else 1
        """
    )
    assert guards(only(recorder, "page_size")) == [("args.sm == 100", True)]


def test_every_way_of_giving_a_field_a_value_is_seen(run: Run) -> None:
    recorder = run(
        """
        def declare(args, **fields):
            vars(args).update(fields)

        def pair():
            return "c", 16

        def main(args):
            args.backend, args.page_size = "a", 2
            args.backend, args.page_size = pair()
            args.page_size *= 2
            declare(args, backend="d")
            vars(args).update({"backend": "e"})
            stash = {}
            stash["backend"] = "f"
            setattr(args, "backend", "g")
            args.quantization: str = "fp8"
        """
    )
    seen = [(one["field"], one["value"]) for one in recorder.assignments]
    assert seen == [
        ("backend", "a"),
        ("page_size", 2),
        ("backend", "c"),
        ("page_size", 16),
        ("page_size", 32),
        ("backend", "d"),
        ("backend", "e"),
        ("backend", "f"),
        ("backend", "g"),
        ("quantization", "fp8"),
    ]


def test_the_line_of_a_returned_value_is_the_return_with_its_own_conditions_and_the_call_on_the_stack(run: Run) -> None:
    recorder = run(
        """
        def inner(sm):
            if sm == 100:
                return "flashinfer"
            return "triton"

        def outer(sm):
            return inner(sm)

        def main(args):
            if args.backend is None:
                chosen = outer(args.sm)
                args.backend = chosen
        """
    )
    found = only(recorder, "backend")
    assert (found["site"]["line"], found["site"]["function"]) == (4, "inner")
    assert [one["line"] for one in found["stack"]] == [8, 13]
    assert guards(found) == [("args.backend is None", True), ("sm == 100", True)]


def test_a_value_that_did_not_come_from_the_last_return_keeps_its_own_line(run: Run) -> None:
    recorder = run(
        """
        def other():
            return "x"

        def main(args):
            other()
            chosen = str("triton")
            args.backend = chosen
        """
    )
    assert only(recorder, "backend")["site"]["line"] == 8


def test_conditions_around_the_call_come_before_those_around_the_line(run: Run) -> None:
    recorder = run(
        """
        def handle(args):
            if args.sm == 100:
                args.backend = "a"

        def main(args):
            if args.arch == "SomeForCausalLM":
                handle(
                    args
                )
        """
    )
    found = only(recorder, "backend")
    assert guards(found) == [('args.arch == "SomeForCausalLM"', True), ("args.sm == 100", True)]
    assert [(one["line"], one["function"]) for one in found["stack"]] == [(8, "main")]


def test_each_activation_of_a_function_keeps_its_own_operands(run: Run) -> None:
    recorder = run(
        """
        def main(args, depth=2):
            if depth > 0:
                main(args, depth - 1)
                args.page_size = depth
        """
    )
    values = [(one["value"], [guard["terms"][0]["value"] for guard in one["guards"]]) for one in recorder.assignments]
    assert values == [(1, ["2", "1"]), (2, ["2"])]


def test_a_registry_of_names_an_exception_and_a_case_are_conditions(run: Run) -> None:
    recorder = run(
        """
        def register(*names):
            return lambda function: function

        @register("SomeForCausalLM")
        def provide(args):
            args.backend = "a"

        def main(args):
            provide(args)
            try:
                int("x")
            except ValueError:
                args.page_size = 2
            match args.sm:
                case 100:
                    args.quantization = "fp4"
        """
    )
    assert guards(only(recorder, "backend")) == [('@register("SomeForCausalLM")', True)]
    assert only(recorder, "backend")["guards"][0]["terms"][0]["truth"] is True
    assert guards(only(recorder, "page_size")) == [("except ValueError", True)]
    assert guards(only(recorder, "quantization")) == [("match args.sm: case 100", True)]


def test_a_function_may_be_a_decision_by_what_it_returns(run: Run) -> None:
    recorder = run(
        """
        def choose_kernel(sm):
            return "fast" if sm == 100 else "slow"

        def main(args):
            choose_kernel(args.sm)
        """
    )
    found = only(recorder, "kernel")
    assert (found["value"], guards(found)) == ("fast", [("sm == 100", True)])


def test_what_a_called_function_reads_is_known_of_the_operand_that_calls_it(run: Run) -> None:
    recorder = run(
        """
        def use_mla(config):
            return config.architecture in ["SomeForCausalLM"]

        def main(args):
            args.architecture = args.arch
            if use_mla(args):
                args.backend = "a"
        """
    )
    (term,) = only(recorder, "backend")["guards"][0]["terms"]
    assert {"architecture", "SomeForCausalLM"} <= set(term["through"])


def test_a_stub_that_answers_in_an_operand_or_was_asked_by_the_called_function_is_named(run: Run) -> None:
    recorder = run(
        """
        import functools

        @functools.lru_cache
        def cached():
            __recorder__.stubs.append("kernels")
            __recorder__.stubbed_functions["cached"] = {"kernels"}
            return True

        def main(args):
            cached()
            if cached():
                args.backend = "a"
        """
    )
    assert only(recorder, "backend")["guards"][0]["terms"][0]["stubs"] == ("kernels",)


def test_every_condition_of_the_run_is_kept_also_those_that_led_nowhere(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            if args.sm == 90:
                args.backend = "fa3"
        """
    )
    assert recorder.assignments == []
    (condition,) = recorder.conditions()
    assert (condition["site"]["line"], condition["terms"][0]["value"]) == (3, "100")


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


def test_a_value_rests_on_the_conditions_under_which_its_local_variable_was_set(run: Run) -> None:
    recorder = run(
        """
        def defaults(sm):
            if sm >= 100:
                sizes = {"server": 64}
            else:
                sizes = {"server": 16}
            return sizes, None

        def main(args):
            sizes, _ = defaults(args.sm)
            size = sizes.get("server")
            args.page_size = size
            args.page_size = max(args.page_size, 1)
            args.quantization = "fp8"
        """
    )
    first, last = (one for one in recorder.assignments if one["field"] == "page_size")
    assert guards(first) == guards(last) == [("sm >= 100", True)]
    assert [term["value"] for term in first["guards"][0]["terms"]] == ["100"]
    assert guards(only(recorder, "quantization")) == []


def test_a_loop_s_variable_carries_what_decided_the_list(run: Run) -> None:
    recorder = run(
        """
        def order(sm):
            return ["flashinfer", "fa3"] if sm == 100 else ["fa3"]

        def main(args):
            best = None
            for candidate in order(args.sm):
                if best is None:
                    best = candidate
            args.backend = best.upper()
        """
    )
    found = only(recorder, "backend")
    assert found["value"] == "FLASHINFER"
    assert guards(found) == [("best is None", True), ("sm == 100", True)]
    assert found["guards"][0]["terms"][0]["truth"] is True


def test_what_was_appended_to_a_list_decides_what_is_taken_from_it_and_min_only_what_it_gave(run: Run) -> None:
    recorder = run(
        """
        def main(args):
            valid, limit = [], {}
            for backend in ("trtllm", "fa3"):
                if args.sm >= 100:
                    valid.append(backend)
            if args.arch == "SomeForCausalLM":
                limit["most"] = 8
            most = limit["most"]
            if args.page_size == 1:
                few = 2
            args.backend = sorted(valid)[0]
            args.page_size = min(few, most)
        """
    )
    assert guards(only(recorder, "backend")) == [("args.sm >= 100", True)]
    assert guards(only(recorder, "page_size")) == [("args.page_size == 1", True)]


def test_a_function_that_keeps_its_answers_has_the_conditions_of_the_answer(run: Run) -> None:
    recorder = run(
        """
        from functools import cache

        @cache
        def order(sm):
            return ["fa3"] if sm == 100 else []

        def main(args):
            order(args.sm)
            found = order(args.sm)
            args.backend = found[0]
        """
    )
    assert guards(only(recorder, "backend")) == [("sm == 100", True)]


def test_what_is_given_to_a_function_decides_with_what_it_returns(run: Run) -> None:
    recorder = run(
        """
        def path_of(name):
            return "engine." + name

        def main(args):
            if args.sm == 100:
                name = "fa4"
            args.backend = path_of(name)
        """
    )
    assert guards(only(recorder, "backend")) == [("args.sm == 100", True)]
