"""Builds and binds the C++ CPU kernels (`kernels/cpu/*.cpp`). Called by the `cpu_native` backends.

The library is compiled once for this processor with the C++ compiler found on the machine and kept in
the user's cache under a hash of sources, flags and compiler, so that later starts only load it. The
wrappers take fp32 CPU tensors that are contiguous in the last dim, as layers make them; they check nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.core import PellucidError
from pellucid.kernels.torch_ops import gqa_write, latent_write
from pellucid.utils.cache import cache_dir
from pellucid.utils.compiler import find_cxx

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread", "-Wno-psabi")

FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4}
"""Packed formats, as `enum Format` of linear.h has them."""

GGUF_BLOCK_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 8}
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4}
"""Bits of a packed element, without its group's scale and minimum."""

GROUP = 32
LANES = 16
ARENA_BLOCK_BYTES = 64 << 20
CPU_IDENTITY = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Lines of /proc/cpuinfo, of x86 and of Arm."""

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def build(cxx: str) -> Path:
    """Compile the sources unless the cache has them; returns the shared library's path.

    Raises:
        PellucidError: the compiler failed, its first error line is quoted; or the cache can't be written.
    """
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    digest = hashlib.sha256()
    for path in (*sources, *sorted(SOURCE_DIR.glob("*.h"))):
        digest.update(path.read_bytes())
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(" ".join((cxx, version, *FLAGS, _cpu_identity())).encode())
    target = cache_dir("kernels") / f"cpu-{digest.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                logger.info("compiling the CPU kernels for this processor, once (about 10 s)")
                built = Path(folder) / "cpu.so"
                _compile(cxx, sources, built)
                # An atomic rename: two processes that build at once both end with a whole file.
                built.replace(target)
    except OSError as error:
        raise PellucidError(
            f"can't keep the compiled CPU kernels in {target.parent}: {error.strerror or error}; "
            "set PELLUCID_CACHE to a folder that can be written"
        ) from None
    return target


def _compile(cxx: str, sources: Iterable[Path], target: Path) -> None:
    """Raises PellucidError with the first line that tells why."""
    command = [cxx, *FLAGS, "-shared", "-o", str(target), *map(str, sources)]
    # The C locale: errors are looked for by that word.
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        first = errors[0] if errors else f"exit status {result.returncode}"
        raise PellucidError(
            f"building the CPU kernels with {cxx} failed: {first}; set CXX to another compiler, "
            "or take 'reference' for --linear-backend, --attention-backend and --moe-backend"
        )


def _cpu_identity() -> str:
    """Model and features of the first processor: `-march=native` code must not travel with a cache."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return "".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith(CPU_IDENTITY))


def _load(path: Path) -> ctypes.CDLL:
    """Raises PellucidError where the system refuses: a mount without exec, a newer libstdc++ than Python has loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise PellucidError(
            f"the compiled CPU kernels can't be loaded: {error}; set PELLUCID_CACHE to a folder from which "
            "programs may run, or CXX to another compiler"
        ) from None


class CpuLibrary:
    """The loaded kernels. Thread count follows `torch.get_num_threads()` at construction.

    Raises:
        PellucidError: no C++ compiler, or it failed, or what it built can't be kept or loaded.
    """

    def __init__(self, threads: int | None = None) -> None:
        import torch

        cxx = find_cxx()
        if cxx is None:
            raise PellucidError("no C++ compiler found for the CPU kernels; install one (apt install g++) or set CXX")
        self._arena = HugePageArena()
        self.threads = threads or torch.get_num_threads()
        self._library = _load(build(cxx))
        for name, argtypes in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = argtypes, None

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [outer, n] or [outer, inner, n] (inner contiguous), normalized over n; `out` may be `x`."""
        if out is None:
            out = x.new_empty(x.shape)
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
        """cache.view(-1, width)[slots[t]] = x[t]; x [tokens, width] with any token stride; slots int64, -1 skips.

        The cache may be of any dtype: another backend's attention may be the one that reads it.
        """
        x = x.to(cache.dtype)
        self._library.pellucid_cache_write(
            x.data_ptr(), x.stride(0) * x.itemsize, slots.data_ptr(), cache.data_ptr(),
            x.shape[0], x.shape[1] * x.itemsize,
        )  # fmt: skip

    latent_write = latent_write
    gqa_write = gqa_write

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :n]) * gate_up[:, n:], [rows, n]."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, n)
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
        batch = data if data.dim() == 3 else data.unsqueeze(0)
        return self.pack_each(scheme, batch, batch.shape[0], batch.shape[1], columns)

    def pack_each(
        self, scheme: str, matrices: Iterable[torch.Tensor], count: int, rows: int, columns: int
    ) -> PackedWeight:
        """`pack` of `count` matrices, taken one at a time: what makes them need not hold two of them."""
        import torch

        bits, padded = BITS[scheme], -(-rows // LANES) * LANES

        def group_values() -> torch.Tensor:
            return self._arena.take(count, padded * columns // GROUP * 2).view(torch.float16)

        data = self._arena.take(count, padded * columns * bits // 8)
        if scheme not in GGUF_BLOCK_TYPES:
            for index, matrix in enumerate(matrices):
                source = matrix.contiguous()
                self._library.pellucid_pack_dense(
                    bits // 8, source.data_ptr(), rows, columns, data[index].data_ptr(), self.threads
                )
            return PackedWeight(FORMATS[scheme], rows, columns, data, None, None)
        scale, minimum = group_values(), group_values() if bits == 4 else None
        for index, matrix in enumerate(matrices):
            source = matrix.contiguous()
            self._library.pellucid_pack_gguf(
                GGUF_BLOCK_TYPES[scheme], source.data_ptr(), rows, columns, data[index].data_ptr(),
                scale[index].data_ptr(), None if minimum is None else minimum[index].data_ptr(), self.threads,
            )  # fmt: skip
        return PackedWeight(FORMATS[f"q{bits}"], rows, columns, data, scale, minimum)

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
        out = q.new_empty(tokens, heads, value_dim)
        self._library.pellucid_paged_attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(1),
            values.stride(1), value_head_stride, page_table.data_ptr(), page_table.stride(0), sequence.data_ptr(),
            context.data_ptr(), tokens, heads, num_kv_heads, dk, value_dim, keys.shape[1], scale, self.threads,
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
    """uint8 [size] of anonymous memory, taken page by page as it is written.

    Raises:
        PellucidError: the system does not grant so much.
    """
    import torch

    try:
        # Private: the system seldom gives huge pages to shared memory, which is Python's default.
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PellucidError(
            f"no memory for {size / 1e9:.2f} GB of weights: {error.strerror}; free some, or take a smaller model"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages refuses: ordinary ones will do.
        with contextlib.suppress(OSError):
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
