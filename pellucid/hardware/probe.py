"""Reads this machine's facts without importing torch: the CUDA driver and NVML through ctypes, /proc, package folders.

Called by `load_hardware("this")`. Takes milliseconds where there is no GPU driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pellucid.hardware.facts import CPU, GPU, Hardware
from pellucid.utils.compiler import find_cxx

PACKAGES = (
    "fa3-fwd",
    "flashinfer-python",
    "humming-kernels",
    "numpy",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "tokenspeed-fa3",
    "tokenspeed-kernel",
    "torch",
    "triton",
)
"""The packages a backend may need; no other version can change a measurement."""

ISA_FEATURES = (
    *("avx", "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)

# Names and numbers of cuda.h (CUdevice_attribute) and nvml.h.
_SM_COUNT, _CC_MAJOR, _CC_MINOR, _SMEM_OPTIN = 16, 75, 76, 97
_NO_DEVICE = 100
_NVLINKS = 18


class DriverError(Exception):
    """A call of the CUDA driver failed; becomes a note of the probe, never a crash."""


def probe() -> Hardware:
    """The facts of this machine. GPUs hidden by `CUDA_VISIBLE_DEVICES` do not count.

    Initialises the CUDA driver in this process when there is one, but creates no context.
    """
    folders = package_folders(sys.path)
    gpus, bus_ids, notes = _probe_gpus()
    driver, link = _probe_links(bus_ids) if gpus else (None, "none")
    return Hardware(
        name="this",
        cpu=_probe_cpu(Path("/")),
        gpus=gpus,
        link=link,
        driver=driver,
        cuda=_torch_cuda(folders),
        nvcc=_nvcc_version(os.environ) if gpus else None,
        packages={name: folders[name][1] for name in PACKAGES if name in folders},
        notes=notes,
    )


# --- GPUs ---------------------------------------------------------------------------------------


def _probe_gpus() -> tuple[tuple[GPU, ...], tuple[str, ...], tuple[str, ...]]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), (), ()
    try:
        found = read_gpus(cuda)
    except DriverError as error:
        return (), (), (f"the CUDA driver is installed but not usable: {error}",)
    return tuple(gpu for gpu, _ in found), tuple(bus for _, bus in found), ()


def read_gpus(cuda: Any) -> list[tuple[GPU, str]]:
    """Every visible GPU and its PCI bus id, asked of `cuda` (libcuda). Raises DriverError."""

    def call(name: str, *args: Any) -> int:
        status = int(getattr(cuda, name)(*args))
        if status not in (0, _NO_DEVICE):
            raise DriverError(f"{name} returned {status}")
        return status

    def attribute(number: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    if call("cuInit", 0) == _NO_DEVICE:
        return []
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name, bus_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetName", name, 256, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        call("cuDeviceGetPCIBusId", bus_id, 32, device)
        gpu = GPU(
            name=name.value.decode(errors="replace"),
            sm=10 * attribute(_CC_MAJOR, device) + attribute(_CC_MINOR, device),
            memory_bytes=memory.value,
            smem_optin_bytes=attribute(_SMEM_OPTIN, device),
            sm_count=attribute(_SM_COUNT, device),
        )
        found.append((gpu, bus_id.value.decode()))
    return found


def _probe_links(bus_ids: tuple[str, ...]) -> tuple[str | None, Literal["none", "pcie", "nvlink"]]:
    unknown: Literal["none", "pcie"] = "pcie" if len(bus_ids) > 1 else "none"
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, unknown
    if nvml.nvmlInit_v2() != 0:
        return None, unknown
    try:
        return read_links(nvml, bus_ids)
    finally:
        nvml.nvmlShutdown()


def read_links(nvml: Any, bus_ids: tuple[str, ...]) -> tuple[str | None, Literal["none", "pcie", "nvlink"]]:
    """Driver version, and `nvlink` when each of several GPUs has an active link. `nvml` is libnvidia-ml."""
    text = ctypes.create_string_buffer(96)
    driver = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, 96) == 0 else None
    if len(bus_ids) < 2:
        return driver, "none"
    return driver, "nvlink" if all(_has_nvlink(nvml, bus_id) for bus_id in bus_ids) else "pcie"


def _has_nvlink(nvml: Any, bus_id: str) -> bool:
    handle, state = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)) != 0:
        return False
    return any(
        nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0 and state.value == 1
        for link in range(_NVLINKS)
    )


# --- CPU ----------------------------------------------------------------------------------------


def _probe_cpu(root: Path) -> CPU:
    info = _first_processor(root / "proc/cpuinfo")
    flags = (info.get("flags") or info.get("Features") or "").split()
    total, available = read_memory(root)
    compiler, version = _cpp_compiler()
    return CPU(
        name=info.get("model name", os.uname().machine),
        cores=read_cores(root),
        isa=tuple(name for name in ISA_FEATURES if name in flags),
        memory_bytes=total,
        available_bytes=available,
        compiler=compiler,
        compiler_version=version,
    )


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The first block of /proc/cpuinfo: the kernel writes the rest per core, which is slow on large hosts."""
    fields = {}
    if cpuinfo.exists():
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    return fields


def read_memory(root: Path) -> tuple[int, int]:
    """Bytes installed and available, both capped by the control group this process lives in."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    total = int(meminfo.get("MemTotal", 0)) * 1024
    available = int(meminfo.get("MemAvailable", 0)) * 1024
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _read(root / "sys/fs/cgroup/memory.current").strip()
        free = max(0, int(limit) - int(used if used.isdigit() else 0))
        total, available = min(total, int(limit)), min(available, free)
    return total, available


def read_cores(root: Path) -> int:
    """Cores this process may use: its affinity, capped by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cpp_compiler() -> tuple[str | None, str | None]:
    path = find_cxx()
    if path is None:
        return None, None
    found = re.search(r"\d+(\.\d+)*", _run(path, "-dumpfullversion", "-dumpversion"))
    return path, found.group() if found else None


# --- software -----------------------------------------------------------------------------------


def package_folders(search_path: Iterable[str]) -> dict[str, tuple[Path, str]]:
    """Installed packages by normalised name: the folder that holds them, and their version.

    Reads the names of `*.dist-info` folders only, the first on the path winning as in an import.
    """
    found: dict[str, tuple[Path, str]] = {}
    for entry in search_path:
        folder = Path(entry or ".")
        if not folder.is_dir():
            continue
        for path in sorted(folder.glob("*.dist-info")):
            match = re.fullmatch(r"(.+?)-([^-]+)\.dist-info", path.name)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), (folder, match[2]))
    return found


def _torch_cuda(folders: Mapping[str, tuple[Path, str]]) -> tuple[int, int] | None:
    """The toolkit torch was built with, from its version file: importing it takes a second."""
    if "torch" not in folders:
        return None
    text = _read(folders["torch"][0] / "torch" / "version.py")
    match = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def _nvcc_version(environ: Mapping[str, str]) -> tuple[int, int] | None:
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = _which("nvcc", environ) or _which(f"{home}/bin/nvcc", environ)
    match = re.search(r"release (\d+)\.(\d+)", _run(path, "--version")) if path else None
    return (int(match[1]), int(match[2])) if match else None


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    from shutil import which

    return which(name, path=environ.get("PATH"))


def _run(*command: str) -> str:
    import subprocess

    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
