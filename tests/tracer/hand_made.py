"""Traces written by hand, after what a release of SGLang decides for a model on two GPUs. For the tests of views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pellucid.tracer.record import Assignment, Decision, Evidence, Guard, LogLine, Refusal, Site, Term, Trace

ARGS = "sglang/srt/server_args.py"
SPECIFIC = "ServerArgs._handle_model_specific_adjustments"
DEFAULTS = "ServerArgs._handle_attention_backend_compatibility"
NAMES = 'model_arch in ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"]'


def site(line: int, source: str, function: str = DEFAULTS, file: str = ARGS) -> Site:
    return Site(file, line, source, function)


def term(expression: str, truth: bool | None, evidence: Evidence = "other", value: str | None = None) -> Term:
    return Term(expression, value if value is not None or truth is None else str(truth), truth, evidence)


def guard(line: int, source: str, taken: bool, *terms: Term, function: str = DEFAULTS) -> Guard:
    return Guard(site(line, source, function), taken, terms)


def sm100(holds: bool, *, line: int, taken: bool = True, function: str = DEFAULTS) -> Guard:
    text = "is_sm100_supported()"
    return guard(line, f"if {text}:", taken, term(text, holds, "hardware"), function=function)


def named(holds: bool) -> Guard:
    return guard(1197, f"if {NAMES}:", True, term(NAMES, holds, "name"), function=SPECIFIC)


def by_list(*, in_list: bool, on_sm100: bool) -> Assignment:
    """The line under the list of names, with what the run saw of its conditions."""
    guards = (named(in_list), sm100(on_sm100, line=1277, function=SPECIFIC))
    return Assignment("trtllm_mla", site(1283, 'self.attention_backend = "trtllm_mla"', SPECIFIC), guards)


def by_default(value: str, line: int, *, on_sm100: bool) -> Assignment:
    guards = (
        guard(1782, "if self.attention_backend is None:", True, term("self.attention_backend is None", True)),
        guard(1797, "if not use_mla_backend:", False, term("use_mla_backend", True, "trait")),
        sm100(on_sm100, line=1823, taken=on_sm100),
    )
    return Assignment(value, site(line, f'self.attention_backend = "{value}"'), guards)


def page_size(value: int, *, trtllm: bool) -> Decision:
    text = 'self.attention_backend == "trtllm_mla"'
    reached = Assignment(64, site(1887, "self.page_size = 64"), (guard(1874, f"if {text}:", True, term(text, trtllm)),))
    plain = Assignment(1, site(2057, "self.page_size = 1", "ServerArgs._handle_page_size"))
    if trtllm:
        return Decision("page_size", value, "forced", "configuration", (reached,))
    return Decision("page_size", value, "forced", "configuration", (plain,), could=(reached,))


def sglang(
    model: str = "kimi-k2.5-int4",
    architecture: str = "KimiK25ForConditionalGeneration",
    gpu: str = "sm120x8-pcie",
    *,
    in_list: bool = True,
    on_sm100: bool = False,
    **changes: Any,
) -> Trace:
    """A trace whose attention backend hangs on a list of names and on the GPU, as in 0.5.9."""
    chosen = by_list(in_list=in_list, on_sm100=on_sm100)
    if in_list and on_sm100:
        attention = Decision(
            "attention_backend", "trtllm_mla", "forced", "configuration", (chosen,), ("name", "hardware")
        )
    else:
        value, line = ("flashinfer", 1824) if on_sm100 else ("triton", 1833)
        attention = Decision(
            "attention_backend",
            value,
            "forced",
            "configuration",
            (by_default(value, line, on_sm100=on_sm100),),
            ("trait", "hardware"),
            could=(chosen,),
        )
    decisions = (
        attention,
        page_size(64 if attention.value == "trtllm_mla" else 1, trtllm=attention.value == "trtllm_mla"),
        Decision("mem_fraction_static", 0.7714564, "forced", "configuration"),
        Decision("disable_radix_cache", False, "default", "configuration"),
    )
    trace = Trace(
        engine="sglang",
        version="0.5.9",
        model=model,
        architecture=architecture,
        gpu=gpu,
        flags=("--tp-size", "8"),
        decisions=decisions,
        log=(
            LogLine(
                "INFO",
                f"Attention backend not specified. Use {attention.value} backend by default.",
                site(1835, "logger.info("),
            ),
        ),
        pins={"transformers": "4.57.1"},
        notes=("no network: NVIDIA's artifactory is taken as unreachable",),
    )
    return replace(trace, **changes)


def tainted_moe(value: str = "MARLIN") -> Decision:
    found = Assignment(value, site(11, "return backend", "select", "vllm/oracle/int_wna16.py"))
    return Decision("moe_backend", value, "forced", "layers", (found,), ("package", "stub"), ("humming",))


def refusal(*, ours: bool = False) -> Refusal:
    return Refusal("block-wise fp8 needs widths of 128, got 192", site(64, "raise ValueError("), ours)
