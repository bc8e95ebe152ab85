"""What each kernel is documented to take, each limit with its source; written down apart from the declarations.

`expected_kinds` applies them with rules of its own, so that a declaration and a fit rule that err alike are found.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.hardware import Hardware
from pellucid.traits.model import MLATraits, ModelTraits, WeightFormat

FLASHMLA = "FlashMLA csrc/api/dense_decode.h:67 checks pages of 64 and dv 512; its README: dense decode is for SM90"
FLASHINFER_MLA = "flashinfer/mla/_core.py: BatchMLAPagedAttentionWrapper, fa2 from SM80 on, fa3 on SM90, bf16 and fp16"
CUTLASS_MLA = (
    "FlashInfer 0.6.14 mla/_core.py: 128 heads of 576, pages that divide 128, SM100 and SM110 (its docstring); "
    "csrc/cutlass_mla.cu: bf16 and fp16"
)
TRTLLM = (
    "FlashInfer 0.6.14 _check_trtllm_gen_mla_shape: 512 + 64 or 256 + 64, whatever the nope width; pages of 32 or 64"
)
XQA = "FlashInfer 0.6.14 jit/xqa.py: 128 heads of 576, pages of 16 to 128; _core.py: SM120 and SM121, one new token"
FA3_GQA = "tokenspeed-fa3 3.0.0: cuobjdump lists sm_90a alone; its flash_attn_config.py: fp16, pages, no width 96"
FA3_MLA = "fa3-fwd 0.0.3, fa3_fwd_config.py: no fp16, no pages, width 192 with values of 128"
FLASHINFER_GQA = "FlashInfer 0.6.14 DISPATCH_HEAD_DIM and hopper/prefill_sm90.cuh: head widths 64, 128 and 256"
MARLIN = "sglang-kernel 0.4.5 moe_wna16_marlin_gemm: fp8, 4-bit with groups of 16 to 128, no bf16; widths of 128"
TRTLLM_MOE = "FlashInfer 0.6.14 trtllm_*_moe: SM100 and SM103; int4 as MxInt4, groups of 32"
CUTLASS_MOE = "FlashInfer 0.6.14 cutlass_fused_moe: fp8 blocks and W4A16 on SM90, nvfp4 on SM100, 103, 120, 121"
HUMMING = "humming-kernels 0.1.20, its support matrix: bf16 and fp16 from SM80 on, INT1 to INT8, FP of up to 8 bits"
DEEP_GEMM = "sgl-deep-gemm 0.2.5, its bf16 products alone: SM90, SM100, SM103; crashed on SM120 (sglang#18870)"
OURS = "docs/add-a-backend.md: our own kernels compile for the device that they find"

AMPERE_ON = frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
GGUF = frozenset({"q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"})
WIDE = frozenset({"bf16", "fp16", "fp32"})
HALF = frozenset({"bf16", "fp16"})
BOTH = frozenset({"prefill", "decode"})
DECODE = frozenset({"decode"})


@dataclass(frozen=True)
class Limits:
    """Limits of one kernel; None is none. `mla`: (latent, rope, nope) with None for any nope. `heads`: per rank."""

    source: str
    op: str
    devices: frozenset[str] = frozenset({"cuda"})
    sms: frozenset[int] | None = None
    phases: frozenset[str] = BOTH
    mla: tuple[tuple[int, int, int | None], ...] | None = ()
    gqa: frozenset[int] | None = frozenset()
    heads: int | None = None
    pages: frozenset[int] | None = None
    kv: frozenset[str] = HALF
    layouts: frozenset[str] = frozenset({"latent_row"})
    dtypes: frozenset[str] = HALF
    schemes: frozenset[str] | None = None
    scheme_sms: tuple[tuple[str, frozenset[int]], ...] = ()
    groups: frozenset[int] | None = frozenset()
    scales: frozenset[str] = frozenset()
    zero_points: bool = False
    shard: int = 1


ABSORBED = ((512, 64, None),)
CPU = frozenset({"cpu"})
EVERYWHERE = frozenset({"cpu", "cuda"})
BF16 = frozenset({"bf16"})
SM90 = frozenset({90})
DATACENTRE = frozenset({100, 103})
WORKSTATION = frozenset({120, 121})

# A kernel that serves no GQA has `gqa` empty, one that serves no MLA `mla` empty; both are None where it takes any.
ATTENTION = {
    "flashmla": Limits(FLASHMLA, "attention", sms=SM90, phases=DECODE, mla=ABSORBED, pages=frozenset({64})),
    "flashinfer_mla": Limits(FLASHINFER_MLA, "attention", sms=AMPERE_ON, mla=ABSORBED),
    "cutlass_mla": Limits(
        CUTLASS_MLA, "attention", sms=frozenset({100, 110}), phases=DECODE, mla=ABSORBED, heads=128,
        pages=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
    ),
    "trtllm_mla": Limits(
        TRTLLM, "attention", sms=DATACENTRE, phases=DECODE, mla=((512, 64, None), (256, 64, None)),
        pages=frozenset({32, 64}), kv=BF16, dtypes=BF16,
    ),
    "xqa_mla": Limits(
        XQA, "attention", sms=WORKSTATION, phases=DECODE, mla=ABSORBED, heads=128,
        pages=frozenset({16, 32, 64, 128}), kv=BF16, dtypes=BF16,
    ),
    "fa3_mla": Limits(
        FA3_MLA, "attention", sms=SM90, phases=frozenset({"prefill"}), mla=((512, 64, 128),), kv=BF16, dtypes=BF16
    ),
    "fa3_gqa": Limits(
        FA3_GQA, "attention", sms=SM90, gqa=frozenset({64, 128, 192, 256}), layouts=frozenset({"nhd"})
    ),
    "flashinfer_gqa": Limits(
        FLASHINFER_GQA, "attention", sms=AMPERE_ON, gqa=frozenset({64, 128, 256}), layouts=frozenset({"nhd"}),
    ),
    "triton_mla": Limits(OURS, "attention", mla=None, pages=frozenset({16, 32, 64, 128})),
    "triton_gqa": Limits(
        OURS, "attention", gqa=frozenset(range(16, 257, 8)), pages=frozenset({16, 32, 64, 128}),
        layouts=frozenset({"nhd"}),
    ),
    "cpu_native": Limits(
        OURS, "attention", devices=CPU, mla=None, gqa=None, kv=frozenset({"fp32"}), dtypes=frozenset({"fp32"}),
        layouts=frozenset({"latent_row", "nhd"}),
    ),
    "reference": Limits(
        OURS, "attention", devices=EVERYWHERE, mla=None, gqa=None, kv=WIDE, dtypes=WIDE,
        layouts=frozenset({"latent_row", "nhd"}),
    ),
}  # fmt: skip

MOE = {
    "marlin": Limits(
        MARLIN, "moe", sms=AMPERE_ON - {110}, schemes=frozenset({"fp8", "int4", "mxfp4", "nvfp4"}),
        groups=frozenset({16, 32, 64, 128}), scales=frozenset({"tensor", "channel"}), shard=128,
    ),
    "flashinfer_trtllm": Limits(
        TRTLLM_MOE, "moe", sms=DATACENTRE, dtypes=BF16, groups=frozenset({16, 32, 128}), shard=128,
        schemes=frozenset({"bf16", "fp8", "int4", "mxfp4", "nvfp4"}),
    ),
    "flashinfer_cutlass": Limits(
        CUTLASS_MOE, "moe", sms=SM90 | DATACENTRE | WORKSTATION, groups=frozenset({16, 32, 64, 128}), shard=64,
        schemes=HALF | {"fp8", "int4", "nvfp4"},
        scheme_sms=(("fp8", SM90), ("int4", SM90), ("nvfp4", DATACENTRE | WORKSTATION)),
    ),
    "humming": Limits(
        HUMMING, "moe", sms=AMPERE_ON, schemes=frozenset({"fp8", "int4", "mxfp4", "nvfp4"}),
        groups=frozenset({16, 32, 64, 128}), scales=frozenset({"tensor", "channel"}), zero_points=True,
    ),
    "deep_gemm": Limits(
        DEEP_GEMM, "moe", sms=SM90 | DATACENTRE, dtypes=BF16, schemes=BF16, shard=128,
    ),
    "triton_fused": Limits(OURS, "moe", schemes=HALF),
    "cpu_native": Limits(OURS, "moe", devices=CPU, dtypes=frozenset({"fp32"}), schemes=WIDE | GGUF, groups=None),
    "reference": Limits(OURS, "moe", devices=EVERYWHERE, dtypes=WIDE, schemes=WIDE | GGUF, groups=None),
}  # fmt: skip

LINEAR = {
    "cpu_native": Limits(OURS, "linear", devices=CPU, dtypes=frozenset({"fp32"}), schemes=WIDE | GGUF, groups=None),
    "reference": Limits(OURS, "linear", devices=EVERYWHERE, dtypes=WIDE, schemes=WIDE | GGUF, groups=None),
}

DOCUMENTED = {"attention": ATTENTION, "moe": MOE, "linear": LINEAR}

SOFTWARE = frozenset({"not_built", "package", "toolkit", "compiler"})
"""What depends on this version and on what is installed, not on a kernel's limits."""


@dataclass(frozen=True)
class Place:
    """Where a candidate is judged: one op of a model on a machine under the plan's storage."""

    model: ModelTraits
    hardware: Hardware
    device: str
    ranks: int
    dtype: str
    kv_dtype: str
    layout: str
    page: int
    phase: str | None = None
    weights: tuple[WeightFormat, ...] = ()


def expected_kinds(limits: Limits, place: Place) -> set[str]:
    """The kinds of misfit that the documented limits give."""
    attention = place.model.attention
    if limits.op == "attention":
        served = limits.mla if isinstance(attention, MLATraits) else limits.gqa
        if served is not None and not served:
            return {"attention"}
    right_device = place.device in limits.devices
    sms = {gpu.sm for gpu in place.hardware.gpus[: place.ranks]} if place.device == "cuda" else set()
    found = set() if right_device else {"device"}
    if "cuda" in limits.devices and limits.sms is not None and sms - limits.sms:
        found.add("compute_capability")
    if right_device and place.dtype not in limits.dtypes:
        found.add("dtype")
    if limits.op == "attention":
        return found | _attention(limits, place, right_device)
    if any(not _reads(limits, form, sms) for form in place.weights):
        found.add("weights")
    moe = place.model.moe
    if limits.op == "moe" and moe is not None and moe.intermediate_size % (place.ranks * limits.shard):
        found.add("tensor_parallel")
    return found


def _attention(limits: Limits, place: Place, right_device: bool) -> set[str]:
    attention, found = place.model.attention, set()
    if place.phase not in limits.phases:
        found.add("phase")
    if isinstance(attention, MLATraits):
        have = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
        if limits.mla is not None and not any(d[:2] == have[:2] and d[2] in (None, have[2]) for d in limits.mla):
            found.add("head_dims")
    elif limits.gqa is not None and attention.head_dim not in limits.gqa:
        found.add("head_dims")
    if limits.heads not in (None, attention.num_heads // place.ranks):
        found.add("num_heads")
    if limits.pages is not None and place.page not in limits.pages:
        found.add("page_size")
    if right_device and place.kv_dtype not in limits.kv:
        found.add("kv_dtype")
    if place.layout not in limits.layouts:
        found.add("kv_layout")
    return found


def _reads(limits: Limits, form: WeightFormat, sms: set[int]) -> bool:
    if limits.schemes is not None and form.scheme not in limits.schemes:
        return False
    only = dict(limits.scheme_sms).get(form.scheme)
    if only is not None and sms - only:
        return False
    if form.group_size is not None and limits.groups is not None and form.group_size not in limits.groups:
        return False
    if form.scale_per is not None and form.scale_per not in limits.scales:
        return False
    return form.scheme != "int4" or form.symmetric or limits.zero_points
