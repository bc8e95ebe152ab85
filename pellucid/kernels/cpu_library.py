"""Builds and binds the C++ CPU kernels (`kernels/cpu/*.cpp`). Called by the `cpu_native` backends.

The library is compiled once for this processor with the C++ compiler found on the machine and kept in
the user's cache under a hash of sources, flags and compiler, so that later starts only load it. The
wrappers take fp32 CPU tensors that are contiguous in the last dim; they check nothing, layers do.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.core import PellucidError
from pellucid.utils.cache import cache_dir
from pellucid.utils.compiler import find_cxx

if TYPE_CHECKING:
    import torch

SOURCE_DIR = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread", "-Wno-psabi")

FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4}
"""Packed formats, as `enum Format` of linear.h has them."""

GGUF_BLOCK_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 8}
GROUP = 32
LANES = 16
ARENA_BLOCK_BYTES = 64 << 20

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def build(cxx: str) -> Path:
    """Compile the sources unless the cache has them; returns the shared library's path.

    Raises:
        PellucidError: the compiler failed; its first error line is quoted.
    """
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    digest = hashlib.sha256()
    for path in (*sources, *sorted(SOURCE_DIR.glob("*.h"))):
        digest.update(path.read_bytes())
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(" ".join((cxx, version, *FLAGS, _cpu_identity())).encode())
    target = cache_dir("kernels") / f"cpu-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "cpu.so"
        command = [cxx, *FLAGS, "-shared", "-o", str(built), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            first = errors[0] if errors else f"exit status {result.returncode}"
            raise PellucidError(f"building the CPU kernels with {cxx} failed: {first}; try --linear-backend reference")
        # An atomic rename: two processes that build at once both end with a whole file.
        built.replace(target)
    return target


def _cpu_identity() -> str:
    """Model name and flags of the first processor: `-march=native` code must not travel with a cache."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return "".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith(("model name", "flags")))


class CpuLibrary:
    """The loaded kernels. Thread count follows `torch.get_num_threads()` at construction.

    Raises:
        PellucidError: no C++ compiler, or it failed.
    """

    def __init__(self, threads: int | None = None) -> None:
        import torch

        cxx = find_cxx()
        if cxx is None:
            raise PellucidError("no C++ compiler found for the CPU kernels; install one (apt install g++) or set CXX")
        self._torch = torch
        self._arena = HugePageArena()
        self.threads = threads or torch.get_num_threads()
        self._library = ctypes.CDLL(str(build(cxx)))
        for name, argtypes in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = argtypes, None

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [outer, n] or [outer, inner, n] (inner contiguous), normalized over n; `out` may be `x`."""
        if out is None:
            out = self._torch.empty(x.shape)
        inner = x.shape[1] if x.dim() == 3 else 1
        self._library.pellucid_rms_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0),
            x.shape[0], inner, x.shape[-1], eps, self.threads,
        )  # fmt: skip
        return out

    def rope_(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> None:
        """Rotates x [tokens, heads, dim] in place (any token and head strides). table [positions, dim]: cos | sin."""
        self._library.pellucid_rope(
            x.data_ptr(), x.stride(0), x.stride(1), x.shape[1], x.shape[2],
            table.data_ptr(), positions.data_ptr(), x.shape[0], interleaved,
        )  # fmt: skip

    def cache_write(self, x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
        """cache.view(-1, width)[slots[t]] = x[t]; x [tokens, width] with any token stride; slots int64, -1 skips."""
        self._library.pellucid_cache_write(
            x.data_ptr(), x.stride(0), slots.data_ptr(), cache.data_ptr(), x.shape[0], x.shape[1]
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :n]) * gate_up[:, n:], [rows, n]."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._torch.empty(rows, n)
        self._library.pellucid_silu_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, n, self.threads)
        return out

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool
    ) -> None:
        """out = (or +=) x W^T + bias; x [m, k] and out [m, n] with any row stride."""
        self._library.pellucid_linear(
            weight.format, x.data_ptr(), x.stride(0), weight.data.data_ptr(), _pointer(weight.scale),
            _pointer(weight.minimum), _pointer(bias), out.data_ptr(), out.stride(0), x.shape[0],
            weight.rows, weight.columns, accumulate, self.threads,
        )  # fmt: skip

    def batched_linear(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        """out[:, b] = x[:, b] W[b]^T for x [m, batch, k], out [m, batch, n] (last dim contiguous), dense W."""
        self._library.pellucid_batched_linear(
            weight.format, x.data_ptr(), x.stride(0), x.stride(1), weight.data.data_ptr(), out.data_ptr(),
            out.stride(0), out.stride(1), x.shape[1], x.shape[0], weight.rows, weight.columns, self.threads,
        )  # fmt: skip

    def pack(self, scheme: str, data: torch.Tensor, columns: int) -> PackedWeight:
        """Packs [rows, columns] or [batch, rows, columns], stored as `scheme`, into tiles of 16 rows.

        `data` is the dense matrix, or its GGUF blocks as uint8 [..., rows, bytes].
        """
        torch = self._torch
        data = data.contiguous()
        batch, rows = (data.shape[0], data.shape[1]) if data.dim() == 3 else (1, data.shape[0])
        tiles = -(-rows // LANES)
        if scheme in GGUF_BLOCK_TYPES:
            bits = 8 if scheme == "q8_0" else 4
            packed = self._arena.take(batch, tiles * LANES * columns * bits // 8)
            groups = [
                self._arena.take(batch, tiles * LANES * columns // GROUP * 2).view(torch.float16)
                for _ in range(2 if bits == 4 else 1)
            ]
            for b in range(batch):
                source = data[b] if data.dim() == 3 else data
                self._library.pellucid_pack_gguf(
                    GGUF_BLOCK_TYPES[scheme], source.data_ptr(), rows, columns, packed[b].data_ptr(),
                    groups[0][b].data_ptr(), groups[1][b].data_ptr() if bits == 4 else None, self.threads,
                )  # fmt: skip
            return PackedWeight(FORMATS[f"q{bits}"], rows, columns, packed, groups[0], groups[1] if bits == 4 else None)
        itemsize = data.element_size()
        packed = self._arena.take(batch, tiles * LANES * columns * itemsize)
        for b in range(batch):
            source = data[b] if data.dim() == 3 else data
            self._library.pellucid_pack_dense(
                itemsize, source.data_ptr(), rows, columns, packed[b].data_ptr(), self.threads
            )
        return PackedWeight(FORMATS[scheme], rows, columns, packed, None, None)

    def paged_attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        value_dim: int,
        value_head_stride: int,
        num_kv_heads: int,
        page_table: torch.Tensor,
        sequence: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """q [tokens, heads, dk], heads contiguous -> [tokens, heads, value_dim]; keys, values [pages, page, width].

        page_table int32 [sequences, pages]; sequence, context int32 [tokens]: whose table to use, how many
        keys to see (0 gives a row of zeros).
        """
        tokens, heads, dk = q.shape
        out = self._torch.empty(tokens, heads, value_dim)
        self._library.pellucid_paged_attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(1),
            values.stride(1), value_head_stride, page_table.data_ptr(), page_table.stride(0), sequence.data_ptr(), context.data_ptr(),
            tokens, heads, num_kv_heads, dk, value_dim, keys.shape[1], scale, self.threads,
        )  # fmt: skip
        return out

    def moe(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        out: torch.Tensor,
    ) -> None:
        """out[t] += sum_k weights[t, k] * expert(experts[t, k])(x[t]); experts int64, weights fp32 [tokens, top_k]."""
        tokens, hidden = x.shape
        self._library.pellucid_moe(
            gate_up.format, x.data_ptr(), tokens, hidden, down.columns, gate_up.data.shape[0], experts.shape[1],
            experts.data_ptr(), weights.data_ptr(), gate_up.data.data_ptr(), _pointer(gate_up.scale),
            _pointer(gate_up.minimum), down.format, down.data.data_ptr(), _pointer(down.scale),
            _pointer(down.minimum), out.data_ptr(), True, self.threads,
        )  # fmt: skip


class HugePageArena:
    """Memory for weights, in huge pages where the system has them.

    A decode step reads every weight once: with 4 KB pages it waits for address translation about as often as for data.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._used = 0

    def take(self, rows: int, nbytes: int) -> torch.Tensor:
        """uint8 [rows, nbytes], 64-byte aligned, never given back but with its whole block."""
        size = rows * nbytes
        if self._block is None or self._used + size > self._block.numel():
            self._block, self._used = _huge_pages(max(size, ARENA_BLOCK_BYTES)), 0
        taken = self._block[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return taken.view(rows, nbytes)


def _huge_pages(size: int) -> torch.Tensor:
    """uint8 [size] of anonymous memory, taken page by page as it is written."""
    import torch

    block = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix (or a batch of them) in the tile layout of `cpu/linear.h`. Groups are 32 columns wide."""

    format: int
    rows: int
    columns: int
    data: torch.Tensor
    scale: torch.Tensor | None
    minimum: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scale, self.minimum) if t is not None)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_SIGNATURES: dict[str, list[type]] = {
    "pellucid_linear": [
        _INT, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _INT, _INT
    ],
    "pellucid_batched_linear": [
        _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _INT
    ],
    "pellucid_pack_dense": [_INT, _POINTER, _LONG, _LONG, _POINTER, _INT],
    "pellucid_pack_gguf": [_INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT],
    "pellucid_rms_norm": [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _FLOAT, _INT],
    "pellucid_rope": [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _INT],
    "pellucid_cache_write": [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG],
    "pellucid_silu_mul": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _INT],
    "pellucid_paged_attention": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _POINTER, _POINTER,
        _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _INT
    ],
    "pellucid_moe": [
        _INT, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER,
        _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT
    ],
}  # fmt: skip
