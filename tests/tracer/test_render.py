"""The table of a trace, one decision in full, its log and its one paragraph."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pellucid.core import PellucidError
from pellucid.tracer.conditions import deciding_terms, not_reached, outcome, stopping
from pellucid.tracer.html import to_html
from pellucid.tracer.preflight import preflight, render_preflight
from pellucid.tracer.record import Assignment, Decision, LogLine, Trace, trace_from_json
from pellucid.tracer.render import render, render_decision, render_log
from pellucid.tracer.text import short_site, show_value
from pellucid.tracer.why import why
from tests.tracer import hand_made
from tests.tracer.hand_made import by_list, guard, site, term


def test_a_row_says_value_how_line_and_evidence() -> None:
    row = next(line for line in render(hand_made.sglang()).splitlines() if "attention_backend" in line)
    assert row.split() == ["attention_backend", "triton", "forced", "srt/server_args.py:1833", "trait,", "hardware"]


def test_columns_line_up() -> None:
    rows = [line for line in render(hand_made.sglang()).splitlines() if "forced" in line]
    assert len({line.index("forced") for line in rows}) == 1
    assert len(rows) == 3
    heading = next(line for line in render(hand_made.sglang()).splitlines() if line.split()[:2] == ["field", "value"])
    assert heading.index("how") == rows[0].index("forced")


def test_defaults_take_one_line_and_no_row() -> None:
    lines = render(hand_made.sglang()).splitlines()
    assert [line for line in lines if "disable_radix_cache" in line] == ["at their defaults: disable_radix_cache False"]


def test_what_is_set_for_any_model_and_gpu_takes_no_row() -> None:
    line = Assignment("xgrammar", site(2065, 'self.grammar_backend = "xgrammar"'))
    found = Decision("grammar_backend", "xgrammar", "forced", "configuration", (line,), ("flag",))
    text = render(hand_made.sglang(decisions=(*hand_made.sglang().decisions, found)))
    assert "set under no condition on the model or the GPU: grammar_backend xgrammar" in text
    on_gpu = replace(found, evidence=("hardware", "flag"))
    text = render(hand_made.sglang(decisions=(*hand_made.sglang().decisions, on_gpu)))
    assert "under no condition" not in text
    row = next(line for line in text.splitlines() if "grammar_backend" in line)
    assert row.split()[-1] == "hardware"


def test_a_stubs_answer_is_marked_and_its_package_named() -> None:
    trace = hand_made.sglang(decisions=(hand_made.tainted_moe(),))
    text = render(trace)
    row = next(line for line in text.splitlines() if "MARLIN" in line)
    assert "MARLIN ⚠" in row
    assert "stand-ins answered for humming" in text
    assert "⚠" not in render(hand_made.sglang())


def test_what_could_not_be_run_shows_no_value_but_the_lines_that_could_decide() -> None:
    lost = Decision("attention_backend", None, "unknown", "static", could=(by_list(in_list=True, on_sm100=True),))
    text = render(hand_made.sglang(decisions=(lost,)))
    assert "? attention_backend: not evaluated; it could be set at srt/server_args.py:1283" in text
    assert "None" not in text


def test_a_refusal_comes_before_the_table_and_says_whose_it_is() -> None:
    theirs = render(hand_made.sglang(refusal=hand_made.refusal())).splitlines()
    refused = next(i for i, line in enumerate(theirs) if line.startswith("the engine refuses to start: block-wise fp8"))
    assert refused < next(i for i, line in enumerate(theirs) if "attention_backend" in line)
    ours = render(hand_made.sglang(refusal=hand_made.refusal(ours=True)))
    assert "the tracer stopped, not the engine" in ours
    assert "refuses" not in ours


def test_an_exception_without_words_is_told_by_its_statement() -> None:
    bare = replace(hand_made.refusal(), message="AssertionError", site=site(138, "assert heads > 0"))
    assert "AssertionError, `assert heads > 0`  (sglang/srt/server_args.py:138)" in render(
        hand_made.sglang(refusal=bare)
    )


def test_what_was_not_settled_when_the_engine_refused_is_listed_and_given_no_value() -> None:
    lost = Decision("page_size", None, "unknown", "configuration", by_list_history())
    text = render(hand_made.sglang(decisions=(lost,), refusal=hand_made.refusal()))
    assert "not settled when it stopped: page_size" in text
    assert "trtllm_mla" not in text


def by_list_history() -> tuple[Assignment, ...]:
    return (by_list(in_list=True, on_sm100=True),)


def test_one_decision_in_full_shows_conditions_with_values_and_lines_not_reached() -> None:
    text = render_decision(hand_made.sglang(), "attention_backend")
    assert "sglang/srt/server_args.py:1833 in ServerArgs._handle_attention_backend_compatibility" in text
    assert "1797  true   use_mla_backend  [trait]" in text
    assert "1823  false  is_sm100_supported()  [hardware]" in text
    assert "stopped at line 1277: `is_sm100_supported()` is false" in text


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PellucidError, match=r"decides no field 'attention'.*attention_backend"):
        render_decision(hand_made.sglang(), "attention")


def test_earlier_values_are_listed_in_order() -> None:
    first = Assignment(0.9, site(935, "self.mem_fraction_static = 0.9"))
    last = Assignment(0.77, site(5517, "self.mem_fraction_static *= factor"))
    found = Decision("mem_fraction_static", 0.77, "forced", "configuration", (first, last))
    text = render_decision(hand_made.sglang(decisions=(found,)), "mem_fraction_static")
    assert text.index("server_args.py:5517") < text.index("earlier values") < text.index("server_args.py:935")


def test_log_lines_are_printed_once_with_their_line() -> None:
    line = LogLine("WARNING", "Cuda graph is disabled", site(1841, "logger.warning("))
    text = render_log(hand_made.sglang(log=(line, line)))
    assert text.split() == ["warning", "srt/server_args.py:1841", "Cuda", "graph", "is", "disabled"]
    assert "nothing" in render_log(hand_made.sglang(log=()))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (True, "True"),
        ("", "''"),
        ("fa3", "fa3"),
        ("CUDAGraphMode.FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        ("torch.bfloat16", "torch.bfloat16"),
        (0.77145640625, "0.7715"),
        ([1, 2, 4, 8, 16, 24, 512], "[1, 2, 4 … 512] (7)"),
        ([1, 2], "[1, 2]"),
        ({"backend": "breakable", "max_bs": 8192}, "{backend=breakable, max_bs=8192}"),
        ("x" * 60, "x" * 39 + "…"),
    ],
)
def test_values_are_short(value: object, shown: str) -> None:
    assert show_value(value) == shown


def test_a_long_path_keeps_its_end() -> None:
    deep = "sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py"
    assert short_site(site(684, "", file=deep)) == "…/compressed_tensors.py:684"
    assert short_site(site(7, "", file="vllm/envs.py")) == "envs.py:7"


def test_a_trace_survives_json_and_renders_the_same() -> None:
    trace = hand_made.sglang(refusal=hand_made.refusal())
    again = trace_from_json(json.loads(json.dumps(trace.to_json())))
    assert render(again) == render(trace)
    assert render_decision(again, "page_size") == render_decision(trace, "page_size")


# --- conditions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "truths", "came_out", "decided"),
    [
        ("if a and b:", (True, False), False, ["b"]),
        ("if a and b:", (False, None), False, ["a"]),
        ("if a or b:", (False, False), False, ["a", "b"]),
        ("if a or b:", (None, True), True, ["b"]),
        ("if not (a and b):", (True, False), True, ["b"]),
        ("elif a and not b:", (True, True), False, ["b"]),
        ("if (\n    a\n    and (b or c)\n):", (True, False, True), True, ["a", "c"]),
        ("if a and b:", (True, None), None, ["a"]),
    ],
)
def test_a_condition_comes_out_as_python_would(
    source: str, truths: tuple[bool | None, ...], came_out: bool | None, decided: list[str]
) -> None:
    found = guard(1, source, True, *(term(name, truth) for name, truth in zip("abc", truths, strict=False)))
    assert outcome(found) is came_out
    assert [one.expression for one in deciding_terms(found)] == decided


def test_a_line_is_stopped_by_the_first_condition_that_came_out_against_it() -> None:
    stopped = stopping(by_list(in_list=True, on_sm100=False))
    assert stopped is not None
    assert (stopped[0].site.line, [one.expression for one in stopped[1]]) == (1277, ["is_sm100_supported()"])
    assert stopping(by_list(in_list=True, on_sm100=True)) is None


def test_lines_that_were_nearly_reached_come_first_and_those_on_the_way_not_at_all() -> None:
    far = Assignment("a", site(1, "x = a"), (guard(1, "if p:", True, term("p", False)),))
    near = Assignment(
        "b", site(3, "x = b"), (guard(2, "if q:", True, term("q", True)), guard(3, "if r:", True, term("r", False)))
    )
    unasked = Assignment("c", site(5, "x = c"), (guard(4, "if s:", True, term("s", None)),))
    caller = Assignment("d", site(7, "x = choose()"))
    made = Assignment("e", site(9, "return e"), stack=(site(7, "x = choose()"),))
    found = Decision("x", "e", "forced", "configuration", (made,), could=(unasked, far, near, far, caller))
    assert [one.value for one in not_reached(found)] == ["b", "a", "c"]


def test_a_condition_whose_text_was_cut_is_not_read_wrongly() -> None:
    cut = guard(1, "if a and b and (c or…", True, term("a", True), term("b", False))
    assert outcome(cut) is None


# --- why ----------------------------------------------------------------------------------------


def test_why_is_one_paragraph_that_quotes_the_line_and_names_its_evidence() -> None:
    text = why(hand_made.sglang(), "attention_backend")
    assert "\n" not in text
    assert '`self.attention_backend = "triton"`' in text
    assert "numbers of its config and the GPU" in text
    assert "None of these conditions looks at a name" in text
    assert "was not reached: `is_sm100_supported()` is false, line 1277" in text


def test_why_does_not_deny_a_name_where_one_decided() -> None:
    text = why(hand_made.sglang(gpu="b200", on_sm100=True), "attention_backend")
    assert "the model's name" in text
    assert "looks at a name" not in text


def test_why_tells_a_default_and_a_flag_apart() -> None:
    trace = hand_made.sglang()
    assert "that is its default" in why(trace, "disable_radix_cache")
    asked = replace(trace.decision("disable_radix_cache"), value=True, how="flag")
    assert "the flag says so" in why(replace(trace, decisions=(asked,)), "disable_radix_cache")


def test_why_of_a_field_that_nothing_sets_any_more_says_so() -> None:
    lost = Decision("attention_backend", None, "unknown", "static")
    text = why(hand_made.sglang(decisions=(lost,)), "attention_backend")
    assert "could not be evaluated" in text
    assert "No line of this version was seen to set it" in text


def test_why_of_a_value_that_no_recorded_line_gave_does_not_call_it_a_default() -> None:
    text = why(hand_made.sglang(), "mem_fraction_static")
    assert "no recorded line gave it" in text
    assert "default" not in text


# --- preflight ----------------------------------------------------------------------------------


def test_preflight_tells_a_refusal_from_a_limit_of_the_tracer() -> None:
    starts, refuses = preflight(hand_made.sglang()), preflight(hand_made.sglang(refusal=hand_made.refusal()))
    unknown = preflight(hand_made.sglang(refusal=hand_made.refusal(ours=True)))
    assert [one.exit_code for one in (starts, refuses, unknown)] == [0, 1, 3]
    assert "refuses: block-wise fp8" in render_preflight(refuses)
    assert "server_args.py:64" in render_preflight(refuses)
    assert "could not be told" in render_preflight(unknown)


def test_preflight_does_not_promise_a_start_that_was_not_run() -> None:
    lost = Decision("attention_backend", None, "unknown", "static")
    assert preflight(hand_made.sglang(decisions=(lost,))).verdict == "unknown"


def test_preflight_repeats_the_engines_warnings_once() -> None:
    line = LogLine("WARNING", "Cuda graph is disabled", site(1841, "logger.warning("))
    assert render_preflight(preflight(hand_made.sglang(log=(line, line)))).count("Cuda graph is disabled") == 1


def test_settings_that_nobody_gave_are_not_called_the_users() -> None:
    rests = replace(hand_made.sglang().decisions[1], evidence=("flag",))
    trace = hand_made.sglang(flags=(), decisions=(rests,))
    text = why(trace, "page_size")
    assert "user" not in text
    assert "It rests on the engine's other settings." in text


def test_other_lines_that_gave_what_a_layer_chose_are_not_called_earlier() -> None:
    chosen = Assignment("FLASH_ATTN", hand_made.site(30, "return backend"))
    looked_up = Assignment("pkg.flash.FLASH_ATTN", hand_made.site(90, "return path"))
    found = Decision("attention_layer_backend", "FLASH_ATTN", "forced", "layers", (chosen, looked_up))
    trace = hand_made.sglang(decisions=(found,))
    text = why(trace, "attention_layer_backend")
    assert "Before that" not in text
    assert "srt/server_args.py:30" in text
    full = render_decision(trace, "attention_layer_backend")
    assert "earlier values" not in full
    assert "other lines that gave it" in full
    assert "Earlier values" not in to_html(trace)


def handed_on(source: str = "self.max_num_seqs = max_num_seqs") -> Trace:
    """A limit that another line computed, set where only settings were looked at."""
    unset = guard(2990, "if self.max_num_seqs is None:", True, term("self.max_num_seqs is None", True, "flag"))
    found = Assignment(1024, site(2991, source), (unset,))
    return hand_made.sglang(decisions=(Decision("max_num_seqs", 1024, "forced", "configuration", (found,), ("flag",)),))


def test_nothing_is_claimed_of_a_value_that_came_through_a_local_variable() -> None:
    text = render(handed_on())
    assert "set under no condition" not in text
    assert "computed from other values, with no telling condition recorded: max_num_seqs 1024" in text
    assert "rests on flag" not in render_decision(handed_on(), "max_num_seqs")
    paragraph = why(handed_on(), "max_num_seqs")
    assert "None of these conditions looks at a name" not in paragraph and "It rests on" not in paragraph
    assert "no recorded condition tells what decided those" in paragraph
    page = to_html(handed_on())
    assert "Set under no condition" not in page and "Computed from other values" in page


@pytest.mark.parametrize("source", ["self.max_num_seqs = 1024", "self.max_num_seqs = Limit.MOST", "return Limit(1024)"])
def test_a_value_that_its_line_says_is_set_under_no_condition(source: str) -> None:
    assert "set under no condition on the model or the GPU: max_num_seqs" in render(handed_on(source))
    assert "None of these conditions looks at a name" in why(handed_on(source), "max_num_seqs")


def test_of_a_value_that_is_not_known_nothing_is_said_to_be_computed() -> None:
    (found,) = handed_on().decisions
    lost = hand_made.sglang(decisions=(replace(found, how="unknown", value=None),))
    assert "…" not in render(lost) and "hands on" not in why(lost, "max_num_seqs")
