"""The GPUs with their driver and toolkits, from `Hardware`; what only the driver knows is read beside it.

Called by `doctor.diagnose`. Imports no torch and makes no CUDA context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pellucid.doctor.report import Check
from pellucid.hardware.facts import Hardware, format_bytes
from pellucid.hardware.probe import DriverError, read_gpus

GROUP = "devices"

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA major version -> oldest driver branch that runs it (NVIDIA, CUDA Compatibility, minor version compatibility)."""


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """What the driver says now: free bytes of each visible GPU, and the pairs that can't reach each other's memory."""

    free_bytes: tuple[int, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


def read_driver_facts() -> DriverFacts:
    """Of this machine; nothing where there is no usable driver, which `Hardware.notes` says."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        found = read_gpus(cuda)
    except (OSError, DriverError):
        return DriverFacts()
    apart = pairs_apart(cuda, len(found))
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return DriverFacts((), apart)
    if nvml.nvmlInit_v2() != 0:
        return DriverFacts((), apart)
    try:
        return DriverFacts(free_memory(nvml, tuple(bus for _, bus in found)), apart)
    finally:
        nvml.nvmlShutdown()


def pairs_apart(cuda: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Pairs of GPUs that have no peer access, in either direction. `cuda` is libcuda, initialised."""
    found = []
    for a in range(count):
        for b in range(a + 1, count):
            for one, other in ((a, b), (b, a)):
                can = ctypes.c_int()
                # The handle of a device is its index, for every driver so far; cuDeviceGet says so for certain.
                devices = ctypes.c_int(), ctypes.c_int()
                cuda.cuDeviceGet(ctypes.byref(devices[0]), one)
                cuda.cuDeviceGet(ctypes.byref(devices[1]), other)
                if cuda.cuDeviceCanAccessPeer(ctypes.byref(can), devices[0], devices[1]) == 0 and can.value:
                    continue
                found.append((a, b))
                break
    return tuple(found)


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_memory(nvml: Any, bus_ids: tuple[str, ...]) -> tuple[int, ...]:
    """Free bytes of each GPU; empty when one does not answer. `nvml` is libnvidia-ml, initialised."""
    sizes = []
    for bus_id in bus_ids:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)) != 0:
            return ()
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return ()
        sizes.append(int(memory.free))
    return tuple(sizes)


# --- from facts to checks -----------------------------------------------------------------------


def device_checks(hardware: Hardware, device: str, ranks: int, facts: DriverFacts | None) -> Iterator[Check]:
    """What of the devices matters for `ranks` ranks on `device`. `facts` is None of a machine that is not this one."""
    yield from _gpus(hardware, device)
    if device == "cuda":
        yield _driver(hardware)
        yield _torch(hardware)
        yield _nvcc(hardware)
        yield _shared_memory(hardware)
        yield _links(hardware, ranks, facts)
    else:
        yield _cpp_compiler(hardware)


def _gpus(hardware: Hardware, device: str) -> Iterator[Check]:
    if device == "cpu":
        found = hardware.describe() if not hardware.gpus else f"{hardware.cpu.name}, {hardware.cpu.cores} cores"
        unused = "" if not hardware.gpus else "; the GPUs are left alone"
        yield Check(GROUP, "CPU", "ok", found + unused)
    if not hardware.gpus and not any("driver" in note for note in hardware.notes):
        yield Check(GROUP, "GPU", "ok", "none found; the CPU computes")
    if hardware.gpus and device == "cuda":
        yield Check(GROUP, "GPU", "ok", hardware.describe())
    for note in hardware.notes:
        if "driver" in note:
            yield Check(
                GROUP, "GPU", "warn", note, "reboot after a driver's upgrade, or pass the GPUs to the container"
            )


def _driver(hardware: Hardware) -> Check:
    if hardware.driver is None:
        return Check(GROUP, "driver", "warn", "version not known", "install NVML, which comes with the driver")
    cuda = hardware.cuda
    oldest = None if cuda is None else MIN_DRIVER.get(cuda[0])
    branch = hardware.driver.partition(".")[0]
    if cuda is not None and oldest is not None and branch.isdecimal() and int(branch) < oldest:
        found = f"{hardware.driver}; torch's CUDA {cuda[0]}.{cuda[1]} needs {oldest} or newer"
        return Check(GROUP, "driver", "fail", found, f"install driver {oldest}, or torch built with an older CUDA")
    return Check(GROUP, "driver", "ok", hardware.driver)


def _torch(hardware: Hardware) -> Check:
    version = hardware.packages.get("torch")
    if version is None:
        return Check(GROUP, "torch", "fail", "not installed", "pip install 'pellucid[gpu]'")
    if hardware.cuda is None:
        return Check(GROUP, "torch", "fail", f"{version}, built without CUDA", "pip install torch, or --device cpu")
    return Check(GROUP, "torch", "ok", f"{version}, CUDA {hardware.cuda[0]}.{hardware.cuda[1]}")


def _nvcc(hardware: Hardware) -> Check:
    if hardware.nvcc is None:
        return Check(GROUP, "nvcc", "ok", "none found; our kernels need none")
    version = f"{hardware.nvcc[0]}.{hardware.nvcc[1]}"
    if hardware.cuda is not None and hardware.cuda[0] != hardware.nvcc[0]:
        found = f"{version}, while torch has CUDA {hardware.cuda[0]}.{hardware.cuda[1]}: what it compiles may not load"
        return Check(GROUP, "nvcc", "warn", found, f"put the CUDA {hardware.cuda[0]} toolkit first on PATH")
    return Check(GROUP, "nvcc", "ok", version)


def _shared_memory(hardware: Hardware) -> Check:
    sizes = sorted({gpu.smem_optin_bytes for gpu in hardware.gpus})
    found = f"{' and '.join(map(str, sizes))} bytes per block; tiles are chosen to fit"
    return Check(GROUP, "shared memory", "ok", found)


def _links(hardware: Hardware, ranks: int, facts: DriverFacts | None) -> Check:
    if ranks == 1:
        return Check(GROUP, "link", "ok", "one rank, nothing to exchange")
    apart = [] if facts is None else [pair for pair in facts.apart if max(pair) < ranks]
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (f" and {len(apart) - 4} more" if apart[4:] else "")
        found = f"{hardware.link}; GPUs {pairs} can't reach each other's memory (no P2P)"
        remedy = "turn off ACS and the IOMMU in the firmware (or iommu=pt), and see nvidia-smi topo -p2p r"
        return Check(GROUP, "link", "warn", found, remedy)
    return Check(GROUP, "link", "ok", hardware.link + ("" if facts is None else ", every pair with P2P"))


def _cpp_compiler(hardware: Hardware) -> Check:
    cpu = hardware.cpu
    if cpu.compiler is not None:
        return Check(GROUP, "C++ compiler", "ok", f"{cpu.compiler} {cpu.compiler_version or ''}".rstrip())
    return Check(GROUP, "C++ compiler", "warn", "none found: plain torch computes, much slower", "apt install g++")


def memory_in_use(hardware: Hardware, ranks: int, budget_bytes: int, facts: DriverFacts) -> Check | None:
    """Whether what the engine takes is free now on each of its GPUs; None where that can't be told."""
    used = list(zip(hardware.gpus, facts.free_bytes, strict=False))[:ranks]
    if not used:
        return None
    gpu, free = min(used, key=lambda pair: pair[1])
    if free >= budget_bytes:
        return Check("memory", "free now", "ok", f"{format_bytes(free)} on the fullest GPU")
    share = int(100 * free / gpu.memory_bytes) / 100
    lower = f", or --gpu-memory-utilization {share:g}" if share else ""
    found = f"{format_bytes(free)} on the fullest GPU, the engine takes {format_bytes(budget_bytes)}"
    return Check("memory", "free now", "fail", found, f"end what else runs there (nvidia-smi){lower}")
