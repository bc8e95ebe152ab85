"""Siblings that are treated unequally are found, and choices against a kernel's known limits are told."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.hardware import load_hardware
from pellucid.tracer.audit import AuditCase, audit, kernel_traits, read_case, render_audit
from pellucid.tracer.misfits import known_misfits
from pellucid.tracer.record import Decision, Refusal, Trace
from pellucid.traits.config import TraitReport
from pellucid.traits.findings import MissingTrait
from pellucid.traits.missing import SPARSE_INDEXER
from pellucid.traits.model import ModelTraits
from tests.selection.models import KIMI_K25
from tests.tracer import hand_made

PCIE = load_hardware("rtx-pro-6000x8-pcie")
B200 = load_hardware("b200x8-nvlink")
SPARSE = TraitReport(KIMI_K25, missing=(MissingTrait(SPARSE_INDEXER, "index_topk = 2048"),))


def case(
    model: str, *, traits: ModelTraits = KIMI_K25, missing: tuple[MissingTrait, ...] = (), **trace: bool
) -> AuditCase:
    made = hand_made.sglang(model, gpu="b200", on_sm100=True, **trace)
    return AuditCase(TraitReport(traits, missing=missing), made)


def decided(field: str, value: str) -> Trace:
    return hand_made.sglang(decisions=(Decision(field, value, "forced", "layers"),))


def test_siblings_that_a_list_of_names_tells_apart_are_found() -> None:
    report = audit([case("known"), case("also-known"), case("derived", in_list=False)], B200, 8)
    (group,) = report.groups
    assert group.models == ("known", "also-known", "derived")
    assert group.identical
    ((_, found),) = report.by_name
    assert found.field == "attention_backend"
    assert found.values == (("trtllm_mla", ("known", "also-known")), ("flashinfer", ("derived",)))
    text = render_audit(report)
    assert "  known, also-known | derived" in text
    row = next(line for line in text.splitlines() if "attention_backend" in line)
    assert row.split() == [
        "attention_backend",
        "trtllm_mla",
        "|",
        "flashinfer",
        "by",
        "name",
        "srt/server_args.py:1197",
    ]
    assert "1 told apart by name" in text


def test_what_follows_from_another_reason_is_not_called_a_name() -> None:
    report = audit([case("known"), case("derived", in_list=False)], B200, 8)
    others = [one for one in report.groups[0].asymmetries if not one.by_name]
    assert [one.field for one in others] == ["page_size"]
    row = next(line for line in render_audit(report).splitlines() if "page_size" in line)
    assert "64 | 1" in row and "follows attention_backend" in row


def test_a_difference_without_a_common_condition_is_not_given_a_reason() -> None:
    other = case("other")
    bare = tuple(replace(one, value="x", history=(), could=()) for one in other.trace.decisions[:1])
    other = replace(other, trace=replace(other.trace, decisions=(*bare, *other.trace.decisions[1:])))
    known = case("known")
    known = replace(
        known, trace=replace(known.trace, decisions=tuple(replace(d, could=()) for d in known.trace.decisions))
    )
    text = render_audit(audit([known, other], B200, 8))
    row = next(line for line in text.splitlines() if "attention_backend" in line)
    assert "trtllm_mla | x" in row and "no condition that both came by" in row
    assert "0 told apart by name" in text


def test_models_of_other_kernel_traits_are_never_compared() -> None:
    sparse = case("sparse", missing=(MissingTrait("sparse attention indexer", "index_topk = 2048"),), in_list=False)
    report = audit([case("known"), sparse], B200, 8)
    assert len(report.groups) == 2
    assert report.by_name == ()
    assert "without siblings here: known, sparse" in render_audit(report)


def test_sizes_do_not_separate_siblings_but_are_told() -> None:
    smaller = replace(KIMI_K25, num_layers=2, moe_layers=KIMI_K25.moe_layers[:2])
    report = audit([case("large"), case("small", traits=smaller)], B200, 8)
    (group,) = report.groups
    assert not group.identical
    assert group.asymmetries == ()
    assert "(other sizes)" in render_audit(report)
    assert "treated alike" in render_audit(report)


def test_a_refused_model_is_listed_with_its_reason_and_not_compared() -> None:
    refused = case("refused", in_list=False)
    refused = replace(refused, trace=replace(refused.trace, refusal=hand_made.refusal()))
    report = audit([case("known"), refused], B200, 8)
    assert report.by_name == ()
    assert "block-wise fp8" in render_audit(report)


def test_alike_is_said_only_of_models_that_were_compared() -> None:
    refused = case("refused")
    refused = replace(refused, trace=replace(refused.trace, refusal=hand_made.refusal()))
    one_left = render_audit(audit([case("known"), refused], B200, 8))
    assert "treated alike" not in one_left
    assert "not compared: fewer than two of them start" in one_left
    two_left = render_audit(audit([case("known"), case("also-known"), refused], B200, 8))
    assert "those that start are treated alike" in two_left


def test_lines_that_were_only_read_compare_nothing() -> None:
    read = [case("known"), case("also-known")]
    read = [
        replace(
            one,
            trace=replace(
                one.trace,
                decisions=tuple(
                    replace(decision, how="unknown", value=None, level="static") for decision in one.trace.decisions
                ),
            ),
        )
        for one in read
    ]
    text = render_audit(audit(read, B200, 8))
    assert "treated alike" not in text
    assert "not compared: no field has a known value in two of them" in text


def test_an_exception_without_words_is_told_by_its_line() -> None:
    bare = case("bare")
    refusal = Refusal("AssertionError", hand_made.site(138, 'assert hasattr(config, "num_attention_heads")'))
    bare = replace(bare, trace=replace(bare.trace, refusal=refusal))
    assert 'AssertionError, `assert hasattr(config, "num_attention_heads")`' in render_audit(audit([bare], B200, 8))


def test_kernel_traits_name_attention_weights_and_special_parts() -> None:
    traits = kernel_traits(TraitReport(KIMI_K25, missing=(MissingTrait("attention sinks", "sinks = true"),)))
    assert traits == (
        "MLA 512+64, keys 128, values 128",
        "experts int4 group 32 symmetric",
        "attention bf16",
        "attention sinks",
    )


@pytest.mark.parametrize(
    ("field", "value", "hardware", "reason"),
    [
        ("nsa_decode_backend", "fa3", PCIE, "compiled for SM 9.0, this is SM 12.0"),
        ("attention_backend", "trtllm_mla", PCIE, "compiled for SM 10.0 or 10.3, this is SM 12.0"),
        ("moe_backend", "Nvfp4MoeBackend.FLASHINFER_TRTLLM", PCIE, "compiled for SM 10.0 or 10.3, this is SM 12.0"),
        ("attention_backend", "cutlass_mla", B200, "takes 128 query heads per rank, here 8 (64 / 8)"),
    ],
)
def test_a_kernel_against_its_limit_is_a_known_misfit(field: str, value: str, hardware: object, reason: str) -> None:
    assert hardware in (PCIE, B200)
    found = known_misfits(decided(field, value), SPARSE, hardware, 8)  # type: ignore[arg-type]
    assert [(one.field, one.value, one.reason) for one in found] == [(field, value, reason)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_backend", "triton"),
        ("moe_runner_backend", "marlin"),
        ("sampling_backend", "flashinfer"),
        ("grammar_backend", "xgrammar"),
        ("mm_attention_backend", "fa3"),
    ],
)
def test_a_choice_that_fits_or_has_no_declared_limit_is_passed_over(field: str, value: str) -> None:
    assert known_misfits(decided(field, value), TraitReport(KIMI_K25), PCIE, 8) == ()


def test_one_kernel_behind_two_fields_is_one_misfit() -> None:
    trace = hand_made.sglang(
        decisions=tuple(
            Decision(name, "fa3", "forced", "configuration") for name in ("nsa_decode_backend", "nsa_prefill_backend")
        )
    )
    assert len(known_misfits(trace, SPARSE, PCIE, 8)) == 1


def test_a_default_that_the_model_does_not_use_is_no_choice() -> None:
    untouched = hand_made.sglang(decisions=(Decision("nsa_decode_backend", "fa3", "default", "configuration"),))
    assert known_misfits(untouched, TraitReport(KIMI_K25), PCIE, 8) == ()
    assert known_misfits(decided("nsa_decode_backend", "fa3"), TraitReport(KIMI_K25), PCIE, 8) == ()
    assert [one.value for one in known_misfits(untouched, SPARSE, PCIE, 8)] == ["fa3"]


@pytest.mark.parametrize("how", ["unknown", "forced"])
def test_a_page_is_held_against_a_kernel_only_where_it_is_known(how: str) -> None:
    page = Decision("block_size", 16, how, "configuration")  # type: ignore[arg-type]
    kernel = Decision("attention_layer_backend", "FLASHINFER_MLA", "forced", "layers")
    found = known_misfits(hand_made.sglang(decisions=(page, kernel)), TraitReport(KIMI_K25), B200, 8)
    assert any("page" in one.reason for one in found) is (how == "forced")


def test_misfits_are_part_of_the_report_with_their_standing() -> None:
    chosen = AuditCase(TraitReport(KIMI_K25), decided("moe_runner_backend", "flashinfer_trtllm"))
    text = render_audit(audit([chosen], PCIE, 8))
    assert "chosen against a limit of the kernel" in text
    assert "moe_runner_backend flashinfer_trtllm" in text
    assert "this is SM 12.0" in text


def test_an_audit_is_of_one_engine_and_gpu() -> None:
    other = case("known")
    with pytest.raises(PellucidError, match="got 2"):
        audit([case("known"), replace(other, trace=replace(other.trace, version="0.5.23"))], B200, 8)
    with pytest.raises(PellucidError, match="got 0"):
        audit([], B200, 8)


def test_a_case_is_read_from_a_models_folder(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="cannot be read as JSON"):
        read_case(tmp_path, hand_made.sglang())
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "rope_theta": 10000.0,
        "index_topk": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_case(tmp_path, hand_made.sglang())
    assert found.traits is not None
    assert kernel_traits(found.traits)[0] == "MLA 32+16, keys 16, values 16"
    assert "sparse" in kernel_traits(found.traits)[-1]


def test_a_model_without_readable_traits_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    unread = read_case(tmp_path, hand_made.sglang("odd", gpu="b200", on_sm100=True))
    report = audit([case("known"), unread], B200, 8)
    assert [model for group in report.groups for model in group.models] == ["known"]
    assert "not compared: odd: config key" in render_audit(report)


def test_the_json_holds_groups_misfits_and_refusals() -> None:
    report = audit([case("known"), case("derived", in_list=False)], B200, 8)
    values = json.loads(json.dumps(asdict(report), default=str))
    assert values["groups"][0]["asymmetries"][0]["field"] == "attention_backend"
    assert values["misfits"] == []
