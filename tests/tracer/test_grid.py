"""Traces as matrices: one a field, refusals and unknown values told apart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pellucid.core import PellucidError
from pellucid.tracer.grid import arrange, render_grid
from pellucid.tracer.record import Decision, Refusal, Trace
from tests.tracer import hand_made


def four() -> list[Trace]:
    return [
        hand_made.sglang(model, gpu=gpu, on_sm100=gpu == "b200", in_list=model != "derived")
        for model in ("kimi", "derived")
        for gpu in ("sm120x8-pcie", "b200")
    ]


def test_models_go_down_and_gpus_across_in_the_order_given() -> None:
    lines = [line.split() for line in render_grid(arrange(four()), ["attention_backend"]).splitlines()]
    assert ["attention_backend", "sm120x8-pcie", "b200"] in lines
    assert ["kimi", "triton", "trtllm_mla"] in lines
    assert ["derived", "triton", "flashinfer"] in lines


def test_fields_that_are_equal_everywhere_take_no_matrix() -> None:
    text = render_grid(arrange(four()))
    assert "the same everywhere: mem_fraction_static 0.7715, disable_radix_cache False" in text
    assert text.count("sm120x8-pcie") == 2


def test_a_refusal_has_its_own_sign_and_its_reason_once() -> None:
    refused = [replace(one, decisions=(), refusal=hand_made.refusal()) for one in four()[2:]]
    text = render_grid(arrange([*four()[:2], *refused]), ["attention_backend"])
    assert next(line for line in text.splitlines() if line.split()[:1] == ["derived"]).split() == ["derived", "✗", "✗"]
    assert text.count("block-wise fp8") == 1
    assert "derived on sm120x8-pcie; derived on b200" in text


def test_an_exception_without_words_is_told_by_its_line() -> None:
    refusal = Refusal("AssertionError", hand_made.site(138, 'assert hasattr(config, "num_attention_heads")'))
    text = render_grid(arrange([replace(four()[0], refusal=refusal)]), ["attention_backend"])
    assert 'AssertionError, `assert hasattr(config, "num_attention_heads")`' in " ".join(text.split())


def test_what_the_tracer_could_not_run_is_a_question_and_no_refusal() -> None:
    lost = replace(four()[0], decisions=(), refusal=hand_made.refusal(ours=True))
    unknown = replace(four()[1], decisions=(Decision("attention_backend", None, "unknown", "static"),))
    text = render_grid(arrange([lost, unknown]), ["attention_backend"])
    assert next(line for line in text.splitlines() if line.split()[:1] == ["kimi"]).split() == ["kimi", "?", "?"]
    assert "✗" not in text


def test_a_stubs_answer_is_marked_in_its_cell() -> None:
    text = render_grid(arrange([hand_made.sglang(decisions=(hand_made.tainted_moe(),))]), ["moe_backend"])
    assert "MARLIN ⚠" in text


def test_several_versions_get_rows_of_their_own() -> None:
    one = four()[0]
    grid = arrange([one, replace(one, version="0.5.23")])
    assert grid.rows == ("kimi, sglang 0.5.9", "kimi, sglang 0.5.23")


def test_an_empty_grid_a_second_trace_for_a_cell_and_an_unknown_field_are_refused() -> None:
    with pytest.raises(PellucidError, match="at least one trace"):
        arrange([])
    with pytest.raises(PellucidError, match="two traces for kimi on b200"):
        arrange([four()[1], four()[1]])
    with pytest.raises(PellucidError, match=r"no trace has the field 'attn'.*attention_backend"):
        render_grid(arrange(four()), ["attn"])


def test_the_json_has_every_value_by_field_row_and_column() -> None:
    values = json.loads(json.dumps(arrange(four()).to_json()))
    assert values["values"]["attention_backend"] == [["triton", "trtllm_mla"], ["triton", "flashinfer"]]
    assert values["values"]["disable_radix_cache"] == [[False, False], [False, False]]
