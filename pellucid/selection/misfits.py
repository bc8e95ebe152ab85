"""The fit rules: one function per kind of trait, each comparing a backend with what is needed. Called by `resolve`.

A rule returns a `Misfit` or None. Every rule runs, so that a rejected candidate shows all its reasons at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pellucid.hardware.facts import GPU, Hardware, format_sm
from pellucid.selection.tiles import TileChoice, attention_widths, largest_tile
from pellucid.traits.backend import Anything, BackendTraits, DeviceKind, KVLayout, MLADims, Op, Phase, allows
from pellucid.traits.misfit import Misfit
from pellucid.traits.model import MLATraits, ModelTraits, WeightFormat


@dataclass(frozen=True, slots=True)
class Need:
    """What a backend has to support: one op of one model, on one device, with one storage of the KV cache.

    `weights` are the formats the op must read (none for attention). `query_len`: new tokens per sequence in decode.
    """

    model: ModelTraits
    hardware: Hardware
    device: DeviceKind
    dtype: str
    phase: Phase | None = None
    weights: tuple[WeightFormat, ...] = ()
    tensor_parallel_size: int = 1
    page_size: int = 64
    kv_dtype: str = "bf16"
    kv_layout: KVLayout = "latent_row"
    query_len: int = 1
    batch_invariant: bool = False

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """The GPUs that the ranks run on; none on the CPU."""
        return self.hardware.gpus[: self.tensor_parallel_size] if self.device == "cuda" else ()

    @property
    def heads_per_rank(self) -> int:
        return self.model.attention.num_heads // self.tensor_parallel_size


def misfits(backend: BackendTraits, need: Need) -> tuple[Misfit, ...]:
    """Every reason why `backend` cannot do what is needed; empty when it fits.

    What follows from another reason is left out: for another kind of attention, only that is said.
    """
    rules = (*COMMON_RULES, *OP_RULES.get(backend.op, ()))
    if backend.op == "attention" and need.model.attention.kind not in backend.attention:
        rules = (_built, _attention_kind)
    return tuple(m for m in (rule(backend, need) for rule in rules) if m is not None)


def notes(backend: BackendTraits, need: Need) -> tuple[str, ...]:
    """What is worth knowing of a candidate besides misfits: the tile it would take, and facts not verified."""
    found = []
    if backend.op == "attention" and need.model.attention.kind in backend.attention:
        found += [choice.because for choice in _tiles(backend, need) if choice.tile is not None]
    if backend.notes:
        found.append(backend.notes)
    if backend.unverified:
        found.append(f"not verified: {', '.join(sorted(backend.unverified))} (from {backend.source})")
    return tuple(found)


# --- rules of every op --------------------------------------------------------------------------


def _built(backend: BackendTraits, need: Need) -> Misfit | None:
    if not backend.built_in:
        return Misfit("not built into this version", "", "not_built")
    schemes = {form.scheme for form in need.weights if allows(backend.weight_schemes, form.scheme)}
    strange = sorted(scheme for scheme in schemes if not allows(backend.prepares, scheme))
    if strange:
        return Misfit(f"this version does not bring {one_of(strange)} weights into its form", "", "not_built")
    return None


def _device(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.device in backend.devices:
        return None
    possible = "cpu" if "cpu" in backend.devices else "cuda" if need.hardware.gpus else ""
    remedy = f"--device {possible}" if possible else ""
    return Misfit(f"runs on {one_of(backend.devices)}, the device is {need.device}", remedy, "device")


def _compute_capability(backend: BackendTraits, need: Need) -> Misfit | None:
    other = _other_gpu(backend, need)
    if other is None:
        return None
    wanted = "none" if isinstance(backend.sm, Anything) else one_of(format_sm(sm) for sm in sorted(backend.sm))
    return Misfit(f"compiled for SM {wanted}, this is SM {other.capability}", "", "compute_capability")


def _other_gpu(backend: BackendTraits, need: Need) -> GPU | None:
    """The first GPU that the backend was not compiled for, if it is for GPUs at all."""
    if "cuda" not in backend.devices:
        return None
    return next((gpu for gpu in need.gpus if not allows(backend.sm, gpu.sm)), None)


def _can_start(backend: BackendTraits, need: Need) -> bool:
    """Whether the device is one of the backend's: otherwise its software and dtypes are beside the point."""
    return need.device in backend.devices and _other_gpu(backend, need) is None


def _packages(backend: BackendTraits, need: Need) -> Misfit | None:
    if not _can_start(backend, need):
        return None
    absent = [p for p in backend.packages if p.name not in need.hardware.packages]
    if not absent:
        return None
    names = " and ".join(p.name for p in absent)
    return Misfit(f"needs the package {names}", "; ".join(p.install for p in absent), "package")


def _package_versions(backend: BackendTraits, need: Need) -> Misfit | None:
    for package in backend.packages if _can_start(backend, need) else ():
        version = need.hardware.packages.get(package.name)
        if version is not None and package.tested and version not in package.tested:
            reason = f"{package.name} {version} is installed, tested with {one_of(package.tested)}"
            return Misfit(reason, package.install, "package")
    return None


def _toolkit(backend: BackendTraits, need: Need) -> Misfit | None:
    if backend.min_cuda is None or not _can_start(backend, need):
        return None
    wanted = ".".join(map(str, backend.min_cuda))
    have = need.hardware.cuda
    if have is None:
        return Misfit(f"needs CUDA {wanted}, torch here has none", "install a CUDA build of torch", "toolkit")
    if have < backend.min_cuda:
        remedy = f"install torch built with CUDA {wanted} or newer"
        return Misfit(f"needs CUDA {wanted}, torch here has {have[0]}.{have[1]}", remedy, "toolkit")
    return None


def _compiler(backend: BackendTraits, need: Need) -> Misfit | None:
    if not _can_start(backend, need):
        return None
    if backend.needs_compiler == "c++" and need.hardware.cpu.compiler is None:
        return Misfit("compiles its kernels here and finds no C++ compiler", "apt install g++", "compiler")
    if backend.needs_compiler == "nvcc" and need.hardware.nvcc is None:
        return Misfit("compiles its kernels here and finds no nvcc", "install the CUDA toolkit", "compiler")
    return None


def _dtype(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.dtype in backend.compute_dtypes or need.device not in backend.devices:
        return None
    reason = f"computes in {one_of(backend.compute_dtypes)}, not {need.dtype}"
    return Misfit(reason, _flag_for("--dtype", backend.compute_dtypes), "dtype")


def _batch_invariant(backend: BackendTraits, need: Need) -> Misfit | None:
    if backend.batch_invariant or not need.batch_invariant:
        return None
    return Misfit("its results depend on the batch", "leave out --batch-invariant", "batch_invariant")


# --- rules of attention -------------------------------------------------------------------------


def _attention_kind(backend: BackendTraits, need: Need) -> Misfit | None:
    kind = need.model.attention.kind
    if kind in backend.attention:
        return None
    return Misfit(f"computes {one_of(backend.attention)} attention, the model has {kind}", "", "attention")


def _phase(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.phase is None or need.phase in backend.phases:
        return None
    return Misfit(f"serves {one_of(backend.phases)} only, not {need.phase}", "", "phase")


def _head_dims(backend: BackendTraits, need: Need) -> Misfit | None:
    attention = need.model.attention
    if isinstance(attention, MLATraits):
        have = MLADims(attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim)
        if isinstance(backend.mla_dims, Anything) or any(_same_dims(d, have) for d in backend.mla_dims):
            return None
        wanted = one_of(str(d) for d in sorted(backend.mla_dims, key=str))
        return Misfit(f"takes latent+rope widths {wanted}, the model has {have}", "", "head_dims")
    if allows(backend.head_dims, attention.head_dim):
        return None
    return Misfit(f"takes head widths {one_of(backend.head_dims)}, the model has {attention.head_dim}", "", "head_dims")


def _same_dims(declared: MLADims, have: MLADims) -> bool:
    return declared[:2] == have[:2] and declared.nope in (have.nope, Anything.ANY)


def _num_heads(backend: BackendTraits, need: Need) -> Misfit | None:
    heads, total = need.heads_per_rank, need.model.attention.num_heads
    if backend.head_rule.allows(heads):
        return None
    fitting = [tp for tp in range(1, total + 1) if total % tp == 0 and backend.head_rule.allows(total // tp)]
    remedy = f"--tensor-parallel-size {fitting[0]}" if fitting else ""
    reason = f"takes {backend.head_rule} query heads per rank, here {heads} ({total} / {need.tensor_parallel_size})"
    return Misfit(reason, remedy, "num_heads")


def _query_len(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.phase != "decode" or allows(backend.query_lens, need.query_len):
        return None
    reason = f"decodes {one_of(backend.query_lens)} new tokens per sequence, here {need.query_len}"
    return Misfit(reason, "propose fewer draft tokens", "query_len")


def _page_size(backend: BackendTraits, need: Need) -> Misfit | None:
    sizes = backend.page_sizes
    if isinstance(sizes, Anything) or need.page_size in sizes:
        return None
    remedy = f"--block-size {64 if 64 in sizes else max(sizes)}" if sizes else ""
    return Misfit(f"takes pages of {one_of(sizes)} tokens, not {need.page_size}", remedy, "page_size")


def _kv_dtype(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.kv_dtype in backend.kv_dtypes or need.device not in backend.devices:
        return None
    reason = f"reads a KV cache of {one_of(backend.kv_dtypes)}, not {need.kv_dtype}"
    return Misfit(reason, _flag_for("--kv-cache-dtype", backend.kv_dtypes), "kv_dtype")


def _kv_layout(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.kv_layout in backend.kv_layouts:
        return None
    return Misfit(f"reads a {one_of(backend.kv_layouts)} KV cache, not {need.kv_layout}", "", "kv_layout")


def _shared_memory(backend: BackendTraits, need: Need) -> Misfit | None:
    for choice in _tiles(backend, need):
        if choice.tile is None:
            return Misfit(choice.because, "", "shared_memory")
    return None


def _tiles(backend: BackendTraits, need: Need) -> list[TileChoice]:
    if not need.gpus:
        return []
    limit = min(gpu.smem_optin_bytes for gpu in need.gpus)
    widths = attention_widths(need.model.attention)
    models = [m for m in backend.shared_memory if need.phase in (None, m.phase)]
    return [largest_tile(m, widths, limit) for m in models]


# --- rules of ops over weights ------------------------------------------------------------------


def _weights(backend: BackendTraits, need: Need) -> Misfit | None:
    for form in need.weights:
        if not allows(backend.weight_schemes, form.scheme):
            return Misfit(f"reads {one_of(backend.weight_schemes)} weights, not {form.scheme}", "", "weights")
        only = dict(backend.scheme_sms).get(form.scheme)
        other = next((gpu for gpu in need.gpus if only is not None and gpu.sm not in only), None)
        if only is not None and other is not None:
            where = one_of(format_sm(sm) for sm in sorted(only))
            return Misfit(f"reads {form.scheme} on SM {where} alone, this is SM {other.capability}", "", "weights")
        if form.group_size is not None and not allows(backend.weight_groups, form.group_size):
            reason = f"reads {form.scheme} in groups of {one_of(backend.weight_groups)}, not {form.group_size}"
            return Misfit(reason, "", "weights")
        if form.scale_per is not None and form.scale_per not in backend.weight_scales:
            return Misfit(f"reads {form.scheme} by groups, not with one scale per {form.scale_per}", "", "weights")
        if form.scheme == "int4" and not form.symmetric and not backend.zero_points:
            return Misfit("reads symmetric int4 weights only", "", "weights")
    return None


def _shard(backend: BackendTraits, need: Need) -> Misfit | None:
    if need.model.moe is None:
        return None
    width, tp = need.model.moe.intermediate_size, need.tensor_parallel_size
    if width % tp == 0 and width // tp % backend.shard_multiple_of == 0:
        return None
    fitting = [n for n in range(1, tp) if width % n == 0 and width // n % backend.shard_multiple_of == 0]
    remedy = f"--tensor-parallel-size {fitting[-1]}" if fitting else ""
    share = f"{width} / {tp} = {width / tp:g}"
    reason = f"takes expert widths per rank in multiples of {backend.shard_multiple_of}, here {share}"
    return Misfit(reason, remedy, "tensor_parallel")


Rule = Callable[[BackendTraits, Need], Misfit | None]

COMMON_RULES: tuple[Rule, ...] = (
    _built,
    _device,
    _compute_capability,
    _packages,
    _package_versions,
    _toolkit,
    _compiler,
    _dtype,
    _batch_invariant,
)
ATTENTION_RULES: tuple[Rule, ...] = (
    _attention_kind,
    _phase,
    _head_dims,
    _num_heads,
    _query_len,
    _page_size,
    _kv_dtype,
    _kv_layout,
    _shared_memory,
)
OP_RULES: Mapping[Op, tuple[Rule, ...]] = {
    "attention": ATTENTION_RULES,
    "moe": (_weights, _shard),
    "linear": (_weights,),
}


def one_of(values: Iterable[object] | Anything) -> str:
    """`16, 32 or 64`; `nothing` when empty."""
    if isinstance(values, Anything):
        return "anything"
    names = [str(v) for v in (sorted(values) if isinstance(values, frozenset) else values)]
    if not names:
        return "nothing"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _flag_for(flag: str, dtypes: frozenset[str]) -> str:
    """The flag with the most usual of the dtypes that would do; empty when none would."""
    return next((f"{flag} {name}" for name in ("bf16", "fp16", "fp32", "fp8") if name in dtypes), "")
