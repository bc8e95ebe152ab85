"""Building, keeping and loading the kernels, and what the process around them may do: fork, threads, defaults."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pellucid.core import PellucidError
from pellucid.kernels.cpu_library import CpuLibrary, HugePageArena, build

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _compiler(folder: Path, body: str) -> str:
    """An executable that takes a compiler's arguments; `$out` is what follows -o."""
    path = folder / "fake-c++"
    read_out = 'out=$(echo "$*" | sed "s/.*-o \\([^ ]*\\).*/\\1/")'
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{read_out}\n{body}\n')
    path.chmod(0o755)
    return str(path)


def test_a_cache_that_can_not_be_written_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "file"))
    with pytest.raises(PellucidError, match=r"file/kernels: .*; set PELLUCID_CACHE"):
        build(_compiler(tmp_path, "exit 0"))


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    compiler = _compiler(
        tmp_path, 'echo "In file included" >&2; echo "vec.h:3: error: out of luck" >&2; touch $out; exit 1'
    )
    with pytest.raises(PellucidError, match=r"vec\.h:3: error: out of luck; set CXX"):
        build(compiler)
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_library_that_can_not_be_loaded_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", _compiler(tmp_path, "echo no library > $out"))
    with pytest.raises(PellucidError, match=r"can't be loaded: .*; set PELLUCID_CACHE"):
        CpuLibrary()


@pytest.mark.parametrize("feature", ["flags\t\t: fpu avx2", "Features\t: fp asimd"])
def test_a_cache_that_moves_to_another_processor_is_not_used(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of features as x86 and as Arm have them."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    compiler = _compiler(tmp_path, "touch $out")
    read_text, found = Path.read_text, []
    for more in ("", " sve"):
        text = f"processor\t: 0\n{feature}{more}\n\nprocessor\t: 1\n"

        def read(path: Path, text: str = text) -> str:
            return text if str(path) == "/proc/cpuinfo" else read_text(path)

        monkeypatch.setattr(Path, "read_text", read)
        found.append(build(compiler))
        assert build(compiler) == found[-1]
    assert found[0] != found[1]


@linux_only
def test_a_forked_child_has_workers_of_its_own_and_exits() -> None:
    """Its parent's threads are not there to be given work, nor to be waited for."""
    script = """
import os, signal, sys, torch
from pellucid.kernels.cpu_library import CpuLibrary

torch.set_num_threads(1)  # OpenMP's threads, which do not survive a fork, are torch's affair
library = CpuLibrary(threads=3)
x = torch.ones(200, 600)
def normed(): return library.rms_norm(x, x[0], 0.0)
wanted = normed()
child = os.fork()
if child == 0:
    signal.alarm(20)
    before = len(os.listdir("/proc/self/task"))
    right = torch.equal(normed(), wanted)
    sys.exit(0 if right and len(os.listdir("/proc/self/task")) == before + 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # The child's output is not captured: a child that hangs would keep the pipe open beyond the timeout.
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=30, check=False)
    assert done.returncode == 0


def test_two_threads_compute_at_once(threaded: CpuLibrary) -> None:
    """One has the workers, the other goes on alone; neither waits for the other or takes its rows."""
    xs = [torch.full((50, 600), float(i + 1)) for i in range(2)]
    weight = threaded.pack("fp32", torch.ones(100, 600), 600)

    def compute(x: torch.Tensor) -> bool:
        out, right = torch.empty(50, 100), True
        for _ in range(200):
            threaded.linear(x, weight, None, out.zero_(), False)
            right &= bool((out == 600 * x[0, 0]).all())
        return right

    with ThreadPoolExecutor(2) as executor:
        assert all(executor.map(compute, xs))


def test_results_hold_for_every_thread_count_that_follows_another(library: CpuLibrary) -> None:
    other, x = CpuLibrary(threads=1), torch.randn(64, 600)
    wanted = library.silu_mul(x)
    for threads in (5, 2, 3, 1, 5, 2):
        other.threads = threads
        assert torch.equal(other.silu_mul(x), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_outputs_are_fp32_whatever_torch_makes_by_default(dtype: torch.dtype, library: CpuLibrary) -> None:
    """The user's process may have asked torch for another; fp32 written into that would leave its bounds."""
    x, weight, cache = torch.randn(4, 48), torch.randn(48), torch.randn(2, 4, 6)
    numbers = torch.ones(4, dtype=torch.int32)

    def results() -> list[torch.Tensor]:
        attended = library.paged_attention(
            x.view(4, 8, 6), cache, cache, value_dim=6, value_head_stride=0, num_kv_heads=1,
            page_table=numbers.view(4, 1), sequence=numbers, context=numbers, scale=1.0,
        )  # fmt: skip
        return [library.rms_norm(x, weight, 1e-6), library.silu_mul(x), attended]

    wanted = results()
    torch.set_default_dtype(dtype)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@linux_only
def test_weights_lie_in_private_memory_the_kind_that_gets_huge_pages() -> None:
    weights = HugePageArena().take(2, 1000)
    address = weights.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _ = line.split(maxsplit=2)
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    pytest.fail("the address is in no mapping")
