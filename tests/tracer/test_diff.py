"""Two traces side by side: only what differs, where the paths part, and which difference follows from which."""

from __future__ import annotations

import json
from dataclasses import replace

from pellucid.tracer.diff import TraceDiff, diff, render_diff
from pellucid.tracer.record import Assignment, Decision, Trace
from tests.tracer import hand_made
from tests.tracer.hand_made import by_default, guard, site, term


def two_gpus() -> TraceDiff:
    return diff(hand_made.sglang(), hand_made.sglang(gpu="b200", on_sm100=True))


def as_json(values: object) -> str:
    return json.dumps(values, default=str)


def test_equal_traces_differ_in_nothing() -> None:
    found = diff(hand_made.sglang(), hand_made.sglang())
    assert found.differences == ()
    assert "nothing differs in 4 fields" in render_diff(found)


def test_only_what_differs_is_listed() -> None:
    assert [one.field for one in two_gpus().differences] == ["attention_backend", "page_size"]
    assert two_gpus().same == 2
    assert "disable_radix_cache" not in render_diff(two_gpus())


def test_the_paths_part_at_the_condition_that_came_out_otherwise() -> None:
    """Neither run set the field on a line of the other: the condition is found among the lines not reached."""
    parting = two_gpus().differences[0].parting
    assert parting is not None
    assert (parting.left.expression, parting.left.truth, parting.right.truth) == ("is_sm100_supported()", False, True)
    assert parting.evidence == "hardware"


def test_that_a_field_was_set_before_is_no_reason_for_what_set_it() -> None:
    """Both runs came by `self.attention_backend is None`, with what an earlier line had left there."""
    text = "self.attention_backend is None"
    again = Assignment("triton", site(1833, "x"), (guard(1782, f"if {text}:", True, term(text, False, "flag")),))
    left, right = hand_made.sglang(), hand_made.sglang(gpu="b200", on_sm100=True)
    chosen = replace(right.decisions[0], could=(again,))
    parting = diff(left, replace(right, decisions=(chosen, *right.decisions[1:]))).differences[0].parting
    assert parting is not None
    assert (parting.site.line, parting.left.expression) == (1277, "is_sm100_supported()")


def test_sides_keep_their_names_when_they_are_swapped() -> None:
    left, right = hand_made.sglang(), hand_made.sglang(gpu="b200", on_sm100=True)
    one, other = diff(left, right).differences[0].parting, diff(right, left).differences[0].parting
    assert one is not None and other is not None
    assert (one.left.truth, one.right.truth) == (other.right.truth, other.left.truth)


def test_a_difference_that_reads_another_field_follows_from_it() -> None:
    assert [(one.field, one.follows) for one in two_gpus().differences] == [
        ("attention_backend", None),
        ("page_size", "attention_backend"),
    ]


def test_causes_come_before_what_follows_from_them() -> None:
    traces = [
        replace(one, decisions=one.decisions[::-1])
        for one in (hand_made.sglang(), hand_made.sglang(gpu="b200", on_sm100=True))
    ]
    assert [one.field for one in diff(*traces).differences] == ["attention_backend", "page_size"]


def test_a_function_registered_for_names_parts_those_for_which_it_was_not_called() -> None:
    text = '@_register_for("DeepseekV3ForCausalLM")'
    lines = [guard(37, text, True, term(text, truth, "name")) for truth in (True, None)]
    called, uncalled = (Assignment("trtllm_mla", site(185, "overrides[...] = ..."), (line,)) for line in lines)
    default = by_default("flashinfer", 340, on_sm100=True)
    left = hand_made.sglang(
        decisions=(Decision("attention_backend", "trtllm_mla", "forced", "configuration", (called,)),)
    )
    other = Decision("attention_backend", "flashinfer", "forced", "configuration", (default,), could=(uncalled,))
    right = replace(left, architecture="Other", decisions=(other,))
    parting = diff(left, right).differences[0].parting
    assert parting is not None
    assert (parting.evidence, parting.left.truth, parting.right.truth) == ("name", True, None)
    assert "left true, right not called" in render_diff(diff(left, right))
    elsewhere = replace(right, version="0.5.24", decisions=(replace(other, could=()),))
    assert diff(left, elsewhere).differences[0].parting is None


def test_a_rename_is_recognised_and_said_to_be_decided_by_the_name_alone() -> None:
    ours = hand_made.sglang(gpu="b200", on_sm100=True)
    renamed = hand_made.sglang(architecture="SomeOther", gpu="b200", on_sm100=True, in_list=False)
    found = diff(ours, renamed)
    assert found.by_name_alone
    assert found.differences[0].parting is not None
    assert found.differences[0].parting.evidence == "name"
    assert "by the architecture's name alone" in render_diff(found)
    assert not two_gpus().by_name_alone


def test_another_version_is_matched_by_function_and_text() -> None:
    moved = hand_made.sglang(gpu="b200", on_sm100=True, version="0.5.10")
    decisions = tuple(
        replace(
            one,
            history=tuple(_shifted(each) for each in one.history),
            could=tuple(_shifted(each) for each in one.could),
        )
        for one in moved.decisions
    )
    parting = diff(hand_made.sglang(), replace(moved, decisions=decisions)).differences[0].parting
    assert parting is not None
    assert parting.left.expression == "is_sm100_supported()"


def _shifted(found: Assignment) -> Assignment:
    guards = tuple(
        replace(one, site=replace(one.site, file="sglang/srt/other.py", line=one.site.line + 7)) for one in found.guards
    )
    return replace(found, site=replace(found.site, line=found.site.line + 7), guards=guards)


def test_without_a_common_condition_both_lines_are_shown_and_none_is_made_up() -> None:
    lefts = Assignment("a", site(10, "self.x = 'a'"), (guard(9, "if p:", True, term("p", True, "trait")),))
    rights = Assignment("b", site(20, "self.x = 'b'"), (guard(19, "if q:", True, term("q", True, "trait")),))
    left, right = (
        hand_made.sglang(decisions=(Decision("x", one.value, "forced", "configuration", (one,)),), gpu=gpu)
        for one, gpu in ((lefts, "a"), (rights, "b"))
    )
    found = diff(left, right)
    assert found.differences[0].parting is None
    text = render_diff(found)
    assert "parts" not in text
    assert "self.x = 'a'  since `p` is true" in text
    assert "self.x = 'b'  since `q` is true" in text


def test_a_field_of_one_version_alone_counts_only_where_it_was_set() -> None:
    extra = Decision("new_switch", "on", "forced", "configuration")
    idle = Decision("new_default", False, "default", "configuration")
    left = hand_made.sglang()
    right = replace(left, version="0.5.23", decisions=(*left.decisions, extra, idle))
    found = diff(left, right)
    assert [one.field for one in found.differences] == ["new_switch"]
    assert "(no such field)" in render_diff(found)


def test_two_engines_are_compared_where_they_answer_the_same_question() -> None:
    theirs = hand_made.sglang(
        engine="vllm",
        version="0.15.1",
        decisions=(
            Decision("attention_backend", None, "default", "configuration"),
            Decision("attention_layer_backend", "TRITON_MLA", "forced", "layers"),
            Decision("block_size", 16, "forced", "configuration"),
            Decision("async_scheduling", True, "forced", "configuration"),
        ),
    )
    found = diff(hand_made.sglang(), theirs)
    assert [one.field for one in found.differences] == ["attention_backend", "page_size"]
    assert all(one.parting is None for one in found.differences)
    assert "TRITON_MLA" in render_diff(found)


def test_a_stubs_answer_stays_marked() -> None:
    left = hand_made.sglang(decisions=(hand_made.tainted_moe("MARLIN"),))
    right = hand_made.sglang(decisions=(hand_made.tainted_moe("HUMMING"),))
    assert render_diff(diff(left, right)).count("⚠") == 2


def test_of_two_records_only_what_differs_is_shown() -> None:
    graphs = [{"decode": {"max_bs": 512}, "prefill": {"backend": backend}} for backend in ("disabled", "breakable")]
    left, right = (
        hand_made.sglang(decisions=(Decision("cuda_graph_config", graph, "forced", "configuration"),), gpu=gpu)
        for graph, gpu in zip(graphs, ("a", "b"), strict=True)
    )
    row = next(line for line in render_diff(diff(left, right)).splitlines() if "cuda_graph_config" in line)
    assert row.split() == ["cuda_graph_config", "prefill.backend=disabled", "prefill.backend=breakable"]


def test_an_unknown_value_is_never_called_equal_to_a_known_one() -> None:
    known = hand_made.sglang()
    lost = Decision("attention_backend", None, "unknown", "static")
    found = diff(known, replace(known, decisions=(lost, *known.decisions[1:])))
    assert [one.field for one in found.differences] == ["attention_backend"]


def test_the_json_has_both_sides_and_the_axes() -> None:
    values = json.loads(as_json(two_gpus().to_json()))
    assert values["axes"] == ["gpu"]
    assert values["left"]["gpu"] == "sm120x8-pcie"
    assert values["differences"][0]["parting"]["left"]["truth"] is False


def test_what_was_not_settled_when_a_side_refused_is_no_difference() -> None:
    lost = Decision("attention_backend", None, "unknown", "configuration")
    refused = hand_made.sglang(gpu="b200", decisions=(lost,), refusal=hand_made.refusal())
    found = diff(hand_made.sglang(), refused)
    assert found.differences == ()
    assert "right refuses to start" in render_diff(found)


def test_where_the_tracer_stopped_no_engine_refuses() -> None:
    stopped = hand_made.sglang(gpu="b200", refusal=hand_made.refusal(ours=True))
    text = render_diff(diff(hand_made.sglang(), stopped))
    assert "right is where the tracer stopped, not the engine: block-wise fp8" in text
    assert "refuses to start" not in text


def test_refusals_are_told_for_the_side_that_refuses() -> None:
    refused: Trace = hand_made.sglang(gpu="b200", refusal=hand_made.refusal())
    text = render_diff(diff(hand_made.sglang(), refused))
    assert "right refuses to start" in text
    assert "left refuses" not in text


def test_a_difference_that_came_through_a_local_variable_is_given_no_reason() -> None:
    sides = [
        hand_made.sglang(
            gpu=gpu,
            decisions=(
                Decision(
                    "max_num_seqs",
                    value,
                    "forced",
                    "configuration",
                    (Assignment(value, hand_made.site(2991, "self.max_num_seqs = max_num_seqs")),),
                ),
            ),
        )
        for gpu, value in (("h200", 1024), ("l40s", 256))
    ]
    row = next(line for line in render_diff(diff(*sides)).splitlines() if "1024" in line)
    assert row.endswith("computed values")
