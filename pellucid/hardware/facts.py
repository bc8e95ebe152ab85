"""`Hardware`: one machine as frozen facts. Made by `probe` or read from a fixture; selection reads nothing else.

No module here compares generations: a device is its explicit compute capability and its limits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pellucid.core import PellucidError


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU. `sm` is major*10 + minor of the compute capability; sizes are bytes.

    `smem_optin_bytes` is the most shared memory one block may ask for, as the driver reports it.
    """

    name: str
    sm: int
    memory_bytes: int
    smem_optin_bytes: int
    sm_count: int

    @property
    def capability(self) -> str:
        return format_sm(self.sm)


@dataclass(frozen=True, slots=True)
class CPU:
    """The host processor. `isa` holds the features our kernels can use; `memory_bytes` is what is installed."""

    name: str
    cores: int
    isa: tuple[str, ...]
    memory_bytes: int
    available_bytes: int
    compiler: str | None = None
    compiler_version: str | None = None


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one device of a machine can do: bytes read per second, dense bf16 operations per second, who says so.

    For stating floors; nothing is chosen by it.
    """

    read_bandwidth: float
    matrix_flops: float
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: its GPUs in the driver's order, how they are linked, and its software.

    `cuda` is the toolkit torch was built with, `nvcc` the compiler found. `packages` maps names to versions.
    """

    name: str
    cpu: CPU
    gpus: tuple[GPU, ...] = ()
    link: Literal["none", "pcie", "nvlink"] = "none"
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    nvcc: tuple[int, int] | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    speeds: Speeds | None = None

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    def describe(self) -> str:
        """One line for people: `8 x NVIDIA ... (SM 12.0, 95.6 GiB, 101376 bytes of ...) over pcie`."""
        if not self.gpus:
            isa = " ".join(self.cpu.isa) or "no vector features found"
            return f"{self.cpu.name}, {self.cpu.cores} cores, {format_bytes(self.cpu.memory_bytes)}, {isa}"
        kinds = [
            f"{self.gpus.count(gpu)} x {gpu.name} (SM {gpu.capability}, {format_bytes(gpu.memory_bytes)}, "
            f"{gpu.smem_optin_bytes} bytes of shared memory per block)"
            for gpu in dict.fromkeys(self.gpus)
        ]
        return " and ".join(kinds) + (f" over {self.link}" if len(self.gpus) > 1 else "")

    def fingerprint(self) -> Fingerprint:
        """What a measurement on this machine is valid for. Free memory and the machine's name are left out."""
        cpu = {"name": self.cpu.name, "cores": self.cpu.cores, "isa": self.cpu.isa}
        hard = {"gpus": [asdict(g) for g in self.gpus], "link": self.link, "cpu": cpu}
        soft = {
            "driver": self.driver,
            "cuda": self.cuda,
            "nvcc": self.nvcc,
            "packages": dict(sorted(self.packages.items())),
            "compiler": self.cpu.compiler_version,
        }
        return Fingerprint(_digest(hard), _digest(soft))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, readable by `hardware_from_json` and by `--hardware FILE`."""
        out = {**asdict(self), "packages": dict(sorted(self.packages.items()))}
        return json.loads(json.dumps(out))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`hard`: the devices; evidence from another is refused. `soft`: driver and versions; a change re-measures."""

    hard: str
    soft: str


def hardware_from_json(values: Mapping[str, Any], origin: str) -> Hardware:
    """The inverse of `Hardware.to_json`. Raises PellucidError naming `origin` and the field that is wrong."""
    try:
        cpu = CPU(**{**values["cpu"], "isa": tuple(values["cpu"]["isa"])})
        gpus = tuple(GPU(**gpu) for gpu in values.get("gpus", ()))
        rest = {k: v for k, v in values.items() if k not in ("cpu", "gpus")}
        for name in ("cuda", "nvcc"):
            if rest.get(name) is not None:
                major, minor = rest[name]
                rest[name] = (int(major), int(minor))
        rest["notes"] = tuple(rest.get("notes", ()))
        if rest.get("speeds") is not None:
            rest["speeds"] = Speeds(**rest["speeds"])
        return Hardware(cpu=cpu, gpus=gpus, **rest)
    except KeyError as error:
        raise PellucidError(f"{origin}: not a hardware description: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise PellucidError(f"{origin}: not a hardware description: {error}") from error


def format_sm(sm: int) -> str:
    """`120` as `12.0`."""
    return f"{sm // 10}.{sm % 10}"


def format_bytes(size: float) -> str:
    """Bytes as `95.6 GiB`, or `12.5 MiB` below one GiB."""
    return f"{size / 2**30:.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.1f} MiB"


def _digest(values: object) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
