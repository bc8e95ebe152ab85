"""The machine that an engine is shown: what `--gpu` names, with everything that engines ask of one. Used by the CLI.

`h200x8`, `sm120x8-pcie`, `b300`, a machine of `pellucid.hardware`, `this`, or a JSON file; `,key=value` changes a fact.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from pellucid.core import PellucidError
from pellucid.hardware import CPU, GPU, Hardware, load_hardware

Link = Literal["none", "pcie", "nvlink"]

_FIXTURES = {
    "a100": "a100",
    "rtx3090": "rtx-3090",
    "rtx4090": "rtx-4090",
    "h200": "h200",
    "b200": "b200x8-nvlink",
    "rtxpro6000": "rtx-pro-6000x8-pcie",
}

# Memory as nvidia-smi shows it; shared memory per block and SMs from the vendor's tables.
_OTHERS = {
    "a6000": GPU("NVIDIA RTX A6000", 86, 49_140 << 20, 101_376, 84),
    "l40s": GPU("NVIDIA L40S", 89, 46_068 << 20, 101_376, 142),
    "h100": GPU("NVIDIA H100 80GB HBM3", 90, 81_559 << 20, 232_448, 132),
    "h20": GPU("NVIDIA H20", 90, 97_871 << 20, 232_448, 78),
    "b300": GPU("NVIDIA B300 SXM6 AC", 103, 275_040 << 20, 232_448, 148),
    "rtx5090": GPU("NVIDIA GeForce RTX 5090", 120, 32_607 << 20, 101_376, 170),
    "gb10": GPU("NVIDIA GB10", 121, 122_880 << 20, 101_376, 48),
}

NAMES = tuple(sorted((*_FIXTURES, *_OTHERS)))
"""The GPUs known by name. One for each compute capability also answers to `sm` and its number."""

BY_SM = MappingProxyType(
    {80: "a100", 86: "a6000", 89: "l40s", 90: "h200", 100: "b200", 103: "b300", 120: "rtxpro6000", 121: "gb10"}
)

_PCIE = ("a6000", "l40s", "rtx3090", "rtx4090", "rtx5090", "rtxpro6000", "gb10")
"""Those that no NVLink joins by default; the others are taken as one NVLink domain unless `-pcie` says otherwise."""

_L2_MIB = {"NVIDIA A100-SXM4-80GB": 40, "NVIDIA B200": 126, "NVIDIA B300 SXM6 AC": 126, "NVIDIA L40S": 96}


@dataclass(frozen=True, slots=True)
class SimulatedGPU:
    """`count` equal GPUs in one host. `memory_mib` is what nvidia-smi shows, `sm` 90 for compute capability 9.0.

    What a name does not say has a default: CUDA 13.0 with a driver for it, 1 TiB of host memory (vLLM refuses a small
    host), 50 MiB of L2.
    """

    label: str
    name: str
    sm: int
    memory_mib: int
    sm_count: int
    shared_memory_bytes: int
    count: int = 1
    link: Link = "none"
    cuda: str = "13.0"
    driver: str = "580.159.04"
    host_memory_gib: int = 1024
    l2_bytes: int = 50 << 20

    @property
    def nvlink(self) -> bool:
        """One GPU has nothing to be linked to: engines that ask are told that it is."""
        return self.link != "pcie"

    def hardware(self) -> Hardware:
        """The same machine as the rest of Pellucid knows one, for the limits of kernels. Its processor is not known."""
        model = GPU(self.name, self.sm, self.memory_mib << 20, self.shared_memory_bytes, self.sm_count)
        memory = self.host_memory_gib << 30
        major, minor = (int(part) for part in self.cuda.split("."))
        cpu = CPU("unknown", 1, (), memory, memory)
        return Hardware(self.label, cpu, (model,) * self.count, self.link, self.driver, (major, minor))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nvlink": self.nvlink}

    def __str__(self) -> str:
        return self.label


def simulated_gpu(text: str, count: int | None = None) -> SimulatedGPU:
    """The machine that `text` names, with `count` GPUs where it does not say how many.

    Raises:
        PellucidError: unknown name or fact, a machine of unequal GPUs or of none, or one with fewer than `count`.
    """
    text, *facts = (part.strip() for part in text.split(","))
    gpu = _named(text, count) or _machine(text)
    if count is not None and gpu.count < count:
        raise PellucidError(f"--gpu {text} has {gpu.count} GPU{'s' * (gpu.count > 1)}, but {count} are asked for")
    return _with_facts(gpu, facts)


def _named(text: str, count: int | None) -> SimulatedGPU | None:
    base, _, suffix = text.lower().rpartition("-")
    link: Link | None = "pcie" if suffix == "pcie" else "nvlink" if suffix == "nvlink" else None
    name = (text.lower() if link is None else base).replace("-", "")
    number = None
    if name not in NAMES and (found := re.fullmatch(r"(\w+)x(\d+)", name)):
        name, number = found[1], int(found[2])
    if capability := re.fullmatch(r"sm(\d+)", name):
        if int(capability[1]) not in BY_SM:
            known = ", ".join(f"sm{sm}" for sm in BY_SM)
            raise PellucidError(f"--gpu {text}: no GPU of SM {capability[1]} is known; known: {known}")
        name = BY_SM[int(capability[1])]
    if name not in NAMES:
        return None
    if number == 0:
        raise PellucidError(f"--gpu {text}: give at least one GPU")
    default: Link = "pcie" if name in _PCIE else "nvlink"
    model = _OTHERS[name] if name in _OTHERS else load_hardware(_FIXTURES[name]).gpus[0]
    return _simulated(name, model, number or count or 1, link or default)


def _simulated(name: str, model: GPU, count: int, link: Link) -> SimulatedGPU:
    label = name if count == 1 else f"{name}x{count}-{link}"
    gpu = SimulatedGPU(
        label, model.name, model.sm, model.memory_bytes >> 20, model.sm_count, model.smem_optin_bytes, count
    )
    l2 = _L2_MIB.get(model.name, gpu.l2_bytes >> 20) << 20
    return replace(gpu, link=link if count > 1 else "none", l2_bytes=l2)


def _machine(text: str) -> SimulatedGPU:
    """A fixture, `this`, or a JSON file, with its own versions and host memory."""
    try:
        machine = load_hardware(text)
    except PellucidError as error:
        if "no such machine" not in str(error):
            raise
        forms = "a name such as h200x8 or sm120x8-pcie, `this`, or a JSON file"
        raise PellucidError(f"--gpu {text}: no such GPU; give {forms}. Names: {', '.join(NAMES)}") from None
    if not machine.gpus:
        raise PellucidError(f"--gpu {text}: that machine has no GPU; name one, such as h200")
    if len(set(machine.gpus)) > 1:
        raise PellucidError(f"--gpu {text}: its GPUs differ, and the tracer simulates equal ones; name one kind")
    gpu = _simulated(machine.name, machine.gpus[0], len(machine.gpus), machine.link)
    cuda = gpu.cuda if machine.cuda is None else ".".join(map(str, machine.cuda))
    host = max(1, round(machine.cpu.memory_bytes / 2**30))
    return replace(gpu, label=machine.name, cuda=cuda, driver=machine.driver or gpu.driver, host_memory_gib=host)


_FACTS = {"cuda": r"\d+\.\d+", "driver": r"\d+(\.\d+)*", "memory": r"\d+", "host": r"\d+"}


def _with_facts(gpu: SimulatedGPU, facts: list[str]) -> SimulatedGPU:
    for fact in facts:
        key, _, value = fact.partition("=")
        if key not in _FACTS or not re.fullmatch(_FACTS[key], value):
            raise PellucidError(f"--gpu: {fact!r} is no fact; give cuda=12.8, driver=595.1, memory=MiB or host=GiB")
        gpu = replace(gpu, label=f"{gpu.label},{fact}")
        match key:
            case "cuda":
                gpu = replace(gpu, cuda=value)
            case "driver":
                gpu = replace(gpu, driver=value)
            case "memory":
                gpu = replace(gpu, memory_mib=int(value))
            case _:
                gpu = replace(gpu, host_memory_gib=int(value))
    return gpu
