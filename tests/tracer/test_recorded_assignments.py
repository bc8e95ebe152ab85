"""Every way of giving a field a value is seen, with the line that made the value: the return, where it was returned."""

from __future__ import annotations

from tests.tracer.recording import Run, guards, only


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
