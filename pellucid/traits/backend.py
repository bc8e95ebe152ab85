"""`BackendTraits`: what one kernel backend supports, as plain values. No torch.

Every backend module declares one `TRAITS`; `selection.registry` collects them, `selection.misfits` compares
them with a model and a machine. A field left out supports *nothing*; `ANY` has to be written.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, TypeVar

Op = Literal["attention", "moe", "linear", "sampling", "all_reduce"]
Phase = Literal["prefill", "decode"]
DeviceKind = Literal["cpu", "cuda"]
AttentionKind = Literal["mla", "gqa"]
KVLayout = Literal["latent_row", "nhd", "hnd"]
"""`latent_row`: [pages, page, kv_lora_rank + rope]; `nhd`: [2, pages, page, kv_heads, head_dim]; `hnd`: heads first."""
Compiler = Literal["c++", "nvcc"]
FusedDecode = Literal["inside", "called"]
Tile = tuple[int, int]


class Anything(enum.Enum):
    """The type of `ANY`, the explicit "no limit here"."""

    ANY = "any"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = Anything.ANY

T = TypeVar("T")
Allowed = frozenset[T] | Anything


def allows(allowed: Allowed[T], value: T) -> bool:
    """Whether `value` is in the set; `ANY` holds everything, an empty set nothing."""
    return isinstance(allowed, Anything) or value in allowed


class MLADims(NamedTuple):
    """Head widths of an MLA kernel. An absorbed kernel never sees `nope`: it declares `ANY` there."""

    kv_lora_rank: int
    rope: int
    nope: int | Anything

    def __str__(self) -> str:
        nope = "any" if isinstance(self.nope, Anything) else str(self.nope)
        return f"{self.kv_lora_rank}+{self.rope} (nope {nope})"


@dataclass(frozen=True, slots=True)
class HeadRule:
    """Query heads on one rank: members of `counts` that are multiples of `multiple_of`."""

    counts: Allowed[int]
    multiple_of: int = 1

    def allows(self, heads: int) -> bool:
        return allows(self.counts, heads) and heads % self.multiple_of == 0

    def __str__(self) -> str:
        counts = (
            "any number" if isinstance(self.counts, Anything) else " or ".join(map(str, sorted(self.counts))) or "no"
        )
        return counts if self.multiple_of == 1 else f"{counts}, a multiple of {self.multiple_of}"


ANY_HEADS: Final = HeadRule(ANY)
NO_HEADS: Final = HeadRule(frozenset())


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the index that the backend imports. `tested` lists the versions that were tried with it."""

    name: str
    tested: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        return f"pip install {self.name}=={self.tested[-1]}" if self.tested else f"pip install {self.name}"


@dataclass(frozen=True, slots=True)
class SharedMemoryModel:
    """Closed form of the shared memory of one tiled kernel: `itemsize * sum(terms)` bytes.

    Each term is a product of symbols, such as `M*qk`: `M` and `N` are the tile, the others are widths that
    the caller gives (`qk`, `v`, `kv_lora_rank`, `rope`). `tiles` are in order of preference.
    """

    kernel: str
    phase: Phase
    itemsize: int
    terms: tuple[str, ...]
    tiles: tuple[Tile, ...]

    @property
    def formula(self) -> str:
        return f"{self.itemsize}*({' + '.join(self.terms)})"

    def bytes_needed(self, tile: Tile, widths: Mapping[str, int]) -> int:
        """Bytes of shared memory of one block. Raises KeyError when a symbol has no width."""
        values = {**widths, "M": tile[0], "N": tile[1]}
        return self.itemsize * sum(math.prod(values[s] for s in term.split("*")) for term in self.terms)


class Priority(enum.IntEnum):
    """Bands of the fixed order, which decides between candidates that were not measured, or that tie.

    A kernel of another project runs when it was asked for or measured to be faster, never by default:
    its limits can change under us. The reference is last, and always a candidate.
    """

    REFERENCE = 0
    THIRD_PARTY = 100
    OWN_PORTABLE = 200
    OWN_NATIVE = 300


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """What one backend supports. A field left at its default supports nothing; the fields that say what it
    *needs* (`packages`, `min_cuda`, `needs_compiler`, `shard_multiple_of`, `shared_memory`) need nothing.

    `sm` are explicit compute capabilities (90, 120), never a lower bound; read only on a CUDA device.
    `query_lens` are the new tokens per sequence in decode (1, or more when drafts are verified).
    `head_rule` counts query heads of one rank. The MoE width of one rank must be a multiple of `shard_multiple_of`.
    `weight_form` names how weights lie in memory when backends of one op share that: each bucket may take another.
    `weight_groups` are group sizes (128 for fp8 blocks of 128 x 128); `weight_scales` says whether one scale may reach
    over a whole "tensor" or "channel". `zero_points`: int4 that is not symmetric.
    `batch_invariant`: a row's result never depends on its batch.
    `fused_decode`: fused decode steps have its kernels "inside" their own, or it may be "called" between them: it reads
    nothing but tensors that a graph can hold, and the weights or the cache as they are.
    `built_in` is false while this version has only this declaration: it is explained, never run. `prepares` are those
    of its `weight_schemes` that it is run with: this version brings their weights into the kernel's form.
    `unverified` names the fields whose value was only read somewhere, not checked against source or device.
    """

    name: str
    op: Op
    summary: str
    priority: int
    source: str
    built_in: bool = False
    phases: frozenset[Phase] = frozenset()
    devices: frozenset[DeviceKind] = frozenset()
    sm: Allowed[int] = frozenset()
    attention: frozenset[AttentionKind] = frozenset()
    mla_dims: frozenset[MLADims] | Anything = frozenset()
    head_dims: Allowed[int] = frozenset()
    head_rule: HeadRule = NO_HEADS
    query_lens: Allowed[int] = frozenset()
    page_sizes: Allowed[int] = frozenset()
    kv_dtypes: frozenset[str] = frozenset()
    kv_layouts: frozenset[KVLayout] = frozenset()
    compute_dtypes: frozenset[str] = frozenset()
    weight_schemes: Allowed[str] = frozenset()
    scheme_sms: tuple[tuple[str, frozenset[int]], ...] = ()
    prepares: Allowed[str] = ANY
    keeps_packed: frozenset[str] | None = None
    weight_form: str | None = None
    weight_groups: Allowed[int] = frozenset()
    weight_scales: frozenset[str] = frozenset()
    zero_points: bool = False
    shard_multiple_of: int = 1
    packages: tuple[Package, ...] = ()
    min_cuda: tuple[int, int] | None = None
    needs_compiler: Compiler | None = None
    shared_memory: tuple[SharedMemoryModel, ...] = ()
    batch_invariant: bool = False
    fused_decode: FusedDecode | None = None
    notes: str = ""
    unverified: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.unverified - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"{self.name}: unverified names no trait: {', '.join(sorted(unknown))}")
