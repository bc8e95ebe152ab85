"""A value rests on the conditions that set the variables, lists and arguments which it came through."""

from __future__ import annotations

from tests.tracer.recording import Run, guards, only


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
