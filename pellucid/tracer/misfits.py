"""Compares the kernels that an engine chose with the limits that Pellucid knows of them. Used by `audit`.

The limits are the declarations of the backend families; the rules are those by which Pellucid chooses its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pellucid.hardware.facts import Hardware
from pellucid.selection.misfits import Need, misfits
from pellucid.selection.registry import discover
from pellucid.tracer.record import Decision, Trace
from pellucid.traits.backend import BackendTraits, Op
from pellucid.traits.config import TraitReport
from pellucid.traits.misfit import MisfitKind
from pellucid.traits.missing import SPARSE_INDEXER
from pellucid.traits.model import ModelTraits

ATTENTION_NAMES: Mapping[str, Mapping[str, str]] = {
    "mla": {
        "fa3": "fa3_mla",
        "flash_attn_mla": "fa3_mla",
        "flashmla": "flashmla",
        "flashinfer": "flashinfer_mla",
        "flashinfer_mla": "trtllm_mla",
        "trtllm_mla": "trtllm_mla",
        "cutlass_mla": "cutlass_mla",
    },
    "gqa": {"fa3": "fa3_gqa", "flashinfer": "flashinfer_gqa"},
}
"""By kind of attention: a value of an engine's field, in lower case -> the declaration of the kernel behind it."""

MOE_NAMES: Mapping[str, str] = {
    "marlin": "marlin",
    "flashinfer_trtllm": "flashinfer_trtllm",
    "flashinfer_cutlass": "flashinfer_cutlass",
    "deep_gemm": "deep_gemm",
    "deepgemm": "deep_gemm",
}

_ATTENTION = re.compile(r"(prefill_|decode_)?attention(_layer)?_backend")
_SPARSE_ATTENTION = re.compile(r"[nd]sa_(prefill|decode)_backend")
"""Fields that only models with a sparse indexer use; they have a value for every model."""

FACTS: frozenset[MisfitKind] = frozenset(
    {"compute_capability", "head_dims", "num_heads", "page_size", "kv_dtype", "weights", "tensor_parallel"}
)
"""What a kernel can't do. Packages and toolkits are the engine's to bring."""

FIELD_OF: Mapping[str, str] = {
    "compute_capability": "sm",
    "head_dims": "mla_dims",
    "num_heads": "head_rule",
    "page_size": "page_sizes",
    "kv_dtype": "kv_dtypes",
    "weights": "weight_schemes",
    "tensor_parallel": "shard_multiple_of",
}

SHORT_DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class KnownMisfit:
    """A kernel that the engine chose for `model` against a limit. `source` says where the limit comes from.

    `verified` is false where the limit was only read, not checked.
    """

    model: str
    field: str
    value: str
    reason: str
    source: str
    verified: bool


def known_misfits(
    trace: Trace, report: TraitReport, hardware: Hardware, tensor_parallel_size: int
) -> tuple[KnownMisfit, ...]:
    """Every choice of the trace that is against a declared limit.

    Passed over are kernels without a declaration, fields that the model does not use, and page sizes not known.
    """
    page = _page_size(trace)
    declared = {(backend.op, backend.name): backend for backend in discover()}
    found: dict[tuple[str, str], KnownMisfit] = {}
    for decision in trace.decisions:
        backend = _backend_of(decision, report, declared)
        if backend is None:
            continue
        need = _need(trace, report.traits, hardware, tensor_parallel_size, backend.op, page)
        for misfit in misfits(backend, need):
            if misfit.kind in FACTS and (misfit.kind != "page_size" or page is not None):
                verified = FIELD_OF[misfit.kind] not in backend.unverified
                one = KnownMisfit(
                    trace.model, decision.field, str(decision.value), misfit.reason, backend.source, verified
                )
                # One kernel behind several fields is one misfit.
                found.setdefault((backend.name, misfit.reason), one)
    return tuple(found.values())


def _backend_of(
    decision: Decision, report: TraitReport, declared: Mapping[tuple[Op, str], BackendTraits]
) -> BackendTraits | None:
    """The declaration of the kernel behind a field that the model uses."""
    if decision.how == "unknown" or not isinstance(decision.value, str):
        return None
    traits, value = report.traits, decision.value.rpartition(".")[2].lower()
    if "moe" in decision.field:
        return declared.get(("moe", MOE_NAMES.get(value, ""))) if traits.moe is not None else None
    is_sparse = any(one.trait == SPARSE_INDEXER for one in report.missing)
    if _ATTENTION.fullmatch(decision.field) or (is_sparse and _SPARSE_ATTENTION.fullmatch(decision.field)):
        return declared.get(("attention", ATTENTION_NAMES[traits.attention.kind].get(value, "")))
    return None


def _page_size(trace: Trace) -> int | None:
    known = {one.field: one.value for one in trace.decisions if one.how != "unknown"}
    return next((known[name] for name in ("page_size", "block_size") if isinstance(known.get(name), int)), None)


def _need(
    trace: Trace, traits: ModelTraits, hardware: Hardware, tensor_parallel_size: int, op: Op, page: int | None
) -> Need:
    dtype = SHORT_DTYPES.get(traits.dtype, traits.dtype)
    values = {one.field: one.value for one in trace.decisions}
    stored = str(next((values[name] for name in ("kv_cache_dtype", "cache_dtype") if name in values), "auto"))
    experts = traits.weights.routed_experts
    return Need(
        model=traits,
        hardware=hardware,
        device="cuda",
        dtype=dtype,
        phase="decode" if op == "attention" else None,
        weights=(experts,) if op == "moe" and experts is not None else (),
        tensor_parallel_size=tensor_parallel_size,
        page_size=page or 64,
        kv_dtype="fp8" if stored.startswith("fp8") else dtype,
        kv_layout="latent_row" if traits.attention.kind == "mla" else "nhd",
    )
