"""What an operand looks at is told from its words, from what it calls, and from the decisions that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.tracer.evidence import Evidencing, config_keys, evidence_of
from pellucid.tracer.record import Evidence

FIELDS = frozenset({"attention_backend", "page_size", "tp_size"})
KEYS = frozenset({"kv_lora_rank", "quant_method"})


def term(*names: str, strings: tuple[str, ...] = (), through: tuple[str, ...] = (), **values: Any) -> dict[str, Any]:
    made = {"expression": "x", "value": "1", "truth": True, "names": names, "strings": strings, "through": through}
    return {**made, "stubs": (), **values}


def assignment(field: str, *terms: dict[str, Any], stubs: tuple[str, ...] = ()) -> dict[str, Any]:
    site = {"file": "a.py", "line": 1, "source": "x", "function": "f"}
    guards = [{"site": site, "taken": True, "terms": list(terms)}]
    return {"field": field, "value": 1, "site": site, "guards": guards, "stack": [], "stubs": stubs}


@pytest.mark.parametrize(
    ("operand", "kind"),
    [
        (term("model_arch"), "name"),
        (term("hf_config", "architectures"), "name"),
        (term("view", strings=("SomeForConditionalGeneration",)), "name"),
        (term("is_sm100_supported"), "hardware"),
        (term("get_device_capability"), "hardware"),
        (term("gpu_mem"), "hardware"),
        (term("input_quant"), "other"),
        (term("output_size"), "other"),
        (term("is_flashinfer_available"), "package"),
        (term("torch", "__version__"), "package"),
        (term("envs", "SGLANG_SOMETHING", "get"), "environment"),
        (term("os", "environ"), "environment"),
        (term("self", "tp_size"), "flag"),
        (term("hf_config", "num_heads"), "trait"),
        (term("quant_method"), "trait"),
        (term("value"), "other"),
        (term("use_mla_backend", through=("attention_arch", "kv_lora_rank")), "trait"),
        (term("model_config", "use_mla", through=("model_type",)), "name"),
        (term("anything", stubs=("kernels",)), "stub"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value["names"]),
)
def test_an_operand_is_read_by_its_words(operand: dict[str, Any], kind: Evidence) -> None:
    assert Evidencing(FIELDS, KEYS).classify(operand) == kind


def test_a_field_that_a_name_decided_carries_the_name_on_and_its_taint() -> None:
    evidencing = Evidencing(FIELDS, KEYS)
    assert evidencing.classify(term("self", "attention_backend")) == "flag"
    tested = term("model_arch"), term("probe", stubs=("kernels",))
    evidencing.assignment(assignment("attention_backend", *tested), decides=True)
    assert evidencing.classify(term("self", "attention_backend")) == "name"
    assert evidencing.tainting(assignment("page_size", term("self", "attention_backend"))) == ("kernels",)


def test_an_operand_that_was_not_evaluated_is_no_evidence_and_no_taint() -> None:
    evidencing = Evidencing(FIELDS, KEYS)
    evidencing.assignment(assignment("attention_backend", term("x", stubs=("kernels",))), decides=True)
    raw = assignment("page_size", term("tp_size"), term("attention_backend", truth=None))
    assert evidence_of(evidencing.assignment(raw, decides=True)) == ("flag",)
    assert evidencing.tainting(raw) == ()


def test_a_value_assigned_to_something_else_decides_no_field() -> None:
    evidencing = Evidencing(FIELDS, KEYS)
    evidencing.assignment(assignment("attention_backend", term("model_arch")), decides=False)
    assert evidencing.classify(term("self", "attention_backend")) == "flag"


def test_keys_of_a_config_are_those_at_any_depth() -> None:
    assert config_keys({"a": {"b": [{"c": 1}, "d"]}, "e": None}) == {"a", "b", "c", "e"}
