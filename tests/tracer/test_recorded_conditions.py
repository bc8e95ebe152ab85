"""A line tells the conditions that it ran under, in their order, each with the operands that decided it."""

from __future__ import annotations

from tests.tracer.recording import Run, guards, only


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
