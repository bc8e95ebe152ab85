"""Start-up logs in the forms that both engines print, and a trace beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core import PellucidError
from pellucid.tracer.record import Decision, LogLine, Trace
from pellucid.tracer.startup_log import StartupLog, parse_value, read_startup_log
from pellucid.tracer.verify import equal_values, render_verification, verify
from tests.tracer import hand_made
from tests.tracer.hand_made import site

SGLANG = """\
downloading, 100%
[2026-03-01 10:00:00] server_args=ServerArgs(model_path='/models/kimi-k2.5-int4', attention_backend='triton', \
page_size=1, mem_fraction_static=0.771, disable_radix_cache=False, cuda_graph_bs=[1, 2, 4], ssl_keyfile=None, \
note='a, b=(c', extra=Nested(tp_size=8))
[2026-03-01 10:00:09 TP0] Attention backend not specified. Use triton backend by default.
[2026-03-01 10:00:10 TP0] Load weight begin. avail mem=94.30 GB
"""

SGLANG_DICT = """\
[2026-11-01 10:00:00] server_args={'model_path': 'kimi-k2.5-int4', 'attention_backend': 'triton', 'page_size': 1, \
'cuda_graph_config': {'decode': {'max_bs': 512}}}
"""

VLLM = """\
\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 03-01 10:00:00 [core.py:105] Initializing a V1 LLM engine (v0.15.1) with \
config: model='/models/kimi-k2.5-int4', dtype=torch.bfloat16, quantization=compressed-tensors, kv_cache_dtype=auto, \
structured_outputs_config=StructuredOutputsConfig(backend='auto', mode='other'), enable_prefix_caching=True, \
compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, \
'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'pass_config': \
{'fuse_allreduce_rms': False}, 'max_cudagraph_capture_size': 512}
(Worker_TP0 pid=9) INFO 03-01 10:00:05 [cuda.py:364] Using TRITON_MLA attention backend out of potential backends: \
['TRITON_MLA']
(Worker_TP0 pid=9) INFO 03-01 10:00:06 [layers/quantization/compressed_tensors.py:81] Using Marlin
"""


def vllm(**changes: object) -> Trace:
    decisions = (
        Decision("quantization", "compressed-tensors", "forced", "configuration"),
        Decision("cache_dtype", "auto", "default", "configuration"),
        Decision("dtype", "bfloat16", "forced", "configuration"),
        Decision("cudagraph_mode", "CUDAGraphMode.FULL_AND_PIECEWISE", "forced", "configuration"),
        Decision("compilation_mode", "CompilationMode.VLLM_COMPILE", "forced", "configuration"),
        Decision("fuse_allreduce_rms", False, "default", "configuration"),
        Decision("enable_prefix_caching", True, "forced", "configuration"),
    )
    text = "Using TRITON_MLA attention backend out of potential backends: ['TRITON_MLA']"
    place = site(364, "logger.info_once(", "get_attn_backend_cls", "vllm/platforms/cuda.py")
    trace = hand_made.sglang(engine="vllm", version="0.15.1", decisions=decisions, log=(LogLine("INFO", text, place),))
    return replace(trace, **changes)  # type: ignore[arg-type]


def test_a_log_that_says_what_was_traced_is_equal() -> None:
    found = verify(hand_made.sglang(), SGLANG)
    assert found.exit_code == 0
    assert {one.field for one in found.fields} == {
        "attention_backend",
        "page_size",
        "mem_fraction_static",
        "disable_radix_cache",
    }
    assert "1 line printed as traced" in render_verification(found)
    assert found.warnings == ()


def test_a_field_that_the_server_set_otherwise_is_shown_with_its_log_line() -> None:
    found = verify(hand_made.sglang(), SGLANG.replace("attention_backend='triton'", "attention_backend='flashinfer'"))
    assert found.exit_code == 1
    wrong = [one for one in found.fields if one.verdict == "differs"]
    assert [(one.field, one.traced, one.logged, one.number) for one in wrong] == [
        ("attention_backend", "triton", "flashinfer", 2)
    ]
    assert "flashinfer" in render_verification(found)


def test_a_difference_on_a_stand_ins_answer_is_marked() -> None:
    doubtful = replace(hand_made.sglang().decisions[0], tainted=("flashinfer",))
    log = SGLANG.replace("attention_backend='triton'", "attention_backend='fa3'")
    assert "triton ⚠" in render_verification(verify(hand_made.sglang(decisions=(doubtful,)), log))


def test_a_line_with_another_value_in_it_differs() -> None:
    found = verify(hand_made.sglang(), SGLANG.replace("Use triton backend", "Use flashinfer backend"))
    assert [(one.verdict, one.number) for one in found.lines] == [("differs", 3)]
    assert found.exit_code == 1


def test_a_line_that_is_not_in_the_log_proves_nothing() -> None:
    cut = "\n".join(SGLANG.splitlines()[:2])
    found = verify(hand_made.sglang(), cut)
    assert (found.lines, found.unseen, found.exit_code) == ((), 1, 0)


def test_newer_logs_hold_a_dictionary_whose_nested_records_are_read_too() -> None:
    log = read_startup_log(SGLANG_DICT)
    settings = {one.name: one.value for one in log.settings}
    assert settings["page_size"] == 1
    assert settings["cuda_graph_config"] == {"decode": {"max_bs": 512}}
    assert settings["max_bs"] == 512


def test_vllms_configuration_is_read_through_colours_records_and_enums() -> None:
    found = verify(vllm(), VLLM)
    assert found.exit_code == 0, render_verification(found)
    assert len(found.fields) == 7
    assert [one.verdict for one in found.lines] == ["equal"]


def test_vllm_says_which_line_printed_so_another_text_from_it_differs() -> None:
    found = verify(vllm(), VLLM.replace("Using TRITON_MLA attention", "Using FLASH_ATTN_MLA attention"))
    assert [one.verdict for one in found.lines] == ["differs"]


def test_another_version_and_another_model_are_warned_of() -> None:
    found = verify(vllm(version="0.33.0", model="other"), VLLM)
    assert "the log is of vllm 0.15.1, the trace of 0.33.0" in found.warnings
    assert any("/models/kimi-k2.5-int4" in warning for warning in found.warnings)


def test_another_engines_log_and_no_log_at_all_are_refused() -> None:
    with pytest.raises(PellucidError, match="log of vllm"):
        verify(hand_made.sglang(), VLLM)
    with pytest.raises(PellucidError, match="no line of this log"):
        verify(hand_made.sglang(), "make: *** [serve] Error 1\n")


def test_a_log_without_any_traced_field_is_neither_equal_nor_different() -> None:
    found = verify(hand_made.sglang(log=()), "[2026-03-01 10:00:10 TP0] Load weight begin.\n")
    assert found.exit_code == 3
    assert "nothing in this log could be compared" in render_verification(found)


def test_what_could_not_be_evaluated_is_not_compared() -> None:
    lost = Decision("attention_backend", None, "unknown", "static")
    found = verify(hand_made.sglang(decisions=(lost,), log=()), SGLANG)
    assert found.fields == ()


def test_a_dump_that_a_terminal_wrapped_is_put_together_again() -> None:
    begin, end = SGLANG.index("server_args"), SGLANG.index("\n", SGLANG.index("server_args"))
    dump = SGLANG[begin:end]
    wrapped = SGLANG[:begin] + "\n".join(dump[i : i + 61] for i in range(0, len(dump), 61)) + SGLANG[end:]
    whole, parts = ({one.name: one.value for one in read_startup_log(text).settings} for text in (SGLANG, wrapped))
    assert whole == parts
    assert whole["tp_size"] == 8
    assert whole["note"] == "a, b=(c"


def test_what_another_program_prints_behind_the_dump_does_not_spoil_it() -> None:
    begin = VLLM.index("(Worker_TP0")
    mixed = (
        VLLM[:begin]
        + "some library: {not ours\n"
        + "INFO 03-01 10:00:04 llm_engine.py:234] an older prefix\n"
        + VLLM[begin:]
    )
    assert verify(vllm(), mixed).exit_code == 0
    assert "an older prefix" in {one.text for one in read_startup_log(mixed).messages}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("torch.bfloat16", "torch.bfloat16"),
        ("compressed-tensors", "compressed-tensors"),
        ("<Mode.FULL: (2, 1)>", "FULL"),
        ("[1, 2]", [1, 2]),
        ("Record(a=1, b=Inner(c='x, y'))", {"a": 1, "b": {"c": "x, y"}}),
        ("{'a': <Mode.X: 1>, 'b': [1, (2, 3)]}", {"a": "X", "b": [1, (2, 3)]}),
        ("'it\\'s'", "it's"),
    ],
)
def test_values_are_read_as_python_prints_them(text: str, value: object) -> None:
    assert parse_value(text) == value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, min_size=1, max_size=4))
def test_any_arguments_that_python_prints_are_read_back(values: dict[str, object]) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    log = read_startup_log(f"[2026-03-01 10:00:00] server_args=ServerArgs({shown})\n[2026-03-01 10:00:01] next\n")
    read = {one.name: one.value for one in log.settings}
    assert {name: read[name] for name in values} == values


def test_brackets_without_end_are_read_in_bounded_depth() -> None:
    deep = "a=" + "{'b': " * 5000
    assert isinstance(read_startup_log(f"[2026-03-01 10:00:00] server_args=ServerArgs({deep}"), StartupLog)


@pytest.mark.parametrize(
    ("traced", "logged", "equal"),
    [
        (0.77145640625, 0.771, True),
        (0.77, 0.78, False),
        (True, 1, False),
        ("CUDAGraphMode.FULL", "FULL", True),
        ("triton", "triton_mla", False),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 4], False),
        (None, "None", False),
        ({"max_bs": 8}, {"max_bs": 8}, True),
    ],
)
def test_values_are_equal_as_far_as_a_log_can_tell(traced: object, logged: object, equal: bool) -> None:
    assert equal_values(traced, logged) is equal
